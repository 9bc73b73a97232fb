"""No public face: the seconds between two savings, of which a test has none.

A run that saves what it has done goes on after it was stopped, to the same bits.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.streaming import _resume
from tests._streams import W
from tests._support import bits

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


def kills_itself(folder: str) -> None:
    _resume._EVERY = 0.0
    run(Path(folder), progress=lambda now: now.pass_number > 1 and os.kill(os.getpid(), signal.SIGKILL))


def test_stream_goes_on_when_it_was_killed(tmp_path):
    """In another process: what is saved as the run goes on is found there."""
    program = f"from tests.test_stream_resume import kills_itself; kills_itself({str(tmp_path / 'run')!r})"
    killed = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=False)
    assert killed.returncode == -signal.SIGKILL
    whole, left = [], []
    assert bits(run(tmp_path / "run", progress=left.append)) == bits(run(None, progress=whole.append))
    assert len(left) < len(whole)
    assert [x.per_second is None for x in whole[:2]] == [True, False]
