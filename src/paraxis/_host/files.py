"""Files that are there whole or not at all: written beside the old ones, and put in their place when done."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


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
    return target.with_name(f".{target.name[:40]}-{secrets.token_hex(8)}")
