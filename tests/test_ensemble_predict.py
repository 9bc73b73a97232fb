"""Averages over members against NumPy in float64: of probabilities, of values, of moments, of mixtures."""

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._members import mesh_of
from tests._problems import softmax
from tests._support import values

SIZE = 7
X = values(6, 3)
W = 4 * (values(SIZE, 3, 4, seed=2) - 1)
LOGITS = np.einsum("nd,mdc->mnc", np.asarray(X, np.float64), np.asarray(W, np.float64))
LOWERINGS = ("auto", "vmap", "unroll")
Apply = Callable[..., Any]


def apply_linear(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def linear(devices: int = 3, weights: Any = W, apply: Apply | None = apply_linear, **options: Any) -> px.Ensemble:
    """Members ``(3, 4)`` with weights that are given."""
    return px.ensemble(lambda key, w: w, len(weights), 0, weights, apply=apply, mesh=mesh_of(devices), **options)


def largest(outputs: Any, axis: px.Axis, where: Any) -> Any:
    """An average of a user's."""
    return px.reduce_max(outputs, axis, where=where)


AVERAGES: dict[Any, tuple[Apply, Callable[[np.ndarray], Any]]] = {
    "softmax": (apply_linear, lambda x: softmax(x).mean(0)),
    "sigmoid": (apply_linear, lambda x: (1 / (1 + np.exp(-x))).mean(0)),
    "mean": (apply_linear, lambda x: x.mean(0)),
    "moments": (apply_linear, lambda x: (x.mean(0), x.var(0))),
    "mixture": (lambda w, x: (x @ w, (x @ w) ** 2 + 0.5), lambda x: (x.mean(0), (x**2 + 0.5).mean(0) + x.var(0))),
    largest: (apply_linear, lambda x: x.max(0)),
}


def test_each_average_that_can_be_named_has_an_oracle() -> None:
    names, _ = get_args(get_type_hints(px.Ensemble.predict)["average"])
    assert {*get_args(names), largest} == {*AVERAGES}


def check(actual: Any, expected: Any) -> None:
    """Float32 within rounding of what NumPy has in float64."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == "float32"
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_ensemble_predict_averages_as_numpy_does(size: int, devices: int, lowering: Any) -> None:
    for average, (apply, oracle) in AVERAGES.items():
        ens = linear(devices, W[:size], lowering=lowering)
        check(ens.predict(X, average=average, apply=apply), oracle(LOGITS[:size]))  # pyright: ignore
        where = np.arange(size) % 3 != 1
        got = ens.predict(X, average=average, apply=apply, where=where)  # pyright: ignore
        check(got, oracle(LOGITS[:size][where]))


def test_ensemble_predict_keeps_a_small_variance_beside_a_large_mean() -> None:
    """Where the mean of squares minus the square of the mean, in float32, has nothing right any more."""
    offsets = np.asarray(10_000 + np.array([0, 1, 2, 3, 4, 5, 6]) / 64, np.float32)
    naive = np.mean(offsets**2, dtype=np.float32) - np.mean(offsets, dtype=np.float32) ** 2
    exact = offsets.astype(np.float64).var()
    assert abs(naive - exact) > 0.5 * exact
    ens = linear(3, jnp.asarray(offsets), lambda w, x: w + 0 * x[:, 0])
    mean, variance = ens.predict(X, average="moments")
    np.testing.assert_allclose(mean, np.full(6, offsets.astype(np.float64).mean()), rtol=1e-6)
    np.testing.assert_allclose(variance, np.full(6, exact), rtol=5e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("average", AVERAGES)
def test_ensemble_predict_finds_a_failed_member_and_leaves_it_out(average: Any) -> None:
    bad = W.at[1, 0, 0].set(jnp.nan).at[6].set(jnp.inf)
    ens = linear(2, bad)
    finite = ens.finite()
    assert finite.dtype == bool
    assert np.flatnonzero(~finite).tolist() == [1, 6]
    apply, oracle = AVERAGES[average]
    for where in (finite, finite.tolist()):
        check(ens.predict(X, average=average, apply=apply, where=where), oracle(LOGITS[finite]))
    assert not np.isfinite(jax.tree.leaves(ens.predict(X, average=average, apply=apply))[0]).all()


def test_ensemble_finite_looks_at_all_floats_of_a_member_and_at_nothing_else() -> None:
    half = jnp.ones(3, "bfloat16").at[1].set(jnp.nan)
    ens = px.ensemble(lambda key, n, h: {"n": n, "h": h, "key": key}, 3, 0, jnp.arange(3), half, mesh=mesh_of(2))
    assert ens.finite().tolist() == [True, False, True]
    assert px.ensemble(lambda key: jnp.arange(3), 1, 0, mesh=mesh_of(2)).finite().tolist() == [True]


def test_ensemble_predict_may_give_each_member_its_own_inputs() -> None:
    check(linear().members(X), LOGITS)
    own = values(SIZE, 6, 3, seed=5)
    expected = np.einsum("mnd,mdc->mnc", np.asarray(own, np.float64), np.asarray(W, np.float64))
    check(linear().predict(own, in_axes=0), softmax(expected).mean(0))
    check(linear().members(own, in_axes=0), expected)
    scales = jnp.arange(1.0, SIZE + 1)
    scaled = LOGITS * np.arange(1.0, SIZE + 1)[:, None, None]
    got = linear().predict(X, scales, in_axes=(None, 0), apply=lambda w, x, scale: x @ w * scale)
    check(got, softmax(scaled).mean(0))
