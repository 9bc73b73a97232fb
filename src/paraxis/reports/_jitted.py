"""The jitted function inside a bound method or a ``functools.partial``, and the arguments that these add to a call."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def found(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the jitted function that a call comes to, and its arguments there; what is not jitted, as it is."""
    inner, positional, named = fn, tuple(args), dict(kwargs)
    while True:
        if isinstance(inner, functools.partial):
            positional, named = (*inner.args, *positional), {**inner.keywords, **named}
            inner = inner.func
        elif inspect.ismethod(inner):
            positional = (inner.__self__, *positional)
            inner = inner.__func__
        else:
            return (inner, positional, named) if is_one(inner) else (fn, tuple(args), dict(kwargs))


def is_one(fn: Any) -> bool:
    """Return whether a function can be lowered, as what ``jax.jit`` returns can."""
    return hasattr(fn, "lower")


def by(fn: Callable[..., Any]) -> str:
    """Return the name of the library that jits a function; empty: JAX does, or it is not jitted."""
    library = type(fn).__module__.partition(".")[0]
    return library if is_one(fn) and library not in ("builtins", "jax", "jaxlib", "paraxis") else ""
