"""The ways in which one device runs its several elements, and which one is taken if none is named.

====================  =============================================================================================
``"vmap"``            one body, vectorised over the elements. Best wherever the vectorised operation is as good
                      as the single one: matrix products, elementwise work, small bodies.
``"unroll"``          the body once per element, in one program. Best for convolutions with weights per element on
                      CPU: vectorised they become a grouped convolution, several times slower. Compile time grows
                      with the number of elements.
``"auto"``            ``"unroll"`` for up to 16 convolutional elements per device on CPU, else ``"vmap"``.
====================  =============================================================================================

``at_once=k`` goes with all of them: elements are run in turns of at most ``k``, and nothing but a turn's inputs is
kept for its derivative. Elements that exchange values are always vectorised, since all must be under way together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._axes import layout, placing, scope
from paraxis._axes.placing import Placement
from paraxis._core import collectives
from paraxis._jax import cost, jax_api, summing
from paraxis._jax.jax_api import ClosedJaxpr
from paraxis.errors import LoweringError

Lowering = Literal["auto", "vmap", "unroll"]

_UNROLL_AT_MOST = 16  # elements per device; beyond it compile time outgrows what unrolling saves


@dataclasses.dataclass(frozen=True)
class Element:
    """One element's function as a jaxpr: flat arguments in, flat results out."""

    jaxpr: ClosedJaxpr
    out_tree: Any
    communicates: bool


def element(fn: Callable[..., Any], placement: Placement, inner: scope.Scope, avals: Sequence[Any]) -> Element:
    """Trace the function of one element, with the names of all axes being mapped bound to the whole logical axes."""

    def one(*leaves: Any) -> Any:
        with scope.entered(inner):
            return fn(*leaves)

    jaxpr, out_tree = jax_api.trace(one, avals, collectives.sizes(inner.mapped))
    jaxpr = collectives.lifted(jaxpr, inner.mapped)
    return Element(jaxpr, out_tree, collectives.used(jaxpr.jaxpr, placement))


class TransposeOf(NamedTuple):
    """The same by transposing a linear body over all rows together, as its products and loops contract them best.

    Its first ``known`` arguments are given, and in the others, of which ``shared`` have no rows, it is linear;
    ``summed`` says which of its results are sums over the elements.
    """

    body: ClosedJaxpr
    known: int
    shared: tuple[bool, ...]
    summed: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class _Sides:
    """An element's arguments: which are ``shared``, with their values ``constant``; of the others it has a row."""

    shared: tuple[bool, ...]
    constant: Sequence[jax.Array]

    def arguments(self, row: Sequence[Any]) -> list[Any]:
        ours, theirs = iter(row), iter(self.constant)
        return [next(theirs) if is_shared else next(ours) for is_shared in self.shared]


Turn = Callable[[Sequence[jax.Array], jax.Array | None], list[jax.Array]]
"""Rows of one turn, and which of them are elements → results: rows, or sums over the elements."""


def run(
    one: Element,
    placement: Placement,
    lowering: Lowering,
    leaves: Sequence[jax.Array],
    shared: Sequence[bool],
    summed: Sequence[bool] = (),
) -> list[jax.Array]:
    """Run a device's elements. Shared leaves have one element's shape, the others ``(num_local, ...)``.

    Returns:
        The results: where ``summed``, the sum over the device's elements, else rows ``(num_local, ...)``.
    """
    summed = summed or (False,) * len(one.jaxpr.out_avals)
    rows, sides = _split(leaves, shared)
    return _in_turns(_turn(one, placement, lowering, sides, summed), rows, placement, summed)


def _turn(one: Element, placement: Placement, lowering: Lowering, sides: _Sides, summed: Sequence[bool]) -> Turn:
    several = _several(one, placement, lowering, sides)
    cut = None
    plain = not one.communicates and not jax_api.has_effects(one.jaxpr.jaxpr)
    if placement.chunk > 1 and any(summed) and plain and _choose(one, placement, lowering) == "vmap":
        cut = summing.split(one.jaxpr, [not is_shared for is_shared in sides.shared], summed)

    def turn(rows: Sequence[jax.Array], real: jax.Array | None) -> list[jax.Array]:
        if cut is None:
            return _summed(several(rows, real), summed, real)
        head = jax_api.jaxpr_as_fun(cut.head)
        out_axes = [0 if depends else None for _, depends in cut.frontier]
        values = jax.vmap(lambda *row: head(*sides.arguments(row)), axis_size=placement.chunk, out_axes=out_axes)(*rows)
        return cut.sums(values, placement.chunk, real, merge=placing.is_spread_alone(placement))

    return turn


def run_transposed(
    one: Element,
    recipe: TransposeOf,
    structs: Sequence[Any],
    placement: Placement,
    lowering: Lowering,
    leaves: Sequence[jax.Array],
    shared: Sequence[bool],
) -> list[jax.Array]:
    """Transpose a device's elements' linear function; ``structs`` are one element's linear arguments.

    The leaves are the known arguments and the cotangents of the results.
    """
    rows, _ = _split(leaves, shared)

    def turn(rows: Sequence[jax.Array], real: jax.Array | None) -> list[jax.Array]:
        given = _joined(leaves, rows, shared)
        known, cts = given[: recipe.known], given[recipe.known :]
        both = (*shared[: recipe.known], *recipe.shared)

        def forward(*ts: jax.Array) -> list[jax.Array]:
            rows, sides = _split([*known, *ts], both)
            return _summed(_several(one, placement, lowering, sides)(rows, real), recipe.summed, real)

        linear = [
            jax.ShapeDtypeStruct(x.shape if is_shared else (placement.chunk, *x.shape), x.dtype)
            for x, is_shared in zip(structs, recipe.shared, strict=True)
        ]
        live = [ct if s else summing.masked(real, ct) for ct, s in zip(cts, recipe.summed, strict=True)]

        def back(*cts: jax.Array) -> list[jax.Array]:
            return list(jax.linear_transpose(forward, *linear)(list(cts)))

        return summing.in_merged_products(back, *live) if placing.is_spread_alone(placement) else back(*live)

    return _in_turns(turn, rows, placement, recipe.shared)


def _summed(results: Sequence[jax.Array], which: Sequence[bool], real: jax.Array | None) -> list[jax.Array]:
    return [summing.total(y, real) if is_summed else y for y, is_summed in zip(results, which, strict=True)]


def _in_turns(turn: Turn, rows: Sequence[jax.Array], placement: Placement, summed: Sequence[bool]) -> list[jax.Array]:
    real = layout.real_rows(placement)
    if placement.num_chunks == 1:
        return turn(rows, real)
    parts = jax.tree.map(lambda x: _part(x, placement), (list(rows), real))
    bounded = jax.checkpoint(turn, prevent_cse=False)  # where a derivative is taken through it, of rows that are held
    shapes = jax.eval_shape(turn, *jax.tree.map(lambda x: x[0], parts))
    zeros = [jnp.zeros(y.shape, y.dtype) for y, is_summed in zip(shapes, summed, strict=True) if is_summed]

    def step(totals: list[jax.Array], part: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        found = list(zip(bounded(*part), summed, strict=True))
        sums = [y for y, is_summed in found if is_summed]
        added = [total + y for total, y in zip(totals, sums, strict=True)]
        return added, [y for y, is_summed in found if not is_summed]

    totals, stacks = jax.lax.scan(step, zeros, parts, length=placement.num_chunks)
    sums, whole = iter(totals), iter(stacks)
    return [next(sums) if is_summed else _whole(next(whole), placement) for is_summed in summed]


def _whole(parts: jax.Array, placement: Placement) -> jax.Array:
    return parts.reshape(placement.num_local, *parts.shape[2:])


def sums_preferred(body: ClosedJaxpr, placement: Placement, lowering: Lowering, shared: Sequence[bool]) -> bool:
    """Return whether sums over elements are better taken by a map of their own, which runs the elements once more.

    It costs less than the elements' results, or keeps none of them. What has effects is not run once more.
    """
    if jax_api.has_effects(body.jaxpr):
        return False
    if placement.num_chunks > 1:
        return True
    if collectives.mentions(body.jaxpr, placement.axis):
        return False
    if not scope.is_chunked() and _choose_for(body, placement, lowering) != "vmap":
        return False  # where chunks are traced, all of them must do the same, however few elements they have
    return summing.split(body, [not is_shared for is_shared in shared]) is not None


def _joined(leaves: Sequence[jax.Array], rows: Sequence[jax.Array], shared: Sequence[bool]) -> list[jax.Array]:
    """Return all leaves, with other rows."""
    ours = iter(rows)
    return [x if is_shared else next(ours) for x, is_shared in zip(leaves, shared, strict=True)]


def _split(leaves: Sequence[jax.Array], shared: Sequence[bool]) -> tuple[list[jax.Array], _Sides]:
    """Return the leaves that have rows, and how to make an element's arguments of its row of each."""
    constant = [x for x, is_shared in zip(leaves, shared, strict=True) if is_shared]
    return [x for x, is_shared in zip(leaves, shared, strict=True) if not is_shared], _Sides(tuple(shared), constant)


def _several(one: Element, placement: Placement, lowering: Lowering, sides: _Sides) -> Turn:
    """Return how the elements of one turn are run: rows ``(chunk, ...)`` → results ``(chunk, ...)``."""
    if one.communicates:
        return lambda rows, real: _in_step(one, placement, lowering, sides, rows)

    def single(*row: Any) -> list[Any]:
        return jax_api.jaxpr_as_fun(one.jaxpr)(*sides.arguments(row))

    def several(rows: Sequence[jax.Array], real: jax.Array | None) -> list[jax.Array]:
        if _choose(one, placement, lowering) == "vmap":
            return _vectorised(single, rows, placement.chunk)
        return _unrolled(single, rows, placement.chunk)

    return several


def _part(x: jax.Array, placement: Placement) -> jax.Array:
    return x.reshape(placement.num_chunks, placement.chunk, *x.shape[1:])


def _choose(one: Element, placement: Placement, lowering: Lowering) -> Lowering:
    return _choose_for(one.jaxpr, placement, lowering)


def _choose_for(body: ClosedJaxpr, placement: Placement, lowering: Lowering) -> Lowering:
    if lowering != "auto":
        return lowering
    few = placement.num_chunks == 1 and placement.chunk <= _UNROLL_AT_MOST
    return "unroll" if few and jax.default_backend() == "cpu" and cost.convolves(body.jaxpr) else "vmap"


def slow_in_branches(body: jax_api.Jaxpr) -> bool:
    """Return whether a body is better computed on zeros and dropped than left out by ``lax.cond``.

    XLA's CPU compiler rewrites only the convolutions of the main computation into a form that it runs fast: in a
    branch those of a gradient take 8 times as long. A loop may not end on zeros, and a callback sees them.
    """
    slow = jax.default_backend() == "cpu" and cost.convolves(body)
    return slow and not (jax_api.holds(body, "while") or jax_api.calls_back(body))


def _vectorised(single: Callable[..., list[Any]], rows: Sequence[jax.Array], count: int) -> list[jax.Array]:
    if count == 1:
        return [jnp.asarray(y)[None] for y in single(*(x[0] for x in rows))]
    return jax.vmap(single, axis_size=count)(*rows)


def _unrolled(single: Callable[..., list[Any]], rows: Sequence[jax.Array], count: int) -> list[jax.Array]:
    once = jax.jit(single)
    results = [once(*(x[i] for x in rows)) for i in range(count)]
    return [jnp.stack(ys) for ys in zip(*results, strict=True)]


def _in_step(
    one: Element,
    placement: Placement,
    lowering: Lowering,
    sides: _Sides,
    rows: Sequence[jax.Array],
) -> list[jax.Array]:
    require_together(placement, lowering)
    exchange = collectives.Exchange.of(placement)
    varies = [not is_shared for is_shared in sides.shared]
    uneven = collectives.uneven(one.jaxpr.jaxpr, varies, collectives.logical(placement.axis.name))

    def together(*row: Any) -> list[Any]:
        return collectives.evaluate(one.jaxpr, sides.arguments(row), exchange, uneven)

    if exchange.local is None:
        return [jnp.asarray(y)[None] for y in together(*(x[0] for x in rows))]
    return jax.vmap(together, axis_size=placement.num_local, axis_name=exchange.local)(*rows)


def require_together(placement: Placement, lowering: Lowering) -> None:
    """Elements that exchange values must be under way together.

    Raises:
        LoweringError: if they are not.
    """
    name = placement.axis.name
    if placement.num_chunks > 1:
        raise LoweringError(
            f"axis {name!r} has at_once={placement.axis.at_once}, so its elements run in turns and cannot exchange "
            f"values; leave at_once out, or reduce after the map: px.reduce_mean(px.map_fn(…), {name!r})"
        )
    if lowering == "unroll":
        raise LoweringError(
            f"lowering={lowering!r} runs the elements of axis {name!r} apart, so they cannot exchange values; "
            f"write lowering='vmap', or leave it out"
        )
