"""Pytrees: leaves that carry an axis, and what is static in models, Equinox modules and classes with ``__call__``.

Some leaves of such a model are arrays; the others, its functions, text and numbers, say how it computes, and JAX takes
none of them. So a front end *partitions* what it is given: each static leaf moves into the structure, where it is
compared and hashed. Only arrays pass through JAX. What a user's function is given, and what a caller gets, is
*combined* again. A tree without models is what it was: its numbers are arrays.
"""

import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import check
from paraxis._core.placing import Axis, current
from paraxis.errors import DataError

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class Static:
    """A leaf that is part of the structure: equal to another if it is the same, or has the same type and value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        a, b = self.value, getattr(other, "value", None)
        # The text of numbers tells 0.0 from -0.0.
        return a is b or (type(a) is type(b) and bool(a == b) and (not isinstance(a, float) or repr(a) == repr(b)))

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:  # such objects are equal if they say so; their type is all that is known to stay
            return hash(type(self.value))


def is_model(x: Any) -> bool:
    """Return whether an object is a pytree that can be called, or an Equinox module; NNX modules are none."""
    is_object = callable(x) or isinstance(x, classes("equinox", "Module"))
    return is_object and not (jax.tree_util.all_leaves([x]) or is_nnx(x))


def is_nnx(x: Any) -> bool:
    """Return whether an object is a module or a variable of NNX: written in place, so it must stay the one it is."""
    return isinstance(x, classes("flax.nnx", "Pytree", "Variable"))


def classes(library: str, *names: str) -> tuple[type, ...]:
    """Return the classes of a library; none if it is not loaded, since nothing can be made of them then."""
    module = sys.modules.get(library)
    return tuple([getattr(module, name) for name in names if hasattr(module, name)])


def partition(tree: Any) -> Any:
    """Return the tree with what is static in its models made part of its structure, or as it is if it has none."""
    if isinstance(tree, _ARRAYS) or all(isinstance(leaf, _ARRAYS) for leaf in jax.tree.leaves(tree)):
        return tree
    static = lambda leaf: leaf if isinstance(leaf, _ARRAYS) else Static(leaf)  # noqa: E731
    part = lambda x: jax.tree.map(static, x) if is_model(x) else x  # noqa: E731
    return jax.tree.map(part, tree, is_leaf=lambda x: is_model(x) or is_nnx(x))


def arguments(who: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return a call's arguments by :func:`partition`; integers that JAX would cut are a DataError."""
    if all([isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((args, kwargs))]):  # noqa: C419  # fewer calls
        return args, kwargs
    check.leaves(who, "args", args)
    check.leaves(who, "kwargs", kwargs)
    return partition((args, kwargs))


def combine(tree: Any) -> Any:
    """Return the tree that :func:`partition` was given."""
    if isinstance(tree, _ARRAYS):
        return tree
    ends = (Static, *classes("flax.nnx", "Pytree", "Variable"))
    return jax.tree.map(lambda x: x.value if isinstance(x, Static) else x, tree, is_leaf=lambda x: isinstance(x, ends))


def of_combined(fn: Callable[..., Any], partition: Callable[[Any], Any] = partition) -> Callable[..., Any]:
    """Return the function of partitioned arguments and results, of a function of combined ones."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = combine((args, kwargs))
        return partition(fn(*args, **kwargs))

    return functools.update_wrapper(run, fn, updated=())


def evaluating(tree: Any) -> Any:
    """Set each ``inference`` of the Equinox modules in a tree to true: nothing is trained now."""
    equinox = sys.modules.get("equinox")
    return tree if equinox is None else equinox.nn.inference_mode(tree)


def arrays(verb: str, argument: str, tree: Any) -> Any:
    """Return the same tree with every leaf an array; integers that JAX would cut are a DataError."""
    if all([isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)]):  # noqa: C419  # fewer calls
        return tree
    check.leaves(verb, argument, tree)
    # jnp.asarray of NumPy's arrays is an implicit transfer, and of a source, a loop that may have no end.
    is_put = lambda x: isinstance(x, np.ndarray) or (hasattr(x, "__len__") and not hasattr(x, "__array__"))  # noqa: E731
    return jax.tree.map(lambda leaf: jax.device_put(leaf) if is_put(leaf) else jnp.asarray(leaf), tree)


def placed(verb: str, argument: str, tree: Any, axis: Axis) -> Any:
    """Return the same tree with every leaf an array ``(axis.size, ...)``; a DataError names the first that is not."""
    tree, chunk = arrays(verb, argument, tree), current().chunk
    tree = tree if chunk is None else chunk(axis, tree)[1]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.ndim == 0 or leaf.shape[0] != axis.size:
            raise DataError(
                f"{verb}: {name(argument, path)} has shape {leaf.shape}, but a value placed on axis {axis.name!r} "
                f"starts with its size, ({axis.size}, ...); write px.broadcast(…, {axis.name!r}) if all elements see "
                f"the same value, or jnp.stack(…) of a list with one array per element"
            )
    return tree


def broadcast_prefix(prefix: Any, tree: Any, argument: str = "a prefix") -> list[Any]:
    """Return the entry of a prefix tree, ``None`` among them, for each leaf of ``tree``."""
    entries: list[Any] = []
    note = lambda entry, part: entries.extend([entry] * len(jax.tree.leaves(part)))  # noqa: E731
    try:
        jax.tree.map(note, prefix, tree, is_leaf=lambda x: x is None)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{argument}={check.described(prefix)} does not fit {jax.tree.structure(tree)}; write an entry for all, or "
            f"a tree of these that is a prefix of it"
        ) from error
    return entries


def select(values: Iterable[Any], mask: Iterable[bool], wanted: bool = True) -> list[Any]:
    """Return the values for which the mask is as wanted."""
    return [*itertools.compress(values, mask if wanted else map(operator.not_, mask))]


def interleave(mask: Iterable[bool], ours: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return our values where the mask is true, and others where it is not: what :func:`select` took apart."""
    ours, others = iter(ours), iter(others)
    return [next(ours if is_ours else others) for is_ours in mask]


def name(argument: str, path: Any) -> str:
    """Return how an error calls a leaf: ``args[0]['w']``."""
    return f"{argument}{jax.tree_util.keystr(path)}"
