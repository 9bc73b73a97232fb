"""Models that are pytrees, such as Equinox modules and registered classes with ``__call__``: what is fixed in them.

Some leaves of such a model are arrays; the others, its functions, text and numbers, say how it computes, and JAX takes
none of them. So a front end *seals* what it is given: each fixed leaf moves into the structure, where it is compared
and hashed. Only arrays pass through JAX. What a user's function is given, and what a caller gets, is *opened* again.
A tree without models is what it was: its numbers are arrays.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@jax.tree_util.register_static
class Fixed:
    """A leaf that is part of the structure: equal to another if it is the same, or has the same type and value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fixed):
            return NotImplemented
        a, b = self.value, other.value
        # The text of numbers tells 0.0 from -0.0.
        return a is b or (type(a) is type(b) and bool(a == b) and (not isinstance(a, float) or repr(a) == repr(b)))

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:  # such objects are equal if they say so; their type is all that is known to stay
            return hash(type(self.value))

    def __repr__(self) -> str:
        return f"Fixed({self.value!r})"


def is_model(x: Any) -> bool:
    """Return whether an object is a pytree that can be called, or an Equinox module; NNX modules are none."""
    if isinstance(x, _ARRAYS) or not (callable(x) or isinstance(x, _classes("equinox", "Module"))):
        return False
    return not jax.tree_util.all_leaves([x]) and not is_nnx(x)


def is_nnx(x: Any) -> bool:
    """Return whether an object is a module or a variable of NNX: written in place, so it must stay the one it is."""
    return isinstance(x, _classes("flax.nnx", "Pytree", "Variable"))


def _classes(library: str, *names: str) -> tuple[type, ...]:
    """Return the classes of a library; none if it is not loaded, since nothing can be made of them then."""
    loaded = sys.modules.get(library)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))


def has_model(tree: Any) -> bool:
    """Return whether there is a model in a tree."""
    return any(map(is_model, jax.tree.leaves(tree, is_leaf=_is_either)))


def _is_either(x: Any) -> bool:
    return is_model(x) or is_nnx(x)


def sealed(tree: Any) -> Any:
    """Return the tree with what is fixed in its models made part of its structure, or as it is if it has none."""
    if isinstance(tree, _ARRAYS) or all(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda part: _sealed(part) if is_model(part) else part, tree, is_leaf=_is_either)


def _sealed(model: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, _ARRAYS) else Fixed(leaf), model)


def opened(tree: Any) -> Any:
    """Return the tree that was :func:`sealed`."""
    return tree if isinstance(tree, _ARRAYS) else _replaced(tree, lambda fixed: fixed.value)


def _replaced(tree: Any, value: Callable[[Fixed], Any]) -> Any:
    ends = (Fixed, *_classes("flax.nnx", "Pytree", "Variable"))
    return jax.tree.map(lambda x: value(x) if isinstance(x, Fixed) else x, tree, is_leaf=lambda x: isinstance(x, ends))


def of_opened(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of sealed arguments: it opens them, and seals what it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = opened((args, kwargs))
        return sealed(fn(*args, **kwargs))

    return functools.update_wrapper(run, fn, updated=())


@dataclasses.dataclass(frozen=True)
class Rest:
    """A tree without what is trained: its structure, with what is fixed, and which of its arrays are missing."""

    structure: Any
    trained: tuple[bool, ...]

    def joined(self, params: Any, others: Any) -> Any:
        """Return the tree, opened, with these arrays."""
        ours, theirs = iter(jax.tree.leaves(params)), iter(jax.tree.leaves(others))
        leaves = [next(ours if is_trained else theirs) for is_trained in self.trained]
        return opened(jax.tree.unflatten(self.structure, leaves))


def split(tree: Any) -> tuple[Any, Any, Rest]:
    """Take apart what is trained, other arrays, and the rest.

    Of models, floating arrays are trained; of a tree around them, all leaves.

    Returns:
        Two trees like the one given, with ``None`` in place of what is not theirs; and what joins them.
    """
    trained = []
    for part in jax.tree.leaves(tree, is_leaf=is_model):
        arrays = jax.tree.leaves(sealed(part))
        trained += [not is_model(part) or jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    leaves, structure = jax.tree.flatten(sealed(tree))
    params = [x if ours else None for x, ours in zip(leaves, trained, strict=True)]
    others = [None if ours else x for x, ours in zip(leaves, trained, strict=True)]
    without = (_replaced(jax.tree.unflatten(structure, x), lambda fixed: None) for x in (params, others))
    return *without, Rest(structure, tuple(trained))


def evaluating(tree: Any) -> Any:
    """Set each ``inference`` of the Equinox modules in a tree to true: nothing is trained now."""
    equinox = sys.modules.get("equinox")
    return tree if equinox is None else equinox.nn.inference_mode(tree)
