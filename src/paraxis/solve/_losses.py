"""Losses of a prediction: what a row costs, given what the linear model says of it.

Predictions ``z`` are ``(n,)``, or ``(k, n)`` with the outputs first: then a row's outputs lie far apart in memory and
neighbouring rows side by side, which is what vector units want. Slopes are JAX's own derivatives, but for softmax.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Loss:
    """A row's loss and its curvature."""

    name: str
    rows: Callable[[jax.Array, jax.Array], jax.Array]  # predictions (n,) or (k, n), targets → costs (n,)
    curvature: Callable[[jax.Array], jax.Array]  # predictions → about the mean second derivative by the outputs, (n,)
    # Predictions, weights (n,) → the weighted sum of a row's second derivatives by two outputs, (k, k)
    coupling: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    # Predictions, targets → derivatives of the costs, as the predictions; None: JAX's
    slope: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    classes: bool = False  # whether targets are class numbers (n,) and there is an output for each
    single: bool = False  # whether there is one output only
    flat: bool = False  # whether the curvature is the same wherever predictions are
    # Targets (n,) and the number of outputs → which targets have a cost that makes sense; and these in words
    accepts: Callable[[np.ndarray, int], np.ndarray] = lambda y, k: np.isfinite(y)
    targets: str = "finite numbers"


_FEW = 20  # outputs over which a reduction is written out; with more, XLA computes parts of it many times over


def _over_outputs(combine: Callable[[Any, Any], Any], terms: Callable[[Any, Any], jax.Array], z: jax.Array) -> Any:
    """Return a reduction of ``terms(number of an output, its predictions)`` over the outputs, ``(n,)``.

    Written out, all of a row is one loop over the rows, with its derivatives; XLA's CPU reductions over the leading
    dimension take up to five times as long, and the transpose of an index instead of a split even more.
    """
    if z.shape[0] <= _FEW:
        outputs = jax.lax.split(z, (1,) * z.shape[0])
        return functools.reduce(combine, [terms(i, x[0]) for i, x in enumerate(outputs)])
    reduce = {operator.add: jnp.sum, jnp.maximum: jnp.max}[combine]
    return reduce(terms(jnp.arange(z.shape[0])[:, None], z), 0)


def _top_and_total(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's largest prediction, and its sum of exponentials beside that one."""
    top = jax.lax.stop_gradient(_over_outputs(jnp.maximum, lambda i, x: x, z))
    return top, _over_outputs(operator.add, lambda i, x: jnp.exp(x - top), z)


def _softmax_rows(z: jax.Array, labels: jax.Array) -> jax.Array:
    top, total = _top_and_total(z)
    # A gather would be slower than a sum of mostly zeros.
    own = _over_outputs(operator.add, lambda i, x: jnp.where(i == labels, x, 0), z)
    return jnp.log(total) + (top - own)


def _softmax_slope(z: jax.Array, labels: jax.Array) -> jax.Array:
    """Return probabilities, less 1 for the right class: one loop on CPUs, where JAX's derivative has one an output."""
    top, total = _top_and_total(z)
    is_own = jnp.arange(z.shape[0])[:, None] == labels
    return jnp.exp((z - top) - jnp.log(total)) - is_own.astype(z.dtype)


def _softmax_curvature(z: jax.Array) -> jax.Array:
    return (1 - jnp.sum(jax.nn.softmax(z, 0) ** 2, 0)) / max(z.shape[0] - 1, 1)


def _softmax_coupling(z: jax.Array, weight: jax.Array) -> jax.Array:
    p = jax.nn.softmax(z, 0)
    return jnp.diag(jnp.sum(weight * p, 1)) - jnp.matmul(weight * p, p.T, precision=jax.lax.Precision.HIGHEST)


def _logistic_rows(z: jax.Array, labels: jax.Array) -> jax.Array:
    y = labels.astype(z.dtype)  # softplus(z) - y * z is the same, but loses what is left where z is large
    return y * jax.nn.softplus(-z) + (1 - y) * jax.nn.softplus(z)


def _logistic_curvature(z: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)


def _by_row(costs: jax.Array) -> jax.Array:
    """Return the mean over a row's outputs."""
    return costs if costs.ndim == 1 else _over_outputs(operator.add, lambda i, x: x, costs) / costs.shape[0]


def _residual(z: jax.Array, y: jax.Array) -> jax.Array:
    return z - (y if y.ndim == 1 else y.T).astype(z.dtype)


def _squared_rows(z: jax.Array, y: jax.Array) -> jax.Array:
    return _by_row(0.5 * _residual(z, y) ** 2)


def _flat_curvature(z: jax.Array) -> jax.Array:
    return jnp.full(z.shape[-1:], 1 if z.ndim == 1 else 1 / z.shape[0], z.dtype)


def _poisson_rows(z: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.exp(z) - y.astype(z.dtype) * z


def _huber_rows(z: jax.Array, y: jax.Array) -> jax.Array:
    r = jnp.abs(_residual(z, y))
    inner = jnp.minimum(r, 1)
    return _by_row(0.5 * inner**2 + (r - inner))


SOFTMAX = Loss(
    "softmax",
    _softmax_rows,
    _softmax_curvature,
    _softmax_coupling,
    _softmax_slope,
    classes=True,
    accepts=lambda y, k: (y >= 0) & (y < k) & (y == np.floor(y)),
    targets="class numbers from 0 to k - 1; write y = np.unique(labels, return_inverse=True)[1]",
)
LOGISTIC = Loss(
    "logistic",
    _logistic_rows,
    _logistic_curvature,
    single=True,
    accepts=lambda y, k: (y >= 0) & (y <= 1),
    targets="0 and 1, or between; write y = labels == labels.max()",
)
SQUARED = Loss("squared", _squared_rows, _flat_curvature, flat=True)
POISSON = Loss(
    "poisson",
    _poisson_rows,
    jnp.exp,
    single=True,
    accepts=lambda y, k: (y >= 0) & (y < np.inf),
    targets="counts, not negative",
)
HUBER = Loss("huber", _huber_rows, _flat_curvature)
