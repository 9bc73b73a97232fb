"""The loop of a run: steps, and what is due between them. Results are looked at while later steps are under way."""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._host import processes
from paraxis.errors import CheckpointError, DataError, NonFiniteError, StateError
from paraxis.train._batches import rows_of
from paraxis.train._checkpoints import Checkpoints, SaveDecision, is_time
from paraxis.train._evaluate import Evaluate, StopEarly, Verdict
from paraxis.train._events import Callback, Event, Kind, Reporter
from paraxis.train._history import AHEAD, Record, Recorder, fetch, means_of, send
from paraxis.train._leaves import by_path
from paraxis.train._loader import Loader
from paraxis.train._loss import Mean, Metrics
from paraxis.train._sources import Batches, Keys, Position, Rows, noted

_NAME = "fit"  # of the notes that resume a run
_MOST_ROWS = 20  # listed in an error


class Stretch(NamedTuple):
    """Steps that are one program: the position of the last, their batches, the rows of each, and their number."""

    position: Position
    batch: Any
    rows: int
    num_steps: int = 1


Stretches = Generator[Stretch, None, None]
IsQuiet = Callable[[int, int], bool]


class Trained:
    """What a loop trains: a state; or, as a class of ensembles has it, their members.

    Attributes:
        state: what callbacks see.
        tree: what a checkpoint saves and restores of it.
        shape: that of a metric: ``()``, or ``(size,)`` of members.
    """

    shape: tuple[int, ...] = ()

    def __init__(self, state: Any, step: Any) -> None:
        self.state, self.step = state, step

    @property
    def tree(self) -> Any:
        return self.state

    @tree.setter
    def tree(self, tree: Any) -> None:
        self.state = tree

    def stretches(self, data: Batches, start: Position, is_quiet: IsQuiet) -> Stretches:
        """Yield what steps take, several at once only if ``is_quiet(first, last)``: nothing is due between."""
        # The arrays are the user's, and a step may consume them.
        self.state = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, self.state)
        return (Stretch(position, batch, rows_of(batch)) for position, batch in data.steps(start))

    def advance(self, batch: Any, active: np.ndarray | None) -> Any:
        """Take steps, with the members that are active; return metrics under way."""
        result = self.step(self.state, batch)
        if not isinstance(result, tuple) or len(result) != 2:  # a dict of two would be taken apart
            raise StateError(f"px.fit: step returned a {type(result).__name__}; write return state, {{'loss': loss}}")
        self.state, metrics = result
        return send(metrics)

    def evaluate(self, step: Any, batch: Any) -> Any:
        """Return metrics under way of a function of the state and a batch."""
        return send(step(self.state, batch))


@dataclasses.dataclass
class Loop:
    """The steps of a run, up to a number of ``epochs`` or ``steps`` in all.

    Attributes:
        rule: when the run, or a member, ends before.
        next, recorder, verdict: the next batch's position, the metrics so far, and what the rule says of them.
        best: the best state so far, as ``trained.tree``.
    """

    trained: Trained
    data: Batches
    epochs: int | None
    steps: int | None
    evaluations: dict[str, Evaluate]
    rule: StopEarly | None
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        self.reporters, self.recorder, self.best = list[Reporter](), Recorder(), None
        self.is_resumed = self.checkpoints is not None and self.checkpoints.latest is not None
        self._pending: collections.deque[tuple[Stretch, Any]] = collections.deque()
        self._sources: dict[str, str | None] = {}  # of each metric, its evaluation; None: it is one of training
        self._saved: int | None = None
        self._best_by = None if self.checkpoints is None else self.checkpoints.best_by
        named = (("stop_early", self.rule and self.rule.metric), ("best= of checkpoint", self._best_by))
        self._named = {argument: metric for argument, metric in named if metric}
        self.verdict = Verdict(self.rule, self.trained.shape)

    def begin(self) -> list[str]:
        """Begin from the last checkpoint, if there is one, else from the state. Return lines about it."""
        data, checkpoints, trained = self.data, self.checkpoints, self.trained
        if checkpoints is None or not self.is_resumed:
            self.next = _start_of(data, trained.state, 0)
            return []
        with noted(
            "px.fit: a run resumes with the state that it saved; with another model or optimiser, start elsewhere: "
            f"checkpoint='{checkpoints.path}-2'",
            of=StateError,
        ):
            target = trained.tree
            restored = checkpoints.restore(target)
        lines, note = [f"resumes from {checkpoints.path / str(restored.step)}"], restored.notes.get(_NAME)
        if note is None:  # saved by hand
            trained.tree = restored.tree
            self.next = _start_of(data, trained.state, restored.step)
            return lines
        saved, current = note["data"], json.loads(json.dumps(data.describe()))
        rows = current.pop("digests", None)
        if saved.pop("digests", rows) != rows:
            lines.append("the data have other rows than when it was saved")
        if changed := [name for name in {**saved, **current} if saved.get(name) != current.get(name)]:
            differences = "; ".join(f"{name} was {saved.get(name)!r} and is {current.get(name)!r}" for name in changed)
            raise DataError(
                f"px.fit: data is not what the checkpoint of step {restored.step} in {checkpoints.path} was "
                f"trained on: {differences}. Give the same data to resume the run, or another checkpoint= for a new one"
            )
        self.trained.tree, self.next = restored.tree, Position(*note["next"])
        self.recorder, now = Recorder.of(note["metrics"]), environment()
        if self.rule is not None and note.get("best") == [self.rule.metric, self.rule.mode]:
            self.best = checkpoints.restore(target, restored.step, best=True).tree
            for record in (*self.recorder.epochs, *self.recorder.evaluations):
                self.verdict.add(record)
        changes = {name: was for name, was in note["on"].items() if was != now[name]}
        return lines + [f"{name}: {was} when it was saved, {now[name]} now" for name, was in changes.items()]

    @property
    def is_over(self) -> bool:
        is_done = self.next.number >= self.steps if self.steps is not None else self.next.epoch >= (self.epochs or 0)
        return self.verdict.reason is not None or is_done

    @property
    def is_saved(self) -> bool:
        return self._saved == self.next.number

    @property
    def due(self) -> list[str]:
        """The evaluations that are due after the last step and not done; at the end, all of them are due."""
        due = [name for name, one in self.evaluations.items() if self.is_over or self._is_time(one.every)]
        done = {record.evaluation for record in self.recorder.evaluations if due and record.step == self.next.number}
        return [name for name in due if name not in done]

    def _is_time(self, every: int | SaveDecision | None) -> bool:
        """Return whether so many steps are done again; of ``None``, whether an epoch is."""
        return self.next.within == 0 if every is None else is_time(every, self.next.number)

    def _is_quiet(self, first: int, last: int) -> bool:
        """Return whether nothing is due after a step between these two, nor the end."""
        every = [one.every for one in (*self.evaluations.values(), self.checkpoints) if one is not None]
        return all(n is None or (isinstance(n, int) and (last - 1) // n == first // n) for n in (*every, self.steps))

    @property
    def _epoch(self) -> int:
        return self.next.epoch - (self.next.within == 0 and self.next.number > 0)

    def until(self, stop: processes.StopSignal) -> str | None:
        """Run all steps, or until a signal. The signal is returned; the run is saved in any case."""
        processes.begin_progress()
        self._tell("start")
        if self.is_resumed and self.due:  # a signal has left them out
            self._finish(stop, saves=True)
        if not self.is_over and not stop.asked():
            processes.begin_progress()  # what came before was no step
            with contextlib.closing(self._advanced() if processes.members is None else self._outlived()) as stretches:
                for stretch, metrics in stretches:
                    self._note(stretch, metrics)
                    if self._between(stop) or stop.asked():
                        break
        self._drain()
        signal = stop.asked()
        if signal is not None:
            self._save()
        self._tell("end")
        self._wait_for_checkpoint()
        return signal or stop.asked()

    def _advanced(self) -> Generator[tuple[Stretch, Any], None, None]:
        """Take steps; yield each with its metrics, which are under way."""
        with contextlib.closing(self.trained.stretches(self.data, self.next, self._is_quiet)) as stretches:
            for stretch in stretches:
                yield stretch, self._advance(stretch)

    def _outlived(self) -> Generator[tuple[Stretch, Any], None, None]:
        """Take steps as :meth:`_advanced`, each of them again on the devices that are left if a process is lost."""
        length, known, stretches = self.data.length, None, iter(())
        result: tuple[Stretch, Any] | None = None

        def body(number: int, tree: Any) -> Any:
            nonlocal known, stretches, result
            self.trained.tree, here = tree, (number, jax.sharding.get_mesh())
            if known != here:  # batches are laid out anew
                stretches = self.trained.stretches(self.data, Position.of(number, length), lambda *_: False)
            stretch, known = next(stretches), (number + 1, here[1])
            result = stretch, self._advance(stretch)
            return self.trained.tree

        total = self.steps if self.steps is not None else (self.epochs or 0) * (length or 0)
        for _, tree in processes.members.turns(self.next.number, total, body, self.trained.tree):
            self.trained.tree, item, result = tree, result, None
            if item is not None:
                yield item

    def _advance(self, stretch: Stretch) -> Any:
        first, last = stretch.position.number + 2 - stretch.num_steps, stretch.position.number + 1
        which = f"step {last} ({stretch.position})" if first == last else f"one of the steps {first} to {last}"
        with noted(f"px.fit: raised by {which}{_hint(self.trained.step, 'px.train_step')}"):
            return self.trained.advance(stretch.batch, None if self.rule is None else self.verdict.active)

    def _note(self, stretch: Stretch, metrics: Any) -> None:
        position = stretch.position
        self._pending.append((stretch, metrics))
        if len(self._pending) > AHEAD:
            self._take()
        following = (position.epoch + 1, 0) if position.is_last else (position.epoch, position.within + 1)
        self.next = Position(position.number + 1, *following)

    def _between(self, stop: processes.StopSignal) -> bool:
        """Do what is due after a step; the devices are waited for only if something is. Return whether the run ends."""
        ends, ends_epoch = self.is_over, self.next.within == 0
        saves = self.checkpoints is not None and self._is_time(self.checkpoints.every)
        if not (ends or saves or (ends_epoch and (self.callbacks or self.rule)) or (self.evaluations and self.due)):
            return False
        self._drain()
        self._finish(stop, saves=saves)
        processes.note_progress()
        return self.is_over

    def _finish(self, stop: processes.StopSignal, *, saves: bool) -> None:
        """Do evaluations that are due, and a checkpoint. What a signal leaves of them is done when the run goes on."""
        while due := self.due:
            name, one = due[0], self.evaluations[due[0]]
            hint = _hint(one.step, "px.eval_step")
            with noted(f"px.fit: raised by evaluation {name!r}, after step {self.next.number}{hint}"):
                metrics = one(self.trained, stop.asked)
            if not metrics:
                return
            self._require_named(metrics, name)
            saves = saves or self._best_by in metrics  # it is saved, though no checkpoint is due
            record = Record(self.next.number, self._epoch, metrics, name)
            self.recorder.evaluations.append(record)
            self._judge(record)
            self._tell("evaluate", metrics)
        if saves or self.is_over:
            self._save()

    def _require_named(self, metrics: Mapping[str, Any], evaluation: str | None = None) -> None:
        """Note whose metrics these are; refuse a name that is another's too, or that no one can give."""
        for name in metrics:
            if self._sources.setdefault(name, evaluation) != evaluation:
                raise DataError(f"px.fit: two things are called {name!r}; write px.Evaluate(…, name='second')")
        for argument, metric in self._named.items():
            awaited = self.evaluations.keys() - {*self._sources.values()}
            if metric not in self._sources and not any(metric.startswith(f"{name}/") for name in awaited):
                names = ", ".join(map(repr, self._sources)) or "none"
                raise DataError(f"px.fit: {argument} names {metric!r}, but there is {names}; write one, or evaluate=…")

    def _judge(self, record: Record) -> None:
        """Keep the state, or those of members, that are better than before."""
        if not (improved := self.verdict.add(record)).any():
            return

        def better(new: Any, old: Any) -> Any:  # a copy, as the next step consumes the state
            mask = improved.reshape(improved.shape + (1,) * (np.ndim(new) - improved.ndim))
            return jnp.where(mask, new, old) if isinstance(new, jax.Array) else new

        tree = self.trained.tree
        self.best = jax.tree.map(better, tree, tree if self.best is None else self.best)

    def _drain(self) -> None:
        while self._pending:
            self._take()

    def _take(self) -> None:
        stretch, waiting = self._pending.popleft()
        position, count, shape = stretch.position, stretch.num_steps, self.trained.shape
        metrics = fetch(waiting, stretch.rows, (*shape, count) if shape else ())
        processes.note_progress()  # not when the step is only under way: others may still be compiling theirs
        for k in range(count):
            step, sums = position.number + 2 - count + k, metrics
            if shape:
                sums = {name: Mean(mean.total[:, k], mean.weight[:, k]) for name, mean in metrics.items()}
            elif not all(math.isfinite(sums[name].compute()) for name in sums.keys() & {"loss", "grad_norm"}):
                raise self._failed(stretch, sums)
            self._require_named(sums)
            self.recorder.add_step(step, position.epoch, sums)
            if self.reporters or self.callbacks:
                self._report(Event("step", step, position.epoch, means_of(sums), stretch.rows))
        if position.is_last:
            record = self.recorder.end_epoch(position.number + 1, position.epoch)
            self._judge(record)
            state = None if self._pending else self.trained.state
            self._report(Event("epoch", record.step, record.epoch, record.metrics, 0, state))

    def _failed(self, stretch: Stretch, sums: Metrics) -> NonFiniteError:
        """Return the error of a step that met what is not finite; nothing after it counts."""
        self._pending.clear()
        state, done, (position, batch, *_) = None, "", stretch
        source = self.data.source if isinstance(self.data, Loader) else None
        rows = source.order.rows(position.number) if isinstance(source, Rows) else None
        ok = getattr(self.trained.state, "ok", None)
        if ok is not None and not bool(ok):  # steps have left the state as it was, and it may go on
            state = self.trained.tree = self.trained.state.replace(ok=ok | True)
            self.next = position._replace(is_last=False)
            self._save()
            self._wait_for_checkpoint()
            where = f", and saved in {self.checkpoints.path}" if self.checkpoints and self.is_saved else ""
            done = f"The state after step {position.number} is error.state{where}. "
        loss = means_of(sums).get("loss", math.nan)
        listed = "" if rows is None else f", of rows {_listed(rows)}: data.rows({position.number})"
        why = "All values of the batch are finite: take smaller steps, or write px.train_step(loss, clip=1.0)"
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
            note = {
                "next": self.next,
                "data": self.data.describe(),
                "metrics": vars(self.recorder),
                "best": self.rule and self.best is not None and [self.rule.metric, self.rule.mode],
                "on": environment(),
            }
            unknown = {self._best_by: math.nan} if self._best_by else {}  # unless it was evaluated after this step
            notes = unknown | self.recorder.latest(self.next.number) | {_NAME: note}
            checkpoints.save(self.next.number, self.trained.tree, notes, best=self.best)
            self._saved = self.next.number
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

    def _tell(self, kind: Kind, metrics: dict[str, Any] | None = None) -> None:
        self._report(Event(kind, self.next.number, self._epoch, metrics or {}, 0, self.trained.state))

    def _report(self, event: Event) -> None:
        for reporter in self.reporters:
            reporter(event)
        for callback in self.callbacks:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            with noted(f"px.fit: raised by the callback {name}, after step {event.step}"):
                callback(event)


def environment() -> dict[str, Any]:
    """Return what the bits of a run depend on, apart from the program."""
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device kind": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "number of processes": jax.process_count(),
    }


def _start_of(data: Batches, state: Any, otherwise: int) -> Position:
    """Return the position of the batch after the steps that a state says it has done."""
    step = getattr(state, "step", None)
    number = otherwise if step is None or callable(step) else int(step)
    if number and data.length is None and not isinstance(data, Keys):
        raise DataError(f"px.fit: data has no length, by which a state after {number} steps continues; give a loader")
    return Position.of(number, data.length)


def _hint(step: Any, make: str) -> str:
    return "" if hasattr(step, "trace") else f"; if it is a loss function, write {make}(loss)"


def _listed(rows: np.ndarray) -> str:
    listed = ", ".join(map(str, rows[:_MOST_ROWS]))
    return listed + (f", … ({len(rows)} in all)" if len(rows) > _MOST_ROWS else "")


def _nonfinite(batch: Any, rows: np.ndarray | None) -> list[str]:
    """Return which leaves have values that are not finite, and in which rows, as far as this process has them."""
    leaves = []
    for name, leaf in by_path(batch, "batch").items():
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) and leaf.ndim else ()
        blocks = [(np.asarray(shard.data), shard.index[0].start or 0) for shard in shards] or [(np.asarray(leaf), 0)]
        inexact = [(np.atleast_1d(x), start) for x, start in blocks if jnp.issubdtype(x.dtype, jnp.inexact)]
        bad = np.array(sorted({row + start for x, start in inexact for row, *_ in np.argwhere(~np.isfinite(x))}), int)
        which = f" in rows {_listed(bad)} of the batch" if rows is None else f" in rows {_listed(rows[bad])}"
        leaves += [name + (which if np.ndim(leaf) else "")] if bad.size else []
    return leaves
