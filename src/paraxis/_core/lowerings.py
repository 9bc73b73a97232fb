"""A map on the devices at hand: ``shard_map`` of ``vmap`` of the jaxpr of one element.

``"vmap"`` is best wherever the vectorised operation is as good as the single one; ``"unroll"`` for convolutions with
weights per element on CPU, which vectorised become a grouped convolution, several times slower.

``at_once=k`` runs the elements of a device in chunks of at most ``k``; nothing but a chunk's inputs is kept for its
derivative. Elements that exchange values are all under way together, in one ``vmap`` whose collectives are JAX's own:
the compiler divides it. One element on each device runs in ``shard_map`` itself, as by ``jax.pmap``.
"""

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, jax_api, placing, sums
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from paraxis._core.placing import Placement, current
from paraxis._core.pytrees import merged, taken
from paraxis._core.sums import Element
from paraxis.errors import AxisError

Lowering = Literal["auto", "vmap", "unroll"]

_UNROLL_AT_MOST = 16  # elements per device; beyond it compile time outgrows what unrolling saves

_GATHERED = (
    f"jax {jax.__version__} gathers what a map over {{!r}} is given over the mesh's other axes, as these are Explicit; "
    "update to jax 0.12, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, …)"
)


@dataclasses.dataclass(frozen=True)
class Elements:
    """Elements of an axis, to be run by the devices at hand."""

    element: Element
    placement: Placement
    lowering: Lowering

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results: rows ``(size, ...)``, or sums over the elements."""
        placement, jaxpr = self.placement, self.element.body.jaxpr
        if not mentions(jaxpr, placement.axis.name):
            return self._in_blocks(operands, {})
        is_pmap = placement.num_local == 1 and not placement.is_padded and placement.crossed_axes
        if not is_pmap or parts(jaxpr, placement.axis.name, "cond", "while"):  # some could wait in vain
            return self._together(operands)
        return self._in_blocks(operands, {placement.axis.name: placement.crossed_axes})

    def _in_blocks(self, operands: Sequence[jax.Array], names: Mapping[str, tuple[str, ...]]) -> list[jax.Array]:
        """Each device runs the elements of its block; one that has none rests. ``names``: of axes, on the mesh."""
        (body, shared, summed, _), placement, chunk = self.element, self.placement, self._traced_chunk()
        rests = placement.has_idle_device and placement.has_mesh_alone
        # XLA's CPU compiler rewrites only the convolutions of the main computation into a form that it runs fast: in a
        # branch, a gradient's take 8 times as long as on zeros, where a loop may not end, and which a callback sees.
        acts = jax_api.holds(body.jaxpr, "while", "pure_callback") or jax_api.has_effects(body.jaxpr)

        def rest(*_: jax.Array) -> list[jax.Array]:
            counts = (1 if is_summed else placement.num_local for is_summed in summed)
            return [jax.lax.full((n, *y.shape), 0, y.dtype) for n, y in zip(counts, body.out_avals, strict=True)]

        def on_device(*blocks: jax.Array) -> list[jax.Array]:
            work = functools.partial(self._block, _inside(chunk, jax.sharding.get_abstract_mesh(), names), not rests)
            if not rests:
                return work(*blocks)
            has_rows = arrays.device_index(placement) * placement.num_local < placement.size
            if _convolves(body) and not acts:
                return [jnp.where(has_rows, y, zero) for y, zero in zip(work(*blocks), rest(), strict=True)]
            return jax.lax.cond(has_rows, work, rest, *blocks)

        operands = [x if s else arrays.pad(x, placement, safe=not rests) for x, s in zip(operands, shared, strict=True)]
        if placement.is_explicit:
            sides = zip(operands, shared, strict=True)
            operands = [arrays.constrain(x, placement) if s else self._laid(x) for x, s in sides]
            others = any(any([*jax.typeof(x).sharding.spec][1:]) for x in operands)
            if others and jax_api.GATHERS_EXPLICIT:
                warnings.warn(_GATHERED.format(placement.axis.name), stacklevel=2)
        in_specs = tuple(P() if is_shared else placement.spec for is_shared in shared)
        on_mesh = placing.shard_map(on_device, placement.mesh, placement.mesh_axes, in_specs)
        results = zip((on_mesh if placement.mesh_axes else on_device)(*operands), summed, strict=True)
        return [jnp.sum(y, 0, dtype=y.dtype) if s else arrays.unpad(y, placement) for y, s in results]

    def _block(self, chunk: ClosedJaxpr, safe: bool, *blocks: jax.Array) -> list[jax.Array]:
        """Run a device's chunks: blocks ``(num_local, ...)`` → the same, or sums ``(1, ...)``, carried along."""
        (body, shared, summed, _), placement, fn = self.element, self.placement, jax_api.jaxpr_as_fun(chunk)
        real, common = arrays.real_rows(placement), taken(blocks, shared)
        rows = [arrays.fill(x, placement, safe=safe) for x in taken(blocks, shared, False)]
        rows, sides = (rows, shared) if real is None else ([*rows, real], [*shared, False])

        def run(rows: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            found = fn(*merged(sides, common, rows))
            return taken(found, summed), taken(found, summed, False)

        def step(totals: list[jax.Array], part: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            more, found = run(part)
            return [total + y for total, y in zip(totals, more, strict=True)], found

        if (count := placement.num_chunks) == 1:
            totals, found = run(rows)
        else:
            zeros = [jnp.zeros(a.shape, a.dtype) for a in taken(body.out_avals, summed)]
            parts = [x.reshape(count, placement.chunk, *x.shape[1:]) for x in rows]
            totals, found = jax.lax.scan(step, zeros, parts, length=count)
            found = [jax.lax.collapse(y, 0, 2) for y in found]
        return merged(summed, [y[None] for y in totals], found)

    def _traced_chunk(self) -> ClosedJaxpr:
        """Trace what a device runs at once, outside of the mesh: rules of libraries see none."""
        placement, sides = self.placement, zip(self.element.body.in_avals, self.element.shared, strict=True)
        own = placement.mesh.shape if placement.mesh is not None else {}
        names = {**jax.sharding.get_abstract_mesh().shape, **own, placement.axis.name: placement.size}
        structs = [jax_api.struct(a, lead=() if s else (placement.chunk,)) for a, s in sides]
        masks = [jax.ShapeDtypeStruct((placement.chunk,), bool)] if placement.is_padded else []
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return jax_api.trace(jax.jit(self._chunk), [*structs, *masks], names)[0]

    def _chunk(self, *operands: jax.Array) -> list[jax.Array]:
        """Run as many elements as are under way at once; last of all, which of them are real."""
        (body, shared, summed, _), count = self.element, self.placement.chunk
        operands, real = operands[: len(shared)], next(iter(operands[len(shared) :]), None)
        if count > 1 and not unrolls(body, self.placement, self.lowering):
            return sums.over_elements(self.element, operands, real, count, merge=self.placement.has_mesh_alone)
        fn, pairs = jax_api.jaxpr_as_fun(body), list(zip(operands, shared, strict=True))
        fn = fn if count == 1 else jax.jit(fn)
        each = [fn(*(x if is_shared else x[i] for x, is_shared in pairs)) for i in range(count)]
        rows = zip(map(_stacked, zip(*each, strict=True)), summed, strict=True)
        return [sums.total(y, real) if s else y for y, s in rows]

    def _together(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        element, placement, axis = self.element, self.placement, self.placement.axis
        rows = [x if s else self._laid(x) for x, s in zip(operands, element.shared, strict=True)]

        def over(*rows: jax.Array) -> list[jax.Array]:
            here = element._replace(body=_inside(element.body, jax.sharding.get_abstract_mesh(), {}))
            return sums.over_elements(here, rows, None, axis.size, axis.name)

        if placement.is_explicit:  # there JAX 0.12 gives a sum over a vmapped axis the sharding of what it sums
            leads = [P() if s or axis.size % placement.num_devices else placement.spec for s in element.summed]
            found: Any = jax.sharding.auto_axes(over, out_sharding=leads)(*rows)
        else:
            found = over(*rows)
        return [y if s else self._laid(y) for y, s in zip(found, element.summed, strict=True)]

    def _laid(self, x: jax.Array) -> jax.Array:
        """Rows laid over the devices; padded for it on Auto meshes, as compilers return no blocks of uneven length."""
        placement, mesh = self.placement, self.placement.mesh
        if placement.is_explicit:
            divide = x.shape[0] % placement.num_devices == 0
            return arrays.constrain(x, placement, rows=divide)
        if mesh is None or not placement.mesh_axes or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        target: Any = NamedSharding(mesh, P(placement.mesh_axes, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
        padded = jax.lax.with_sharding_constraint(arrays.pad(x, placement, safe=False), target)
        return arrays.unpad(padded, placement)


def _stacked(ys: Sequence[jax.Array]) -> jax.Array:
    """``jnp.stack``, one after the other: XLA's CPU compiler computes a concatenation's operands number by number."""
    first = jnp.asarray(ys[0])  # it may be a literal
    found = jnp.broadcast_to(first, (len(ys), *first.shape))  # split over free mesh axes as the element is
    for i, y in enumerate(ys[1:], 1):
        found = jax.lax.dynamic_update_index_in_dim(found, jnp.asarray(y), i, 0)
    return found


def keeps_nothing(placement: Placement) -> bool:
    """Return whether what chunks compute is computed again where it is needed once more."""
    # Chunks of a stream must do the same, however few elements they have.
    return placement.num_chunks > 1 or (current().chunk is not None and placement.axis.at_once is not None)


def unrolls(body: ClosedJaxpr, placement: Placement, lowering: Lowering) -> bool:
    """Return whether a device runs its elements one after the other."""
    few = placement.num_chunks == 1 and placement.chunk <= _UNROLL_AT_MOST
    return lowering == "unroll" or (lowering == "auto" and few and _convolves(body))


def _convolves(body: ClosedJaxpr) -> bool:
    return jax.default_backend() == "cpu" and jax_api.holds(body.jaxpr, "conv_general_dilated")


def require_together(body: ClosedJaxpr, placement: Placement, lowering: Lowering) -> None:
    """Refuse to run elements that exchange values if they are not all under way together."""
    name, at_once, in_chunks = placement.axis.name, placement.axis.at_once, placement.num_chunks > 1
    if (in_chunks or lowering == "unroll") and mentions(body.jaxpr, name):
        raise AxisError(
            f"axis {name!r} has {f'{at_once=}' if in_chunks else f'{lowering=}'}, so elements do not run together and "
            f"cannot exchange values; leave that out, or reduce after the map: px.reduce_sum(px.map_fn(…), {name!r})"
        )


def mentions(jaxpr: Jaxpr, name: str) -> bool:
    """Return whether a body exchanges values along an axis."""
    return any(jax_api.axis_of(effect) == name for effect in jaxpr.effects)


def parts(jaxpr: Jaxpr, name: str, *kinds: str) -> bool:
    """Return whether elements exchange values inside operations of these kinds, which they may leave apart."""
    return any(
        (eqn.primitive.name in kinds and exchanges(eqn, name))
        or any(parts(sub, name, *kinds) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def exchanges(eqn: JaxprEqn, name: str) -> bool:
    if name in jax_api.named_axes(eqn) and eqn.primitive.name != "axis_index":
        return True
    return any(exchanges(inner, name) for sub in jax_api.subjaxprs(eqn) for inner in sub.eqns)


def _inside(closed: ClosedJaxpr, mesh: AbstractMesh, names: Mapping[str, tuple[str, ...]]) -> ClosedJaxpr:
    """Return what was traced outside of a mesh for a place inside ``shard_map``, where some of its axes are manual.

    Only what names meshes differs: shardings, the types of arrays on an Explicit mesh, maps, and users' ``shard_map``;
    and, in collectives, the ``names`` of axes.
    """
    if mesh.empty or not (names or _is_placed(closed.jaxpr)):
        return closed
    return ClosedJaxpr(_moved(closed.jaxpr, mesh, names), closed.consts)


def _is_placed(jaxpr: Jaxpr) -> bool:
    """Return whether it names a mesh."""
    variables = [*jaxpr.invars, *jaxpr.outvars]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("px_map", "shard_map") or not eqn.ctx.cur_abstract_mesh.empty:
            return True
        if NamedSharding in map(type, eqn.params.values()):
            return True
        variables += eqn.outvars
    if any(map(_is_laid, [v.aval for v in variables])):
        return True
    return any([_is_placed(sub) for eqn in jaxpr.eqns for sub in jax_api.subjaxprs(eqn)])  # noqa: C419  # fewer calls


def _moved(jaxpr: Jaxpr, mesh: AbstractMesh, names: Mapping[str, tuple[str, ...]]) -> Jaxpr:
    known: dict[Any, Any] = {}

    def var(v: Any) -> Any:
        aval = v.aval.update(sharding=_sharding(v.aval.sharding, mesh)) if _is_laid(v.aval) else v.aval
        return jax_api.Literal(v.val, aval) if isinstance(v, jax_api.Literal) else known.setdefault(v, Var(aval))

    def one(eqn: JaxprEqn) -> JaxprEqn:
        inner, is_mesh = mesh, eqn.primitive.name == "shard_map"
        if is_mesh:
            inner = mesh.update_axis_types(dict.fromkeys(eqn.params["newly_manual_axes"], AxisType.Manual))
        free = {name: new for name, new in names.items() if name not in jax_api.bound_axes(eqn)}
        params = jax_api.map_jaxprs(eqn.params, lambda body: _moved(body, inner, free))
        params = {key: _sharding(value, mesh) for key, value in params.items()} | ({"mesh": mesh} if is_mesh else {})
        if not free.keys().isdisjoint(axes := jax_api.named_axes(eqn)):
            axes = tuple(new for name in axes for new in free.get(name, (name,)))
            key = "axes" if "axes" in params else "axis_name"
            params[key] = axes[0] if len(axes) == 1 and isinstance(params[key], str) else axes
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            here, effects = type(eqn.ctx)(), _renamed(eqn.effects, free)
        invars, outvars = [*map(var, eqn.invars)], [*map(var, eqn.outvars)]
        return eqn.replace(invars=invars, outvars=outvars, params=params, ctx=here, effects=effects)

    ends = {"constvars": [*map(var, jaxpr.constvars)], "invars": [*map(var, jaxpr.invars)]}
    eqns, effects = [*map(one, jaxpr.eqns)], _renamed(jaxpr.effects, names)
    return jaxpr.replace(**ends, eqns=eqns, outvars=[*map(var, jaxpr.outvars)], effects=effects)


def _renamed(effects: Any, names: Mapping[str, tuple[str, ...]]) -> set[Any]:
    return {
        new for e in effects for new in ([type(e)(n) for n in names[e.name]] if jax_api.axis_of(e) in names else [e])
    }


def _is_laid(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _sharding(value: Any, mesh: AbstractMesh) -> Any:
    if not isinstance(value, NamedSharding):
        return value
    return NamedSharding(mesh, P(*(arrays.without(entry, mesh.manual_axes) for entry in value.spec)))
