"""Files that are there whole or not at all: written beside the old ones, and put in their place when done."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

ABSENT = (FileNotFoundError, IsADirectoryError, PermissionError)
"""What opening a file raises that says nothing of its bytes."""


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``target`` when the block is done; if the block fails, it goes.

    What was written is on the disk before an old file goes. Directories that lead to it are made. As with
    ``open(target, "w")``, a new file has the mode that the umask allows, an old one keeps its own, and where ``target``
    is a link, what it leads to is written.

    Raises:
        OSError: if it cannot be written; ``FileExistsError``: if it is there and is not an ordinary file.
    """
    target = Path(os.path.realpath(target))
    old = _mode(target)
    if old is not None and not stat.S_ISREG(old):
        raise FileExistsError(errno.EEXIST, "it is there and is not an ordinary file", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(target)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if old is not None:
            temporary.chmod(stat.S_IMODE(old))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replaced_directory(target: Path, may_go: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Make a directory that takes the place of ``target`` when the block is done; if the block fails, it goes.

    A new one has the mode that the umask allows, an old one keeps its own. Where ``target`` is a link, what it leads to
    is replaced.

    Args:
        target: need not be there.
        may_go: is called with the place that the old directory has by then, just before it goes; it raises if that
            must stay, and it is back where it was.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(target)
    temporary.mkdir()
    try:
        yield temporary
        old = _mode(target)
        if old is None:
            temporary.rename(target)
        else:
            temporary.chmod(stat.S_IMODE(old))
            _exchange(target, temporary, may_go)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def contents(path: Path, most: int) -> bytes:
    """Return the bytes of an ordinary file. Links are not followed, and pipes not waited for.

    Raises:
        OSError: if it cannot be read, or is something else, or has more bytes.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))
        return file.read(most)


def beginning(path: Path, most: int) -> bytes:
    """Return the first bytes of an ordinary file, of whatever size, likewise.

    Raises:
        OSError: if it cannot be read, or is something else.
    """
    with _opened(path) as file:
        return file.read(most)


def open_own(path: Path) -> int:
    """Return a handle of a file that is made if need be, to be read and written. It is not a link, and stays as it is.

    Raises:
        OSError: if it cannot be made; ``FileExistsError``: if it is there and is not an ordinary file.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO):
            raise FileExistsError(errno.EEXIST, "it is there and is not an ordinary file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileExistsError(errno.EEXIST, "it is there and is not an ordinary file", str(path))
    return handle


_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def _opened(path: Path) -> IO[bytes]:
    handle = os.open(path, os.O_RDONLY | _NO_LINKS)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


def _mode(path: Path) -> int | None:
    """Kind and permissions of what is there, if anything is."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _beside(target: Path) -> Path:
    """Return a new name for what will take a place."""
    return target.with_name(f".{target.name[:40]}-{secrets.token_hex(8)}")


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
