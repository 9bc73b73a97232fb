"""A run that is killed, or told to stop, and started again by the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paraxis as px
from tests.train._fits import bits, data, lines, start, step

ROOT = Path(__file__).parents[2]


def started(module: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.train.{module}", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("num_kills", "seed"), [(3, 0), pytest.param(27, 1, marks=pytest.mark.slow)])
def test_killed_at_any_time_it_comes_to_the_same_bits(num_kills: int, seed: int, tmp_path: Path) -> None:
    with started("_fit_killer", tmp_path, num_kills, seed) as process:
        out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    report = json.loads(out)
    assert (report["kills"], report["wrong"]) == (num_kills, 0)
    assert report["resumed"] >= num_kills / 3, report


@pytest.mark.parametrize("which", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_told_to_stop_it_saves_and_ends_well(which: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with started("_fit_script", tmp_path) as process:
        while process.poll() is None and (not log.exists() or len(log.read_bytes().splitlines()) < 25):
            time.sleep(0.02)
        process.send_signal(which)
        _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    (done,) = px.Checkpoints(tmp_path / "checkpoints").steps
    assert 10 < done < 100
    name = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[which]
    assert f"px.fit: {name}: stopped after step {done}, saved in {tmp_path}/checkpoints/{done}; the same" in error
    assert "Traceback" not in error
    assert [line["step"] for line in lines(log) if line["event"] == "step"] == list(range(1, done + 1))
    found = px.fit(start(), step, data(), steps=done + 9, checkpoint=tmp_path / "checkpoints", log=log, progress=False)
    assert bits(found.state) == bits(px.fit(start(), step, data(), steps=done + 9, progress=False).state)
    assert [line["step"] for line in lines(log) if line["event"] == "step"] == list(range(1, done + 10))
