"""Files that are there whole or not at all: written beside the old ones, and put in their place when done."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

ABSENT = (FileNotFoundError, IsADirectoryError, PermissionError)
"""Exceptions from opening a file that say nothing of its bytes."""


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


def put_back(target: Path, is_ours: Callable[[Path], bool]) -> None:
    """Put back, where nothing is, the directory that a process, killed since, had moved away to replace it.

    One that is alive needs a moment between the two, which is waited for.
    """
    target = Path(os.path.realpath(target))
    if os.path.lexists(target) or not target.parent.is_dir():
        return
    moved = re.compile(re.escape(_stem(target)) + r"[0-9a-f]{16}" + _OLD)
    for entry in sorted(target.parent.iterdir()):
        if moved.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink() and is_ours(entry):
            time.sleep(_MOMENT)
            if not os.path.lexists(target):
                with contextlib.suppress(OSError):  # somebody else was faster, or it may not be
                    entry.rename(target)
            return


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


def opened(path: Path) -> IO[bytes]:
    """Open an ordinary file, or a link to one, to be read. Of anything else, such as a pipe, nothing is waited for.

    Raises:
        OSError: if it cannot be read, or is something else.
    """
    return _opened(path, links=True)


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


def _opened(path: Path, *, links: bool = False) -> IO[bytes]:
    handle = os.open(path, os.O_RDONLY | (_NO_LINKS & ~getattr(os, "O_NOFOLLOW", 0) if links else _NO_LINKS))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode) and links:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))


def _mode(path: Path) -> int | None:
    """Kind and permissions of what is there, if anything is."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _beside(target: Path) -> Path:
    """Return a new name for what will take a place."""
    return target.with_name(f"{_stem(target)}{secrets.token_hex(8)}")


def _stem(target: Path) -> str:
    return f".{target.name[:40]}-"


_OLD = "-old"
_MOMENT = 0.5  # seconds


def _exchange(target: Path, new: Path, may_go: Callable[[Path], None] | None) -> None:
    """Put a new directory in the place of an old one, which goes; if that fails, the old one is back.

    Both change places at once where the system can do that: then whoever is killed in between leaves the one or the
    other. Elsewhere :func:`put_back` mends it.
    """
    old = new.with_name(f"{new.name}{_OLD}")
    if _swapped(new, target):
        # Only now: under its old name it could get more files after the check.
        try:
            if may_go is not None:
                may_go(new)
        except BaseException:
            if not _swapped(new, target):
                new.rename(old)  # it is what must stay, wherever that is
            raise
        shutil.rmtree(new)
        return
    try:
        target.rename(old)
        if may_go is not None:
            may_go(old)
        new.rename(target)
    except BaseException:
        if os.path.lexists(old):
            old.rename(target)
        raise
    shutil.rmtree(old)


def _swapped(one: Path, other: Path) -> bool:
    """Have two names change places at once; return whether the system, and the kind of disk, could."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _CHANGE_PLACES) == 0


_HERE, _CHANGE_PLACES = -100, 2  # of Linux: AT_FDCWD, RENAME_EXCHANGE
