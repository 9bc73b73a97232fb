"""Rows are laid out evenly over devices, padded by rows that never count, with the weights that scikit-learn gives."""

import re
from typing import Any

import numpy as np
import pytest

import paraxis as px
from tests._support import PLACEMENTS, axis_on


def _some(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(size, 3)).astype("float32"),
        rng.integers(0, 3, size).astype("int32"),
        rng.uniform(0.1, 2, size).astype("float32"),
    )


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_rows_keep_their_order_and_padding_weighs_nothing(placement: tuple[int, int]) -> None:
    devices, size = placement
    x, y, weight = _some(size)
    data = px.solve.rows(x, y, weight, axis=axis_on(devices, size))
    for found, given in zip(data, (x, y, weight), strict=True):
        assert len(found) == len(data.X)
        assert found.dtype == given.dtype
        np.testing.assert_array_equal(np.asarray(found)[:size], given)
    np.testing.assert_array_equal(np.asarray(data.weight)[size:], 0)
    assert np.all(np.isfinite(data.X))
    used = min(devices, len(data.X))
    shards = [shard.data.shape[0] for shard in data.X.addressable_shards]
    assert len(set(shards)) == 1
    assert sum(shards) == len(data.X)
    assert len(data.X) - size < used


def test_rows_say_what_does_not_fit() -> None:
    x, y, weight = _some(6)
    rows: Any = px.solve.rows
    for call, text in (
        (lambda: rows(x[0], y), r"X must be numbers \(n, d\) with at least one row"),
        (lambda: rows(x, y[:5]), "X has 6 rows, y has 5"),
        (lambda: rows(x, y, weight[:5]), r"sample_weight must be one number for each of the 6 rows"),
        (lambda: rows(x, y, axis=axis_on(2, 5)), "X has 6 rows, y has 6, and axis 'rows' has size 5"),
        (lambda: rows(x, np.array(list("abcabc"))), r"y must be numbers, got .*; write y = np\.unique"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_are_a_copy(devices: int) -> None:
    x, y, weight = np.ones((64, 3), "float32"), np.ones(64, "float32"), np.ones(64, "float32")
    data = px.solve.rows(x, y, weight, axis=axis_on(devices, 64))
    for given, laid in zip((x, y, weight), data, strict=True):
        given[:] = 5
        np.testing.assert_array_equal(laid, 1)


@pytest.mark.parametrize("total", [1e38, 1e-38])
def test_rows_refuse_weights_that_vanish_when_divided_by_their_sum(total: float) -> None:
    """In float32 the least number above zero is 1.2e-38, of which the inverse is 8.5e37; a solver would end at once."""
    x, y, weight = _some(6)
    x, weight = x.astype(np.float32), weight * total / weight.sum()
    fun, start = px.solve.objective.least_squares, np.zeros(x.shape[1], np.float32)
    table = px.Table.of_arrays(x, y)
    for call in (
        lambda: px.solve.rows(x, y, weight),
        lambda: px.solve.LBFGS(fun).run(start, (x, y.astype(np.float32), weight.astype(np.float32))),
        lambda: px.solve.Ridge().fit(table, engine=px.Stream(at_once=4), sample_weight=weight),
    ):
        with pytest.raises(px.errors.DataError, match=f"adds up to {re.escape(f'{total:g}')}, too much or too little"):
            call()
