"""Objectives that solvers know from the inside: means over rows of losses of a linear model.

Each is a plain function, with JAXopt's arguments where it has the same. A solver sees the linear model in it, and reads
the data less often for it.

``data`` is ``(X, y)`` or ``(X, y, weight)``: rows ``(n, d)``; targets ``(n,)``; weights ``(n,)``, over whose sum the
mean is taken, so that a row of weight zero does not count. The rows may lie on any devices in any way, and the compiler
divides the work; :func:`paraxis.solve.rows` spreads any number of them.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check
from paraxis._tables import Table
from paraxis.errors import DataError
from paraxis.solve import _losses as losses
from paraxis.solve._losses import Loss
from paraxis.solve._problem import Linear
from paraxis.solve._rows import require_sum
from paraxis.solve._streaming import TableRows

__all__ = [
    "LinearObjective",
    "binary_logreg",
    "glm",
    "huber",
    "l2_multiclass_logreg",
    "l2_multiclass_logreg_with_intercept",
    "least_squares",
    "multiclass_logreg",
    "multiclass_logreg_with_intercept",
    "poisson",
    "ridge",
]

_LOSSES = {loss.name: loss for loss in (losses.LOGISTIC, losses.SOFTMAX, losses.SQUARED, losses.POISSON, losses.HUBER)}

LossName = Literal["softmax", "logistic", "squared", "poisson", "huber"]


@dataclasses.dataclass(frozen=True)
class LinearObjective:
    """The mean loss of a linear model, made by :func:`glm` and called as ``fun(params, data)``.

    Args:
        loss: the loss of a row.
        intercept: whether ``params`` are a pair ``(coef, intercept)``; else they are ``coef``: ``(d,)``, or ``(d, k)``
            for k outputs.
        l2: whether it is called as ``fun(params, l2reg, data)``, which adds ``l2reg / 2`` times the squared norm of
            the coefficients; the intercept is not penalised.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> X, y = jnp.eye(3), jnp.array([0, 1, 0])
        >>> px.solve.objective.binary_logreg(jnp.zeros(3), (X, y))
        Array(0.6931472, dtype=float32)
    """

    loss: Loss
    intercept: bool = False
    l2: bool = False

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> jax.Array:
        """Return the objective's value, a scalar.

        Communicates, if rows lie on several devices: one all-reduce of a scalar, and one of the sum of the weights.
        """
        return self.problem(params, *args, **kwargs).value(params)

    def problem(self, params: Any, *args: Any, **kwargs: Any) -> Linear:
        """Return the problem that these arguments pose. ``params`` tell shapes only."""
        names = ("l2reg", "data") if self.l2 else ("data",)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(given) != set(names) or len(args) + len(kwargs) != len(names):
            wanted, got = ", ".join(names), len(args) + len(kwargs)
            raise TypeError(f"{self} takes (params, {wanted}), got {got} after params; update(params, state, {wanted})")
        data: Any = given["data"]
        l2: Any = given.get("l2reg")
        if isinstance(data, Table):
            raise TypeError(f"{self}: data is a table; write px.solve.rows(table, engine=px.Stream(memory='2GB'))")
        if not isinstance(data, tuple | list) or len(data) not in (2, 3) or any(x is None for x in data[:2]):
            raise TypeError(f"{self}: data must be (X, y) or (X, y, weight), got {check.described(data)}")
        if np.shape(l2) != ():
            raise DataError(f"{self}: l2reg must be a number, got {check.described(l2)}; write 0.1")
        leaves: list[Any] = [x if isinstance(x, TableRows | None) else jnp.asarray(x) for x in (*data, None)[:3]]
        problem = Linear(self.loss, *leaves, l2=l2, intercept=self.intercept)
        self._check(params, problem)
        return problem

    def check_targets(self, params: Any, *args: Any, **kwargs: Any) -> Linear:
        """Return the problem after a look at the targets' values and the weights' sum, if they are at hand."""
        problem = self.problem(params, *args, **kwargs)
        if arrays.is_traced((problem.targets, problem.weight)):
            return problem
        num_outputs = (1, *jnp.shape(params[0] if self.intercept else params)[1:])[-1]
        y = arrays.on_host(problem.targets)
        wrong = ~self.loss.accepts(y, num_outputs)
        if problem.weight is not None:
            weight = arrays.on_host(problem.weight)
            require_sum(str(self), "weight", weight, problem.design.dtype)
            wrong &= (weight > 0).reshape(-1, *(1,) * (y.ndim - 1))
        if np.any(wrong):
            raise DataError(f"{self}: y must be {self.loss.targets}; got {y[wrong][0]} for {num_outputs} output(s)")
        return problem

    def init(self, num_features: int, num_outputs: int | None = None, dtype: Any = jnp.float32) -> Any:
        """Return zeros as parameters: ``(d,)``, or ``(d, k)`` for k outputs, with an intercept if there is one."""
        outputs = () if num_outputs is None else (num_outputs,)
        coef = jnp.zeros((num_features, *outputs), dtype)
        return (coef, jnp.zeros(outputs, dtype)) if self.intercept else coef

    def _check(self, params: Any, problem: Linear) -> None:
        design, loss = problem.design, self.loss
        if design.ndim != 2 or not design.shape[0]:
            raise DataError(f"{self}: data: X must be (n, d) with at least one row, got {design.shape}")
        if isinstance(params, tuple) != self.intercept or (self.intercept and len(params) != 2):
            raise DataError(
                f"{self}: params must be {'a pair (coef, intercept)' if self.intercept else 'coefficients alone'}; "
                f"write fun.init(num_features={design.shape[1]}, num_outputs=…), or glm(…, intercept=True) for a pair"
            )
        shape = jnp.shape(params[0] if self.intercept else params)
        wanted = {1: "(d,), one output", 2: "(d, k), an output per class"}
        num_dims = 1 if loss.single else 2 if loss.classes else min(max(len(shape), 1), 2)
        if shape[:1] != design.shape[1:] or len(shape) != num_dims:
            raise DataError(
                f"{self}: for X (n, d), coefficients must be {wanted[num_dims]}, got {design.shape} and {shape}"
            )
        rows, weight = design.shape[:1], problem.weight
        for name, found, expected in (
            ("params: intercept", jnp.shape(params[1]) if self.intercept else shape[1:], shape[1:]),
            ("data: y", problem.targets.shape, rows + (() if loss.classes else shape[1:])),
            ("data: weight", rows if weight is None else weight.shape, rows),
        ):
            if found != expected:
                where = f"for X {design.shape} and coefficients {shape}"
                raise DataError(f"{self}: {name} must be {expected} {where}, got {found}")

    def __reduce__(self) -> Any:
        return functools.partial(glm, intercept=self.intercept, l2=self.l2), (self.loss.name,)

    def __repr__(self) -> str:
        return f"glm({self.loss.name!r}{', intercept=True' * self.intercept}{', l2=True' * self.l2})"


def glm(loss: LossName, *, intercept: bool = False, l2: bool = False) -> LinearObjective:
    """Return the mean loss of a generalised linear model as an objective.

    Args:
        loss: ``"softmax"`` (classes, an output for each), ``"logistic"`` (targets 0 and 1, or between), ``"squared"``
            (half the squared residual), ``"poisson"`` (counts, with a logarithmic link; without the term that depends
            only on the counts) or ``"huber"`` (quadratic up to a residual of 1, linear beyond it).
        intercept: whether parameters are a pair of coefficients and intercept.
        l2: whether there is an argument ``l2reg`` before ``data``; solutions can be differentiated with respect to it.

    Returns:
        A function ``(params, data)``, or ``(params, l2reg, data)``.

    Raises:
        ValueError: if there is no such loss.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> fun = px.solve.objective.glm("poisson", intercept=True, l2=True)
        >>> X, y = jnp.ones((4, 2)), jnp.array([1, 0, 2, 1])
        >>> fun(fun.init(2), 0.1, (X, y))
        Array(1., dtype=float32)
    """
    check.one_of("glm", "loss", loss, tuple(_LOSSES))
    return LinearObjective(_LOSSES[loss], intercept=intercept, l2=l2)


least_squares = glm("squared")
ridge = glm("squared", l2=True)
huber = glm("huber")
poisson = glm("poisson")
binary_logreg = glm("logistic")
multiclass_logreg = glm("softmax")
multiclass_logreg_with_intercept = glm("softmax", intercept=True)
l2_multiclass_logreg = glm("softmax", l2=True)
l2_multiclass_logreg_with_intercept = glm("softmax", intercept=True, l2=True)
