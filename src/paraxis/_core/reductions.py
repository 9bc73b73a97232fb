"""The verbs that combine the elements of an axis: placed → shared.

All of them take ``where``, a mask per element, and are exact under padding: neither a padded element nor one that is
masked out reaches the answer or its derivative. Half-precision sums are taken in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from paraxis._core import arrays, check, layout, origins, placing, primitives, pytrees, scope, sums, tree
from paraxis._core.axis import Axis
from paraxis.errors import DataError

_Tree = TypeVar("_Tree")


def reduce_sum(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Sum over the elements of an axis: placed → shared.

    Args:
        x: pytree of arrays ``(size, ...)``.
        axis: the axis; inside a program also its name, or ``None`` if there is only one.
        where: booleans ``(size,)``; elements with ``False`` are left out. If all are ``False``, the sum is zero.

    Returns:
        Tree of arrays ``(...)``, the same on all devices; dtypes as in ``jnp.sum``.

    Raises:
        DataError: if a leaf does not start with the size of the axis, or the mask is malformed; the message names it.
        AxisError: if it is not clear which axis is meant, or the axis cannot be placed.

    Communicates: one all-reduce the size of the result. The derivative: nothing.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> clients = px.Axis("clients", 3)
        >>> px.reduce_sum(jnp.array([1.0, 2.0, 4.0]), clients, where=jnp.array([True, False, True]))
        Array(5., dtype=float32)
    """
    return _Reduction("reduce_sum", x, axis, where).fold("sum")


def reduce_mean(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the mean over the elements of an axis: placed → shared. See :func:`reduce_sum`.

    Returns:
        Tree of arrays ``(...)``; dtypes as in ``jnp.mean`` (integers become floats). NaN if no element counts, as of
        ``jnp.mean``.

    Communicates: one all-reduce the size of the result.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_mean(jnp.array([1.0, 2.0, 6.0]), px.Axis("clients", 3))
        Array(3., dtype=float32)
    """
    reduction = _Reduction("reduce_mean", x, axis, where)
    count: Any = reduction.axis.size
    if reduction.where is not None:
        count = reduction.sum("mean", reduction.where, masked=False)

    def mean(leaf: jax.Array) -> jax.Array:
        total = reduction.sum("mean", leaf)
        return (total / jnp.asarray(count, total.dtype)).astype(_dtype("mean", leaf))

    return reduction.of_leaves(mean)


def reduce_weighted_mean(x: _Tree, w: Any, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the weighted mean over the elements of an axis: placed → shared. See :func:`reduce_sum`.

    Args:
        x: pytree of arrays ``(size, ...)``.
        w: weights ``(size,)``, one per element for the whole tree; or a tree like ``x`` of such weights. They need
            not sum to one. The mean can be differentiated with respect to them.
        axis: the axis; inside a program also its name, or ``None`` if there is only one.
        where: booleans ``(size,)``; elements with ``False`` are left out.

    Returns:
        ``sum(w * x) / sum(w)`` for each leaf, ``(...)``; dtypes as in ``jnp.mean``, but complex if the weights are.
        Not finite if the weights of the elements that count sum to zero: NaN where no element has any.

    Communicates: one all-reduce the size of the result plus one number per weight leaf.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> clients = px.Axis("clients", 3)
        >>> px.reduce_weighted_mean({"a": jnp.array([1.0, 2.0, 4.0])}, jnp.array([1.0, 1.0, 0.0]), clients)
        {'a': Array(1.5, dtype=float32)}
    """
    reduction = _Reduction("reduce_weighted_mean", x, axis, where)

    def mean(leaf: jax.Array, weight: jax.Array) -> jax.Array:
        sums, dtype = reduction.sum("mean", leaf, weight), _dtype("mean", leaf)
        total = reduction.sum("mean", weight).astype(sums.dtype)
        return (sums / total).astype(jnp.promote_types(dtype, sums.dtype) if jnp.iscomplexobj(sums) else dtype)

    return reduction.of_leaves(mean, reduction.weights(w))


def reduce_max(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the largest value over the elements of an axis: placed → shared. See :func:`reduce_sum`.

    Elements that tie share the derivative equally. If ``where`` is all ``False``, the result is the smallest value of
    the dtype (``-inf`` for floats).

    Communicates: one all-reduce the size of the result. The derivative: another two.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_max(jnp.array([1.0, 7.0, 3.0]), px.Axis("clients", 3))
        Array(7., dtype=float32)
    """
    return _Reduction("reduce_max", x, axis, where).fold("max")


def reduce_min(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the smallest value over the elements of an axis: placed → shared. See :func:`reduce_max`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_min(jnp.array([4.0, 7.0, 3.0]), px.Axis("clients", 3))
        Array(3., dtype=float32)
    """
    return _Reduction("reduce_min", x, axis, where).fold("min")


def reduce_any(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return whether any element of an axis is true: placed → shared, booleans. See :func:`reduce_sum`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_any(jnp.array([False, True, False]), px.Axis("clients", 3))
        Array(True, dtype=bool)
    """
    return _Reduction("reduce_any", x, axis, where).fold("any")


def reduce_all(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return whether all elements of an axis are true: placed → shared, booleans. See :func:`reduce_sum`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_all(jnp.array([False, True, False]), px.Axis("clients", 3))
        Array(False, dtype=bool)
    """
    return _Reduction("reduce_all", x, axis, where).fold("all")


class _Reduction:
    """One call of a reducing verb: its arguments checked, its axis placed."""

    def __init__(self, verb: str, x: Any, axis: Axis | str | None, where: Any) -> None:
        self.verb, self.axis = verb, scope.resolve(verb, axis)
        self.placement = placing.place(self.axis)
        self.x = self._numbers("x", x)
        self.where = None if where is None else tree.placed(verb, "where", where, self.axis)
        if where is not None and (getattr(self.where, "ndim", 0), getattr(self.where, "dtype", None)) != (1, bool):
            raise DataError(
                f"{verb}: where must be one boolean per element, bool[{self.axis.size}], got "
                f"{check.described(self.where)}; write where=mask > 0, or reduce values of a wider mask inside the map"
            )

    def fold(self, kind: str) -> Any:
        def one(leaf: jax.Array) -> jax.Array:
            return (self.sum if kind == "sum" else self._folded)(kind, leaf).astype(_dtype(kind, leaf))

        return self.of_leaves(one)

    def _folded(self, kind: str, leaf: jax.Array) -> jax.Array:
        rows = self._rows(leaf)
        if kind in ("any", "all"):
            rows = rows != 0 if rows.dtype != bool else rows
        if self.where is not None:
            keep = sums.per_row(self._rows(self.where), rows)
            rows = jnp.where(keep, rows, primitives.identity(kind, rows.dtype))
        return self._reduced(kind, rows)

    def of_leaves(self, one: Callable[..., jax.Array], *more: Any) -> Any:
        """Return a tree like what is reduced, each leaf made of its own and of those of trees of the same structure."""
        return pytrees.opened(jax.tree.map(one, self.x, *more))

    def sum(self, kind: str, leaf: jax.Array, weight: jax.Array | None = None, *, masked: bool = True) -> jax.Array:
        """Sum over the elements as ``jnp.sum`` or ``jnp.mean`` would, weighted, masked; a map's result is not kept."""
        mask = self.where if masked else None
        extras = [x for x in (mask, weight) if x is not None]
        term, form = _Term(kind, mask is not None, weight is not None), origins.recall(leaf)
        if isinstance(form, origins.Result) and form.call.is_to_sum(self.placement):
            return form.call.sums(term, extras)[form.index]
        return self._reduced("sum", term(self._rows(leaf), *map(self._rows, extras)))

    def weights(self, w: Any) -> Any:
        """Return one weight leaf per leaf of ``x``."""
        w, structure = self._numbers("w", w), jax.tree.structure(self.x)
        if isinstance(w, jax.Array):
            w = jax.tree.unflatten(structure, [w] * structure.num_leaves)
        leaves = jax.tree_util.tree_leaves_with_path(w)
        wrong = next((f", but {tree.name('w', path)} {leaf.shape}" for path, leaf in leaves if leaf.ndim != 1), None)
        if wrong or jax.tree.structure(w) != structure:
            raise DataError(
                f"{self.verb}: w must be one array ({self.axis.size},) of weights, or a tree of them like x"
                f"{wrong or f', {structure}, but it is {jax.tree.structure(w)}'}. Write "
                f"px.{self.verb}(x, jnp.ones({self.axis.size}), {self.axis.name!r})"
            )
        return w

    def _numbers(self, argument: str, given: Any) -> Any:
        found = tree.placed(self.verb, argument, pytrees.sealed(given), self.axis)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                called = tree.name(argument, path)
                raise DataError(
                    f"{self.verb}: {called} must be numbers, got random keys {leaf.dtype}{list(leaf.shape)}; write "
                    f"jax.random.key_data({called}) for their bits"
                )
        return found

    def _rows(self, leaf: jax.Array) -> jax.Array:
        leaf = arrays.settle(leaf, self.placement, rows=True)
        return layout.pad(leaf, self.placement, safe=False) if self.placement.is_explicit else leaf

    def _reduced(self, kind: str, rows: jax.Array) -> jax.Array:
        if self.placement.is_explicit:
            rows = layout.constrain(rows, self.placement)
        number = self.placement.num_padded
        padded = primitives.Rows(number) if number > rows.shape[0] else None
        return primitives.reduce(kind, rows, axis=self.axis.name, size=self.axis.size, padded=padded)


class _Term(NamedTuple):
    """A term of a sum: each element's result in a dtype to sum in, times its weight, if its mask says so."""

    kind: str
    masked: bool
    weighted: bool

    def __call__(self, y: jax.Array, *extras: jax.Array) -> jax.Array:
        """Return the term of an element, with mask and weight if there are any; or those of rows, with ``(count,)``."""
        if jnp.issubdtype(y.dtype, jax.dtypes.extended):  # PRNG keys have no sum
            return jnp.zeros(extras[0].shape if extras else ())
        y = y if jnp.issubdtype(y.dtype, jnp.inexact) else y.astype(_dtype(self.kind, y))
        if jnp.issubdtype(y.dtype, jnp.floating) and jnp.finfo(y.dtype).bits < 32:
            y = y.astype(jnp.float32)
        if self.weighted:
            weight = extras[-1]
            dtype = jnp.promote_types(y.dtype, weight.dtype) if jnp.iscomplexobj(weight) else y.dtype
            weight = sums.per_row(weight, y) if weight.ndim else weight
            y = y.astype(dtype) * weight.astype(dtype)
        if self.masked:
            mask = extras[0]
            y = sums.masked(mask, y) if mask.ndim else jax.lax.select_n(mask, jnp.zeros_like(y), y)
        return y


def _dtype(kind: str, x: jax.Array) -> Any:
    """Return the dtype of ``jnp.sum(x)``, say."""
    return jax.eval_shape(getattr(jnp, kind), jax.ShapeDtypeStruct((1,), x.dtype)).dtype
