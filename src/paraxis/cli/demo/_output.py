"""Files that are there whole or not at all."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paraxis.cli._errors import CommandError


def require_writable(directory: Path) -> None:
    """Make the directory and write to it once: better now than after the work.

    Raises:
        CommandError: if that fails.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CommandError(f"--out {directory} cannot be written to: {error.strerror}") from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``, which takes its place if the block succeeds and goes if it fails."""
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
