"""The arguments of a compiled function that are constants."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis.errors import StateError


class Statics:
    """The arguments that are compile-time constants, by position and by name, whichever way each is given."""

    def __init__(
        self,
        transform: str,
        parameters: Sequence[str],
        takes_names: Sequence[str] | None,
        argnums: int | Sequence[int],
        argnames: str | Sequence[str],
    ) -> None:
        self._transform = transform
        positions = arguments.positions(transform, "static_argnums", argnums, StateError)
        names = arguments.names(transform, "static_argnames", argnames, StateError)
        unknown = [name for name in names if takes_names is not None and name not in takes_names]
        if unknown:
            raise StateError(
                f"{transform}: static_argnames has {unknown[0]!r}, but the function takes "
                f"{', '.join(takes_names or ()) or 'no argument by name'}; write one of those it takes"
            )
        self.positions = tuple(sorted({*positions, *(parameters.index(n) for n in names if n in parameters)}))
        self.names = tuple(sorted({*names, *(parameters[p] for p in positions if p < len(parameters))}))

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse static arguments that are not hashable: they are compared with those of earlier calls."""
        given = [(f"args[{p}]", args[p]) for p in self.positions if p < len(args)]
        for name, x in [*given, *((n, kwargs[n]) for n in self.names if n in kwargs)]:
            try:
                hash(x)
            except TypeError as error:
                raise StateError(
                    f"{self._transform}: static argument {name} is a {type(x).__name__}, which has no hash; pass a "
                    f"number, a string or a tuple, or take it out of static_argnums"
                ) from error

    def refuse_cut(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse integers that JAX would cut in arguments that are not static."""
        arguments.no_cut(self._transform, "args", {p: x for p, x in enumerate(args) if p not in self.positions})
        if kwargs:
            arguments.no_cut(self._transform, "kwargs", {n: x for n, x in kwargs.items() if n not in self.names})

    def sealed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments, those sealed that are not static."""
        moved = [x if p in self.positions else pytrees.sealed(x) for p, x in enumerate(args)]
        return moved, {name: x if name in self.names else pytrees.sealed(x) for name, x in kwargs.items()}

    def explain(self, args: Sequence[Any], kwargs: dict[str, Any], error: TypeError) -> None:
        """Say so if an argument that is no array, and not static either, is what a call failed for."""
        given = [(f"args[{p}]", f"static_argnums=({p},)", x) for p, x in enumerate(args) if p not in self.positions]
        given += [(n, f"static_argnames={n!r}", x) for n, x in kwargs.items() if n not in self.names]
        for name, line, x in given:
            for leaf in jax.tree.leaves(x):
                if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
                    raise StateError(
                        f"{self._transform}: {name} is or holds a {type(leaf).__name__}, not an array; if it is a "
                        f"constant, pass it by itself and write {line}"
                    ) from error


def positional(fn: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional parameters, as far as they can be known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def named(fn: Callable[..., Any]) -> list[str] | None:
    """Return the names by which a function takes arguments; ``None``: any, or that cannot be known."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return None if any(p.kind == p.VAR_KEYWORD for p in parameters) else [p.name for p in parameters if p.kind in kinds]
