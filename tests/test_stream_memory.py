"""``px.Stream(memory=…)`` holds the memory that it was given, and none grows with the number of elements."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._streams import W
from tests._support import assert_close

MANY = """
class Elements(list):
    def __getitem__(self, i):
        return np.full((8, 64), i % 7, np.float32)

for size in (8 * 512, 40 * 512):
    @px.program(clients=size)
    def loss(w, x):
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), (px.broadcast(w), x)))
    px.Stream(at_once=64).run(jax.value_and_grad(loss), jnp.ones((64, 64)), px.Groups(Elements(range(size))))
    print(megabytes("VmHWM"))
"""
ATTENTION = """
@px.program(clients=8)
def loss(w, x):
    one = lambda w, x: jnp.sum(jax.nn.softmax((x * w) @ x.T) @ x)
    return px.reduce_mean(px.map_fn(one, (px.broadcast(w), x)))

clients = px.Groups([np.ones((4096, 64), np.float32)] * 8)
stream = px.Stream(memory="400MB")
print(stream.passes(loss, 1.0, clients).chunks[0][0])
before = megabytes("VmRSS")
stream.run(loss, 1.0, clients)
print(megabytes("VmHWM") - before)
"""


HAS_PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the memory")


def printed(program: str, **environment: str) -> list[float]:
    """Run a program that prints numbers, with ``megabytes``, which says what its process has, or has had at most."""
    begin = """
import pathlib, re, jax, jax.numpy as jnp, numpy as np, paraxis as px

def megabytes(kind):
    return int(re.findall(kind + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[0]) / 1024
"""
    command, env = [sys.executable, "-c", begin + program], {**os.environ, **environment}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return [float(x) for x in run.stdout.split()]


@HAS_PROC
def test_stream_has_the_same_peak_of_memory_for_any_number_of_elements() -> None:
    """Of 8 chunks, as many as are ever in flight, and of 40. What is freed goes back to the system at once."""
    few, many = printed(MANY, MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072")
    assert many < 1.05 * few


@HAS_PROC
def test_stream_keeps_to_memory_where_the_compiler_leaves_out_what_a_library_takes() -> None:
    """Attention over 4,096 rows: scores of 64 MiB for each of the elements at once."""
    count, grown = printed(ATTENTION, XLA_FLAGS="", JAX_PLATFORMS="cpu")
    assert 1 <= count < 8
    assert grown < 400


def test_stream_decides_by_memory_how_many_are_run_at_once():
    size, x = 4000, np.random.default_rng(0).normal(size=(4000, 100, 3)).astype("float32")

    @px.program(clients=size)
    def loss(w, x):
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum(jnp.tanh(x * w) ** 2), (px.broadcast(w), x)))

    groups = px.Groups.of_arrays(x)
    some, twice, most = (
        px.Stream(memory=f"{megabytes} MB").passes(jax.grad(loss), W, groups).chunks[0][0] for megabytes in (1, 2, 1000)
    )
    assert most == size
    assert 1.7 < twice / some < 2.4
    assert twice * x[0].nbytes < 2e6
    assert_close(px.Stream(memory="2 MB").run(loss, W, groups), jnp.mean(jnp.sum(jnp.tanh(x * W) ** 2, (1, 2))))
    with pytest.raises(ValueError, match=r"memory must be at least [\d,]+ bytes.*got 1,000; write px\.Stream\(memory="):
        px.Stream(memory="1kB").run(loss, W, groups)


def test_stream_keeps_to_memory_for_longer_elements_of_the_same_type():
    told: list[Any] = []
    total = px.program(clients=32)(lambda d: px.reduce_sum(px.map_fn(lambda d: jnp.where(d.mask, d["x"], 0).sum(), d)))
    run = px.Stream(memory="250kB", progress=told.append).jit(total)
    for rows in (10, 1000):
        assert run(px.Groups([{"x": np.ones(rows, "float32")}] * 32, lengths=[rows] * 32)) == 32 * rows
    assert (told[0].done, told[1].done) == (32, 8)
