"""One step, called in several threads with states of other kinds and on other devices: each as if it were alone."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px

NUM_STEPS = 30
ROWS = {"x": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32), "y": np.ones(16, np.float32)}
MESHES = [jax.sharding.Mesh(np.array(jax.devices()[:n]), ("batch",)) for n in (1, 2)]
# On which of the meshes, and with which optimiser.
WORKERS = [(0, optax.sgd(0.1)), (0, optax.adam(0.1)), (1, optax.sgd(0.1)), (1, optax.sgd(0.1, momentum=0.9))]


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def loss(params: Any, batch: Any) -> jax.Array:
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def test_each_thread_comes_to_what_it_would_alone() -> None:
    step, evaluate = px.train_step(loss), px.eval_step(loss)

    def work(number: int) -> list[bytes]:
        mesh, optimizer = WORKERS[number]
        with jax.set_mesh(MESHES[mesh]):
            state, found = px.TrainState.create({"w": jnp.zeros(3)}, optimizer), []
            for _ in range(NUM_STEPS):
                state, metrics = step(state, ROWS)
                metrics = [*metrics.values(), *evaluate(state, ROWS).values()]
                found.append(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves([state.params, metrics])))
            return found

    alone = [work(number) for number in range(len(WORKERS))]
    assert len({found[-1] for found in alone}) >= 3
    assert together(work, len(WORKERS)) == alone


def together(work: Callable[[int], Any], number: int) -> list[Any]:
    """What each thread gave, or the error it ended with."""
    results: list[Any] = [None] * number
    begin = threading.Barrier(number)

    def run(which: int) -> None:
        begin.wait()
        try:
            results[which] = work(which)
        except Exception as error:
            results[which] = error

    threads = [threading.Thread(target=run, args=(which,), daemon=True) for which in range(number)]
    with contextlib.ExitStack() as stack:
        for thread in threads:
            stack.callback(thread.join, 120)
            thread.start()
    return results
