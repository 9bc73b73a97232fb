"""Every call of a jitted function while somebody else's program runs: which function, and what it was given."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from paraxis._jax import jax_api
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

    def note(jitted: Any, static: _Static, args: Any, kwargs: Any) -> None:
        leaves, structure = jax.tree.flatten((args, kwargs))
        # What it names is kept, so no other has its number. Static values make programs of their own.
        kind = (id(jitted), structure, static(args, kwargs), *map(_kind, leaves))
        if kind not in by_kind:
            by_kind[kind] = Called(jitted, _name(jitted), args, kwargs)
            found.append(by_kind[kind])
        by_kind[kind].times += 1

    real = jax.jit

    @functools.wraps(real)
    def jit(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)

        def watched(jitted: Any) -> _Watched:
            return _Watched(jitted, functools.partial(note, jitted, _static(jitted, kwargs)))

        return watched(made) if hasattr(made, "lower") else lambda fun: watched(made(fun))

    jax.jit = jit
    try:
        yield found
    finally:
        jax.jit = real


class _Watched:
    """A function of ``jax.jit`` that reports its calls."""

    def __init__(self, jitted: Any, note: Callable[[Any, Any], None]) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted, self._note = jitted, note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jax_api.is_tracing():
            self._note(args, kwargs)  # before it may give its arguments away
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


_Static = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, ...]]


def _static(jitted: Any, options: Mapping[str, Any]) -> _Static:
    """Return what gives the values of a call's static arguments, by the options of ``jax.jit``."""
    numbers, names = (options.get(f"static_arg{what}") for what in ("nums", "names"))
    at = set((numbers,) if isinstance(numbers, int) else numbers or ())
    named = set((names,) if isinstance(names, str) else names or ())
    if at or named:
        with contextlib.suppress(TypeError, ValueError):  # of what has no signature
            parameters = list(inspect.signature(jitted).parameters)
            at |= {number for number, name in enumerate(parameters) if name in named}
            named |= {parameters[number] for number in at if -len(parameters) <= number < len(parameters)}

    def values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        placed = [(number, args[number]) for number in sorted(at) if -len(args) <= number < len(args)]
        return (*placed, *((name, kwargs[name]) for name in sorted(named) if name in kwargs))

    return values


def _struct(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer):
        return x
    sharding = x.sharding if len(x.sharding.device_set) > 1 else None
    return jax_api.laid_struct(x, sharding)


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding if len(x.sharding.device_set) > 1 else None
    return (x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else type(x)


def _name(jitted: Any) -> str:
    inner = getattr(jitted, "__wrapped__", jitted)
    inner = getattr(inner, "func", inner)  # of a partial
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name.replace("<locals>.", "")
