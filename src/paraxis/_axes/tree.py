"""Pytrees whose leaves carry an axis, and checks that name the argument and the leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes.axis import Axis
from paraxis._calls import arguments
from paraxis.errors import DataError, ParaxisError, ShapeError


def arrays(verb: str, argument: str, tree: Any, *, shapes: bool = False) -> Any:
    """Return the same tree with every leaf an array (Python numbers keep their weak type), or a shape if these may be.

    Raises:
        ShapeError: if a leaf is not a number or an array.
        DataError: if one has integers that JAX would cut.
    """

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) or (shapes and isinstance(leaf, jax.ShapeDtypeStruct)):
            return leaf
        if (reason := arguments.why_cut(leaf)) is not None:
            raise DataError(f"{verb}: {name(argument, path)} {reason}")
        try:
            return jnp.asarray(leaf)
        except ParaxisError:  # one of ours that is no array, and says what to write
            raise
        except (TypeError, ValueError) as error:
            if isinstance(leaf, np.ndarray) and (reason := arguments.why_not(leaf, error)):
                raise TypeError(f"{verb}: {name(argument, path)} {reason}") from error
            raise ShapeError(
                f"{verb}: {name(argument, path)} is a {type(leaf).__name__}, not an array. Pass arrays only; "
                f"what is not an array belongs in a closure: px.map_fn(lambda x: fn(x, option), …); or in a model, a "
                f"pytree whose class has a method __call__"
            ) from error

    return jax.tree_util.tree_map_with_path(one, tree)


def placed(verb: str, argument: str, tree: Any, axis: Axis) -> Any:
    """Return the same tree with every leaf an array of shape ``(axis.size, ...)``.

    Raises:
        ShapeError: naming the first leaf that is not.
    """
    tree = arrays(verb, argument, tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.ndim == 0 or leaf.shape[0] != axis.size:
            refuse_lists(verb, argument, tree, size=axis.size)
            other = f"px.Axis({axis.name!r}, {leaf.shape[0]}) if there are so many elements, or " if leaf.ndim else ""
            raise ShapeError(
                f"{verb}: {name(argument, path)} has shape {leaf.shape}, but a value placed on axis {axis.name!r} "
                f"starts with its size, ({axis.size}, ...); write {other}px.broadcast(…, {axis.name!r}) if all "
                "elements see the same value"
            )
    return tree


def refuse_lists(
    verb: str, argument: str, tree: Any, *, only_rows: bool = False, only_lists: bool = False, size: int = 0
) -> None:
    """Say where numbers are in lists or tuples, which JAX takes for trees of single numbers.

    Args:
        verb, argument: for the error.
        tree: what was given; as ``args``, a tuple is several arguments.
        only_rows: leave lists alone that have no lists in them.
        only_lists: leave tuples alone.
        size: also say where so many arrays of one shape are in a list, one for each element.

    Raises:
        ShapeError: naming the first such list.
    """

    def is_refused(x: Any) -> bool:
        if not isinstance(x, list) and (only_lists or not isinstance(x, tuple) or (x is tree and argument == "args")):
            return False
        if len(x) == size and arguments.is_list_of_arrays(x):
            return True
        return _is_numbers(x) and not (only_rows and not any(map(_is_sequence, x)))

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_refused):
        if is_refused(leaf):
            called = name(argument, path)
            raise ShapeError(f"{verb}: {called} {arguments.why_no_array(called, leaf, apart=True)}")


def _is_sequence(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _is_numbers(x: Any) -> bool:
    if _is_sequence(x):
        return bool(x) and all(map(_is_numbers, x))
    return isinstance(x, (bool, int, float, complex)) or (isinstance(x, (jax.Array, np.generic)) and not np.ndim(x))


def is_none(x: Any) -> bool:
    return x is None


def spread(prefix: Any, tree: Any) -> Any:
    """Return a prefix tree of entries, ``None`` among them, spread over the leaves of ``tree``."""
    return jax.tree.map(lambda entry, sub: jax.tree.map(lambda _: entry, sub), prefix, tree, is_leaf=is_none)


def name(argument: str, path: Any) -> str:
    """Return how an error calls a leaf: ``args[0]['w']``."""
    return f"{argument}{jax.tree_util.keystr(path)}"
