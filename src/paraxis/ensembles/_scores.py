"""Scores of predicted class probabilities, of a classifier or an ensemble: how good they are, and how uncertain.

Plain functions of arrays, NumPy's or JAX's; all but :func:`evaluate` also run under ``jax.jit``. Sums are taken in
float32 at least. A NaN among the probabilities, as a member that failed leaves it, makes the score NaN.

Values are looked at only where there are any, that is outside ``jax.jit``: rows that do not sum to one, and labels
that are no class, raise there. Under ``jax.jit`` a label that is no class counts as one of probability zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paraxis._calls import arguments
from paraxis.ensembles._checks import MEMBERS, check_probabilities, checked, floating
from paraxis.errors import DataError


class Reliability(NamedTuple):
    """The data of a reliability diagram, one entry per bin; see :func:`reliability`.

    Attributes:
        confidence: mean of the top probabilities in each bin ``(num_bins,)``; NaN in an empty bin.
        accuracy: share of correct predictions in each bin ``(num_bins,)``; NaN in an empty bin.
        num_rows: number of rows in each bin, int32 ``(num_bins,)``.
    """

    confidence: jax.Array
    accuracy: jax.Array
    num_rows: jax.Array


class Scores(NamedTuple):
    """The scores of an ensemble's averaged prediction, and how much its members differ; see :func:`evaluate`.

    Attributes:
        accuracy: share of correct predictions.
        nll: mean negative log likelihood, in nats.
        brier_score: Brier score, from 0 to 2.
        calibration_error: expected calibration error with 15 bins.
        disagreement: share of rows on which two members predict different classes.
        mutual_information: mutual information, mean over the rows, in nats.
    """

    accuracy: float
    nll: float
    brier_score: float
    calibration_error: float
    disagreement: float
    mutual_information: float


@arguments.named()
def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Return the share of the rows whose most probable class (in a tie, the first one) is the label.

    Args:
        probabilities: floats ``(n, classes)``, each row summing to one.
        labels: integers ``(n,)``, from 0 to ``classes - 1``.

    Returns:
        A float scalar from 0 to 1.

    Raises:
        ShapeError: if an argument has another shape, or the labels are not integers; the message names it.
        DataError: outside ``jax.jit``, if a row does not sum to one or a label is not a class.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> ensembles.accuracy(jnp.array([[0.75, 0.25], [0.5, 0.5]]), jnp.array([0, 1]))
        Array(0.5, dtype=float32)
    """
    p, y = checked("accuracy", probabilities, labels)
    return _top(p, y)[1].mean()


@arguments.named()
def nll(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Return the mean negative log likelihood of the labels, in nats; lower is better.

    Arguments and errors: :func:`accuracy`.

    The score is strictly proper: its expectation is best for the true probabilities only. Nothing is clipped: a single
    label with probability zero makes it **infinite**.

    Returns:
        A float scalar, zero or more.

    Source: Good, "Rational decisions", 1952; Gneiting and Raftery, "Strictly proper scoring rules", 2007.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> float(ensembles.nll(jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([0, 0])))
        inf
    """
    p, y = checked("nll", probabilities, labels)
    likelihood = jnp.where(y[:, None] == jnp.arange(p.shape[-1]), p, 0).sum(-1)
    return _nan_where_nan(p, -jnp.log(likelihood)).mean()


@arguments.named()
def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Return the multi-class Brier score; lower is better. Arguments and errors: :func:`accuracy`.

    Squared differences between the probabilities and the one-hot label, summed over the classes and averaged over the
    rows. This is Brier's own convention; for two classes it is twice the score that considers one class only.

    Returns:
        A float scalar from 0 to 2. The score is strictly proper, like :func:`nll`, and finite.

    Source: Brier, "Verification of forecasts expressed in terms of probability", 1950.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> ensembles.brier_score(jnp.array([[1.0, 0.0], [0.5, 0.5]]), jnp.array([1, 0]))
        Array(1.25, dtype=float32)
    """
    p, y = checked("brier_score", probabilities, labels)
    return jnp.square(p - jax.nn.one_hot(y, p.shape[-1], dtype=p.dtype)).sum(-1).mean()


@arguments.named()
def calibration_error(probabilities: ArrayLike, labels: ArrayLike, *, num_bins: int = 15) -> jax.Array:
    """Return the expected calibration error, the gap between confidence and accuracy. Arguments: see :func:`accuracy`.

    The rows are put in bins by their top probability; the gaps between mean confidence and accuracy in the bins are
    averaged, each weighted by its share of the rows.

    **This is a weak score**: it is biased, and it depends on the number of bins; it is zero for constant predictions at
    the classes' frequencies; and a ranking of models by it can change with the bins and with the temperature. To
    compare models, use the calibrated likelihood, :func:`cross_fitted_nll`, as Ashukha et al. advise.

    Args:
        probabilities: floats ``(n, classes)``, each row summing to one.
        labels: integers ``(n,)``.
        num_bins: number of bins of equal width, ``(k / num_bins, (k + 1) / num_bins]``.

    Returns:
        A float scalar from 0 to 1.

    Source: Guo et al., "On calibration of modern neural networks", 2017, arXiv 1706.04599. Its weakness: Ashukha et
    al., "Pitfalls of in-domain uncertainty estimation and ensembling in deep learning", 2020, arXiv 2002.06470.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> ensembles.calibration_error(jnp.array([[0.75, 0.25], [0.75, 0.25]]), jnp.array([0, 1]))
        Array(0.25, dtype=float32)
    """
    p, y = checked("calibration_error", probabilities, labels)
    confidence, correct = _top(p, y)
    is_in = _bins("calibration_error", confidence, num_bins)
    gaps = jnp.abs(_sums(is_in, correct - confidence))
    return gaps.sum() / len(p)


@arguments.named()
def reliability(probabilities: ArrayLike, labels: ArrayLike, *, num_bins: int = 15) -> Reliability:
    """Return confidence and accuracy per bin of confidence, to draw a reliability diagram.

    Arguments, bins and errors: :func:`calibration_error`, which is the mean of ``|accuracy - confidence|`` weighted by
    ``num_rows``.

    Returns:
        ``Reliability(confidence, accuracy, num_rows)``, each ``(num_bins,)``; empty bins are NaN. A row with NaN is in
        no bin and makes the confidence and the accuracy of all bins NaN.

    Source: DeGroot and Fienberg, "The comparison and evaluation of forecasters", 1983.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> shown = ensembles.reliability(jnp.array([[0.75, 0.25], [1.0, 0.0]]), jnp.array([1, 0]), num_bins=4)
        >>> shown.num_rows, shown.accuracy
        (Array([0, 0, 1, 1], dtype=int32), Array([nan, nan,  0.,  1.], dtype=float32))
    """
    p, y = checked("reliability", probabilities, labels)
    confidence, correct = _top(p, y)
    is_in = _bins("reliability", confidence, num_bins)
    num_rows = is_in.sum(0, dtype=jnp.int32)
    # 0 / 0 where a bin is empty.
    confidence, correct = (_sums(is_in, x) / num_rows.astype(x.dtype) for x in (confidence, correct))
    return Reliability(confidence, correct, num_rows)


@arguments.named()
def entropy(probabilities: ArrayLike) -> jax.Array:
    """Return the entropy of each row in nats, with ``0 log 0 = 0``: the uncertainty of each prediction.

    Args:
        probabilities: floats ``(n, classes)``, or any ``(..., classes)``, each row summing to one.

    Returns:
        Floats ``(n,)``, or ``(...)``, from 0 to ``log(classes)``.

    Raises:
        ShapeError: if there is no row.
        DataError: outside ``jax.jit``, if a row does not sum to one.

    Source: Shannon, "A mathematical theory of communication", 1948.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> ensembles.entropy(jnp.array([[1.0, 0.0], [0.5, 0.5]])).round(4)
        Array([0.    , 0.6931], dtype=float32)
    """
    check_probabilities("entropy", probabilities, ("...", "classes"))
    return jax.scipy.special.entr(floating(probabilities)).sum(-1)


@arguments.named()
def disagreement(member_probabilities: ArrayLike) -> jax.Array:
    """Return the share of the rows on which two members predict different classes, averaged over all pairs.

    For a single member it is zero.

    Args:
        member_probabilities: floats ``(members, n, classes)``, each row summing to one.

    Returns:
        A float scalar from 0 to 1.

    Raises:
        ShapeError: if the number of dimensions is different.
        DataError: outside ``jax.jit``, if a row does not sum to one.

    Source: Fort, Hu and Lakshminarayanan, "Deep ensembles: a loss landscape perspective", 2019, arXiv 1912.02757.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> one, other = jnp.array([[0.75, 0.25], [0.75, 0.25]]), jnp.array([[0.75, 0.25], [0.25, 0.75]])
        >>> ensembles.disagreement(jnp.stack([one, other]))
        Array(0.5, dtype=float32)
    """
    check_probabilities("disagreement", member_probabilities, MEMBERS)
    p = floating(member_probabilities)
    members, _, classes = p.shape
    # Of members · (members - 1) ordered pairs, num_votes · (members - num_votes) are of a class and another one.
    num_votes = jax.nn.one_hot(p.argmax(-1), classes, dtype=p.dtype).sum(0)
    share = (num_votes / members * ((members - num_votes) / max(members - 1, 1))).sum(-1)
    return _nan_where_nan(p.sum(0), share).mean()


@arguments.named()
def mutual_information(member_probabilities: ArrayLike) -> jax.Array:
    """Return the entropy of the members' mean minus the mean of their entropies, in nats per row.

    It measures disagreement: the part of the uncertainty that a single member does not show. It is zero where all
    members predict the same; negative values that arise from rounding are set to zero.

    Args:
        member_probabilities: floats ``(members, n, classes)``, each row summing to one.

    Returns:
        Floats ``(n,)``, from 0 to ``log(min(members, classes))``.

    Raises:
        ShapeError: if the number of dimensions is different.
        DataError: outside ``jax.jit``, if a row does not sum to one.

    Source: Houlsby et al., "Bayesian active learning for classification and preference learning", 2011, arXiv
    1112.5745.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> opposite = jnp.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
        >>> ensembles.mutual_information(opposite).round(4)
        Array([0.6931, 0.    ], dtype=float32)
    """
    check_probabilities("mutual_information", member_probabilities, MEMBERS)
    p = floating(member_probabilities)
    return jnp.maximum(entropy(p.mean(0)) - entropy(p).mean(0), 0)


@arguments.named()
def evaluate(member_probabilities: ArrayLike, labels: ArrayLike) -> Scores:
    """Return all scores of an ensemble's averaged prediction, and how much its members differ, as plain floats.

    It cannot be used under ``jax.jit``.

    Args:
        member_probabilities: floats ``(members, n, classes)``, each row summing to one.
        labels: integers ``(n,)``, from 0 to ``classes - 1``.

    Returns:
        ``Scores(accuracy, nll, brier_score, calibration_error, disagreement, mutual_information)``; each is the
        result of the function of that name; the last one is averaged over the rows.

    Raises:
        ShapeError: if an argument has another shape, or the labels are not integers; the message names it.
        DataError: if a row does not sum to one or a label is not a class.

    Source: Lakshminarayanan, Pritzel and Blundell, "Simple and scalable predictive uncertainty estimation using deep
    ensembles", 2017, arXiv 1612.01474.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis import ensembles
        >>> one, other = jnp.array([[0.75, 0.25], [0.75, 0.25]]), jnp.array([[0.75, 0.25], [0.25, 0.75]])
        >>> scores = ensembles.evaluate(jnp.stack([one, other]), jnp.array([0, 0]))
        >>> scores.accuracy, scores.brier_score, scores.disagreement
        (1.0, 0.3125, 0.5)
    """
    p, y = checked("evaluate", member_probabilities, labels, MEMBERS)
    return Scores(*(float(score) for score in _all_scores(p, y)))


@jax.jit
def _all_scores(p: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    mean = p.mean(0)
    of_mean = (score(mean, y) for score in (accuracy, nll, brier_score, calibration_error))
    return (*of_mean, disagreement(p), mutual_information(p).mean())


def _top(p: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's top probability and whether it is the label's, 1 or 0; both NaN where the row has a NaN."""
    return p.max(-1), _nan_where_nan(p, (p.argmax(-1) == labels).astype(p.dtype))


def _nan_where_nan(p: jax.Array, scores: jax.Array) -> jax.Array:
    """Return the scores of rows, but NaN for rows with a NaN, which comparisons would hide."""
    return jnp.where(jnp.isnan(p).any(-1), jnp.nan, scores)


def _bins(function: str, confidence: jax.Array, num_bins: int) -> jax.Array:
    """Return which bin each row is in: booleans ``(n, num_bins)``, none of them true for a row that is NaN."""
    arguments.count(function, "num_bins", num_bins, write="num_bins=15", error=DataError)
    edges = np.linspace(0, 1, num_bins + 1)
    # A confidence that rounding has put above one is still in the last bin.
    edges[[0, -1]] = -np.inf, np.inf
    edges = jnp.asarray(edges, confidence.dtype)
    return (confidence[:, None] > edges[:-1]) & (confidence[:, None] <= edges[1:])


def _sums(is_in: jax.Array, values: jax.Array) -> jax.Array:
    """Return the sum of the values in each bin; all of them NaN if one of the values is."""
    sums = jnp.where(is_in, values[:, None], 0).sum(0)
    return jnp.where(jnp.isnan(values).any(), jnp.nan, sums)
