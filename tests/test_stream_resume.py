"""No public face: the seconds between two savings, of which a test has none.

A run that saves what it has done goes on after it was stopped, to the same bits.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._streams import W, bits

N = 24
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")


@px.program(clients=N)
def loss(w, x):
    """Passes that depend on each other, rows that are kept, a maximum, and rows as a result."""
    for _ in range(2):
        w = w - 0.1 * px.reduce_mean(px.map_fn(lambda w, x: jnp.tanh(x * w), (px.broadcast(w), x)))
    losses = px.map_fn(lambda w, x: jnp.sum(jnp.tanh(w * x) ** 2), (px.broadcast(w), x))
    return px.reduce_max(losses) + px.reduce_mean(losses), losses


FN = jax.value_and_grad(loss, has_aux=True)


def stopped_after(chunks: int, seen: list):
    """Return what sends Ctrl-C after so many chunks."""
    before = len(seen)

    def watch(progress) -> None:
        seen.append((progress.pass_number, progress.done))
        if len(seen) > before + chunks:
            signal.raise_signal(signal.SIGINT)

    return watch


def run(folder: Path | None, x=X, w=W, at_once=1, fn=FN, **options):
    return px.Stream(at_once=at_once, checkpoint=folder, **options).run(fn, w, px.Groups.of_arrays(x))


@pytest.mark.parametrize("options", [{}, {"map": map, "at_once": 8}], ids=["here", "map"])
def test_stream_goes_on_from_where_it_was_stopped(tmp_path, options):
    whole, seen, notes = [], [], []
    expected = run(None, progress=stopped_after(10**9, whole), **options)
    while True:
        try:
            result = run(tmp_path / "run", progress=stopped_after(4, seen), **options)
            break
        except KeyboardInterrupt as stopped:
            notes += stopped.__notes__
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paraxis")]
    assert bits(result) == bits(expected)
    assert len(notes) > 2
    assert "goes on from there" in notes[0]
    assert seen == whole  # no chunk is computed again
    assert not (tmp_path / "run").exists()


def test_stream_refuses_another_run_and_a_damaged_file(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", progress=stopped_after(2, []))
    path = tmp_path / "run" / "paraxis-run.npz"
    before = path.read_bytes()
    closed = lambda w, x: loss(w * jnp.asarray(2 * W), x)  # noqa: E731
    others: list[dict[str, Any]] = [{"w": 2 * W}, {"x": 2 * X}, {"at_once": 2}, {"fn": closed}]
    for options in others:
        with pytest.raises(px.CheckpointError, match=r"holds another run, .*; give this one another folder"):
            run(tmp_path / "run", **options)
    assert path.read_bytes() == before
    damaged = bytearray(before)
    damaged[before.index(b"arr_0.npy") + 200] ^= 1
    for contents in (before[: len(before) // 2], damaged):
        path.write_bytes(contents)
        with pytest.raises(px.CheckpointError, match=r"cannot be read: .*remove it to begin anew"):
            run(tmp_path / "run")


SLOWLY = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np, paraxis as px
from paraxis.streaming import _resume
_resume._EVERY = 0.0

class Slow(list):
    def __getitem__(self, i):
        time.sleep(0.02)
        return np.float32(i) / 7

@px.program(clients=40)
def total(x):
    return px.reduce_sum(jnp.sin(x)), px.reduce_sum((x - px.reduce_mean(x)) ** 2)

seen = []
found = px.Stream(at_once=2, checkpoint=sys.argv[1], progress=seen.append).run(total, px.Groups(Slow(range(40))))
print(json.dumps([[float(y).hex() for y in found], len(seen)]))
"""


def test_stream_goes_on_when_it_was_killed(tmp_path):
    command = [sys.executable, "-c", SLOWLY]
    env = {**os.environ, "XLA_FLAGS": ""}
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True, env=env)
    process = subprocess.Popen([*command, str(tmp_path / "run")], env=env)
    until = time.monotonic() + 60
    while not (tmp_path / "run" / "paraxis-run.npz").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)
    process.kill()
    process.wait()
    again = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, check=True, env=env)
    (expected, chunks), (found, left) = (json.loads(done.stdout) for done in (whole, again))
    assert found == expected
    assert left < chunks
