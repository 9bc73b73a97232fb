"""Integers beyond 32 bits are never cut: JAX drops their upper bits without a word where 64 bits are off."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px

LARGE = np.array([3, 2**31 + 5, 2**33])  # int64; as int32 they are 3, -2147483643 and 0
ONES = np.ones(3, np.float32)
ROWS = px.Axis("rows", 3)


@px.program(rows=3)
def total(x: Any) -> Any:
    return px.reduce_sum(px.map_fn(lambda x: x * 1, x))


def step_on(batch: Any) -> Any:
    step = px.train_step(lambda params, batch: jnp.mean(batch["id"] * params))
    return step(px.TrainState.create(jnp.ones(()), optax.sgd(0.1)), batch)


TAKES: dict[str, Callable[[Any], Any]] = {
    "map_fn": lambda n: px.map_fn(lambda x, n: x * n, (ONES, n), ROWS),
    "broadcast": lambda n: px.broadcast({"n": n}, ROWS),
    "scatter": lambda n: px.scatter(n, ROWS),
    "gather": lambda n: px.gather(n, ROWS),
    "reduce_sum": lambda n: px.reduce_sum(n, ROWS),
    "weights": lambda n: px.reduce_weighted_mean(ONES, n, ROWS),
    "program": total,
    "pmap": lambda n: px.pmap(lambda x: x * 1)(n),
    "Jit": lambda n: px.Jit(lambda x, n: n * 1)(ONES, n=n),
    "Parallel": lambda n: px.Parallel(lambda x: x * 1)(n),
    "Vectorize": lambda n: px.Vectorize(lambda x: x * 1)(n),
    "Stream": lambda n: px.Stream(at_once=2).run(total, n),
    "train_step": lambda n: step_on({"id": n}),
    "loader": lambda n: next(iter(px.loader({"id": n}, 3).epoch(0))),
    "rows": lambda n: px.solve.rows(np.ones((3, 2), np.float32), n),
    "LBFGS": lambda n: px.solve.LBFGS(lambda p, n: jnp.sum((p - n) ** 2)).run(jnp.zeros(3), n),
    "predict": lambda n: px.ensemble(jax.random.normal, 2, 0).predict(n, apply=lambda w, n: n * 1),
}


@pytest.mark.parametrize("name", TAKES)
def test_integers_that_would_be_cut_are_refused(name: str) -> None:
    with pytest.raises(px.errors.DataError, match=r"holds 8589934592 \(int64\), which int32 does not hold"):
        TAKES[name](LARGE)
    TAKES[name](np.array([3, 2, 1]))  # of the same dtype, and kept


def test_integers_that_would_be_cut_are_named() -> None:
    with pytest.raises(Exception, match=r"-2147483649 \(int64\), which int32"):
        px.reduce_sum(np.array([0, -(2**31) - 1, 5]), ROWS)
    with pytest.raises(Exception, match=r"4294967296 \(uint64\), which uint32"):
        px.reduce_sum(np.array([0, 2**32, 5], np.uint64), ROWS)
