"""Programs compiled for states of several kinds: with other models, other optimisers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._calls import surroundings
from paraxis._jax.latest import Jitted
from paraxis._jax.structure import Recent

AT_MOST = 8
"""The number of kinds whose programs are kept: a step that is given a new optimiser each time keeps no more."""


class PerKind:
    """``jax.jit`` for each kind of state by itself: the last ones are kept, with all that was compiled for them.

    Args:
        fn: of the state, after ``static`` arguments that are fixed for a program.
        functions: those of users that it calls, besides what a state has.
        static: how many of these.
        options: of ``jax.jit``.
    """

    def __init__(
        self, fn: Callable[..., Any], functions: Sequence[Any] = (), *, static: int = 0, **options: Any
    ) -> None:
        self._fn, self._functions = fn, functions
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
        numbers, state = tuple(range(self._static)), args[self._static]

        def made() -> Jitted:
            functions = [*self._functions, *read_by(state)]
            return Jitted(self._fn, functions, static_argnums=numbers, **self._options)

        return self._jitted.get(jax.tree.structure(state), made)


def read_by(state: Any) -> list[Any]:
    """Return what code of users' a step of a state calls besides its loss: the optimiser's, and the model's classes."""
    model, _ = state.recipe.form.make(state.params, state.mutable, None, "as made")
    return [state.recipe.optimizer, *surroundings.classes_in(model)]
