"""Checks that a command can write where it is to, before the work, not after it."""

import itertools
import os
import tempfile
from pathlib import Path

from paraxis.cli._errors import CommandError


def require_creatable(out: Path) -> None:
    """Check that a file or a directory can be put in this place, by making one beside it that goes at once.

    Raises:
        CommandError: if not.
    """
    try:
        place = out.resolve()
        there = next(path for path in place.parents if path.exists())
        if not there.is_dir():
            raise CommandError(f"--out {out} cannot be written to: {there} is a file")
        Path(tempfile.mkdtemp(dir=there, prefix=f".{place.name}-")).rmdir()
    except (OSError, RuntimeError) as error:  # the latter of links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"--out {out} cannot be written to: {reason}; give another place") from None


def unused(out: Path) -> Path:
    """Return the first of ``out-2``, ``out-3`` … that is not there."""
    names = (out.with_name(f"{out.stem}-{number}{out.suffix}") for number in itertools.count(2))
    return next(name for name in names if not os.path.lexists(name))
