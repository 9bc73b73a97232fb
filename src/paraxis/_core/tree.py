"""Pytrees whose leaves carry an axis, and checks that name the argument and the leaf."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import check, scope
from paraxis._core.axis import Axis
from paraxis.errors import DataError


def arrays(verb: str, argument: str, tree: Any) -> Any:
    """Return the same tree with every leaf an array (Python numbers keep their weak type).

    Raises:
        DataError: if a leaf is not a number or an array.
        DataError: if one has integers that JAX would cut.
    """

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        if (reason := check.why_cut(leaf)) is not None:
            raise DataError(f"{verb}: {name(argument, path)} {reason}")
        try:
            return jnp.asarray(leaf)
        except DataError:  # of groups or a table, which say what to write
            raise
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{verb}: {name(argument, path)} is {check.described(leaf)}, which JAX cannot take as an array; "
                f"close over it: px.map_fn(lambda x: fn(x, option), …)"
            ) from error

    return jax.tree_util.tree_map_with_path(one, tree)


def placed(verb: str, argument: str, tree: Any, axis: Axis) -> Any:
    """Return the same tree with every leaf an array of shape ``(axis.size, ...)``.

    Raises:
        DataError: naming the first leaf that is not.
    """
    tree, chunk = arrays(verb, argument, tree), scope.current().chunk
    tree = tree if chunk is None else chunk.rows(tree, axis)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.ndim == 0 or leaf.shape[0] != axis.size:
            raise DataError(
                f"{verb}: {name(argument, path)} has shape {leaf.shape}, but a value placed on axis {axis.name!r} "
                f"starts with its size, ({axis.size}, ...); write px.broadcast(…, {axis.name!r}) if all elements see "
                f"the same value, or jnp.stack(…) of a list with one array per element"
            )
    return tree


def entries(prefix: Any, tree: Any) -> list[Any]:
    """Return the entry of a prefix tree, ``None`` among them, for each leaf of ``tree``."""
    found: list[Any] = []

    def note(entry: Any, part: Any) -> None:
        found.extend([entry] * len(jax.tree.leaves(part)))

    jax.tree.map(note, prefix, tree, is_leaf=lambda x: x is None)
    return found


def taken(values: Iterable[Any], which: Iterable[bool], wanted: bool = True) -> list[Any]:
    """Return the values for which ``which`` is as wanted."""
    return [value for value, is_taken in zip(values, which, strict=True) if is_taken == wanted]


def merged(which: Iterable[bool], ours: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return our values where ``which`` is true, and others where it is not."""
    ours, others = iter(ours), iter(others)
    return [next(ours if is_ours else others) for is_ours in which]


def name(argument: str, path: Any) -> str:
    """Return how an error calls a leaf: ``args[0]['w']``."""
    return f"{argument}{jax.tree_util.keystr(path)}"
