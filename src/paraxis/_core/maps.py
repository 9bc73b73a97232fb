"""A map as a JAX primitive, ``px_map``, with its three rules, and records of how placed values were made.

Its parameters are ``body``, the jaxpr of one element, traced outside of any mesh with the names of all mapped axes
bound, everything it closes over made an operand; the axis and its size; which operands are ``shared`` by all elements,
which results are ``summed`` over them, and in which operands the body is ``linear`` (if it is the transpose of
another); ``how`` it runs, which only the lowering reads; and ``devices``, a jaxpr that names the mesh to ``jit``.

The rules are public transformations of the body. A forward map returns the residuals as well (the leaves of what
``jax.linearize`` returns), unless elements run in chunks: then the derivative runs the body again. The transpose of a
shared operand is a result that is summed: the all-reduce of a gradient, and there is no other.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, jax_api, lowerings, placing, sums
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, ShapedArray, Var
from paraxis._core.lowerings import Elements, Lowering
from paraxis._core.placing import Axis, Placement, current
from paraxis._core.program import kept, structure_of
from paraxis._core.pytrees import merged, taken
from paraxis._core.sums import Element
from paraxis.errors import AxisError


class How(NamedTuple):
    """Where a map's elements lie, the way a device runs its own, and the sizes of axes that the body may name."""

    placement: Placement
    lowering: Lowering
    names: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Map:
    """A map before it is bound: the jaxpr of one element without constants, which are its first operands."""

    body: ClosedJaxpr
    operands: Sequence[Any]
    shared: Sequence[bool]
    how: How

    @classmethod
    def of(cls, fn: Callable[..., Any], operands: Sequence[Any], shared: Sequence[bool], how: How) -> "tuple[Map, Any]":
        """Trace ``fn`` of one element; return the map and the structure of what ``fn`` returns."""
        structs = [jax_api.struct(x, 0 if s else 1) for x, s in zip(operands, shared, strict=True)]
        body, structure = jax_api.trace(fn, structs, dict(how.names))
        body, consts = jax_api.without_constants(body)
        return cls(body, [*consts, *operands], [*[True] * len(consts), *shared], how), structure

    def bind(self, summed: Sequence[bool] | None = None, linear: Sequence[bool] = ()) -> list[jax.Array]:
        """Return its flat results. ``linear`` has no entries for the first operands, constants."""
        placement = self.how.placement
        lowerings.require_together(self.body, placement, self.how.lowering)
        body, read = jax_api.dce(self.body, unread=False)
        return map_p.bind(
            *taken(self.operands, read),
            body=body,
            axis=placement.axis.name,
            size=placement.size,
            shared=tuple(taken(self.shared, read)),
            summed=(False,) * len(body.out_avals) if summed is None else tuple(summed),
            linear=tuple(taken([*[False] * (len(read) - len(linear)), *linear], read)),
            how=self.how,
            devices=placing.named_devices(placement),
        )


def unseen(covered: Sequence[str]) -> Any:
    """Return a context in which no mesh is in force, unless some of its axes are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(size > 1 and name not in covered for name, size in mesh.shape.items()):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _avals(*operands: Any, body: ClosedJaxpr, summed: Sequence[bool], how: How, **_: Any) -> Any:
    placement, mesh = how.placement, how.placement.mesh

    def aval(element: Any, is_summed: bool) -> ShapedArray:
        lead = () if is_summed else (placement.size,)
        found = jax_api.ShapedArray((*lead, *element.shape), element.dtype, weak_type=element.weak_type)
        if mesh is None or not placement.is_explicit:
            return found
        spec = [arrays.without(entry, placement.mesh_axes) for entry in element.sharding.spec]
        over = [placement.mesh_axes if placement.divides else None for _ in lead]
        return found.update(sharding=NamedSharding(mesh.abstract_mesh, P(*over, *spec)))

    effects = {e for e in body.effects if jax_api.axis_of(e) != placement.axis.name}
    return [aval(a, s) for a, s in zip(body.out_avals, summed, strict=True)], effects


def _computed(*operands: jax.Array, how: How, **params: Any) -> list[jax.Array]:
    """Return the results, by the devices at hand."""
    element, placement = Element(*(params[field] for field in Element._fields)), how.placement
    if isinstance(placement.mesh, AbstractMesh) and not (entered := jax.sharding.get_abstract_mesh()).empty:
        placement = dataclasses.replace(placement, mesh=entered)  # of which some axes are taken
    found = Elements(element, placement, how.lowering).run(operands)
    return [jax_api.weak(y) if a.weak_type else y for y, a in zip(found, element.body.out_avals, strict=True)]


def _evaluated(*operands: Any, devices: Any, **params: Any) -> list[jax.Array]:
    """On concrete arrays: by a program that is found by its structure, and compiled if there is none."""
    run = kept(structure_of(params), lambda: jax.jit(functools.partial(_computed, **jax_api.to_keep(params))))
    sides = zip(operands, params["shared"], strict=True)
    return run(*(arrays.settle(x, params["how"].placement, rows=not s) for x, s in sides))


def _parts(params: dict[str, Any]) -> tuple[ClosedJaxpr, How, Sequence[bool], Sequence[bool]]:
    """Return what rules read, of a map that is differentiated or batched."""
    body, how = params["body"], params["how"]
    if lowerings.mentions(body.jaxpr, params["axis"]):
        _refuse_uneven(body, params["shared"], how.placement.axis, dict(how.names))
    return body, how, params["shared"], params["summed"]


def _jvp(primals: Sequence[Any], live: Sequence[bool], tangents: Sequence[Any], **params: Any) -> Any:
    """Results, which of them have tangents, and these; ``tangents`` are those of the ``live`` operands."""
    body, how, shared, summed = _parts(params)
    fn, moving = jax_api.jaxpr_as_fun(body), [jnp.issubdtype(a.dtype, jnp.inexact) for a in body.out_avals]
    if lowerings.keeps_nothing(how.placement):  # the derivative runs the body again
        fn = jax.checkpoint(fn, prevent_cse=False)

    def of_live(args: Sequence[Any], *some: Any) -> tuple[list[Any], list[Any]]:
        """Return the results that move with the live arguments, and those that do not."""
        found = fn(*merged(live, some, taken(args, live, False)))
        return taken(found, moving), taken(found, moving, False)

    def forward(*args: Any) -> tuple[list[Any], Any]:
        moved, tangent, still = jax.linearize(functools.partial(of_live, args), *taken(args, live), has_aux=True)
        return merged(moving, moved, still), tangent

    def linear(*args: Any) -> list[Any]:
        return jax.tree.unflatten(structure.children()[1], args[: len(residuals)])(*args[len(residuals) :])

    traced, structure = Map.of(forward, primals, shared, how)
    results, residuals = _with_residuals(traced, summed)
    operands = [*(x for x, _ in residuals), *tangents]
    sides = [*(is_shared for _, is_shared in residuals), *taken(shared, live)]
    return results[: len(summed)], moving, Map.of(linear, operands, sides, how)[0].bind(taken(summed, moving))


def _with_residuals(traced: Map, summed: Sequence[bool]) -> tuple[list[jax.Array], list[tuple[Any, bool]]]:
    """Run a forward map; return its results, and each residual with whether it is shared.

    Residuals that are operands are the operands; those that depend on nothing that differs between elements are
    computed once, outside of the map.
    """
    closed, number, jaxpr = traced.body, len(summed), traced.body.jaxpr
    known = dict(zip(jaxpr.invars, zip(traced.operands, traced.shared, strict=True), strict=True))
    varying, sought = sums.differing(jaxpr, traced.shared), jaxpr.outvars[number:]
    made = [v for v in sought if isinstance(v, jax_api.Literal) or v not in known]
    differ = [not isinstance(v, jax_api.Literal) and v in varying for v in made]
    rows, once = taken(made, differ), taken(made, differ, False)
    needed = dataclasses.replace(traced, body=jax_api.dce(closed, [*jaxpr.outvars[:number], *rows])[0])
    found = needed.bind([*summed, *[False] * len(rows)])
    values = jax_api.jaxpr_as_fun(jax_api.dce(closed, once, effects=False)[0])(*traced.operands) if once else []
    new = iter(zip(merged(differ, found[number:], values), (not d for d in differ), strict=True))
    return found, [next(new) if isinstance(v, jax_api.Literal) or v not in known else known[v] for v in sought]


def _transpose(
    cts: Sequence[Any], live: Sequence[bool], operands: Sequence[Any], moves: Sequence[bool], **params: Any
) -> Any:
    """Return the cotangents of the linear operands, which are given as shapes, from ``cts`` of the ``live`` results."""
    body, how, shared, summed = params["body"], params["how"], params["shared"], params["summed"]
    fn, known = jax_api.jaxpr_as_fun(body), taken(operands, moves, False)
    sought = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in taken(body.in_avals, moves)]

    def back(*args: Any) -> list[Any]:
        given, cts = args[: len(known)], args[len(known) :]
        return list(jax.linear_transpose(lambda *xs: taken(fn(*merged(moves, xs, given)), live), *sought)(list(cts)))

    # A rule of the user's may not be linear, and a branch per element has no transpose after vmap.
    is_plain = not jax_api.holds(body.jaxpr, "custom_lin", "cond")
    sides = [*taken(shared, moves, False), *taken(summed, live)]
    transposed, _ = Map.of(back, [*known, *cts], sides, how)
    return transposed.bind(taken(shared, moves), [*[False] * len(known), *[is_plain] * len(cts)])


def _batched(
    operands: Sequence[Any], dims: Sequence[int | None], *, size: int, name: str | None, params: Any
) -> tuple[Sequence[Any], Sequence[int | None]]:
    if all(d is None for d in dims) and not any(jax_api.axis_of(e) == name for e in params["body"].effects):
        return map_p.bind(*operands, **params), [None] * len(params["summed"])
    (body, how, shared, summed), in_axes = _parts(params), [None if d is None else 0 for d in dims]
    ahead = [
        x if d is None else jnp.moveaxis(x, d, 0 if s else 1) for x, d, s in zip(operands, dims, shared, strict=True)
    ]
    differing, outs = sums.differing(body.jaxpr, [d is None for d in dims]), body.jaxpr.outvars
    out_axes = [0 if not isinstance(v, jax_api.Literal) and v in differing else None for v in outs]

    def over(*args: Any) -> list[Any]:  # with a number of its own, as no operand may differ
        fn = lambda _, *xs: list(jax_api.jaxpr_as_fun(body)(*xs))  # noqa: E731
        return jax.vmap(fn, (0, *in_axes), out_axes, axis_size=size, axis_name=name)(jnp.arange(size), *args)

    found = Map.of(over, ahead, shared, how)[0].bind(summed, params["linear"])
    return found, [at if at is None or s else 1 for at, s in zip(out_axes, summed, strict=True)]


map_p = jax_api.define_map("px_map", _avals, _computed, _evaluated, _jvp, _transpose, _batched)

_watch_p = Primitive("px_watch")  # the identity, which calls `note` under vmap with which operands are batched
_watch_p.multiple_results = True
_watch_p.def_abstract_eval(lambda *avals, note: avals)


def _watched(operands: Sequence[Any], dims: Sequence[Any], *, note: Callable[[list[bool]], None]) -> Any:
    note([dim is not None for dim in dims])
    return operands, dims


jax_api.batching.primitive_batchers[_watch_p] = _watched


def watched(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """Return ``x`` in a function under ``vmap``, which calls ``note`` with which leaves may differ between elements.

    ``index``, the element's number, does differ: this vmap, and not one around it, then answers.
    """
    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(structure, _watch_p.bind(index, *leaves, note=lambda differ: note(differ[1:]))[1:])


def batched(
    body: ClosedJaxpr, in_axes: Sequence[int | None], size: int, name: str | None, names: Mapping[str, int]
) -> list[bool]:
    """Return, for each result of a body: whether it may differ along the batch in which these arguments do."""
    found: list[bool] = []

    def one(index: jax.Array, *args: Any) -> list[Any]:
        return watched(list(jax_api.jaxpr_as_fun(body)(*args)), index, found.extend)

    avals = [
        jax.ShapeDtypeStruct(a.shape if at is None else (size, *a.shape), a.dtype, weak_type=a.weak_type)
        for a, at in zip(body.in_avals, in_axes, strict=True)
    ]
    over = jax.vmap(one, in_axes=(0, *in_axes), axis_size=size, axis_name=name)
    jax_api.trace(over, [jax.ShapeDtypeStruct((size,), jnp.int32), *avals], names)
    return found


def _refuse_uneven(body: ClosedJaxpr, shared: Sequence[bool], axis: Axis, names: Mapping[str, int]) -> None:
    """Refuse the derivative of a body whose elements exchange values in a branch that they may take apart.

    All elements take part in an exchange, and each keeps what its own branch gives. The transpose of a branch is a
    branch: an element that does not take it sends nothing back to the others, so JAX's derivative is not the
    function's. Values, forward derivatives, loops, and branches that all take alike are right.
    """
    if lowerings.parts(body.jaxpr, axis.name, "cond"):
        marked = ClosedJaxpr(_marked(body.jaxpr, axis.name), body.consts)
        batched(marked, [None if s else 0 for s in shared], axis.size, axis.name, names)


def _marked(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """Return the same jaxpr, which is an error under a vmap that takes an exchanging branch apart."""
    eqns = list[JaxprEqn]()
    for each in jaxpr.eqns:
        eqn = each.replace(params=jax_api.map_jaxprs(each.params, lambda sub: _marked(sub, name)))
        if eqn.primitive.name == "cond" and lowerings.exchanges(eqn, name):
            taken, *args = eqn.invars
            seen, params = Var(taken.aval), {"note": functools.partial(_refuse, eqn, name)}
            mark = eqn.replace(primitive=_watch_p, invars=[taken], outvars=[seen], params=params, effects=set())
            eqns += [mark, eqn.replace(invars=[seen, *args])]
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _refuse(eqn: JaxprEqn, name: str, _: list[bool]) -> None:
    at = f", at {line}" if (line := jax_api.line_of(eqn)) else ""
    raise AxisError(
        f"elements of axis {name!r} exchange values in a branch that each takes by itself{at}: its derivative "
        f"in JAX is not the function's. Exchange before the branch, or choose a result: jnp.where(taken, a, b)"
    )


class Shared(NamedTuple):
    """A broadcast value: every row equals ``value``."""

    value: Any


class Sums:
    """The sums over a map's results that were asked for. They are taken of all results together."""

    def __init__(self, made: Map) -> None:
        self._map, self._trace = made, jax_api.get_opaque_trace_state()
        self._found: dict[Any, tuple[Sequence[Any], list[jax.Array]]] = {}

    def are_preferred(self, placement: Placement) -> bool:
        """Return whether sums along a placed axis are better taken by a map of their own than of results."""
        return self._map.how.placement == placement and self._preferred

    @functools.cached_property
    def _preferred(self) -> bool:
        """Return whether such a map costs less than the results, or keeps none of them. Effects do not happen again."""
        body, how = self._map.body, self._map.how
        if jax_api.has_effects(body.jaxpr) or lowerings.keeps_nothing(how.placement):
            return not jax_api.has_effects(body.jaxpr)
        every = [True] * len(body.out_avals)
        if lowerings.mentions(body.jaxpr, how.placement.axis.name) or sums.end(body, self._map.shared, every) is None:
            return False
        # Chunks of a stream must do the same, however few elements they have.
        return current().chunk is not None or not lowerings.unrolls(body, how.placement, how.lowering)

    def of(self, term: Callable[..., jax.Array], extras: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the sums of ``term(result, *extras)`` of each result; of ``extras``, each element gets its own row."""
        if jax_api.get_opaque_trace_state() != self._trace:  # in a loop's body, say: its values do not outlive it
            return self._bound(term, extras)
        key = (term, *map(id, extras))
        if key not in self._found:  # the extras are kept, so that their ids stay theirs
            self._found[key] = (extras, self._bound(term, extras))
        return self._found[key][1]

    def _bound(self, term: Callable[..., jax.Array], extras: Sequence[jax.Array]) -> list[jax.Array]:
        made, count = self._map, len(self._map.operands)

        def terms(*args: Any) -> list[jax.Array]:
            return [term(y, *args[count:]) for y in jax_api.jaxpr_as_fun(made.body)(*args[:count])]

        operands, shared = [*made.operands, *extras], [*made.shared, *[False] * len(extras)]
        return Map.of(terms, operands, shared, made.how)[0].bind([True] * len(made.body.out_avals))


class Result(NamedTuple):
    """The result number ``at`` of a map. If only its sum is wanted, it is dead code, which the compiler drops."""

    sums: Sums
    at: int


_forms: dict[int, tuple[weakref.ref[Any], Shared | Result]] = {}


def remember(y: Any, form: Shared | Result) -> Any:
    """Note what a traced value is, by the tracer's identity: whatever an operation makes of it is another one."""
    if isinstance(y, jax_api.Tracer):
        key = id(y)
        _forms[key] = (weakref.ref(y, lambda _: _forms.pop(key, None)), form)
    return y


def recall(y: Any) -> Shared | Result | None:
    entry = _forms.get(id(y))
    return entry[1] if entry is not None and entry[0]() is y else None
