"""Broadcast and the reductions as JAX primitives, each with all its rules, so that a program's jaxpr says what moves.

Broadcast ``(...) → (size, ...)`` and sum ``(size, ...) → (...)`` are each other's transposes. ``over`` names the mesh
axes of the new dimension where the mesh is Explicit (there a sharding is part of a type); on Auto meshes it is empty,
and ``laid`` and ``devices`` say, where a program's text does not, how rows lie if they are kept.

The lowerings are plain operations on all rows: of a sharded operand, the compiler makes a local reduction and one
all-reduce. In extremes NaN wins: XLA's all-reduce on CPU drops it, so devices exchange integers of the same order, with
NaN beyond all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, jax_api, placing
from paraxis._core.jax_api import Primitive, ShapedArray
from paraxis._core.placing import Placement


class Laid(NamedTuple):
    """Rows laid over axes of an Auto mesh."""

    mesh: Mesh | AbstractMesh
    names: tuple[str, ...]

    def __repr__(self) -> str:  # a program's text is the same on any devices
        return "rows"


class Rows(int):
    """The number of rows that the devices take, padding included."""

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
        arrays.constrain(x, placement),
        axis=placement.axis.name,
        size=placement.size,
        over=names if placement.is_explicit else (),
        laid=laid,
        devices=placing.named_devices(placement) if laid else None,
    )


def identity(kind: str, dtype: Any) -> np.ndarray:
    """Return the element that a reduction does not notice."""
    if kind in ("sum", "any", "all") or dtype == bool:
        return np.array(kind in ("all", "min"), dtype)
    with np.errstate(all="ignore"):
        infinite = np.array(-np.inf if kind == "max" else np.inf).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and np.isinf(infinite.astype(np.complex64)):
        return infinite  # some kinds of eight bits have no infinity
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return np.array(info.min if kind == "max" else info.max, dtype)


# --- broadcast ---------------------------------------------------------------------------------------------------


def _broadcast_aval(x: ShapedArray, *, size: int, over: tuple[str, ...], **_: Any) -> ShapedArray:
    spec = (over or None, *x.sharding.spec)
    return x.update(shape=(size, *x.shape), sharding=NamedSharding(x.sharding.mesh, P(*spec)))


def _broadcast_rows(
    x: jax.Array, *, axis: str, size: int, over: tuple[str, ...], laid: Laid | None, devices: Any = None
) -> jax.Array:
    aval = jax.typeof(x)
    out = NamedSharding(aval.sharding.mesh, P(over, *aval.sharding.spec)) if over else None
    y = jax.lax.broadcast_in_dim(x, (size, *x.shape), range(1, x.ndim + 1), out_sharding=out)
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
    return x.update(shape=x.shape[1:], sharding=NamedSharding(x.sharding.mesh, P(*[*x.sharding.spec][1:])))


def _reduce_rows(x: jax.Array, *, kind: str, axis: str, size: int, padded: Rows | None) -> jax.Array:
    if padded is not None:
        # Operations that the compiler splits over the devices without moving anything.
        x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, padded - size, 0)] + [(0, 0, 0)] * (x.ndim - 1))
        index = jax.lax.broadcasted_iota(np.int32, (padded,) + (1,) * (x.ndim - 1), 0)
        x = jnp.where(index < size, x, identity(kind, x.dtype))
    # The dtype is settled before the primitive, so that local and global sums are taken in the same one.
    options = {"axis": 0, "dtype": x.dtype} if kind == "sum" else {"axis": 0}
    fold = functools.partial(getattr(jnp, kind), **options)
    return _by_integers(fold, x, nan_is_top=kind == "max") if kind in ("max", "min") else fold(x)


def _reduce_batch(operands: Any, dims: Any, *, kind: str, **params: Any) -> tuple[jax.Array, int]:
    return REDUCTIONS[kind].bind(jnp.moveaxis(operands[0], dims[0], 1), **params), 0


def _sum_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, padded: Rows | None) -> list[Any]:
    lead = x.aval.sharding.spec[0]
    over = () if lead is None else lead if isinstance(lead, tuple) else (lead,)
    return [broadcast_p.bind(ct, axis=axis, size=size, over=over, laid=None, devices=None)]


def _extremum_jvp(primals: Any, tangents: Any, *, kind: str, **params: Any) -> tuple[jax.Array, jax.Array]:
    """Elements that attain the extremum share its derivative equally, as in ``jnp.max``."""
    (x,), x_dot = primals, jax_api.ad.instantiate_zeros(tangents[0])
    x = jax.lax.optimization_barrier(x)  # computed again, it may be rounded otherwise, and no element equal it
    y = REDUCTIONS[kind].bind(x, **params)
    attained = (x == y[None]).astype(x_dot.dtype)
    return y, sum_p.bind(attained * x_dot, **params) / sum_p.bind(attained, **params)


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
        if (laid := params.get("laid")) is not None:  # rows of a value that is bound to no devices are bound to none
            mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) and x.committed else None
            params["laid"] = laid if mesh is not None and laid.mesh in (mesh, mesh.abstract_mesh) else None
        return compiled(x, **params)

    primitive.def_impl(evaluated)
    return primitive


def _reduction(kind: str) -> Primitive:
    implementation = functools.partial(_reduce_rows, kind=kind)
    primitive = _primitive(f"px_reduce_{kind}", implementation, _reduced_aval, ("axis", "size", "padded"))
    jax_api.batching.primitive_batchers[primitive] = functools.partial(_reduce_batch, kind=kind)
    return primitive


broadcast_p = _primitive("px_broadcast", _broadcast_rows, _broadcast_aval, ("axis", "size", "over", "laid"))
jax_api.batching.primitive_batchers[broadcast_p] = _broadcast_batch
jax_api.ad.deflinear2(broadcast_p, _broadcast_transpose)

REDUCTIONS = {kind: _reduction(kind) for kind in ("sum", "max", "min", "any", "all")}
sum_p = REDUCTIONS["sum"]
jax_api.ad.deflinear2(sum_p, _sum_transpose)
for _kind in ("max", "min"):
    jax_api.ad.primitive_jvps[REDUCTIONS[_kind]] = functools.partial(_extremum_jvp, kind=_kind)
