"""Least squares with a penalty that makes coefficients zero."""

import abc
import dataclasses

from paraxis.solve import _checks as checks
from paraxis.solve._progress import Watch
from paraxis.solve.estimators._base import Posed
from paraxis.solve.estimators._fitting import Penalty, Plan
from paraxis.solve.estimators._regression import LeastSquares


class _Sparse(LeastSquares, abc.ABC):
    def _solvers(self) -> tuple[str, ...]:
        return ("auto", "working-set", "proximal-gradient") if self._has_l1() else super()._solvers()

    def _plan(self, posed: Posed) -> Plan:
        plan = super()._plan(posed)
        by_columns = plan.method == "proximal-gradient" and self.solver != "proximal-gradient"
        return dataclasses.replace(plan, method="working-set") if by_columns else plan


class ElasticNet(_Sparse):
    """Fit least squares with L1 and L2 penalties, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``mean(residual²) / 2 + alpha * (l1_ratio * |coef|₁ + (1 - l1_ratio) * |coef|² / 2)`` with a weighted
    mean. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        l1_ratio: from 0 to 1.
        fit_intercept: whether there is an intercept.
        tol: stop when the duality gap, relative to the targets' variance, is at most this, or when rounding allows no
            more; with ``solver="proximal-gradient"``, when the error for targets of variance 1 is.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        solver: ``"auto"``, ``"working-set"`` or ``"proximal-gradient"``; with ``l1_ratio=0`` ``"auto"`` or ``"lbfgs"``.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(d,)``.
        intercept_: a number.
        n_iter_: iterations, or changes of the working set.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
        >>> px.solve.ElasticNet(alpha=1.0, l1_ratio=0.5).fit(X, 3 * X[:, 0]).coef_.round(6) + 0
        array([1.666667, 0.      ])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        l1_ratio: float = 0.5,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 10_000,
        warm_start: bool = False,
        devices: int | None = None,
        solver: str = "auto",
        verbose: int | Watch = 0,
    ) -> None:
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.solver = solver
        self.verbose = verbose

    def _checked_options(self) -> None:
        super()._checked_options()
        checks.share(self, "l1_ratio")

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        # On targets divided by their scale, the mean of squares is less by its square, and |coef|₁ by the scale.
        return Penalty(strength * self.l1_ratio / posed.scale, strength * (1 - self.l1_ratio))

    def _has_l1(self) -> bool:
        return self.l1_ratio > 0


class Lasso(_Sparse):
    """Fit least squares with an L1 penalty, with scikit-learn's objective, names and attributes, on all devices.

    It minimises ``mean(residual²) / 2 + alpha * |coef|₁`` with a weighted mean. The intercept is not penalised.

    Args:
        alpha: the penalty's strength, not negative.
        fit_intercept: whether there is an intercept.
        tol: stop when the duality gap, relative to the targets' variance, is at most this, or when rounding allows no
            more; with ``solver="proximal-gradient"``, when the error for targets of variance 1 is.
        max_iter: stop after this many iterations, with a warning.
        warm_start: whether to start where the last fit ended.
        devices: number of devices to spread the rows over; default: all, or the mesh that ``jax.set_mesh`` sets.
        solver: ``"auto"``, ``"working-set"`` or ``"proximal-gradient"``.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Attributes:
        coef_: ``(d,)``.
        intercept_: a number.
        n_iter_: iterations, or changes of the working set.
        status_: why the solver stopped, in words.
        data_passes_: how often all rows were read.

    Example:
        >>> import numpy as np, paraxis as px
        >>> X = np.array([[-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
        >>> px.solve.Lasso(alpha=1.0).fit(X, 3 * X[:, 0]).coef_.round(6) + 0
        array([2., 0.])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-12,
        max_iter: int = 10_000,
        warm_start: bool = False,
        devices: int | None = None,
        solver: str = "auto",
        verbose: int | Watch = 0,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.devices = devices
        self.solver = solver
        self.verbose = verbose

    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        return Penalty(strength / posed.scale, 0.0)  # targets are divided by their scale; see ElasticNet

    def _has_l1(self) -> bool:
        return True
