"""The scores of predicted probabilities are what scikit-learn, SciPy and loops written out say."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from paraxis import DataError, ShapeError
from paraxis.ensembles import (
    Reliability,
    Scores,
    accuracy,
    brier_score,
    calibration_error,
    disagreement,
    entropy,
    evaluate,
    mutual_information,
    nll,
    reliability,
)

SIZES = [(1, 2), (20, 4), (200, 10)]
OF_ROWS = [accuracy, nll, brier_score, calibration_error]


def predictions(*shape: int, seed: int = 0) -> np.ndarray:
    """Random rows that sum to one, float32, none of them close to zero or to a tie."""
    logits = np.random.default_rng(seed).normal(size=shape) * 1.5
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return p.astype(np.float32)


def wide(p: np.ndarray) -> np.ndarray:
    """In float64, summing to one as closely as that allows."""
    return p.astype(np.float64) / p.sum(-1, dtype=np.float64, keepdims=True)


def labels_for(n: int, classes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, n)


def bins_by_hand(p: np.ndarray, y: np.ndarray, num_bins: int) -> list[list[tuple[float, bool]]]:
    """The top probability of each row and whether it is right, in the bin that it falls in."""
    edges = np.linspace(0, 1, num_bins + 1).astype(np.float32)
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for row, label in zip(p, y, strict=True):
        top = row.max()
        (at,) = (k for k in range(num_bins) if edges[k] < top <= edges[k + 1])
        bins[at].append((float(top), row.argmax() == label))
    return bins


def calibration_error_by_hand(p: np.ndarray, y: np.ndarray, num_bins: int) -> float:
    error = 0.0
    for rows in bins_by_hand(p, y, num_bins):
        if rows:
            confidence, correct = np.mean([c for c, _ in rows]), np.mean([r for _, r in rows])
            error += len(rows) / len(p) * abs(correct - confidence)
    return float(error)


def disagreement_by_hand(p: np.ndarray) -> float:
    differ = [
        one[row].argmax() != other[row].argmax()
        for one, other in itertools.permutations(p, 2)
        for row in range(p.shape[1])
    ]
    return float(np.mean(differ)) if differ else 0.0


def mutual_information_by_hand(p: np.ndarray) -> np.ndarray:
    of_members = [scipy.stats.entropy(member, axis=-1) for member in wide(p)]
    return scipy.stats.entropy(wide(p).mean(0), axis=-1) - np.mean(of_members, axis=0)


@pytest.mark.parametrize(("n", "classes"), SIZES)
def test_scores_of_rows_are_those_written_out(n: int, classes: int) -> None:
    p, y = predictions(n, classes), labels_for(n, classes)
    one_hot = np.eye(classes)[y]
    expected = {
        accuracy: sklearn.metrics.accuracy_score(y, p.argmax(-1)),
        nll: sklearn.metrics.log_loss(y, wide(p), labels=range(classes)),
        brier_score: np.mean([sum((p[i, c] - one_hot[i, c]) ** 2 for c in range(classes)) for i in range(n)]),
        calibration_error: calibration_error_by_hand(p, y, 15),
    }
    for score, value in expected.items():
        eager = [score(p, y), score(jnp.asarray(p), jnp.asarray(y))] if n == 20 else []
        for got in (*eager, jax.jit(score)(p, y)):
            assert (got.shape, got.dtype) == ((), jnp.float32)
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6, err_msg=score.__name__)


def test_the_brier_score_of_two_classes_is_twice_that_of_one() -> None:
    p, y = predictions(40, 2), labels_for(40, 2)
    np.testing.assert_allclose(brier_score(p, y), 2 * sklearn.metrics.brier_score_loss(y, p[:, 1]), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_bins", [1, 15, 100])
def test_reliability_is_the_mean_of_each_bin(num_bins: int) -> None:
    p, y = predictions(200, 10), labels_for(200, 10)
    bins = bins_by_hand(p, y, num_bins)
    expected = [np.array([np.mean([row[i] for row in rows]) if rows else np.nan for rows in bins]) for i in range(2)]
    for shown in (
        reliability(p, y, num_bins=num_bins),
        jax.jit(reliability, static_argnames="num_bins")(p, y, num_bins=num_bins),
    ):
        np.testing.assert_allclose(shown.confidence, expected[0], rtol=1e-5)
        np.testing.assert_allclose(shown.accuracy, expected[1], rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(shown.num_rows, [len(rows) for rows in bins])
    np.testing.assert_allclose(
        calibration_error(p, y, num_bins=num_bins), calibration_error_by_hand(p, y, num_bins), rtol=1e-4, atol=1e-6
    )


def test_a_confidence_at_an_edge_is_in_the_bin_below_and_one_above_one_in_the_last() -> None:
    p = np.array([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0], [1.0000002, 0.0]], np.float32)
    np.testing.assert_array_equal(reliability(p, np.zeros(4, int), num_bins=4).num_rows, [0, 1, 1, 2])


def test_empty_bins_are_nan_and_count_for_nothing() -> None:
    p = np.array([[0.9, 0.1], [0.9, 0.1]], np.float32)
    shown = reliability(p, np.array([0, 1]), num_bins=2)
    assert isinstance(shown, Reliability)
    np.testing.assert_array_equal(np.isnan(shown.confidence), [True, False])
    np.testing.assert_allclose(calibration_error(p, np.array([0, 1]), num_bins=2), 0.4, rtol=1e-6)


@pytest.mark.slow
def test_perfect_and_uniform_predictions() -> None:
    y = labels_for(30, 4)
    perfect, uniform = np.eye(4, dtype=np.float32)[y], np.full((30, 4), 0.25, np.float32)
    assert [float(score(perfect, y)) for score in OF_ROWS] == [1, 0, 0, 0]
    np.testing.assert_allclose(nll(uniform, y), math.log(4), rtol=1e-6)
    np.testing.assert_allclose(brier_score(uniform, y), 0.75, rtol=1e-6)
    np.testing.assert_allclose(accuracy(uniform, y), np.mean(y == 0), rtol=1e-6)


def test_the_worst_predictions_reach_the_upper_ends() -> None:
    y = labels_for(30, 4)
    wrong = np.eye(4, dtype=np.float32)[(y + 1) % 4]
    assert [float(score(wrong, y)) for score in OF_ROWS] == [0, math.inf, 2, 1]


def test_one_label_of_probability_zero_makes_the_likelihood_infinite() -> None:
    assert float(nll(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 1]))) == math.inf


@pytest.mark.slow
def test_labels_drawn_from_the_probabilities_are_calibrated_and_others_are_not() -> None:
    p = predictions(20_000, 5)
    draws = np.random.default_rng(2).uniform(size=(20_000, 1))
    y = np.minimum((p.cumsum(-1) < draws).sum(-1), 4)
    overconfident = p**3 / (p**3).sum(-1, keepdims=True)
    assert calibration_error(p, y) < 0.02
    assert calibration_error(overconfident, y) > 0.1
    assert nll(p, y) < nll(overconfident, y)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
def test_entropy_is_that_of_scipy(shape: tuple[int, ...]) -> None:
    p = predictions(*shape)
    for got in (entropy(p), jax.jit(entropy)(p)):
        np.testing.assert_allclose(got, scipy.stats.entropy(p.astype(np.float64), axis=-1), rtol=1e-5)


def test_the_entropy_of_certainty_is_zero_and_of_ignorance_log_classes() -> None:
    np.testing.assert_allclose(entropy(np.array([[0.0, 1.0, 0.0, 0.0], [0.25] * 4])), [0, math.log(4)], rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("members", "n", "classes"), [(1, 20, 4), (2, 1, 2), (7, 20, 4)])
def test_disagreement_and_mutual_information_are_those_written_out(members: int, n: int, classes: int) -> None:
    p = predictions(members, n, classes)
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_allclose(wrap(disagreement)(p), disagreement_by_hand(p), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(wrap(mutual_information)(p), mutual_information_by_hand(p), rtol=1e-4, atol=1e-6)


def test_members_that_are_the_same_have_nothing_to_disagree_about() -> None:
    one = predictions(20, 4)
    p = np.broadcast_to(one, (7, *one.shape))
    assert float(disagreement(p)) == 0
    information = np.asarray(mutual_information(p))
    assert (information >= 0).all()
    np.testing.assert_allclose(information, 0, atol=1e-6)


@pytest.mark.slow
def test_members_that_are_sure_of_different_classes_disagree_about_all() -> None:
    p = np.broadcast_to(np.eye(3, dtype=np.float32)[:, None], (3, 5, 3))
    assert float(disagreement(p)) == 1
    np.testing.assert_allclose(mutual_information(p), np.full(5, math.log(3)), rtol=1e-6)


def test_evaluate_scores_the_mean_of_the_members() -> None:
    p, y = predictions(7, 20, 4), labels_for(20, 4)
    mean = wide(p).mean(0)
    scores = evaluate(p, y)
    assert isinstance(scores, Scores)
    assert all(type(value) is float for value in scores)
    np.testing.assert_allclose(
        scores,
        [
            sklearn.metrics.accuracy_score(y, mean.argmax(-1)),
            sklearn.metrics.log_loss(y, mean, labels=range(4)),
            np.square(mean - np.eye(4)[y]).sum(-1).mean(),
            calibration_error_by_hand(mean.astype(np.float32), y, 15),
            disagreement_by_hand(p),
            mutual_information_by_hand(p).mean(),
        ],
        rtol=1e-4,
    )


@pytest.mark.slow
def test_scores_do_not_depend_on_where_the_predictions_are() -> None:
    p, y = predictions(8, 16, 4), labels_for(16, 4)
    expected = evaluate(p, y)
    for spec in (P("d"), P(None, "d")):
        placed = jax.device_put(p, NamedSharding(Mesh(np.array(jax.devices()), ("d",)), spec))
        np.testing.assert_allclose(evaluate(placed, y), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool"])
def test_other_dtypes_are_scored_in_float32(dtype: str) -> None:
    p, y = predictions(200, 10), labels_for(200, 10)
    p = jnp.asarray(np.eye(10)[p.argmax(-1)] if dtype in ("int32", "bool") else p).astype(
        jax.dtypes.canonicalize_dtype(dtype)
    )
    rounded = np.asarray(p, np.float64)
    got = brier_score(p, y.astype(np.uint8))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.square(rounded - np.eye(10)[y]).sum(-1).mean(), rtol=1e-5)


def test_a_member_that_failed_makes_every_score_nan() -> None:
    p, y = predictions(7, 20, 4), np.zeros(20, int)
    p[1, 5] = np.nan
    assert np.isnan(evaluate(p, y)).all()
    shown = reliability(p[1], y)
    assert np.isnan(shown.confidence).all()
    assert np.isnan(shown.accuracy).all()
    assert int(shown.num_rows.sum()) == 19
    np.testing.assert_array_equal(np.isnan(entropy(p[1])), np.arange(20) == 5)
    np.testing.assert_array_equal(np.isnan(mutual_information(p)), np.arange(20) == 5)


def test_a_row_that_is_partly_nan_or_infinite_is_let_through_and_shows() -> None:
    p, y = predictions(20, 4), np.zeros(20, int)
    p[5, 3] = np.nan
    for score in OF_ROWS:
        assert np.isnan(score(p, y))
        assert np.isnan(jax.jit(score)(p, y))
    p[5, 3] = np.inf
    assert float(brier_score(p, y)) == math.inf


def test_a_traced_label_that_is_no_class_has_probability_zero() -> None:
    p = predictions(2, 3)
    for label in (-1, 3):
        assert float(jax.jit(nll)(p, np.array([0, label]))) == math.inf


def test_the_likelihood_has_the_gradient_of_its_formula() -> None:
    p, y = predictions(6, 3), labels_for(6, 3)
    expected = np.where(np.eye(3)[y] == 1, -1 / (6 * p), 0)
    np.testing.assert_allclose(jax.jit(jax.grad(nll))(p, y), expected, rtol=1e-5)


GOOD, LABELS = predictions(4, 3), labels_for(4, 3)
MEMBERS = predictions(2, 4, 3)
SHAPES: dict[str, tuple[Callable[[], Any], str]] = {
    "one-hot labels": (
        lambda: nll(GOOD, np.eye(3, dtype=int)[LABELS]),
        r"nll: labels has shape \(4, 3\), expected integers \(4,\).*write labels\.argmax\(-1\)",
    ),
    "one-hot labels, traced": (lambda: jax.jit(nll)(GOOD, np.eye(3)[LABELS]), r"write labels\.argmax\(-1\)"),
    "a column of labels": (lambda: accuracy(GOOD, LABELS[:, None]), r"accuracy: labels .*write labels\[:, 0\]"),
    "too many labels": (
        lambda: brier_score(GOOD, np.zeros(5, int)),
        r"brier_score: labels has shape \(5,\), expected integers \(4,\).*write labels\[:4\]",
    ),
    "labels of another dtype": (
        lambda: calibration_error(GOOD, LABELS.astype(np.float32)),
        r"calibration_error: labels has dtype float32, expected integers \(4,\); write labels\.astype\(int\)",
    ),
    "members for rows": (
        lambda: reliability(MEMBERS, LABELS),
        r"reliability: probabilities has shape \(2, 4, 3\), expected \(n, classes\).*write probabilities\.mean\(0\)",
    ),
    "one probability for two classes": (
        lambda: nll(GOOD[:, 0], LABELS),
        r"probabilities has shape \(4,\), expected \(n, classes\).*write jnp\.stack\(\[1 - p, p\], -1\)",
    ),
    "a scalar": (lambda: entropy(0.5), r"entropy: probabilities has shape \(\).*write jax\.nn\.softmax\(logits\)"),
    "rows for members": (
        lambda: disagreement(GOOD),
        r"disagreement: member_probabilities has shape \(4, 3\), expected \(members.*write member_probabilities\[None",
    ),
    "rows for members, again": (lambda: mutual_information(GOOD), r"mutual_information: .*write member_probabilities"),
    "rows for members, with labels": (
        lambda: evaluate(GOOD, LABELS),
        r"evaluate: .*write member_probabilities\[None\]",
    ),
    "four dimensions": (lambda: evaluate(MEMBERS[None], LABELS), r"member_probabilities has shape \(1, 2, 4, 3\)"),
    "no rows": (lambda: nll(GOOD[:0], LABELS[:0]), r"probabilities has shape \(0, 3\), expected at least one of each"),
}

VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "logits": (
        lambda: nll(np.array([[0.5, 0.5], [2.0, 3.0]]), np.array([0, 1])),
        r"nll: probabilities: row 1 sums to 5, expected 1; from logits write jax\.nn\.softmax\(logits\)",
    ),
    "logits of a member": (
        lambda: evaluate(MEMBERS * np.array([1, 2], np.float32)[:, None, None], LABELS),
        r"evaluate: member_probabilities: row 0 of member 1 sums to 2, .*softmax\(logits\)",
    ),
    "logits of one row": (lambda: entropy(np.array([1.0, 1.0])), r"entropy: probabilities: the row sums to 2"),
    "just too far from one": (lambda: nll(GOOD * 1.002, LABELS), r"row 0 sums to 1\.002"),
    "a label too large": (
        lambda: accuracy(GOOD, np.array([0, 1, 3, 0])),
        r"accuracy: labels: 3 in row 2 is not a class, expected 0 to 2; .*write labels - labels\.min\(\)",
    ),
    "a negative label": (lambda: nll(GOOD, np.array([0, -1, 1, 0])), r"labels: -1 in row 1 is not a class"),
    "no bins": (
        lambda: calibration_error(GOOD, LABELS, num_bins=0),
        r"calibration_error: num_bins must be an integer of at least 1, got 0; write num_bins=15",
    ),
    "half a bin": (lambda: reliability(GOOD, LABELS, num_bins=1.5), r"got 1\.5; write num_bins=15"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", SHAPES)
def test_another_shape_is_named_with_the_line_to_write(case: str) -> None:
    call, message = SHAPES[case]
    with pytest.raises(ShapeError, match=message):
        call()


@pytest.mark.parametrize("case", VALUES)
def test_values_that_are_no_probabilities_or_labels_are_named(case: str) -> None:
    call, message = VALUES[case]
    with pytest.raises(DataError, match=message):
        call()


def test_rows_that_sum_nearly_to_one_pass_also_when_rounded_to_half_precision() -> None:
    nll(GOOD * np.float32(1.0005), LABELS)
    nll(jnp.full((4, 3), 1 / 3).astype(jnp.bfloat16), LABELS)
    entropy(jnp.asarray(predictions(100, 10)).astype(jnp.bfloat16))
