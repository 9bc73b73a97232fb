"""Least squares with an L1 penalty, by the columns that count.

Most coefficients are zero. A *working set* of columns holds those that are not, and those whose gradient exceeds the
penalty most. Of these the Gram matrix is computed, a map over blocks of rows and a sum; what follows needs no rows, is
the same on each device and exact but for rounding. Then one pass gives the gradient of all columns, and with it a bound
on what is left to gain: the duality gap. (Johnson and Guestrin, "Blitz", 2015; Massias, Gramfort and Salmon, "Celer",
2018.)

Of rows on disk, no columns are kept: a pass takes those it needs, and another one tells where the minimum led.

On the working set, a few accelerated proximal steps find which coefficients are zero; then a step of Newton's, for the
signs that these have, goes to the minimum if they are right, and as far as the penalised objective falls if not.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays
from paraxis._core.programs import Traced
from paraxis._host import threads
from paraxis.solve import _cut as cut, _progress as progress, _trees as trees
from paraxis.solve._linear import Block, Linear
from paraxis.solve._on_disk import OnDisk
from paraxis.solve._problem import Point
from paraxis.solve._progress import Progress
from paraxis.solve._rows import Rows, number_of
from paraxis.solve._search import noise
from paraxis.solve._solution import OptStep, attended, saved_run, watched
from paraxis.solve._status import Status
from paraxis.solve.objective import ridge

_SMALLEST = 256  # columns of a working set, if there are so many
_FEWEST = 64  # of them that change
_LARGEST = 4096  # whose Gram matrix is on every device
_STEPS = 10  # proximal ones between two looks at the gap
_LOOKS = 3  # at most, before a step of Newton's
_ROUNDS = 60  # at most, for one working set
_SHORTER = 8  # steps along Newton's direction, each half of the one before
_DAMPED, _UNDAMPED = 0.01, 1e-7  # the damping of Newton's steps where it begins, and where it ends
_SHARE = 0.1  # of the gap that a working set leaves, until it is the last
_FALL = 0.3  # of the greatest gradient: the penalty's strength that is minimised with next, if it is above the user's
_PATIENCE = 3  # iterations without progress before rounding is blamed


class _Set(NamedTuple):
    """Columns of a working set, in no order."""

    chosen: jax.Array  # which, (m,)
    columns: jax.Array  # (m, n); each device has its own rows. Of rows on disk (m, 0)
    gram: jax.Array  # (m, m)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "params", "iter_num", "value", "grad", "stepsize", "error", "status", "data_passes", "progress", "cache",
        "held", "num_used", "num_missing",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class WorkingSetState:
    """The state of a run, as :class:`ProximalGradientState`, with parameters; the error is the duality gap.

    ``held`` is the working set; ``num_used`` coefficients are not zero, and ``num_missing`` should not be.
    """

    params: jax.Array
    iter_num: jax.Array
    value: jax.Array
    grad: jax.Array
    stepsize: jax.Array
    error: jax.Array
    status: jax.Array
    data_passes: jax.Array
    progress: Progress
    cache: Any
    held: _Set
    num_used: jax.Array
    num_missing: jax.Array


@dataclasses.dataclass(frozen=True)
class WorkingSet:
    """Minimise ``mean(residual²) / 2 + l1 * |coef|₁ + l2 / 2 * |coef|²`` over coefficients ``(d,)``.

    The loop over working sets runs on the host. Their sizes, and by how much they change, are powers of two, and for
    each a program is compiled.

    Args:
        maxiter: stop after so many changes of the working set.
        tol: stop when the duality gap is at most this, or when rounding allows no more.
        verbose: as for :class:`ProximalGradient`.

    Communicates, if rows are spread over devices: per iteration one all-reduce of the new columns' products with the
    working set, one of ``(d,)`` and one of three scalars.
    """

    maxiter: int
    tol: float
    verbose: bool | progress.Watch = False

    def run(self, init_params: Any, l1: Any, l2: Any, data: Rows) -> OptStep:
        """Iterate until the duality gap is small.

        Args:
            init_params: coefficients to begin with, ``(d,)``.
            l1: above 0.
            l2: not negative.
            data: rows on devices.
        """
        return watched(self.verbose, arrays.on_auto_mesh, self._solved, init_params, l1, l2, data)

    def _solved(self, params: Any, l1: Any, l2: Any, data: Rows) -> OptStep:
        with attended() as passed:
            return self._advanced_to_the_end(passed, params, l1, l2, data)

    def _advanced_to_the_end(self, passed: Callable[[OptStep], OptStep], *operands: Any) -> OptStep:
        params, l1, l2, data = operands
        l1, l2, tol = (np.asarray(x, params.dtype) for x in (l1, l2, self.tol))
        begin = _begun if len(params) > _SMALLEST or isinstance(data.X, OnDisk) else _begun_with_all
        with threads.lapack_alone(_SMALLEST):
            state = arrays.ready(begin(params, l1, l2, tol, data))
            jax.block_until_ready(state.status)
        if self.verbose and int(state.iter_num):
            progress.say(state, self.verbose)
        none = np.zeros((), np.int32)
        with saved_run(f"WorkingSet({self.tol})", OptStep(params, state), (l1, l2, data)) as saved:
            state = state if saved is None else saved.restored(OptStep(params, state)).state
            while int(state.status) == Status.RUNNING and int(state.iter_num) < self.maxiter:
                passed(OptStep(state.params, state))
                shape = number_of(data, data.X), data.X.shape[1]
                size, fresh = _sizes(int(state.num_used), int(state.num_missing), len(state.held.chosen), *shape)
                if fresh:
                    state = arrays.ready(_renewing(size, fresh)(state, l1, l2, data))
                with threads.lapack_alone(size):
                    state = arrays.ready(_advance(state, l1, l2, tol, data))
                    jax.block_until_ready(state.status)
                if saved is not None:
                    saved.save(OptStep(state.params, state), none)
                if self.verbose:
                    progress.say(state, self.verbose)
        if int(state.status) == Status.RUNNING:
            state = dataclasses.replace(state, status=jnp.asarray(int(Status.ITERATION_LIMIT), jnp.int32))
        return passed(OptStep(state.params, state))


def _sizes(used: int, missing: int, size: int, num_rows: int, num_features: int) -> tuple[int, int]:
    """Return how large the next working set is, and how many of its columns are new."""
    most = min(num_features, _LARGEST)
    free = size - used
    enough = missing <= free or (size >= num_rows and free >= size // 8)  # of one solution, no more are used than rows
    if size and (enough or size == most):  # two programs for a size are enough
        fresh = size // 4 if missing > _FEWEST and free >= size // 4 else _FEWEST
        return size, min(fresh if free >= 0 else size // 2, size, num_features - size)
    # At zero, most of the columns that are missing stand for the same, the more so the fewer they are.
    wanted = 2 * size if size else used + min(missing**3 // num_features**2, num_rows // 2)
    grown = min(most, max(_SMALLEST, 1 << max(wanted - 1, 0).bit_length()))
    return grown, grown - size


def _start(params: jax.Array, l1: jax.Array, l2: jax.Array, tol: Any, data: Rows) -> WorkingSetState:
    """Return the state before the first iteration, with a working set of no columns."""
    problem = ridge.problem(params, l2, data)
    point = problem.start(params)
    gap = duality_gap(params, point.grad, point.value, l1)
    begun, status = progress.begin(point, gap, tol)
    count = jnp.zeros((), jnp.int32)
    num_used, num_missing = _counts(data.X, params, point.grad, l1)
    nothing = jnp.zeros((0, 0), point.value.dtype)
    return WorkingSetState(
        params=params,
        iter_num=count,
        value=point.value,
        grad=point.grad,
        stepsize=jnp.ones_like(point.value),
        error=gap,
        status=status,
        data_passes=count + problem.passes.start,
        progress=begun._replace(best_value=point.value + l1 * jnp.sum(jnp.abs(params))),
        cache=point.cache,
        held=_Set(jnp.zeros(0, jnp.int32), jnp.zeros((0, _num_kept(data.X)), data.X.dtype), nothing),
        num_used=num_used,
        num_missing=num_missing,
    )


def _num_kept(design: Any) -> int:
    return 0 if isinstance(design, OnDisk) else design.shape[0]


def _renewed(
    size: int, fresh: int, state: WorkingSetState, l1: jax.Array, l2: jax.Array, data: Rows
) -> WorkingSetState:
    """Return the state with a working set of ``size`` columns, ``fresh`` of which are new."""
    now = _strength(data.X, state.grad, l1)
    held = _changed(ridge.problem(state.params, l2, data), state, now, size, fresh)
    return dataclasses.replace(state, held=held, data_passes=state.data_passes + isinstance(data.X, OnDisk))


def _advanced(state: WorkingSetState, l1: jax.Array, l2: jax.Array, tol: jax.Array, data: Rows) -> WorkingSetState:
    """Return the state with the minimum over its working set."""
    problem, held = ridge.problem(state.params, l2, data), state.held
    complete = len(held.chosen) == len(state.params)
    now = _strength(data.X, state.grad, l1)
    gap = duality_gap(state.params, state.grad, state.value, now)
    enough = jnp.maximum(0.3 * tol, jnp.finfo(state.value.dtype).eps / 4)
    # Where columns are missing, what those at hand can gain need not be known exactly, if no rows are read for it; it
    # has to be where they take turns, as each turn gains little.
    loose = jnp.where(state.num_used > len(held.chosen), 0, _SHARE * gap)
    enough = enough if complete or isinstance(data.X, OnDisk) else jnp.maximum(enough, loose)
    new = _at_minimum(problem, state, held, now, l2, enough)
    error = duality_gap(new.params, new.grad, new.value, l1)
    before, whole = state.progress, new.value + l1 * jnp.sum(jnp.abs(new.params))
    # The gap goes up and down: it is by how much the worst of all columns is missing.
    better = (error < 0.9 * before.best_error) | (whole < before.best_value - noise(whole))
    num_stalled = jnp.where(better, 0, before.num_stalled + 1).astype(jnp.int32)
    status = jnp.where(num_stalled >= _PATIENCE, Status.PRECISION, Status.RUNNING)
    status = jnp.where(jnp.isfinite(new.value) & jnp.isfinite(error), status, Status.NOT_FINITE)
    status = jnp.where(error <= tol, Status.CONVERGED, status).astype(jnp.int32)
    num_used, num_missing = _counts(data.X, new.params, new.grad, l1)
    return dataclasses.replace(
        state,
        params=new.params,
        iter_num=state.iter_num + 1,
        value=new.value,
        grad=new.grad,
        error=error,
        status=status,
        data_passes=state.data_passes + problem.passes.end,
        progress=Progress(
            jnp.fmin(whole, before.best_value), jnp.fmin(error, before.best_error), num_stalled, before.first_value
        ),
        cache=new.cache,
        num_used=num_used,
        num_missing=num_missing,
    )


def _start_with_all(params: jax.Array, l1: jax.Array, l2: jax.Array, tol: jax.Array, data: Rows) -> WorkingSetState:
    """Return the state after a working set of all columns, where they are few: in one program."""
    state = _renewed(len(params), len(params), _start(params, l1, l2, tol, data), l1, l2, data)
    return _advanced(state, l1, l2, tol, data)


_begun, _begun_with_all = Traced(_start, cut.compiled), Traced(_start_with_all, cut.compiled)
_advance = Traced(_advanced, cut.compiled)


@functools.lru_cache(maxsize=64)
def _renewing(size: int, fresh: int) -> Traced:
    return Traced(functools.partial(_renewed, size, fresh), cut.compiled)


def _counts(design: Any, w: jax.Array, grad: jax.Array, l1: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(w != 0), jnp.sum((w == 0) & (jnp.abs(grad) > _strength(design, grad, l1)))


def _strength(design: Any, grad: jax.Array, l1: jax.Array) -> jax.Array:
    """Return the penalty's strength to minimise with next: from a great one, it falls to ``l1``.

    So fewer columns that the end does not need come in. (Hale, Yin and Zhang, "Fixed-point continuation", 2008.) Where
    there is a working set of all columns, or reading rows is what takes long, it is ``l1``.
    """
    if isinstance(design, OnDisk) or len(grad) <= _SMALLEST:
        return l1
    return jnp.maximum(l1, _FALL * jnp.max(jnp.abs(grad)))


def duality_gap(w: jax.Array, grad: jax.Array, value: jax.Array, l1: Any) -> jax.Array:
    """Return how far the penalised objective may at most be above its minimum.

    ``value`` is half the mean square of the residual, ``sqrt(l2) * coef`` being counted as residuals, and ``grad`` its
    gradient. The residual, made so short that no column's product with it exceeds ``l1``, is a point of the dual.
    """
    shorter = jnp.minimum(1, l1 / jnp.maximum(jnp.max(jnp.abs(grad)), jnp.finfo(grad.dtype).tiny))
    return (1 - shorter) ** 2 * value + jnp.sum(jnp.maximum(l1 * jnp.abs(w) + shorter * w * grad, 0))


def _changed(problem: Linear, state: WorkingSetState, l1: jax.Array, size: int, fresh: int) -> _Set:
    """Return the working set with so many new columns, at the end, or in place of those that matter least."""
    chosen, columns, gram = state.held
    priority = jnp.where(state.params != 0, jnp.inf, jnp.maximum(jnp.abs(state.grad) - l1, 0))
    # Where not all that are not zero fit in, those come in that are furthest from their minimum: all have their turn.
    off = jnp.where(state.params != 0, jnp.abs(state.grad + l1 * jnp.sign(state.params)), priority)
    wanted = jnp.where(state.num_used > size, off, priority).at[chosen].set(-1)
    every = fresh == len(priority)
    new = jnp.arange(fresh, dtype=jnp.int32) if every else jax.lax.top_k(wanted, fresh)[1]
    grows = size > len(chosen)
    slots = len(chosen) + jnp.arange(fresh) if grows else jax.lax.top_k(-priority[chosen], fresh)[1]
    after = jnp.concatenate([chosen, new]) if grows else chosen.at[slots].set(new)

    def taken(block: Block, new: jax.Array, rows: Any) -> Any:
        old, shares = rows
        own = trees.of_columns(block.design if every else jnp.take(block.design, new, axis=1))
        # Joined with no columns, the program of several devices ends jax 0.11's compiler, and the process with it.
        whole = own if not old.size else jnp.concatenate([old, own]) if grows else old.at[slots].set(own)
        weighted = own * (block.share if shares is None else shares)
        return whole, jnp.einsum("dn,en->de", weighted, whole, precision=trees.EXACT)

    if isinstance(problem.design, OnDisk):
        columns = jnp.zeros((size, 0), columns.dtype)
        products = problem._of_blocks(_products, (new, after), state.cache.shares)[1]
    else:
        columns, products = problem._of_blocks(taken, new, (columns, state.cache.shares))
    return _Set(after, columns, _with_products(gram, slots, products, grows))


def _with_products(gram: jax.Array, slots: jax.Array, products: jax.Array, grows: bool) -> jax.Array:
    """Return a Gram matrix with other rows and columns in some slots, which come last if it grows.

    XLA puts rows into slots one after the other, and columns number by number: to choose for each number is faster.
    """
    if grows:
        return jnp.block([[gram, products[:, : len(gram)].T], [products]])
    origin = jnp.full(len(gram), -1).at[slots].set(jnp.arange(len(slots)))
    rows = jnp.take(products, jnp.maximum(origin, 0), axis=0)
    is_new = origin >= 0
    return jnp.where(is_new[:, None], rows, jnp.where(is_new, rows.T, gram))


def _products(block: Block, given: Any, shares: Any) -> Any:
    """Return what is a block's of the products of new columns with all those of a working set."""
    new, chosen = given
    own, whole = (jnp.take(block.design, numbers, axis=1) for numbers in (new, chosen))
    weighted = own * (block.share if shares is None else shares[:, None])
    return (), jnp.matmul(trees.of_columns(weighted), whole, precision=trees.EXACT)


def _at_minimum(
    problem: Linear, state: WorkingSetState, held: _Set, l1: jax.Array, l2: jax.Array, enough: jax.Array
) -> Point:
    """Return the point with the minimum over the working set, all other coefficients staying as they are."""
    chosen, columns, gram = held
    before = state.params[chosen]
    w = minimum(gram, before, state.grad[chosen], state.value, l1, l2, enough)
    if isinstance(problem.design, OnDisk):
        return problem.start(state.params.at[chosen].set(w))
    # Where the working set holds all that is not zero, predictions are made of it alone, and nothing adds up.
    alone = state.num_used == jnp.sum(before != 0)
    begin = state.params, before, state.cache.z
    base, own, z = trees.choose(alone, trees.zeros(begin), begin)

    def predicted(block: Block, w: jax.Array, columns: jax.Array) -> Any:
        return jnp.einsum("d,dn->n", w, columns, precision=trees.EXACT), ()

    ahead = problem._of_blocks(predicted, w - own, columns)[0]
    direction = jnp.zeros_like(base).at[chosen].set(w - own)
    origin = Point(base, state.value, state.grad, None, state.cache._replace(z=z))
    line = problem.line(origin, direction, ahead)
    one = jnp.ones_like(state.value)
    return line.end(one, line.at(one))._replace(params=state.params.at[chosen].set(w))


class _Place(NamedTuple):
    """Coefficients of a working set, and the gradient there."""

    w: jax.Array
    g: jax.Array


class _Search(NamedTuple):
    place: _Place
    bend: jax.Array  # the most that the objective was found to bend, each coefficient on its own scale
    damping: jax.Array  # of steps of Newton's, on the same scale
    gap: jax.Array
    best_gap: jax.Array
    best: jax.Array  # of the penalised objective
    num_stalled: jax.Array
    num_rounds: jax.Array


def minimum(
    gram: jax.Array, w: jax.Array, g: jax.Array, value: jax.Array, l1: jax.Array, l2: jax.Array, enough: jax.Array
) -> jax.Array:
    """Return the minimum over the coefficients of a working set; ``g`` and ``value`` are those at ``w``."""
    diagonal = jnp.diagonal(gram) + l2
    gram = gram + l2 * jnp.eye(len(w), dtype=gram.dtype)
    scale = jnp.where(diagonal > 0, diagonal, 1)
    begin = _Place(w, g)

    def smooth(place: _Place) -> jax.Array:
        return jnp.maximum(value + 0.5 * trees.dot(place.w - begin.w, place.g + begin.g), 0)

    def gap_at(place: _Place) -> jax.Array:
        return duality_gap(place.w, place.g, smooth(place), l1)

    def go_on(search: _Search) -> jax.Array:
        return (search.gap > enough) & (search.num_rounds < _ROUNDS) & (search.num_stalled < _PATIENCE)

    def turn(search: _Search) -> _Search:
        place, bend = _proximal_steps(gram, scale, search.place, l1, search.bend, lambda place: gap_at(place) > enough)
        newton = functools.partial(_newton_step, gram, scale, l1)
        begun = place, search.damping
        place, damping = jax.lax.cond(gap_at(place) > enough, newton, lambda *begun: begun, *begun)
        gap, whole = gap_at(place), smooth(place) + l1 * jnp.sum(jnp.abs(place.w))
        better = (gap < 0.9 * search.best_gap) | (whole < search.best - noise(whole))
        num_stalled = jnp.where(better, 0, search.num_stalled + 1)
        best = jnp.fmin(gap, search.best_gap), jnp.fmin(whole, search.best)
        return _Search(place, bend, damping, gap, *best, num_stalled, search.num_rounds + 1)

    count = jnp.zeros((), jnp.int32)
    infinite = jnp.full((), jnp.inf, w.dtype)
    search = _Search(begin, jnp.ones((), w.dtype), jnp.zeros((), w.dtype), infinite, infinite, infinite, count, count)
    return jax.lax.while_loop(go_on, turn, search).place.w


def _proximal_steps(
    gram: jax.Array, scale: jax.Array, place: _Place, l1: jax.Array, bend: jax.Array, go_on: Callable[[_Place], Any]
) -> tuple[_Place, jax.Array]:
    """Return some accelerated steps, begun anew where they lead uphill."""

    def step(_: Any, carry: Any) -> Any:
        place, ahead, t, bend = carry
        w = soft(ahead.w - ahead.g / (bend * scale), l1 / (bend * scale))
        d = w - ahead.w
        gd = jnp.matmul(gram, d, precision=trees.EXACT)
        square, bent = trees.dot(d, scale * d), trees.dot(d, gd)
        # Where the objective bends more than was known, the minimum along the step is nearer.
        too_long = bent > bend * square
        part = jnp.where(too_long, bend * square / jnp.where(too_long, bent, 1), 1)
        bend = jnp.where(too_long, 1.01 * bent / jnp.where(too_long, square, 1), bend)
        new = _Place(jnp.where(too_long, ahead.w + part * d, w), ahead.g + part * gd)
        change = new.w - place.w
        uphill = trees.dot(scale * d, change) < 0
        next_t = jnp.where(uphill, 1, 0.5 * (1 + jnp.sqrt(1 + 4 * t**2)))
        weight = jnp.where(uphill, 0, (t - 1) / next_t)
        return new, _Place(*(trees.along(a, weight, a - b) for a, b in zip(new, place, strict=True))), next_t, bend

    one = jnp.ones_like(bend)
    _, (place, _, _, bend) = jax.lax.while_loop(
        lambda carry: (carry[0] < _LOOKS) & ((carry[0] == 0) | go_on(carry[1][0])),
        lambda carry: (carry[0] + 1, jax.lax.fori_loop(0, _STEPS, step, carry[1])),
        (0, (place, place, one, bend)),
    )
    return place, bend


def _newton_step(
    gram: jax.Array, scale: jax.Array, l1: jax.Array, place: _Place, damping: jax.Array
) -> tuple[_Place, jax.Array]:
    """Towards the minimum for the signs that the coefficients have, as far as it is lower with what changes sign 0.

    Where as many coefficients as rows are not zero, the Gram matrix is nearly singular, and the whole way is so long
    that a step ends at the first that changes sign. Then the next is damped (Levenberg 1944, Marquardt 1963).
    """
    w, g = place
    sign = jnp.sign(w)
    root = jnp.where(sign != 0, jax.lax.rsqrt(scale), 0)
    jitter = len(w) * jnp.finfo(w.dtype).eps + damping
    sizes = _sizes_of_factors(len(w))
    towards = [functools.partial(_towards, size) for size in sizes]
    which = jnp.searchsorted(jnp.asarray(sizes), jnp.sum(sign != 0))
    d = jax.lax.switch(which, towards, gram, root, jitter, g + l1 * sign)
    d = jnp.where(jnp.all(jnp.isfinite(d)), d, 0)
    until_zero = jnp.where(d * sign < 0, -w / jnp.where(d == 0, 1, d), jnp.inf)
    first = jnp.minimum(jnp.min(until_zero), 1)
    stepsizes = jnp.concatenate([first[None], 0.5 ** jnp.arange(_SHORTER, dtype=w.dtype)])[:, None]
    tried = w + stepsizes * d
    tried = jnp.where((tried * sign > 0) & (until_zero > stepsizes), tried, 0)
    moved = tried - w
    bent = jnp.matmul(moved, gram, precision=trees.EXACT)
    rise = jnp.sum(moved * (g + 0.5 * bent) + l1 * (jnp.abs(tried) - jnp.abs(w)), 1)
    best = jnp.argmin(rise)
    less = jnp.where(damping > _UNDAMPED, damping / 4, 0)
    damping = jnp.where((first >= 1) | (best == 1), less, jnp.maximum(4 * damping, _DAMPED)).astype(w.dtype)
    return trees.choose(rise[best] < 0, _Place(tried[best], g + bent[best]), place), damping


def _sizes_of_factors(size: int) -> list[int]:
    """Return for how many coefficients that are not zero there is a program of its own."""
    return [size] if size < 1024 else [size * part // 32 for part in (12, 16, 20, 32)]


def _towards(size: int, gram: jax.Array, root: jax.Array, jitter: jax.Array, slope: jax.Array) -> jax.Array:
    """Return Newton's direction for coefficients whose ``root`` is not zero, at most ``size``."""
    whole = size == len(root)
    at = jnp.arange(size) if whole else jnp.nonzero(root, size=size, fill_value=len(root))[0]

    def some(x: jax.Array) -> jax.Array:
        return x if whole else x.at[at].get(mode="fill", fill_value=0)

    products = gram if whole else gram.at[at[:, None], at].get(mode="fill", fill_value=0)
    root = some(root)
    free = products * root[:, None] * root + jnp.diag(jnp.where(root > 0, jitter, 1))
    factor = jnp.linalg.cholesky(free)
    d = -root * jax.scipy.linalg.cho_solve((factor, True), root * some(slope))
    return d if whole else jnp.zeros_like(slope).at[at].set(d, mode="drop")


def soft(x: jax.Array, threshold: Any) -> jax.Array:
    """Return values moved towards zero by so much, and no further."""
    return x - jnp.clip(x, -threshold, threshold)
