"""Compiled functions of state and arguments, and which of the arguments are constants."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._core import jax_api
from paraxis._core.errors import StateError


class Compiled:
    """A compiled function of ``(state, *args, **kwargs)`` that returns new values of variables and a result."""

    def __init__(self, fn: Callable[..., Any], statics: "Statics", donate: bool) -> None:
        self._traced = False
        self._awaits = False

        def traced(state: Any, *args: Any, **kwargs: Any) -> Any:
            self._traced = True
            return fn(state, *args, **kwargs)

        self._jitted = jax.jit(
            traced,
            static_argnums=tuple(n + 1 for n in statics.positions),
            static_argnames=statics.names,
            donate_argnums=(0,) if donate else (),
        )

    def __call__(self, state: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[int, Any], Any]:
        new, result = self._jitted(state, *args, **kwargs)
        if self._traced:
            self._traced = False
            self._awaits |= jax_api.calls_back(self._jitted.trace(state, *args, **kwargs).jaxpr.jaxpr)
        if self._awaits:  # a callback's exception must come before anything is written
            jax.block_until_ready((new, result))
        return new, result


class Statics:
    """Which arguments are compile-time constants, by position and by name, whichever way each is given."""

    def __init__(
        self,
        transform: str,
        parameters: Sequence[str],
        argnums: int | Sequence[int],
        argnames: str | Sequence[str],
    ) -> None:
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
        if not all(isinstance(p, int) and p >= 0 for p in positions):
            raise StateError(
                f"{transform}: static_argnums must be positions from 0, counted after the modules, got {argnums!r}; "
                f"write static_argnums=(1,)"
            )
        self.positions = tuple(sorted({*positions, *(parameters.index(n) for n in names if n in parameters)}))
        self.names = tuple(sorted({*names, *(parameters[p] for p in positions if p < len(parameters))}))

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)

    def check(self, transform: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Static arguments are compared with those of earlier calls, so they must be hashable."""
        given = [(f"args[{p}]", args[p]) for p in self.positions if p < len(args)]
        for name, x in [*given, *((n, kwargs[n]) for n in self.names if n in kwargs)]:
            try:
                hash(x)
            except TypeError as error:
                raise StateError(
                    f"{transform}: static argument {name} is a {type(x).__name__}, which has no hash; pass a number, "
                    f"a string or a tuple, or take it out of static_argnums"
                ) from error


def positional(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, as far as they can be known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]
