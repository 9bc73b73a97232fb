"""No public face: a loop's first step is waited for 600 s at least, which the scripts of these tests make less."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch._support import Launch

LATE = """
import time
import jax.numpy as jnp, numpy as np, optax
import paraxis as px
from paraxis.launch import _watchdog
_watchdog._FIRST_STEP = {first_step}
me = px.initialize()
def data(epoch):
    if me.process == 1:
        time.sleep({seconds})  # a file system that hangs
    yield from np.ones((10, 16, 3), np.float32)
step = px.train_step(lambda params, batch: (batch @ params["w"] - 1) ** 2)
px.fit(px.TrainState.create({{"w": jnp.zeros(3)}}, optax.sgd(0.1)), step, data, epochs=1, progress=False)
"""


@pytest.mark.slow
def test_a_rank_that_is_stuck_before_its_first_step_is_named(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LATE.format(first_step=6, seconds=1000))
    status, _, error = launched(str(script), n=3, devices=1, stuck_after=1.5)
    assert status == 79
    assert f"no progress: rank 1 at {script}:10; ranks 0 and 2 at {script}:13; " in error
    assert f"[1] paraxis: no first step for 6 s; the main thread is at {script}:10; all stacks:\n" in error


SLOW_AT_FIRST = """
import time
import jax.numpy as jnp, numpy as np
import paraxis as px
from paraxis.launch import _watchdog
from paraxis.train.runs import _loop
_watchdog._FIRST_STEP = {first_step}
_watchdog.watch(4)
fetched, seconds = _loop.fetched, [10]
def wait(metrics):  # as on a device that waits for one of a process that still compiles
    time.sleep(seconds.pop() if seconds else 0)
    return fetched(metrics)
_loop.fetched = wait
def step(w, batch):
    return w, {{"loss": w}}
px.fit(jnp.zeros(()), step, [np.ones(2)] * 8, steps=8, progress=False)
"""


@pytest.mark.parametrize(("first_step", "status"), [(60, 0), pytest.param(5, 79, marks=pytest.mark.slow)])
def test_the_first_step_is_waited_for_longer_until_its_results_are_there(
    tmp_path: Path, first_step: int, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLOW_AT_FIRST.format(first_step=first_step))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == status, done.stderr
    said = f"paraxis: no first step for 5 s; the main thread is at {script}:11; all stacks:"
    assert (said in done.stderr) == (status == 79)
