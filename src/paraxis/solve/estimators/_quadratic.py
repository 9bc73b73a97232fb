"""Penalised linear models of one Hessian ``(d, d)``: few passes over the rows, whatever the columns are like.

One pass gives the gradient and the Hessian of the loss, the Gram matrix weighted by curvatures. With them the objective
is a parabola and the penalty. Without L1 its minimum is a linear solve; with L1 it is least squares on a factor of the
Hessian, which scikit-learn's coordinate descent solves. For each step of the coefficients, the best step of an
intercept is put in (the Schur complement). The next pass tells where that leads; of squared losses, it only corrects
rounding. (Lee, Sun and Saunders, "Proximal Newton-type methods", 2014; Yuan, Ho and Lin, "An improved GLMNET", 2012.)

Errors do not depend on the columns' units. How far a place is from the parabola's minimum is told by the duality gap,
in units of the objective; without L1, it is half of the square of the gradient in the metric of the inverse Hessian.
"""

import contextlib
import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import lasso_path

from paraxis._core import arrays
from paraxis.solve import _run as runs, _trees as trees
from paraxis.solve._problem import Cache, Linear, Point, Trial
from paraxis.solve._rows import agreed, sent
from paraxis.solve._run import OptStep
from paraxis.solve._search import backtracking
from paraxis.solve._solver import Solver

_EXACT = 1e-4  # of the parabola's gap, what coordinate descent may leave
_SWEEPS = 5_000  # of coordinate descent
_ROUNDINGS = 4  # of a matrix, beside its largest eigenvalue: those of columns that depend on each other


class Penalty(NamedTuple):
    """Strengths beside a mean of losses."""

    l1: float
    l2: float

    def of(self, coef: np.ndarray) -> float:
        return self.l1 * float(np.abs(coef).sum()) + self.l2 / 2 * float(np.vdot(coef, coef))


class Hessian(NamedTuple):
    """Second derivatives of a mean loss."""

    gram: Any  # by coefficients, (d, d)
    cross: Any  # by coefficients and the intercept, (d,)
    intercept: Any  # by the intercept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class QuadraticState(runs.State):
    direction: Any  # of coefficients and intercept, to the parabola's minimum
    hessian: Hessian


@dataclasses.dataclass(frozen=True)
class Quadratic(Solver):
    """Minimise a linear model's mean loss with an elastic net; only ``"squared"`` may have several outputs.

    A run's ``hyperparams_prox`` are a :class:`Penalty`, and the Hessian of a squared loss if it is known from another
    run. The error of squared losses with L1 is the duality gap; without L1, it is ``sqrt(2 * gap)``; of others with L1,
    whose gap would soon be rounding, the norm of a proximal step of each column in the metric of its curvature.
    """

    fun: Any  # a LinearObjective

    _patience = 3
    _on_host = True

    @property
    def _is_flat(self) -> bool:
        return self.fun.loss == "squared"  # so there is one Hessian only

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        return args[0], args[1:], kwargs

    def _start(self, params: Any, arguments: Any) -> OptStep:
        point, hessian = self._at(params, arguments, arguments[0][1])
        fields = self._towards_minimum(point, hessian, arguments)
        begin = runs.initial(self, self._problem(params, arguments), point, fields.pop("error"))
        return OptStep(params, QuadraticState(**begin, stepsize=np.float64(1), **fields))

    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        """Step to the parabola's minimum, or on the way there as long as the objective is higher."""
        (params, state), penalty = before, arguments[0][0]
        fixed = state.hessian if self._is_flat else None
        coef, step = (self._pair(x)[0] for x in (params, state.direction))
        slope = sum(map(np.vdot, *map(jax.tree.leaves, (state.grad, state.direction))))
        slope += penalty.of(coef + step) - penalty.of(coef)

        def at(stepsize: Any) -> Trial:
            new = self._at(trees.along(params, stepsize, state.direction), arguments, fixed)
            return Trial(new[0].value, np.nan, np.nan, new)

        here = Point(params, state.value, state.grad, None, Cache()), state.hessian
        origin = Trial(state.value, slope, np.nan, here)
        result = backtracking(origin, at, np.float64(1), shrink=0.25, max_trials=10)
        (new, hessian), trials = result.trial.kept, result.num_trials
        fields = self._towards_minimum(new, hessian, arguments)
        error, num_passes = fields.pop("error"), 1 if self._problem(params, arguments).is_table else 2
        state = runs.advance(
            self,
            state,
            new,
            error,
            counts=(trials, trials, trials, num_passes * trials),
            promise=abs(slope),
            no_direction_left=result.failed,
            stepsize=result.stepsize,
            failed_linesearch=result.failed,
            **fields,
        )
        return OptStep(new.params, state)

    def _pair(self, params: Any) -> Any:
        """Return coefficients and an intercept, zeros where there is none, of parameters, a direction or a gradient."""
        return params if self.fun.intercept else (params, np.zeros(params.shape[1:]))

    def _at(self, params: Any, arguments: Any, hessian: Any) -> tuple[Point, Hessian]:
        """Return the objective at these parameters, and the loss's gradient and Hessian: one pass over the rows."""
        problem: Any = self._problem(params, arguments)
        params = jax.tree.map(lambda x: np.asarray(x, problem.design.dtype), params)
        l2, sent_params = jax.tree.map(lambda x: sent(x, problem.targets), (problem.l2, params))
        problem = dataclasses.replace(problem, l2=l2)
        outputs = (_read if problem.is_table else _compiled)(problem, sent_params, hessian is None)
        value, grad, new = jax.tree.map(arrays.on_host, outputs)
        value = agreed(np.asarray(value + arguments[0][0].of(self._pair(params)[0]), value.dtype), problem.targets)
        grad = jax.tree.map(lambda x: x.astype(float), grad)
        return Point(params, value, grad, None, Cache()), hessian or Hessian(*(x.astype(float) for x in new))

    def _towards_minimum(self, point: Point, hessian: Hessian, arguments: Any) -> dict[str, Any]:
        """Return the error, and the direction to the parabola's minimum, as a state has them."""
        penalty, (coef, _), (grad, slope) = arguments[0][0], self._pair(point.params), self._pair(point.grad)
        coef = coef.astype(float)
        share = hessian.cross / hessian.intercept * self.fun.intercept
        grad = grad - np.multiply.outer(share, slope)  # with the intercept's best step
        gram, eps = hessian.gram - np.outer(share, hessian.cross), float(np.finfo(point.value.dtype).eps)
        constant = np.diagonal(gram) <= 64 * eps * np.diagonal(hessian.gram)  # columns
        gram[constant], gram[:, constant] = 0, 0
        # Without a penalty, rounding must not take part in the choice of one solution.
        eps = np.finfo(float).eps if any(penalty) else eps
        factor, y, smallest = _factored(gram + penalty.l2 * np.eye(len(gram)), gram @ coef - grad, eps)
        left, grad = y - factor @ coef, grad + penalty.l2 * coef
        # To a point of the dual: what is left, made so short that no column's product with it exceeds l1.
        shorter = min(1.0, penalty.l1 / max(float(np.abs(grad).max()), np.finfo(float).tiny))
        gap = (1 - shorter) ** 2 * np.vdot(left, left) / 2
        gap += np.maximum(penalty.l1 * np.abs(coef) + shorter * coef * grad, 0).sum()
        gap += np.vdot(slope, slope) / (2 * hessian.intercept) * self.fun.intercept
        error = gap if self._is_flat and penalty.l1 else np.sqrt(2 * gap)
        if penalty.l1 and not self._is_flat:
            curvature = np.diagonal(hessian.gram) + penalty.l2
            moved = coef - grad / curvature
            moved = moved - np.clip(moved, -penalty.l1 / curvature, penalty.l1 / curvature)
            of_intercept = np.linalg.norm(slope) / np.sqrt(hessian.intercept) * self.fun.intercept
            error = np.hypot(np.linalg.norm(np.sqrt(curvature) * (moved - coef)), of_intercept)
        if penalty.l1 and len(factor) and error > self.tol:
            smallest = _descended(factor, y, coef, penalty.l1, max(self.tol / 4 * self._is_flat, _EXACT * gap))
        step = smallest - coef
        direction = (step, -(slope + hessian.cross @ step) / hessian.intercept) if self.fun.intercept else step
        problem: Any = self._problem(point.params, arguments)
        return agreed({"error": np.float64(error), "direction": direction}, problem.targets) | {"hessian": hessian}


def _descended(factor: np.ndarray, y: np.ndarray, coef: np.ndarray, l1: float, gap: float) -> np.ndarray:
    """Return least squares with L1 on a factor, up to a duality gap, by coordinate descent from ``coef``."""
    tol = gap / max(float(y @ y), np.finfo(float).tiny)
    options: Any = {"alphas": [l1 / len(factor)], "tol": tol, "max_iter": _SWEEPS, "precompute": False}
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # the next pass tells where that leads
        return lasso_path(np.asfortranarray(factor), y, coef_init=coef.copy(), **options)[1][:, 0]


def _factored(gram: np.ndarray, target: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return R with ``R.T @ R`` the matrix, y with ``R.T @ y`` the target, and the smallest x with ``R @ x`` this y.

    ``eps`` is the matrix's rounding, beside its diagonal.
    """
    with contextlib.suppress(np.linalg.LinAlgError):
        lower = np.linalg.cholesky(gram)
        if np.all(np.diagonal(lower) ** 2 > 8 * _ROUNDINGS * eps * np.diagonal(gram)):
            y = scipy.linalg.solve_triangular(lower, target, lower=True)
            return lower.T, y, scipy.linalg.solve_triangular(lower.T, y)
    # Columns depend on each other, which their units should not hide.
    scale = 1 / np.sqrt(np.where(np.diagonal(gram) > 0, np.diagonal(gram), 1))
    values, vectors = np.linalg.eigh(gram * scale * scale[:, None])
    spanned = values > _ROUNDINGS * eps * max(values[-1], np.finfo(float).tiny)
    roots, null = np.sqrt(values[spanned]), scale[:, None] * vectors[:, ~spanned]
    y = ((vectors[:, spanned].T @ (target.T * scale).T).T / roots).T
    x = ((vectors[:, spanned] @ (y.T / roots).T).T * scale).T
    return roots[:, None] * vectors[:, spanned].T / scale, y, x - null @ np.linalg.lstsq(null, x)[0]


def _read(problem: Linear, params: Any, with_hessian: bool) -> Any:
    if with_hessian:
        return problem.read(_with_hessian, params, problem.shares(params))[1]
    return *problem.at(params)[1:3], ()


_compiled = jax.jit(_read, static_argnums=2)


def _with_hessian(rows: Linear, params: Any, shares: Any) -> Any:
    """Return the rows' part of the loss, its gradient, and its Hessian."""
    z = rows.shifted(rows.predict(params))
    # Where a row is predicted with certainty, its curvature vanishes, and would take no step at all.
    curvature = jnp.maximum(rows.loss.curvature(z, rows.targets), jnp.sqrt(jnp.finfo(z.dtype).eps))
    weight, x = curvature * shares, rows.design
    columns = (x * weight[:, None]).T
    if x.dtype == jnp.float64:  # XLA's CPU products that add over the first dimension of both take twice the time
        columns = jax.lax.optimization_barrier(columns)
    gram = jnp.matmul(columns, x, precision=trees.EXACT)
    cross = jnp.einsum("n,nd->d", weight, x, precision=trees.EXACT)
    return (), (rows.cost(z, shares), rows.grad(z, shares, params), (gram, cross, jnp.sum(weight)))
