"""A map as a JAX primitive, ``px_map``, with its three rules.

Its parameters are the fields of :class:`paraxis._core.record.Map`; the axis and its size, for who reads a jaxpr; and
``devices``, a jaxpr that names the mesh to ``jit``. The rules are public transformations of the body. A forward map
returns residuals, the leaves of what ``jax.linearize`` returns, but in chunks: there the derivative runs the body
again. The transpose of a shared operand is a summed result.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from paraxis._core import arrays, jax_api, lowerings, placing, sums
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, ShapedArray
from paraxis._core.placing import Placement
from paraxis._core.program import cached, jaxpr_key
from paraxis._core.pytrees import interleave, select
from paraxis._core.record import Lowering, Map, OperandMask, ResultMask
from paraxis.errors import AxisError


def trace(
    fn: Callable[..., Any],
    operands: Sequence[Any],
    shared: OperandMask,
    alike: OperandMask,
    placement: Placement,
    lowering: Lowering,
    axis_env: tuple[tuple[str, int], ...],
) -> tuple[Map, list[Any], Any]:
    """Trace ``fn`` of one element; return its map, operands, what it closes over first, and its result's structure."""
    structs = [jax_api.struct(x, 0 if s else 1) for x, s in zip(operands, shared, strict=True)]
    body, structure = jax_api.trace(fn, structs, dict(axis_env))
    body, consts = jax_api.without_constants(body)
    shared, alike = [*[True] * len(consts), *shared], [*[False] * len(consts), *alike]
    none = [False] * len(body.out_avals), [False] * len(shared)
    return Map(body, shared, alike, *none, placement, lowering, axis_env), [*consts, *operands], structure


def trace_like(
    m: Map, fn: Callable[..., Any], operands: Sequence[Any], shared: OperandMask, alike: OperandMask
) -> tuple[Map, list[Any], Any]:
    """:func:`trace` another function of one element, to run as a map does."""
    return trace(fn, operands, shared, alike, m.placement, m.lowering, m.axis_env)


def bind(m: Map, operands: Sequence[Any]) -> list[jax.Array]:
    """Return the flat results of a map. Operands that its body does not read are left out."""
    lowerings.require_together(m)
    body, read = jax_api.dce(m.body, unread=False)
    if not all(read):
        operands, shared, alike, linear = (select(xs, read) for xs in (operands, m.shared, m.alike, m.linear))
        m = m._replace(shared=shared, alike=alike, linear=linear)
    m = m._replace(body=body, **{name: tuple(getattr(m, name)) for name in ("shared", "alike", "linear", "summed")})
    devices = placing.mesh_witness(m.placement)
    return map_p.bind(*operands, axis=m.placement.axis.name, size=m.placement.size, devices=devices, **m._asdict())


def _avals(*operands: Any, **params: Any) -> Any:
    m = Map.of(params)
    placement, mesh = m.placement, m.placement.mesh

    def aval(element: Any, is_summed: bool) -> ShapedArray:
        if m.in_blocks:
            lead, dtype = (placement.num_devices if is_summed else placement.num_padded,), element.dtype
            dtype, is_weak = sums.wide(dtype) if is_summed else dtype, element.weak_type and not is_summed
            return ShapedArray((*lead, *element.shape), dtype, weak_type=is_weak)
        lead = () if is_summed else (placement.size,)
        result = ShapedArray((*lead, *element.shape), element.dtype, weak_type=element.weak_type)
        if mesh is None or not placement.is_explicit:
            return result
        spec = [arrays.without(entry, placement.mesh_axes) for entry in element.sharding.spec]
        over = [placement.mesh_axes if placement.divides else None for _ in lead]
        return result.update(sharding=NamedSharding(mesh.abstract_mesh, P(*over, *spec)))

    effects = {e for e in m.body.effects if jax_api.axis_of(e) != placement.axis.name}
    return [aval(a, s) for a, s in zip(m.body.out_avals, m.summed, strict=True)], effects


def _evaluated(*operands: Any, **params: Any) -> list[jax.Array]:
    """Rows ``(size, ...)`` and shared ``(...)``, concrete: by a program that is found by its structure, or compiled."""
    m = Map.of(params)
    m = m._replace(in_blocks=m.placement.is_on_cpu_devices)
    run = cached(jaxpr_key(m), lambda: jax.jit(functools.partial(lowerings.run, jax_api.with_copies(m))))
    results = run([arrays.to_mesh(x, m.placement, rows=not s) for x, s in zip(operands, m.shared, strict=True)])
    return arrays.waited(results, m.placement, m.outs) if m.in_blocks else results


def _jvp(primals: Any, live: OperandMask, tangents: Any, **params: Any) -> Any:
    """Results, which of them have tangents, and these; ``tangents``, shaped as their operands, of ``live`` ones."""
    m = Map.of(params)
    _refuse_uneven(m)
    fn, moving = jax_api.jaxpr_as_fun(m.body), [jnp.issubdtype(a.dtype, jnp.inexact) for a in m.body.out_avals]
    if lowerings.rematerializes(m.placement):  # the derivative runs the body again
        fn = jax.checkpoint(fn, prevent_cse=False)

    def of_live(args: Sequence[Any], *some: Any) -> tuple[list[Any], list[Any]]:
        results = fn(*interleave(live, some, select(args, live, False)))
        return select(results, moving), select(results, moving, False)

    def forward(*args: Any) -> tuple[list[Any], Any]:
        moved, tangent, still = jax.linearize(functools.partial(of_live, args), *select(args, live), has_aux=True)
        return interleave(moving, moved, still), tangent

    def linear(*args: Any) -> list[Any]:
        return jax.tree.unflatten(structure.children()[1], args[: len(residuals)])(*args[len(residuals) :])

    traced, operands, structure = trace_like(m, forward, primals, m.shared, m.alike)
    results, residuals, common, alike = _with_residuals(traced, operands, m.summed)
    shared, alike = [*common, *select(m.shared, live)], [*alike, *[False] * len(tangents)]
    linearized, operands, _ = trace_like(m, linear, [*residuals, *tangents], shared, alike)
    # What depends on no tangent has none: a library may rely on it that a value of its own has no derivative.
    outs, known = linearized.body.jaxpr.outvars, [True] * (len(operands) - len(tangents))
    dependent = sums.varying(linearized.body.jaxpr, [*known, *[False] * len(tangents)])
    depends = [not isinstance(v, jax_api.Literal) and v in dependent for v in outs]
    body, summed = jax_api.dce(linearized.body, select(outs, depends))[0], select(select(m.summed, moving), depends)
    moving = interleave(moving, depends, [False] * (len(moving) - len(depends)))
    return results, moving, bind(linearized._replace(body=body, summed=summed), operands)


def _with_residuals(
    traced: Map, operands: Sequence[Any], summed: ResultMask
) -> tuple[list[jax.Array], list[Any], OperandMask, OperandMask]:
    """Run a forward map; return its results, the residuals, and which of these are shared, and which alike.

    Operands are not returned again, and what depends on nothing that differs between elements is computed once.
    """
    jaxpr, number = traced.body.jaxpr, len(summed)
    outs, residuals = jaxpr.outvars[:number], jaxpr.outvars[number:]
    values, varying = dict(zip(jaxpr.invars, operands, strict=True)), sums.varying(jaxpr, traced.shared)
    common = [isinstance(v, jax_api.Literal) or v not in varying for v in residuals]
    computed = [v for v in select(residuals, common, False) if v not in values]
    body = jax_api.dce(traced.body, [*outs, *computed])[0]
    results = bind(traced._replace(body=body, summed=[*summed, *[False] * len(computed)]), operands)
    values.update(zip(computed, results[number:], strict=True))
    pure = ClosedJaxpr(jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not eqn.effects]), traced.body.consts)
    pure, read = jax_api.dce(pure, select(residuals, common), unread=False)
    once = jax_api.jaxpr_as_fun(pure)(*select(operands, read))
    known = dict(zip([*jaxpr.invars, *computed], [*traced.alike, *_alike(traced, computed)], strict=True))
    alike = [not c and known.get(v, False) for v, c in zip(residuals, common, strict=True)]
    rows = [values[v] for v in select(residuals, common, False)]
    return results[:number], interleave(common, once, rows), common, alike


def _alike(m: Map, variables: Sequence[Any]) -> OperandMask:
    """Return which values that a body computes are alike for all elements that run together, as ``vmap`` finds it."""
    if m.lowering == "lanes" or not jax_api.holds(m.body.jaxpr, "while", "scan"):
        return [False] * len(variables)
    in_axes = [None if s or a else 0 for s, a in zip(m.shared, m.alike, strict=True)]
    name = m.placement.axis.name if m.uses_axis else None
    body = jax_api.dce(m.body, variables)[0]
    return [not d for d in jax_api.varying_results(body, in_axes, m.placement.chunk, name, m.axis_env)]


def _transpose(cts: Any, live: ResultMask, operands: Any, moves: OperandMask, **params: Any) -> Any:
    """Return the cotangents of the linear operands, which are given as shapes, from ``cts`` of the ``live`` results."""
    m = Map.of(params)
    fn, known = jax_api.jaxpr_as_fun(m.body), select(operands, moves, False)
    sought = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in select(m.body.in_avals, moves)]

    def back(*args: Any) -> list[Any]:
        residuals, cts = args[: len(known)], args[len(known) :]
        linear = lambda *xs: select(fn(*interleave(moves, xs, residuals)), live)  # noqa: E731
        return list(jax.linear_transpose(linear, *sought)(list(cts)))

    # A rule of the user's may not be linear, and a branch per element, or what a library's rule has batched, may have
    # no transpose after vmap.
    is_plain = not jax_api.holds(m.body.jaxpr, "custom_lin", "cond") and not jax_api.holds_foreign(m.body.jaxpr)
    shared = [*select(m.shared, moves, False), *select(m.summed, live)]
    alike = [*select(m.alike, moves, False), *[False] * len(cts)]
    transposed, operands, _ = trace_like(m, back, [*known, *cts], shared, alike)
    linear = [*[False] * (len(operands) - len(cts)), *[is_plain] * len(cts)]
    return bind(transposed._replace(summed=select(m.shared, moves), linear=linear), operands)


def _batched(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[Any], Sequence[int | None]]:
    """Rows ``(size, batch, ...)``, shared ``(batch, ...)``. Of names that are alike, the map's, inner one is meant."""
    m, name = Map.of(params), axis_data.name
    inner = m.placement.axis.name
    if all(d is None for d in dims) and (name == inner or name not in jax_api.free_axes(m.body.jaxpr)):
        return map_p.bind(*operands, **params), [None] * len(m.summed)
    _refuse_uneven(m)
    triples = zip(operands, dims, m.shared, strict=True)
    batches = [x if d is None else jnp.moveaxis(x, d, 0 if s else 1) for x, d, s in triples]
    # What is alike in the batch stays so, as by jax.vmap: a library's loop counter may have no batch.
    body, differs = jax_api.batch(m.body, axis_data, [None if d is None else 0 for d in dims], m.axis_env, inner)
    body, consts = jax_api.without_constants(body)
    shared, none = [*[True] * len(consts), *m.shared], [False] * len(consts)
    m = m._replace(body=body, shared=shared, alike=[*none, *m.alike], linear=[*none, *m.linear])
    results = bind(m, [*consts, *batches])
    return results, [None if not d else 0 if s else 1 for d, s in zip(differs, m.summed, strict=True)]


def _lowered(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    return lowerings.run(Map.of(params), operands)


map_p = jax_api.define_map("px_map", _avals, _lowered, _evaluated, _jvp, _transpose, _batched)


def _refuse_uneven(m: Map) -> None:
    """Refuse the derivative of a body whose elements exchange values in a branch that they may take apart.

    All take part in an exchange, and each keeps what its own branch gives. The transpose of a branch is a branch: who
    does not take it sends nothing back to the others, so JAX's derivative is not the function's. All else is right.
    """
    name = m.placement.axis.name
    if lowerings.exchanges(m, "cond"):
        marked = ClosedJaxpr(_marked(m.body.jaxpr, name), m.body.consts)
        jax_api.varying_results(marked, [None if s else 0 for s in m.shared], m.placement.size, name, m.axis_env)


def _marked(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """Return the same jaxpr, which is an error under a vmap that takes an exchanging branch apart."""

    def rule(eqn: JaxprEqn) -> list[JaxprEqn]:
        if name in jax_api.bound_axes(eqn):
            return [eqn]
        eqn = jax_api.in_bodies(eqn, lambda sub: _marked(sub, name))
        if eqn.primitive.name != "cond" or not lowerings.is_collective_over(eqn, name):
            return [eqn]
        (branch, *args), refuse = eqn.invars, functools.partial(_refuse, eqn, name)
        mark = jax_api.call(functools.partial(jax_api.observe_vmap, note=refuse), branch, branch)
        return [mark, eqn.replace(invars=[*mark.outvars, *args])]

    return jax_api.rewrite(jaxpr, rule)


def _refuse(eqn: JaxprEqn, name: str, _: list[bool]) -> None:
    at = f", at {line}" if (line := jax_api.line_of(eqn)) else ""
    raise AxisError(
        f"elements of axis {name!r} exchange values in a branch that each takes by itself{at}: its derivative "
        f"in JAX is not the function's. Exchange before the branch, or choose a result: jnp.where(taken, a, b)"
    )
