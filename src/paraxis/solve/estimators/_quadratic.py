"""Penalised linear models of one Hessian ``(d, d)``: few passes over the rows, whatever the columns are like.

One pass gives the gradient and the Hessian of the loss, the Gram matrix weighted by curvatures. With them the objective
is a parabola and the penalty. Without L1 its minimum is a linear solve; with L1 it is least squares on a factor of the
Hessian, which scikit-learn's coordinate descent solves. For each step of the coefficients, the best step of an
intercept is put in (the Schur complement). The next pass tells where that leads; of squared losses, it only corrects
rounding. (Lee, Sun and Saunders, "Proximal Newton-type methods", 2014; Yuan, Ho and Lin, "An improved GLMNET", 2012.)
"""

import contextlib
import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import sklearn
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ElasticNet, lasso_path

from paraxis._core import arrays
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Linear
from paraxis.solve._rows import sent
from paraxis.solve._run import Status, Watch, tell
from paraxis.solve._streaming import saved
from paraxis.solve.objective import LossName, glm

_SHORTEST = 2**-30  # step; each is half of the one before
_DECREASE = 1e-4  # of what the parabola's slope promises
_EXACT = 1e-4  # by how much the parabola may be above its minimum, in squares of the error
_SWEEPS = 5_000  # of coordinate descent
# Before a Gram matrix is made, rows have epochs of coordinate descent: at most so many, one for so many columns, and as
# many as read so many numbers, which takes as long as JAX's calls.
_EPOCHS, _COLUMNS, _NUMBERS = 200, 4, 10**7
_PATIENCE = 3  # iterations without progress before rounding is blamed
_NOISE = 32  # roundings of a value that count as none


class Penalty(NamedTuple):
    """Strengths beside a mean of losses."""

    l1: float
    l2: float

    def of(self, coef: np.ndarray) -> float:
        return self.l1 * float(np.abs(coef).sum()) + self.l2 / 2 * float(np.vdot(coef, coef))


class _Place(NamedTuple):
    """Coefficients ``(d,)`` or ``(d, k)`` and an intercept; the mean loss there, its slopes, and its Hessian."""

    coef: np.ndarray
    intercept: np.ndarray
    value: Any
    grad: np.ndarray
    slope: np.ndarray
    gram: np.ndarray  # of coefficients, (d, d)
    beside: np.ndarray  # of coefficients and intercept, (d,)
    own: Any  # of the intercept


class _State(NamedTuple):
    place: _Place
    error: float
    data_passes: int
    iter_num: int = 0
    num_stalled: int = 0
    status: int = 0


class Quadratic:
    """A linear model's mean loss on some rows, to be minimised with penalties; ``squared`` may have several outputs."""

    def __init__(self, loss: LossName, data: Any, intercept: bool) -> None:
        self._objective, self._data = glm(loss, intercept=intercept), data
        self._is_flat = loss == "squared"
        self._reads = 2 if isinstance(data.X, jax.Array) else 1  # of all rows in a pass
        self._constant: Any = None  # the Hessian of a squared loss, which has one only

    def solve(
        self, start: Any, penalty: Penalty, tol: float, maxiter: int, verbose: bool | Watch
    ) -> tuple[Any, _State]:
        """Minimise from coefficients and an intercept, which stays as it is where the model has none.

        The error is the duality gap of squared losses with L1; else the norm of a proximal step of size 1, which
        without L1 is that of the gradient.
        """
        place = self._at(*start)
        state = _State(place, self._error(place, penalty), self._reads)
        with saved(f"Quadratic({tol}, {maxiter})", state, (self._data, *penalty)) as (state, save):
            while (status := _status(state, tol, maxiter)) == Status.RUNNING:
                enough = max(tol if self._is_flat else 0.0, _EXACT * state.error**2)
                state, stepsize = self._iteration(state, penalty, enough)
                save(state)
                if verbose:
                    value = state.place.value + penalty.of(state.place.coef)
                    tell(verbose, state.iter_num, value, state.error, stepsize, state.data_passes)
        return tuple(x.astype(self._data.X.dtype) for x in state.place[:2]), state._replace(status=int(status))

    def _iteration(self, state: _State, penalty: Penalty, enough: float) -> tuple[_State, float]:
        """Return the state after a step to the parabola's minimum, shortened as long as it leads up; and its length."""
        place, stepsize, num_passes = state.place, 1.0, 1
        step = _minimum(place, penalty, enough) - place.coef
        of_step = -(place.slope + place.beside @ step) / place.own
        before = place.value + penalty.of(place.coef)
        slope = np.vdot(place.grad, step) + np.vdot(place.slope, of_step)
        slope += penalty.of(place.coef + step) - penalty.of(place.coef)
        noise = _NOISE * np.finfo(self._data.X.dtype).eps * abs(before)
        new = self._at(place.coef + step, place.intercept + of_step)
        while stepsize > _SHORTEST and not (
            new.value + penalty.of(new.coef) <= before + _DECREASE * stepsize * slope + noise
        ):
            stepsize, num_passes = stepsize / 2, num_passes + 1
            new = self._at(place.coef + stepsize * step, place.intercept + stepsize * of_step)
        error, is_lower = self._error(new, penalty), new.value + penalty.of(new.coef) < before - noise / 8
        num_stalled = 0 if is_lower or error < 0.5 * state.error else state.num_stalled + 1
        data_passes = state.data_passes + self._reads * num_passes
        return _State(new, error, data_passes, state.iter_num + 1, num_stalled), stepsize

    def _at(self, coef: np.ndarray, intercept: np.ndarray) -> _Place:
        """Return the place at these parameters: one pass over the rows."""
        dtype, has_intercept = self._data.X.dtype, self._objective.intercept
        coef, intercept = np.asarray(coef, dtype), np.asarray(intercept, dtype)
        params = (coef, intercept) if has_intercept else coef
        problem = self._objective.problem(params, self._data)
        l2, params = jax.tree.map(lambda x: sent(x, self._data.y), (problem.l2, params))
        problem = dataclasses.replace(problem, l2=l2)
        found = (_read if problem.is_table else _compiled)(problem, params, self._constant is None)
        value, grad, hessian = jax.tree.map(lambda x: arrays.on_host(x).astype(float), found)
        grad, slope = grad if has_intercept else (grad, np.zeros(intercept.shape))
        hessian = self._constant or (hessian[0], hessian[1] * has_intercept, hessian[2])
        self._constant = hessian if self._is_flat else None
        return _Place(coef.astype(float), intercept.astype(float), value, grad, slope, *hessian)

    def _error(self, place: _Place, penalty: Penalty) -> float:
        grad = place.grad + penalty.l2 * place.coef
        if penalty.l1 and self._is_flat:
            # The gap to a point of the dual: the residuals, sqrt(l2) * coef among them, made so short that no column's
            # product with them exceeds l1. The intercept's best value would save the last term.
            smooth, l1 = place.value + penalty.l2 / 2 * np.vdot(place.coef, place.coef), penalty.l1
            shorter = min(1.0, l1 / max(float(np.abs(grad).max()), np.finfo(float).tiny))
            gap = np.maximum(l1 * np.abs(place.coef) + shorter * place.coef * grad, 0).sum()
            return float((1 - shorter) ** 2 * smooth + gap + np.vdot(place.slope, place.slope) / 2)
        moved = place.coef - grad
        moved = moved - np.clip(moved, -penalty.l1, penalty.l1)
        return float(np.hypot(np.linalg.norm(moved - place.coef), np.linalg.norm(place.slope)))


def descend(X: Any, y: Any, weight: Any, start: Any, penalty: Penalty, maxiter: int, **options: Any) -> Any:
    """Return least squares on rows in memory by few epochs of coordinate descent; ``None`` if these do not do."""
    total, epochs = sum(penalty), min(_EPOCHS, maxiter, 1 + X.shape[1] // _COLUMNS + _NUMBERS // X.size)
    options |= {"l1_ratio": penalty.l1 / total, "max_iter": epochs, "warm_start": True, "copy_X": False}
    model: Any = ElasticNet(total, **options)
    model.coef_ = start
    with sklearn.config_context(skip_parameter_validation=True), warnings.catch_warnings(action="ignore"):
        model.fit(np.array(X, order="F"), y, weight if weight.min() < weight.max() else None, check_input=False)
    return model if model.n_iter_ < epochs else None


def _status(state: _State, tol: float, maxiter: int) -> Status:
    if not (np.isfinite(state.place.value) and np.isfinite(state.error)):
        return Status.NOT_FINITE
    if state.error <= tol:
        return Status.CONVERGED
    if state.num_stalled >= _PATIENCE:
        return Status.PRECISION
    return Status.ITERATION_LIMIT if state.iter_num >= maxiter else Status.RUNNING


def _minimum(place: _Place, penalty: Penalty, enough: float) -> np.ndarray:
    """Return the coefficients that minimise the parabola at a place and the penalty, up to ``enough`` with L1."""
    share = place.beside / place.own
    gram = place.gram - np.outer(share, place.beside)
    target = gram @ place.coef - (place.grad - np.multiply.outer(share, place.slope))
    factor, y, smallest = _factored(gram + penalty.l2 * np.eye(len(gram)), target)
    if not penalty.l1 or not len(factor):
        return smallest
    tol = enough / max(float(y @ y), np.finfo(float).tiny)
    options: Any = {"alphas": [penalty.l1 / len(factor)], "tol": tol, "max_iter": _SWEEPS, "precompute": False}
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # the next pass tells where that leads
        return lasso_path(np.asfortranarray(factor), y, coef_init=place.coef.copy(), **options)[1][:, 0]


def _factored(gram: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return R with ``R.T @ R`` the matrix, y with ``R.T @ y`` the target, and the smallest x with ``R @ x`` this y."""
    rounding = len(gram) * np.finfo(float).eps
    with contextlib.suppress(np.linalg.LinAlgError):
        lower = np.linalg.cholesky(gram)
        if np.all(np.diagonal(lower) ** 2 > 8 * rounding * np.diagonal(gram)):
            y = scipy.linalg.solve_triangular(lower, target, lower=True)
            return lower.T, y, scipy.linalg.solve_triangular(lower.T, y)
    values, vectors = np.linalg.eigh(gram)  # columns depend on each other
    seen = values > rounding * max(values[-1], np.finfo(float).tiny)
    roots, vectors = np.sqrt(values[seen]), vectors[:, seen]
    y = ((vectors.T @ target).T / roots).T
    return roots[:, None] * vectors.T, y, vectors @ (y.T / roots).T


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
