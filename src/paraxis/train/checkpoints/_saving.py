"""One checkpoint on its way to the disk."""

import contextlib
import dataclasses
import functools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax

from paraxis._calls import integers
from paraxis._host import processes, records
from paraxis._jax import jax_api
from paraxis.errors import DataError, StateError
from paraxis.train.checkpoints import _leaves, _orbax, _packs, _records
from paraxis.train.checkpoints._checksums import checksum
from paraxis.train.checkpoints._differences import Kind
from paraxis.train.checkpoints._folders import Folder
from paraxis.train.checkpoints._locks import Lock

_LOG = logging.getLogger("paraxis")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint: arrays by their paths, and the record beside them."""

    arrays: dict[str, Any]
    record: dict[str, Any]


def checked_step(step: Any) -> int:
    """Return a step as an int, also from an array of one.

    Raises:
        DataError: if it is none.
    """
    number = integers.at_least(0, step)
    if number is None:
        raise DataError(
            f"save: step must be an integer of at least 0, got {step!r}; write save(int(state.step), state)"
        )
    return number


def checked_notes(notes: Any) -> dict[str, Any]:
    """Return notes as they will be read.

    Raises:
        DataError: if they are not JSON values.
    """
    notes = {} if notes is None else notes
    try:
        text = json.dumps(notes) if isinstance(notes, Mapping) else "null"
        copied = records.read(text.encode(), records.anything)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"save: notes must be JSON values: {error}; write numbers as float(loss)") from error
    if not isinstance(copied, dict):
        raise DataError(f"save: notes must be a dict, got {notes!r}; write save(step, tree, {{'note': ...}})")
    return copied


def checked_leaves(tree: Any) -> dict[str, tuple[Any, Kind]]:
    """Return the leaves of a tree by their paths.

    Raises:
        StateError: if one cannot be saved.
    """
    leaves = _leaves.named(tree, "save")
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct) or _is_donated(leaf):
            what = "a jax.ShapeDtypeStruct" if isinstance(leaf, jax.ShapeDtypeStruct) else "an array that was donated"
            raise StateError(f"save: {path} is {what} and has no value; save the state that the step returned")
    return {path: (leaf, _leaves.kind(path, leaf, "save")) for path, leaf in leaves.items()}


def contents(step: int, leaves: Mapping[str, tuple[Any, Kind]], notes: Mapping[str, Any]) -> Contents:
    """Return what is to be written, with the checksums."""
    arrays, entries = {}, {}
    for path, (leaf, kind) in leaves.items():
        entry, array = _leaves.stored(leaf)
        if array is not None:
            arrays[path] = array
            entry = {**entry, "checksum": checksum(array)}
        entries[path] = {**dataclasses.asdict(kind), **entry}
    packed = _packs.pack(arrays)
    for path, begin in packed.begins.items():
        entries[path]["begin"] = begin
    record = {"step": step, "notes": notes, "leaves": entries, "surroundings": _records.surroundings()}
    if packed.pack is not None:
        record["packed"] = packed.pack
    return Contents(packed.arrays, record)


class OfAnother(RuntimeError):  # noqa: N818  it says whose error it is, and never leaves the room
    """An error that another process met."""


class Saving:
    """A checkpoint that is being written in the background. The first process gives it its name when it is whole.

    Args:
        folder: where.
        what: is written.
        afterwards: is called when it has its name, in the first process; what it cannot do is not an error.
    """

    def __init__(self, folder: Folder, what: Contents, afterwards: Callable[[], None]) -> None:
        self.step: int = what.record["step"]
        self.error: Exception | None = None
        self._is_alone = False
        self._folder, self._record, self._afterwards = folder, what.record, afterwards
        self._thread: threading.Thread | None = None
        self._lock = self._begin()
        if self._failed_anywhere():
            self._end()
            return
        try:
            self._finish = _orbax.start_save(folder.staging(self.step), what.arrays)
        except Exception as error:  # whatever it is, it is raised where it is waited for
            self.error = error
            self._end()
            return
        except BaseException:
            self._end()
            raise
        _wait_at_exit(self)
        self._thread = threading.Thread(target=self._write, name=f"checkpoint of step {self.step}")
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Return whether a save runs in the background."""
        return self._thread is not None

    def wait(self) -> Exception | None:
        """Return what went wrong, if anything, in this process or in another.

        When one process cannot write its part, the others wait for it inside Orbax, for minutes. It does not wait
        for them in turn, neither here nor where the writing begins: once it has ended, its launcher ends them.
        """
        if self._thread is not None:
            self.join()
            _unfinished.discard(self)
            if not self._is_alone:
                self._failed_anywhere()
        return self.error

    def join(self) -> None:
        """Wait until this process has done its part."""
        if self._thread is not None:
            self._thread.join()

    def _failed_anywhere(self) -> bool:
        for number, error in processes.reports("" if self.error is None else repr(self.error)).items():
            self.error = self.error or OfAnother(f"process {number} could not write its part: {error}")
        return self.error is not None

    def _begin(self) -> Lock | None:
        """Make the place, in the first process."""
        if not processes.is_first():
            return None
        try:
            self._folder.check_free(self.step)
            self._folder.claim()
            lock = self._folder.lock(wait=True)
            try:
                self._folder.tidy()
                self._folder.try_staging(self.step)
            except BaseException:
                self._release(lock)
                raise
        except OSError as error:
            self.error = error
            return None
        return lock

    def _write(self) -> None:
        try:
            self._is_alone = True
            self._finish()
            self._is_alone = False
            if processes.is_first():
                self._folder.commit(self.step, self._record)
                with contextlib.suppress(OSError):
                    self._afterwards()
        except Exception as error:
            self.error = error
        finally:
            self._end()

    def _end(self) -> None:
        if self.error is not None and self._lock is not None:
            self._folder.discard(self.step)
        self._release(self._lock)

    @staticmethod
    def _release(lock: Lock | None) -> None:
        if lock is not None:
            lock.release()


def _is_donated(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax_api.Tracer) and leaf.is_deleted()


_unfinished: "weakref.WeakSet[Saving]" = weakref.WeakSet()


def _wait_at_exit(saving: Saving) -> None:
    """Have the interpreter wait for a checkpoint before it ends.

    It would wait for the thread anyway, but by then Orbax can start no more of its own: concurrent.futures refuses new
    work from the moment the interpreter begins to end. There is no public hook before that.
    """
    _register()
    _unfinished.add(saving)


@functools.cache
def _register() -> None:
    with contextlib.suppress(AttributeError, RuntimeError):
        threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]


def _finish_all() -> None:
    for saving in list(_unfinished):
        saving.join()
        if saving.error is not None:
            _LOG.error("the checkpoint of step %d could not be written: %s", saving.step, saving.error)
