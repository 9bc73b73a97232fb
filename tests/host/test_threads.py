"""Programs and verbs run from many threads at once never mix."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

import paraxis as px


def test_programs_of_different_sizes_at_once() -> None:
    def work(thread: int) -> tuple[float, float, float]:
        name, x = f"axis{thread % 3}", np.linspace(0.0, 1.0, thread + 2)

        @px.program({name: thread + 2})
        def loss(w: Any, x: Any) -> jax.Array:
            copies = px.broadcast(w)
            time.sleep(0.01)  # lets the other threads trace in between
            return px.reduce_mean(px.map_fn(lambda w, x: (w * x - px.pmean(x, name)) ** 2, (copies, x)))

        w = float(thread)
        return float(jax.grad(loss)(w, x)), float(loss(w, x)), (2 * (w * x - x.mean()) * x).mean()

    with ThreadPoolExecutor(8) as pool:
        for number, (slope, value, expected) in enumerate(pool.map(work, range(8))):
            x = np.linspace(0.0, 1.0, number + 2)
            np.testing.assert_allclose((slope, value), (expected, ((number * x - x.mean()) ** 2).mean()), rtol=1e-4)
