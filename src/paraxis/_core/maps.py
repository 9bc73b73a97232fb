"""A map as a JAX primitive, ``px_map``, with all its rules.

Its parameters say what is mapped: ``body``, the jaxpr of one element, traced with the names of all mapped axes bound
to the logical ones, everything it closes over made an operand; the axis and its size; which operands are ``shared``
(one value for all elements) and which results are ``summed`` (over the elements; the others have a row for each).
They do not say where: that is ``how``, which only the lowering reads, and ``devices``, a jaxpr that does nothing but
name the mesh, since ``jit`` looks for meshes there. ``recipe`` may hold a cheaper way to the same results.

The rules are public transformations of the body. A forward map returns what its derivative needs besides (the
leaves of what ``jax.linearize`` returns), unless elements run in turns: then nothing is kept, and the derivative runs
the body again. The transpose of a shared operand is a result that is summed: the all-reduce of a gradient, and there
is no other.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from paraxis._axes import arrays, layout, placing, scope
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._core import collectives, lowerings, primitives
from paraxis._core.lowerings import Lowering, TransposeOf
from paraxis._jax import jax_api, replay, structure, varying
from paraxis._jax.jax_api import ClosedJaxpr, ShapedArray

Recipe = TransposeOf | None


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
        return {**sizes, **collectives.sizes(self.mapped)}

    def __repr__(self) -> str:  # a program's text is the same on any devices
        return self.lowering


@dataclasses.dataclass(frozen=True)
class Body:
    """One element's function, traced: a jaxpr without constants, which are its first arguments."""

    jaxpr: ClosedJaxpr
    consts: Sequence[Any]
    structure: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], structs: Sequence[Any], shared: Sequence[bool], how: How) -> "Body":
        """Trace ``fn`` with flat arguments of these shapes, of which some are ``shared``."""
        jaxpr, out_tree = jax_api.trace(fn, structs, how.names)
        jaxpr, consts = jax_api.without_constants(jaxpr)
        varies = [*[False] * len(consts), *(not is_shared for is_shared in shared)]
        jaxpr = collectives.differentiable(jaxpr, how.mapped, varies)
        return cls(jaxpr, consts, out_tree)


def bind(
    body: Body,
    operands: Sequence[Any],
    shared: Sequence[bool],
    how: How,
    summed: Sequence[bool] | None = None,
    recipe: Recipe = None,
) -> list[jax.Array]:
    """Return a map of a traced body: its flat results."""
    placement, jaxpr = how.placement, body.jaxpr
    operands = [*body.consts, *operands]
    shared = [*[True] * len(body.consts), *shared]
    if recipe is None:  # then nobody else counts on the order of operands
        jaxpr, read = jax_api.without_unread(jaxpr)
        operands, shared = _taken(operands, read), _taken(shared, read)
    return map_p.bind(
        *operands,
        body=jaxpr,
        axis=placement.axis.name,
        size=placement.size,
        shared=tuple(shared),
        summed=tuple(summed) if summed is not None else (False,) * len(body.jaxpr.out_avals),
        how=how,
        recipe=recipe,
        devices=placing.named_devices(placement),
    )


def traced(
    fn: Callable[..., Any],
    structure: Any,
    operands: Sequence[Any],
    shared: Sequence[bool],
    placement: Placement,
    lowering: Lowering = "auto",
) -> tuple[Body, How]:
    """Return the body of a map of ``fn`` along an axis; ``operands`` are the leaves of its arguments.

    Raises:
        LoweringError, CollectiveError: as :func:`check_exchange`.
    """
    mesh = placing.abstract_mesh(placement) if placement.axis.mesh is not None else None
    inner = scope.within(placement.axis, mesh, placement.mesh_axes)
    how = How(placement, lowering, inner.mapped)

    def one(*xs: Any) -> Any:
        with scope.entered(inner):
            return fn(*jax.tree.unflatten(structure, xs))

    vars(one)["__wrapped__"] = fn  # JAX's errors then name the user's function, and not this one
    with placing.in_force(inner.mesh):
        body = Body.of(one, structs(operands, shared), shared, how)
    check_exchange(body, how)
    return body, how


def structs(operands: Sequence[Any], shared: Sequence[bool]) -> list[jax.ShapeDtypeStruct]:
    """Return what one element sees of its operands."""
    return [jax_api.typed_struct(x) if s else jax_api.element_struct(x) for x, s in zip(operands, shared, strict=True)]


def check_exchange(body: Body, how: How) -> None:
    """Refuse collectives that cannot be carried out.

    Raises:
        CollectiveError: if the body names a mesh axis.
        LoweringError: if its elements exchange values, and are not all under way together.
    """
    if collectives.exchanges(body.jaxpr.jaxpr, how.placement, how.mapped):
        lowerings.require_together(how.placement, how.lowering)


def sums_preferred(body: Body, shared: Sequence[bool], how: How) -> bool:
    """Return whether sums over the elements are better taken by a map of their own."""
    return lowerings.sums_preferred(body.jaxpr, how.placement, how.lowering, [*[True] * len(body.consts), *shared])


# --- what it computes --------------------------------------------------------------------------------------------


def _avals(*operands: Any, body: ClosedJaxpr, size: int, summed: Sequence[bool], how: How, **_: Any) -> Any:
    own = collectives.sizes(how.mapped[-1:])
    effects = {e for e in body.effects if getattr(e, "name", None) not in own}
    return [_aval(a, s, how.placement) for a, s in zip(body.out_avals, summed, strict=True)], effects


def _aval(element: Any, is_summed: bool, placement: Placement) -> ShapedArray:
    shape = element.shape if is_summed else (placement.size, *element.shape)
    aval = jax_api.ShapedArray(shape, element.dtype, weak_type=element.weak_type)
    if not placement.is_explicit:
        return aval
    spec = [_without(entry, placement.mesh_axes) for entry in jax_api.sharding_spec(element)]
    if not is_summed:
        spec = [placement.mesh_axes if placement.size % placement.num_devices == 0 else None, *spec]
    mesh = placing.abstract_mesh(placement)
    assert mesh is not None
    return aval.update(sharding=NamedSharding(mesh, P(*spec)))


def _without(entry: Any, names: Sequence[str]) -> Any:
    return None if entry in names or (isinstance(entry, tuple) and not set(entry).isdisjoint(names)) else entry


def computed(
    *operands: jax.Array,
    body: ClosedJaxpr,
    shared: Sequence[bool],
    summed: Sequence[bool],
    how: How,
    recipe: Recipe,
    **_: Any,
) -> list[jax.Array]:
    """Return the results, by the devices at hand."""
    placement = placing.as_here(how.placement)
    layout.require_callable(body.jaxpr, placement)
    inner, names = scope.Scope((), how.mapped), collectives.sizes(how.mapped)

    def element(body: ClosedJaxpr, avals: Sequence[Any]) -> lowerings.Element:
        return lowerings.element(lambda *xs: replay.here(body, xs, names, _nested), placement, inner, avals)

    rests = placement.has_idle_device and _stays_within(body, how)
    branch = not lowerings.slow_in_branches(body.jaxpr)

    def rows(*blocks: jax.Array) -> list[jax.Array]:
        leaves = [
            block[0] if is_shared else layout.fill(block, placement, safe=not rests)
            for block, is_shared in zip(blocks, shared, strict=True)
        ]
        avals = [jax_api.element_struct(block) for block in blocks]
        if recipe is not None:
            linear = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in recipe.body.in_avals[recipe.known :]]
            one = element(recipe.body, [*avals[: recipe.known], *linear])
            return lowerings.run_transposed(one, recipe, linear, placement, how.lowering, leaves, shared)
        return lowerings.run(element(body, avals), placement, how.lowering, leaves, shared, summed)

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        results = layout.unless_idle(rows, placement, *blocks, branch=branch) if rests else rows(*blocks)
        return [y[None] if is_summed else y for y, is_summed in zip(results, summed, strict=True)]

    laid_out = [
        primitives.per_device(x, placement) if is_shared else layout.pad(x, placement, safe=not rests)
        for x, is_shared in zip(operands, shared, strict=True)
    ]
    found, count = layout.run_per_device(on_device, placement, laid_out), placement.num_devices
    results = [
        primitives.reduce("sum", y, axis=placement.axis.name, size=count) if s else layout.unpad(y, placement)
        for y, s in zip(found, summed, strict=True)
    ]
    return [jax_api.weak(y) if a.weak_type else y for y, a in zip(results, body.out_avals, strict=True)]


def _stays_within(body: ClosedJaxpr, how: How) -> bool:
    """Return whether a device's elements can be left out: they exchange nothing, among themselves or inside."""
    if any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in body.out_avals):  # PRNG keys have no zero
        return False
    names = {axis.name for axis in how.mapped} | set(how.placement.mesh.axis_names if how.placement.mesh else ())
    return not any(collectives.named_in(eqn, names) or collectives.nests(eqn) for eqn in body.jaxpr.eqns)


def _nested(eqn: jax_api.JaxprEqn, operands: Sequence[Any]) -> list[jax.Array]:
    return computed(*operands, **eqn.params)


_compiled: structure.Recent[Callable[..., Any]] = structure.Recent(512)


def _evaluated(*operands: Any, how: How, shared: Sequence[bool], **params: Any) -> list[jax.Array]:
    """On concrete arrays: by a program that is found by its structure, and compiled if there is none."""
    given = {"how": how, "shared": shared, **params}
    key = structure.key({name: value for name, value in given.items() if name != "devices"})
    run = _compiled.get(key, lambda: jax.jit(functools.partial(computed, **_kept(given))))
    placement = how.placement
    operands = tuple(arrays.settle(x, placement, rows=not s) for x, s in zip(operands, shared, strict=True))
    if placement.mesh_axes and (any(params["summed"]) or collectives.mentions(params["body"].jaxpr, placement.axis)):
        return arrays.ready(run(*arrays.ready(operands)))
    return run(*operands)


def _kept(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that nobody can change from outside."""
    recipe = params["recipe"]
    own = None if recipe is None else recipe._replace(body=jax_api.with_copies(recipe.body))
    return {**params, "body": jax_api.with_copies(params["body"]), "recipe": own}


def lies_over(jaxpr: jax_api.Jaxpr, name: str) -> bool:
    """Return whether the elements of a map in a program lie over a mesh axis of this name."""
    return any(
        (eqn.primitive is map_p and name in eqn.params["how"].placement.mesh_axes)
        or any(lies_over(sub, name) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


# --- its derivatives ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """A map that is differentiated: ``live`` operands have tangents, ``moving`` results get one."""

    body: ClosedJaxpr
    how: How
    shared: Sequence[bool]
    summed: Sequence[bool]
    live: Sequence[bool]

    @property
    def moving(self) -> list[bool]:
        return [jnp.issubdtype(a.dtype, jnp.inexact) for a in self.body.out_avals]

    def of_live(self, args: Sequence[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Return a function of the live arguments alone: the results that move, and those that do not."""
        body = self.body

        def is_batched(eqn: jax_api.JaxprEqn) -> bool:  # has a rule for batches of its own, and no derivative
            return eqn.primitive.name == "custom_vmap_call"

        def fn(*args: Any) -> list[Any]:
            return jax_api.evaluate(body, args, is_batched)

        def function(*some: Any) -> tuple[list[Any], list[Any]]:
            given = iter(some)
            results = fn(*(next(given) if is_live else x for x, is_live in zip(args, self.live, strict=True)))
            return _taken(results, self.moving), _taken(results, [not moves for moves in self.moving])

        return function

    def bind(self, fn: Callable[..., list[Any]], given: Sequence[tuple[Any, bool]], tangents: Sequence[Any]) -> Any:
        """Return a map of what is given, and whether it is shared, and of the tangents."""
        operands = [*(x for x, _ in given), *tangents]
        sides = [*(is_shared for _, is_shared in given), *_taken(self.shared, self.live)]
        return bind(Body.of(fn, structs(operands, sides), sides, self.how), operands, sides, self.how, self._sums)

    @property
    def _sums(self) -> list[bool]:
        return _taken(self.summed, self.moving)


def _jvp(primals: Sequence[Any], live: Sequence[bool], tangents: Sequence[Any], **params: Any) -> Any:
    """Results, which of them have tangents, and these; ``tangents`` are those of the ``live`` operands."""
    of = _Derivative(params["body"], params["how"], params["shared"], params["summed"], live)
    if of.how.placement.num_chunks > 1:
        return _results_in_turns(of, primals, params), of.moving, _tangents_in_turns(of, primals, tangents)
    results, residuals, tree = _forward(of, primals)

    def linear(*args: Any) -> list[Any]:
        return jax.tree.unflatten(tree, args[: len(residuals)])(*args[len(residuals) :])

    return results, of.moving, of.bind(linear, residuals, tangents)


def _results_in_turns(of: _Derivative, primals: Sequence[Any], params: Any) -> list[jax.Array]:
    """Return the results; a rule of the user's gives its own, since their derivative may be taken again."""
    if not any(jax_api.holds(of.body.jaxpr, name) for name in jax_api.RULED):
        return map_p.bind(*primals, **params)

    def by_rules(*args: Any) -> list[Any]:
        live = tuple(_taken(args, of.live))
        zeros = tuple(jnp.zeros_like(x) for x in live)
        moved, _, others = jax.jvp(of.of_live(args), live, zeros, has_aux=True)
        return _merged(of.moving, moved, others)

    traced = Body.of(by_rules, structs(primals, of.shared), of.shared, of.how)
    kept = dataclasses.replace(traced, jaxpr=jax_api.pruned(traced.jaxpr, traced.jaxpr.jaxpr.outvars))
    return bind(kept, primals, of.shared, of.how, of.summed)


def _merged(which: Sequence[bool], these: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    ahead, still = iter(these), iter(others)
    return [next(ahead if takes else still) for takes in which]


def _tangents_in_turns(of: _Derivative, primals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
    """Keep nothing: the body runs again."""
    count = len(primals)

    def tangent(*args: Any) -> list[Any]:
        own = args[:count]
        return jax.jvp(of.of_live(own), tuple(_taken(own, of.live)), tuple(args[count:]), has_aux=True)[1]

    return of.bind(tangent, list(zip(primals, of.shared, strict=True)), tangents)


def _forward(of: _Derivative, primals: Sequence[Any]) -> tuple[list[jax.Array], list[tuple[Any, bool]], Any]:
    """Return the results; what the derivative needs, and whether it is shared; and how that is put together."""
    trees: list[Any] = []

    def forward(*args: Any) -> list[Any]:
        moved, linear, others = jax.linearize(of.of_live(args), *_taken(args, of.live), has_aux=True)
        leaves, tree = jax.tree.flatten(linear)
        trees.append(tree)
        return [*_merged(of.moving, moved, others), *leaves]

    traced, number = Body.of(forward, structs(primals, of.shared), of.shared, of.how), len(of.summed)
    operands = [*traced.consts, *primals]
    sides = [True] * len(traced.consts) + list(of.shared)
    kept, residuals = _residuals(traced.jaxpr, operands, sides, number, of.how.mapped)
    summed = [*of.summed, *[False] * (len(kept.out_avals) - number)]
    found = bind(dataclasses.replace(traced, jaxpr=kept), primals, of.shared, of.how, summed)
    rows = iter(found[number:])
    whole = [(next(rows), False) if is_shared is None else (value, is_shared) for value, is_shared in residuals]
    return found[:number], whole, trees[-1]


def _taken(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [value for value, take in zip(values, which, strict=True) if take]


def _residuals(
    traced: ClosedJaxpr, operands: Sequence[Any], shared: Sequence[bool], number: int, mapped: Sequence[Axis]
) -> tuple[ClosedJaxpr, list[tuple[Any, bool | None]]]:
    """Return a forward body without the residuals that are no rows of its own, and all residuals.

    Those that are operands are the operands; those that depend on nothing that differs between elements are computed
    once, outside the map. For each: its value and whether it is shared; ``(None, None)``: a row of the map's results.
    """
    jaxpr = traced.jaxpr
    names = {axis.name for axis in mapped}
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    varying = {v for v, s in zip(jaxpr.invars, shared, strict=True) if not s}
    for eqn in jaxpr.eqns:
        if (
            eqn.effects
            or collectives.named_in(eqn, names)
            or any(v in varying for v in eqn.invars if not isinstance(v, jax_api.Literal))
        ):
            varying.update(eqn.outvars)
    kept, once = list(jaxpr.outvars[:number]), []
    sides: list[tuple[Any, bool | None] | None] = []  # None: computed once
    for v in jaxpr.outvars[number:]:
        literal = isinstance(v, jax_api.Literal)
        if not literal and v in places:
            sides.append((operands[places[v]], shared[places[v]]))
        elif not literal and v in varying:
            kept.append(v)
            sides.append((None, None))
        else:
            once.append(v)
            sides.append(None)
    values = iter(
        jax_api.evaluate(jax_api.pruned(traced, once, effects=False), operands, lambda _: False) if once else []
    )
    return jax_api.pruned(traced, kept), [(next(values), True) if side is None else side for side in sides]


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _transpose(
    cts: Sequence[Any], live: Sequence[bool], operands: Sequence[Any], linear: Sequence[bool], **params: Any
) -> Any:
    """Return the cotangents of the linear operands, which are given as shapes, from ``cts`` of the ``live`` results."""
    body, how, shared, summed = params["body"], params["how"], params["shared"], params["summed"]
    fn = jax_api.jaxpr_as_fun(body)
    given = [not is_linear for is_linear in linear]
    known, known_shared = _taken(operands, given), _taken(shared, given)
    sought, sought_shared = _taken(body.in_avals, linear), tuple(_taken(shared, linear))

    def forward(*args: Any) -> list[Any]:
        given, moved = iter(args[: len(known)]), iter(args[len(known) :])
        results = fn(*(next(moved) if is_linear else next(given) for is_linear in linear))
        return _taken(results, live)

    like = [*structs(known, known_shared), *map(_struct, sought)]
    ct_summed = tuple(_taken(summed, live))
    body = Body.of(forward, like, [*known_shared, *sought_shared], how)
    return _transposed(body, known, known_shared, sought_shared, cts, ct_summed, how)


def _transposed(
    linear: Body,
    known: Sequence[Any],
    known_shared: Sequence[bool],
    sought_shared: tuple[bool, ...],
    cts: Sequence[Any],
    ct_summed: tuple[bool, ...],
    how: How,
) -> list[jax.Array]:
    """Return the transpose of a linear body: a map of known operands and cotangents; what was shared is summed."""
    known, known_shared = [*linear.consts, *known], [*[True] * len(linear.consts), *known_shared]
    fn, count = jax_api.jaxpr_as_fun(linear.jaxpr), len(known)
    sought = [_struct(a) for a in linear.jaxpr.in_avals[count:]]

    def back(*args: Any) -> list[Any]:
        return list(jax.linear_transpose(lambda *ts: list(fn(*args[:count], *ts)), *sought)(list(args[count:])))

    operands, sides = [*known, *cts], [*known_shared, *ct_summed]
    body = Body.of(back, structs(operands, sides), sides, how)
    # What a rule of the user's gives has a transpose, and cannot be run; a branch per element has none after vmap.
    untold = body.consts or any(jax_api.holds(linear.jaxpr.jaxpr, name) for name in ("custom_lin", "cond"))
    recipe = None if untold else TransposeOf(linear.jaxpr, count, sought_shared, ct_summed)
    return bind(body, operands, sides, how, sought_shared, recipe)


# --- under vmap --------------------------------------------------------------------------------------------------


def _batched(
    operands: Sequence[Any], dims: Sequence[int | None], *, size: int, name: str | None, params: Any
) -> tuple[list[Any], list[Any]]:
    body, how, shared, summed = (params[k] for k in ("body", "how", "shared", "summed"))
    ahead = [
        x if d is None else jnp.moveaxis(x, d, 0 if s else 1) for x, d, s in zip(operands, dims, shared, strict=True)
    ]
    in_axes = [None if d is None else 0 for d in dims]
    differ = varying.batched(body, in_axes, size, name, collectives.sizes(how.mapped))
    out_dims = [None if not differs else 0 if s else 1 for differs, s in zip(differ, summed, strict=True)]
    if params["recipe"] is not None:
        return _transposed_batched(ahead, dims, size, name, params, differ), out_dims
    out_axes = [0 if differs else None for differs in differ]
    over = jax.vmap(jax_api.jaxpr_as_fun(body), in_axes=in_axes, out_axes=out_axes, axis_size=size, axis_name=name)
    return bind(Body.of(over, structs(ahead, shared), shared, how), ahead, shared, how, summed), out_dims


def _transposed_batched(
    operands: Sequence[Any],
    dims: Sequence[int | None],
    size: int,
    name: str | None,
    params: Any,
    differ: Sequence[bool],
) -> list[jax.Array]:
    """Transpose the batched linear body; what is equal in all of the batch is taken from the first."""
    how, shared, recipe = params["how"], params["shared"], params["recipe"]
    count = recipe.known
    in_axes = [None if d is None else 0 for d in dims[:count]]
    in_axes += [0] * (len(recipe.body.in_avals) - count)
    over = jax.vmap(jax_api.jaxpr_as_fun(recipe.body), in_axes=in_axes, axis_size=size, axis_name=name)
    cts = [
        jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:])) if d is None else x
        for x, d, at in zip(operands[count:], dims[count:], (0 if s else 1 for s in recipe.summed), strict=True)
    ]
    sought = [jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in recipe.body.in_avals[count:]]
    sides = [*shared[:count], *recipe.shared]
    linear = Body.of(over, [*structs(operands[:count], shared[:count]), *sought], sides, how)
    found = _transposed(linear, operands[:count], shared[:count], recipe.shared, cts, recipe.summed, how)
    return [
        y if differs else jax.lax.index_in_dim(y, 0, 0 if s else 1, keepdims=False)
        for y, differs, s in zip(found, differ, recipe.shared, strict=True)
    ]


map_p = jax_api.define_map("px_map", _avals, computed, _evaluated, _jvp, _transpose, _batched)
