"""A run that is killed, again and again, and started again by the same command."""

import json
from pathlib import Path

import pytest

from tests._support import table
from tests.launch._support import started


@pytest.mark.parametrize(
    ("kills", "seed", "processes", "devices"), table([(10, 0, 1, 2), (10, 1, 1, 2)], [(2, 0, 2, 1), (2, 0, 2, 2)])
)
def test_fit_comes_to_the_same_bits_when_it_was_killed_at_any_time(
    kills: int, seed: int, processes: int, devices: int, tmp_path: Path
) -> None:
    """``python -m tests.faults`` kills more."""
    with started("-m", "tests.train._fit_killer", tmp_path, kills, seed, processes, devices) as process:
        out, error = process.communicate(timeout=300 * (kills + 2))
    assert process.returncode == 0, error
    report = json.loads(out.splitlines()[-1])
    assert (report["kills"], report["wrong"]) == (kills, [])
    assert report["resumed"] >= kills // 3, report
