"""Programs compiled for states of several kinds: with other models, other optimisers."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from paraxis._jax.structure import Recent

AT_MOST = 8
"""The number of kinds whose programs are kept: a step that is given a new optimiser each time keeps no more."""


class PerKind:
    """``jax.jit`` for each kind of state by itself: the last ones are kept, with all that was compiled for them.

    Args:
        fn: of the state, after ``static`` arguments that are fixed for a program.
        static: how many of them.
        options: of ``jax.jit``.
    """

    def __init__(self, fn: Callable[..., Any], *, static: int = 0, **options: Any) -> None:
        self._fn = fn
        self._static = static
        self._options = options
        self._jitted: Recent[Any] = Recent(AT_MOST)

    def __call__(self, *args: Any) -> Any:
        return self._of(args)(*args)

    def lower(self, *args: Any) -> Any:
        return self._of(args).lower(*args)

    def trace(self, *args: Any) -> Any:
        return self._of(args).trace(*args)

    def _of(self, args: Any) -> Any:
        # A partial of its own: JAX keeps what it compiles with the function, and lets it go with that.
        numbers = tuple(range(self._static))
        kind = jax.tree.structure(args[self._static])
        return self._jitted.get(
            kind, lambda: jax.jit(functools.partial(self._fn), static_argnums=numbers, **self._options)
        )
