"""The right to write to a directory: one process has it, from its first save until it is done, one save at a time."""

import contextlib
import os
import re
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Self

from paraxis._host import files

_PATIENCE = 10.0
"""Seconds. A process that was killed gives up its files some time after it has vanished from sight."""

_LENGTH = 400  # of what is written into a lock; always as long, so that there is nothing to be cut off


class Lock:
    """A file that is locked until it is released, or dropped, or the process ends."""

    _close = staticmethod(os.close)  # when Python ends, a lock may outlive the names of this file

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    @classmethod
    def take(cls, path: Path, wait: bool) -> "Lock | None":
        """Return the lock, or ``None`` if it is another's and not to be waited for.

        Raises:
            OSError: if the file cannot be made.
        """
        handle = files.open_own(path)
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            return None
        except (ImportError, OSError):  # no such locks on this system, or on this kind of disk
            pass
        except BaseException:
            os.close(handle)
            raise
        return cls(handle)

    def release(self) -> None:
        """Let others write."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._close(handle)

    def sign(self) -> None:
        """Write the process's name into the file, for those who find it locked; not if it holds anything else."""
        if self._handle is not None and _is_signature(os.pread(self._handle, _LENGTH + 1, 0)):
            os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}".ljust(_LENGTH).encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    __del__ = release


# Of this process: the objects that write to one directory share one.
_claims: "weakref.WeakValueDictionary[str, Lock]" = weakref.WeakValueDictionary()
_one_at_a_time = threading.Lock()


def claim(path: Path) -> Lock:
    """Return the right of this process to write where a file lies, for as long as somebody holds what is returned.

    Raises:
        BlockingIOError: if another process has it.
        OSError: if the file cannot be made.
    """
    name = os.path.realpath(path)
    with _one_at_a_time:
        held = _claims.get(name)
        if held is None:
            held = _claims[name] = _awaited(path)
            with contextlib.suppress(OSError):
                held.sign()
        return held


def _awaited(path: Path) -> Lock:
    until = time.monotonic() + _PATIENCE
    while (lock := Lock.take(path, wait=False)) is None:
        if time.monotonic() > until:
            signature = files.beginning(path, _LENGTH + 1)
            owner = signature.decode().strip() if signature and _is_signature(signature) else "its name is not known"
            raise BlockingIOError(f"another process writes there ({owner}), and a directory is for one run at a time")
        time.sleep(0.1)
    return lock


def _is_signature(content: bytes) -> bool:
    """Return whether the whole of a file is what :meth:`Lock.sign` writes, or nothing."""
    return not content or (re.fullmatch(rb"process \d+ on [ -~]*", content) is not None and len(content) == _LENGTH)


def _forget() -> None:
    """Let go of the locks in a forked process: they are its parent's, and must end with that one."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    for lock in list(_claims.values()):
        lock.release()
    _claims.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
