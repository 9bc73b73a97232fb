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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, collectives, jax_api, placing, sums
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from paraxis._core.placing import Placement, current
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
        placement, body, name = self.placement, self.element.body, self.placement.axis.name
        if not collectives.mentions(body.jaxpr, placement.axis):
            return self._in_blocks(operands)
        require_together(placement, self.lowering)
        is_pmap = placement.num_local == 1 and not placement.is_padded and placement.crossed_axes
        if not is_pmap or collectives.parts(body.jaxpr, name, "cond", "while"):  # some could wait for others in vain
            return self._together(operands)
        body = ClosedJaxpr(_renamed(body.jaxpr, {name: placement.crossed_axes}), body.consts)
        return dataclasses.replace(self, element=self.element._replace(body=body))._in_blocks(operands)

    # --- elements that exchange nothing ------------------------------------------------------------------------------

    def _in_blocks(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Each device runs the elements of its block; one that has none rests."""
        (body, shared, summed, _), placement, chunk = self.element, self.placement, self._traced_chunk()
        has_keys = any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in body.out_avals)  # of no zeros
        rests = placement.has_idle_device and placement.has_mesh_alone and not has_keys

        def rest(*_: Any) -> list[jax.Array]:
            counts = (1 if is_summed else placement.num_local for is_summed in summed)
            return [jnp.zeros((n, *y.shape), y.dtype) for n, y in zip(counts, body.out_avals, strict=True)]

        def on_device(*blocks: jax.Array) -> list[jax.Array]:
            work = functools.partial(self._block, chunk, safe=not rests)
            if not rests:
                return work(*blocks)
            has_rows = arrays.device_index(placement) * placement.num_local < placement.size
            if self._is_slow_in_branches:
                return [jnp.where(has_rows, y, jnp.zeros((), y.dtype)) for y in work(*blocks)]
            return jax.lax.cond(has_rows, work, rest, *blocks)

        sides = list(zip(operands, shared, strict=True))
        rows = [x if s else arrays.pad(x, placement, safe=not rests) for x, s in sides]
        found = zip(self._on_mesh(on_device, rows), summed, strict=True)
        return [jnp.sum(y, 0, dtype=y.dtype) if s else arrays.unpad(y, placement) for y, s in found]

    def _on_mesh(self, on_device: Callable[..., Any], operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        placement, shared = self.placement, self.element.shared
        if not placement.mesh_axes:
            return on_device(*operands)
        if placement.is_explicit:
            sides = zip(operands, shared, strict=True)
            operands = [arrays.constrain(x, placement) if s else self._laid(x) for x, s in sides]
            others = any(any([*jax.typeof(x).sharding.spec][1:]) for x in operands)
            if others and jax.__version_info__ < (0, 12):  # jax < 0.12
                warnings.warn(_GATHERED.format(placement.axis.name), stacklevel=2)
        in_specs = tuple(P() if is_shared else placement.spec for is_shared in shared)
        return placing.shard_map(on_device, placement.mesh, placement.mesh_axes, in_specs)(*operands)

    def _block(self, chunk: ClosedJaxpr, *blocks: jax.Array, safe: bool) -> list[jax.Array]:
        """Run a device's chunks: blocks ``(num_local, ...)`` → the same, or sums ``(1, ...)``, carried along."""
        (body, shared, summed, _), placement = self.element, self.placement
        fn = jax_api.jaxpr_as_fun(_inside(chunk, jax.sharding.get_abstract_mesh()))
        pairs, real = list(zip(blocks, shared, strict=True)), arrays.real_rows(placement)
        rows = [arrays.fill(x, placement, safe=safe) for x, is_shared in pairs if not is_shared]
        rows += [] if real is None else [real]

        def run(rows: Sequence[jax.Array]) -> list[jax.Array]:
            ours = iter(rows)
            return fn(*(x if is_shared else next(ours) for x, is_shared in pairs), *ours)

        def step(totals: list[jax.Array], part: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            found = list(zip(run(part), summed, strict=True))
            added = [total + y for total, y in zip(totals, (y for y, s in found if s), strict=True)]
            return added, [y for y, s in found if not s]

        count = placement.num_chunks
        if count == 1:
            return [y[None] if is_summed else y for y, is_summed in zip(run(rows), summed, strict=True)]
        zeros = [jnp.zeros(a.shape, a.dtype) for a, s in zip(body.out_avals, summed, strict=True) if s]
        parts = [x.reshape(count, placement.chunk, *x.shape[1:]) for x in rows]
        totals, stacks = map(iter, jax.lax.scan(step, zeros, parts, length=count))
        return [next(totals)[None] if s else jax.lax.collapse(next(stacks), 0, 2) for s in summed]

    def _traced_chunk(self) -> ClosedJaxpr:
        """Trace what a device runs at once, outside of the mesh: rules of libraries see none."""
        placement, sides = self.placement, zip(self.element.body.in_avals, self.element.shared, strict=True)
        own = placement.mesh.shape if placement.mesh is not None else {}
        names = {**jax.sharding.get_abstract_mesh().shape, **own}
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

    @property
    def _is_slow_in_branches(self) -> bool:
        """Return whether the body is better computed on zeros and dropped than left out by ``lax.cond``.

        XLA's CPU compiler rewrites only the convolutions of the main computation into a form that it runs fast: in a
        branch those of a gradient take 8 times as long. A loop may not end on zeros, and a callback sees them.
        """
        body = self.element.body
        acts = jax_api.holds(body.jaxpr, "while", "pure_callback") or jax_api.has_effects(body.jaxpr)
        return _convolves(body) and not acts

    # --- elements that exchange values -------------------------------------------------------------------------------

    def _together(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        element, placement, axis = self.element, self.placement, self.placement.axis
        rows = [x if s else self._laid(x) for x, s in zip(operands, element.shared, strict=True)]

        def over(*rows: jax.Array) -> list[jax.Array]:
            here = element._replace(body=_inside(element.body, jax.sharding.get_abstract_mesh()))
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
    if len(ys) == 1 or jnp.issubdtype(first.dtype, jax.dtypes.extended):
        return jnp.stack(ys)
    found = jnp.broadcast_to(first, (len(ys), *first.shape))  # split over free mesh axes as the element is
    for i, y in enumerate(ys[1:], 1):
        found = jax.lax.dynamic_update_index_in_dim(found, jnp.asarray(y), i, 0)
    return found


def require_together(placement: Placement, lowering: Lowering) -> None:
    """Refuse to run elements that exchange values if they are not all under way together."""
    name, at_once = placement.axis.name, placement.axis.at_once
    if placement.num_chunks > 1:
        raise AxisError(
            f"axis {name!r} has at_once={at_once}, so its elements run in turns and cannot exchange values; leave "
            f"at_once out, or reduce after the map: px.reduce_sum(px.map_fn(…), {name!r})"
        )
    if lowering == "unroll":
        raise AxisError(
            f"lowering={lowering!r} runs the elements of axis {name!r} apart, so they cannot exchange values; "
            f"write lowering='vmap', or leave it out"
        )


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


# --- jaxprs inside a mesh ------------------------------------------------------------------------------------------


def _inside(closed: ClosedJaxpr, mesh: AbstractMesh) -> ClosedJaxpr:
    """Return what was traced outside of a mesh for a place inside ``shard_map``, where some of its axes are manual.

    Only what names meshes differs: shardings, the types of arrays on an Explicit mesh, maps, and users' ``shard_map``.
    """
    if mesh.empty or not _is_placed(closed.jaxpr):
        return closed
    return ClosedJaxpr(_moved(closed.jaxpr, mesh), closed.consts)


def _renamed(jaxpr: Jaxpr, names: Mapping[str, tuple[str, ...]]) -> Jaxpr:
    """Return the same computation with other names of axes in its collectives."""

    def one(eqn: JaxprEqn) -> JaxprEqn:
        free = {name: new for name, new in names.items() if name not in jax_api.bound_axes(eqn)}
        params = jax_api.map_jaxprs(eqn.params, lambda body: _renamed(body, free))
        for key in {"axes", "axis_name"} & params.keys():
            if not free.keys().isdisjoint(old := jax_api.named_axes(eqn)):
                changed = tuple(new for name in old for new in free.get(name, (name,)))
                params[key] = changed[0] if len(changed) == 1 and isinstance(params[key], str) else changed
        return eqn.replace(params=params, effects=_renamed_effects(eqn.effects, free))

    return jaxpr.replace(eqns=[*map(one, jaxpr.eqns)], effects=_renamed_effects(jaxpr.effects, names))


def _renamed_effects(effects: Any, names: Mapping[str, tuple[str, ...]]) -> set[Any]:
    return {
        new for e in effects for new in ([type(e)(n) for n in names[e.name]] if jax_api.axis_of(e) in names else [e])
    }


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


def _moved(jaxpr: Jaxpr, mesh: AbstractMesh) -> Jaxpr:
    known: dict[Any, Any] = {}

    def var(v: Any) -> Any:
        if isinstance(v, jax_api.Literal):
            return jax_api.Literal(v.val, _aval(v.aval, mesh))
        return known.setdefault(v, Var(_aval(v.aval, mesh)))

    def one(eqn: JaxprEqn) -> JaxprEqn:
        inner = mesh
        if eqn.primitive.name == "shard_map":
            inner = mesh.update_axis_types(dict.fromkeys(eqn.params["newly_manual_axes"], AxisType.Manual))
        params = jax_api.map_jaxprs(eqn.params, lambda body: _moved(body, inner))
        params = {name: _sharding(value, mesh) for name, value in params.items()}
        if eqn.primitive.name == "shard_map":
            params["mesh"] = mesh
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            here = type(eqn.ctx)()
        return eqn.replace(invars=[*map(var, eqn.invars)], outvars=[*map(var, eqn.outvars)], params=params, ctx=here)

    ends = {"constvars": [*map(var, jaxpr.constvars)], "invars": [*map(var, jaxpr.invars)]}
    eqns = [*map(one, jaxpr.eqns)]
    return jaxpr.replace(**ends, eqns=eqns, outvars=[*map(var, jaxpr.outvars)])


def _aval(aval: Any, mesh: AbstractMesh) -> Any:
    return aval.update(sharding=_sharding(aval.sharding, mesh)) if _is_laid(aval) else aval


def _is_laid(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


@functools.lru_cache(maxsize=256)
def _on(spec: P, mesh: AbstractMesh) -> NamedSharding:
    taken = mesh.manual_axes

    def entry(names: Any) -> Any:
        if isinstance(names, tuple):
            return tuple(name for name in names if name not in taken) or None
        return None if names in taken else names

    return NamedSharding(mesh, P(*map(entry, spec)))


def _sharding(value: Any, mesh: AbstractMesh) -> Any:
    return _on(value.spec, mesh) if isinstance(value, NamedSharding) else value
