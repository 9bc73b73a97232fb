"""Every call of a jitted function while somebody else's program runs: which function, and what it was given."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from paraxis._core import jax_api
from paraxis.reports._explain import explain
from paraxis.reports._report import Report


class Called:
    """A jitted function that was called with arrays of some shapes.

    Attributes:
        name: of the function.
        times: how often.
    """

    def __init__(self, jitted: Any, name: str, args: Any, kwargs: Any) -> None:
        self.name = name
        self.times = 0
        self._jitted = jitted
        self._given = jax.tree.map(_struct, (args, kwargs))

    def report(self) -> Report:
        """Return the report on it; nothing is run."""
        args, kwargs = self._given
        return explain(self._jitted)(*args, **kwargs)


@contextlib.contextmanager
def watching() -> Iterator[list[Called]]:
    """Within, note the calls of functions that ``jax.jit`` makes; those in functions that JAX traces are part of these.

    It replaces ``jax.jit`` for the whole process. Functions that were jitted before are not seen.
    """
    found: list[Called] = []
    by_kind: dict[Any, Called] = {}

    def note(jitted: Any, args: Any, kwargs: Any) -> None:
        leaves, structure = jax.tree.flatten((args, kwargs))
        kind = (id(jitted), structure, *map(_kind, leaves))  # what it names is kept, so no other has its number
        if kind not in by_kind:
            by_kind[kind] = Called(jitted, _name(jitted), args, kwargs)
            found.append(by_kind[kind])
        by_kind[kind].times += 1

    real = jax.jit

    @functools.wraps(real)
    def jit(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        return _Watched(made, note) if hasattr(made, "lower") else lambda fun: _Watched(made(fun), note)

    jax.jit = jit
    try:
        yield found
    finally:
        jax.jit = real


class _Watched:
    """What ``jax.jit`` returns, and tells of its calls."""

    def __init__(self, jitted: Any, note: Callable[[Any, Any, Any], None]) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted, self._note = jitted, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jax_api.is_tracing():
            self._note(self._jitted, args, kwargs)  # before it may give its arguments away
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _struct(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer):
        return x
    sharding = x.sharding if len(x.sharding.device_set) > 1 else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding if len(x.sharding.device_set) > 1 else None
    return (x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else type(x)


def _name(jitted: Any) -> str:
    inner = getattr(jitted, "__wrapped__", jitted)
    inner = getattr(inner, "func", inner)  # of a partial
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name.replace("<locals>.", "")
