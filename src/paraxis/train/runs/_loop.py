"""The loop of a run: steps, and what is due between them. Results are looked at while later steps are under way."""

import collections
import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from paraxis._host import processes
from paraxis.errors import CheckpointError, DataError, NonFiniteError, StateError
from paraxis.train.runs import _nonfinite, _resume
from paraxis.train.runs._evaluate import AHEAD, Evaluate
from paraxis.train.runs._events import Callbacks, Event, Kind
from paraxis.train.runs._feed import Feed, Place, num_rows
from paraxis.train.runs._history import Record, fetched, means_of, sent, sums_of
from paraxis.train.runs._resume import Beginning
from paraxis.train.steps._eval_step import EvalStep
from paraxis.train.steps._grouped import GroupedEval, GroupedStep
from paraxis.train.steps._mean import Mean
from paraxis.train.steps._rows import require_state
from paraxis.train.steps._state import TrainState
from paraxis.train.steps._step import TrainStep

if TYPE_CHECKING:  # it loads Orbax
    from paraxis.train.checkpoints._checkpoints import Checkpoints


class Reporter(Protocol):
    """Something of ours that is told of events."""

    def __call__(self, event: Event) -> None: ...
    def flush(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a run: how long, and what is done when.

    Attributes:
        epochs: how many there will have been; or
        steps: how many there will have been.
        evaluations: on their schedules.
        checkpoints: where the run is saved.
        beside: where a batch is put that made a loss not finite.
    """

    epochs: int | None
    steps: int | None
    evaluations: tuple[Evaluate, ...]
    checkpoints: "Checkpoints | None"
    beside: Path | None

    def is_done(self, following: Place) -> bool:
        """Return whether the batch that would follow is none of these."""
        if self.steps is not None:
            return following.number >= self.steps
        assert self.epochs is not None
        return following.epoch >= self.epochs

    @property
    def best_source(self) -> str | None:
        """The evaluation that says which checkpoint is the best; it is saved after each of these."""
        by = self.checkpoints.best_by if self.checkpoints is not None else None
        return by.rpartition("/")[0] or None if by else None

    def saves(self, place: Place) -> bool:
        """Return whether a checkpoint is due after a batch: as was said, or else after each epoch."""
        if self.checkpoints is None:
            return False
        return place.is_last if self.checkpoints.every is None else self.checkpoints.is_due(place.number + 1)


class Loop:
    """One run.

    Args:
        step: ``step(state, batch)`` → the new state and metrics.
        feed: the batches.
        plan: what to do.
        beginning: where to begin.
        reporters: ours, told first.
        callbacks: the user's.
        donate: whether the first step may take the state's memory.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        feed: Feed,
        plan: Plan,
        beginning: Beginning,
        reporters: Sequence[Reporter],
        callbacks: Callbacks,
        *,
        donate: bool,
    ) -> None:
        self._step = step
        self._feed = feed
        self._plan = plan
        self._reporters = tuple(reporters)
        self._callbacks = callbacks
        self._owned = donate or beginning.is_restored
        self._pending: collections.deque[tuple[Place, Any, Any]] = collections.deque()
        self._saved: int | None = None
        self._unsaved: CheckpointError | None = None  # why the last one could not be written
        self._due = list(beginning.due)
        self._description = beginning.description
        self.state = beginning.state
        self.next = beginning.next
        self.recorder = beginning.recorder
        self.watch = beginning.watch

    @property
    def num_steps(self) -> int:
        """Return the number of steps done."""
        return self.next.number

    @property
    def is_over(self) -> bool:
        """Return whether there are no steps left to do."""
        return self.watch.reason is not None or self._plan.is_done(self.next)

    @property
    def has_nothing_left(self) -> bool:
        """Return whether there are no evaluations left to do either."""
        return self.is_over and not self._due

    def run(self, stop: processes.StopSignal) -> str | None:
        """Run all steps, or until a signal. The signal is returned; the run is saved in any case."""
        processes.begin_progress()
        self._tell("start")
        signal = None
        if self._due:
            self._finish(stop, saves=True)
            signal = stop.asked()
        if signal is None and not self.is_over:
            processes.begin_progress()  # what came before was no step
            if not self._owned:
                self.state = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, self.state)
            with contextlib.closing(self._feed.batches(self.next)) as batches:
                while signal is None and not self.is_over:
                    place = self._advance(batches)
                    self._between(place, stop)
                    signal = stop.asked()
        self._drain()
        if signal is not None:
            self._save()
        self._tell("end")
        if not self._is_written():
            self._warn_unsaved(f"the state after step {self.num_steps} is in what px.fit gives")
        return signal or stop.asked()

    @property
    def is_saved(self) -> bool:
        """Return whether the current state has been saved."""
        return self._saved == self.num_steps and self._unsaved is None

    @property
    def _epoch(self) -> int:
        """Return the epoch of the last step."""
        return self.next.epoch - (self.next.within == 0 and self.next.number > 0)

    def _advance(self, batches: Iterator[tuple[Place, Any]]) -> Place:
        """Make one step; the metrics of an earlier one are fetched."""
        try:
            place, batch = next(batches)
        except Exception as error:
            error.add_note(f"px.fit: raised by data, when the batch of step {_named(self.next)} was wanted")
            raise
        try:
            self.state, metrics = _checked(self._step(self.state, batch), self.state)
        except Exception as error:
            error.add_note(f"px.fit: raised by step {_named(place)}")
            if _may_be_a_loss(self._step, self.state, error):
                error.add_note(f"px.fit: {_A_STEP}")
            raise
        self._pending.append((place, batch, sent(metrics)))
        if len(self._pending) > AHEAD:
            self._take()
        following = (place.epoch + 1, 0) if place.is_last else (place.epoch, place.within + 1)
        self.next = Place(place.number + 1, *following, False)
        return place

    def _between(self, place: Place, stop: processes.StopSignal) -> None:
        """Do what is due after a step. The devices are waited for only if something is."""
        ends = self._plan.is_done(self.next)
        due = [one.name for one in self._plan.evaluations if ends or one.is_due(self.num_steps, place.is_last)]
        saves = self._plan.saves(place) or self._plan.best_source in due
        is_heard = place.is_last and (self._callbacks.hear("epoch") or self.watch.sees_epochs)
        if not (ends or due or saves or is_heard):
            return
        self._drain()
        self._due = due
        self._finish(stop, saves=saves)
        processes.note_progress()

    def _finish(self, stop: processes.StopSignal, *, saves: bool) -> None:
        """Do evaluations that are due, and a checkpoint. What a signal leaves of them is done when the run goes on."""
        while True:
            if not self._due and self.is_over:  # stopped early: what else there is to evaluate is due too
                done = {name.partition("/")[0] for name in self.recorder.latest(self.num_steps) if "/" in name}
                self._due = [one.name for one in self._plan.evaluations if one.name not in done]
            if not self._due:
                break
            if not self._evaluate(self._due[0], stop):
                return
            del self._due[0]
        if saves or self.is_over:
            self._save()

    def _evaluate(self, name: str, stop: processes.StopSignal) -> bool:
        """Return whether it was done, and not given up because of a signal."""
        (evaluation,) = (one for one in self._plan.evaluations if one.name == name)
        try:
            metrics = evaluation(self.state, stop)
        except Exception as error:
            error.add_note(f"px.fit: raised by evaluation {name!r}, after step {self.num_steps}")
            raise
        if metrics is None:
            return False
        record = Record(self.num_steps, self._epoch, metrics)
        self.recorder.add_evaluation(record)
        self.watch.see(record, name)
        self._tell("evaluate", metrics)
        return True

    def _drain(self) -> None:
        while self._pending:
            self._take()

    def _take(self) -> None:
        """Fetch the metrics of the step that was done longest ago."""
        place, batch, waiting = self._pending.popleft()
        metrics = fetched(waiting)
        processes.note_progress()  # not when the step is only under way: others may still be compiling theirs
        if _nonfinite.is_nonfinite(metrics, self.state):
            raise self._failed(place, batch, metrics)
        step, sums = place.number + 1, sums_of(metrics)
        self.recorder.add_step(step, place.epoch, sums)
        self._report(Event("step", step, place.epoch, means_of(sums), num_rows(batch)))
        if place.is_last:
            record = self.recorder.end_epoch(step, place.epoch)
            self.watch.see(record)
            self._report(Event("epoch", step, place.epoch, record.metrics, 0, None if self._pending else self.state))

    def _failed(self, place: Place, batch: Any, metrics: Mapping[str, Mean]) -> NonFiniteError:
        """Save what there is to save of a step that met what is not finite: nothing after it counts."""
        self._pending.clear()
        rows = self._feed.rows(place.number)
        said = []
        if self._plan.beside is not None:
            try:
                path = _nonfinite.save_batch(self._plan.beside, place.number + 1, batch, rows)
                said.append(f"The batch is saved: np.load({str(path)!r}).")
            except OSError as error:
                said.append(f"The batch could not be saved in {self._plan.beside}: {error}.")
        before = _nonfinite.state_before(self.state)
        if before is not None:
            which = f"after step {place.number}" if place.number else "with which the run began"
            said.append(f"The state {which} is error.state")
            if self._plan.checkpoints is not None:
                self.state, self.next = before, place._replace(is_last=False)
                self._save()
                if self._is_written() and self.is_saved:
                    said[-1] += f", and saved in {self._plan.checkpoints.path / str(place.number)}"
                else:
                    said[-1] += f", and could not be saved: {self._unsaved or 'a warning says why'}"
            said[-1] += "."
        return _nonfinite.error_of(place, metrics, batch, rows, said, before)

    def _save(self) -> None:
        """Save the run as it is, once."""
        checkpoints = self._plan.checkpoints
        if checkpoints is None or self._saved == self.num_steps:
            return
        for reporter in self._reporters:
            reporter.flush()
        groups = _resume.groups_of(self._step)
        watch, by = self.watch, checkpoints.best_by
        notes = _resume.notes(self.next, self._due, self._feed, self.recorder, watch, by, groups, self._description)
        if not self._is_written():
            self._warn_unsaved("later steps are in memory only, and training continues")
        try:
            checkpoints.save(self.num_steps, self.state, notes)
        except CheckpointError as error:
            self._take_unsaved(error)
            self._warn_unsaved("later steps are in memory only, and training continues")
            return
        self._saved = self.num_steps
        self._tell("checkpoint")

    def _is_written(self) -> bool:
        """Wait for the checkpoint that is being written; whether there is none that could not be."""
        if self._plan.checkpoints is not None:
            try:
                self._plan.checkpoints.wait()
            except CheckpointError as error:
                self._take_unsaved(error)
        return self._unsaved is None

    def _take_unsaved(self, error: CheckpointError) -> None:
        """Save; go on if the disk is full, so as not to lose what was trained: a later checkpoint may be written.

        Several processes end instead, as those that could write their part still wait for this one inside Orbax; the
        run goes on from the checkpoint before.
        """
        if processes.count() > 1:
            raise error
        self._unsaved, self._saved = error, None

    def _warn_unsaved(self, what_now: str) -> None:
        error, self._unsaved = self._unsaved, None
        warnings.warn(f"px.fit: {error}; {what_now}", stacklevel=3)

    def _tell(self, kind: Kind, metrics: dict[str, float] | None = None) -> None:
        self._report(Event(kind, self.num_steps, self._epoch, metrics or {}, 0, self.state))

    def _report(self, event: Event) -> None:
        for reporter in self._reporters:
            reporter(event)
        self._callbacks(event)


def _named(place: Place) -> str:
    return f"{place.number + 1} ({place.in_words()})"


_A_STEP = (
    "step must take a state and a batch and return (state, metrics); if it is a loss function, write px.train_step("
    "loss), else return state, {'loss': loss}"
)


def require_step(step: Any, state: Any) -> None:
    """Refuse what is no step, as far as can be seen without a call.

    Raises:
        DataError: if it cannot be called.
        StateError: if it takes other arguments, or is a step of an evaluation.
    """
    if isinstance(step, (EvalStep, GroupedEval)):
        raise StateError(
            "px.fit: step is an evaluation step, px.eval_step, which changes no state; write px.fit(state, "
            "px.train_step(loss), data, evaluate=px.Evaluate(px.eval_step(loss), test_data))"
        )
    if isinstance(step, (TrainStep, GroupedStep)):
        require_state("px.fit", state, TrainState)
    if not callable(step):
        raise DataError(
            f"px.fit: step must be a function of a state and a batch, got {type(step).__name__}; write "
            f"px.fit(state, px.train_step(loss), data)"
        )
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # of a built-in function
        return
    try:
        signature.bind(state, None)
    except TypeError as error:
        name = getattr(step, "__name__", type(step).__name__)
        raise StateError(f"px.fit: {name}{signature} cannot be called as step(state, batch); {_A_STEP}") from error


def _may_be_a_loss(step: Any, state: Any, error: Exception) -> bool:
    """Return whether a function failed as one that takes the state for a model, or a batch for its tree, does."""
    is_ours = isinstance(step, (TrainStep, GroupedStep))
    return isinstance(state, TrainState) and not is_ours and isinstance(error, (TypeError, AttributeError))


def _checked(result: Any, before: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise StateError(f"px.fit: step returned a {type(result).__name__}, not a new state and metrics; {_A_STEP}")
    state, metrics = result
    if isinstance(before, TrainState) and not isinstance(state, TrainState):
        raise StateError(
            f"px.fit: step was given a px.TrainState, and returned a {type(state).__name__} in its place; {_A_STEP}"
        )
    return state, metrics if isinstance(metrics, Mapping) else {"loss": metrics}
