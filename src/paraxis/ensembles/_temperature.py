"""Temperature scaling of predicted probabilities, and the likelihood that can be compared between models.

One number, the temperature, makes all predictions more or less confident and changes none of the predicted classes.
For an ensemble it belongs **after** averaging: the mean of members that are calibrated is under-confident and would
have to be calibrated again (Rahaman and Thiery, "Uncertainty quantification and deep ensembles", 2020, arXiv
2007.08792).

Zero probabilities are raised to the smallest normal float32, 1.2e-38, since ``log 0`` has no temperature: a label that
was given zero costs 87 nats at temperature one, where the plain likelihood is infinite.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paraxis._calls import arguments
from paraxis._jax.jax_api import Tracer
from paraxis.ensembles._checks import check_labels, check_probabilities
from paraxis.errors import DataError, ShapeError

_TINY = float(np.finfo(np.float32).tiny)
_COLDEST, _HOTTEST = 1e-2, 1e2


@arguments.named()
def fit_temperature(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the ``T`` for which ``softmax(log(probabilities) / T)`` is most likely: above one for over-confidence.

    Fit it on rows that were not used for training, and apply it to others with :func:`apply_temperature`. It is
    computed on the host in float64, and cannot be used under ``jax.jit``.

    Args:
        probabilities: floats ``(n, classes)``, each row summing to one; of an ensemble, the members' mean.
        labels: integers ``(n,)``, from 0 to ``classes - 1``.

    Returns:
        The temperature, from 0.01 to 100. If the likelihood increases up to one of these bounds, that bound: 0.01 if
        all predictions are right, 100 if they are worse than guessing. 1 if all rows are uniform, since any
        temperature is as good. NaN if there is a NaN among the probabilities.

    Raises:
        ShapeError: if an argument has another shape, or the labels are not integers; the message names it.
        DataError: if a row does not sum to one or a label is not a class.

    Source: Guo et al., "On calibration of modern neural networks", 2017, arXiv 1706.04599.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> confident = jnp.array([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])
        >>> round(ensembles.fit_temperature(confident, jnp.array([0, 0, 0, 1])), 4)
        2.0
    """
    return _fit(_margins("fit_temperature", probabilities, labels))


@arguments.named()
def apply_temperature(probabilities: ArrayLike, temperature: ArrayLike) -> jax.Array:
    """Return ``softmax(log(probabilities) / temperature)``: less confident above one, more confident below.

    Args:
        probabilities: floats ``(..., classes)``, each row summing to one.
        temperature: a positive scalar, as from :func:`fit_temperature`.

    Returns:
        Floats of the same shape, each row summing to one; half precision becomes float32.

    Raises:
        ShapeError: if the temperature is not a scalar, or there is no row.
        DataError: outside ``jax.jit``, if the temperature is not positive or a row does not sum to one.

    Source: Guo et al., "On calibration of modern neural networks", 2017, arXiv 1706.04599.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> ensembles.apply_temperature(jnp.array([[0.9, 0.1]]), 2.0).round(4)
        Array([[0.75, 0.25]], dtype=float32)
    """
    check_probabilities("apply_temperature", probabilities, ("...", "classes"))
    arguments.array("apply_temperature", "temperature", temperature)
    if np.shape(temperature) != ():
        raise ShapeError(
            f"apply_temperature: temperature has shape {np.shape(temperature)}, expected a scalar; for one per row or "
            f"member write jax.vmap(apply_temperature)(probabilities, temperature)"
        )
    if not isinstance(temperature, Tracer):
        cure = "fit_temperature(probabilities, labels)"
        arguments.number("apply_temperature", "temperature", temperature, above=0, write=cure, error=DataError)
    p = jnp.asarray(probabilities)
    p = p.astype(jnp.promote_types(p.dtype, jnp.float32))
    return jax.nn.softmax(jnp.log(jnp.maximum(p, _TINY)) / temperature, axis=-1)


@arguments.named()
def cross_fitted_nll(probabilities: ArrayLike, labels: ArrayLike, *, num_splits: int = 5, seed: int = 0) -> float:
    """Return the calibrated negative log likelihood, in nats, by which to compare models and ensembles of any size.

    The rows are split at random into halves; the temperature is fitted on each half, and the other half is scored with
    it. So every row is scored once per split, with a temperature that was fitted without its label, and a model does
    not rank low for an over-confidence that one number would correct. It is computed on the host in float64, and cannot
    be used under ``jax.jit``.

    Args:
        probabilities: floats ``(n, classes)``, each row summing to one; of an ensemble, the members' mean. At least
            two rows.
        labels: integers ``(n,)``, from 0 to ``classes - 1``.
        num_splits: number of random splits to average over.
        seed: seed of the splits; the same seed gives the same result.

    Returns:
        The mean over rows and splits: finite, or NaN if there is a NaN among the probabilities.

    Raises:
        ShapeError: if an argument has another shape, or the labels are not integers; the message names it.
        DataError: if a row does not sum to one, a label is not a class, or ``num_splits`` is below one.

    Source: test-time cross-validation in Ashukha et al., "Pitfalls of in-domain uncertainty estimation and ensembling
    in deep learning", 2020, arXiv 2002.06470.

    Example:
        >>> import numpy as np
        >>> from paraxis import ensembles
        >>> confident, labels = np.tile([[0.999, 0.001]], (1000, 1)), (np.arange(1000) % 4 == 0).astype(int)
        >>> round(float(ensembles.nll(confident, labels)), 2), round(ensembles.cross_fitted_nll(confident, labels), 2)
        (1.73, 0.57)
    """
    arguments.count("cross_fitted_nll", "num_splits", num_splits, write="num_splits=5", error=DataError)
    arguments.count("cross_fitted_nll", "seed", seed, least=0, write="seed=0", error=DataError)
    margins = _margins("cross_fitted_nll", probabilities, labels)
    if len(margins) < 2:
        raise ShapeError(
            f"cross_fitted_nll: probabilities has shape {margins.shape}, expected two rows at least, to fit on one "
            f"half and score the other; of a single row write nll(probabilities, labels)"
        )
    rng = np.random.default_rng(seed)
    return float(np.mean([_split_nll(rng.permutation(margins)) for _ in range(num_splits)]))


# With l = log p, the negative log likelihood at beta = 1 / T of a row with label y is
#
#     log sum_c exp(beta l_c) - beta l_y  =  log sum_c exp(beta m_c),    m_c = l_c - l_y:
#
# a log-sum-exp of functions linear in beta, so convex in beta. Its derivative is the mean of m under the probabilities
# softmax(beta m), and it never falls as beta grows (its own derivative is the variance of m under them): the best beta
# is where the derivative's sign changes. The margins m are all that is needed; exactly zero for a uniform row.


def _margins(function: str, probabilities: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """``log p`` less ``log p`` of the label, float64 ``(n, classes)``."""
    check_probabilities(function, probabilities)
    n, classes = np.shape(probabilities)
    check_labels(function, labels, n, classes)
    log_p = np.log(np.maximum(np.asarray(probabilities, np.float64), _TINY))
    return log_p - np.take_along_axis(log_p, np.asarray(labels, np.int64)[:, None], axis=-1)


def _fit(margins: np.ndarray) -> float:
    if np.isnan(margins).any():
        return float("nan")
    low, high = 1 / _HOTTEST, 1 / _COLDEST
    # At or beyond a bound; if both, the derivative is zero all the way.
    grows, falls = _slope(margins, low) >= 0, _slope(margins, high) <= 0
    if grows or falls:
        return 1.0 if grows and falls else _HOTTEST if grows else _COLDEST
    # Halving the ratio of the bounds, 1e4 at first, 60 times leaves nothing but rounding.
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if _slope(margins, middle) < 0 else (low, middle)
    return float(1 / np.sqrt(low * high))


def _slope(margins: np.ndarray, beta: float) -> float:
    """Return the derivative of the negative log likelihood with respect to beta."""
    weights = np.exp(beta * (margins - margins.max(-1, keepdims=True)))
    return float(((weights * margins).sum(-1) / weights.sum(-1)).mean())


def _split_nll(margins: np.ndarray) -> float:
    halves = np.array_split(margins, 2)
    scored = [_nll(score, _fit(fit)) for fit, score in (halves, halves[::-1])]
    return float(np.concatenate(scored).mean())


def _nll(margins: np.ndarray, temperature: float) -> np.ndarray:
    """Return the negative log likelihood of each row."""
    scaled = margins / temperature
    top = scaled.max(-1)
    return top + np.log(np.exp(scaled - top[:, None]).sum(-1))
