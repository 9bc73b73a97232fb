"""``paraxis explain``: a report on a function of the user's, on as many simulated devices as asked for."""

from paraxis.cli.explain._explain import run_explain

__all__ = ["run_explain"]
