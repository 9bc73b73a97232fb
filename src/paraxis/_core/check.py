"""Checks of options that would otherwise be silently wrong, or fail far from their cause.

Python names a misspelt keyword, and JAX a leaf that it cannot take: neither is checked here.
"""

import contextlib
import functools
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from paraxis.errors import DataError

_P = ParamSpec("_P")
_R = TypeVar("_R")


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


def renamed(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let options be given by their old ``names`` for one release, with a warning that says what to write."""

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        who = fn.__qualname__.removesuffix(".__init__")

        @functools.wraps(fn)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for old in names.keys() & kwargs.keys():
                warnings.warn(f"{who}: {old}= is now called {names[old]}=", DeprecationWarning, stacklevel=2)
                kwargs[names[old]] = kwargs.pop(old)
            return fn(*args, **kwargs)

        return call

    return decorate


def has(who: str, argument: str, value: Any, attribute: str, write: str, error: type[Exception] = DataError) -> None:
    """Check that an argument is ``None`` or of the kind of what ``write`` makes, which has an attribute."""
    if value is not None and not hasattr(value, attribute):
        raise error(f"{who}: {argument} is {described(value)}; write {argument}={write}")


def number(
    who: str,
    argument: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    write: str = "",
    error: type[Exception] = ValueError,
    kind: Any = numbers.Real,
) -> Any:
    """Return a real number between bounds. NaN is in none; booleans are no numbers."""
    is_one = isinstance(value, kind) or (kind is numbers.Real and isinstance(value, jax.Array) and not value.shape)
    if is_one and not isinstance(value, bool) and least <= value <= most and (value > above or above == -math.inf):
        return value
    limits = (("of at least", least), ("above", above), ("of at most", most))
    bounds = " and ".join(f"{words} {bound}" for words, bound in limits if math.isfinite(bound))
    expected = f"{'a number' if kind is numbers.Real else 'an integer'} {bounds}".rstrip()
    raise error(f"{who}: {argument} must be {expected}, got {described(value)}{write and f'; write {write}'}")


def count(who: str, argument: str, value: Any, *, least: int = 1, most: int = 2**31 - 1, **options: Any) -> int:
    """Return an integer between two bounds as an ``int``; ``options`` are those of :func:`number`."""
    return int(number(who, argument, value, least=least, most=most, kind=numbers.Integral, **options))


def leaves(who: str, argument: str, tree: Any) -> None:
    """Check that JAX can take a tree's leaves as values: it cuts integers to 32 bits, and drops masks."""
    for at, leaf in jax.tree_util.tree_leaves_with_path(tree):
        label = f"{argument}{jax.tree_util.keystr(at)}"
        if isinstance(leaf, jax.Ref):  # elements that share one would write to it in no order
            raise DataError(
                f"{who}: {label} is a reference, {jax.typeof(leaf)}; give its value, r[...], return what is to be "
                f"written, and write after the map: r = jax.new_ref(px.map_fn(…))"
            )
        if isinstance(leaf, np.ma.MaskedArray):
            by_position(who, label, leaf)
        if not isinstance(leaf, (np.ndarray, np.integer)) or leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
        info, ends = np.iinfo(kept), () if kept == leaf.dtype else (leaf.min(), leaf.max())
        for end in ends:
            if not info.min <= end <= info.max:
                raise DataError(
                    f"{who}: {label} holds {end} ({leaf.dtype}), which {kept} does not hold; write x.astype(float), "
                    "np.unique(x, return_inverse=True)[1] for names, or jax.config.update('jax_enable_x64', True)"
                )


def no_sparse(argument: str, tree: Any) -> None:
    """Check that no sparse matrix of JAX's is mapped: its shape is in its structure, and does not lose the axis."""
    if (kind := getattr(sys.modules.get("jax.experimental.sparse"), "JAXSparse", None)) is None:
        return
    is_sparse = lambda x: isinstance(x, kind)  # noqa: E731
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        # One that all elements share has leaves with one dimension more than its shape says.
        if is_sparse(x) and x.data.ndim - 1 + getattr(x, "n_sparse", 2) == len(x.shape):
            label = f"{argument}{jax.tree_util.keystr(path)}"
            raise DataError(
                f"map_fn: {label} is a sparse matrix, {type(x).__name__}{list(x.shape)}; map its arrays, (m.data, "
                f"m.indices), and write sparse.BCOO((data, indices), shape=…) where it is used; or px.broadcast(m)"
            )


_OTHERWISE = {  # what has it, and what to write
    "iloc": "goes by its labels, not by position; write .to_numpy()",
    "tocsr": "is a sparse matrix; write .toarray()",
    "filled": "leaves entries out, which would come back; write .filled(0), and give .mask as an array of its own",
}


def by_position(who: str, argument: str, tree: Any) -> None:
    """Check that no container's ``[i]`` is something else than NumPy's row ``i``."""
    kind = lambda x: next((name for name in _OTHERWISE if hasattr(x, name)), None)  # noqa: E731
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: kind(x) is not None):
        if name := kind(x):
            label = f"{argument}{jax.tree_util.keystr(path)}"
            raise DataError(f"{who}: {label} is a {type(x).__name__}, which {_OTHERWISE[name]}")


@contextlib.contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Guard imports of packages that only an extra of ours brings: of a missing one, say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "paraxis"):
            raise
        message = f"{what} needs {package}, which is not installed; write pip install 'paraxis[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error
