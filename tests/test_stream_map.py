"""Chunks that an executor carries out: a process pool, a Ray cluster. The bits are the same, whoever computes."""

import concurrent.futures
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._streams import AXIS, N, W, X, Y, mean
from tests._support import assert_close, bits

ROWS = np.random.default_rng(0).normal(size=(30, 3)).astype("float32")


class Disk:
    """``ROWS``, some of which cannot be read; reading ``kill`` ends another process, or only ``once``."""

    def __init__(self, kill: tuple[int, ...] = (), unreadable: Any = (), once: Path | None = None) -> None:
        self.kill, self.unreadable, self.once, self.here = kill, unreadable, once, os.getpid()

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> np.ndarray:
        if number in self.unreadable:
            raise OSError(f"sector {number}")
        if number in self.kill and os.getpid() != self.here and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ROWS[number]


def executor(workers: int = 2) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    with executor(2) as found:
        yield found.map


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork", RuntimeWarning)  # it starts programs, and nothing more
        ray.init(num_cpus=1)
    yield px.ray_map(num_cpus=1)
    ray.shutdown()


@px.program(clients=len(ROWS))
def spread(w, x):
    each = px.map_fn(lambda w, x: jnp.tanh(x * w).sum(), (px.broadcast(w), x))
    return px.reduce_mean((each - px.reduce_mean(each)) ** 2) + px.reduce_max(each)


FN = jax.value_and_grad(jax.jit(spread))


def test_stream_gives_what_the_mesh_gives_in_the_same_bits_whoever_computes(pool):
    """Read here, read there, in memory-mapped files; by one process, two, or this one."""
    on_mesh = FN(W, ROWS)  # what JAX keeps of it is not for one device
    found = px.Stream(at_once=3, map=map).run(FN, W, px.Groups(Disk()))
    assert_close(found, on_mesh)
    expected = bits(found)
    for source in (px.Groups(Disk()), px.Groups.of_arrays(ROWS), px.Groups([*ROWS])):
        assert bits(px.Stream(at_once=3, map=pool).run(FN, W, source)) == expected


def test_stream_on_a_pool_takes_rows_keys_and_other_widths(pool, tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = px.Groups.of_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"))
    stream = px.Stream(at_once=5, map=pool)

    @px.program(clients=N)
    def of(w, key, x):
        keys = jax.random.split(key, x.shape[0])
        draws = px.map_fn(lambda w, k, x: x.sum(0) @ w + jax.random.normal(k), (px.broadcast(w), keys, x))
        return draws, draws.astype("bfloat16"), draws > 0

    key = jax.random.key(2)
    assert_close(stream.run(of, W, key, mapped), of(W, key, X))
    with jax.enable_x64(True):
        exact = np.random.default_rng(0).normal(size=N)
        total = stream.run(lambda x: px.reduce_sum(jnp.exp(x), AXIS), px.Groups.of_arrays(exact))
    np.testing.assert_allclose(total, np.exp(exact).sum(), rtol=1e-14)


def test_stream_on_a_pool_that_lost_a_process_resumes_to_the_same_bits(tmp_path):
    expected = bits(px.Stream(at_once=3, map=map).run(FN, W, px.Groups(Disk())))
    groups = px.Groups(Disk(kill=(25,), once=tmp_path / "mark"))
    with executor(1) as first, pytest.raises(BrokenProcessPool) as broken:
        px.Stream(at_once=3, map=first.map, checkpoint=tmp_path / "run").run(FN, W, groups)
    assert "goes on from there" in broken.value.__notes__[-1]
    seen = []
    with executor(1) as second:
        stream = px.Stream(at_once=3, map=second.map, checkpoint=tmp_path / "run", progress=seen.append)
        assert bits(stream.run(FN, W, groups)) == expected
    assert seen[0].done > 6  # what the first pool had done is not done again


@pytest.mark.slow
def test_ray_map_runs_the_tasks_of_a_lost_worker_again(ray, tmp_path):
    expected = bits(px.Stream(at_once=3, map=map).run(FN, W, px.Groups(Disk())))
    groups = px.Groups(Disk(kill=(25,), once=tmp_path / "mark"))
    assert bits(px.Stream(at_once=3, map=ray).run(FN, W, groups)) == expected
    assert (tmp_path / "mark").exists()


def test_stream_on_a_pool_raises_an_error_of_a_task_here(pool):
    odd = px.Groups([*X[:-1], X[-1, :4]])
    with pytest.raises(px.DataError, match="element 11 is"):
        px.Stream(at_once=4, map=pool).run(px.program(clients=N)(mean), W, odd, px.Groups.of_arrays(Y))
