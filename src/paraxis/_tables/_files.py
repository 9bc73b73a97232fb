"""A folder's files as one table: in the order of their names, unchanged for as long as they are read."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from paraxis.errors import DataError


@dataclasses.dataclass(frozen=True)
class File:
    """A file as it was when it was first looked at."""

    who: str
    path: Path
    size: int
    time: int

    @classmethod
    def of(cls, who: str, path: Path) -> "File":
        stat = path.stat()
        return cls(who, path, stat.st_size, stat.st_mtime_ns)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the file is read.

        Raises:
            DataError: naming the file, if it cannot be read, or has changed before or after.
        """
        self.require()
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise DataError(f"{self.who}: {str(self.path)!r} cannot be read: {reason}") from error
        self.require()

    def require(self) -> None:
        """Check that the file is as it was."""
        try:
            stat = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.who}: {str(self.path)!r} is gone since it was looked at first: {error}") from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.time):
            raise DataError(
                f"{self.who}: {str(self.path)!r} has changed since it was looked at first, from {self.size:,} bytes "
                f"to {stat.st_size:,}; make the table anew when the file is complete"
            )


def place(files: Sequence[File], sizes: Sequence[int], row: int) -> str:
    """Return where a row of all files is, for messages."""
    for file, size in zip(files, sizes, strict=False):
        if row < size:
            return f"{str(file.path)!r}, row {row}"
        row -= size
    return f"row {row}"
