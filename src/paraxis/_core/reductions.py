"""Broadcast and the reductions: the verbs that combine an axis's elements, placed → shared, and JAX primitives.

The verbs take ``where``, a mask per element, and are exact under padding: neither a padded element nor one that is
masked out reaches the answer or its derivative. Half-precision sums are taken in float32.

The primitives have all their rules, so that a program's jaxpr says what moves. Broadcast ``(...) → (size, ...)`` and
sum are each other's transposes. ``over`` names the mesh axes of the new dimension where the mesh is Explicit (there a
sharding is part of a type); on Auto meshes ``layout`` is where rows lie if they are kept. The lowerings are plain
operations on all rows: of a sharded operand, the compiler makes a local reduction and one all-reduce.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from paraxis._core import arrays, check, deferred, jax_api, placing, pytrees, sums
from paraxis._core.jax_api import Primitive, ShapedArray
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


@check.renamed(w="weights")
def reduce_weighted_mean(x: _Tree, weights: Any, axis: Axis | str | None = None, *, where: Any = None) -> _Tree:
    """Return ``sum(w * x) / sum(w)`` over the elements of an axis: placed → shared. See :func:`reduce_mean`.

    ``weights`` are ``(size,)``, one per element for the whole tree, or a tree like ``x`` of such weights. They need not
    sum to one; if those that count sum to zero, the mean is not finite. It can be differentiated with respect to them,
    and is complex if they are.

    Communicates: one all-reduce the size of the result plus one number per weight leaf.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_weighted_mean(jnp.array([1.0, 2.0, 4.0]), jnp.array([1.0, 1.0, 0.0]), px.Axis("clients", 3))
        Array(1.5, dtype=float32)
    """
    return _reduce("weighted_mean", x, axis, where, weights)


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
    """Return whether all elements of an axis are true: placed → shared, booleans. See :func:`reduce_any`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.reduce_all(jnp.array([False, True, False]), px.Axis("clients", 3))
        Array(False, dtype=bool)
    """
    return _reduce("all", x, axis, where)


def _reduce(kind: str, x: Any, axis: Axis | str | None, where: Any, weights: Any = None) -> Any:
    verb, kind = f"reduce_{kind}", "mean" if kind == "weighted_mean" else kind
    placement, x = placed(verb, x, axis)
    where = np.asarray(where) if isinstance(where, (list, tuple)) else where
    mask = pytrees.placed(verb, "where", where, placement.axis)
    if mask is not None and (getattr(mask, "ndim", 0), getattr(mask, "dtype", None)) != (1, bool):
        raise DataError(
            f"{verb}: where must be one boolean per element, bool[{placement.size}], got {check.described(mask)}; "
            f"write where=mask > 0, or reduce values of a wider mask inside the map"
        )
    weights = pytrees.placed(verb, "weights", pytrees.partition(weights), placement.axis)
    leaves, structure = jax.tree.flatten(x)
    weights = [None] * len(leaves) if weights is None else pytrees.broadcast_prefix(weights, x, f"{verb}: weights")
    args = jax.tree.map(lambda x: arrays.to_mesh(x, placement, rows=True), (leaves, mask, weights))
    reduced = _reduced if jax_api.is_staging() or arrays.is_traced(args) else _reduced_at_once
    return pytrees.combine(structure.unflatten(reduced(kind, placement, *args)))


def placed(verb: str, x: Any, axis: Axis | str | None) -> tuple[Placement, Any]:
    """Return where an axis lies, and a verb's values, which are to be rows of it."""
    resolved = resolve(verb, axis)
    return placing.place(resolved), pytrees.placed(verb, "x", pytrees.partition(x), resolved)


def _reduced(kind: str, placement: Placement, leaves: Any, mask: Any, weights: Any) -> list[jax.Array]:
    """Reduce leaves ``(size, ...)``, each with a weight ``(size,)`` or ``None``."""
    chunk = placing.current().chunk
    size = placement.size if chunk is None else chunk.count(placement.axis)
    counted = {id(weight): mask if weight is None else weight for weight in weights} if kind == "mean" else {}
    totals = {at: size if x is None else _folded("mean", x, placement, mask) for at, x in counted.items()}

    def one(leaf: jax.Array, weight: jax.Array | None) -> jax.Array:
        y, dtype = _folded(kind, leaf, placement, mask, weight), _dtype(kind, leaf.dtype, jax_api.is_wide())
        if kind == "mean":
            y = y / jnp.asarray(totals[id(weight)], y.dtype)
        return y.astype(jnp.promote_types(dtype, y.dtype) if jnp.iscomplexobj(y) else dtype)

    return [*map(one, leaves, weights)]


_reduced_at_once = jax.jit(_reduced, static_argnums=(0, 1))


def _folded(
    kind: str, leaf: jax.Array, placement: Placement, mask: jax.Array | None, weight: jax.Array | None = None
) -> jax.Array:
    """``(size, ...)`` → ``(...)``, of a dtype to combine terms in; a map's result that is only summed is not kept."""
    extras = [x for x in (mask, weight) if x is not None]
    term, form = _Term(kind, mask is not None, weight is not None), deferred.recall(leaf)
    is_result = kind in ("sum", "mean") and isinstance(form, functools.partial)
    if is_result and (linear := form(placement, term, extras)) is not None:
        return linear
    rows = [arrays.constrain(x, placement, rows=placement.divides) for x in (leaf, *extras)]
    rows = jax.vmap(term)(*rows) if extras else term(*rows)
    padded = placement.num_padded if placement.is_padded and not placement.is_explicit else None
    reduce_p = REDUCTIONS["sum" if kind == "mean" else kind]
    return reduce_p.bind(rows, axis=placement.axis.name, size=placement.size, padded=padded)


class _Term(NamedTuple):
    """An element's term of a reduction: its value times its weight, or the identity where its mask is ``False``."""

    kind: str
    masked: bool
    weighted: bool

    def __call__(self, y: jax.Array, *extras: jax.Array) -> jax.Array:
        """``y (...)``, mask ``()``, weight ``()`` → ``(...)``: of an element, or of rows if there is only ``y``."""
        if jnp.issubdtype(y.dtype, jax.dtypes.extended):  # PRNG keys have no sum
            return jnp.zeros(())
        if self.kind in ("any", "all"):
            y = y.astype(bool)
        elif jnp.issubdtype(y.dtype, jnp.inexact):
            y = y.astype(sums.wide(y.dtype))
        elif self.kind in ("sum", "mean"):
            y = y.astype(_dtype(self.kind, y.dtype, jax_api.is_wide()))
        if self.weighted:
            weight = extras[-1]
            dtype = jnp.promote_types(y.dtype, weight.dtype) if jnp.iscomplexobj(weight) else y.dtype
            y = y.astype(dtype) * weight.astype(dtype)
        if self.masked:
            unnoticed = identity("sum" if self.kind == "mean" else self.kind, y.dtype)
            y = jax.lax.select_n(extras[0], jnp.full_like(y, unnoticed), y)
        return y


@functools.lru_cache
def _dtype(kind: str, dtype: Any, is_wide: bool) -> Any:
    """Return the dtype of ``jnp.sum``, say."""
    return jax.eval_shape(getattr(jnp, kind), jax.ShapeDtypeStruct((1,), dtype)).dtype


def identity(kind: str, dtype: Any) -> np.ndarray:
    """Return the element ``()`` that a reduction does not notice."""
    if kind in ("sum", "any", "all") or dtype == bool:
        return np.invert(np.zeros((), dtype)) if kind in ("all", "min") else np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf if kind == "max" else np.inf, dtype)
    return np.array(jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max, dtype)


def copies(x: jax.Array, placement: Placement) -> jax.Array:
    """``(...)`` → ``(size, ...)``, as a broadcast along the axis; each device has its rows, if their number divides."""
    names = placement.mesh_axes if placement.divides else ()
    is_laid = names and placement.mesh is not None and not placement.is_explicit and not placement.mesh.manual_axes
    return broadcast_p.bind(
        arrays.constrain(x, placement),
        axis=placement.axis.name,
        size=placement.size,
        over=names if placement.is_explicit else (),
        layout=placement if is_laid else None,
        devices=placing.mesh_witness(placement) if is_laid else None,
    )


def _broadcast_aval(x: ShapedArray, *, size: int, over: tuple[str, ...], **_: Any) -> ShapedArray:
    spec = (over or None, *x.sharding.spec)
    return x.update(shape=(size, *x.shape), sharding=NamedSharding(x.sharding.mesh, P(*spec)))


def _broadcast_rows(x: jax.Array, *, size: int, over: tuple[str, ...], layout: Placement | None, **_: Any) -> jax.Array:
    aval = jax.typeof(x)
    out = NamedSharding(aval.sharding.mesh, P(over, *aval.sharding.spec)) if over else None
    y = jax.lax.broadcast_in_dim(x, (size, *x.shape), range(1, x.ndim + 1), out_sharding=out)
    return y if layout is None else arrays.in_blocks(y, layout)


def _broadcast_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, **_: Any) -> list[Any]:
    return [sum_p.bind(ct, axis=axis, size=size, padded=None)]


def _broadcast_batch(operands: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    return broadcast_p.bind(*operands, **params), dims[0] + 1


def _reduced_aval(x: ShapedArray, **_: Any) -> ShapedArray:
    return x.update(shape=x.shape[1:], sharding=NamedSharding(x.sharding.mesh, P(*[*x.sharding.spec][1:])))


def _reduce_rows(x: jax.Array, *, kind: str, size: int, padded: int | None, **_: Any) -> jax.Array:
    if padded is not None:
        # The compiler splits it over the devices without moving anything. That of jaxlib 0.10 takes an array's padding
        # for any other padding of it, whatever the value: a minimum beside a maximum was that of the type.
        x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, padded - size, 0)] + [(0, 0, 0)] * (x.ndim - 1))
        x = arrays.fill(x, np.arange(padded) < size, identity(kind, x.dtype))
    # The dtype is settled before the primitive, so that local and global sums are taken in the same one.
    options = {"axis": 0, "dtype": x.dtype} if kind == "sum" else {"axis": 0}
    fold = functools.partial(getattr(jnp, kind), **options)
    return by_integers(fold, x, nan_is_top=kind == "max") if kind in ("max", "min") else fold(x)


def _reduce_batch(operands: Any, dims: Any, *, kind: str, **params: Any) -> tuple[jax.Array, int]:
    return REDUCTIONS[kind].bind(jnp.moveaxis(operands[0], dims[0], 1), **params), 0


def _sum_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, padded: int | None) -> list[Any]:
    lead = x.aval.sharding.spec[0]
    over = () if lead is None else lead if isinstance(lead, tuple) else (lead,)
    return [broadcast_p.bind(ct, axis=axis, size=size, over=over, layout=None, devices=None)]


def _extremum_jvp(primals: Any, tangents: Any, *, kind: str, **params: Any) -> tuple[jax.Array, jax.Array]:
    """Elements that attain the extremum share its derivative equally, as in ``jnp.max``."""
    (x,), x_dot = primals, jax_api.ad.instantiate_zeros(tangents[0])
    x = jax.lax.optimization_barrier(x)  # jaxlib 0.12 may compute it again, rounded otherwise, and no element equal it
    y = REDUCTIONS[kind].bind(x, **params)
    attained = (x == y[None]).astype(x_dot.dtype)
    return y, sum_p.bind(attained * x_dot, **params) / sum_p.bind(attained, **params)


def by_integers(fold: Callable[[jax.Array], jax.Array], x: jax.Array, *, nan_is_top: bool) -> jax.Array:
    """Return an extremum in which NaN wins, by ordered integers: to jaxlib 0.12, XLA's all-reduce on CPU drops it."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return fold(x)
    dtype, x = x.dtype, x.astype(sums.wide(x.dtype))
    info = jnp.iinfo(f"int{8 * x.dtype.itemsize}")  # beside one of isnan, jaxlib 0.12 computes rows twice
    keys = _flipped(jax.lax.bitcast_convert_type(x, info.dtype))
    keys = jnp.where(jnp.isnan(x), np.array(info.max if nan_is_top else info.min, info.dtype), keys)
    return jax.lax.bitcast_convert_type(_flipped(fold(keys)), x.dtype).astype(dtype)


def _flipped(bits: jax.Array) -> jax.Array:
    """Return a float's bits as an integer of the same order, or such an integer as bits."""
    return jnp.where(bits < 0, bits ^ np.array(jnp.iinfo(bits.dtype).max, bits.dtype), bits)


def _primitive(
    name: str, implementation: Callable[..., Any], aval: Callable[..., ShapedArray], batched: Any, **kind: str
) -> Primitive:
    primitive, implementation = Primitive(name), functools.partial(implementation, **kind)
    primitive.def_abstract_eval(aval)
    jax_api.define_lowering(primitive, implementation)
    jax_api.batching.primitive_batchers[primitive] = functools.partial(batched, **kind)
    compiled = jax.jit(implementation, static_argnames=("axis", "size", "over", "layout", "padded"))

    def evaluated(x: jax.Array, devices: Any = None, layout: Placement | None = None, **params: Any) -> jax.Array:
        x = jnp.asarray(x)  # under a derivative, JAX has numbers of its own kind
        # Rows of a value that is bound to no devices are bound to none.
        is_laid = layout is not None and x.committed and getattr(x.sharding, "mesh", None) == layout.devices
        return compiled(x, layout=layout if is_laid else None, **params)

    primitive.def_impl(evaluated)
    return primitive


broadcast_p = _primitive("px_broadcast", _broadcast_rows, _broadcast_aval, _broadcast_batch)
jax_api.ad.deflinear2(broadcast_p, _broadcast_transpose)

REDUCTIONS = {
    kind: _primitive(f"px_reduce_{kind}", _reduce_rows, _reduced_aval, _reduce_batch, kind=kind)
    for kind in ("sum", "max", "min", "any", "all")
}
sum_p = REDUCTIONS["sum"]
jax_api.ad.deflinear2(sum_p, _sum_transpose)
for _kind in ("max", "min"):
    jax_api.ad.primitive_jvps[REDUCTIONS[_kind]] = functools.partial(_extremum_jvp, kind=_kind)
