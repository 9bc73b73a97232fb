"""How one device runs its several elements: the choices, and which one is taken if none is named.

====================  =============================================================================================
``"vmap"``            one body, vectorised over the elements. Best wherever the vectorised operation is as good
                      as the single one: matrix products, elementwise work, small bodies.
``"unroll"``          the body once per element, in one program. Best for convolutions with weights per element on
                      CPU: vectorised they become a grouped convolution, several times slower. Compile time grows
                      with the number of elements.
``"dispatch"``        one executable for one element, called once per element on the element's device,
                      asynchronously. Compiles least and gives each element the whole machine; only on concrete
                      values, so not under ``jit`` or ``grad``.
``"auto"``            ``"unroll"`` for up to 16 convolutional elements per device on CPU, else ``"vmap"``.
====================  =============================================================================================

``at_once=k`` goes with all of them: elements are run in turns of at most ``k``, and nothing but a turn's inputs is
kept for its derivative. Elements that exchange values are always vectorised, since all must be under way together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from paraxis._core import collectives, cost, jax_api, scope, summing
from paraxis._core.errors import LoweringError
from paraxis._core.layout import Placement

Lowering = Literal["auto", "vmap", "unroll", "dispatch"]

_UNROLL_AT_MOST = 16  # elements per device; beyond it compile time outgrows what unrolling saves


def check(verb: str, lowering: str) -> None:
    if lowering not in get_args(Lowering):
        raise LoweringError(
            f"{verb}: lowering must be one of {', '.join(map(repr, get_args(Lowering)))}, got {lowering!r}; "
            f"leave it out for the default"
        )


@dataclasses.dataclass(frozen=True)
class Element:
    """One element's function as a jaxpr: flat arguments in, flat results out."""

    jaxpr: jax_api.ClosedJaxpr
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


def run(
    one: Element, placement: Placement, lowering: Lowering, leaves: Sequence[jax.Array], shared: Sequence[bool]
) -> list[jax.Array]:
    """Run a device's elements. Shared leaves have one element's shape, the others ``(num_local, ...)``.

    Returns:
        The results, each ``(num_local, ...)``.
    """
    rows, arguments = _split(leaves, shared)
    if one.communicates:
        return _in_step(one, placement, lowering, arguments, rows)
    several = _several(one, placement, lowering, arguments)
    if placement.num_chunks == 1:
        return several(rows)
    parts = [_part(x, placement) for x in rows]
    bounded = jax.checkpoint(several, prevent_cse=False)
    _, results = jax.lax.scan(lambda _, part: (None, bounded(part)), None, parts, length=placement.num_chunks)
    return [y.reshape(placement.num_local, *y.shape[2:]) for y in results]


def sums_preferred(one: Element, placement: Placement, lowering: Lowering, shared: Sequence[bool]) -> bool:
    """Whether to take the sum over elements by :func:`run_sum`, which runs the elements once more.

    It costs less than the elements' results, or keeps none of them. What has effects is not run once more.
    """
    return not one.jaxpr.effects and (placement.num_chunks > 1 or _cut(one, placement, lowering, shared) is not None)


def run_sum(
    one: Element,
    placement: Placement,
    lowering: Lowering,
    leaves: Sequence[jax.Array],
    shared: Sequence[bool],
    term: summing.Term,
    real: jax.Array | None,
    extras: Sequence[jax.Array],
) -> list[jax.Array]:
    """Run a device's elements and keep only the sum of ``term`` over the real ones, for each result.

    ``real`` (``None``: all are) and ``extras`` are ``(num_local,)``.
    """
    rows, arguments = _split(leaves, shared)
    complex_weights = term.weighted and jnp.iscomplexobj(extras[-1])
    cut = None if complex_weights else _cut(one, placement, lowering, shared)  # a product takes factors of one dtype
    several = _several(one, placement, lowering, arguments)

    def turn(rows: Sequence[jax.Array], real: jax.Array | None, extras: Sequence[jax.Array]) -> list[jax.Array]:
        if cut is None:
            return [summing.total(y, real, term, extras) for y in several(rows)]
        head = jax_api.jaxpr_as_fun(cut.head)
        out_axes = [0 if depends else None for _, depends in cut.frontier]
        values = jax.vmap(lambda *row: head(*arguments(row)), axis_size=placement.chunk, out_axes=out_axes)(*rows)
        return cut.sums(values, placement.chunk, real, term, extras)

    if placement.num_chunks == 1:
        return turn(rows, real, extras)
    parts = jax.tree.map(lambda x: _part(x, placement), (rows, real, list(extras)))
    bounded = jax.checkpoint(turn, prevent_cse=False)
    shapes = jax.eval_shape(turn, *jax.tree.map(lambda x: x[0], parts))
    zeros = [jnp.zeros(y.shape, y.dtype) for y in shapes]

    def step(totals: list[jax.Array], part: Any) -> tuple[list[jax.Array], None]:
        return [total + y for total, y in zip(totals, bounded(*part), strict=True)], None

    return jax.lax.scan(step, zeros, parts, length=placement.num_chunks)[0]


def _cut(one: Element, placement: Placement, lowering: Lowering, shared: Sequence[bool]) -> summing.Split | None:
    if one.communicates or _choose(one, placement, lowering) != "vmap":
        return None
    return summing.split(one.jaxpr, [not is_shared for is_shared in shared])


def _split(
    leaves: Sequence[jax.Array], shared: Sequence[bool]
) -> tuple[list[jax.Array], Callable[[Sequence[Any]], list[Any]]]:
    """The leaves that have rows, and how to make an element's arguments of its row of each."""
    constant = [x for x, is_shared in zip(leaves, shared, strict=True) if is_shared]

    def arguments(row: Sequence[Any]) -> list[Any]:
        ours, theirs = iter(row), iter(constant)
        return [next(theirs) if is_shared else next(ours) for is_shared in shared]

    return [x for x, is_shared in zip(leaves, shared, strict=True) if not is_shared], arguments


def _several(
    one: Element, placement: Placement, lowering: Lowering, arguments: Callable[[Sequence[Any]], list[Any]]
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """How the elements of one turn are run: rows ``(chunk, ...)`` → results ``(chunk, ...)``."""

    def single(*row: Any) -> list[Any]:
        return jax_api.jaxpr_as_fun(one.jaxpr)(*arguments(row))

    count = placement.chunk
    if _choose(one, placement, lowering) == "unroll":
        return lambda rows: _unrolled(single, rows, count)
    return lambda rows: _vectorised(single, rows, count)


def _part(x: jax.Array, placement: Placement) -> jax.Array:
    return x.reshape(placement.num_chunks, placement.chunk, *x.shape[1:])


def _choose(one: Element, placement: Placement, lowering: Lowering) -> Lowering:
    if lowering != "auto":
        return lowering
    few = placement.num_chunks == 1 and placement.chunk <= _UNROLL_AT_MOST
    return "unroll" if few and jax.default_backend() == "cpu" and cost.convolves(one.jaxpr.jaxpr) else "vmap"


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
    arguments: Callable[[Sequence[Any]], list[Any]],
    rows: Sequence[jax.Array],
) -> list[jax.Array]:
    name = placement.axis.name
    if placement.num_chunks > 1:
        raise LoweringError(
            f"axis {name!r} has at_once={placement.axis.at_once}, so its elements run in turns and cannot exchange "
            f"values; leave at_once out, or reduce after the map: px.reduce_mean(px.map_fn(…), {name!r})"
        )
    if lowering in ("unroll", "dispatch"):
        raise LoweringError(
            f"lowering={lowering!r} runs the elements of axis {name!r} apart, so they cannot exchange values; "
            f"write lowering='vmap', or leave it out"
        )
    exchange = collectives.Exchange.of(placement)

    def together(*row: Any) -> list[Any]:
        return collectives.evaluate(one.jaxpr, arguments(row), exchange)

    if exchange.local is None:
        return [jnp.asarray(y)[None] for y in together(*(x[0] for x in rows))]
    return jax.vmap(together, axis_size=placement.num_local, axis_name=exchange.local)(*rows)
