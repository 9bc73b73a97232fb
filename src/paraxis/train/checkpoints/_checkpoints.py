"""A run's checkpoints in a directory: written in the background, checked when they are read."""

import collections
import contextlib
import dataclasses
import errno
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import jax

from paraxis._calls import arguments
from paraxis._host import processes
from paraxis.errors import CheckpointError, DataError
from paraxis.train.checkpoints import _records
from paraxis.train.checkpoints._differences import Difference
from paraxis.train.checkpoints._folders import Folder
from paraxis.train.checkpoints._keeping import Keeping, checked_count
from paraxis.train.checkpoints._records import Damaged, Removed
from paraxis.train.checkpoints._restoring import found
from paraxis.train.checkpoints._saving import OfAnother, Saving, checked_leaves, checked_notes, checked_step, contents

_Tree = TypeVar("_Tree")
_PATIENCE, _PAUSE = 10.0, 0.5  # seconds
_COMPARED = 20
_ATTEMPTS = 3  # to read one that is listed and then not there


@dataclasses.dataclass(frozen=True)
class Restored(Generic[_Tree]):
    """The result of ``Checkpoints.restore``.

    Attributes:
        tree: a tree with the target's structure and sharding.
        notes: the notes that were saved with it.
        step: the step of the checkpoint that was used.
        differences: with ``partial=True``, the leaves that were not taken from the checkpoint, and the checkpoint's
            leaves that the target does not have; otherwise empty.
        changed: a description of each setting that affects the bits of a run and has changed since the checkpoint was
            saved: versions of JAX, kind and number of devices, number of processes, XLA's CPU threads.
    """

    tree: _Tree
    notes: dict[str, Any]
    step: int
    differences: tuple[Difference, ...]
    changed: tuple[str, ...]


class Checkpoints:
    """A directory of checkpoints, each of any pytree of arrays, random keys and Python numbers.

    A checkpoint is complete or absent: a killed process, a crash or a full disk does not affect earlier checkpoints.
    Each leaf has its own checksum, which does not depend on the devices. If a leaf is damaged, the checkpoint is
    renamed, and the one before is used. Nothing is pickled: Orbax writes the arrays, and everything else is JSON.

    Only one run at a time may save to a directory: the first process that saves keeps the directory until it ends,
    until its ``with`` ends, or until its objects for this directory are gone. Until then, other processes are refused,
    if the file system supports locks. Any number of processes may read. Several objects of one process may save to the
    directory; they take turns.

    Paraxis writes to directories named by the numbers of steps, to ``damaged-…``, and to ``.paraxis``, which holds
    locks and temporary files. It recognises them by a file inside, not by their names: it does not touch anything else
    in the directory, nor a checkpoint to which somebody has added files.

    Args:
        path: path of the directory; it is created when something is saved. May be relative, and may begin with ``~``.
        every: number of steps between checkpoints, for ``is_due``; ``None``: none is due.
        keep: how many of the last checkpoints to keep; ``None``: all.
        keep_every: also keep the checkpoints of steps that are multiples of this number.
        best: ``("loss", "min")`` or ``("accuracy", "max")``: also keep the checkpoint whose notes have the best value.
        asynchronous: whether ``save`` returns once it has copied the arrays, and writes in the background.

    Raises:
        DataError: if an argument is malformed.
        CheckpointError: if ``path`` exists and is not a directory; or if several processes see different checkpoints
            there for 10 s, because they do not share the directory.

    Communicates: several processes wait until the first one has tidied up, and compare what they see by an all-gather
    of 400 bytes. All must make the object and call its methods in the same way, and need a shared file system.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp, paraxis as px
        >>> state = {"w": jnp.arange(3.0), "epoch": 1}
        >>> with px.Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
        ...     for step in (10, 20, 30):
        ...         checkpoints.save(step, state, {"loss": 1 / step})
        >>> checkpoints.steps
        (20, 30)
        >>> restored = checkpoints.restore(state)
        >>> restored.step, restored.notes, restored.tree["w"]
        (30, {'loss': 0.03333333333333333}, Array([0., 1., 2.], dtype=float32))
    """

    @arguments.named()
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: tuple[str, Literal["min", "max"]] | None = None,
        asynchronous: bool = True,
    ) -> None:
        arguments.path("Checkpoints", "path", path, DataError)
        arguments.flag("Checkpoints", "asynchronous", asynchronous)
        self._every = checked_count("every", every)
        self._keeping = Keeping(checked_count("keep", keep), checked_count("keep_every", keep_every), best)
        self._asynchronous = asynchronous
        self._folder = Folder(_absolute(path))
        self._saving: Saving | None = None
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(
                f"Checkpoints: {self.path} is there and is not a directory; give another place: "
                f"px.Checkpoints('{self.path}-checkpoints')"
            )
        self._tidy()
        self._shared_steps()

    @property
    def path(self) -> Path:
        """The directory."""
        return self._folder.path

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, in order; one that is still being written is not among them."""
        return self._folder.steps()

    @property
    def latest(self) -> int | None:
        """The last of the steps."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step whose notes have the best value, according to ``best=``; of two equal ones, the later."""
        return self._keeping.best_of(self.steps, self._notes)

    @property
    def every(self) -> int | None:
        """The number of steps between checkpoints, if given."""
        return self._every

    @property
    def best_by(self) -> str | None:
        """The name in the notes by which the best checkpoint is found, if given."""
        return self._keeping.best[0] if self._keeping.best else None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this many steps, according to ``every=``."""
        step = arguments.count("Checkpoints.is_due", "step", step, least=0, write="step=100", error=DataError)
        return self._every is not None and step > 0 and step % self._every == 0

    def claim(self) -> None:
        """Reserve the directory for this process, so that no other run can save to it; ``save`` does so too.

        The reservation ends with a ``with`` block, with the last use of this object, or with the process. With several
        processes, the first one holds it.

        Raises:
            CheckpointError: if another run still holds the directory after 10 s, or it cannot be written to.

        Communicates: nothing.
        """
        if not processes.is_first():
            return
        try:
            self._folder.claim()
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints: {self.path} cannot be written to: {_reason(error)}; {_cure(error)}give another place: "
                f"px.Checkpoints('{self.path}-2')"
            ) from error

    @arguments.named()
    def save(self, step: int, tree: Any, notes: Mapping[str, Any] | None = None) -> None:
        """Save a tree as the checkpoint of a step; an older checkpoint of that step is replaced once it is complete.

        When ``save`` returns, the arrays have been copied: you may change or donate them. At most one checkpoint is
        being written at a time; ``save`` waits for the one before.

        Args:
            step: number of the step, at least 0.
            tree: JAX and NumPy arrays, random keys and Python numbers in any containers. With several processes,
                arrays over the devices of all processes, and other values that are the same in all.
            notes: JSON values, such as the position in the data; ``restore`` returns them.

        Raises:
            StateError: if a leaf cannot be saved; or if this is one of several processes that did not join the others.
            DataError: if the notes are not JSON values, or lack the number that ``best=`` names.
            CheckpointError: if this checkpoint, or the one before, could not be written. Existing checkpoints stay. If
                only this process could not write its part, the others still wait for it: let this process end.

        Communicates: barriers of JAX's coordination service, and 8 bytes for the checksum of each large array over
        several devices. Each process copies the parts that it writes to its host: until they are written, the hosts'
        memory holds one more copy of the tree, and the devices' none.
        """
        processes.require_joined("px.Checkpoints")
        step, notes, leaves = checked_step(step), checked_notes(notes), checked_leaves(tree)
        self._keeping.check(notes)
        self.wait()
        self._saving = Saving(self._folder, contents(step, leaves, notes), lambda: self._remove_others(step))
        if not self._asynchronous or not self._saving.has_begun:
            self.wait()

    def wait(self) -> None:
        """Wait until the last saved checkpoint is written.

        Raises:
            CheckpointError: if it could not be written; of several processes, it names the one that could not write.

        Communicates: one barrier, if something was being written.
        """
        if self._saving is None:
            return
        error = self._saving.wait()  # a Ctrl-C ends the waiting, not the writing
        step, self._saving = self._saving.step, None
        if error is not None:
            others, by, go_on = f"the others, of steps {', '.join(map(str, self.steps))}, are there as before", "", ""
            if processes.count() > 1:
                by = "" if isinstance(error, OfAnother) else f" by process {processes.index()} of {processes.count()}"
                where = "the beginning" if self.latest is None else f"step {self.latest}"
                go_on = f"; then start all processes again, to go on from {where}"
            raise CheckpointError(
                f"save: the checkpoint of step {step} could not be written to {self.path}{by}: {_reason(error)}; "
                f"{others if self.steps else 'there is no other'}. To save, {_cure(error)}give another place: "
                f"px.Checkpoints('{self.path}-2'){go_on}"
            ) from error

    @arguments.named()
    def restore(
        self,
        target: _Tree,
        step: int | None = None,
        *,
        partial: bool = False,
        check: Callable[[Mapping[str, Any]], None] | None = None,
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
            check: a function that is called with the notes before anything else is read; if it raises a
                ``ValueError``, the checkpoint counts as damaged.

        Raises:
            StateError: if the checkpoint and the target differ in the paths, shapes or dtypes of their leaves; the
                message lists how. With ``partial``, if no leaf agrees.
            CheckpointError: if there is no checkpoint, or all are damaged. A checkpoint that another process removes or
                replaces while it is read does not count as damaged: the directory is listed again.

        Communicates: all-gathers of 400 bytes, of what the processes found, and checksums as in ``save``. Each process
        reads the parts for its devices by itself.
        """
        arguments.flag("Checkpoints.restore", "partial", partial)
        if step is not None:
            step = arguments.count("Checkpoints.restore", "step", step, least=0, most=2**63, error=DataError)
        self.wait()
        damaged: dict[int, str] = {}
        removed: collections.Counter[int] = collections.Counter()
        # What is there is listed anew each time: a run that saves here removes some, and has others then.
        while (candidate := self._next(step, damaged, removed)) is not None:
            try:
                got = found(self._folder, candidate, target, partial, check)
            except Removed:
                removed[candidate] += 1
                continue
            except Damaged as error:
                damaged[candidate] = str(error)
                if step is None:
                    self._set_aside(candidate, str(error))
                continue
            tree = jax.tree.unflatten(jax.tree.structure(target), got.leaves)
            changed = _records.changes(got.record["surroundings"])
            return Restored(tree, got.record["notes"], candidate, got.differences, changed)
        raise CheckpointError(self._nothing(damaged, sorted(removed), step))

    def __enter__(self) -> Self:
        """Return itself for ``with``, at whose end all is written, and other processes may save here."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        """Wait; what could not be written is an error, unless there is another.

        After an error in one of several processes, it is not waited for the others: they are elsewhere.
        """
        try:
            if error is not None and self._saving is not None and processes.count() > 1:
                self._saving.join()
            else:
                self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._folder.unclaim()

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, steps={self.steps})"

    def _tidy(self) -> None:
        """Put in order what a killed process left, unless another one is writing."""
        if processes.is_first() and not self._folder.is_tidy():
            # What cannot be removed is in nobody's way; to write, as the next one, tells more of it.
            with contextlib.suppress(OSError):
                lock = self._folder.lock(wait=False)
                if lock is not None:
                    with lock:
                        self._folder.tidy()
        processes.barrier("the directory of checkpoints is tidy")

    def _shared_steps(self) -> tuple[int, ...]:
        """Return the steps that all processes see. What some see later they are given time to see.

        Raises:
            CheckpointError: if each process has a directory to itself.
        """
        until = time.monotonic() + _PATIENCE
        while len(set((seen := processes.reports(str((steps := self.steps)[-_COMPARED:]))).values())) > 1:
            if not processes.reports("" if time.monotonic() < until else "over"):
                time.sleep(_PAUSE)
                continue
            listed = "\n".join(f"  process {number}: {steps}" for number, steps in seen.items())
            raise CheckpointError(
                f"Checkpoints: the processes see different checkpoints in {self.path}:\n{listed}\n"
                f"give all of them the same path, of a directory on a file system that they share"
            )
        return steps

    def _next(self, step: int | None, damaged: Mapping[int, str], removed: Mapping[int, int]) -> int | None:
        """Return the step to read next, the last or the given one, if there is one that was not read in vain."""
        steps = self._shared_steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"restore: there is no checkpoint of step {step} in {self.path}; there are {steps}; "
                f"write restore(target) for the last one"
            )
        asked = steps if step is None else (step,)
        return max((s for s in asked if s not in damaged and removed.get(s, 0) < _ATTEMPTS), default=None)

    def _notes(self, step: int) -> Mapping[str, Any] | None:
        try:
            return self._folder.record(step)["notes"]
        except (Damaged, OSError):
            return None

    def _remove_others(self, step: int) -> None:
        for other in self._keeping.going(self.steps, step, self._notes):
            self._folder.remove(other)

    def _set_aside(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint, in the first process, and say so."""
        if processes.is_first() and self._folder.place(step).exists():
            try:
                place = f"it is now {self._folder.set_aside(step)}"
            except OSError as error:
                place = f"it could not be set aside: {error.strerror}"
            warnings.warn(
                f"the checkpoint of step {step} in {self.path} is damaged: {reason}; {place}, "
                f"and the one before it is used",
                stacklevel=4,
            )
        processes.barrier("a damaged checkpoint is set aside")

    def _nothing(self, damaged: Mapping[int, str], removed: Sequence[int], step: int | None) -> str:
        steps = ", ".join(map(str, removed))
        gone = f"the checkpoints of steps {steps} in {self.path} were removed by another process while they were read"
        if not damaged:
            what = f"{gone}, and there is no other" if removed else f"there is no checkpoint in {self.path}"
            return f"restore: {what}; look before whether checkpoints.latest is None"
        listed = "\n".join(f"  {number}: {reason}" for number, reason in damaged.items())
        if step is not None:
            others = tuple(other for other in self.steps if other != step)
            return (
                f"restore: the checkpoint of step {step} in {self.path} is damaged:\n{listed}\n"
                f"there are {others or 'no others'}; write restore(target) for the last one that is whole"
            )
        others = f"\n{gone}" if removed else ""
        return f"restore: every checkpoint in {self.path} is damaged, and was set aside:\n{listed}{others}"


def _absolute(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise DataError(
            f"Checkpoints: path must be that of a directory, got {os.fspath(path)!r}; mount what is there, and write "
            f"px.Checkpoints('/where/it/is/mounted')"
        )
    return Path(os.path.abspath(Path(path).expanduser()))


def _cure(error: Exception) -> str:
    """Return what else may help than another place."""
    if isinstance(error, BlockingIOError):
        return "wait for the other process or end it, or "
    if isinstance(error, FileExistsError):
        return "move what is there, or "
    if isinstance(error, PermissionError):
        return "change permissions, or "
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or "
    return "" if isinstance(error, OSError) else "make room, change permissions, or "


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:500] if text else type(error).__name__
