"""Files that are there whole or not at all: written beside the old ones, and put in their place when done."""

import contextlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy and its archive's reader raise on bytes that are not what was written."""

ABSENT = (FileNotFoundError, IsADirectoryError, PermissionError)
"""What opening a file raises that says nothing of its bytes."""


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``target`` when the block is done; if that fails, it goes.

    What was written is on the disk before an old file goes. Directories that lead to it are made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replaced_directory(target: Path, may_go: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A directory to write to, which takes the place of ``target`` when the block is done; if that fails, it goes.

    Args:
        target: need not be there.
        may_go: is called with the place that the old directory has by then, just before it goes; it raises if that
            must stay, and it is back where it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        temporary.chmod(0o755)
        yield temporary
        if target.exists():
            _exchange(target, temporary, may_go)
        else:
            temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _exchange(target: Path, new: Path, may_go: Callable[[Path], None] | None) -> None:
    """Put a new directory in the place of an old one, which goes; if that fails, the old one is back."""
    old = new.with_name(f"{new.name}-old")
    target.rename(old)
    try:
        # Only now: under its old name it could get more files after the check.
        if may_go is not None:
            may_go(old)
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)
