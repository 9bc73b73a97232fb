"""``paraxis fit`` and ``paraxis predict``: a linear model from a file, and what it says of the rows of another."""

from paraxis.cli.fit._options import CsvForm, FitOptions, PredictOptions, grid_of

__all__ = ["CsvForm", "FitOptions", "PredictOptions", "grid_of"]
