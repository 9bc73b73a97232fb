"""Errors for packages that an extra brings and that are missing, with the line that installs them."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed(what: str, extra: str, instead: str = "") -> Iterator[None]:
    """Guard imports that only an extra of the package provides.

    Args:
        what: what needs them, as users know it.
        extra: the extra's name in ``pyproject.toml``.
        instead: what can be done without it, such as ``"or leave plot out"``.

    Raises:
        ModuleNotFoundError: if a package is missing, saying how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (said := missing(what, extra, error)) is None:
            raise
        raise ModuleNotFoundError(", ".join(filter(None, [said, instead])), name=error.name) from error


def missing(what: str, extra: str, error: ModuleNotFoundError) -> str | None:
    """Return what to tell the user; nothing if it is a module of ours that is missing."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "paraxis"):
        return None
    return f"{what} needs {package}, which is not installed; write pip install 'paraxis[{extra}]'"
