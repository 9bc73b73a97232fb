"""Checks of options that would otherwise be silently wrong, or fail far from their cause.

Python names a misspelt keyword, and JAX a leaf that it cannot take: neither is checked here.
"""

import contextlib
import math
import numbers
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from paraxis.errors import DataError


def described(value: Any) -> str:
    """Return a value as an error shows it, on one line."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array {value.dtype}{list(value.shape)}"
    shown = repr(value).partition("\n")[0]
    return shown if len(shown) <= 60 else f"{shown[:50]}… ({type(value).__name__})"


def one_of(who: str, argument: str, value: Any, choices: tuple[Any, ...], error: type[Exception] = ValueError) -> None:
    """Check that an argument is one of some choices."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise error(f"{who}: {argument} must be one of {', '.join(map(repr, choices))}, got {described(value)}")


def count(
    who: str,
    argument: str,
    value: Any,
    *,
    least: int = 1,
    most: int = 2**31 - 1,
    write: str = "",
    error: Any = ValueError,
) -> int:
    """Return an integer between two bounds as an ``int``. Booleans are none."""
    found: Any = value if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if found is not None and least <= found <= most:
        return int(found)
    expected = f"at most {most:,}" if found is not None and found > most else f"an integer of at least {least}"
    raise error(f"{who}: {argument} must be {expected}, got {described(value)}{write and f'; write {write}'}")


def number(
    who: str,
    argument: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    write: str = "",
    error: Any = ValueError,
) -> None:
    """Check that an argument is a real number between bounds. NaN is in none; booleans are no numbers."""
    is_real = isinstance(value, numbers.Real) or (isinstance(value, jax.Array) and not value.shape)
    x = float(value) if is_real and not isinstance(value, bool) else math.nan
    if not (least <= x <= most and (x > above or above == -math.inf)):
        said = (("of at least", least), ("above", above), ("of at most", most))
        bounds = " and ".join(f"{words} {bound:g}" for words, bound in said if math.isfinite(bound))
        expected = f"must be a number {bounds}".strip()
        raise error(f"{who}: {argument} {expected}, got {described(value)}{write and f'; write {write}'}")


_KEPT = {np.dtype(np.int64): np.iinfo(np.int32), np.dtype(np.uint64): np.iinfo(np.uint32)}


def no_cut(who: str, argument: str, tree: Any) -> None:
    """Check that JAX keeps a tree's integers: where 64 bits are off, it cuts those beyond 32 in silence."""
    for at, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kept: Any = None if isinstance(leaf, jax.Array) else _KEPT.get(getattr(leaf, "dtype", None))  # type: ignore[arg-type]
        if kept is None or not np.size(leaf) or jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
            continue
        worst = max(np.min(leaf), np.max(leaf), key=lambda x: max(int(x) - kept.max, kept.min - int(x)))
        if not kept.min <= worst <= kept.max:
            raise DataError(
                f"{who}: {argument}{jax.tree_util.keystr(at)} holds {worst} ({leaf.dtype}), which {kept.dtype} does "
                "not hold; write x.astype(np.float32) for a quantity, np.unique(x, return_inverse=True)[1] for names "
                "of things, or jax.config.update('jax_enable_x64', True)"
            )


@contextlib.contextmanager
def needed(what: str, extra: str, instead: str = "") -> Iterator[None]:
    """Guard imports of packages that only an extra of ours brings: of a missing one, say how to install it.

    ``what`` needs them, and ``instead`` says what can be done without, such as ``"or leave plot out"``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "paraxis"):
            raise
        said = f"{what} needs {package}, which is not installed; write pip install 'paraxis[{extra}]'"
        raise ModuleNotFoundError(", ".join(filter(None, [said, instead])), name=error.name) from error
