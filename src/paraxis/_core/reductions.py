"""The verbs that combine the elements of an axis: placed → shared.

All of them take ``where``, a mask per element, and are exact under padding: neither a padded element nor one that is
masked out reaches the answer or its derivative. Half-precision sums are taken in float32.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from paraxis._core import arrays, check, jax_api, maps, placing, primitives, pytrees
from paraxis._core.placing import Axis, Placement, resolve
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
    return _reduce("sum", x, axis, where)


def reduce_mean(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the mean over the elements of an axis, NaN if none counts: placed → shared. See :func:`reduce_sum`.

    Dtypes are those of ``jnp.mean``: integers become floats.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_mean(jnp.array([1.0, 2.0, 6.0]), px.Axis("clients", 3))
        Array(3., dtype=float32)
    """
    return _reduce("mean", x, axis, where)


def reduce_weighted_mean(x: _Tree, w: Any, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return ``sum(w * x) / sum(w)`` over the elements of an axis: placed → shared. See :func:`reduce_mean`.

    ``w`` are weights ``(size,)``, one per element for the whole tree, or a tree like ``x`` of such weights. They need
    not sum to one; if those that count sum to zero, the mean is not finite. It can be differentiated with respect to
    them, and is complex if they are.

    Communicates: one all-reduce the size of the result plus one number per weight leaf.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_weighted_mean(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 1.0, 0.0]), px.Axis("clients", 3))
        Array(1.5, dtype=float32)
    """
    return _reduce("weighted_mean", x, axis, where, w)


def reduce_max(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the largest value over the elements of an axis: placed → shared. See :func:`reduce_sum`.

    NaN wins. Elements that tie share the derivative equally, which sends another two all-reduces. If ``where`` is all
    ``False``, the result is the smallest value of the dtype (``-inf`` for floats).

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_max(jnp.array([1.0, 7.0, 3.0]), px.Axis("clients", 3))
        Array(7., dtype=float32)
    """
    return _reduce("max", x, axis, where)


def reduce_min(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return the smallest value over the elements of an axis: placed → shared. See :func:`reduce_max`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_min(jnp.array([4.0, 7.0, 3.0]), px.Axis("clients", 3))
        Array(3., dtype=float32)
    """
    return _reduce("min", x, axis, where)


def reduce_any(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return whether any element of an axis is true: placed → shared, booleans. See :func:`reduce_sum`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_any(jnp.array([False, True, False]), px.Axis("clients", 3))
        Array(True, dtype=bool)
    """
    return _reduce("any", x, axis, where)


def reduce_all(x: _Tree, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return whether all elements of an axis are true: placed → shared, booleans. See :func:`reduce_sum`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_all(jnp.array([False, True, False]), px.Axis("clients", 3))
        Array(False, dtype=bool)
    """
    return _reduce("all", x, axis, where)


def _reduce(kind: str, x: Any, axis: Axis | str | None, where: Any, w: Any = None) -> Any:
    verb, kind = f"reduce_{kind}", "mean" if kind == "weighted_mean" else kind
    resolved = resolve(verb, axis)
    placement, size = placing.place(resolved), resolved.size
    x = pytrees.placed(verb, "x", pytrees.sealed(x), resolved)
    mask = None if where is None else pytrees.placed(verb, "where", where, resolved)
    if mask is not None and (getattr(mask, "ndim", 0), getattr(mask, "dtype", None)) != (1, bool):
        raise DataError(
            f"{verb}: where must be one boolean per element, bool[{size}], got {check.described(mask)}; write "
            f"where=mask > 0, or reduce values of a wider mask inside the map"
        )
    more = () if w is None else _weights(verb, x, w, mask, placement)
    count = _folded(kind, mask, placement) if kind == "mean" and mask is not None and w is None else size

    def one(leaf: jax.Array, weight: jax.Array | None = None, total: Any = count) -> jax.Array:
        y, dtype = _folded(kind, leaf, placement, mask, weight), _dtype(kind, leaf.dtype, jax_api.is_wide())
        if kind == "mean":
            y = y / jnp.asarray(total, y.dtype)
        return y.astype(jnp.promote_types(dtype, y.dtype) if jnp.iscomplexobj(y) else dtype)

    return pytrees.opened(jax.tree.map(one, x, *more))


def _weights(verb: str, x: Any, w: Any, mask: jax.Array | None, placement: Placement) -> tuple[Any, Any]:
    """Return trees like ``x`` of weights and of their totals."""
    w = pytrees.placed(verb, "w", pytrees.sealed(w), placement.axis)
    for path, leaf in jax.tree_util.tree_leaves_with_path(w):
        if leaf.ndim != 1:
            raise DataError(
                f"{verb}: {pytrees.name('w', path)} must be one weight per element, ({placement.size},), got "
                f"{leaf.shape}"
            )
    totals = jax.tree.map(lambda leaf: _folded("mean", leaf, placement, mask), w)
    if not isinstance(w, jax.Array):
        return w, totals
    return jax.tree.map(lambda _: w, x), jax.tree.map(lambda _: totals, x)


def _folded(
    kind: str, leaf: jax.Array, placement: Placement, mask: jax.Array | None = None, weight: jax.Array | None = None
) -> jax.Array:
    """Combine the elements' terms, of a dtype to combine in; a map's result that is only summed is not kept."""
    extras = [x for x in (mask, weight) if x is not None]
    term, form = _Term(kind, mask is not None, weight is not None), maps.recall(leaf)
    if kind in ("sum", "mean") and isinstance(form, maps.Result) and form.sums.are_preferred(placement):
        return form.sums.of(term, extras)[form.index]
    rows = [_rows(x, placement) for x in (leaf, *extras)]
    rows = jax.vmap(term)(*rows) if extras else term(*rows)
    padded = primitives.Rows(placement.num_padded) if placement.is_padded and not placement.is_explicit else None
    reduce_p = primitives.REDUCTIONS["sum" if kind == "mean" else kind]
    return reduce_p.bind(rows, axis=placement.axis.name, size=placement.size, padded=padded)


def _rows(leaf: jax.Array, placement: Placement) -> jax.Array:
    return arrays.constrain(arrays.settle(leaf, placement, rows=True), placement, rows=placement.divides)


class _Term(NamedTuple):
    """An element's term of a reduction: its value times its weight, or the identity where its mask is ``False``."""

    kind: str
    masked: bool
    weighted: bool

    def __call__(self, y: jax.Array, *extras: jax.Array) -> jax.Array:
        """Return the term of an element, or of rows if there is no mask and no weight."""
        if jnp.issubdtype(y.dtype, jax.dtypes.extended):  # PRNG keys have no sum
            return jnp.zeros(())
        if self.kind in ("any", "all"):
            y = y != 0
        elif self.kind in ("sum", "mean"):
            y = y if jnp.issubdtype(y.dtype, jnp.inexact) else y.astype(_dtype(self.kind, y.dtype, jax_api.is_wide()))
            if jnp.issubdtype(y.dtype, jnp.floating) and jnp.finfo(y.dtype).bits < 32:
                y = y.astype(jnp.float32)
        if self.weighted:
            weight = extras[-1]
            dtype = jnp.promote_types(y.dtype, weight.dtype) if jnp.iscomplexobj(weight) else y.dtype
            y = y.astype(dtype) * weight.astype(dtype)
        if self.masked:
            unnoticed = primitives.identity("sum" if self.kind == "mean" else self.kind, y.dtype)
            y = jax.lax.select_n(extras[0], jnp.full_like(y, unnoticed), y)
        return y


@functools.lru_cache
def _dtype(kind: str, dtype: Any, is_wide: bool) -> Any:
    """Return the dtype of ``jnp.sum``, say."""
    return jax.eval_shape(getattr(jnp, kind), jax.ShapeDtypeStruct((1,), dtype)).dtype
