"""A map as a JAX primitive, ``px_map``, with its three rules, and records of how placed values were made.

Its parameters are ``body``, the jaxpr of one element, traced outside of any mesh with the names of all mapped axes
bound, everything it closes over made an operand; the axis and its size; which operands are ``shared`` by all elements,
which results are ``summed`` over them, and in which operands the body is ``linear`` (if it is the transpose of
another); ``how`` it runs, which only the lowering reads; and ``devices``, a jaxpr that names the mesh to ``jit``.

The rules are public transformations of the body. A forward map returns residuals, the leaves of what ``jax.linearize``
returns, but in chunks: there the derivative runs the body again. The transpose of a shared operand is a summed result.
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
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, ShapedArray
from paraxis._core.lowerings import Elements, Lowering
from paraxis._core.placing import Placement, current
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

    def bind(self, summed: Sequence[bool], linear: Sequence[bool] = ()) -> list[jax.Array]:
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
            summed=tuple(summed),
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
        found = ShapedArray((*lead, *element.shape), element.dtype, weak_type=element.weak_type)
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
    with jax_api.no_key_checks():  # they would take a padded element's copy of a key for one more use
        found = Elements(element, placement, how.lowering).run(operands)
    return [jax_api.weak(y) if a.weak_type else y for y, a in zip(found, element.body.out_avals, strict=True)]


def _evaluated(*operands: Any, devices: Any, **params: Any) -> list[jax.Array]:
    """On concrete arrays: by a program that is found by its structure, and compiled if there is none."""
    run = kept(structure_of(params), lambda: jax.jit(functools.partial(_computed, **jax_api.to_keep(params))))
    sides = zip(operands, params["shared"], strict=True)
    return run(*(arrays.settle(x, params["how"].placement, rows=not s) for x, s in sides))


def _jvp(
    primals: Any, live: Any, tangents: Any, *, body: ClosedJaxpr, how: How, shared: Any, summed: Any, **_: Any
) -> Any:
    """Results, which of them have tangents, and these; ``tangents`` are those of the ``live`` operands."""
    _refuse_uneven(body, shared, how)
    fn, moving = jax_api.jaxpr_as_fun(body), [jnp.issubdtype(a.dtype, jnp.inexact) for a in body.out_avals]
    if lowerings.keeps_nothing(how.placement):  # the derivative runs the body again
        fn = jax.checkpoint(fn, prevent_cse=False)

    def of_live(args: Sequence[Any], *some: Any) -> tuple[list[Any], list[Any]]:
        found = fn(*merged(live, some, taken(args, live, False)))
        return taken(found, moving), taken(found, moving, False)

    def forward(*args: Any) -> tuple[list[Any], Any]:
        moved, tangent, still = jax.linearize(functools.partial(of_live, args), *taken(args, live), has_aux=True)
        return merged(moving, moved, still), tangent

    def linear(*args: Any) -> list[Any]:
        return jax.tree.unflatten(structure.children()[1], args[: len(residuals)])(*args[len(residuals) :])

    traced, structure = Map.of(forward, primals, shared, how)
    results, residuals, common = _with_residuals(traced, summed)
    linearized, _ = Map.of(linear, [*residuals, *tangents], [*common, *taken(shared, live)], how)
    return results, moving, linearized.bind(taken(summed, moving))


def _with_residuals(traced: Map, summed: Sequence[bool]) -> tuple[list[jax.Array], list[Any], list[bool]]:
    """Run a forward map; return its results, the residuals, and which of these are shared.

    Operands are not returned again, and what depends on nothing that differs between elements is computed once.
    """
    body, jaxpr, number = traced.body, traced.body.jaxpr, len(summed)
    given, varying = dict(zip(jaxpr.invars, traced.operands, strict=True)), sums.differing(jaxpr, traced.shared)
    common = [isinstance(v, jax_api.Literal) or v not in varying for v in jaxpr.outvars[number:]]
    once, own = taken(jaxpr.outvars[number:], common), taken(jaxpr.outvars[number:], common, False)
    made = [v for v in own if v not in given]
    forward = dataclasses.replace(traced, body=jax_api.dce(body, [*jaxpr.outvars[:number], *made])[0])
    found = forward.bind([*summed, *[False] * len(made)])
    given.update(zip(made, found[number:], strict=True))
    pure, read = jax_api.dce(
        ClosedJaxpr(jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not eqn.effects]), body.consts), once, unread=False
    )
    values = jax_api.jaxpr_as_fun(pure)(*taken(traced.operands, read))
    return found[:number], merged(common, values, [given[v] for v in own]), common


def _transpose(
    cts: Any, live: Any, operands: Any, moves: Any, *, body: ClosedJaxpr, how: How, shared: Any, summed: Any, **_: Any
) -> Any:
    """Return the cotangents of the linear operands, which are given as shapes, from ``cts`` of the ``live`` results."""
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
    body, shared, summed = params["body"], params["shared"], params["summed"]
    _refuse_uneven(body, shared, params["how"])
    in_axes = [None if d is None else 0 for d in dims]
    sides = zip(operands, dims, shared, strict=True)
    ahead = [x if d is None else jnp.moveaxis(x, d, 0 if s else 1) for x, d, s in sides]

    # What is alike in the batch stays so, as by jax.vmap: whoever asks what differs gets the answer.
    differing, outs = sums.differing(body.jaxpr, [d is None for d in dims]), body.jaxpr.outvars
    out_axes = [0 if not isinstance(v, jax_api.Literal) and v in differing else None for v in outs]

    def over(*args: Any) -> list[Any]:  # with a number of its own, as no operand may differ
        fn = lambda _, *xs: list(jax_api.jaxpr_as_fun(body)(*xs))  # noqa: E731
        return jax.vmap(fn, (0, *in_axes), out_axes, axis_size=size, axis_name=name)(jnp.arange(size), *args)

    found = Map.of(over, ahead, shared, params["how"])[0].bind(summed, params["linear"])
    return found, [at if at is None or s else 1 for at, s in zip(out_axes, summed, strict=True)]


map_p = jax_api.define_map("px_map", _avals, _computed, _evaluated, _jvp, _transpose, _batched)


def watched(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """Return ``x``, and have ``vmap`` call ``note`` with which leaves may differ between elements.

    ``index``, the element's number, does differ: this vmap, and not one around it, then answers.
    """
    same = jax.custom_batching.custom_vmap(lambda _, x: x)

    def over(_: int, differ: Any, __: jax.Array, x: Any) -> Any:
        note(jax.tree.leaves(differ[1]))
        return x, differ[1]

    same.def_vmap(over)
    return same(index, x)


def batched(
    body: ClosedJaxpr, in_axes: Sequence[int | None], size: int, name: str | None, names: Mapping[str, int]
) -> list[bool]:
    """Return, for each result of a body: whether it may differ along the batch in which these arguments do."""
    found: list[bool] = []

    def one(index: jax.Array, *args: Any) -> list[Any]:
        return watched(list(jax_api.jaxpr_as_fun(body)(*args)), index, found.extend)

    sides = zip(body.in_avals, in_axes, strict=True)
    avals = [jax_api.struct(a, lead=() if at is None else (size,)) for a, at in sides]
    over = jax.vmap(one, in_axes=(0, *in_axes), axis_size=size, axis_name=name)
    jax_api.trace(over, [jax.ShapeDtypeStruct((size,), jnp.int32), *avals], names)
    return found


def _refuse_uneven(body: ClosedJaxpr, shared: Sequence[bool], how: How) -> None:
    """Refuse the derivative of a body whose elements exchange values in a branch that they may take apart.

    All take part in an exchange, and each keeps what its own branch gives. The transpose of a branch is a branch: who
    does not take it sends nothing back to the others, so JAX's derivative is not the function's. All else is right.
    """
    axis = how.placement.axis
    if lowerings.mentions(body.jaxpr, axis.name) and lowerings.parts(body.jaxpr, axis.name, "cond"):
        marked = ClosedJaxpr(_marked(body.jaxpr, axis.name), body.consts)
        batched(marked, [None if s else 0 for s in shared], axis.size, axis.name, dict(how.names))


def _marked(jaxpr: Jaxpr, name: str) -> Jaxpr:
    """Return the same jaxpr, which is an error under a vmap that takes an exchanging branch apart."""
    eqns = list[JaxprEqn]()
    for each in jaxpr.eqns:
        eqn = each.replace(params=jax_api.map_jaxprs(each.params, lambda sub: _marked(sub, name)))
        if eqn.primitive.name == "cond" and lowerings.exchanges(eqn, name):
            (taken, *args), refuse = eqn.invars, functools.partial(_refuse, eqn, name)
            [mark] = jax.make_jaxpr(functools.partial(watched, note=refuse))(taken.aval, taken.aval).eqns
            eqns += [mark.replace(invars=[taken, taken]), eqn.replace(invars=[*mark.outvars, *args])]
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
    """Sums over a map's results, taken together by another map: the first is dead code if nothing else reads it."""

    def __init__(self, made: Map) -> None:
        self._map, self._trace = made, jax_api.get_opaque_trace_state()
        self._found: dict[Any, tuple[Sequence[Any], list[jax.Array]]] = {}

    @functools.cached_property
    def _preferred(self) -> bool:
        """Return whether a map of sums costs less than the results, or keeps none of them. Effects happen once."""
        body, how = self._map.body, self._map.how
        if jax_api.has_effects(body.jaxpr) or lowerings.keeps_nothing(how.placement):
            return not jax_api.has_effects(body.jaxpr)
        every = [True] * len(body.out_avals)
        if lowerings.mentions(body.jaxpr, how.placement.axis.name) or sums.end(body, self._map.shared, every) is None:
            return False
        return current().chunk is not None or not lowerings.unrolls(body, how.placement, how.lowering)

    def of(self, at: int, placement: Placement, term: Any, extras: Sequence[jax.Array]) -> jax.Array | None:
        """Return the sum of ``term(result number at, *extras)``; ``None``: it is better taken of results."""
        if self._map.how.placement != placement or not self._preferred:
            return None
        if jax_api.get_opaque_trace_state() != self._trace:  # in a loop's body, say: its values do not outlive it
            return self._bound(term, extras)[at]
        key = (term, *map(id, extras))
        if key not in self._found:  # the extras are kept, so that their ids stay theirs
            self._found[key] = (extras, self._bound(term, extras))
        return self._found[key][1][at]

    def _bound(self, term: Callable[..., jax.Array], extras: Sequence[jax.Array]) -> list[jax.Array]:
        made, count = self._map, len(self._map.operands)

        def terms(*args: Any) -> list[jax.Array]:
            return [term(y, *args[count:]) for y in jax_api.jaxpr_as_fun(made.body)(*args[:count])]

        operands, shared = [*made.operands, *extras], [*made.shared, *[False] * len(extras)]
        return Map.of(terms, operands, shared, made.how)[0].bind([True] * len(made.body.out_avals))


_forms: dict[int, Any] = {}


def remember(y: Any, form: Any) -> Any:
    """Note what a traced value is, a :class:`Shared` one or :meth:`Sums.of` a result, by the tracer's identity."""
    if isinstance(y, jax_api.Tracer):
        _forms[id(y)] = form
        weakref.finalize(y, _forms.pop, id(y), None)
    return y


def recall(y: Any) -> Any:
    return _forms.get(id(y))
