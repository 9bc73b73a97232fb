"""``paraxis predict``: what a saved model says of the rows of a file. NumPy only: no devices are started."""

import collections
import contextlib
import dataclasses
import functools
import os.path
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table as Grid

from paraxis._host import files
from paraxis._tables import kind_at
from paraxis.cli._errors import CommandError, printable
from paraxis.cli._places import require_creatable, unused
from paraxis.cli.fit import _columns as columns
from paraxis.cli.fit._grids import metrics_grid, titled
from paraxis.cli.fit._metrics import Measures, log_probabilities
from paraxis.cli.fit._model import FILE_NAME, Model, is_model, load, remembered
from paraxis.cli.fit._options import CsvForm, PredictOptions
from paraxis.cli.fit._parts import Parts
from paraxis.cli.fit._settling import command_line, form_words, settled
from paraxis.cli.fit._tables import Table, Writer, digest_of, quoted, read_table
from paraxis.cli.fit._targets import UNKNOWN
from paraxis.cli.fit._values import Column

_SUFFIXES = (".csv", ".parquet")
_SHOWN = 10
_MOST_UNKNOWN = 50  # levels of a text that are remembered, to be told


def run_predict(options: PredictOptions, given: Mapping[str, Any], console: Console) -> None:
    """Predict the rows of a file; prints the first predictions, or writes them all.

    Args:
        options: of the command.
        given: what it says of how a CSV file is written; the rest is as in the fit.
        console: where to.

    Raises:
        CommandError: if the model, the file or an option cannot be used; then nothing is written.
    """
    _require_order(options)
    model = load(options.model)

    def note(text: str) -> None:
        console.print(f"[yellow]note[/] {escape(printable(text))}", highlight=False)

    if kind_at(options.data) == "csv":
        # What sets thousands apart goes with the decimal point.
        apart = {"strip": ()} if given.get("decimal", model.form.decimal) != model.form.decimal else {}
        fitted = dataclasses.replace(model.form, **apart)
        options = dataclasses.replace(options, csv=dataclasses.replace(fitted, **given), as_fitted=fitted)
    work = settled(options, lambda options: _prepared(options, model))
    if remembered(options.csv) == options.as_fitted != CsvForm():
        note(f"{options.data} is read as the model's file was: {form_words(options.as_fitted)}")
    elif taken := form_words(remembered(options.csv), without=given):
        note(f"{options.data} is read as the model's file was where no option says otherwise: {taken}")
    for text in work.notes:
        note(text)
    compared = _Comparison(model)
    num_rows = 0
    with _written(options.out) as write:
        for table in work.parts():
            z = model.linear(table)
            found = _found(options, model, table, work, z)
            if options.out is None and not num_rows:
                console.print(_first(found))
            write(found)
            if model.target.name in table.columns:
                compared.add(table, z)
            num_rows += table.num_rows
    if model.about.get("digest") == digest_of(options.data):
        note(
            f"{options.data} is the file that the model was fitted to, with {model.about['rows']:,} of its rows: this "
            "does not show how well it predicts others"
        )
    compared.tell(console, note)
    if options.out is not None:
        console.print(f"Written to {options.out}: {num_rows:,} predictions", markup=False, highlight=False)
    elif num_rows > _SHOWN:
        rest = num_rows - _SHOWN
        console.print(f"{rest:,} more; for all of them, write --out predictions.csv", highlight=False)


def _found(
    options: PredictOptions, model: Model, table: Table, work: "_Work", z: np.ndarray
) -> dict[str, Column | np.ndarray]:
    """Return the columns to write."""
    found: dict[str, Column | np.ndarray] = {
        name: table.columns[name].of_type(work.type_of(name)) for name in work.kept
    }
    found = {"row": table.numbers, **found, "prediction": model.predicted(z)}
    if options.probabilities:
        shares = np.exp(log_probabilities(z))
        found |= {f"probability_{label}": shares[:, i] for i, label in enumerate(model.target.classes)}
    return found


def _require_order(options: PredictOptions) -> None:
    """Refuse a model and a file that were given the other way round."""
    model, data = (place / FILE_NAME if place.is_dir() else place for place in (options.model, options.data))
    if not is_model(model) and is_model(data):
        other = dataclasses.replace(options, model=options.data, data=options.model)
        raise CommandError(
            f"{options.data} is a model of paraxis fit, which comes first: paraxis predict MODEL DATA",
            command=("this is that order:", command_line(other)),
        )


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


class _Work(NamedTuple):
    """Rows that were read and checked, before they are predicted.

    Args:
        parts: yields the tables that they are in.
        kept: columns to write beside predictions.
        types: of each of these, the types that it has in different parts, where it is not missing.
        notes: what was made of the rows.
    """

    parts: Callable[[], Iterator[Table]]
    kept: list[str]
    types: dict[str, set[np.dtype]]
    notes: list[str]

    @property
    def mixed(self) -> set[str]:
        """The columns that are text or truth values in one part, and not in another."""
        return {name for name, own in self.types.items() if len(own) > 1 and {dtype.kind for dtype in own} & {"O", "b"}}

    def type_of(self, name: str) -> np.dtype:
        """Return the type of a column in all parts."""
        return np.result_type(*self.types[name] or {np.dtype(np.float64)})


def _prepared(options: PredictOptions, model: Model) -> _Work:
    """Read the file and check it.

    Raises:
        CommandError: at the first thing that cannot be, with what would settle it.
    """
    _require_options(options, model)
    target, texts = model.target, set(model.recipe.text_columns)
    as_numbers = {name for name in (*model.recipe.columns, model.weights) if name is not None} - texts
    as_numbers |= {target.name} if target.kind != "text" else set()
    if not options.stream:
        table = read_table(options.data, options.csv, as_text=_AllBut(as_numbers))
        return _looked_at(options, model, lambda: iter([table]))
    files_of = Parts(options.data, options.csv, "paraxis predict")
    while True:  # once more, if a column turns out to hold text in some parts only
        work = _looked_at(options, model, functools.partial(files_of.read, _AllBut(as_numbers)))
        if not work.mixed & as_numbers:
            return work
        as_numbers = as_numbers - work.mixed


@dataclasses.dataclass(frozen=True)
class _AllBut:
    """All names but some."""

    names: set[str]

    def __contains__(self, name: object) -> bool:
        return name not in self.names


def _looked_at(options: PredictOptions, model: Model, parts: Callable[[], Iterator[Table]]) -> _Work:
    """Read all parts once, and check them."""
    notes: dict[str, None] = {}
    beyond: dict[str, None] = {}
    unknown: dict[str, set[str]] = {}
    kept: list[str] | None = None
    types: dict[str, set[np.dtype]] = {}
    missing = collections.Counter[str]()
    for part in parts():
        own = _checked(options, model, part, notes.setdefault, beyond.setdefault)
        if beyond:
            continue
        kept = own if kept is None else kept
        missing.update(columns.missing_in(part, model.recipe.columns))
        for name in kept:
            column = part.columns[name]
            types.setdefault(name, set()).update([] if column.missing.all() else [column.values.dtype])
        for name, levels in columns.unknown_levels(model.recipe, part).items():
            seen = unknown.setdefault(name, set())
            seen.update(levels[: max(0, _MOST_UNKNOWN - len(seen))])
    if beyond:
        raise CommandError(*beyond)
    columns.tell_of_filled(missing, model.recipe.columns, "the mean of the rows that were fitted to", notes.setdefault)
    for name, levels in unknown.items():
        notes.setdefault(
            f"column {name!r} holds text that the model has not seen, {quoted(sorted(levels))}; it counts as none of "
            f"the levels"
        )
    return _Work(parts, kept or [], types, [*notes])


def _checked(
    options: PredictOptions,
    model: Model,
    table: Table,
    note: Callable[[str], None],
    refuse: Callable[[str], None],
) -> list[str]:
    """Check rows; return the columns to write beside predictions.

    What no option settles is refused when the rest has been looked at.

    Raises:
        CommandError: at the first thing that an option settles.
    """
    target = model.target
    texts = set(model.recipe.text_columns)
    for text in table.notes:
        note(text)
    try:
        table.required(model.recipe.columns, "column")
    except CommandError as error:
        if error.remedies:
            raise
        refuse(str(error))
    names = [name for name in model.recipe.columns if name in table.columns]
    kept = [*_id_columns(options, model, table, note), *options.keep]
    _require_keepable(options, model, table, refuse)
    extra = [name for name in table.columns if name not in (*names, *model.id, *kept, target.name, model.weights)]
    if extra:
        note(f"the model does not use {quoted(extra)}")
    columns.require_no_marks(
        table, [table.columns[name] for name in names if name not in texts and _is_text(table, name)]
    )
    for name in names:
        column = table.columns[name]
        if column.kind == "other" or (column.kind == "text" and name not in texts):
            needed = "text" if name in texts else "numbers"
            refuse(f"column {name!r} of {table.path} holds {column.stored}, but the model was fitted to {needed}")
    columns.tell_of_marks(table, [name for name in names if name not in texts], note)
    columns.require_finite(table, names, is_part=options.stream)
    fills = model.fills if options.missing is None else options.missing == "mean"
    if not fills:
        advice = "write --missing mean to put the mean of the rows that were fitted to in their place"
        columns.require_present(table, names, advice, {"missing": "mean"}, is_part=options.stream)
    return kept


def _is_text(table: Table, name: str) -> bool:
    return table.columns[name].kind == "text"


def _own_columns(model: Model) -> set[str]:
    """Return the columns of predictions that are not the file's."""
    return {"row", "prediction"} | {f"probability_{label}" for label in model.target.classes}


def _id_columns(options: PredictOptions, model: Model, table: Table, note: Callable[[str], None]) -> list[str]:
    """Return the columns that name the rows; says where one cannot be written."""
    wanted = [name for name in model.id if name not in options.keep]
    if absent := [name for name in wanted if name not in table.columns]:
        note(f"{table.path} has no id column {quoted(absent)}: predictions are told apart by the number of their row")
    there = [name for name in wanted if name in table.columns]
    if taken := [name for name in there if name in _own_columns(model)]:
        note(f"id column {quoted(taken)} is not written, as predictions have a column of that name: rename it")
    return [name for name in there if name not in taken and table.columns[name].kind != "other"]


def _require_keepable(options: PredictOptions, model: Model, table: Table, refuse: Callable[[str], None]) -> None:
    table.required(options.keep, "column to keep", "keep")
    for name in options.keep:
        if name in _own_columns(model) or options.keep.count(name) > 1:
            refuse(f"--keep {name}: another column that is written has this name; rename it in {table.path}")
        if table.columns[name].kind == "other":
            refuse(f"--keep {name}: it holds {table.columns[name].stored}; keep numbers or text")


@contextlib.contextmanager
def _written(out: Path | None) -> Iterator[Callable[[dict[str, Column | np.ndarray]], None]]:
    """Give what writes rows into a file, which is there when all are written; or nowhere."""
    if out is None:
        yield lambda found: None
        return
    try:
        with files.replaced(out) as file, contextlib.closing(Writer(file, out.suffix.lower())) as writer:
            yield writer.write
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


class _Comparison:
    """The metrics, on the rows whose target is known and could have been predicted."""

    def __init__(self, model: Model) -> None:
        objective = model.target.objective
        self._model, self._plain, self._weighted = model, Measures(objective), Measures(objective)
        self._unknown = self._weightless = 0
        self._refused = self._unweighted = ""

    def add(self, table: Table, z: np.ndarray) -> None:
        """Count in the rows of a table that has the target."""
        column = table.columns[self._model.target.name]
        objective = self._model.target.objective
        if column.kind == "other" or (objective != "logistic" and column.kind == "text"):
            self._refused = f"the target {column.name!r} holds {column.stored} here: there are no metrics"
            return
        y = self._model.target.encoded(column)
        known = ~column.missing & (np.isfinite(column.values) if column.kind == "number" else True)
        if objective == "logistic":
            known = known & (y != UNKNOWN)
        if objective == "poisson":
            known = known & (y >= 0)
        self._unknown += int((~known).sum())
        self._plain.add(z[known], y[known])
        if self._model.weights is None:
            return
        weights = table.columns.get(self._model.weights)
        if weights is None or not weights.is_number:
            self._unweighted = "is not there" if weights is None else f"holds {weights.stored} here"
            return
        usable = np.isfinite(weights.numbers) & (weights.numbers >= 0)
        self._weightless += int((known & ~usable).sum())
        known = known & usable
        self._weighted.add(z[known], y[known], weights.numbers[known])

    def tell(self, console: Console, note: Callable[[str], None]) -> None:
        """Print the metrics, and which rows have no part in them."""
        if self._refused:
            note(self._refused)
            return
        if self._unknown:
            note(f"{_have(self._unknown)} no target that the model could have predicted, and no part in the metrics")
        found, where = self._plain, ""
        if self._model.weights is not None and self._plain.num_rows + self._unknown:
            found, where = self._by_weight(note)
        if found.num_rows:
            title = f"On {found.num_rows:,} rows{where}, beside {self._model.target.name!r}"
            console.print(metrics_grid(title, {"model": found.metrics}))

    def _by_weight(self, note: Callable[[str], None]) -> tuple[Measures, str]:
        """Return the metrics weighted as those of the fit were; says where that cannot be."""
        which = f"the column of weights that the model was fitted with, {self._model.weights!r},"
        if self._unweighted:
            note(f"{which} {self._unweighted}: all rows count the same")
            return self._plain, ""
        if not self._weighted.total:
            note(f"{which} has none above 0: all rows count the same")
            return self._plain, ""
        if self._weightless:
            note(f"{_have(self._weightless)} no weight that is finite and not negative, and no part in the metrics")
        return self._weighted, f", weighted by {self._model.weights!r}"


def _have(count: int) -> str:
    return "1 row has" if count == 1 else f"{count:,} rows have"
