"""A run's checkpoints in a directory: Orbax writes them; checksums, the lock and differences are ours."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import jax

from paraxis._core import check
from paraxis._host import files, processes
from paraxis.errors import CheckpointError, DataError, StateError
from paraxis.train import _leaves, _manifest

_Tree = TypeVar("_Tree")
_RECORD, _LOCK = "paraxis", "paraxis.lock"
_COMPLETE = "_CHECKPOINT_METADATA"  # Orbax's, in each checkpoint
_OWN = ("state", "metrics", "commit_success.txt", _manifest.NAME)  # what else is in one
_MOST_LISTED = 20  # differences


@dataclasses.dataclass(frozen=True)
class Restored(Generic[_Tree]):
    """The result of ``Checkpoints.restore``.

    Attributes:
        tree: a tree with the target's structure and sharding.
        notes: the notes that were saved with it.
        step: the step of the checkpoint that was used.
        differences: with ``partial=True``, a line for each leaf that was not taken from the checkpoint, and for each of
            the checkpoint's leaves that the target does not have; otherwise empty.
    """

    tree: _Tree
    notes: dict[str, Any]
    step: int
    differences: tuple[str, ...]


class SaveDecision(Protocol):
    """When a run saves, as Orbax's policies say it: ``px.Checkpoints(path, every=decision)``."""

    def should_save(self, step: int, /) -> bool:
        """Return whether to save after so many steps; with several processes, the same in all."""
        ...


class Checkpoints:
    """A directory of checkpoints, each of any pytree of arrays, random keys and Python numbers.

    Orbax writes them, in the background: a checkpoint is complete or absent, whatever ends the process. A manifest in
    each has the CRC-32 of its files; a damaged checkpoint is renamed, and the one before is used. Nothing is pickled.

    One run at a time may save to a directory: it holds a lock from its first save until its ``with`` or its process
    ends, or the object is gone. Any number of processes may read. The directory is Orbax's: keep nothing else in it.

    Args:
        path: path of the directory; it is created when something is saved. May be relative, and may begin with ``~``.
        every: number of steps between checkpoints, for ``is_due``, or a :class:`SaveDecision`; ``None``: none is due.
        keep: how many of the last checkpoints to keep; ``None``: all.
        keep_every: also keep the checkpoints of steps that are multiples of this number.
        best: ``("loss", "min")`` or ``("accuracy", "max")``: also keep the checkpoint whose notes have the best value.

    Raises:
        DataError: if an argument is malformed.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp, paraxis as px
        >>> state = {"w": jnp.arange(3.0), "epoch": 1}
        >>> with px.Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
        ...     for step in (10, 20, 30):
        ...         checkpoints.save(step, state, {"loss": 1 / step})
        >>> checkpoints.steps
        (20, 30)
        >>> checkpoints.restore(state).tree["w"]
        Array([0., 1., 2.], dtype=float32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | SaveDecision | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: tuple[str, Literal["min", "max"]] | None = None,
    ) -> None:
        for name, value in {"every": every, "keep": keep, "keep_every": keep_every}.items():
            if value is not None and not hasattr(value, "should_save"):
                check.count("Checkpoints", name, value, write=f"{name}=3", error=DataError)
        self.best_by, self._mode = best or (None, None)
        check.one_of("Checkpoints", "best[1]", self._mode, (None, "min", "max"), DataError)
        self.path, self.every = Path(os.path.abspath(Path(path).expanduser())), every
        policies = _leaves.orbax().training.preservation_policies
        kept = [policies.PreserveAll() if keep is None else policies.LatestN(keep)]
        kept += [] if keep_every is None else [policies.EveryNSteps(keep_every)]
        kept += [] if best is None else [policies.BestN(get_metric_fn=self._value, n=1)]
        self._kept = policies.AnyPreservationPolicy(kept)
        self._saver: Any = None
        self._unlock: weakref.finalize | None = None  # lets other runs save here
        self._writing: _manifest.Writing | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, in order; one that is still being written is not among them."""
        return tuple(sorted(int(path.name) for path in _numbered(self.path) if (path / _COMPLETE).exists()))

    @property
    def latest(self) -> int | None:
        """The last of the steps."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step whose notes have the best value, according to ``best=``; of two equal ones, the later."""
        values = {step: self._value(self._read(step)["notes"]) for step in self.steps} if self.best_by else {}
        return max((s for s in values if values[s] > -math.inf), key=lambda s: (values[s], s), default=None)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this many steps, according to ``every=``."""
        return self.every is not None and step > 0 and is_time(self.every, step)

    def save(self, step: int, tree: Any, notes: Mapping[str, Any] | None = None, *, best: Any = None) -> None:
        """Save a tree as the checkpoint of a step, in the place of an older one of that step.

        When ``save`` returns, the arrays have been copied: you may change or donate them. ``save`` waits for the
        checkpoint before.

        Args:
            step: number of the step, at least 0.
            tree: JAX and NumPy arrays, random keys and Python numbers in any containers. With several processes,
                arrays over the devices of all processes, and other values that are the same in all.
            notes: JSON values, such as the position in the data, or arrays; ``restore`` returns them.
            best: a second such tree, for ``restore(target, best=True)``; nothing of it, if ``None``.

        Raises:
            StateError: if a leaf cannot be saved; or if this is one of several processes that did not join the others.
            TypeError: if the notes are not JSON values.
            KeyError: if the notes lack the number that ``best=`` names.
            CheckpointError: if this checkpoint, or the one before, could not be written, or another run saves here.

        Communicates: barriers of JAX's coordination service. Each process copies the parts that it writes to its host.
        """
        processes.require_joined("px.Checkpoints")
        if processes.members is not None:
            raise StateError("px.Checkpoints need all processes; with lost='continue', save by np.savez in one")
        step = check.count("Checkpoints.save", "step", step, least=0, write="int(state.step)", error=DataError)
        plain = lambda x: x.tolist() if hasattr(x, "tolist") else vars(x)  # noqa: E731  # an array, a record
        noted: dict[str, Any] = json.loads(json.dumps(dict(notes or {}), default=plain))
        metrics = None if self.best_by is None else {self.best_by: float(noted[self.best_by])}
        arrays, record = _leaves.split(_leaves.by_path(tree) | _leaves.by_path(best, _leaves.BEST))
        self.wait()
        self.claim()
        with self._failing(step):
            if self._saver is None:
                self._saver = _leaves.orbax().training.Checkpointer(
                    self.path, preservation_policy=self._kept, cleanup_tmp_directories=True
                )
            response = self._saver.save_async(
                step,
                arrays,
                metrics=metrics,
                custom_metadata={_RECORD: {"notes": noted, **record}},
                force=True,
                overwrite=step in self.steps,
            )
        self._writing = _manifest.Writing(step, response, self.path / str(step))

    def wait(self) -> None:
        """Wait until the last saved checkpoint is written.

        Raises:
            CheckpointError: if it could not be written. Earlier checkpoints are there as before.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join()
        if writing.error is not None:
            with self._failing(writing.step):
                raise writing.error

    def restore(
        self, target: _Tree, step: int | None = None, *, partial: bool = False, best: bool = False
    ) -> Restored[_Tree]:
        """Return the tree of the last checkpoint, or of that of a given step.

        A damaged checkpoint is renamed, with a warning, and the one before is used. If you give ``step``, damage is an
        error, and nothing is renamed.

        Args:
            target: a tree of the same structure: of arrays, which are not changed, or of ``jax.ShapeDtypeStruct``. The
                restored arrays get the target's sharding, on any number of devices. A leaf may be a JAX array in one
                and a NumPy array in the other.
            step: one of ``steps``.
            partial: whether to take only the leaves that agree in path, shape and dtype, and the target's for the rest.
            best: whether to return the best state that a run with ``stop_early=`` had by then, in place of its last.

        Raises:
            StateError: if the checkpoint and the target differ in the paths, shapes or dtypes of their leaves; the
                message lists how. With ``partial``, if no leaf agrees.
            CheckpointError: if there is no checkpoint, or all are damaged; with several processes, in the first one.
            DeviceError: likewise, in the others.

        Communicates: all-gathers of 400 bytes, of which checkpoint the first process has chosen.
        """
        self.wait()
        with processes.together("Checkpoints.restore"):
            chosen = self._choose(step) if processes.is_first() else 0
        chosen = int(processes.reports(str(chosen))[0])
        record, leaves = self._read(chosen), _leaves.by_path(target, _leaves.BEST if best else "")
        differences = _leaves.compare(record["kinds"], leaves, best=best)
        restored = {path: leaf for path, leaf in leaves.items() if path not in differences}
        is_empty = any(isinstance(leaves.get(path), jax.ShapeDtypeStruct) for path in differences)
        if differences and (not partial or is_empty or not restored):
            lines = "\n  ".join([*differences.values()][:_MOST_LISTED])
            raise StateError(
                f"Checkpoints.restore: step {chosen} in {self.path} and the target differ in {len(differences)} leaves:"
                f"\n  {lines}\ngive a target like what was saved, or take what agrees: restore(target, partial=True)"
                f"{'; best=True is of runs with stop_early=, else restore(target, checkpoints.best)' if best else ''}"
            )
        merged = leaves | _leaves.load(self.path / str(chosen), record, restored)
        tree = jax.tree.unflatten(jax.tree.structure(target), merged.values())
        return Restored(tree, record["notes"], chosen, tuple(differences.values()))

    def claim(self) -> None:
        """Make the directory and hold its lock, in the first process; ``save`` does so too.

        Raises:
            CheckpointError: if another run holds it, or the directory cannot be written to.
        """
        if self._unlock is not None or not processes.is_first():
            return
        try:
            rests = [path for path in _numbered(self.path) if not (path / _COMPLETE).exists()]
            for path in rests:  # what a killed process has left of one that it removed; else Orbax would remove it
                if not all(entry.name.lstrip(".").startswith(_OWN) for entry in path.iterdir()):
                    raise CheckpointError(f"Checkpoints: {path} is no checkpoint; give a directory of its own")
            self.path.mkdir(parents=True, exist_ok=True)
            self._unlock = weakref.finalize(self, os.close, files.locked(self.path / _LOCK))
            for path in rests:
                shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints: {self.path} cannot be written to: {error}; write px.Checkpoints('{self.path}-2')"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._close()
            if self._unlock is not None:
                self._unlock()
                self._unlock = None

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, steps={self.steps})"

    def _choose(self, step: int | None) -> int:
        """Return the step to restore; rename damaged ones on the way."""
        damaged, steps = "", self.steps
        if not steps or step not in (None, *steps):
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"Checkpoints.restore: there is {which} in {self.path}, but {steps}")
        for candidate in reversed(steps) if step is None else (step,):
            directory = self.path / str(candidate)
            if (reason := _manifest.damage(directory)) is None:
                return candidate
            damaged += f"\n  {candidate}: {reason}"
            if step is None:
                names = (directory.with_name(f"damaged-{candidate}" + k * "-again") for k in itertools.count())
                aside = next(path for path in names if not path.exists())
                directory.rename(aside)
                self._close()
                warnings.warn(
                    f"the checkpoint of step {candidate} in {self.path} is damaged: {reason}; it is now {aside}, and "
                    "the one before it is used",
                    stacklevel=3,
                )
        raise CheckpointError(f"Checkpoints.restore: every checkpoint in {self.path} is damaged:{damaged}")

    def _read(self, step: int) -> dict[str, Any]:
        """Return the record beside a checkpoint's arrays, as :func:`_leaves.split` makes it, and the notes."""
        metadata = _leaves.orbax().metadata(self.path / str(step)).custom_metadata or {}
        if _RECORD not in metadata:
            raise CheckpointError(f"Checkpoints: {self.path / str(step)} was not saved by px.Checkpoints")
        return metadata[_RECORD]

    def _value(self, notes: Mapping[str, Any]) -> float:
        """Return how good notes are; a missing number and NaN are worst."""
        value = notes.get(self.best_by or "", math.nan)
        return -math.inf if math.isnan(value) else -value if self._mode == "min" else value

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Raise a failure to write as a CheckpointError, and begin anew with the next save."""
        try:
            yield
        except Exception as error:
            self._close()
            cause = error
            while (before := cause.__cause__ or cause.__context__) is not None:
                cause = before
            raise CheckpointError(
                f"Checkpoints.save: the checkpoint of step {step} could not be written to {self.path}: "
                f"{type(cause).__name__}: {str(cause)[:300]}; those of steps {self.steps} are there as before"
            ) from error

    def _close(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            with contextlib.suppress(Exception):  # of a save that failed, told by wait
                saver.close()


def is_time(every: int | SaveDecision, step: int) -> bool:
    return step % every == 0 if isinstance(every, int) else every.should_save(step)


def _numbered(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.name.isdecimal()] if path.is_dir() else []
