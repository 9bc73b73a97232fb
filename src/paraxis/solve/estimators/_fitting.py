"""From arrays to a minimum: rows are laid out over devices once, and solvers are kept, with what they compiled.

Nothing here knows scikit-learn. Parameters are ``(d,)`` for one output and ``(d, k)`` for k, with ``()`` or ``(k,)``
for the intercept, as in :mod:`paraxis.solve.objective`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, layout, placing
from paraxis._axes.axis import Axis
from paraxis._jax import supposed
from paraxis._tables import Table
from paraxis.errors import DeviceError
from paraxis.solve import _watching as watching, prox
from paraxis.solve._lbfgs import LBFGS
from paraxis.solve._on_disk import Source
from paraxis.solve._progress import Iteration, Watch
from paraxis.solve._proximal import ProximalGradient
from paraxis.solve._proximal_newton import ProximalNewton
from paraxis.solve._rows import Rows, lay, of_source
from paraxis.solve._solution import Interrupted, OptStep, attended
from paraxis.solve._solver import SideBySide
from paraxis.solve._working_set import WorkingSet
from paraxis.solve.objective import LinearObjective, LossName, glm

_LARGE = 100_000  # rows, from which on compiling is the smaller part
_FEW = 1_000_000  # numbers: to call a program takes longer than what it does with them

Method = Literal["lbfgs", "proximal-gradient", "proximal-newton", "working-set"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a fit that is compiled into its program."""

    method: Method
    loss: LossName
    intercept: bool
    tol: float
    max_iter: int
    verbose: bool | Watch

    @property
    def objective(self) -> LinearObjective:
        return glm(self.loss, intercept=self.intercept, l2=True)


class Penalty(NamedTuple):
    """Strengths beside a mean of losses."""

    l1: Any
    l2: Any


class Solution(NamedTuple):
    """The end of a solver's run; of several problems, with a leading dimension."""

    params: Any
    iter_num: np.ndarray
    status: np.ndarray
    error: np.ndarray
    data_passes: np.ndarray


class Placed(NamedTuple):
    """Data on devices, and what was subtracted from each column; of rows on disk, what reads them."""

    data: Rows
    means: np.ndarray
    source: Source | None = None


@contextlib.contextmanager
def surroundings(dtype: Any, devices: int | None) -> Iterator[None]:
    """Within, arrays of this dtype keep it; and if devices are chosen by number, no mesh that is set chooses others."""
    own = placing.without_context() if devices is not None else contextlib.nullcontext()
    with jax.enable_x64(np.dtype(dtype) == np.float64), own:
        yield


def place(X: np.ndarray, y: np.ndarray, weight: np.ndarray, devices: int | None, *, centre: bool) -> Placed:
    """Lay the rows out over the devices; ``centre``: subtract the columns' weighted means, of many on the devices.

    Raises:
        DeviceError: if there are not so many devices.
    """
    few = X.size <= _FEW
    means = _means(X, weight) if centre and few else np.zeros(X.shape[1], X.dtype)
    X, y, weight = _few_sizes(X, means if centre and few else None, y, weight)
    # Not copied: a fit lets its rows go before it returns.
    data = arrays.ready(lay(X, y, weight, None, _axis(len(X), devices), copied=False))
    if few or not centre:
        return Placed(data, means)
    design, means = arrays.ready(arrays.on_auto_mesh(_centred, data.X, data.weight))
    return Placed(data.with_arrays(X=design), np.asarray(means))


def read(who: str, table: Table, engine: Any, devices: int | None) -> Source:
    """Read a table once, for its targets, and for what tells how the next passes go."""
    with surroundings(table.dtype, devices):
        return Source(who, table, engine, _axis(max(1, len(table)), devices))


def place_on_disk(source: Source, y: np.ndarray, weight: np.ndarray, method: Method, *, centre: bool) -> Placed:
    """Return the same of a table's rows, from which columns' means are subtracted when they are read.

    Where the method finds the intercept, those without weights will do, which are known.
    """
    if not centre:
        means = np.zeros_like(source.means)
    else:
        means = source.weighted_means(weight) if method == "working-set" else source.means
    return Placed(of_source(source, y, weight, means if centre else None), means, source)


def place_folds(X: np.ndarray, y: np.ndarray, weights: np.ndarray, devices: int | None, *, centre: bool) -> Placed:
    """Return the same with weights ``(folds, n)``; columns have the means over the rows that count in any fold."""
    columns = np.concatenate([y.reshape(len(y), -1), weights.T], 1).astype(X.dtype)  # laid out like any targets
    placed = place(X, columns, (weights.sum(0) > 0).astype(X.dtype), devices, centre=centre)
    split = functools.partial(_split, y.shape[1:])
    data = placed.data
    targets, weight = arrays.ready(arrays.on_auto_mesh(split, data.y, data.weight))
    return Placed(data.with_arrays(y=targets, weight=weight), placed.means)


def solve(plan: Plan, init: Any, penalty: Penalty, data: Rows) -> Solution:
    """Minimise from ``init``. Compiles once for a plan and the shapes of the data.

    Raises:
        Interrupted: after Ctrl-C, with parameters in the form of ``init``.
    """
    penalty = Penalty(*(np.asarray(x, data.X.dtype) for x in penalty))
    if plan.method in ("working-set", "proximal-newton") and not penalty.l1 > 0:
        plan = dataclasses.replace(plan, method="lbfgs")
    if plan.method == "working-set":
        return _by_working_sets(plan, init, penalty, data)
    with _seated(plan) as plan, attended() as passed:
        step = solver(plan).run(init, *_arguments(plan, penalty, data))
        found = _solution(step)
        passed(step)
    return found


def _by_working_sets(plan: Plan, init: Any, penalty: Penalty, data: Rows) -> Solution:
    """Solve as :func:`solve` does. With an intercept, targets and columns have means of zero, and it is zero."""
    coef, *intercept = init if plan.intercept else (init,)
    zeros = tuple(map(np.zeros_like, intercept))
    try:
        found, state = WorkingSet(plan.max_iter, plan.tol, plan.verbose).run(coef, *penalty, data)
    except Interrupted as stopped:
        stopped.params = (stopped.params, *zeros) if plan.intercept else stopped.params
        raise
    return _solution(OptStep((found, *zeros) if plan.intercept else found, state))


def solve_folds(plan: Plan, init: Any, penalty: Penalty, data: Rows) -> tuple[Solution, np.ndarray]:
    """Minimise for each row of weights ``(folds, n)``, in one program; the rows are the same arrays for all of them.

    Args:
        plan: what to compile.
        init: parameters ``(folds, ...)``.
        penalty: strengths ``(folds,)``.
        data: rows with weights ``(folds, n)``.

    Returns:
        The solutions, and the predictions of every fold's model for every row, ``(folds, n)`` or ``(folds, k, n)``.
    """
    if plan.method == "working-set":  # each fold has one of its own
        plan = dataclasses.replace(plan, method="proximal-gradient")
    penalty = Penalty(*(np.asarray(x, data.X.dtype) for x in penalty))
    with _seated(plan) as plan, attended() as passed:
        step, predictions = arrays.on_auto_mesh(functools.partial(_solved_folds, plan), init, penalty, data)
        found = _solution(step), arrays.on_host(predictions)
        passed(step)
    return found


def _solved_folds(plan: Plan, init: Any, penalty: Penalty, data: Rows) -> tuple[OptStep, jax.Array]:
    weight, shared = data.weight, data.with_arrays(weight=None)
    step = _folds(plan).run(init, (penalty, weight), shared)
    return step, _fold_predictions(plan)(step.params, (penalty, weight), shared)


class _Seat:
    """Stands in a compiled program for the function that is called with each iteration, another one in each run."""

    def __init__(self) -> None:
        self.watch: Watch | None = None

    def __call__(self, seen: Iteration) -> None:
        if self.watch is not None:
            self.watch(seen)


_free_seats: list[_Seat] = []


@contextlib.contextmanager
def _seated(plan: Plan) -> Iterator[Plan]:
    """Give the plan a seat for its watch that is its own until the run has told all of its iterations."""
    if not callable(plan.verbose):
        yield plan
        return
    try:
        seat = _free_seats.pop()
    except IndexError:
        seat = _Seat()
    seat.watch = plan.verbose
    try:
        with watching.listening(seat):
            yield dataclasses.replace(plan, verbose=seat)
            watching.settle()
            if (error := watching.raised()) is not None:
                raise error
    finally:
        seat.watch = None
    _free_seats.append(seat)  # not after a failure: what was begun may go on to tell


@functools.lru_cache(maxsize=128)
def solver(plan: Plan) -> LBFGS | ProximalGradient | ProximalNewton:
    """Return the solver for a plan: one object, so that what JAX compiled for it is found again. It holds no data."""
    options: dict[str, Any] = {"tol": plan.tol, "maxiter": plan.max_iter, "verbose": plan.verbose}
    if plan.method == "proximal-newton":
        return ProximalNewton(plan.objective, **options)
    if plan.method == "proximal-gradient":
        return ProximalGradient(plan.objective, prox.first(prox.l1) if plan.intercept else prox.l1, **options)
    return LBFGS(plan.objective, **options)


def solution_of(stopped: Interrupted) -> Solution:
    """Return what a run had found when it was interrupted."""
    return _solution(OptStep(stopped.params, stopped.state))


def _arguments(plan: Plan, penalty: Penalty, data: Rows) -> tuple[Any, ...]:
    """Return what the plan's solver is given besides parameters."""
    return (*penalty, data) if plan.method.startswith("proximal") else (penalty.l2, data)


@functools.lru_cache(maxsize=128)
def _folds(plan: Plan) -> SideBySide:
    """Return the solver for a plan, over folds that have ``(penalty, weight)`` of their own."""
    return SideBySide(solver(plan), functools.partial(_of_fold, plan))


@functools.lru_cache(maxsize=128)
def _fold_predictions(plan: Plan) -> Callable[..., jax.Array]:
    def of_one(params: Any, own: Any, shared: Rows) -> jax.Array:
        return plan.objective.problem(params, own[0].l2, _of_fold(plan, own, shared)[-1]).predictions(params)

    return jax.jit(jax.vmap(of_one, (0, 0, None)))


def _of_fold(plan: Plan, own: Any, shared: Rows) -> tuple[Any, ...]:
    penalty, weight = own
    return _arguments(plan, penalty, shared.with_arrays(weight=weight))


def _solution(step: OptStep) -> Solution:
    params, state = step
    told = (state.iter_num, state.status, state.error, state.data_passes)
    return Solution(*jax.tree.map(np.asarray, (params, *told)))


def _means(X: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.einsum("n,nd->d", weight / weight.sum(dtype=np.float64), X).astype(X.dtype)


def _few_sizes(
    X: np.ndarray, means: np.ndarray | None, y: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same with rows of weight zero added, at most a 32nd or 63, so that few sizes are compiled for.

    Folds of a cross-validation outside differ by a row or two; compiling takes longer than they do. ``means`` are
    subtracted from the columns.
    """
    size = len(X)
    step = max(64, 2 ** (size.bit_length() - 6))
    num_padded = size + -size % step if size <= _LARGE else size
    targets, weight = layout.repeat_last(y, num_padded), layout.padded_weights(weight, num_padded)
    if means is None and num_padded == size:
        return X, targets, weight
    rows = np.empty((num_padded, X.shape[1]), X.dtype)
    np.subtract(X, 0 if means is None else means, out=rows[:size])
    rows[size:] = rows[size - 1]
    return rows, targets, weight


def _axis(size: int, devices: int | None) -> Axis:
    if devices is None:
        return Axis("rows", size, over=placing.names_in_force("rows"))
    there = supposed.devices()
    if not 1 <= devices <= len(there):
        raise DeviceError(f"devices must be from 1 to {len(there)}, as many as there are, got {devices!r}")
    return Axis("rows", size, mesh=placing.devices_mesh(there[:devices]), over=placing.DEVICES)


@functools.partial(jax.jit, static_argnums=0)
def _split(outputs: tuple[int, ...], columns: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Targets, and weights ``(folds, n)`` that are zero on padding."""
    num = outputs[0] if outputs else 1
    weights = jnp.where(counts[:, None] > 0, columns[:, num:], 0).T
    return columns[:, :num] if outputs else columns[:, 0], weights


@jax.jit
def _centred(X: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    means = jnp.sum(X * (weight / jnp.sum(weight))[:, None], 0)
    return X - means, means
