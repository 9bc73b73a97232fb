"""``fit``: a run from a state, a step and data to its last step, whatever comes in between."""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from paraxis._host import processes
from paraxis.errors import DataError, StateError
from paraxis.train._checkpoints import Checkpoints
from paraxis.train._evaluate import Evaluate, StopEarly
from paraxis.train._events import Callback, Log, RunDisplay, TensorBoard
from paraxis.train._history import History, Record
from paraxis.train._loader import batches_of, loader
from paraxis.train._loop import Loop, Trained, environment
from paraxis.train._sources import Batches, Keys
from paraxis.train._state import TrainState, require_arrays
from paraxis.train._step import Step

_State = TypeVar("_State")


@dataclasses.dataclass(frozen=True)
class Fitted(Generic[_State]):
    """The result of :func:`fit`.

    Attributes:
        state: with ``stop_early``, the best state; else that after the last step.
        history: averages of steps, epochs and evaluations.
        stopped: why the run ended before its last step; ``None`` if it did not.
        best: the record with the best value of the metric of ``stop_early``, if that was given; of an ensemble, each
            member's: its entries are arrays ``(size,)``.
        last: the state after the last step.
        active: whether it had not been stopped early, a boolean; of an ensemble, ``(size,)``.
    """

    state: _State
    history: History
    stopped: str | None
    best: Record | None
    last: _State
    active: np.ndarray


class TrainingStopped(SystemExit):
    """Raised when Ctrl-C or SIGTERM has ended a run after a step. Uncaught, it ends the program.

    The exit status is 0, or 1 if ``checkpoint=`` was given and the last step could not be saved.

    Attributes:
        state: the state after the last step.
        history: the history up to that step.

    Example:
        >>> import signal, paraxis as px
        >>> stop = lambda event: event.kind == "start" and signal.raise_signal(signal.SIGTERM)
        >>> try:
        ...     px.fit(0, lambda state, batch: (state + 1, 0.0), [1], steps=9, callbacks=stop, progress=False)
        ... except px.TrainingStopped as stopped:
        ...     print(stopped.state)
        0
    """

    __module__ = "paraxis"  # as a traceback names it

    def __init__(self, state: Any, history: History, *, is_saved: bool = True) -> None:
        super().__init__(0 if is_saved else 1)
        self.state, self.history = state, history


def fit(
    state: _State,
    step: Step[_State],
    data: Batches | Iterable[Any] | Callable[..., Iterable[Any]],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    evaluate: Evaluate | Sequence[Evaluate] | None = None,
    checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    log: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    progress: bool = True,
    stop_early: StopEarly | None = None,
) -> Fitted[_State]:
    """Train step by step on batches of data, up to a number of epochs or steps.

    With ``checkpoint``, a run that was killed resumes when the same command is started again, and ends with the same
    bits: state, history, log and TensorBoard points (but for the times in them). A log or a checkpoint that cannot be
    written is a warning, and training continues; with several processes, such a checkpoint ends the run.

    Ctrl-C and SIGTERM end the run after the current step: it is saved, a line says so, and :class:`TrainingStopped`
    ends the program with exit status 0, unless you catch it. A second Ctrl-C raises ``KeyboardInterrupt`` at once.

    Args:
        state: the initial state, a :class:`TrainState` or whatever else ``step`` takes; it does not change. The run
            begins with the batch whose number is ``state.step``, or resumes from the last checkpoint.
        step: ``step(state, batch)`` → the new state and a dict of metrics, as :func:`train_step` makes it; numbers are
            means over the batch's rows.
        data: a loader, an iterable of batches that can be iterated again, or a function that returns the batches of an
            epoch, ``data(epoch)`` or ``data()``. Without data, a random key, ``jax.random.key(0)``: a step's batch is
            then the key ``fold_in(key, number)``, from number 0.
        epochs, steps: total number of epochs or of steps, including those before a resume; give one of them.
        batch_size: rows of a batch, if ``data`` are the rows: ``px.loader(data, batch_size)``.
        evaluate: an :class:`Evaluate`, or a list of them: they run on their schedules, and at the end.
        checkpoint: a :class:`Checkpoints`, or the path of one, which is then saved after each epoch; of data without
            end, give ``px.Checkpoints(path, every=1000)``. The end of the run is always saved.
        callbacks: a function that is called with each :class:`Event`, or a list of them; in each process.
        log: path of a file of JSON lines: one at the start, one for each step, epoch and evaluation. An older log is
            replaced, or cut at the step of a resume; any other file is refused.
        tensorboard: path of a directory of event files; needs tensorboardX.
        progress: whether the first process shows a line that changes; in a file or a pipe, an occasional line.
        stop_early: a rule for ending the run before its last step. The best state so far is kept beside the last.

    Returns:
        A :class:`Fitted`: the last state, with ``stop_early`` the best one, and the history, whose curves
        ``fitted.history.plot("curves.png")`` draws.

    Raises:
        DataError: if an argument is malformed; if the data are not those of the checkpoint, or not the same in all
            processes; if a metric that is named does not exist; or if the file at ``log`` is not a log.
        StateError: if the checkpoint is of another state; if an earlier step has consumed the
            state; or if ``paraxis launch`` started this process, and it did not join the others.
        OSError: if ``log`` or ``tensorboard`` cannot be written to, or another run does; a DeviceError in the other
            processes.
        CheckpointError: if ``checkpoint`` cannot be written to when the run begins, or with several processes later.
        NonFiniteError: if a loss or a gradient is not finite; it names the step, and rows that are not finite.
            ``error.batch`` is the batch, and ``error.state`` the state before the step, which is saved.
        TrainingStopped: after a signal; it has the state and the history.

    Communicates: only what the step, evaluations and checkpoints do; and with several processes, 800 bytes from each
    at the beginning.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> step = px.train_step(lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> data = px.loader({"x": jnp.ones((100, 3)), "y": jnp.ones(100)}, 32, seed=0)
        >>> fitted = px.fit(state, step, data, epochs=5, progress=False)
        >>> int(fitted.state.step), len(fitted.history.epochs), fitted.history.epochs[-1].metrics["loss"] < 1e-6
        (20, 5, True)
    """
    processes.require_joined("px.fit")
    if isinstance(state, TrainState):
        require_arrays("px.fit", state)
        if not bool(state.ok):
            raise StateError("px.fit: this state has met NaN or infinity; write state.replace(ok=jnp.array(True))")
    if (epochs is None) == (steps is None):
        raise DataError(f"px.fit: give either epochs or steps, got {epochs} and {steps}; write epochs=10")
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = Checkpoints(checkpoint)
    trained: Any = state if isinstance(state, Trained) else Trained(state, step)
    if batch_size is not None:
        data = loader(data, batch_size, axis=getattr(step, "axis", "batch"))
    batches = batches_of("px.fit: data", data)
    if isinstance(batches, Keys) and steps is None:
        raise DataError("px.fit: data is a random key, which has no epochs; write steps=1000")
    arrays = {name: x for name, x in batches.leaves.items() if isinstance(x, np.ndarray)}
    processes.require_same("px.fit", arrays, "give each process the same data: px.fit divides them")
    needs_all = evaluate or stop_early or checkpoint or trained.shape
    if processes.members is not None and (needs_all or (batches.length is None and not isinstance(batches, Keys))):
        raise StateError(
            "px.fit: members, data of unknown length, evaluate=, stop_early= and checkpoint= need all processes, which "
            "px.initialize(lost='continue') lets die"
        )
    evaluations = _by_name(evaluate)
    heard, is_first = [callbacks] if callable(callbacks) else callbacks, processes.is_first()
    with contextlib.ExitStack() as stack:
        if checkpoint is not None:
            stack.enter_context(checkpoint).claim()
        total = steps if steps is not None or batches.length is None else batches.length * (epochs or 0)
        display = RunDisplay(total, epochs)
        say = display.say if is_first else lambda text: None
        loop = Loop(trained, batches, epochs, steps, evaluations, stop_early, checkpoint, heard)
        first_line, reporters, before = loop.begin(), loop.reporters, loop.next.number
        with processes.together("px.fit"):
            if is_first and progress:
                reporters.append(stack.enter_context(contextlib.closing(display)))
            if is_first and tensorboard is not None:
                reporters.append(stack.enter_context(contextlib.closing(TensorBoard(tensorboard, before))))
            if is_first and log is not None:
                facts = {**environment(), "epochs": epochs, "steps": steps, "data": batches.describe()}
                reporters.append(stack.enter_context(contextlib.closing(Log(log, before, facts))))
        is_idle = loop.is_over and not (loop.is_resumed and loop.due)
        if is_idle:
            reached = "it was ended before" if loop.verdict.reason else f"step {before} was reached before"
            first_line.append(f"nothing left to do: {reached}; for more, raise epochs= or steps=")
        if first_line and (progress or is_idle):
            say(f"px.fit: {'; '.join(first_line)}")
        stack.callback(processes.end_progress)
        with processes.StopSignal() as stop:
            signal = loop.until(stop)
        if loop.verdict.reason is not None and progress:
            say(f"px.fit: ended after step {loop.next.number}: {loop.verdict.reason}")
    history = loop.recorder.history()
    if signal is None:
        last, verdict = copy.copy(trained.state), loop.verdict
        if loop.best is not None:
            trained.tree = loop.best
        return Fitted(trained.state, history, verdict.reason, verdict.best, last, verdict.active)
    say(_stopped(signal, loop, checkpoint))
    raise TrainingStopped(trained.state, history, is_saved=loop.is_saved or checkpoint is None)


def _by_name(evaluate: Evaluate | Sequence[Evaluate] | None) -> dict[str, Evaluate]:
    listed = [evaluate] if isinstance(evaluate, Evaluate) else [*(evaluate or ())]
    evaluations = {one.name: one for one in listed}
    if len(evaluations) < len(listed):
        raise DataError("px.fit: two evaluations have one name; write px.Evaluate(…, name='second')")
    return evaluations


def _stopped(signal: str, loop: Loop, checkpoint: Checkpoints | None) -> str:
    outcome = "not saved: the state is in the exception, except px.TrainingStopped as stopped"
    if checkpoint is not None and loop.is_saved:
        outcome = f"saved in {checkpoint.path / str(loop.next.number)}; the same command resumes from there"
    return f"px.fit: {'Ctrl-C' if signal == 'SIGINT' else signal}: stopped after step {loop.next.number}, {outcome}"
