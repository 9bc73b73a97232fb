"""Broadcast and the reductions as JAX primitives, each with all its rules.

They carry the axis's name, so that a program's jaxpr, and the jaxpr of its derivative, say along which axis values
move. Registered once, when this file is imported. Broadcast and sum are each other's transposes:

    broadcast   (...)       → (rows, ...)   rows from ``size`` on are zero
    sum         (rows, ...) → (...)         rows from ``size`` on are ignored

``rows`` is the number of elements, of padded elements, or of devices: one copy per device is all a broadcast value
needs until something looks at its elements. ``over`` names the mesh axes of the new dimension where the mesh is
Explicit (there a sharding is part of a type); on Auto meshes it is empty, and ``laid`` and ``devices`` say in a
program, where they are no part of its text, how the rows lie if they are kept.

The lowerings are plain global-view operations. On a sharded operand the compiler turns a reduction into a local
one and one all-reduce, and a broadcast into nothing at all. In extremes NaN wins, as in ``jnp.max`` on one device:
XLA's all-reduce on CPU drops it, so devices exchange integers of the same order, with NaN beyond all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from paraxis._core import jax_api, layout, placing
from paraxis._core.jax_api import Primitive, ShapedArray
from paraxis._core.placing import Placement


@dataclasses.dataclass(frozen=True, repr=False)
class Laid:
    """Rows laid over axes of an Auto mesh. A program's text does not say so."""

    mesh: Mesh | AbstractMesh
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return "rows"

    def has(self, x: jax.Array) -> bool:
        """Return whether a concrete value lies on this mesh. One bound to no devices gives rows bound to none."""
        mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) and x.committed else None
        return mesh is not None and self.mesh in (mesh, mesh.abstract_mesh)


@dataclasses.dataclass(frozen=True, repr=False)
class Rows:
    """The number of rows that the devices take, padding included. A program's text is the same for any number."""

    number: int

    def __repr__(self) -> str:
        return "rows"


def copies(x: jax.Array, placement: Placement) -> jax.Array:
    """``(...)`` → ``(size, ...)``, as a broadcast along the axis; each device has its rows, if their number divides."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys: no derivative, and JAX's own rules
        return jnp.broadcast_to(x, (placement.size, *x.shape))
    laid, names = None, placement.mesh_axes if placement.divides else ()
    if names and placement.mesh is not None and not placement.is_explicit and not placement.mesh.manual_axes:
        laid = Laid(placement.mesh, names)
    return broadcast_p.bind(
        layout.on_mesh(x, placement),
        axis=placement.axis.name,
        rows=placement.size,
        size=placement.size,
        over=names if placement.is_explicit else (),
        laid=laid,
        devices=placing.named_devices(placement) if laid else None,
    )


def reduce(kind: str, x: jax.Array, *, axis: str, size: int, padded: Rows | None = None) -> jax.Array:
    """``kind`` is one of ``sum``, ``max``, ``min``, ``any``, ``all``."""
    return REDUCTIONS[kind].bind(x, axis=axis, size=size, padded=padded)


def identity(kind: str, dtype: Any) -> Any:
    """Return the element that a reduction does not notice."""
    if kind in ("sum", "any") or (kind == "max" and dtype == bool):
        return np.zeros((), dtype)
    if kind == "all" or dtype == bool:
        return np.ones((), dtype)
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    with np.errstate(all="ignore"):
        infinite = np.array(-np.inf if kind == "max" else np.inf).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and np.isinf(infinite.astype(np.float64)):
        return infinite  # some kinds of eight bits have no infinity
    return np.array(info.min if kind == "max" else info.max, dtype)


# --- broadcast ---------------------------------------------------------------------------------------------------


def _broadcast_aval(x: ShapedArray, *, rows: int, over: tuple[str, ...], **_: Any) -> ShapedArray:
    spec = (over or None, *jax_api.sharding_spec(x))
    return x.update(shape=(rows, *x.shape), sharding=NamedSharding(x.sharding.mesh, P(*spec)))


def _broadcast_rows(
    x: jax.Array, *, axis: str, rows: int, size: int, over: tuple[str, ...], laid: Laid | None, devices: Any = None
) -> jax.Array:
    aval = jax.typeof(x)
    out = NamedSharding(aval.sharding.mesh, P(over, *jax_api.sharding_spec(aval))) if over else None
    y = jax.lax.broadcast_in_dim(x, (rows, *x.shape), range(1, x.ndim + 1), out_sharding=out)
    y = _mask(y, size, np.zeros((), x.dtype))
    if laid is None:
        return y
    spec = P(laid.names, *(P.UNCONSTRAINED,) * x.ndim)
    return jax.lax.with_sharding_constraint(y, NamedSharding(laid.mesh, spec))


def _broadcast_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, **_: Any) -> list[Any]:
    return [sum_p.bind(ct, axis=axis, size=size, padded=None)]


def _broadcast_batch(operands: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
    return broadcast_p.bind(*operands, **params), dims[0] + 1


# --- reductions --------------------------------------------------------------------------------------------------


def _reduced_aval(x: ShapedArray, **_: Any) -> ShapedArray:
    return x.update(shape=x.shape[1:], sharding=NamedSharding(x.sharding.mesh, P(*jax_api.sharding_spec(x)[1:])))


def _reduce_rows(x: jax.Array, *, kind: str, axis: str, size: int, padded: Rows | None) -> jax.Array:
    if padded is not None:
        # An operation that the compiler splits over the devices without moving anything.
        x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, padded.number - x.shape[0], 0)] + [(0, 0, 0)] * (x.ndim - 1))
    x = _mask(x, size, identity(kind, x.dtype))
    # The dtype is settled before the primitive, so that local and global sums are taken in the same one.
    options = {"axis": 0, "dtype": x.dtype} if kind == "sum" else {"axis": 0}
    fold = functools.partial(getattr(jnp, kind), **options)
    return _by_integers(fold, x, nan_is_top=kind == "max") if kind in ("max", "min") else fold(x)


def _reduce_batch(operands: Any, dims: Any, *, kind: str, **params: Any) -> tuple[jax.Array, int]:
    return REDUCTIONS[kind].bind(jnp.moveaxis(operands[0], dims[0], 1), **params), 0


def _sum_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, padded: Rows | None) -> list[Any]:
    lead = jax_api.sharding_spec(x.aval)[0]
    over = () if lead is None else lead if isinstance(lead, tuple) else (lead,)
    rows = x.aval.shape[0]
    return [broadcast_p.bind(ct, axis=axis, rows=rows, size=size, over=over, laid=None, devices=None)]


def _extremum_jvp(primals: Any, tangents: Any, *, kind: str, **params: Any) -> tuple[jax.Array, jax.Array]:
    """Elements that attain the extremum share its derivative equally, as in ``jnp.max``."""
    (x,), x_dot = primals, jax_api.ad.instantiate_zeros(tangents[0])
    x = jax_api.computed_once(x)  # else no element may equal it
    y = REDUCTIONS[kind].bind(x, **params)
    attained = (x == y[None]).astype(x_dot.dtype)
    return y, sum_p.bind(attained * x_dot, **params) / sum_p.bind(attained, **params)


def _mask(x: jax.Array, size: int, fill: Any) -> jax.Array:
    if x.shape[0] == size:
        return x
    index = jax.lax.broadcasted_iota(np.int32, (x.shape[0],) + (1,) * (x.ndim - 1), 0)
    return jnp.where(index < size, x, fill)


def _by_integers(fold: Callable[[jax.Array], jax.Array], x: jax.Array, *, nan_is_top: bool) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return fold(x)
    own, x = x.dtype, x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    info = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    keys = _flipped(jax.lax.bitcast_convert_type(x, info.dtype))
    keys = jnp.where(jnp.isnan(x), np.array(info.max if nan_is_top else info.min, info.dtype), keys)
    return jax.lax.bitcast_convert_type(_flipped(fold(keys)), x.dtype).astype(own)


def _flipped(bits: jax.Array) -> jax.Array:
    """Return a float's bits as an integer of the same order, or such an integer as bits."""
    return jnp.where(bits < 0, bits ^ np.array(jnp.iinfo(bits.dtype).max, bits.dtype), bits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def across(x: jax.Array, collective: str, name: str) -> jax.Array:
    """Return ``jax.lax.pmax`` or ``pmin`` in which NaN wins; it has no derivative either."""
    fold: Callable[..., jax.Array] = getattr(jax.lax, collective)
    return _by_integers(lambda x: fold(x, name), x, nan_is_top=collective == "pmax")


@across.defjvp
def _(collective: str, name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(f"{collective} has no derivative; reduce after the map instead")


# --- registration ------------------------------------------------------------------------------------------------


def _primitive(
    name: str, implementation: Callable[..., jax.Array], aval: Callable[..., ShapedArray], static: tuple[str, ...]
) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(aval)
    jax_api.define_lowering(primitive, implementation)
    compiled = jax.jit(implementation, static_argnames=static)

    def evaluated(x: jax.Array, devices: Any = None, **params: Any) -> jax.Array:
        x = jnp.asarray(x)  # under a derivative, JAX has numbers of its own kind
        if params.get("laid") is not None and not params["laid"].has(x):
            params["laid"] = None
        return compiled(x, **params)

    primitive.def_impl(evaluated)
    return primitive


def _reduction(kind: str) -> Primitive:
    implementation = functools.partial(_reduce_rows, kind=kind)
    primitive = _primitive(f"px_reduce_{kind}", implementation, _reduced_aval, ("axis", "size", "padded"))
    jax_api.batching.primitive_batchers[primitive] = functools.partial(_reduce_batch, kind=kind)
    return primitive


broadcast_p = _primitive("px_broadcast", _broadcast_rows, _broadcast_aval, ("axis", "rows", "size", "over", "laid"))
jax_api.batching.primitive_batchers[broadcast_p] = _broadcast_batch
jax_api.ad.deflinear2(broadcast_p, _broadcast_transpose)

REDUCTIONS = {kind: _reduction(kind) for kind in ("sum", "max", "min", "any", "all")}
sum_p = REDUCTIONS["sum"]
jax_api.ad.deflinear2(sum_p, _sum_transpose)
for _kind in ("max", "min"):
    jax_api.ad.primitive_jvps[REDUCTIONS[_kind]] = functools.partial(_extremum_jvp, kind=_kind)
