"""``fit``: a run from a state, a step and data to its last step, whatever comes in between."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis._host import processes
from paraxis.errors import DataError, StateError
from paraxis.train.checkpoints import _records
from paraxis.train.runs import _plots, _resume
from paraxis.train.runs._display import display_for, print_line
from paraxis.train.runs._evaluate import evaluations_of
from paraxis.train.runs._events import Callbacks
from paraxis.train.runs._feed import Feed
from paraxis.train.runs._history import History, Record
from paraxis.train.runs._logs import Log, TensorBoard, require_tensorboard
from paraxis.train.runs._loop import Loop, Plan, Reporter, require_step
from paraxis.train.runs._stopping import StopEarly, TrainingStopped
from paraxis.train.steps._rows import given_away

if TYPE_CHECKING:  # it loads Orbax
    from paraxis.train.checkpoints._checkpoints import Checkpoints


_State = TypeVar("_State")


@dataclasses.dataclass(frozen=True)
class Fitted(Generic[_State]):
    """The result of :func:`fit`.

    Attributes:
        state: the state after the last step.
        history: averages of steps, epochs and evaluations.
        stopped: why the run ended before its last step; ``None`` if it did not.
        best: the record with the best value of the metric of ``stop_early``, if that was given.
    """

    state: _State
    history: History
    stopped: str | None
    best: Record | None

    def _repr_html_(self) -> str:
        """Return the state, why the run ended, and its history, for notebooks."""
        best = self.best and f"step {self.best.step}: " + ", ".join(
            f"{k} {v:.4g}" for k, v in self.best.metrics.items()
        )
        told = {"state": repr(self.state), "stopped": self.stopped, "best": best}
        return html.titled("Fitted", html.facts(told), self.history._repr_html_())


@arguments.named(evaluation="evaluate", checkpoints="checkpoint", num_epochs="epochs", num_steps="steps")
def fit(
    state: _State,
    step: Callable[[Any, Any], Any],
    data: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    evaluate: Any = None,
    checkpoint: "Checkpoints | str | os.PathLike[str] | None" = None,
    callbacks: Any = (),
    log: str | os.PathLike[str] | None = None,
    log_every: int = 1,
    tensorboard: str | os.PathLike[str] | None = None,
    plot: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    stop_early: StopEarly | None = None,
    donate: bool = False,
) -> Fitted[_State]:
    """Train step by step on batches of data, up to a number of epochs or steps.

    The devices do not wait for the host: the metrics of a step are fetched when four later steps have been started.
    Only what needs the state (an evaluation, a checkpoint, a callback after an epoch) waits for it.

    With ``checkpoint``, a run that was killed at any point resumes when the same command is started again, and ends
    with the same bits as without the kill: state, history, log and TensorBoard points (except for the times in them).
    Log lines and points are on disk before the checkpoint that covers them.

    A full disk does not end a run. If the log, ``tensorboard``, ``plot`` or a checkpoint cannot be written, there is a
    warning; the log and the points are tried again, and the state is returned. With several processes, however, a
    process that cannot write its part of a checkpoint ends the run; the checkpoint before stays.

    Ctrl-C and SIGTERM end the run after the current step: it is saved, a line says so, and :class:`TrainingStopped`
    ends the program with exit status 0, unless you catch it. A second Ctrl-C raises ``KeyboardInterrupt`` at once.

    Args:
        state: the initial state: a :class:`TrainState`, or whatever else ``step`` takes. It does not change. The run
            begins with the batch whose number is ``state.step``; if there is a checkpoint, it resumes from that
            instead.
        step: ``step(state, batch)`` → the new state and a dict of metrics, as :func:`train_step` makes it.
        data: a loader; or an iterable of batches that can be iterated again, such as a list; or a function that
            returns an iterable of the batches of an epoch, ``data(epoch)`` or ``data()``.
        epochs: total number of epochs, including those before a resume. Give either this or ``steps``.
        steps: total number of steps, likewise.
        evaluate: a :class:`Evaluate`, or a list of them: they run on their schedules, and at the end.
        checkpoint: a :class:`Checkpoints`, or the path of one, which is then saved after each epoch. The end of the
            run is always saved.
        callbacks: a function, called with each :class:`Event`; or an object with some of the methods ``on_start``,
            ``on_step``, ``on_epoch``, ``on_evaluate``, ``on_checkpoint`` and ``on_end``, called with events of that
            kind; or a list of these. With several processes, each process calls its own.
        log: path of a file of JSON lines: one at the start, one for each step, epoch and evaluation. An older log is
            replaced; any other file is refused. When a run resumes, its log is cut at that step. A run that fails
            before its first step does not change an older log, and writes none.
        log_every: number of steps between two logged steps, in ``log`` and ``tensorboard``.
        tensorboard: path of a directory of event files; needs tensorboardX.
        plot: path of a PNG with the curves, drawn at the end; needs matplotlib.
        progress: ``None``: a live area in a notebook; a live line on a terminal, if rich is installed; elsewhere an
            occasional line. ``True``: the same, but on a terminal rich is required. ``False``: nothing, except for a
            line if no steps are left, or if a signal ends the run. The first process writes it, to standard error.
        stop_early: a rule for ending the run before its last step.
        donate: whether the first step consumes ``state`` itself, instead of a copy.

    Returns:
        A :class:`Fitted`: the last state, and the history.

    Raises:
        DataError: if an argument is malformed; if the data are not those of the checkpoint; if the metric named by
            ``best=`` of the checkpoint or by ``stop_early`` does not exist; or if ``log``, ``tensorboard`` or ``plot``
            is not a path, cannot be written to, or is used by another run, or if the file at ``log`` is not a log.
        StateError: if ``step`` is not a step, but for example a loss function; if the checkpoint is of another state;
            if an earlier step has consumed the arrays of ``state``; or if ``paraxis launch`` started this process with
            others, and it did not join them.
        DataError: with several processes, if arrays in ``data`` are not the same in all, as far as a digest tells.
        ProcessError: in the other processes, if the first cannot write to one of the paths.
        NonFiniteError: if a loss or a gradient is not finite. The message names the step, the batch, its rows, and the
            rows whose own values are not finite. The batch is saved beside the checkpoint, or else beside the log.
            ``error.state`` is the state of the step before, which is saved. With several processes, all raise the
            error; each names its own rows, and saves them in its own file.
        TrainingStopped: after a signal; it has the state and the history.
        CheckpointError: if ``checkpoint`` cannot be written to when the run begins, or with several processes later.
        ModuleNotFoundError: if an argument needs a package that is missing.
        Exception: anything that the step, the data, an evaluation or a callback raises, with a note that names the
            step.

    Communicates: only what the step, evaluations and checkpoints do; and with several processes, 800 bytes from each
    at the beginning.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> step = px.train_step(lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> data = px.loader({"x": jnp.ones((100, 3)), "y": jnp.ones(100)}, 32, seed=0)
        >>> fitted = px.fit(state, step, data, epochs=5, progress=False)
        >>> int(fitted.state.step), len(fitted.history.epochs)
        (20, 5)
        >>> fitted.history.epochs[-1].metrics["loss"] < 1e-6
        True
    """
    if isinstance(checkpoint, (str, os.PathLike)):
        arguments.path("px.fit", "checkpoint", checkpoint, DataError)
    for name, place in {"log": log, "tensorboard": tensorboard, "plot": plot}.items():
        if place is not None:
            _path(name, place)
    if progress is not None:
        arguments.flag("px.fit", "progress", progress)
    arguments.flag("px.fit", "donate", donate)
    if stop_early is not None and not isinstance(stop_early, StopEarly):
        raise DataError(
            f"px.fit: stop_early must be a px.train.StopEarly, got {arguments.described(stop_early)}; write "
            "stop_early=px.train.StopEarly('test/loss', patience=3)"
        )
    processes.require_joined("px.fit")
    feed = Feed("px.fit: data", data)
    plan = _plan(epochs, steps, evaluate, checkpoint, log)
    names = [one.name for one in plan.evaluations]
    listeners = Callbacks(callbacks)
    _check(state, step, log, log_every, tensorboard, plot)
    if plan.checkpoints is not None:
        _resume.check_best(plan.checkpoints, names)
    processes.require_same("px.fit", feed.arrays(), "give each process the same data: px.fit divides them")
    first = processes.is_first()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_saving(plan.checkpoints))
        beginning = _resume.begin(state, feed, plan.checkpoints, stop_early, names, step)
        start = beginning.next.number
        total = steps if steps is not None or feed.length is None else feed.length * (epochs or 0)
        display = display_for(progress if first else False, start, total, epochs)
        stack.callback(display.close)
        reporters: list[Reporter] = [display]
        with processes.together("px.fit"):
            if first:
                facts = {} if log is None else _facts(state, feed, epochs, steps)
                reporters += _written(stack, start, log_every, facts, log=log, tensorboard=tensorboard, plot=plot)
        if plan.checkpoints is not None and plan.checkpoints.best_by is not None:
            reporters.append(_resume.BestBy(plan.checkpoints.best_by))
        loop = Loop(step, feed, plan, beginning, reporters, listeners, donate=donate)
        said = beginning.said
        if loop.has_nothing_left:
            left = _nothing_left(start, total, epochs, beginning, is_early=loop.watch.reason is not None)
            said = (*said, left)
        line = f"px.fit: {'; '.join(said)}"
        if loop.has_nothing_left and first and progress is False:
            print_line(line)  # who wants no progress wants training still
        elif said:
            display.say(line)
        for change in beginning.changed if first else ():
            # It may be what was meant, and it may be a slip: so it is said to who wants no progress, too.
            (print_line if progress is False else display.say)(f"px.fit: {change}")
        with _watched(), _nothing_is_left_of_no_step(loop, reporters), processes.StopSignal() as stop:
            signal = loop.run(stop)
        if loop.watch.reason is not None:
            display.say(f"px.fit: ended after step {loop.num_steps}: {loop.watch.reason}")
    history = loop.recorder.history()
    if plot is not None and first:
        _draw(history, _path("plot", plot))
    if signal is not None:
        if first:
            print_line(_farewell(signal, loop.num_steps, plan.checkpoints, is_saved=loop.is_saved))
        raise TrainingStopped(loop.state, history, is_saved=loop.is_saved or plan.checkpoints is None)
    return Fitted(loop.state, history, loop.watch.reason, loop.watch.best)


def _plan(epochs: Any, steps: Any, evaluate: Any, checkpoint: Any, log: Any) -> Plan:
    if (epochs is None) == (steps is None):
        given = "neither" if epochs is None else "both"
        raise DataError(f"px.fit: give either epochs or steps, got {given}; write epochs=10")
    epochs, steps = _count("epochs", epochs), _count("steps", steps)
    evaluations = evaluations_of(evaluate)
    checkpoints = None if checkpoint is None else _checkpoints(checkpoint)
    beside = checkpoints.path if checkpoints is not None else None if log is None else _path("log", log).parent
    return Plan(epochs, steps, evaluations, checkpoints, beside)


def _checkpoints(checkpoint: Any) -> "Checkpoints":
    from paraxis.train.checkpoints._checkpoints import Checkpoints

    if isinstance(checkpoint, (str, os.PathLike)):
        return Checkpoints(checkpoint)
    if not isinstance(checkpoint, Checkpoints):
        raise DataError(
            f"px.fit: checkpoint must be a px.Checkpoints or a path, got {type(checkpoint).__name__}; write "
            f"checkpoint=px.Checkpoints('runs/first', every=100)"
        )
    return checkpoint


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    return arguments.count("px.fit", name, value, write=f"{name}=10", error=DataError)


def _check(state: Any, step: Any, log: Any, log_every: Any, tensorboard: Any, plot: Any) -> None:
    require_step(step, state)
    if gone := given_away("px.fit", state):
        raise gone
    if not bool(getattr(state, "ok", True)):
        raise StateError(
            "px.fit: this state met a loss or a gradient that was not finite, so steps do not change it; continue from "
            "the error's state, or write state.replace(ok=jnp.array(True))"
        )
    if _count("log_every", log_every) != 1 and log is None and tensorboard is None:
        write = f"log={_PLACES['log']!r}, log_every={log_every}"
        arguments.of_no_use("px.fit", "log_every", log_every, "log or tensorboard", write, DataError)
    if tensorboard is not None:
        require_tensorboard()
    if plot is not None:
        _plots.require_matplotlib()
        _plots.require_png(_path("plot", plot))


def _facts(state: Any, feed: Feed, epochs: int | None, steps: int | None) -> dict[str, Any]:
    params = jax.tree.leaves(getattr(state, "params", state))
    return {
        **_records.surroundings(),
        "parameters": sum(int(x.size) for x in params if hasattr(x, "size")),
        "batches of an epoch": feed.length,
        "epochs": epochs,
        "steps": steps,
        "data": feed.describe(),
    }


def _nothing_left(
    start: int, total: int | None, epochs: int | None, beginning: _resume.Beginning, *, is_early: bool
) -> str:
    """Tell who starts a run again that was over, or begins with a state that has done its steps."""
    if is_early:
        return "nothing left to do: it was ended before"
    done = f"step {start}" if total is None else f"step {start} of {total}"
    if total is not None and start > total:
        done = f"step {start}, more than {total},"
    more = "steps" if epochs is None else "epochs"
    anew = "" if beginning.is_restored else ", or start again: state.replace(step=jnp.zeros((), jnp.int32))"
    return f"nothing left to do: {done} was reached before; for more, raise {more}={anew}"


_PLACES = {"log": "runs/log.jsonl", "plot": "runs/curves.png", "tensorboard": "runs/board"}


def _path(argument: str, value: Any) -> Path:
    """Return a place as it was given.

    Raises:
        DataError: if it is none.
    """
    write = f"{argument}={_PLACES[argument]!r}"
    arguments.path("px.fit", argument, value, DataError, write)
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # of ~somebody who is not there
        raise DataError(f"px.fit: {argument} must be a path, got {value!r}: {error}; write {write}") from None


def _draw(history: History, path: Path) -> None:
    """Draw, and warn if that fails, say on a full disk: it is no reason to lose what was trained."""
    try:
        _plots.draw(history, path)
    except Exception as error:
        warnings.warn(
            f"px.fit: plot: {path} could not be drawn: {error}; the curves are in the history that px.fit returns",
            stacklevel=3,
        )


def _written(
    stack: contextlib.ExitStack, start: int, every: int, facts: dict[str, Any], *, log: Any, tensorboard: Any, plot: Any
) -> list[Reporter]:
    """Return what writes down how the run goes. Each place is tried now: at the end, it would be too late."""
    found: list[Reporter] = []
    if plot is not None:
        place = _path("plot", plot)
        with _writing("plot", place):
            _plots.require_place(place)
    if tensorboard is not None:
        place = _path("tensorboard", tensorboard)
        with _writing("tensorboard", place):
            found.append(stack.enter_context(contextlib.closing(TensorBoard(place, start, every))))
    if log is not None:  # the last one, as an older log goes
        place = _path("log", log)
        with _writing("log", place):
            found.append(stack.enter_context(contextlib.closing(Log(place, start, facts, every))))
    return found


@contextlib.contextmanager
def _writing(argument: str, path: Path) -> Iterator[None]:
    """Turn a failure to write to a place into an error that names the argument."""
    try:
        yield
    except OSError as error:
        # It is what mkdir says where a file is in the place of a directory.
        is_file = isinstance(error, FileExistsError)
        reason = f"{error.filename} is a file, not a directory" if is_file else str(error)
        is_taken = isinstance(error, BlockingIOError)
        other = str(path.with_name(f"{path.stem}-2{path.suffix}")) if is_taken else path.name
        raise DataError(
            f"px.fit: {argument}: {path} cannot be written: {reason}; give another place: {argument}={other!r}"
        ) from error


@contextlib.contextmanager
def _saving(checkpoints: "Checkpoints | None") -> Iterator[None]:
    """Hold a directory as this run's alone until it ends.

    What is being written is waited for, if there is an error too; but not if the user wants to leave at once.
    """
    if checkpoints is None:
        yield
        return
    checkpoints.claim()
    try:
        yield
    except Exception as error:
        checkpoints.__exit__(type(error), error, error.__traceback__)
        raise
    checkpoints.__exit__(None, None, None)


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Let the watchdog, if there is one, wait for steps until the run is over."""
    try:
        yield
    finally:
        processes.end_progress()


@contextlib.contextmanager
def _nothing_is_left_of_no_step(loop: Loop, reporters: list[Reporter]) -> Iterator[None]:
    """Take back the files that were made for a run that fails before its first step."""
    start = loop.num_steps
    try:
        yield
    except BaseException:
        if loop.num_steps == start:
            for reporter in reporters:
                if isinstance(reporter, (Log, TensorBoard)):
                    reporter.withdraw()
        raise


def _farewell(signal: str, step: int, checkpoints: "Checkpoints | None", *, is_saved: bool) -> str:
    what = "Ctrl-C" if signal == "SIGINT" else signal
    if checkpoints is not None and not is_saved:
        return (
            f"px.fit: {what}: stopped after step {step}, which could not be saved in {checkpoints.path}; the same "
            f"command resumes from step {checkpoints.latest or 0}. The state is in the exception: except "
            f"px.TrainingStopped as stopped: stopped.state"
        )
    if checkpoints is None:
        return (
            f"px.fit: {what}: stopped after step {step}; nothing is saved, since there is no checkpoint=. The state is "
            f"in the exception: except px.TrainingStopped as stopped: stopped.state"
        )
    return (
        f"px.fit: {what}: stopped after step {step}, saved in {checkpoints.path / str(step)}; the same command resumes "
        f"from there"
    )
