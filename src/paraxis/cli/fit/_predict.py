"""``paraxis predict``: what a saved model says of the rows of a file. NumPy only: no devices are started."""

import os.path
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table as Grid

from paraxis._host import files
from paraxis.cli._errors import CommandError, printable
from paraxis.cli._places import require_creatable, unused
from paraxis.cli.fit import _columns as columns
from paraxis.cli.fit._grids import metrics_grid, titled
from paraxis.cli.fit._metrics import log_probabilities, measured
from paraxis.cli.fit._model import Model, load
from paraxis.cli.fit._options import PredictOptions
from paraxis.cli.fit._settling import settled
from paraxis.cli.fit._tables import Table, digest_of, quoted, read_table, write_table
from paraxis.cli.fit._targets import UNKNOWN
from paraxis.cli.fit._values import Column

_SUFFIXES = (".csv", ".parquet")
_SHOWN = 10


def run_predict(options: PredictOptions, console: Console) -> None:
    """Predict the rows of a file; prints the first predictions, or writes them all.

    Raises:
        CommandError: if the model, the file or an option cannot be used; then nothing is written.
    """
    model = load(options.model)

    def note(text: str) -> None:
        console.print(f"[yellow]note[/] {escape(printable(text))}", highlight=False)

    table, kept, notes = settled(options, lambda options: _checked(options, model))
    for text in notes:
        note(text)
    z = model.linear(table)
    found: dict[str, Column | np.ndarray] = {name: table.columns[name] for name in kept}
    found = {"row": table.numbers, **found, "prediction": model.predicted(z)}
    if options.probabilities:
        shares = np.exp(log_probabilities(z))
        found |= {f"probability_{label}": shares[:, i] for i, label in enumerate(model.target.classes)}
    if options.out is None:
        console.print(_first(found))
    else:
        _write(options.out, found)
    if model.about.get("digest") == digest_of(options.data):
        note(
            f"{options.data} is the file that the model was fitted to, with {model.about['rows']:,} of its rows: this "
            "does not show how well it predicts others"
        )
    if model.target.name in table.columns:
        _compare(model, table, z, console, note)
    if options.out is not None:
        console.print(f"Written to {options.out}: {table.num_rows:,} predictions", markup=False, highlight=False)
    elif table.num_rows > _SHOWN:
        rest = table.num_rows - _SHOWN
        console.print(f"{rest:,} more; for all of them, write --out predictions.csv", highlight=False)


def _require_options(options: PredictOptions, model: Model) -> None:
    if options.probabilities and model.target.objective != "logistic":
        raise CommandError(
            f"--probabilities needs classes, but the model predicts values of {model.target.name!r}",
            remedies=[{"probabilities": False}],
        )
    out = options.out
    if out is None:
        return
    if out.suffix.lower() not in _SUFFIXES:
        raise CommandError(
            f"--out {out} must end in {' or '.join(_SUFFIXES)}", remedies=[{"out": out.with_name(f"{out.name}.csv")}]
        )
    require_creatable(out)
    if out.is_dir():
        inside = out / "predictions.csv"
        raise CommandError(f"--out {out} is a directory; write --out {inside}", remedies=[{"out": inside}])
    if out.exists() and any(
        place.is_file() and os.path.samefile(out, place) for place in (options.data, options.model)
    ):
        raise CommandError(f"--out {out} is a file that is read; give another one", remedies=[{"out": unused(out)}])
    if os.path.lexists(out) and not options.force:
        raise CommandError(
            f"--out {out} is there; write --force to replace it, or --out {unused(out)}",
            remedies=[{"out": unused(out)}],
        )


def _checked(options: PredictOptions, model: Model) -> tuple[Table, list[str], list[str]]:
    """Return the file, the columns to write beside predictions, and notes of what was made of it.

    Raises:
        CommandError: at the first thing that cannot be, with what would settle it.
    """
    _require_options(options, model)
    notes: list[str] = []
    note = notes.append
    names, target = model.recipe.columns, model.target
    texts = set(model.recipe.text_columns)
    as_text = texts | ({target.name} if target.kind == "text" else set())
    as_text |= {name for name in (*model.id, *options.keep) if name not in names and name != target.name}
    table = read_table(options.data, options.csv, as_text=as_text)
    notes += table.notes
    table.required(names, "column")
    kept = [*_id_columns(options, model, table, note), *options.keep]
    _require_keepable(options, model, table)
    extra = [name for name in table.columns if name not in (*names, *model.id, *kept, target.name, model.weights)]
    if extra:
        note(f"the model does not use {quoted(extra)}")
    columns.require_no_marks(
        table, [table.columns[name] for name in names if name not in texts and _is_text(table, name)]
    )
    for name in names:
        column = table.columns[name]
        if column.kind == "other" or (column.kind == "text" and name not in texts):
            raise CommandError(
                f"column {name!r} of {table.path} holds {column.stored}, but the model was fitted to numbers"
                if name not in texts
                else f"column {name!r} of {table.path} holds {column.stored}, but the model was fitted to text"
            )
    columns.tell_of_marks(table, [name for name in names if name not in texts], note)
    columns.require_finite(table, names)
    fills = model.fills if options.missing is None else options.missing == "mean"
    if not fills:
        advice = "write --missing mean to put the mean of the rows that were fitted to in their place"
        columns.require_present(table, names, advice, {"missing": "mean"})
    for name, levels in columns.unknown_levels(model.recipe, table).items():
        note(
            f"column {name!r} holds text that the model has not seen, {quoted(levels)}; it counts as none of the levels"
        )
    return table, kept, notes


def _is_text(table: Table, name: str) -> bool:
    return table.columns[name].kind == "text"


def _written(model: Model) -> set[str]:
    """Return the columns of predictions that are not the file's."""
    return {"row", "prediction"} | {f"probability_{label}" for label in model.target.classes}


def _id_columns(options: PredictOptions, model: Model, table: Table, note: Callable[[str], None]) -> list[str]:
    """Return the columns that name the rows; says where one cannot be written."""
    wanted = [name for name in model.id if name not in options.keep]
    if absent := [name for name in wanted if name not in table.columns]:
        note(f"{table.path} has no id column {quoted(absent)}: predictions are told apart by the number of their row")
    there = [name for name in wanted if name in table.columns]
    if taken := [name for name in there if name in _written(model)]:
        note(f"id column {quoted(taken)} is not written, as predictions have a column of that name: rename it")
    return [name for name in there if name not in taken and table.columns[name].kind != "other"]


def _require_keepable(options: PredictOptions, model: Model, table: Table) -> None:
    table.required(options.keep, "column to keep", "keep")
    for name in options.keep:
        if name in _written(model) or options.keep.count(name) > 1:
            raise CommandError(
                f"--keep {name}: another column that is written has this name; rename it in {table.path}"
            )
        if table.columns[name].kind == "other":
            raise CommandError(f"--keep {name}: it holds {table.columns[name].stored}; keep numbers or text")


def _write(out: Path, found: dict[str, Column | np.ndarray]) -> None:
    try:
        with files.replaced(out) as file:
            write_table(file, out.suffix.lower(), found)
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise CommandError(f"--out {out} cannot be written to: {reason or error}") from None


def _first(found: dict[str, Column | np.ndarray]) -> Group:
    grid = Grid()
    for name in found:
        grid.add_column(escape(printable(name)), justify="right")
    columns = [values.shown() if isinstance(values, Column) else values[:_SHOWN] for values in found.values()]
    for row in zip(*([_shown(value) for value in values[:_SHOWN]] for values in columns), strict=True):
        grid.add_row(*row)
    return titled("Predictions", grid)


def _shown(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else escape(printable(str(value)))


def _compare(model: Model, table: Table, z: np.ndarray, console: Console, note: Callable[[str], None]) -> None:
    """Print the metrics, on the rows whose target is known and could have been predicted."""
    column = table.columns[model.target.name]
    objective = model.target.objective
    if column.kind == "other" or (objective != "logistic" and column.kind == "text"):
        note(f"the target {column.name!r} holds {column.stored} here: there are no metrics")
        return
    y = model.target.encoded(column)
    known = ~column.missing & (np.isfinite(column.values) if column.kind == "number" else True)
    if objective == "logistic":
        known = known & (y != UNKNOWN)
    if objective == "poisson":
        known = known & (y >= 0)
    if not known.all():
        note(f"{_have(~known)} no target that the model could have predicted, and no part in the metrics")
    weight, where = _weights(model, table, known, note), ""
    if weight is not None:
        where = f", weighted by {model.weights!r}"
        known = known & np.isfinite(weight) & (weight >= 0)
    if known.any():
        metrics = {"model": measured(objective, z[known], y[known], None if weight is None else weight[known])}
        console.print(metrics_grid(f"On {int(known.sum()):,} rows{where}, beside {column.name!r}", metrics))


def _weights(model: Model, table: Table, known: np.ndarray, note: Callable[[str], None]) -> np.ndarray | None:
    """Return how much each row counts in the metrics, as it did in those of the fit; says where it cannot be told."""
    name = model.weights
    if name is None:
        return None
    column = table.columns.get(name)
    if column is None or not column.is_number:
        why = "is not there" if column is None else f"holds {column.stored} here"
        note(f"the column of weights that the model was fitted with, {name!r}, {why}: all rows count the same")
        return None
    weight = column.numbers
    usable = np.isfinite(weight) & (weight >= 0)
    if not weight[known & usable].any():
        note(
            f"the column of weights that the model was fitted with, {name!r}, has none above 0: all rows count the same"
        )
        return None
    if (known & ~usable).any():
        note(f"{_have(known & ~usable)} no weight that is finite and not negative, and no part in the metrics")
    return weight


def _have(rows: np.ndarray) -> str:
    count = int(rows.sum())
    return "1 row has" if count == 1 else f"{count:,} rows have"
