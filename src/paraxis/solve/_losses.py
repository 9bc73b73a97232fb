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
    rows: Callable[[jax.Array, jax.Array], jax.Array]  # predictions (n,) or (k, n), targets → costs (n,)
    curvature: Callable[[Any, Any], jax.Array]  # the same → about the mean second derivative by the outputs, (n,)
    targets: str = "finite numbers"
    bounds: tuple[float, float] = (-np.inf, np.inf)  # of targets
    # Of classes, whose targets are their numbers (n,), predictions, weights (n,) → the weighted sum of a row's second
    # derivatives by two outputs, (k, k); and predictions, targets → derivatives of the costs, as the predictions
    coupling: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    slope: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    def accepts(self, y: np.ndarray, num_outputs: int) -> np.ndarray:
        """Return which targets have a cost that makes sense."""
        of_classes = self.coupling is not None
        least, most = (0, num_outputs - 1) if of_classes else self.bounds
        return (y >= least) & (y <= most) & np.isfinite(y) & ((y == np.floor(y)) | (not of_classes))


_FEW = 20  # outputs over which a reduction is written out; with more, XLA computes parts of it many times over


def _over_outputs(combine: Callable[[Any, Any], Any], terms: Callable[[Any, Any], jax.Array], z: jax.Array) -> Any:
    """Return a reduction of ``terms(number of an output, its predictions)`` over the outputs, ``(n,)``.

    Written out, all of a row is one loop; XLA's CPU reductions over the leading dimension take up to five times longer.
    """
    if z.shape[0] <= _FEW:
        outputs = jax.lax.split(z, (1,) * z.shape[0])
        return functools.reduce(combine, [terms(i, x[0]) for i, x in enumerate(outputs)])
    reduce = {operator.add: jnp.sum, jnp.maximum: jnp.max}[combine]
    return reduce(jax.vmap(terms)(jnp.arange(z.shape[0]), z), 0)


def _top_and_total(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's largest prediction, and its sum of exponentials beside that one."""
    top = jax.lax.stop_gradient(_over_outputs(jnp.maximum, lambda i, x: x, z))
    return top, _over_outputs(operator.add, lambda i, x: jnp.exp(x - top), z)


def _softmax_rows(z: jax.Array, labels: jax.Array) -> jax.Array:
    top, total = _top_and_total(z)
    # A gather would be slower than a sum of mostly zeros.
    at_label = _over_outputs(operator.add, lambda i, x: jnp.where(i == labels.astype(int), x, 0), z)
    return jnp.log(total) + (top - at_label)


def _softmax_slope(z: jax.Array, labels: jax.Array) -> jax.Array:
    """Return probabilities, less 1 for the right class: one loop on CPUs, where JAX's derivative has one an output."""
    top, total = _top_and_total(z)
    is_own = jnp.arange(z.shape[0])[:, None] == labels.astype(int)[None]
    return jnp.exp((z - top[None]) - jnp.log(total)[None]) - is_own.astype(z.dtype)


def _softmax_curvature(z: jax.Array, labels: jax.Array) -> jax.Array:
    return (1 - jnp.sum(jax.nn.softmax(z, 0) ** 2, 0)) / max(z.shape[0] - 1, 1)


def _softmax_coupling(z: jax.Array, weight: jax.Array) -> jax.Array:
    weighted = weight[None] * (p := jax.nn.softmax(z, 0))
    return jnp.diag(jnp.sum(weighted, 1)) - jnp.matmul(weighted, p.T, precision=jax.lax.Precision.HIGHEST)


def _sum_of_outputs(x: jax.Array) -> jax.Array:
    return x if x.ndim == 1 else _over_outputs(operator.add, lambda i, x: x, x)


def _by_output(cost: Callable[[Any, Any], jax.Array], *options: Any, curvature: Any = None) -> Loss:
    """Return the loss of rows that cost the sum of what their outputs cost; curvatures are its second derivatives."""

    def rows(z: jax.Array, y: jax.Array) -> jax.Array:
        return _sum_of_outputs(cost(z, (y if y.ndim == 1 else y.T).astype(z.dtype)))

    def mean_curvature(z: jax.Array, y: jax.Array) -> jax.Array:
        one, y = jnp.ones_like(z), (y if y.ndim == 1 else y.T).astype(z.dtype)
        slope = lambda z: jax.jvp(lambda z: cost(z, y), (z,), (one,))[1]  # noqa: E731
        second = jax.jvp(slope, (z,), (one,))[1] if curvature is None else curvature(z)
        return _sum_of_outputs(second) / (1 if z.ndim == 1 else z.shape[0])

    return Loss(rows, mean_curvature, *options)


def _logistic(z: jax.Array, y: jax.Array) -> jax.Array:
    # softplus(z) - y * z is the same, but loses what is left where z is large
    return y * jax.nn.softplus(-z) + (1 - y) * jax.nn.softplus(z)


def _huber(z: jax.Array, y: jax.Array) -> jax.Array:
    r = jnp.abs(z - y)
    inner = jnp.minimum(r, 1)
    return 0.5 * inner**2 + (r - inner)


_CLASSES = "class numbers from 0 to k - 1; write y = np.unique(labels, return_inverse=True)[1]"
_SHARES = "0 and 1, or between; write y = labels == labels.max()"
_COUNTS = "counts, not negative", (0, np.inf)
_POSITIVE = "positive numbers", (np.nextafter(0, 1), np.inf)

LOSSES = {
    "softmax": Loss(_softmax_rows, _softmax_curvature, _CLASSES, coupling=_softmax_coupling, slope=_softmax_slope),
    "logistic": _by_output(_logistic, _SHARES, (0, 1)),
    "squared": _by_output(lambda z, y: 0.5 * (z - y) ** 2),
    "poisson": _by_output(lambda z, y: jnp.exp(z) - y * z, *_COUNTS),
    "gamma": _by_output(lambda z, y: z + y * jnp.exp(-z), *_POSITIVE),
    "huber": _by_output(_huber, curvature=jnp.ones_like),
}


@functools.lru_cache
def of_cost(cost: Callable[[Any, Any], jax.Array]) -> Loss:
    """Return a user's loss. Its curvature, which scales steps, is taken for 1: it may vanish far from the targets."""
    return _by_output(cost, curvature=jnp.ones_like)


@functools.lru_cache(maxsize=128)
def tweedie(power: float) -> Loss:
    """Return half the deviance of a variance ``mean**power``, but for what depends on the targets alone."""
    if power in (1, 2):
        return LOSSES["poisson" if power == 1 else "gamma"]
    to_targets = _POSITIVE if power > 2 else ("numbers, not negative", (0, np.inf)) if power else ()
    a, b = 1 - power, 2 - power
    return _by_output(lambda z, y: jnp.exp(b * z) / b - y * jnp.exp(a * z) / a, *to_targets)


@functools.lru_cache(maxsize=128)
def negative_binomial(dispersion: float) -> Loss:
    """Return minus the log-likelihood of counts of variance ``mean + dispersion * mean**2``, likewise."""
    return _by_output(lambda z, y: (y + 1 / dispersion) * jax.nn.softplus(z + np.log(dispersion)) - y * z, *_COUNTS)
