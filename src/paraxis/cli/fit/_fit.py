"""``paraxis fit``: read, check, hold out, fit, report, and only then write."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from sklearn.model_selection import train_test_split

from paraxis._host import processes
from paraxis.cli._devices import describe, find_devices
from paraxis.cli._errors import CommandError, Remedy, StoppedError, printable
from paraxis.cli.fit import (
    _columns as columns,
    _grids as grids,
    _standard_errors as standard_errors,
    _targets as targets,
    _weights as weights,
)
from paraxis.cli.fit._display import Live, told_of_reading, value_name
from paraxis.cli.fit._metrics import measured, trivial
from paraxis.cli.fit._model import Model, remembered
from paraxis.cli.fit._options import CsvForm, FitOptions
from paraxis.cli.fit._output import NAMES, require_place, write_all
from paraxis.cli.fit._parts import Parts
from paraxis.cli.fit._report import Report
from paraxis.cli.fit._rows import Design, Held, Rows
from paraxis.cli.fit._settling import command_line, settled, shell_word
from paraxis.cli.fit._solving import SCORES, Solved, Solver, Validated, solve, validate
from paraxis.cli.fit._survey import Passes, Rules, Survey, surveyed
from paraxis.cli.fit._tables import Table, digest_of, quoted, read_table
from paraxis.launch import initialize
from paraxis.solve import Status

_NUMBERS_ROWS = "what numbers the rows is not to predict from"
_DROP = "write --missing drop-rows"
_ENOUGH = 50  # rows, of which all are seldom predicted right
_ADVICE = f"{_DROP}, or --missing mean to put the column's mean in their place"
_PENALISED: dict[str, Remedy] = {
    "penalty": {"penalty": "l2"},
    "strength": {"strength": 0.1},
    "strengths": {"strengths": lambda _: (0.01, 0.1, 1.0)},
}


_Note = Callable[[str], None]
_Read = Callable[[Path, CsvForm, frozenset[str]], Table]


class _Work(NamedTuple):
    """A file that was read and checked, before it is fitted.

    Args:
        rows: those of the file, without those that are left out.
        num_rows: how many.
        names: all columns of the file.
        target: what to predict.
        reason: why with this objective.
        y: the target, encoded, ``(num_rows,)``.
        weight: of the rows; ``None``: they count the same.
        train, test: the numbers of the rows to fit to, and of those held out.
        recipe: of the model's columns.
        solver: for one device.
        notes: what to tell of all this.
    """

    rows: Rows
    num_rows: int
    names: list[str]
    target: targets.Target
    reason: str
    y: np.ndarray
    weight: weights.Weight | None
    train: np.ndarray
    test: np.ndarray
    recipe: columns.Recipe
    solver: Solver
    notes: list[str]


def run_fit(options: FitOptions, console: Console) -> None:
    """Fit a model to a file; writes ``coefficients.csv``, ``fit.png`` and ``model.npz`` when all is done.

    Raises:
        CommandError: if the file or an option cannot be used; then nothing is written.
        StoppedError: after Ctrl-C; if the solver was at work by then, what it had found is written.
    """
    place = initialize()
    if place.process:  # the first of several processes shows, and writes, for all
        console = Console(quiet=True)

    if options.stream is not None and place.num_processes > 1:
        raise CommandError("--stream reads rows in one process; leave out paraxis launch, or --stream")

    def note(text: str) -> None:
        console.print(f"[yellow]note[/] {escape(printable(text))}", highlight=False)

    with _nothing_written(options.out):
        with told_of_reading(options.data, quiet=place.process > 0):
            read, passes = _reader(), Passes()
            work = settled(options, lambda options: _prepared(options, read, passes))
        for text in work.notes:
            note(text)
        fitted = None if work.weight is None else work.weight.fitted(work.train)
        y, test, recipe = work.y[work.train], work.test, work.recipe
        find_devices(options.devices or 1)
        devices = jax.devices()[: options.devices or None]
        if len({device.process_index for device in devices}) < place.num_processes:
            raise CommandError(
                f"--devices {options.devices} leaves out devices of some of the {place.num_processes} processes; leave "
                f"it out, and say how many each has: paraxis launch --devices"
            )
        solver = dataclasses.replace(work.solver, num_devices=len(devices))
        X = work.rows.design(recipe, work.train, np.float32 if options.float32 else np.float64)

        started = time.perf_counter()
        strength, validated = _strength(options, solver, X, y, fitted, console)
        solved = None if validated is None else validated.solved
        if solved is None:
            with Live(console, f"fitting to {len(X):,} rows", value_name(solver.smooth)) as live:
                solved = solve(solver, strength, X, y, fitted, live)
        seconds = time.perf_counter() - started
        if solved.error is not None and options.stream_folder is not None:
            raise StoppedError(
                f"interrupted; the run so far is saved in --stream-folder {options.stream_folder}, and the same "
                f"command goes on with it; --out {options.out} is as it was"
            )

        about = {
            "penalty": options.penalty,
            "strength": strength,
            "rows": len(X),
            "status": solved.status,
            "data": options.data.name,
            "digest": digest_of(options.data),
            "weights": options.weights,
        }
        fills, form = options.missing == "mean", remembered(options.csv)
        model = Model(work.target, recipe, solved.coef, solved.intercept, fills, about, tuple(options.id), form)
        scored = test if len(test) else work.train
        y_tested = work.y[scored]
        counts = None if work.weight is None else work.weight.own[scored]
        objective = work.target.objective
        baseline = np.broadcast_to(trivial(objective, y, fitted), (len(y_tested), len(solved.coef)))
        metrics = {
            "model": measured(objective, work.rows.linear(model, scored), y_tested, counts),
            "without the columns": measured(objective, baseline, y_tested, counts),
        }
        errors = standard_errors.of_model(
            model,
            X.parts() if isinstance(X, Design) else [X],
            y,
            converged=solved.converged,
            weighted=fitted is not None,
            filled=recipe.fills,
        )
        where = f"{len(test):,} rows held out" if len(test) else "the rows fitted to; none are held out"
        facts = _summary(options, work, model, solved, value_name(solver.smooth), describe(devices), seconds)
        later = [*_of_status(options, solved), *_of_metrics(metrics["model"], len(y_tested), model)]
        report = Report(
            f"Fit of {options.target}", facts, metrics, f"On {where}", validated, SCORES[objective],
            [*work.notes, *later], errors, command_line(options),
        )  # fmt: skip
        processes.by_first(
            "paraxis fit", lambda: write_all(options.out, options.force, model, report, solved.history, solver.smooth)
        )
    console.print(grids.pairs(report.title, facts))
    console.print(grids.metrics_grid(report.measured_on, metrics))
    console.print(grids.coefficients_grid(model, errors.values))
    console.print(errors.words, markup=False, highlight=False)
    for text in later:
        note(text)
    console.print(f"Written to {options.out}: {', '.join(NAMES)}", markup=False, highlight=False)
    if solved.error is not None:
        raise StoppedError(
            f"interrupted; what was found so far is saved in --out {options.out}: its error is {solved.error:.2g}, and "
            f"{solver.tolerance(X):g} is that of a solution"
        )


@contextlib.contextmanager
def _nothing_written(out: Path) -> Iterator[None]:
    """Say, if interrupted within, that all is as it was."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"interrupted; nothing was saved, --out {out} is as it was") from None


def _reader() -> _Read:
    """Return what reads a file again only if that may show something else: not for more columns that are text."""
    held: list[tuple[Path, CsvForm, frozenset[str], Table]] = []

    def read(path: Path, form: CsvForm, as_text: frozenset[str]) -> Table:
        if not held or held[0][:2] != (path, form) or not held[0][2] <= as_text:
            held.clear()
            held.append((path, form, as_text, read_table(path, form, as_text=as_text)))
        return held[0][3]

    return read


def _prepared(options: FitOptions, read: _Read, passes: Passes) -> _Work:
    """Read the file, check it and deal its rows out.

    Raises:
        CommandError: at the first thing that cannot be, with what would settle it.
    """
    notes: list[str] = []
    require_place(options.out, options.data, options.force)
    if options.stream is None:
        table = read(options.data, options.csv, _as_text(options))
        num_in_file, all_names = table.num_rows, list(table.columns)
        table, names = _checked(options, table, notes.append)
        rows: Rows = Held(table)
        sources, missing = columns.sources_of(table, names), columns.missing_in(table, names)
    else:
        survey = _surveyed(options, notes.append, passes)
        table, rows, sources, all_names = survey.table, survey.rows, survey.sources, survey.names
        missing = survey.missing
        num_in_file = table.num_rows + survey.num_dropped
    if table.num_rows < num_in_file:
        notes.append(f"{num_in_file - table.num_rows:,} of {num_in_file:,} rows have missing values and are left out")
    target, reason = targets.choose(table.columns[options.target], options.objective)
    y = target.encoded(table.columns[options.target])
    train, test = _dealt(options, target, y)
    if options.stream is not None:  # in the order in which they are read
        train, test = np.sort(train), np.sort(test)
    weight = weights.found(options, table, target, y, train, test)
    recipe = columns.learn(rows.parts(train), sources, options.data, notes.append)
    columns.tell_of_filled(missing, recipe.columns, "the column's mean", notes.append)
    _require_rows(options, target, y[train], len(recipe.sources))
    solver = Solver(target.objective, options.penalty, options.l1_ratio, options.tol, options.max_iterations, 1)
    return _Work(rows, table.num_rows, all_names, target, reason, y, weight, train, test, recipe, solver, notes)


def _surveyed(options: FitOptions, note: _Note, passes: Passes) -> Survey:
    """Read all parts of a file or folder once, and check each."""
    from paraxis.engines import Stream  # which loads JAX's machinery for programs

    try:
        engine = Stream(memory=options.stream, folder=options.stream_folder)
    except ValueError:
        raise CommandError(
            f"--stream {options.stream} must be a number of bytes, such as 2GB; write --stream 2GB",
            remedies=[{"stream": "2GB"}],
        ) from None
    told: set[str] = set()

    def once(text: str) -> None:
        if text not in told:
            told.add(text)
            note(text)

    def check(part: Table, names: list[str]) -> Table:
        _require_weights(options, part)
        used = names if options.text != "drop" else [name for name in names if part.columns[name].kind != "text"]
        return _of_usable(options, part, used, once, is_part=True)

    def judge(outline: columns.Outline, table: Table, names: list[str]) -> list[str]:
        _require_target(options, table, outline.texts)
        naming = [name for name in outline.naming if name in names]
        return columns.usable(table, names, options.text, once, texts_in=outline.texts, naming=naming)

    kept = [options.target, *([options.weights] if options.weights is not None else [])]
    files = Parts(options.data, options.csv, "paraxis fit")
    rules = Rules(lambda part: _names(options, part, once), check, judge)
    return surveyed(files, options.csv, kept, _as_text(options), rules, engine, passes)


def _as_text(options: FitOptions) -> frozenset[str]:
    used = {options.target, options.weights}
    return frozenset((*options.ignore, *options.id)) - used


def _checked(options: FitOptions, table: Table, note: _Note) -> tuple[Table, list[str]]:
    """Return the rows without those that are left out, and the columns to predict from."""
    names = _names(options, table, note)
    _require_target(options, table)
    _require_weights(options, table)
    names = columns.usable(table, names, options.text, note)
    return _of_usable(options, table, names, note, is_part=False), names


def _of_usable(options: FitOptions, table: Table, names: list[str], note: _Note, *, is_part: bool) -> Table:
    """Return the rows, or a part of them, without those that are left out."""
    columns.tell_of_marks(table, [options.target, *names], note)
    columns.require_finite(table, [options.target, *names], is_part=is_part)
    return _without_missing(options, table, names, is_part=is_part)


def _require_target(options: FitOptions, table: Table, texts_in: Mapping[str, columns.Texts] | None = None) -> None:
    """Check that a target is not numbers with a few words among them; as many labels as a class may have are none."""
    target = table.columns[options.target]
    known = columns.Texts.of(target, table) if texts_in is None and target.kind == "text" else None
    if target.kind == "text" and len((known or (texts_in or {})[target.name]).levels) > targets.FEW:
        columns.require_no_marks(table, [target], texts_in=texts_in)


def _require_weights(options: FitOptions, table: Table) -> None:
    weights.require_numbers([table.columns[name] for name in (options.weights,) if name is not None], table)


def _names(options: FitOptions, table: Table, note: _Note) -> list[str]:
    """Return the columns that are not to be left out; whether they can be used, is not looked at."""
    used = [options.target, *([options.weights] if options.weights is not None else [])]
    for text in table.notes:
        note(text)
    table.required([options.target], "target column", "target")
    table.required(used[1:], "column of weights", "weights")
    if options.weights == options.target:
        raise CommandError(f"--weights {options.weights} is the target itself", remedies=[{"weights": None}])
    for option, given, what in (("ignore", options.ignore, "column to ignore"), ("id", options.id, "id column")):
        table.required(given, what, option)
        if options.target in given:
            others = tuple(name for name in given if name != options.target)
            raise CommandError(
                f"--{option} {options.target} is the target itself",
                remedies=[{option: lambda _, others=others: others}],
            )
    index = [name for name in table.index if name not in (*used, *options.ignore, *options.id)]
    for name in index:
        place = list(table.columns).index(name) + 1
        if name:
            note(f"{name!r} is the index of a data frame, and is left out: {_NUMBERS_ROWS}")
        elif options.stream is not None:  # of which the part does not show what others hold
            note(f"column {place} has no name, and is left out")
        elif table.columns[name].missing.all():
            note(f"column {place} has neither a name nor values, and is left out; a comma may end each line")
        else:
            note(f"column {place} has no name, and is left out: {_NUMBERS_ROWS}")
    left_out = {*used, *options.ignore, *options.id, *index}
    return [name for name in table.columns if name not in left_out]


def _without_missing(options: FitOptions, table: Table, names: list[str], *, is_part: bool) -> Table:
    needed = [options.target, *([options.weights] if options.weights is not None else [])]
    there = ~np.any([table.columns[name].missing for name in needed], axis=0)

    def drop() -> Remedy:
        return {"missing": "drop-rows", "ignore": columns.emptiest(table, names, there)}

    if options.missing == "drop-rows":
        whole = ~np.any([table.columns[name].missing for name in (*needed, *names)], axis=0)
        if not whole.any() and not is_part:
            raise CommandError(
                f"{table.path} has a missing value in each row; write --missing mean, or --ignore COLUMN",
                remedies=[{"missing": "mean"}] * bool(there.all())
                + [{"ignore": columns.emptiest(table, names, there)}],
            )
        return table if whole.all() else table.rows(whole)
    if options.missing == "fail":
        columns.require_present(
            table,
            [*needed, *names],
            *((_ADVICE, {"missing": "mean"}) if there.all() else (_DROP, drop())),
            is_part=is_part,
        )
    if not there.all():
        columns.require_present(
            table, [options.target], f"no mean can stand for the target; {_DROP}", drop(), is_part=is_part
        )
        columns.require_present(table, needed, f"no mean can stand for a weight; {_DROP}", drop(), is_part=is_part)
    return table


def _dealt(options: FitOptions, target: targets.Target, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the rows to fit to, and of those held out, each in an order drawn from the seed."""
    num_rows, all_rows = len(y), {"test_fraction": 0.0}
    if not options.test_fraction:
        return np.random.default_rng(options.seed).permutation(num_rows), np.zeros(0, int)
    num_test = math.ceil(options.test_fraction * num_rows)
    if num_rows - num_test < 2:
        raise CommandError(
            f"{num_rows} rows are too few to hold {num_test} out; write --test-fraction 0", remedies=[all_rows]
        )
    classes = y if target.objective == "logistic" else None
    if classes is not None:
        counts = np.bincount(classes)
        if counts.min() < 2:
            label = target.classes[int(counts.argmin())]
            raise CommandError(
                f"class {label!r} has one row only, too few to fit to and to hold out; write --test-fraction 0, or "
                f"leave that row out",
                remedies=[all_rows],
            )
        if min(num_test, num_rows - num_test) < len(counts):
            raise CommandError(
                f"--test-fraction {options.test_fraction:g} of {num_rows} rows is {num_test}, which leaves fewer than "
                f"one for each of {len(counts)} classes; write --test-fraction 0",
                remedies=[all_rows],
            )
    train, test = map(
        np.asarray,
        train_test_split(np.arange(num_rows), test_size=num_test, random_state=options.seed, stratify=classes),
    )
    return train, test


def _require_rows(options: FitOptions, target: targets.Target, y: np.ndarray, num_columns: int) -> None:
    if target.objective != "logistic" and y.min() == y.max():
        raise CommandError(f"the target {target.name!r} is {y[0]:g} in every row that is fitted to; give more rows")
    free = options.penalty == "none" or options.strength == 0 or 0 in (options.strengths or ())
    if free and len(y) <= num_columns:
        raise CommandError(
            f"{len(y)} rows do not determine {num_columns} coefficients and an intercept; {_penalised(options)}",
            remedies=[_PENALISED[_unpenalised(options)]],
        )
    if options.strengths is None:
        return
    fewest = int(np.bincount(y).min()) if target.objective == "logistic" else len(y) // 2
    if fewest < options.folds:
        what = "the rarest class has" if target.objective == "logistic" else "in pairs, there are"
        if fewest >= 2:
            raise CommandError(
                f"--folds {options.folds} is too many: {what} {fewest} to fit to; write --folds {fewest}",
                remedies=[{"folds": fewest}],
            )
        first = options.strengths[0]
        raise CommandError(
            f"{len(y)} rows are too few for cross-validation; write --strength {first:g}",
            remedies=[{"strengths": lambda _: None, "strength": first}],
        )


def _penalised(options: FitOptions) -> str:
    """Return what to write in place of no penalty."""
    return {
        "penalty": "write --penalty l2",
        "strength": "write --strength 0.1",
        "strengths": "write --strengths 0.01,0.1,1",
    }[_unpenalised(options)]


def _unpenalised(options: FitOptions) -> str:
    """Return the option that asks for no penalty."""
    if options.penalty == "none":
        return "penalty"
    return "strength" if options.strengths is None else "strengths"


def _strength(
    options: FitOptions, solver: Solver, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None, console: Console
) -> tuple[float, Validated | None]:
    """Return the strength to fit with, and how it was chosen among several."""
    if options.strengths is None:
        usual = 0.0 if options.penalty == "none" else 1 / len(X)
        return usual if options.strength is None else options.strength, None
    grid = options.strengths
    with console.status(f"cross-validation: {len(grid)} strengths, {options.folds} folds at once"):
        found = validate(solver, grid, options.folds, X, y, weight)
    console.print(grids.strengths_grid(SCORES[solver.objective], found.strengths, found.scores, found.best))
    return found.best, found


def _of_status(options: FitOptions, solved: Solved) -> list[str]:
    """Return what there is to note of how the solver went on, and ended."""
    first = solved.history[0].iter_num if solved.history else solved.num_iterations + 1
    if first > 1:
        return [f"the run went on after iteration {first - 1:,}, which was saved in {options.stream_folder}"]
    if solved.status == Status.UNBOUNDED.words:
        return [f"{solved.status}; {_penalised(options)}"]
    if not solved.converged and solved.error is None:
        return [f"the solver stopped early: {solved.status}"]
    return []


def _of_metrics(metrics: dict[str, float], num_rows: int, model: Model) -> list[str]:
    """Return what there is to note of predictions that are too good: a column may say the target."""
    if num_rows < _ENOUGH or not (metrics.get("accuracy") == 1 or metrics.get("R²", 0) > 1 - 1e-9):
        return []
    most = model.recipe.sources[int(np.abs(model.coef).max(0).argmax())].column
    rows = f"all {num_rows:,} rows that were scored are predicted exactly"
    return [f"{rows}: if {most!r}, which counts most, says the target, write --ignore {shell_word(most)}"]


def _summary(
    options: FitOptions, work: _Work, model: Model, solved: Solved, value: str, devices: str, seconds: float
) -> list[tuple[str, str]]:
    about, last = model.about, solved.history[-1] if solved.history else None
    used = set(model.recipe.columns)
    dropped = [name for name in work.names if name not in (*used, options.target, options.weights)]
    penalty = options.penalty if options.penalty == "none" else f"{options.penalty}, strength {about['strength']:.4g}"
    num_made, num_used = len(model.recipe.sources), len(used)
    made = "" if num_made == num_used else f", as {num_made:,} of the model"
    return [
        ("data", f"{options.data.name}: {work.num_rows:,} rows, {about['rows']:,} fitted to"),
        ("columns", f"{num_used:,}{made}"),
        *([("left out", quoted(dropped))] if dropped else []),
        ("target", f"{options.target}" + _classes(work.target)),
        ("objective", f"{work.target.objective}: {work.reason}"),
        *([("weights", work.weight.words)] if work.weight is not None else []),
        ("penalty", penalty),
        ("devices", f"{devices}, {'float32' if options.float32 else 'float64'}"),
        ("status", solved.status),
        ("iterations", f"{solved.num_iterations:,}"),
        ("passes over the data", f"{solved.data_passes:,}"),
        (
            f"{value} reached",
            f"{last.value:.8g}, error {last.error:.2g}" if last else "when the run was saved, or at the start",
        ),
        ("time", f"{seconds:.1f} s, with compiling"),
    ]


def _classes(target: targets.Target) -> str:
    if target.objective != "logistic":
        return ""
    if len(target.classes) == 2:
        return f": {target.classes[1]!r}, not {target.classes[0]!r}"
    return f": {len(target.classes)} classes, {quoted(target.classes)}"
