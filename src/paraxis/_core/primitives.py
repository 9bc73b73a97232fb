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
one and one all-reduce, and a broadcast into nothing at all.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from paraxis._core import extremes, jax_api, layout, placing
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

    def constrain(self, rows: jax.Array) -> jax.Array:
        spec = P(self.names, *(P.UNCONSTRAINED,) * (rows.ndim - 1))
        return jax.lax.with_sharding_constraint(rows, NamedSharding(self.mesh, spec))


def broadcast(
    x: jax.Array,
    *,
    axis: str,
    rows: int,
    size: int,
    over: tuple[str, ...] = (),
    laid: Laid | None = None,
    devices: Any = None,
) -> jax.Array:
    return broadcast_p.bind(x, axis=axis, rows=rows, size=size, over=over, laid=laid, devices=devices)


@dataclasses.dataclass(frozen=True, repr=False)
class Rows:
    """The number of rows that the devices take, padding included. A program's text is the same for any number."""

    number: int

    def __repr__(self) -> str:
        return "rows"


def reduce(kind: str, x: jax.Array, *, axis: str, size: int, padded: Rows | None = None) -> jax.Array:
    """``kind`` is one of ``sum``, ``max``, ``min``, ``any``, ``all``."""
    return REDUCTIONS[kind].bind(x, axis=axis, size=size, padded=padded)


def identity(kind: str, dtype: Any) -> Any:
    """Return the element that a reduction does not notice."""
    if kind in ("sum", "any"):
        return np.zeros((), dtype)
    if kind == "all":
        return np.ones((), dtype)
    if dtype == bool:
        return np.bool_(kind == "min")
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.array(info.min if kind == "max" else info.max, dtype)
    return extremes.farthest(dtype, below=kind == "max")


# --- broadcast ---------------------------------------------------------------------------------------------------


def _broadcast_aval(x: ShapedArray, *, rows: int, over: tuple[str, ...], **_: Any) -> ShapedArray:
    spec = (over or None, *jax_api.sharding_spec(x))
    return x.update(shape=(rows, *x.shape), sharding=NamedSharding(x.sharding.mesh, P(*spec)))


def _broadcast_rows(
    x: jax.Array, *, rows: int, size: int, over: tuple[str, ...], laid: Laid | None = None, **_: Any
) -> jax.Array:
    out = None
    if over:
        aval = jax.typeof(x)
        out = NamedSharding(aval.sharding.mesh, P(over, *jax_api.sharding_spec(aval)))
    y = jax.lax.broadcast_in_dim(x, (rows, *x.shape), range(1, x.ndim + 1), out_sharding=out)
    y = _mask(y, size, np.zeros((), x.dtype))
    return y if laid is None else laid.constrain(y)


def _broadcast_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, **_: Any) -> list[Any]:
    return [sum_p.bind(ct, axis=axis, size=size, padded=None)]


def _broadcast_batch(xs: Sequence[jax.Array], dims: Sequence[int], **params: Any) -> tuple[jax.Array, int]:
    return broadcast_p.bind(*xs, **params), dims[0] + 1


# --- copies along an axis ----------------------------------------------------------------------------------------


def copies(x: jax.Array, placement: Placement) -> jax.Array:
    """``(...)`` → ``(size, ...)``, as a broadcast along the axis; each device has its rows, if their number divides."""
    spread = placement.divides
    mesh = placement.mesh
    names = placement.mesh_axes
    laid = None
    if spread and names and mesh is not None and not placement.is_explicit and not jax_api.manual_axes(mesh):
        laid = Laid(mesh, names)
    devices = placing.named_devices(placement) if laid else None
    over = names if placement.is_explicit and spread else ()
    return _copies(x, placement, placement.size, over, laid, devices)


def _copies(
    x: jax.Array,
    placement: Placement,
    rows: int,
    over: tuple[str, ...],
    laid: Laid | None = None,
    devices: Any = None,
) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys: no derivative, and JAX's own rules
        return jnp.broadcast_to(x, (rows, *x.shape))
    x = layout.on_mesh(x, placement)
    return broadcast(x, axis=placement.axis.name, rows=rows, size=rows, over=over, laid=laid, devices=devices)


# --- reductions --------------------------------------------------------------------------------------------------


def _reduced_aval(x: ShapedArray, *, axis: str, size: int, padded: Rows | None) -> ShapedArray:
    return x.update(shape=x.shape[1:], sharding=NamedSharding(x.sharding.mesh, P(*jax_api.sharding_spec(x)[1:])))


def _reduce_rows(x: jax.Array, *, kind: str, axis: str, size: int, padded: Rows | None) -> jax.Array:
    if padded is not None:
        # An operation that the compiler splits over the devices without moving anything.
        x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, padded.number - x.shape[0], 0)] + [(0, 0, 0)] * (x.ndim - 1))
    fold = extremes.FOLDS.get(kind) or getattr(jnp, kind)
    # The dtype is settled before the primitive, so that local and global sums are taken in the same one.
    dtype = {"dtype": x.dtype} if kind == "sum" else {}
    return fold(_mask(x, size, identity(kind, x.dtype)), axis=0, **dtype)


def _reduce_batch(xs: Sequence[jax.Array], dims: Sequence[int], *, kind: str, **params: Any) -> tuple[jax.Array, int]:
    return REDUCTIONS[kind].bind(jnp.moveaxis(xs[0], dims[0], 1), **params), 0


def _sum_transpose(ct: jax.Array, x: Any, *, axis: str, size: int, padded: Rows | None) -> list[Any]:
    aval = x.aval
    lead = jax_api.sharding_spec(aval)[0]
    over = () if lead is None else lead if isinstance(lead, tuple) else (lead,)
    return [broadcast(ct, axis=axis, rows=aval.shape[0], size=size, over=over)]


def _extremum_jvp(xs: Sequence[Any], dots: Sequence[Any], *, kind: str, **params: Any) -> tuple[jax.Array, jax.Array]:
    """Elements that attain the extremum share its derivative equally, as in ``jnp.max``."""
    x, x_dot = jax_api.computed_once(xs[0]), dots[0]  # else no element may equal it
    y = REDUCTIONS[kind].bind(x, **params)
    attained = (x == y[None]).astype(x_dot.dtype)
    return y, sum_p.bind(attained * x_dot, **params) / sum_p.bind(attained, **params)


def _mask(x: jax.Array, size: int, fill: Any) -> jax.Array:
    if x.shape[0] == size:
        return x
    index = jax.lax.broadcasted_iota(np.int32, (x.shape[0],) + (1,) * (x.ndim - 1), 0)
    return jnp.where(index < size, x, fill)


# --- registration ------------------------------------------------------------------------------------------------


def _primitive(name: str, implementation: Callable[..., jax.Array], aval: Callable[..., ShapedArray]) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(aval)
    jax_api.define_lowering(primitive, implementation)

    @functools.lru_cache(maxsize=1024)
    def compiled(params: Hashable) -> Callable[..., jax.Array]:
        return jax.jit(functools.partial(implementation, **dict(params)))  # pyright: ignore[reportCallIssue, reportArgumentType]

    def evaluated(x: jax.Array, **params: Any) -> jax.Array:
        x = jnp.asarray(x)  # under a derivative, JAX has numbers of its own kind
        laid = params.get("laid")
        unread = ("devices",) if laid is None or laid.has(x) else ("devices", "laid")
        return compiled(tuple(sorted((name, value) for name, value in params.items() if name not in unread)))(x)

    primitive.def_impl(evaluated)
    return primitive


def _reduction(kind: str) -> Primitive:
    primitive = _primitive(f"px_reduce_{kind}", functools.partial(_reduce_rows, kind=kind), _reduced_aval)
    jax_api.batching.primitive_batchers[primitive] = functools.partial(_reduce_batch, kind=kind)
    return primitive


broadcast_p = _primitive("px_broadcast", _broadcast_rows, _broadcast_aval)
jax_api.batching.primitive_batchers[broadcast_p] = _broadcast_batch
jax_api.ad.deflinear2(broadcast_p, _broadcast_transpose)

REDUCTIONS = {kind: _reduction(kind) for kind in ("sum", "max", "min", "any", "all")}
sum_p = REDUCTIONS["sum"]
jax_api.ad.deflinear2(sum_p, _sum_transpose)
for _kind in ("max", "min"):
    jax_api.ad.primitive_jvps[REDUCTIONS[_kind]] = functools.partial(_extremum_jvp, kind=_kind)
