"""The loop of a run: steps, and what is due between them. Results are looked at while later steps are under way."""

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from paraxis._host import processes
from paraxis.errors import CheckpointError, NonFiniteError, StateError
from paraxis.train import _nonfinite, _resume
from paraxis.train._callbacks import Callbacks, Event, Kind
from paraxis.train._data import Data, Position, num_rows
from paraxis.train._evaluate import AHEAD, Evaluate
from paraxis.train._history import Record, fetched, means_of, send, sums_of
from paraxis.train._mean import Mean
from paraxis.train._resume import Start
from paraxis.train._state import TrainState

if TYPE_CHECKING:  # it loads Orbax
    from paraxis.train._checkpoints import Checkpoints


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

    def is_done(self, following: Position) -> bool:
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

    def saves(self, position: Position) -> bool:
        """Return whether a checkpoint is due after a batch: as was said, or else after each epoch."""
        if self.checkpoints is None:
            return False
        return position.is_last if self.checkpoints.every is None else self.checkpoints.is_due(position.number + 1)


class Loop:
    """One run.

    Args:
        step: ``step(state, batch)`` → the new state and metrics.
        data: the batches.
        plan: what to do.
        start: where to begin.
        reporters: ours, told first.
        callbacks: the user's.
        say: shows a line.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        data: Data,
        plan: Plan,
        start: Start,
        reporters: Sequence[Reporter],
        callbacks: Callbacks,
        say: Callable[[str], None],
    ) -> None:
        self._step = step
        self._data = data
        self._plan = plan
        self._reporters = tuple(reporters)
        self._callbacks = callbacks
        self._owned = start.is_restored
        self._pending: collections.deque[tuple[Position, Any, Any]] = collections.deque()
        self._saved: int | None = None
        self._unsaved: CheckpointError | None = None  # why the last one could not be written
        self._due = list(start.due)
        self._programs = dict(start.programs)
        self._checked: set[str] = set()
        self._is_told = False
        self._say = say
        self.state = start.state
        self.next = start.next
        self.recorder = start.recorder
        self.watch = start.watch

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
            with contextlib.closing(self._data.batches(self.next)) as batches:
                while signal is None and not self.is_over:
                    position = self._advance(batches)
                    self._between(position, stop)
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

    def _advance(self, batches: Iterator[tuple[Position, Any]]) -> Position:
        """Make one step; the metrics of an earlier one are fetched."""
        try:
            position, batch = next(batches)
        except Exception as error:
            error.add_note(f"px.fit: raised by data, when the batch of step {_named(self.next)} was wanted")
            raise
        try:
            if self._plan.checkpoints is not None:
                self._note_program(batch)
            self.state, metrics = _checked(self._step(self.state, batch), self.state)
        except Exception as error:
            error.add_note(f"px.fit: raised by step {_named(position)}")
            raise
        self._pending.append((position, batch, send(metrics)))
        if len(self._pending) > AHEAD:
            self._take()
        following = (position.epoch + 1, 0) if position.is_last else (position.epoch, position.within + 1)
        self.next = Position(position.number + 1, *following, False)
        return position

    def _note_program(self, batch: Any) -> None:
        """Note which program the step is for batches of this size; say so if it was another one when it was saved."""
        size = _resume.size_of(self._step, num_rows(batch))
        if size in self._checked:
            return
        self._checked.add(size)
        program = _resume.program_of(self._step, self.state, batch)
        if self._programs.get(size, program) != program and not self._is_told and processes.is_first():
            self._is_told = True
            self._say(
                "px.fit: the training step is another program than the one that was saved: an option, the optimiser, "
                "the model or the loss has changed"
            )
        self._programs[size] = program

    def _between(self, position: Position, stop: processes.StopSignal) -> None:
        """Do what is due after a step. The devices are waited for only if something is."""
        ends = self._plan.is_done(self.next)
        due = [one.name for one in self._plan.evaluations if ends or one.is_due(self.num_steps, position.is_last)]
        saves = self._plan.saves(position) or self._plan.best_source in due
        is_heard = position.is_last and (self._callbacks.hear("epoch") or self.watch.sees_epochs)
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
        position, batch, waiting = self._pending.popleft()
        metrics = fetched(waiting)
        processes.note_progress()  # not when the step is only under way: others may still be compiling theirs
        if _nonfinite.is_nonfinite(metrics, self.state):
            raise self._failed(position, batch, metrics)
        step, sums = position.number + 1, sums_of(metrics)
        self.recorder.add_step(step, position.epoch, sums)
        self._report(Event("step", step, position.epoch, means_of(sums), num_rows(batch)))
        if position.is_last:
            record = self.recorder.end_epoch(step, position.epoch)
            self.watch.see(record)
            self._report(Event("epoch", step, position.epoch, record.metrics, 0, None if self._pending else self.state))

    def _failed(self, position: Position, batch: Any, metrics: Mapping[str, Mean]) -> NonFiniteError:
        """Save what there is to save of a step that met what is not finite: nothing after it counts."""
        self._pending.clear()
        rows = self._data.rows(position.number)
        said = []
        if self._plan.beside is not None:
            try:
                path = _nonfinite.save_batch(self._plan.beside, position.number + 1, batch, rows)
                said.append(f"The batch is saved: np.load({str(path)!r}).")
            except OSError as error:
                said.append(f"The batch could not be saved in {self._plan.beside}: {error}.")
        before = _nonfinite.state_before(self.state)
        if before is not None:
            which = f"after step {position.number}" if position.number else "with which the run began"
            said.append(f"The state {which} is error.state")
            if self._plan.checkpoints is not None:
                self.state, self.next = before, position._replace(is_last=False)
                self._save()
                if self._is_written() and self.is_saved:
                    said[-1] += f", and saved in {self._plan.checkpoints.path / str(position.number)}"
                else:
                    said[-1] += f", and could not be saved: {self._unsaved or 'a warning says why'}"
            said[-1] += "."
        return _nonfinite.error_of(position, metrics, batch, rows, said, before)

    def _save(self) -> None:
        """Save the run as it is, once."""
        checkpoints = self._plan.checkpoints
        if checkpoints is None or self._saved == self.num_steps:
            return
        for reporter in self._reporters:
            reporter.flush()
        notes = _resume.notes(
            self.next, self._due, self._data, self.recorder, self.watch, checkpoints.best_by, self._programs
        )
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
        """Remember that a checkpoint failed and keep training; with several processes, raise.

        Those that could write their part still wait for this one inside Orbax.
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


def _named(position: Position) -> str:
    return f"{position.number + 1} ({position.in_words()})"


_A_STEP = (
    "step must take a state and a batch and return (state, metrics); if it is a loss function, write px.train_step("
    "loss), else return state, {'loss': loss}"
)


def _checked(result: Any, before: Any) -> tuple[Any, Mapping[str, Any]]:
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or isinstance(result[0], TrainState) != isinstance(before, TrainState)
    ):
        raise StateError(f"px.fit: step returned a {type(result).__name__}, not a new state and metrics; {_A_STEP}")
    state, metrics = result
    return state, metrics if isinstance(metrics, Mapping) else {"loss": metrics}
