"""Objectives that solvers know from the inside: means over rows of losses of a linear model.

Each is a plain function, with JAXopt's arguments where it has the same, in which a solver sees the linear model.
``data`` is ``(X, y)``, ``(X, y, weight)`` or ``(X, y, weight, offset)``: rows ``(n, d)``; targets ``(n,)``; weights
``(n,)``, over whose sum the mean is taken, so that a row of weight zero does not count; numbers ``(n,)`` that are added
to the linear model's predictions. The rows may lie on any devices in any way, and the compiler divides the work;
:func:`paraxis.solve.rows` spreads any number of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check
from paraxis.errors import DataError
from paraxis.solve._losses import LOSSES, Loss, negative_binomial, of_cost, tweedie
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

LossName = Literal["softmax", "logistic", "squared", "poisson", "gamma", "tweedie", "negative_binomial", "huber"]


@dataclasses.dataclass(frozen=True)
class LinearObjective:
    """The mean loss of a linear model, called as ``fun(params, data)``; :func:`glm` is a shorter name for it.

    Args:
        loss: ``"softmax"`` (classes, an output for each), ``"logistic"`` (targets 0 and 1, or between), ``"squared"``
            (half the squared residual), ``"huber"`` (quadratic up to a residual of 1, linear beyond it); or, with a
            logarithmic link and without the terms that depend on the targets alone, ``"poisson"`` (counts),
            ``"negative_binomial"`` (counts), ``"gamma"`` (positive numbers) or ``"tweedie"``; or a function of your
            own, ``loss(predictions, targets)`` → what each costs, of arrays of one shape, convex in predictions.
            Several outputs are several fits: the loss is a mean over the rows and a sum over the outputs.
        intercept: whether ``params`` are a pair ``(coef, intercept)``; else they are ``coef``: ``(d,)``, or ``(d, k)``
            for k outputs.
        l2: whether it is called as ``fun(params, l2reg, data)``, which adds ``l2reg / 2`` times the squared norm of
            the coefficients; the intercept is not penalised.
        power: of ``"tweedie"``: the variance is ``mean**power``; 0, or at least 1.
        dispersion: of ``"negative_binomial"``: the variance is ``mean + dispersion * mean**2``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> fun = px.solve.objective.glm("poisson", intercept=True, l2=True)
        >>> X, y = jnp.ones((4, 2)), jnp.array([1, 0, 2, 1])
        >>> fun(fun.init(2), 0.1, (X, y))
        Array(1., dtype=float32)
    """

    loss: LossName | Callable[[jax.Array, jax.Array], jax.Array]
    _: dataclasses.KW_ONLY
    intercept: bool = False
    l2: bool = False
    power: float = 1.5
    dispersion: float = 1.0

    def __post_init__(self) -> None:
        if not callable(self.loss):
            check.one_of("glm", "loss", self.loss, get_args(LossName))
        check.number("glm", "power", self.power, least=1 if self.power else 0)

    @property
    def _loss(self) -> Loss:
        if callable(self.loss):
            return of_cost(self.loss)
        if self.loss == "tweedie":
            return tweedie(self.power)
        return negative_binomial(self.dispersion) if self.loss == "negative_binomial" else LOSSES[self.loss]

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> jax.Array:
        """Return the objective's value, a scalar.

        Communicates, if rows lie on several devices: one all-reduce of a scalar, and one of the sum of the weights.
        """
        return self.problem(params, *args, **kwargs).value(params)

    def init(self, num_features: int, num_outputs: int | None = None, dtype: Any = jnp.float32) -> Any:
        """Return zeros as parameters: ``(d,)``, or ``(d, k)`` for k outputs, with an intercept if there is one."""
        outputs = () if num_outputs is None else (num_outputs,)
        coef = jnp.zeros((num_features, *outputs), dtype)
        return (coef, jnp.zeros(outputs, dtype)) if self.intercept else coef

    def problem(self, params: Any, *args: Any, **kwargs: Any) -> Linear:
        """Return the problem that these arguments pose. ``params`` tell shapes only."""
        names = ("l2reg", "data") if self.l2 else ("data",)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(arguments) != set(names) or len(args) + len(kwargs) != len(names):
            wanted = ", ".join(names)
            forms = f"(params, {wanted}), of ProximalGradient (params, hyperparams_prox, {wanted})"
            raise TypeError(f"{self} takes {forms}; update takes the state after params")
        data, l2 = arguments["data"], arguments.get("l2reg", 0)
        if not isinstance(data, tuple | list) or len(data) not in (2, 3, 4):
            raise TypeError(
                f"{self}: data must be (X, y), (X, y, weight) or (X, y, weight, offset), got {check.described(data)}; "
                "of a table, write px.solve.rows(table, engine=px.Stream(memory='2GB'))"
            )
        parts: Any = [x if isinstance(x, TableRows | None) else jnp.asarray(x) for x in (*data, None, None)[:4]]
        problem = Linear(self._loss, *parts[:3], l2=l2, intercept=self.intercept, offset=parts[3])
        self._check_shapes(params, problem)
        return problem

    def check_targets(self, params: Any, *args: Any, **kwargs: Any) -> Linear:
        """Return the problem after a look at the targets' values and the weights' sum, if they are at hand."""
        problem = self.problem(params, *args, **kwargs)
        if arrays.is_traced((problem.targets, problem.weight)):
            return problem
        num_outputs = (1, *jnp.shape(problem.coef(params))[1:])[-1]
        y = arrays.on_host(problem.targets)
        wrong = ~problem.loss.accepts(y, num_outputs)
        if problem.weight is not None:
            weight = arrays.on_host(problem.weight)
            require_sum(str(self), "weight", weight, problem.design.dtype)
            wrong &= (weight > 0).reshape(-1, *(1,) * (y.ndim - 1))
        if np.any(wrong):
            raise DataError(f"{self}: y must be {problem.loss.targets}; got {y[wrong][0]} for {num_outputs} output(s)")
        return problem

    def _check_shapes(self, params: Any, problem: Linear) -> None:
        """Raise a :class:`DataError` for shapes that would broadcast to something else."""
        if isinstance(params, tuple) != self.intercept or (self.intercept and len(params) != 2):
            form = "a pair (coef, intercept)" if self.intercept else "coefficients alone"
            raise DataError(f"{self}: params must be {form}; write fun.init(num_features, num_outputs)")
        design, weight, of_classes = problem.design, problem.weight, problem.loss.coupling is not None
        coef = jnp.shape(problem.coef(params))
        if not design.shape[0] or len(coef) not in ((2,) if of_classes else (1, 2)) or design.shape[1:] != coef[:1]:
            wanted = "(d, k), an output per class" if of_classes else "(d,), one output, or (d, k)"
            raise DataError(f"{self}: for X (n, d), coefficients must be {wanted}, got {design.shape} and {coef}")
        rows, outputs = design.shape[:1], coef[1:]
        for name, shape, expected in (
            ("l2reg", np.shape(problem.l2), ()),
            ("params: intercept", jnp.shape(params[1]) if self.intercept else outputs, outputs),
            ("data: y", jnp.shape(problem.targets), rows + (() if of_classes else outputs)),
            ("data: offset", rows + outputs if problem.offset is None else problem.offset.shape, rows + outputs),
            ("data: weight", rows if weight is None else weight.shape, rows),
        ):
            if shape != expected:
                where = f"for X {design.shape} and coefficients {coef}"
                raise DataError(f"{self}: {name} must be {expected} {where}, got {shape}")


glm = LinearObjective
"""A shorter name of :class:`LinearObjective`."""

least_squares = glm("squared")
ridge = glm("squared", l2=True)
huber = glm("huber")
poisson = glm("poisson")
binary_logreg = glm("logistic")
multiclass_logreg = glm("softmax")
multiclass_logreg_with_intercept = glm("softmax", intercept=True)
l2_multiclass_logreg = glm("softmax", l2=True)
l2_multiclass_logreg_with_intercept = glm("softmax", intercept=True, l2=True)
