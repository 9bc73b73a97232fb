"""A map as a JAX primitive, ``px_map``, with its three rules.

Its parameters say what is mapped: ``body``, the jaxpr of one element, traced outside of any mesh with the names of all
mapped axes bound, everything it closes over made an operand; the axis and its size; which operands are ``shared`` (one
value for all elements), which results are ``summed`` (over the elements; the others have a row for each), and in which
operands the body is ``linear`` (if it is the transpose of another). They do not say where: that is ``how``, which only
the lowering reads, and ``devices``, a jaxpr that does nothing but name the mesh, since ``jit`` looks for meshes there.

The rules are public transformations of the body. A forward map returns what its derivative needs besides (the leaves
of what ``jax.linearize`` returns), unless elements run in chunks: then nothing is kept, and the derivative runs the
body again. The transpose of a shared operand is a result that is summed: the all-reduce of a gradient, and there is no
other.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from paraxis._core import arrays, branches, collectives, jax_api, layout, lowerings, placing, scope, structure, varying
from paraxis._core.axis import Axis
from paraxis._core.jax_api import ClosedJaxpr, ShapedArray
from paraxis._core.lowerings import Elements, Lowering
from paraxis._core.placing import Placement


@dataclasses.dataclass(frozen=True, repr=False)
class How:
    """The place of a map's elements, the way a device runs its own, and the axes being mapped in the body."""

    placement: Placement
    lowering: Lowering
    mapped: tuple[Axis, ...]

    @property
    def names(self) -> dict[str, int]:
        """The axes that the body may name. Of mesh axes it gets an error that says why, and not that there are none."""
        mesh = self.placement.mesh
        sizes = {name: mesh.shape[name] for name in self.placement.mesh_axes} if mesh is not None else {}
        return {**sizes, **{axis.name: axis.size for axis in self.mapped}}

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
        body, structure = jax_api.trace(fn, structs(operands, shared), how.names)
        body, consts = jax_api.without_constants(body)
        return cls(body, [*consts, *operands], [*[True] * len(consts), *shared], how), structure

    def bind(self, summed: Sequence[bool] | None = None, linear: Sequence[bool] | None = None) -> list[jax.Array]:
        """Return its flat results. ``linear`` has no entries for the first operands, constants."""
        placement = self.how.placement
        body, read = jax_api.dce(self.body, unread=False)
        linear = linear or ()
        linear = [*[False] * (len(self.shared) - len(linear)), *linear]
        return map_p.bind(
            *_taken(self.operands, read),
            body=body,
            axis=placement.axis.name,
            size=placement.size,
            shared=tuple(_taken(self.shared, read)),
            summed=tuple(summed) if summed is not None else (False,) * len(body.out_avals),
            linear=tuple(_taken(linear, read)),
            how=self.how,
            devices=placing.named_devices(placement),
        )

    @functools.cached_property
    def sums_preferred(self) -> bool:
        """Return whether sums over the elements are better taken by a map of their own."""
        return lowerings.sums_preferred(self.body, self.how.placement, self.how.lowering, self.shared)


def traced(
    fn: Callable[..., Any],
    structure: Any,
    operands: Sequence[Any],
    shared: Sequence[bool],
    placement: Placement,
    lowering: Lowering = "auto",
) -> tuple[Map, Any]:
    """Return a map of ``fn`` along an axis, and the structure of its result; ``operands`` are its arguments' leaves.

    Raises:
        AxisError: if the body names a mesh axis, or elements exchange values that are not all under way together.
    """
    outer, mesh = scope.current(), placing.abstract_mesh(placement) if placement.is_said else None
    mapped, taken = (*outer.mapped, placement.axis), (*outer.taken, *placement.mesh_axes)
    inner = dataclasses.replace(outer, mapped=mapped, mesh=outer.mesh or mesh, taken=taken)

    def one(*xs: Any) -> Any:
        with scope.entered(inner):
            return fn(*jax.tree.unflatten(structure, xs))

    vars(one)["__wrapped__"] = fn  # JAX's errors then name the user's function, and not this one
    with _unseen(taken):
        found, out_tree = Map.of(one, operands, shared, How(placement, lowering, mapped))
    collectives.require_no_mesh_axis(found.body.jaxpr, placement, mapped)
    if collectives.mentions(found.body.jaxpr, placement.axis):
        lowerings.require_together(placement, lowering)
    return found, out_tree


def _unseen(taken: Sequence[str]) -> Any:
    """Return a context in which no mesh is in force, unless some of its axes are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(size > 1 and name not in taken for name, size in mesh.shape.items()):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def structs(operands: Sequence[Any], shared: Sequence[bool]) -> list[jax.ShapeDtypeStruct]:
    """Return what one element sees of its operands."""
    return [jax_api.struct(x, 0 if s else 1) for x, s in zip(operands, shared, strict=True)]


# --- what it computes --------------------------------------------------------------------------------------------


def _avals(*operands: Any, body: ClosedJaxpr, size: int, summed: Sequence[bool], how: How, **_: Any) -> Any:
    effects = {e for e in body.effects if jax_api.axis_of(e) != how.placement.axis.name}
    return [_aval(a, s, how.placement) for a, s in zip(body.out_avals, summed, strict=True)], effects


def _aval(element: Any, is_summed: bool, placement: Placement) -> ShapedArray:
    shape = element.shape if is_summed else (placement.size, *element.shape)
    aval = jax_api.ShapedArray(shape, element.dtype, weak_type=element.weak_type)
    if not placement.is_explicit:
        return aval
    spec = [layout.without(entry, placement.mesh_axes) for entry in jax_api.sharding_spec(element)]
    if not is_summed:
        spec = [placement.mesh_axes if placement.divides else None, *spec]
    mesh = placing.abstract_mesh(placement)
    assert mesh is not None
    return aval.update(sharding=NamedSharding(mesh, P(*spec)))


def _computed(
    *operands: jax.Array,
    body: ClosedJaxpr,
    shared: Sequence[bool],
    summed: Sequence[bool],
    linear: Sequence[bool],
    how: How,
    **_: Any,
) -> list[jax.Array]:
    """Return the results, by the devices at hand."""
    elements = Elements(body, shared, summed, linear, placing.as_here(how.placement), how.lowering)
    found = elements.run(operands)
    return [jax_api.weak(y) if a.weak_type else y for y, a in zip(found, body.out_avals, strict=True)]


def _evaluated(*operands: Any, how: How, shared: Sequence[bool], **params: Any) -> list[jax.Array]:
    """On concrete arrays: by a program that is found by its structure, and compiled if there is none."""
    given = {"how": how, "shared": shared, **params}
    key = structure.key({name: value for name, value in given.items() if name != "devices"})

    def compiled() -> Callable[..., Any]:
        return jax.jit(functools.partial(_computed, **{**given, "body": jax_api.with_copies(params["body"])}))

    run, placement = structure.kept(key, compiled), how.placement
    operands = tuple(arrays.settle(x, placement, rows=not s) for x, s in zip(operands, shared, strict=True))
    return run(*operands)


def lies_over(jaxpr: jax_api.Jaxpr, name: str) -> bool:
    """Return whether the elements of a map in a program lie over a mesh axis of this name."""
    return any(
        (eqn.primitive is map_p and name in eqn.params["how"].placement.mesh_axes)
        or any(lies_over(sub, name) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


# --- its derivatives ---------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], live: Sequence[bool], tangents: Sequence[Any], **params: Any) -> Any:
    """Results, which of them have tangents, and these; ``tangents`` are those of the ``live`` operands."""
    body, how, shared, summed = params["body"], params["how"], params["shared"], params["summed"]
    number = len(summed)
    if collectives.mentions(body.jaxpr, how.placement.axis):
        branches.refuse_uneven(body, [not s for s in shared], how.placement.axis, how.names)
    moving = [jnp.issubdtype(a.dtype, jnp.inexact) for a in body.out_avals]

    def of_live(args: Sequence[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Return the body as a function of the live arguments: the results that move, and those that do not."""

        def function(*some: Any) -> tuple[list[Any], list[Any]]:
            given = iter(some)
            own = [next(given) if is_live else x for x, is_live in zip(args, live, strict=True)]
            found = jax_api.evaluate(body, own, lambda eqn: eqn.primitive.name == "custom_vmap_call")
            return _taken(found, moving), _taken(found, [not moves for moves in moving])

        return function

    trees: list[Any] = []

    def forward(*args: Any) -> list[Any]:
        moved, tangent, still = jax.linearize(of_live(args), *_taken(args, live), has_aux=True)
        leaves, tree = jax.tree.flatten(tangent)
        trees.append(tree)
        ours, others = iter(moved), iter(still)
        return [*(next(ours if moves else others) for moves in moving), *leaves]

    def again(*args: Any) -> list[Any]:
        own = args[: len(primals)]
        return jax.jvp(of_live(own), tuple(_taken(own, live)), tuple(args[len(primals) :]), has_aux=True)[1]

    def linear(*args: Any) -> list[Any]:
        return jax.tree.unflatten(trees[-1], args[: len(residuals)])(*args[len(residuals) :])

    traced, _ = Map.of(forward, primals, shared, how)
    if lowerings.keeps_nothing(how.placement):  # nothing is kept: the derivative runs the body again
        kept = jax_api.dce(traced.body, traced.body.jaxpr.outvars[:number])[0]
        results = dataclasses.replace(traced, body=kept).bind(summed)
        residuals, linear = list(zip(primals, shared, strict=True)), again
    else:
        results, residuals = _with_residuals(traced, summed)
    operands = [*(x for x, _ in residuals), *tangents]
    sides = [*(is_shared for _, is_shared in residuals), *_taken(shared, live)]
    return results[:number], moving, Map.of(linear, operands, sides, how)[0].bind(_taken(summed, moving))


def _taken(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [value for value, take in zip(values, which, strict=True) if take]


def _with_residuals(traced: Map, summed: Sequence[bool]) -> tuple[list[jax.Array], list[tuple[Any, bool]]]:
    """Run a forward map; return its results, and each residual with whether it is shared.

    Residuals that are operands are the operands; those that depend on nothing that differs between elements are
    computed once, outside of the map.
    """
    closed, number, operands = traced.body, len(summed), traced.operands
    jaxpr = closed.jaxpr
    given = dict(zip(jaxpr.invars, zip(operands, traced.shared, strict=True), strict=True))
    varying = {v for v, (_, is_shared) in given.items() if not is_shared}
    for eqn in jaxpr.eqns:
        if eqn.effects or any(v in varying for v in eqn.invars if not isinstance(v, jax_api.Literal)):
            varying.update(eqn.outvars)

    def is_known(v: Any) -> bool:
        return not isinstance(v, jax_api.Literal) and v in given

    def differs(v: Any) -> bool:
        return not isinstance(v, jax_api.Literal) and v in varying

    made = [v for v in jaxpr.outvars[number:] if not is_known(v)]
    rows, once = [v for v in made if differs(v)], [v for v in made if not differs(v)]
    kept = dataclasses.replace(traced, body=jax_api.dce(closed, [*jaxpr.outvars[:number], *rows])[0])
    found = kept.bind([*summed, *[False] * len(rows)])
    values = jax_api.jaxpr_as_fun(jax_api.dce(closed, once, effects=False)[0])(*operands) if once else []
    ours, theirs = iter(found[number:]), iter(values)
    return found, [
        given[v] if is_known(v) else (next(ours), False) if differs(v) else (next(theirs), True)
        for v in jaxpr.outvars[number:]
    ]


def _transpose(
    cts: Sequence[Any], live: Sequence[bool], operands: Sequence[Any], moves: Sequence[bool], **params: Any
) -> Any:
    """Return the cotangents of the linear operands, which are given as shapes, from ``cts`` of the ``live`` results."""
    body, how, shared, summed = params["body"], params["how"], params["shared"], params["summed"]
    fn = jax_api.jaxpr_as_fun(body)
    is_given = [not moving for moving in moves]
    known, known_shared = _taken(operands, is_given), _taken(shared, is_given)
    sought = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in _taken(body.in_avals, moves)]

    def back(*args: Any) -> list[Any]:
        def forward(*xs: Any) -> list[Any]:
            ours, given = iter(xs), iter(args[: len(known)])
            return _taken(fn(*(next(ours if moving else given) for moving in moves)), live)

        return list(jax.linear_transpose(forward, *sought)(list(args[len(known) :])))

    given, sides = [*known, *cts], [*known_shared, *_taken(summed, live)]
    # A rule of the user's may not be linear, and a branch per element has no transpose after vmap.
    is_plain = not jax_api.holds(body.jaxpr, "custom_lin", "cond")
    transposed, _ = Map.of(back, given, sides, how)
    return transposed.bind(_taken(shared, moves), [*[False] * len(known), *[is_plain] * len(cts)])


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
        branches.refuse_uneven(body, [not s for s in shared], how.placement.axis, how.names)
    fn, in_axes = jax_api.jaxpr_as_fun(body), [None if d is None else 0 for d in dims]
    differ = varying.batched(body, in_axes, size, name, how.names)
    out_axes = [0 if differs else None for differs in differ]

    def over(*args: Any) -> list[Any]:  # with a number of its own, as no operand may differ
        every = jax.vmap(lambda _, *xs: fn(*xs), (0, *in_axes), out_axes, axis_size=size, axis_name=name)
        return list(every(jnp.arange(size), *args))

    found = Map.of(over, ahead, shared, how)[0].bind(summed, params["linear"])
    return found, [None if not differs else 0 if s else 1 for differs, s in zip(differ, summed, strict=True)]


map_p = jax_api.define_map("px_map", _avals, _computed, _evaluated, _jvp, _transpose, _batched)
