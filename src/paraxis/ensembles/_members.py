"""A member, as the function that makes one and those that are mapped see it, and as arrays."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._axes import tree
from paraxis._calls import pytrees
from paraxis.errors import StateError

Apply = Callable[..., Any]
"""``apply(model, *inputs)``: what a model gives for its inputs."""


class Form(abc.ABC):
    """The way members are made of arrays. Each is one *part* or a tuple of them; the first part is the model.

    A *state* is a pytree of arrays; parts are what the user's functions see.
    """

    @abc.abstractmethod
    def state(self, parts: tuple[Any, ...]) -> Any:
        """Return what a member that was made holds."""

    @abc.abstractmethod
    def parts(self, state: Any) -> tuple[Any, ...]:
        """Return a member that holds these arrays."""

    @abc.abstractmethod
    def stepped(self, step: Callable[..., Any], state: Any, args: Sequence[Any]) -> tuple[Any, Any]:
        """Call a step; the new state, and what else it returned.

        Raises:
            StateError: if the member is not what it was before: another structure, another shape.
        """

    @abc.abstractmethod
    def applied(self, apply: Apply | None, state: Any, args: Sequence[Any]) -> Any:
        """Return what the model gives for inputs, as in evaluation. Whatever it writes to itself is dropped."""

    @abc.abstractmethod
    def names(self, state: Any) -> list[str]:
        """Return the names of a state's leaves."""

    def member(self, state: Any) -> Any:
        """Return what the user's function made: a single part, or the tuple."""
        parts = self.parts(state)
        return parts if self.is_tuple else parts[0]

    def __init__(self, is_tuple: bool) -> None:
        self.is_tuple = is_tuple


class TreeForm(Form):
    """Pytrees, which steps take and return: parameters, a train state, a callable model, a tuple of these.

    What is fixed in models, which are pytrees of arrays and functions, is part of a state's structure.
    """

    def state(self, parts: tuple[Any, ...]) -> Any:
        return strong(tree.arrays("ensemble", "make(key)", pytrees.sealed(parts)))

    def parts(self, state: Any) -> tuple[Any, ...]:
        return pytrees.opened(state)

    def stepped(self, step: Callable[..., Any], state: Any, args: Sequence[Any]) -> tuple[Any, Any]:
        result = pytrees.sealed(step(*self.parts(state), *args))
        whole = state if self.is_tuple else state[0]
        expected = jax.tree.structure(whole)
        if jax.tree.structure(result) == expected:
            new, out = result, None
        elif isinstance(result, tuple) and len(result) == 2 and jax.tree.structure(result[0]) == expected:
            new, out = result
        else:
            fixed = pytrees.changed(whole, result) or (isinstance(result, tuple) and pytrees.changed(whole, result[0]))
            if fixed:
                raise StateError(
                    f"ensemble.train: step changed what is fixed in its member: {fixed}; only its arrays change from "
                    f"step to step. Set it in make, or make it an array"
                )
            kind = "a tuple like the member" if self.is_tuple else f"the new state, {_outline(whole)},"
            raise StateError(
                f"ensemble.train: step must return the new state, with the structure of the old one, or a pair of it "
                f"and a further result; it returned {_outline(result)}, but {kind} was expected. "
                f"Write return {'(params, opt_state)' if self.is_tuple else 'state'}, loss"
            )
        new = strong(tree.arrays("ensemble.train", "step's state", new if self.is_tuple else (new,)))
        require_same_leaves(state, new, self.names(state))
        return new, out

    def applied(self, apply: Apply | None, state: Any, args: Sequence[Any]) -> Any:
        model = pytrees.evaluating(self.parts(state)[0])
        if apply is not None:
            return apply(model, *args)
        if hasattr(model, "apply_fn") and hasattr(model, "params"):
            return model.apply_fn({"params": model.params}, *args)
        if callable(model):
            return model(*args)
        raise StateError(
            f"ensemble: a {type(model).__name__} does not say how it is applied; write "
            f"px.ensemble(make, …, apply=lambda model, x: …), or give apply= to predict"
        )

    def names(self, state: Any) -> list[str]:
        shown = state if self.is_tuple else state[0]
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shown)]
        short = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path in paths]
        return short if len(set(short)) == len(short) else [jax.tree_util.keystr(path) for path in paths]


def require_same_leaves(old: Any, new: Any, names: Sequence[str]) -> None:
    """Raise unless a member's new leaves fit where the old ones were.

    Raises:
        StateError: naming the first that does not.
    """
    for name, before, after in zip(names, jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            cure = f": new.astype({before.dtype})" if before.shape == after.shape else ""
            raise StateError(
                f"ensemble.train: step changed {name} from {before.dtype}{list(before.shape)} to "
                f"{after.dtype}{list(after.shape)}; a member keeps its shapes and dtypes{cure}"
            )


def strong(x: Any) -> Any:
    """Return the same values with strong dtypes: else a step would be compiled again for its own results."""

    def one(leaf: Any) -> Any:
        return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf

    return jax.tree.map(one, x)


def _outline(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_outline, x))})"
    if isinstance(x, jax.Array):
        return f"{x.dtype}{list(x.shape)}"
    return type(x).__name__
