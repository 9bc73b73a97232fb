"""A file that a run writes at the end of, and that no other run may write meanwhile."""

import contextlib
import errno
import os
import stat
import time
import warnings
import weakref
from pathlib import Path

_PATIENCE = 2.0
"""Seconds for a run that has been killed to be gone."""
_MOST_WAITING = 1 << 24
"""Bytes that are kept when they cannot be written: what is more is lost, and said to be."""
_FLUSH_SECONDS = 0.2


class Growing:
    """A file at whose end there is more and more. Training does not end because of it.

    What cannot be written, say on a full disk, is kept and tried again when there is more: so the file has no holes.
    Of the first failure there is a warning, and at the end another one if something is lost.

    Args:
        argument: that names the file, for messages.
        path: of the file, which is made if it is not there; as are the directories that lead to it.

    Raises:
        BlockingIOError: if another run writes to it.
        OSError: if it cannot be opened.
    """

    def __init__(self, argument: str, path: Path) -> None:
        self._argument, self._path = argument, path
        self._waiting = bytearray()
        self._has_failed = False
        self._num_lost = 0
        self._flushed = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._is_new = not os.path.lexists(path)
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _hold(self.handle, path)
        except BaseException:
            os.close(self.handle)
            raise
        _open.add(self)

    @property
    def is_regular(self) -> bool:
        """Return whether it is a file with contents, and not a pipe or a terminal."""
        return stat.S_ISREG(os.fstat(self.handle).st_mode)

    def add(self, data: bytes) -> None:
        """Add what belongs together. It is written soon."""
        if len(self._waiting) > _MOST_WAITING:
            self._num_lost += 1
        else:
            self._waiting += data
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self, *, to_disk: bool = False) -> None:
        """Give what was added to the system, which keeps it if this process is killed; or have it on the disk."""
        self._flushed = time.monotonic()
        try:
            self._write()
            if to_disk:
                _sync(self.handle)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"px.fit: {self._argument}: {self._path} cannot be written: {error.strerror or error}; training "
                    f"continues, and the lines are kept and tried again: make room",
                    stacklevel=2,
                )

    def write_now(self) -> None:
        """Give what was added to the system.

        Raises:
            OSError: if that fails.
        """
        self._write()

    def close(self) -> None:
        """Write what is left, or say that it is lost. Others may write to the file then."""
        if self.handle < 0:
            return
        try:
            self.flush(to_disk=True)
            lost = len(self._waiting)
        finally:
            self.drop()
        if lost or self._num_lost:
            more = f" and {self._num_lost} more records" if self._num_lost else ""
            warnings.warn(
                f"px.fit: {self._argument}: the last {lost} bytes{more} could not be written to {self._path}, and are "
                f"lost",
                stacklevel=2,
            )

    def withdraw(self) -> None:
        """Close it, and remove it if it was made for this run."""
        if self.handle >= 0 and self._is_new:
            self._path.unlink(missing_ok=True)
        self.drop()

    def drop(self) -> None:
        """Close it as it is."""
        _open.discard(self)
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    def _write(self) -> None:
        while self._waiting:  # at a full disk, a part may have been written
            del self._waiting[: os.write(self.handle, self._waiting)]


def _hold(handle: int, path: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while not is_free(handle):
        if time.monotonic() > until:
            raise BlockingIOError(errno.EAGAIN, "another run is writing to it", str(path))
        time.sleep(0.05)


def is_free(handle: int) -> bool:
    """Take an open file for this process; whether that was possible. It is where the system knows no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no such locks on this system, or on this kind of disk
        pass
    return True


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of a pipe, there is nothing to be had on a disk
            raise


_open: "weakref.WeakSet[Growing]" = weakref.WeakSet()


def _forget() -> None:
    """Close the files in a forked process: they are its parent's, and must be free when that one is gone."""
    for file in list(_open):
        with contextlib.suppress(OSError):
            file.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
