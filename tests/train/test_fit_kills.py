"""A run that is killed, or told to stop, and started again by the same command."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

import paraxis as px
from tests.train._fit_killer import PARTS, differences
from tests.train._fits import bits, data, lines, start, step
from tests.train._processes import started

NUM_KILLS = int(os.environ.get("PARAXIS_TEST_KILLS", "2"))
"""Of each layout here; ``python -m tests.faults`` has more."""


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_killed_at_any_time_it_comes_to_what_it_would_have(processes: int, devices: int, tmp_path: Path) -> None:
    with started("-m", "tests.train._fit_killer", tmp_path, NUM_KILLS, 0, processes, devices) as process:
        out, error = process.communicate(timeout=300 * (NUM_KILLS + 2))
    assert process.returncode == 0, error
    report = json.loads(out.splitlines()[-1])
    assert (report["kills"], report["wrong"]) == (NUM_KILLS, [])
    assert report["resumed"] >= NUM_KILLS // 3, report


def test_each_part_that_came_out_otherwise_is_named() -> None:
    whole = {part: part for part in PARTS}
    assert differences(whole, dict(whole)) == []
    for part in PARTS:
        assert differences(whole | {part: "another"}, whole) == [part]


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_saves_and_ends_well(which: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with started("-m", "tests.train._fit_script", tmp_path, XLA_FLAGS=os.environ["XLA_FLAGS"]) as process:
        while process.poll() is None and (not log.exists() or len(log.read_bytes().splitlines()) < 25):
            time.sleep(0.02)
        process.send_signal(which)
        _, error = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in error) == (0, False), error
    (done,) = px.Checkpoints(tmp_path / "checkpoints").steps
    assert 10 < done < 100
    name = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[which]
    assert f"px.fit: {name}: stopped after step {done}, saved in {tmp_path}/checkpoints/{done}; the same" in error
    options = {"steps": done + 9, "progress": False}
    found = px.fit(start(), step, data(), checkpoint=tmp_path / "checkpoints", log=log, **options)
    assert bits(found.state) == bits(px.fit(start(), step, data(), **options).state)
    assert [line["step"] for line in lines(log) if line["event"] == "step"] == list(range(1, done + 10))
