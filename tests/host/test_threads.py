"""Programs and verbs run from many threads at once never mix."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import paraxis as px

NUM_THREADS = 8


def _program_of(thread: int) -> Callable[..., jax.Array]:
    size = thread + 2

    @px.program({f"axis{thread % 3}": size})
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        copies = px.broadcast(w)
        time.sleep(0.01)  # lets the other threads trace in between

        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            time.sleep(0.01)
            return (w * x - px.pmean(x, f"axis{thread % 3}")) ** 2

        y = px.map_fn(body, (copies, x))
        time.sleep(0.01)
        return px.reduce_mean(y) + px.reduce_sum(x)

    return loss


def _expected(w: float, x: np.ndarray) -> tuple[float, float]:
    return ((w * x - x.mean()) ** 2).mean() + x.sum(), (2 * (w * x - x.mean()) * x).mean()


@pytest.mark.slow
def test_programs_of_different_sizes_at_once() -> None:
    def work(thread: int) -> None:
        x = np.linspace(0.0, 1.0, thread + 2)
        for turn in range(3):
            loss, w = _program_of(thread), float(turn + thread)
            value, gradient = jax.jit(jax.value_and_grad(loss))(w, x)
            np.testing.assert_allclose((value, gradient), _expected(w, x), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(loss(w, x), _expected(w, x)[0], rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))


def test_one_program_from_many_threads() -> None:
    loss = _program_of(3)
    x = np.linspace(0.0, 1.0, 5)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        got = list(pool.map(lambda w: float(jax.grad(loss)(float(w), x)), range(NUM_THREADS)))
    np.testing.assert_allclose(got, [_expected(w, x)[1] for w in range(NUM_THREADS)], rtol=1e-4, atol=1e-5)
