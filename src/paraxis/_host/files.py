"""Files that are there whole or not at all: written beside the old ones, and put in their place when done."""

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``target`` when the block is done; if the block fails, it goes.

    What was written is on the disk before an old file goes. Directories that lead to it are made. As with
    ``open(target, "w")``, a new file has the mode that the umask allows, an old one keeps its own, where ``target``
    is a link, what it leads to is written, and so is a pipe or a device.
    """
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name[:40]}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_PATIENCE = 50  # tenths of a second


def locked(path: Path) -> int:
    """Return the handle of a locked file; a killed process may hold its lock for some time after it is gone."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    for _ in range(_PATIENCE):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return handle
    os.close(handle)
    raise BlockingIOError(f"another run saves there: {path}")


def remove_rests(target: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left beside it."""
    for path in target.parent.glob(f".{target.name[:40]}-*"):
        path.unlink(missing_ok=True)
