"""A map on the devices at hand: ``shard_map`` of ``vmap`` of the jaxpr of one element, in chunks by ``at_once``.

On CPU, convolutions with weights per element are unrolled: vectorised they are grouped ones, several times slower.
Elements that exchange values are all under way together, in one ``vmap`` whose collectives are JAX's own: the compiler
divides it. One element on each device runs in ``shard_map`` itself, as by ``jax.pmap``.
"""

import dataclasses
import functools
import itertools
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

        def on_device(*blocks: jax.Array) -> list[jax.Array]:
            work = functools.partial(self._block, _inside(chunk, jax.sharding.get_abstract_mesh(), names), not rests)
            if not rests:
                return work(*blocks)
            rest = lambda *blocks: [jax.lax.full_like(y, 0) for y in jax.eval_shape(work, *blocks)]  # noqa: E731
            has_rows = arrays.device_index(placement) * placement.num_local < placement.size
            if _convolves_on_cpu(body) and not acts:
                return [jnp.where(has_rows, y, jax.lax.full_like(y, 0)) for y in work(*blocks)]
            return jax.lax.cond(has_rows, work, rest, *blocks)

        operands = [x if s else arrays.pad(x, placement, safe=not rests) for x, s in zip(operands, shared, strict=True)]
        sides = zip(operands, shared, strict=True)
        operands = [arrays.constrain(x, placement, rows=None if s else True) for x, s in sides]
        if placement.is_explicit and any(any([*jax.typeof(x).sharding.spec][1:]) for x in operands):
            jax_api.warn_of_gathers(placement.axis.name)
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
        fn, pairs = jax.jit(jax_api.jaxpr_as_fun(body)), list(zip(operands, shared, strict=True))
        each = [fn(*(x if is_shared else x[i] for x, is_shared in pairs)) for i in range(count)]
        rows = zip(map(jnp.stack, zip(*each, strict=True)), summed, strict=True)
        return [sums.total(y, real) if s else y for y, s in rows]

    def _together(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        element, placement, axis = self.element, self.placement, self.placement.axis
        rows = [x if s else self._laid(x) for x, s in zip(operands, element.shared, strict=True)]

        def over(*rows: jax.Array) -> list[jax.Array]:
            here = element._replace(body=_inside(element.body, jax.sharding.get_abstract_mesh(), {}))
            return sums.over_elements(here, rows, None, axis.size, axis.name)

        # On an Explicit mesh, JAX 0.12 gives a sum over a vmapped axis the sharding of what it sums.
        leads = [P() if s or not placement.divides else placement.spec for s in element.summed]
        run: Any = jax.sharding.auto_axes(over, out_sharding=leads) if placement.is_explicit else over
        return [y if s else self._laid(y) for y, s in zip(run(*rows), element.summed, strict=True)]

    def _laid(self, x: jax.Array) -> jax.Array:
        """Rows laid over the devices; padded for it on Auto meshes, as compilers return no blocks of uneven length."""
        placement, mesh = self.placement, self.placement.mesh
        if placement.is_explicit:
            return arrays.constrain(x, placement, rows=placement.divides)
        if mesh is None or not placement.mesh_axes or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        target: Any = NamedSharding(mesh, P(placement.mesh_axes, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
        padded = jax.lax.with_sharding_constraint(arrays.pad(x, placement, safe=False), target)
        return arrays.unpad(padded, placement)


def keeps_nothing(placement: Placement) -> bool:
    """Return whether chunks, and all of a stream's, compute again what is needed once more."""
    return placement.num_chunks > 1 or (current().chunk is not None and placement.axis.at_once is not None)


def unrolls(body: ClosedJaxpr, placement: Placement, lowering: Lowering) -> bool:
    """Return whether a device runs its elements one after the other."""
    few = placement.num_chunks == 1 and placement.chunk <= 16  # beyond, compile time outgrows what unrolling saves
    return lowering == "unroll" or (lowering == "auto" and few and _convolves_on_cpu(body))


def _convolves_on_cpu(body: ClosedJaxpr) -> bool:
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
    return any(eqn.primitive.name in kinds and exchanges(eqn, name) for eqn in jax_api.equations(jaxpr))


def exchanges(eqn: JaxprEqn, name: str) -> bool:
    inner = itertools.chain(*map(jax_api.equations, jax_api.jaxprs_in_params(eqn.params)))
    return any(name in jax_api.named_axes(e) and e.primitive.name != "axis_index" for e in (eqn, *inner))


def _inside(closed: ClosedJaxpr, mesh: AbstractMesh, names: Mapping[str, tuple[str, ...]]) -> ClosedJaxpr:
    """Return what was traced outside of a mesh for a place inside ``shard_map``, where some of its axes are manual.

    Only what names meshes differs, such as types of arrays on an Explicit mesh; and, in collectives, ``names`` of axes.
    """
    if mesh.empty or not (names or _is_placed(closed.jaxpr)):
        return closed
    return ClosedJaxpr(_moved(closed.jaxpr, mesh, names), closed.consts)


def _is_placed(jaxpr: Jaxpr) -> bool:
    """Return whether it names a mesh."""
    eqns = jax_api.equations(jaxpr)
    variables = [*jaxpr.invars, *itertools.chain(*[eqn.outvars for eqn in eqns])]
    params = {type(value) for eqn in eqns for value in eqn.params.values()}
    is_said = jax_api.holds(jaxpr, "px_map", "shard_map") or NamedSharding in params
    meshes = {eqn.ctx.cur_abstract_mesh for eqn in eqns}
    return is_said or any(not mesh.empty for mesh in meshes) or any(map(_is_laid, [v.aval for v in variables]))


def _moved(jaxpr: Jaxpr, mesh: AbstractMesh, names: Mapping[str, tuple[str, ...]]) -> Jaxpr:
    known: dict[Any, Any] = {}

    def var(v: Any) -> Any:
        aval = v.aval.update(sharding=_sharding(v.aval.sharding, mesh)) if _is_laid(v.aval) else v.aval
        return jax_api.Literal(v.val, aval) if isinstance(v, jax_api.Literal) else known.setdefault(v, Var(aval))

    def one(eqn: JaxprEqn) -> JaxprEqn:
        is_mesh = eqn.primitive.name == "shard_map"
        inner = mesh.update_axis_types(dict.fromkeys(jax_api.bound_axes(eqn) if is_mesh else (), AxisType.Manual))
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
    news = [[type(e)(n) for n in names[e.name]] if jax_api.axis_of(e) in names else [e] for e in effects]
    return set(itertools.chain(*news))


def _is_laid(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def _sharding(value: Any, mesh: AbstractMesh) -> Any:
    if not isinstance(value, NamedSharding):
        return value
    return NamedSharding(mesh, P(*(arrays.without(entry, mesh.manual_axes) for entry in value.spec)))
