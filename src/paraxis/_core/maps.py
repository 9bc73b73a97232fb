"""A map as a JAX primitive, ``px_map``, with its three rules, and records of how placed values were made.

Its parameters say what is mapped: ``body``, the jaxpr of one element, traced outside of any mesh with the names of all
mapped axes bound, everything it closes over made an operand; the axis and its size; which operands are ``shared`` by
all elements, which results are ``summed`` over them, and in which operands the body is ``linear`` (if it is the
transpose of another). Where it runs is said by ``how``, which only the lowering reads, and by ``devices``, a jaxpr that
does nothing but name the mesh, since ``jit`` looks for meshes there.

The rules are public transformations of the body. A forward map returns the residuals as well (the leaves of what
``jax.linearize`` returns), unless elements run in chunks: then the derivative runs the body again. The transpose of a
shared operand is a result that is summed: the all-reduce of a gradient, and there is no other.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, collectives, jax_api, lowerings, placing, sums
from paraxis._core.jax_api import ClosedJaxpr, ShapedArray
from paraxis._core.lowerings import Elements, Lowering
from paraxis._core.placing import Axis, Placement, current, entered
from paraxis._core.program import kept, structure_of
from paraxis._core.pytrees import merged, taken
from paraxis._core.sums import Element


@dataclasses.dataclass(frozen=True, repr=False)
class How:
    """The place of a map's elements, the way a device runs its own, and the axes being mapped in the body."""

    placement: Placement
    lowering: Lowering
    mapped: tuple[Axis, ...]

    @property
    def names(self) -> dict[str, int]:
        """The axes that the body may name. Of mesh axes it gets an error that says why, and not that there are none."""
        sizes = self.placement.mesh.shape if self.placement.mesh is not None else {}
        return {name: sizes[name] for name in self.placement.mesh_axes} | {axis.name: axis.size for axis in self.mapped}

    def __repr__(self) -> str:  # a program's text is the same on any devices
        return self.lowering


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
        body, structure = jax_api.trace(fn, structs, how.names)
        body, consts = jax_api.without_constants(body)
        return cls(body, [*consts, *operands], [*[True] * len(consts), *shared], how), structure

    def bind(self, summed: Sequence[bool] | None = None, linear: Sequence[bool] = ()) -> list[jax.Array]:
        """Return its flat results. ``linear`` has no entries for the first operands, constants."""
        placement = self.how.placement
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


def traced(
    fn: Callable[..., Any], operands: Sequence[Any], shared: Sequence[bool], placement: Placement, lowering: Lowering
) -> tuple[Map, Any]:
    """Return a map of a function of flat operands along an axis, and the structure of its result.

    Raises:
        AxisError: if the body names a mesh axis, or elements exchange values that are not all under way together.
    """
    outer, mesh = current(), placement.mesh.abstract_mesh if placement.is_said and placement.mesh else None
    mapped, covered = (*outer.mapped, placement.axis), (*outer.taken, *placement.mesh_axes)
    with entered(mapped=mapped, mesh=outer.mesh or mesh, taken=covered), _unseen(covered):
        found, out_tree = Map.of(fn, operands, shared, How(placement, lowering, mapped))
    collectives.require_no_mesh_axis(found.body.jaxpr, placement, mapped)
    if collectives.mentions(found.body.jaxpr, placement.axis):
        lowerings.require_together(placement, lowering)
    return found, out_tree


def _unseen(covered: Sequence[str]) -> Any:
    """Return a context in which no mesh is in force, unless some of its axes are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(size > 1 and name not in covered for name, size in mesh.shape.items()):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


# --- what it computes --------------------------------------------------------------------------------------------


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


def _computed(*operands: jax.Array, body: ClosedJaxpr, how: How, **params: Any) -> list[jax.Array]:
    """Return the results, by the devices at hand."""
    element = Element(body, *(params[side] for side in ("shared", "summed", "linear")))
    found = Elements(element, placing.as_here(how.placement), how.lowering).run(operands)
    return [jax_api.weak(y) if a.weak_type else y for y, a in zip(found, body.out_avals, strict=True)]


def _evaluated(*operands: Any, devices: Any, **params: Any) -> list[jax.Array]:
    """On concrete arrays: by a program that is found by its structure, and compiled if there is none."""
    run = kept(structure_of(params), lambda: jax.jit(functools.partial(_computed, **params)))
    sides = zip(operands, params["shared"], strict=True)
    return run(*(arrays.settle(x, params["how"].placement, rows=not s) for x, s in sides))


def lies_over(jaxpr: jax_api.Jaxpr, name: str) -> bool:
    """Return whether the elements of a map in a program lie over a mesh axis of this name."""
    maps = (eqn for eqn in jax_api.equations(jaxpr) if eqn.primitive is map_p)
    return any(name in eqn.params["how"].placement.mesh_axes for eqn in maps)


# --- its derivatives ---------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], live: Sequence[bool], tangents: Sequence[Any], **params: Any) -> Any:
    """Results, which of them have tangents, and these; ``tangents`` are those of the ``live`` operands."""
    body, how, shared, summed = params["body"], params["how"], params["shared"], params["summed"]
    moving = [jnp.issubdtype(a.dtype, jnp.inexact) for a in body.out_avals]
    if collectives.mentions(body.jaxpr, how.placement.axis):
        collectives.refuse_uneven(body, shared, how.placement.axis, how.names)

    def of_live(args: Sequence[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Return the body as a function of the live arguments: the results that move, and those that do not."""
        rest = taken(args, live, False)

        def function(*some: Any) -> tuple[list[Any], list[Any]]:
            own = merged(live, some, rest)
            found = jax_api.evaluate(body, own, lambda eqn: eqn.primitive.name == "custom_vmap_call")
            return taken(found, moving), taken(found, moving, False)

        return function

    structures: list[Any] = []

    def forward(*args: Any) -> list[Any]:
        moved, tangent, still = jax.linearize(of_live(args), *taken(args, live), has_aux=True)
        leaves, structure = jax.tree.flatten(tangent)
        structures.append(structure)
        return [*merged(moving, moved, still), *leaves]

    def again(*args: Any) -> list[Any]:
        own, given = args[: len(primals)], args[len(primals) :]
        return jax.jvp(of_live(own), taken(own, live), list(given), has_aux=True)[1]

    def linear(*args: Any) -> list[Any]:
        return jax.tree.unflatten(structures[-1], args[: len(residuals)])(*args[len(residuals) :])

    traced, number = Map.of(forward, primals, shared, how)[0], len(summed)
    if lowerings.keeps_nothing(how.placement):  # nothing is kept: the derivative runs the body again
        traced = dataclasses.replace(traced, body=jax_api.dce(traced.body, traced.body.jaxpr.outvars[:number])[0])
        results, residuals, linear = traced.bind(summed), list(zip(primals, shared, strict=True)), again
    else:
        results, residuals = _with_residuals(traced, summed)
    operands = [*(x for x, _ in residuals), *tangents]
    sides = [*(is_shared for _, is_shared in residuals), *taken(shared, live)]
    return results[:number], moving, Map.of(linear, operands, sides, how)[0].bind(taken(summed, moving))


def _with_residuals(traced: Map, summed: Sequence[bool]) -> tuple[list[jax.Array], list[tuple[Any, bool]]]:
    """Run a forward map; return its results, and each residual with whether it is shared.

    Residuals that are operands are the operands; those that depend on nothing that differs between elements are
    computed once, outside of the map.
    """
    closed, number, jaxpr = traced.body, len(summed), traced.body.jaxpr
    known = dict(zip(jaxpr.invars, zip(traced.operands, traced.shared, strict=True), strict=True))
    varying, sought = collectives.differing(jaxpr, traced.shared), jaxpr.outvars[number:]
    made = [v for v in sought if isinstance(v, jax_api.Literal) or v not in known]
    differ = [not isinstance(v, jax_api.Literal) and v in varying for v in made]
    rows, once = taken(made, differ), taken(made, differ, False)
    kept = dataclasses.replace(traced, body=jax_api.dce(closed, [*jaxpr.outvars[:number], *rows])[0])
    found = kept.bind([*summed, *[False] * len(rows)])
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


# --- under vmap --------------------------------------------------------------------------------------------------


def _batched(
    operands: Sequence[Any], dims: Sequence[int | None], *, size: int, name: str | None, params: Any
) -> tuple[Sequence[Any], Sequence[int | None]]:
    body, how, shared, summed = (params[k] for k in ("body", "how", "shared", "summed"))
    if all(d is None for d in dims) and not any(jax_api.axis_of(e) == name for e in body.effects):
        return map_p.bind(*operands, **params), [None] * len(summed)
    ahead = [
        x if d is None else jnp.moveaxis(x, d, 0 if s else 1) for x, d, s in zip(operands, dims, shared, strict=True)
    ]
    if collectives.mentions(body.jaxpr, how.placement.axis):  # JAX makes a select of its branches
        collectives.refuse_uneven(body, shared, how.placement.axis, how.names)
    fn, differ = jax_api.jaxpr_as_fun(body), list[bool]()

    def one(index: jax.Array, *xs: Any) -> list[Any]:
        return collectives.watched(list(fn(*xs)), index, differ.extend)

    def over(*args: Any) -> list[Any]:  # with a number of its own, as no operand may differ
        in_axes = (0, *(None if d is None else 0 for d in dims))
        found = jax.vmap(one, in_axes, axis_size=size, axis_name=name)(jnp.arange(size), *args)
        return [y if differs else y[0] for y, differs in zip(found, differ, strict=True)]

    found = Map.of(over, ahead, shared, how)[0].bind(summed, params["linear"])
    return found, [None if not differs else 0 if s else 1 for differs, s in zip(differ, summed, strict=True)]


map_p = jax_api.define_map("px_map", _avals, _computed, _evaluated, _jvp, _transpose, _batched)


# --- how placed values were made, recorded while a trace lasts ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shared:
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
        if collectives.mentions(body.jaxpr, how.placement.axis) or sums.end(body, self._map.shared, every) is None:
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


@dataclasses.dataclass(frozen=True)
class Result:
    """A map's result with that index. If only its sum is wanted, it is dead code, which the compiler drops."""

    sums: Sums
    index: int


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
