"""Penalised linear models of one Hessian ``(d, d)``: few passes over the rows, whatever the columns are like.

One pass gives the gradient and the Hessian of the loss, the Gram matrix weighted by curvatures. With them the objective
is a parabola and the penalty. Without L1 its minimum is a linear solve; with L1 it is least squares on a factor of the
Hessian, which scikit-learn's coordinate descent solves. For each step of the coefficients, the best step of an
intercept is put in (the Schur complement). The next pass tells where that leads; of squared losses, it only corrects
rounding. (Lee, Sun and Saunders, "Proximal Newton-type methods", 2014; Yuan, Ho and Lin, "An improved GLMNET", 2012.)
"""

import contextlib
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import enet_path

from paraxis._core import arrays
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Linear
from paraxis.solve._run import Status, Watch, tell
from paraxis.solve._streaming import saved
from paraxis.solve.objective import LossName, glm

_TRIALS = 30  # steps, each half of the one before
_DECREASE = 1e-4  # of what the parabola's slope promises
_EXACT = 1e-4  # by how much the parabola may be above its minimum, in squares of the error
_SWEEPS = 5_000  # of coordinate descent
_PATIENCE = 3  # iterations without progress before rounding is blamed
_NOISE = 32  # roundings of a value that count as none


class Solution(NamedTuple):
    """The end of a run."""

    params: Any
    iter_num: int
    status: int
    error: float
    data_passes: int


class Penalty(NamedTuple):
    """Strengths beside a mean of losses."""

    l1: float
    l2: float


class _Place(NamedTuple):
    """Coefficients ``(d,)`` or ``(d, k)`` and an intercept; the mean loss there and its slopes."""

    coef: np.ndarray
    intercept: np.ndarray
    value: float
    grad: np.ndarray
    slope: np.ndarray


class _State(NamedTuple):
    place: _Place
    hessian: tuple[np.ndarray, np.ndarray, float]  # (d, d) of coefficients; (d,) beside the intercept; the intercept's
    error: float
    best: tuple[_Place, float]  # of the least error so far, and this
    least: float  # value so far, with its penalty
    iter_num: int = 0
    num_passes: int = 1
    num_stalled: int = 0


class Quadratic:
    """A linear model's mean loss on some rows, to be minimised with penalties; ``squared`` may have several outputs."""

    def __init__(self, loss: LossName, data: Any, intercept: bool) -> None:
        self._objective, self._data = glm(loss, intercept=intercept), data
        self._is_flat = self._objective.loss.flat
        self._constant: Any = None  # the Hessian of a squared loss, which has one only

    def solve(self, init: Any, penalty: Penalty, *, tol: float, maxiter: int, verbose: bool | Watch) -> Solution:
        """Minimise from ``init``, a pair if there is an intercept.

        The error is the duality gap of squared losses with L1; else the norm of a proximal step of size 1, which
        without L1 is that of the gradient.
        """
        X = self._data.X
        coef, intercept = init if self._objective.intercept else (init, np.zeros(init.shape[1:]))
        place, hessian = self._at(np.asarray(coef, float), np.asarray(intercept, float))
        error = self._error(place, penalty)
        state = _State(place, hessian, error, (place, error), _whole(place, penalty))
        with saved(f"Quadratic({tol}, {maxiter})", state, (self._data, *penalty)) as (state, save):
            while (status := _status(state, tol, maxiter)) == Status.RUNNING:
                enough = max(tol if self._is_flat else 0.0, _EXACT * state.error**2)
                state, stepsize = self._iteration(state, penalty, enough)
                save(state)
                if verbose:
                    passes = self._count(state.num_passes)
                    tell(verbose, state.iter_num, _whole(state.place, penalty), state.error, stepsize, passes)
        place, error = (state.place, state.error) if status == Status.NOT_FINITE else state.best
        coef, intercept = place.coef.astype(X.dtype), place.intercept.astype(X.dtype)
        params = (coef, intercept) if self._objective.intercept else coef
        return Solution(params, state.iter_num, int(status), error, self._count(state.num_passes))

    def _iteration(self, state: _State, penalty: Penalty, enough: float) -> tuple[_State, float]:
        """Return the state after a step to the parabola's minimum, shortened as long as it leads up; and its length."""
        place, (_, beside, of_intercept), best, stepsize = state.place, state.hessian, state.best, 1.0
        before, num_passes = _whole(place, penalty), state.num_passes
        step = _minimum(state.hessian, place, penalty, enough) - place.coef
        of_step = -(place.slope + beside @ step) / of_intercept
        slope = np.vdot(place.grad, step) + np.vdot(place.slope, of_step) + _whole(place, penalty, step) - before
        noise = _NOISE * np.finfo(self._data.X.dtype).eps * abs(before)
        new, hessian = place, state.hessian
        for trial in range(_TRIALS):
            stepsize = 0.5**trial
            new, hessian = self._at(place.coef + stepsize * step, place.intercept + stepsize * of_step)
            num_passes += 1
            if _whole(new, penalty) <= before + _DECREASE * stepsize * slope + noise:
                break
        error, value = self._error(new, penalty), _whole(new, penalty)
        is_better = error < 0.5 * best[1] or value < state.least - noise / 8
        num_stalled = 0 if is_better else state.num_stalled + 1
        best = (new, error) if error < best[1] else best
        counts = state.iter_num + 1, num_passes, num_stalled
        return _State(new, hessian, error, best, min(state.least, value), *counts), stepsize

    def _count(self, num_passes: int) -> int:
        """Return how often all rows were read: those in memory for predictions, and once more for sums."""
        return 2 * num_passes if isinstance(self._data.X, jax.Array) else num_passes

    def _at(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[_Place, Any]:
        """Return the place at these parameters, and the Hessian there: one pass over the rows."""
        dtype, has_intercept = self._data.X.dtype, self._objective.intercept
        coef, intercept = coef.astype(dtype), np.asarray(intercept, dtype)
        params = (coef, intercept) if has_intercept else coef
        problem = self._objective.problem(params, self._data)
        read = _read if problem.is_table else _compiled
        with jax.enable_x64(dtype == np.float64):
            found = jax.tree.map(arrays.on_host, read(problem, params, self._constant is None))
        value, grad, hessian = jax.tree.map(lambda x: x.astype(float), found)
        grad, slope = grad if has_intercept else (grad, np.zeros(intercept.shape))
        if self._constant is None:
            gram, beside, own = hessian
            hessian = gram, beside * has_intercept, float(own)
            self._constant = hessian if self._is_flat else None
        return _Place(coef.astype(float), intercept.astype(float), float(value), grad, slope), hessian or self._constant

    def _error(self, place: _Place, penalty: Penalty) -> float:
        grad = place.grad + penalty.l2 * place.coef
        if penalty.l1 and self._is_flat:
            smooth = place.value + penalty.l2 / 2 * np.vdot(place.coef, place.coef)
            of_intercept = float(np.vdot(place.slope, place.slope)) / 2  # what its best value would save
            return _duality_gap(place.coef, grad, smooth, penalty.l1) + of_intercept
        moved = place.coef - grad
        moved = moved - np.clip(moved, -penalty.l1, penalty.l1)
        return float(np.hypot(np.linalg.norm(moved - place.coef), np.linalg.norm(place.slope)))


def _status(state: _State, tol: float, maxiter: int) -> Status:
    if not (np.isfinite(state.place.value) and np.isfinite(state.error)):
        return Status.NOT_FINITE
    if state.error <= tol:
        return Status.CONVERGED
    if state.num_stalled >= _PATIENCE:
        return Status.PRECISION
    return Status.ITERATION_LIMIT if state.iter_num >= maxiter else Status.RUNNING


def _whole(place: _Place, penalty: Penalty, step: Any = 0.0) -> float:
    """Return the objective with its penalty; the latter after a step."""
    coef = place.coef + step
    return place.value + penalty.l1 * float(np.abs(coef).sum()) + penalty.l2 / 2 * float(np.vdot(coef, coef))


def _duality_gap(coef: np.ndarray, grad: np.ndarray, value: float, l1: float) -> float:
    """Return how far the penalised objective may at most be above its minimum.

    ``value`` is half the mean square of the residual, ``sqrt(l2) * coef`` being counted as residuals, and ``grad`` its
    gradient. The residual, made so short that no column's product with it exceeds ``l1``, is a point of the dual.
    """
    shorter = min(1.0, l1 / max(float(np.abs(grad).max()), np.finfo(float).tiny))
    return (1 - shorter) ** 2 * value + float(np.maximum(l1 * np.abs(coef) + shorter * coef * grad, 0).sum())


def _minimum(hessian: Any, place: _Place, penalty: Penalty, enough: float) -> np.ndarray:
    """Return the coefficients that minimise the parabola at a place and the penalty, up to ``enough`` with L1."""
    gram, beside, of_intercept = hessian
    share = beside / of_intercept
    gram = gram - np.outer(share, beside)
    target = gram @ place.coef - (place.grad - np.multiply.outer(share, place.slope))
    if not penalty.l1:
        return _solved(gram + penalty.l2 * np.eye(len(gram)), target)
    factor, y = _factored(gram, target)
    strength = (penalty.l1 + penalty.l2) / len(factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # where that leads, the next pass tells
        solve: Any = enet_path  # whose stubs know texts only
        _, found, *_ = solve(
            np.asfortranarray(factor),
            y,
            l1_ratio=penalty.l1 / (penalty.l1 + penalty.l2),
            alphas=[strength],
            coef_init=place.coef.copy(),
            tol=enough / max(float(y @ y), np.finfo(float).tiny),
            max_iter=_SWEEPS,
            precompute=False,
        )
    return found[:, 0]


def _factored(gram: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return R with ``R.T @ R`` the matrix, and y with ``R.T @ y`` the target."""
    try:
        lower = np.linalg.cholesky(gram)
        return lower.T, scipy.linalg.solve_triangular(lower, target, lower=True)
    except np.linalg.LinAlgError:  # columns depend on each other
        roots, vectors = _spectrum(gram)
        return roots[:, None] * vectors.T, (vectors.T @ target) / roots


def _solved(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the smallest solution of ``gram @ x = target``."""
    diagonal = np.diagonal(gram)
    scale = 1 / np.sqrt(np.where(diagonal > 0, diagonal, 1))
    with contextlib.suppress(np.linalg.LinAlgError):
        lower = np.linalg.cholesky(gram * scale[:, None] * scale)
        if np.diagonal(lower).min() > np.sqrt(8 * len(gram) * np.finfo(float).eps):
            return (scipy.linalg.cho_solve((lower, True), (target.T * scale).T).T * scale).T
    roots, vectors = _spectrum(gram)
    return vectors @ ((vectors.T @ target).T / roots**2).T


def _spectrum(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the roots of the eigenvalues that rounding does not hide, and their vectors."""
    values, vectors = np.linalg.eigh(gram)
    seen = values > len(gram) * np.finfo(float).eps * max(values[-1], np.finfo(float).tiny)
    return np.sqrt(values[seen]), vectors[:, seen]


def _read(problem: Linear, params: Any, with_hessian: bool) -> Any:
    fn = _with_hessian if with_hessian else _without
    return problem.read(fn, params, problem.shares(params))[1]


_compiled = functools.partial(jax.jit, static_argnums=2)(_read)


def _without(rows: Linear, params: Any, shares: Any) -> Any:
    z = rows.predict(params)
    return (), (rows.cost(z, shares), rows.grad(z, shares, params), ())


def _with_hessian(rows: Linear, params: Any, shares: Any) -> Any:
    """Return the rows' part of the loss, its gradient, and its Hessian."""
    z = rows.predict(params)
    # Where a row is predicted with certainty, its curvature vanishes, and would take no step at all.
    curvature = jnp.maximum(rows.loss.curvature(z), jnp.sqrt(jnp.finfo(z.dtype).eps))
    weight, x = curvature * shares, rows.design
    columns = (x * weight[:, None]).T
    if x.dtype == jnp.float64:  # XLA's CPU products that add over the first dimension of both take twice the time
        columns = jax.lax.optimization_barrier(columns)
    gram = jnp.matmul(columns, x, precision=trees.EXACT)
    beside = jnp.einsum("n,nd->d", weight, x, precision=trees.EXACT)
    return (), (rows.cost(z, shares), rows.grad(z, shares, params), (gram, beside, jnp.sum(weight)))
