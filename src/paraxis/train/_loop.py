"""The loop of a run: steps, and what is due between them. Results are looked at while later steps are under way."""

import collections
import contextlib
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import pytrees
from paraxis._host import digests, processes
from paraxis.errors import CheckpointError, DataError, NonFiniteError, StateError
from paraxis.train._batches import rows_of
from paraxis.train._checkpoints import Checkpoints
from paraxis.train._evaluate import AHEAD, Evaluate, StopEarly, source_of
from paraxis.train._events import Event, Kind, Reporter
from paraxis.train._history import Record, Sums, fetch, means_of, send
from paraxis.train._loader import Loader
from paraxis.train._resume import Run
from paraxis.train._sources import Batches, Position, noted
from paraxis.train._state import TrainState

_MOST_ROWS = 20  # listed in an error


@dataclasses.dataclass
class Loop:
    """The steps of a run, up to a number of ``epochs`` or ``steps`` in all.

    Attributes:
        rule: when the run ends before.
        say: shows a line, in the first process.
        reason: why the run stops early; ``None``: it goes on.
        best: the record with the best value of the rule's metric so far.
    """

    run: Run
    step: Callable[[Any, Any], Any]
    data: Loader | Batches
    epochs: int | None
    steps: int | None
    evaluations: dict[str, Evaluate]
    rule: StopEarly | None
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callable[[Event], Any]]
    reporters: list[Reporter]
    say: Callable[[str], None]
    reason: str | None = None
    best: Record | None = None

    def __post_init__(self) -> None:
        self._pending: collections.deque[tuple[Position, Any, Any]] = collections.deque()
        self._saved: int | None = None
        self._noted: set[int] = set()  # numbers of rows for which the step's program is noted
        self._best_by = None if self.checkpoints is None else self.checkpoints.best_by
        named = (("stop_early", self.rule and self.rule.metric), ("best= of checkpoint", self._best_by))
        self._named = {argument: metric for argument, metric in named if metric}
        for argument, metric in self._named.items():
            if source_of(metric) not in ("", *self.evaluations):
                raise DataError(
                    f"px.fit: {argument} names the metric {metric!r}, but there is no such evaluation; write evaluate="
                    f"px.Evaluate(px.eval_step(loss), data, name={source_of(metric)!r})"
                )
        self._judge()

    @property
    def num_steps(self) -> int:
        return self.run.next.number

    @property
    def is_over(self) -> bool:
        following = self.run.next
        is_done = following.number >= self.steps if self.steps is not None else following.epoch >= (self.epochs or 0)
        return self.reason is not None or is_done

    @property
    def is_saved(self) -> bool:
        return self._saved == self.num_steps

    @property
    def due(self) -> list[str]:
        """The evaluations that are due after the last step and not done; at the end, all of them are due."""
        ends = self.is_over
        due = [name for name, one in self.evaluations.items() if ends or self._is_time(one.every)]
        done = self.run.recorder.evaluated(self.num_steps) if due else {}
        return [name for name in due if not any(metric.startswith(f"{name}/") for metric in done)]

    def _is_time(self, every: int | None) -> bool:
        """Return whether so many steps are done again; of ``None``, whether an epoch is."""
        return self.run.next.within == 0 if every is None else self.num_steps % every == 0

    @property
    def _epoch(self) -> int:
        return self.run.next.epoch - (self.run.next.within == 0 and self.num_steps > 0)

    def until(self, stop: processes.StopSignal) -> str | None:
        """Run all steps, or until a signal. The signal is returned; the run is saved in any case."""
        processes.begin_progress()
        self._tell("start")
        if self.run.is_resumed and self.due:  # a signal has left them out
            self._finish(stop, saves=True)
        if not self.is_over and not stop.asked():
            processes.begin_progress()  # what came before was no step
            if not self.run.is_resumed:  # the arrays are the user's
                self.run.state = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, self.run.state)
            with contextlib.closing(self.data.steps(self.run.next)) as batches:
                for position, batch in batches:
                    self._advance(position, batch)
                    self._between(stop)
                    if self.is_over or stop.asked():
                        break
        self._drain()
        signal = stop.asked()
        if signal is not None:
            self._save()
        self._tell("end")
        self._wait_for_checkpoint()
        return signal or stop.asked()

    def _advance(self, position: Position, batch: Any) -> None:
        run, hint = self.run, _hint(self.step, "px.train_step")
        with noted(f"px.fit: raised by step {position.number + 1} ({position}){hint}"):
            if self.checkpoints is not None:
                self._note_program(batch)
            result = self.step(run.state, batch)
            is_pair = isinstance(result, tuple) and len(result) == 2
            if not is_pair or isinstance(result[0], TrainState) != isinstance(run.state, TrainState):
                raise StateError(
                    f"px.fit: step returned a {type(result).__name__}, not a new state and metrics; if it is a loss "
                    "function, write px.train_step(loss), else return state, {'loss': loss}"
                )
            run.state, metrics = result
        self._pending.append((position, batch, send(metrics)))
        if len(self._pending) > AHEAD:
            self._take()
        following = (position.epoch + 1, 0) if position.is_last else (position.epoch, position.within + 1)
        run.next = Position(position.number + 1, *following)

    def _note_program(self, batch: Any) -> None:
        """Say so if the step is another program than when the run was saved, for batches of this size.

        A program is known by a digest of its jaxpr and constants: learning rate, clip, dropout and all code that
        matters. It holds no text of the user's. A step that is not compiled as a whole has none.
        """
        size, trace = rows_of(batch), getattr(self.step, "trace", None)
        if trace is None or size in self._noted:
            return
        self._noted.add(size)
        jaxpr = trace(self.run.state, batch).jaxpr
        text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))  # the addresses of functions
        digest = digests.of_bytes("\n".join([text, *map(digests.of_array, jaxpr.consts)]).encode())
        devices = getattr(self.step, "num_devices", jax.device_count())
        key = f"{size} rows, {devices} devices, jax {jax.__version__}"
        if self.run.programs.setdefault(key, digest) != digest:
            self.run.programs = {key: digest}
            self.say(
                "px.fit: the training step is another program than the one that was saved: an option, the optimiser, "
                "the model or the loss has changed"
            )

    def _between(self, stop: processes.StopSignal) -> None:
        """Do what is due after a step. The devices are waited for only if something is."""
        due, checkpoints, at_epoch = self.due, self.checkpoints, self.run.next.within == 0
        is_best = source_of(self._best_by or "") in due  # it is saved, though no checkpoint is due
        saves = is_best or (checkpoints is not None and self._is_time(checkpoints.every))
        sees_epochs = self.callbacks or (self.rule is not None and not source_of(self.rule.metric))
        if due or saves or self.is_over or (at_epoch and sees_epochs):
            self._drain()
            self._finish(stop, saves=saves)
            processes.note_progress()

    def _finish(self, stop: processes.StopSignal, *, saves: bool) -> None:
        """Do evaluations that are due, and a checkpoint. What a signal leaves of them is done when the run goes on."""
        while due := self.due:
            name, one = due[0], self.evaluations[due[0]]
            hint = _hint(one.step, "px.eval_step")
            with noted(f"px.fit: raised by evaluation {name!r}, after step {self.num_steps}{hint}"):
                metrics = one(self.run.state, stop.asked)
            if not metrics:
                return
            self._require_named(metrics, name)
            self.run.recorder.evaluations.append(Record(self.num_steps, self._epoch, metrics))
            self._judge()
            self._tell("evaluate", metrics)
        if saves or self.is_over:
            self._save()

    def _require_named(self, metrics: Mapping[str, Any], source: str = "") -> None:
        for argument, metric in self._named.items():
            if source_of(metric) == source and metric not in metrics:
                names = ", ".join(map(repr, metrics)) or "none"
                raise DataError(
                    f"px.fit: {argument} names the metric {metric!r}, but there is {names}; write one of these"
                )

    def _judge(self) -> None:
        if self.rule is not None:
            self.best, self.reason = self.rule.judge((*self.run.recorder.epochs, *self.run.recorder.evaluations))

    def _drain(self) -> None:
        while self._pending:
            self._take()

    def _take(self) -> None:
        position, batch, waiting = self._pending.popleft()
        rows = rows_of(batch)
        sums = fetch(waiting, rows)
        processes.note_progress()  # not when the step is only under way: others may still be compiling theirs
        if not all(math.isfinite(x) for name in ("loss", "grad_norm") for x in sums.get(name, ())):
            raise self._failed(position, batch, sums)
        self._require_named(sums)
        step = position.number + 1
        self.run.recorder.add_step(step, position.epoch, sums)
        self._report(Event("step", step, position.epoch, means_of(sums), rows))
        if position.is_last:
            self.run.recorder.end_epoch(step, position.epoch)
            self._judge()
            metrics, state = self.run.recorder.epochs[-1].metrics, None if self._pending else self.run.state
            self._report(Event("epoch", step, position.epoch, metrics, 0, state))

    def _failed(self, position: Position, batch: Any, sums: Sums) -> NonFiniteError:
        """Return the error of a step that met what is not finite; nothing after it counts."""
        self._pending.clear()
        run, state, rows, done = self.run, None, None, ""
        with contextlib.suppress(DataError):  # a source of batches does not tell of their rows
            rows = self.data.rows(position.number) if isinstance(self.data, Loader) else None
        ok = getattr(run.state, "ok", None)
        if ok is not None and not bool(ok):  # steps have left the state as it was, and it may go on
            state = run.state = run.state.replace(ok=ok | True)
            run.next = position._replace(is_last=False)
            self._save()
            self._wait_for_checkpoint()
            where = f", and saved in {self.checkpoints.path}" if self.checkpoints and self.is_saved else ""
            done = f"The state after step {position.number} is error.state{where}. "
        total, weight = sums.get("loss", (math.nan, 1.0))
        loss = total / (weight or 1)
        listed = "" if rows is None else f", of rows {_listed(rows)}: data.rows({position.number})"
        why = (
            "All values of the batch are finite, so it is the model, or values that are too large: take smaller steps, "
            "or write px.train_step(loss, clip=1.0)"
        )
        if bad := "; ".join(_nonfinite(batch, rows)):
            why = f"These values of the batch are not finite themselves: {bad}. Mend these rows, or leave them out"
        error = NonFiniteError(
            f"px.fit: the {'gradient' if math.isfinite(loss) else 'loss'} is not finite in step {position.number + 1}, "
            f"{position} (loss {loss:.6g}){listed}. {done}{why}"
        )
        error.batch, error.state = batch, state
        return error

    def _save(self) -> None:
        checkpoints = self.checkpoints
        if checkpoints is None or self.is_saved:
            return
        for reporter in self.reporters:
            reporter.flush()
        self._wait_for_checkpoint()
        with self._going_on():
            checkpoints.save(self.num_steps, self.run.state, self.run.notes(self.data, self._best_by))
            self._saved = self.num_steps
            self._tell("checkpoint")

    def _wait_for_checkpoint(self) -> None:
        if self.checkpoints is not None:
            with self._going_on():
                self.checkpoints.wait()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Warn of a checkpoint that cannot be written and keep training; with several processes, raise.

        Those that could write their part still wait for this one inside Orbax.
        """
        try:
            yield
        except CheckpointError as error:
            if jax.process_count() > 1:
                raise
            self._saved = None
            warnings.warn(f"px.fit: {error}; later steps are in memory, and in what px.fit returns", stacklevel=4)

    def _tell(self, kind: Kind, metrics: dict[str, float] | None = None) -> None:
        self._report(Event(kind, self.num_steps, self._epoch, metrics or {}, 0, self.run.state))

    def _report(self, event: Event) -> None:
        for reporter in self.reporters:
            reporter(event)
        for callback in self.callbacks:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            with noted(f"px.fit: raised by the callback {name}, after step {event.step}"):
                callback(event)


def _hint(step: Any, make: str) -> str:
    return "" if hasattr(step, "trace") else f"; if it is a loss function, write {make}(loss)"


def _listed(rows: np.ndarray) -> str:
    listed = ", ".join(map(str, rows[:_MOST_ROWS]))
    return listed + (f", … ({len(rows)} in all)" if len(rows) > _MOST_ROWS else "")


def _nonfinite(batch: Any, rows: np.ndarray | None) -> list[str]:
    """Return which leaves have values that are not finite, and in which rows, as far as this process has them."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) and leaf.ndim else ()
        blocks = [(np.asarray(shard.data), shard.index[0].start or 0) for shard in shards] or [(np.asarray(leaf), 0)]
        inexact = [(np.atleast_1d(x), start) for x, start in blocks if jnp.issubdtype(x.dtype, jnp.inexact)]
        bad = np.array(sorted({row + start for x, start in inexact for row, *_ in np.argwhere(~np.isfinite(x))}), int)
        which = f" in rows {_listed(bad)} of the batch" if rows is None else f" in rows {_listed(rows[bad])}"
        found += [pytrees.name("batch", path) + (which if np.ndim(leaf) else "")] if bad.size else []
    return found
