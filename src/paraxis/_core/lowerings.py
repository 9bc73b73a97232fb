"""A map on the devices at hand: ``shard_map`` of ``vmap`` of the jaxpr of one element, in chunks by ``at_once``.

On CPU, convolutions with weights per element are unrolled: vectorised they are grouped ones, which take several times
as long (jaxlib 0.10 to 0.12). Elements that exchange values are all under way together, in one ``vmap`` whose
collectives are JAX's own: the compiler divides it. One element on each device runs in ``shard_map`` itself, as by
``jax.pmap``. Maps within a map are lowered with it, outside of the mesh as well: rules of libraries in them see none.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, jax_api, lanes, placing, sums
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn
from paraxis._core.placing import Placement, current
from paraxis._core.pytrees import interleave, select
from paraxis._core.record import Map
from paraxis.errors import AxisError


def run(m: Map, operands: Sequence[jax.Array], real: jax.Array | None = None) -> list[jax.Array]:
    """Return the results, rows ``(size, ...)`` or sums over the elements ``(...)``; or blocks of both, if asked for.

    Operands ``(size, ...)``, or ``(...)`` if shared. ``real``: booleans ``(size,)``, which elements are summed, of a
    map whose elements exchange nothing; default: all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(m.placement.mesh, AbstractMesh) and not mesh.empty:
        m = m._replace(placement=dataclasses.replace(m.placement, mesh=mesh))  # of which some axes are taken
    placement, name = m.placement, m.placement.axis.name
    is_pmap = placement.num_local == 1 and not placement.is_padded and placement.crossed_axes
    if not m.uses_axis:
        blocks = _by_shard_map(m, operands, {}, real)
    elif is_pmap and not exchanges(m, "cond", "while"):  # else some could wait in vain
        blocks = _by_shard_map(m, operands, {name: placement.crossed_axes})
    else:
        blocks = _by_vmap(m, operands)
    blocks = [jax_api.weak(y) if a.weak_type else y for y, a in zip(blocks, m.body.out_avals, strict=True)]
    return blocks if m.in_blocks else arrays.from_blocks(blocks, placement, m.outs)


def _by_shard_map(
    m: Map, operands: Sequence[Any], names: Mapping[str, tuple[str, ...]], mask: jax.Array | None = None
) -> list[jax.Array]:
    """Each device runs the elements of its block; one that has none rests. ``names``: of axes, on the mesh.

    Operands ``(size, ...)``, or ``(...)`` if shared; results ``(num_padded, ...)``, or sums ``(num_devices, ...)``.
    """
    m, chunk = _traced_chunk(m, masked=mask is not None)
    placement = m.placement
    has_idle = placement.has_idle_device and placement.has_mesh_alone
    # XLA's CPU compiler rewrites only the convolutions of the main computation into a form that it runs fast (jaxlib
    # 0.12): in a branch, a gradient's take 8 times as long as on zeros, where a loop may not end, and which a callback
    # sees.
    is_impure = jax_api.holds(m.body.jaxpr, "while", "pure_callback") or jax_api.has_effects(m.body.jaxpr)

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        real = arrays.real_rows(placement) if mask is None else blocks[-1]
        blocks = blocks[: len(m.shared)]
        work = functools.partial(_block, m, _inside(chunk, jax.sharding.get_abstract_mesh(), names), real)
        if real is None or not has_idle:
            return work(*blocks)
        rest = lambda *blocks: [arrays.zeros(y) for y in jax.eval_shape(work, *blocks)]  # noqa: E731
        if _convolves_on_cpu(m.body) and not is_impure:
            return [jnp.where(real[0], y, arrays.zeros(y)) for y in work(*blocks)]
        return jax.lax.cond(real[0], work, rest, *blocks)

    def laid(x: jax.Array, is_safe: bool) -> jax.Array:
        return arrays.constrain(arrays.deal(arrays.pad(x, placement, safe=is_safe), placement), placement, rows=True)

    pairs = zip(operands, m.shared, strict=True)
    operands = [arrays.constrain(x, placement) if s else laid(x, not has_idle) for x, s in pairs]
    if placement.is_explicit and any(any([*jax.typeof(x).sharding.spec][1:]) for x in operands):
        jax_api.warn_of_gathers(placement.axis.name)
    in_specs = [P() if is_shared else placement.spec for is_shared in m.shared]
    if mask is not None:
        operands, in_specs = [*operands, laid(mask, False)], [*in_specs, placement.spec]
    on_mesh = placing.shard_map(on_device, placement.mesh, placement.mesh_axes, tuple(in_specs))
    return (on_mesh if placement.mesh_axes else on_device)(*operands)


def _block(m: Map, chunk: ClosedJaxpr, real: jax.Array | None, *blocks: jax.Array) -> list[jax.Array]:
    """Run a device's chunks, of which ``real`` rows, or all, are elements: blocks → the same, or sums ``(1, ...)``."""
    placement, fn = m.placement, jax_api.jaxpr_as_fun(chunk)
    shared, common, rows = m.shared, select(blocks, m.shared), select(blocks, m.shared, False)
    if real is not None:
        shared, rows = [*shared, False], [*[arrays.fill(x, real) for x in rows], real]

    def of_chunk(rows: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        results = fn(*interleave(shared, common, rows))
        return select(results, m.summed), select(results, m.summed, False)

    def step(totals: list[jax.Array], part: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        more, results = of_chunk(part)
        return [total + y for total, y in zip(totals, more, strict=True)], results

    if (count := 1 if m.lowering == "lanes" else placement.num_chunks) == 1:
        totals, results = of_chunk(rows)
    else:
        zeros = [arrays.zeros(a.update(dtype=sums.wide(a.dtype))) for a in select(m.body.out_avals, m.summed)]
        parts = [x.reshape(count, placement.chunk, *x.shape[1:]) for x in rows]
        totals, results = jax.lax.scan(step, zeros, parts, length=count)
        results = [jax.lax.collapse(y, 0, 2) for y in results]
    return interleave(m.summed, [y[None] for y in totals], results)


def _traced_chunk(m: Map, *, masked: bool) -> tuple[Map, ClosedJaxpr]:
    """Trace what a device runs at once, outside of the mesh: rules of libraries see none. Return how it is run, too."""
    placement = m.placement
    env = {**jax.sharding.get_abstract_mesh().shape, **dict(m.axis_env)}
    has_maps = jax_api.holds(m.body.jaxpr, "px_map")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        m = m._replace(body=_with_maps_carried_out(m.body, env, on_one_device=True)) if has_maps else m
        m, program = lanes.prepare(m, env) if m.lowering == "lanes" else (m, None)
        run = functools.partial(lanes.run, m, program) if program else functools.partial(_chunk, m)
        lead = (placement.num_local if program else placement.chunk,)  # lanes take all of a device's elements
        structs = [jax_api.struct(a, lead=() if s else lead) for a, s in zip(m.body.in_avals, m.shared, strict=True)]
        masks = [jax.ShapeDtypeStruct(lead, bool)] if masked or placement.is_padded else []
        chunk = jax_api.trace(jax.jit(run), [*structs, *masks], env)[0]
        return m, _with_maps_carried_out(chunk, env) if has_maps else chunk


def _chunk(m: Map, *operands: jax.Array) -> list[jax.Array]:
    """Run as many elements as are under way at once; last of all, which of them are real.

    Operands ``(chunk, ...)``, or ``(...)`` if shared; results ``(chunk, ...)``, or sums ``(...)`` of a wide dtype.
    """
    count = m.placement.chunk
    operands, real = operands[: len(m.shared)], next(iter(operands[len(m.shared) :]), None)
    if count > 1 and not unrolls(m):
        return sums.over_elements(m, operands, real, count, merge=m.placement.has_mesh_alone)
    fn, pairs = jax.jit(jax_api.jaxpr_as_fun(m.body)), list(zip(operands, m.shared, strict=True))
    each = [fn(*(x if is_shared else x[i] for x, is_shared in pairs)) for i in range(count)]
    rows = zip(map(jnp.stack, zip(*each, strict=True)), m.summed, strict=True)
    return [sums.of_rows(y, real) if s else y for y, s in rows]


def _by_vmap(m: Map, operands: Sequence[Any]) -> list[jax.Array]:
    """All elements are under way together, in one ``vmap`` with the axis's name, which the compiler divides.

    Operands ``(size, ...)``, or ``(...)`` if shared; results ``(num_padded, ...)``, or sums ``(1, ...)``.
    """
    placement = m.placement
    laid = [x if s else _in_blocks(x, placement) for x, s in zip(operands, m.shared, strict=True)]
    rows = [x if s else arrays.unpad(x, placement) for x, s in zip(laid, m.shared, strict=True)]

    def over(*rows: jax.Array) -> list[jax.Array]:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            body = _gathering(_with_maps_carried_out(m.body, dict(m.axis_env), on_one_device=True), m)
        here = m._replace(body=_inside(body, jax.sharding.get_abstract_mesh(), {}))
        return sums.over_elements(here, rows, None, placement.size, placement.axis.name)

    # On an Explicit mesh, JAX 0.12 gives a sum over a vmapped axis the sharding of what it sums.
    leads = [P() if s or not placement.divides else placement.spec for s in m.summed]
    run: Any = jax.sharding.auto_axes(over, out_sharding=leads) if placement.is_explicit else over
    return [y[None] if s else _in_blocks(y, placement) for y, s in zip(run(*rows), m.summed, strict=True)]


def _in_blocks(x: jax.Array, placement: Placement) -> jax.Array:
    """``(size, ...)`` → ``(num_padded, ...)`` over the devices, as compilers return no blocks of uneven length."""
    x = arrays.pad(arrays.constrain(x, placement, rows=placement.divides), placement, safe=False)
    return arrays.in_blocks(x, placement)


def _gathering(closed: ClosedJaxpr, m: Map) -> ClosedJaxpr:
    """Return a body in which what is gathered over its axis stays whole on each device, as what a ``ppermute`` sends.

    Else the compiler divides again what is computed of it (XLA of jaxlib 0.12): a cumulative sum becomes quadratic, and
    an index ends the process on a mesh of three axes. ``jax.vmap`` has no ``ppermute`` that leaves elements out.
    """
    placement, name, size, mesh = m.placement, m.placement.axis.name, m.placement.size, m.placement.mesh
    has_maps = jax_api.holds(closed.jaxpr, "px_map")
    is_typed = placement.is_explicit and not has_maps  # arrays of the body may have types, in another map's body
    if mesh is not None and placement.is_explicit:
        mesh = None if is_typed else mesh.abstract_mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    # JAX 0.12 does not batch a constraint on one dimension of several, as one in a map in the body would be.
    others = None if placement.has_mesh_alone or has_maps else P.UNCONSTRAINED

    def whole(x: jax.Array, dim: int = 0) -> jax.Array:
        spec = P(*[None if i == dim else others for i in range(x.ndim)])
        return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def permuted(x: jax.Array, *, sources: Sequence[int]) -> jax.Array:
        rows, source = whole(jax.lax.all_gather(x, name)), jnp.array(sources)[jax.lax.axis_index(name)]
        return rows.at[source].get(mode="fill", fill_value=0)

    def rule(eqn: JaxprEqn) -> list[JaxprEqn]:
        kind, names, perm = eqn.primitive.name, jax_api.named_axes(eqn), eqn.params.get("perm", ())
        if kind == "all_gather" and name in names and mesh is not None:
            rows, dim = jax_api.Var(eqn.outvars[0].aval), eqn.params["all_gather_dimension"]
            stays = jax_api.call(functools.partial(whole, dim=dim), rows)
            return [eqn.replace(outvars=[rows]), stays.replace(outvars=eqn.outvars)]
        if kind == "ppermute" and name in names:
            source_of = {target % size: source % size for source, target in perm}
            if not (len(perm) == len(source_of) == len({*source_of.values()}) and len(names) == 1):
                raise AxisError(f"ppermute over {names}: give one axis, and send from and to each element at most once")
            if len(perm) < size or not is_typed:
                move = jax.jit(functools.partial(permuted, sources=[source_of.get(i, size) for i in range(size)]))
                return [jax_api.call(move, *eqn.invars, axis_env={name: size}).replace(outvars=eqn.outvars)]
        return [eqn if name in jax_api.bound_axes(eqn) else jax_api.in_bodies(eqn, change)]

    change = functools.partial(jax_api.rewrite, rule=rule)
    has_any = jax_api.holds(closed.jaxpr, "all_gather", "ppermute")
    return ClosedJaxpr(change(closed.jaxpr), closed.consts) if has_any else closed


def _with_maps_carried_out(closed: ClosedJaxpr, env: Mapping[str, int], *, on_one_device: bool = False) -> ClosedJaxpr:
    """Return a program with the maps in it, or those that lie on one device, replaced by what a device computes."""

    def rule(eqn: JaxprEqn) -> list[JaxprEqn]:
        is_map = eqn.primitive.name == "px_map"
        if not is_map or (on_one_device and eqn.params["placement"].mesh_axes):
            return [jax_api.in_bodies(eqn, change)]
        m = Map.of(eqn.params)
        inner = jax_api.call(jax.jit(lambda *xs: run(m, xs)), *eqn.invars, axis_env={**env, **dict(m.axis_env)})
        return [inner.replace(outvars=eqn.outvars, source_info=eqn.source_info)]

    change = functools.partial(jax_api.rewrite, rule=rule)
    return ClosedJaxpr(change(closed.jaxpr), closed.consts)


def rematerializes(placement: Placement) -> bool:
    """Return whether chunks, and all of a stream's, compute again what is needed once more."""
    return placement.num_chunks > 1 or (current().chunk is not None and placement.axis.at_once is not None)


def unrolls(m: Map) -> bool:
    """Return whether a device runs its elements one after the other."""
    few = m.placement.num_chunks == 1 and m.placement.chunk <= 16  # beyond, compiling takes longer than it saves
    return m.lowering == "unroll" or (m.lowering == "auto" and few and _convolves_on_cpu(m.body))


def _convolves_on_cpu(body: ClosedJaxpr) -> bool:
    return jax.default_backend() == "cpu" and jax_api.holds(body.jaxpr, "conv_general_dilated")


def require_together(m: Map) -> None:
    """Refuse to run elements that exchange values if they are not all under way together."""
    name, at_once, in_chunks = m.placement.axis.name, m.placement.axis.at_once, m.placement.num_chunks > 1
    if (in_chunks or m.lowering in ("unroll", "lanes")) and m.uses_axis:
        option = f"{at_once=}" if in_chunks else f"lowering={m.lowering!r}"
        raise AxisError(
            f"axis {name!r} has {option}, so elements do not run together and cannot exchange values; leave that out, "
            f"or reduce after the map: px.reduce_sum(px.map_fn(…), {name!r})"
        )
    if m.lowering == "lanes" and any(exchanges(m, over=outer) for outer, _ in m.axis_env):
        raise AxisError(
            f"axis {name!r} has lowering='lanes', so its elements are out of step, but exchange values over an axis "
            f"around it; leave the lowering out, or exchange outside of the map"
        )


def exchanges(m: Map, *kinds: str, over: str | None = None) -> bool:
    """Return whether elements exchange values ``over`` an axis, or their own: in operations of ``kinds``, or in any."""
    name = m.placement.axis.name if over is None else over
    eqns = jax_api.equations(m.body.jaxpr, name) if name in jax_api.free_axes(m.body.jaxpr) else []
    return any(is_collective_over(eqn, name) for eqn in eqns if not kinds or eqn.primitive.name in kinds)


def is_collective_over(eqn: JaxprEqn, name: str) -> bool:
    """Return whether an operation, or one in its bodies, exchanges values along an axis of this name."""
    inner = itertools.chain(*(jax_api.equations(sub, name) for sub in jax_api.jaxprs_in_params(eqn.params)))
    return any(name in jax_api.named_axes(e) and e.primitive.name != "axis_index" for e in (eqn, *inner))


# --- what was traced outside of a mesh, for a place inside it -----------------------------------------------------


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
    params = {type(value) for eqn in eqns for value in eqn.params.values()}
    avals: list[Any] = [v.aval for v in (*jaxpr.invars, *itertools.chain(*[eqn.outvars for eqn in eqns]))]
    meshes = {eqn.ctx.cur_abstract_mesh for eqn in eqns} | {a.sharding.mesh for a in avals if hasattr(a, "sharding")}
    return jax_api.holds(jaxpr, "shard_map") or NamedSharding in params or any(not mesh.empty for mesh in meshes)


def _moved(jaxpr: Jaxpr, mesh: AbstractMesh, names: Mapping[str, tuple[str, ...]]) -> Jaxpr:
    def aval(old: Any) -> Any:
        sharding = getattr(old, "sharding", None)
        return old if sharding is None or sharding.mesh.empty else old.update(sharding=_on_mesh(sharding, mesh))

    def rule(eqn: JaxprEqn) -> list[JaxprEqn]:
        free, inner = {name: new for name, new in names.items() if name not in jax_api.bound_axes(eqn)}, mesh
        if eqn.primitive.name == "shard_map":
            eqn = _shard_map_inside(eqn, mesh, names)
            inner = mesh.update_axis_types(dict.fromkeys(jax_api.bound_axes(eqn), AxisType.Manual))
        if eqn.primitive.name == "reshard" and not mesh.explicit_axes:  # the compiler's to decide there
            eqn = jax_api.call(jax.jit(lambda x: x), *eqn.invars).replace(outvars=eqn.outvars)
        eqn = jax_api.in_bodies(eqn, lambda body: _moved(body, inner, free))
        params = {key: _on_mesh(value, mesh) for key, value in eqn.params.items()}
        params |= jax_api.renamed_axes(eqn, free)
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            return [eqn.replace(params=params, ctx=type(eqn.ctx)(), effects=_renamed(eqn.effects, free))]

    return jax_api.rewrite(jaxpr, rule, aval, lambda effects: _renamed(effects, names))


def _shard_map_inside(eqn: JaxprEqn, mesh: AbstractMesh, names: Collection[str]) -> JaxprEqn:
    """Return a ``shard_map`` for a place inside another; over its devices, or over other ones, it is refused.

    ``names`` are those of mapped axes, which collectives in it mean, whatever mesh axes are called so.
    """
    shared = jax_api.axes_of_shard_map(eqn).difference(names).intersection(mesh.manual_axes)
    if shared or dict(eqn.params["mesh"].shape) != dict(mesh.shape):
        at = f", at {line}," if (line := jax_api.line_of(eqn)) else ""
        over = f"mesh axis {min(shared)!r}, which carries" if shared else "a mesh that is not that of"
        raise AxisError(
            f"a jax.shard_map inside a mapped function{at} is over {over} the elements; lay these over other axes of "
            f"the same mesh, px.Axis(…, mesh=mesh, over=…), or compute the shard_map outside of the map"
        )
    manual = frozenset(jax_api.bound_axes(eqn)).difference(mesh.manual_axes)  # those of the map are no longer its own
    return eqn.replace(params={**eqn.params, "mesh": mesh, "newly_manual_axes": manual})


def _renamed(effects: Any, names: Mapping[str, tuple[str, ...]]) -> set[Any]:
    news = [[type(e)(n) for n in names[e.name]] if jax_api.axis_of(e) in names else [e] for e in effects]
    return set(itertools.chain(*news))


def _on_mesh(value: Any, mesh: AbstractMesh) -> Any:
    if isinstance(value, Placement) and value.mesh_axes:
        return dataclasses.replace(value, mesh=mesh)
    if not isinstance(value, NamedSharding):
        return value
    return NamedSharding(mesh, P(*(arrays.without(entry, mesh.manual_axes) for entry in value.spec)))
