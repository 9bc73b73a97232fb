"""The directory that ``paraxis fit`` writes: there whole, or as it was."""

import csv
import os.path
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paraxis._host import files
from paraxis.cli._errors import CommandError, Remedy
from paraxis.cli._places import require_creatable, unused
from paraxis.cli.fit._display import draw
from paraxis.cli.fit._grids import coefficient_rows
from paraxis.cli.fit._model import FILE_NAME, Model, is_model, save
from paraxis.cli.fit._report import Report, page
from paraxis.cli.fit._tables import quoted
from paraxis.solve import Iteration

_COEFFICIENTS, _PLOT, _REPORT = "coefficients.csv", "fit.png", "report.html"
NAMES = (_COEFFICIENTS, _PLOT, FILE_NAME, _REPORT)


def require_place(out: Path, data: Path, force: bool) -> None:
    """Check, before the work, that the directory can be written and that only our own files would go.

    Args:
        out: the directory.
        data: the file that is read; it must not be in it.
        force: whether an earlier fit may go.

    Raises:
        CommandError: if not.
    """
    files.put_back(out, lambda left: is_model(left / FILE_NAME))
    require_creatable(out)
    place = out.resolve()
    # A link to the data would go, too.
    if out.is_dir() and any(file.is_relative_to(place) for file in (data.resolve(), data.parent.resolve() / data.name)):
        raise CommandError(
            f"--out {out} holds the data, {data}, and is replaced as a whole; give a directory of its own: "
            f"--out {out / 'fit'}",
            remedies=_own(out),
        )
    if Path.cwd().is_relative_to(place):
        raise CommandError(
            f"--out {out} is the working directory, or holds it, and is replaced as a whole; give a directory of its "
            f"own: --out {out / 'fit'}",
            remedies=_own(out),
        )
    if os.path.ismount(place):
        raise CommandError(
            f"--out {out} is a mount point, which cannot be replaced; write --out {out / 'fit'}", remedies=_own(out)
        )
    if out.exists():
        _require_ours(out, out, force)


def write_all(out: Path, force: bool, model: Model, report: Report, history: Sequence[Iteration], smooth: bool) -> None:
    """Write coefficients, plot, report and model; an old directory stays until they are whole.

    Args:
        out: the directory.
        force: whether an earlier fit may go.
        model: what was fitted.
        report: what there is to tell of it.
        history: the iterations.
        smooth: whether the objective is.

    Raises:
        CommandError: if the disk is full or the like, or if there is by now what is not ours.
    """
    try:
        with files.replaced_directory(out.resolve(), lambda old: _require_ours(old, out, force)) as directory:
            _write_coefficients(model, report.errors.values, directory / _COEFFICIENTS)
            draw(history, smooth, directory / _PLOT)
            (directory / _REPORT).write_text(page(report, model, directory / _PLOT), encoding="utf-8")
            save(model, directory / FILE_NAME)
    except OSError as error:
        raise CommandError(f"--out {out} cannot be written to: {error.strerror or error}") from None


def _require_ours(place: Path, out: Path, force: bool) -> None:
    """Check that all in a place, be it still called ``out`` or not, was written by :func:`write_all`, and may go.

    Raises:
        CommandError: if not.
    """
    if not place.is_dir():
        raise CommandError(f"--out {out} is a file; give a directory")
    found = sorted(place.iterdir())
    strange = [path.name for path in found if path.name not in NAMES or not path.is_file()]
    if strange:
        raise CommandError(
            f"--out {out} holds other things, {quoted(strange)}; give a directory of its own: --out {out / 'fit'}",
            remedies=_own(out),
        )
    if found and not is_model(place / FILE_NAME):
        raise CommandError(
            f"--out {out} holds {quoted(path.name for path in found)}, but no {FILE_NAME} of paraxis fit; give a "
            f"directory of its own: --out {out / 'fit'}",
            remedies=_own(out),
        )
    if found and not force:
        raise CommandError(
            f"--out {out} holds an earlier fit; write --force to replace it, or --out {unused(out)}",
            remedies=[{"out": unused(out)}],
        )


def _own(out: Path) -> list[Remedy]:
    """Return a place for ours only, within one that holds other things."""
    own = out / "fit"
    return [{"out": unused(own) if os.path.lexists(own) else own}]


def _write_coefficients(model: Model, errors: np.ndarray | None, path: Path) -> None:
    several = len(model.coef) > 1
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        headings = ["column", "coefficient", "per_standard_deviation", "standard_error"]
        writer.writerow(["class", *headings] if several else headings)
        for label, *row, error in coefficient_rows(model, errors):
            cells = [*row, "" if errors is None else error]
            writer.writerow([label, *cells] if several else cells)
