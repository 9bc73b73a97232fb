"""The options of ``paraxis fit`` and ``paraxis predict``."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from paraxis.cli._errors import CommandError


@dataclasses.dataclass(frozen=True)
class CsvForm:
    """The format of a CSV file, and what becomes of what is wrong with it.

    Attributes:
        encoding: ``None``: UTF-8, or what a mark at its beginning says.
        delimiter: between the values of a row; one character, or ``tab``.
        decimal: in numbers between whole and fraction, ``.`` or ``,``. It may be the delimiter, too, where quotes are
            around such numbers.
        na_values: words that stand for a missing value in any column, beside the usual ones between numbers.
        uneven_rows: of more or fewer values than there are columns: ``fail``, or ``drop``.
        same_names: of several columns: ``fail``, or ``number``; not of CSV only.
        strip: words within numbers that are no part of them: ``%``, ``$``, or what sets thousands apart.
    """

    encoding: str | None = None
    delimiter: str = ","
    decimal: str = "."
    na_values: tuple[str, ...] = ()
    uneven_rows: str = "fail"
    same_names: str = "fail"
    strip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "delimiter", {"tab": "\t", "\\t": "\t"}.get(self.delimiter, self.delimiter))
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise CommandError(f"--encoding {self.encoding} is not known; write --encoding latin-1, say") from None
        if len(self.delimiter) != 1 or self.delimiter.isalnum() or self.delimiter in '"\r\n':
            raise CommandError(f"--delimiter {self.delimiter!r} must be one character, or tab; write --delimiter ';'")
        if self.decimal not in (".", ","):
            raise CommandError(f"--decimal {self.decimal!r} must be '.' or ','; write --decimal ','")
        for word in self.strip:
            if not word or any(mark.isdigit() or mark in f"+-(){self.decimal}" for mark in word):
                raise CommandError(f"--strip {word!r} is part of numbers; write --strip '%', say")


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """Options of ``paraxis fit``.

    Attributes:
        data: the file.
        target: the column to predict.
        objective: ``auto``, ``logistic``, ``squared`` or ``poisson``.
        penalty: ``none``, ``l2``, ``l1`` or ``elastic-net``.
        strength: of the penalty beside the mean loss, for columns on the scale of 1; ``None``: one over the rows.
        strengths: a grid to choose it from by cross-validation; ``None``: there is none.
        folds: of the cross-validation.
        l1_ratio: which part of an elastic net is L1.
        missing: ``fail``, ``drop-rows`` or ``mean``.
        text: ``fail``, ``drop`` or ``one-hot``.
        ignore: columns to leave out.
        id: columns that name the rows: left out, too, and written beside predictions.
        weights: the column that says how much each row counts; ``None``: all the same.
        class_weight: ``LABEL=NUMBER`` each, factors of the weights; or ``balanced``.
        test_fraction: which part of the rows is held out.
        seed: of the order in which rows are dealt out.
        devices: number of devices; ``None``: all there are.
        float32: whether to compute in float32.
        tol: the error of a solution; ``None``: as small as the precision allows with certainty.
        max_iterations: how many are allowed.
        out: directory for what is written.
        force: whether an earlier fit there may go.
        stream: the memory for rows that are read a part at a time, in bytes or such as ``2GB``; ``None``: all rows are
            held.
        stream_folder: where the solver's run is saved meanwhile, so that the same command goes on with it.
        csv: how the file is written, if it is CSV.
    """

    data: Path
    target: str
    objective: str = "auto"
    penalty: str = "l2"
    strength: float | None = None
    strengths: tuple[float, ...] | None = None
    folds: int = 5
    l1_ratio: float = 0.5
    missing: str = "fail"
    text: str = "fail"
    ignore: Sequence[str] = ()
    id: Sequence[str] = ()
    weights: str | None = None
    class_weight: Sequence[str] = ()
    test_fraction: float = 0.2
    seed: int = 0
    devices: int | None = None
    float32: bool = False
    tol: float | None = None
    max_iterations: int = 10_000
    out: Path = Path("paraxis-fit")
    force: bool = False
    stream: str | None = None
    stream_folder: Path | None = None
    csv: CsvForm = CsvForm()

    def __post_init__(self) -> None:
        if self.strength is not None and not 0 <= self.strength < math.inf:
            raise CommandError(
                f"--strength {self.strength:g} must be finite and not negative; write --strength 0.1, or leave it out"
            )
        if self.tol is not None and not 0 < self.tol < math.inf:
            raise CommandError(f"--tol {self.tol:g} must be finite and above 0; write --tol 1e-6, or leave it out")
        if not 0 <= self.l1_ratio <= 1:
            raise CommandError(f"--l1-ratio {self.l1_ratio:g} must be from 0 to 1; write --l1-ratio 0.5")
        if not 0 <= self.test_fraction <= 0.9:
            raise CommandError(
                f"--test-fraction {self.test_fraction:g} must be from 0 to 0.9; write --test-fraction 0.2"
            )
        if self.strength is not None and self.strengths is not None:
            raise CommandError("--strength is one number and --strengths a grid to choose from; give one of them")
        if self.stream_folder is not None and self.stream is None:
            raise CommandError("--stream-folder is for --stream; write --stream 2GB, or leave it out")
        if self.stream_folder is not None and self.stream_folder.resolve().is_relative_to(self.out.resolve()):
            raise CommandError(
                f"--stream-folder {self.stream_folder} must not be in --out {self.out}, which holds the model alone; "
                f"write --stream-folder {self.out}-run"
            )
        if self.stream is not None and self.strengths is not None:
            raise CommandError(
                f"--strengths needs all rows in memory, for cross-validation; write --strength {self.strengths[0]:g} "
                f"for one of them at a time, or leave out --stream"
            )
        if self.penalty == "none" and (self.strength or self.strengths):
            raise CommandError("--penalty none has no strength; write --penalty l2, or leave the strength out")


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """Options of ``paraxis predict``.

    Attributes:
        model: ``model.npz``, or the directory that holds it.
        data: the file with the rows.
        out: file for the predictions, by its suffix CSV or Parquet; ``None``: print the first.
        probabilities: whether to tell the probability of each class, too.
        missing: ``fail`` or ``mean``; ``None``: ``mean`` if the model was fitted so.
        keep: columns of the file to write beside the predictions.
        force: whether a file at ``out`` may go.
        stream: whether the rows are read, and their predictions written, a part at a time.
        csv: how the file is written, if it is CSV.
        as_fitted: how the model's was; a command line leaves out what is the same.
    """

    model: Path
    data: Path
    out: Path | None = None
    probabilities: bool = False
    missing: str | None = None
    keep: Sequence[str] = ()
    force: bool = False
    stream: bool = False
    csv: CsvForm = CsvForm()
    as_fitted: CsvForm = CsvForm()


def grid_of(text: str | None) -> tuple[float, ...] | None:
    """Return the numbers of ``0.01,0.1,1``.

    Raises:
        CommandError: if they are none, or negative.
    """
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"--strengths {text!r} is no list of numbers; write --strengths 0.01,0.1,1") from None
    if not all(0 <= number < float("inf") for number in found):
        raise CommandError(f"--strengths {text!r} must be finite and not negative; write --strengths 0.01,0.1,1")
    return found
