"""The same bits for any layout of processes and devices, and for runs that go on on another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train._processes import outputs_of

LAYOUTS = [(1, 1), (1, 8), (2, 1), (4, 2)]
"""Processes, and devices of each; the first one writes the checkpoints."""


def run(num_processes: int, num_devices: int, path: Path) -> list[dict[str, Any]]:
    """What each process found."""
    arguments = ("-m", "tests.train._layouts", str(num_processes), path)
    outputs = outputs_of(num_processes, *arguments, devices=num_devices, PJRT_NPROC="8")
    lines = [out.splitlines() for out in outputs]
    assert {found[-1] for found in lines} == {f"{num_processes * num_devices} devices, 8 threads"}
    return [json.loads(found[-2]) for found in lines]


@pytest.mark.slow
def test_bits_do_not_depend_on_the_layout_of_processes_and_devices(tmp_path: Path) -> None:
    (expected,) = run(*LAYOUTS[0], tmp_path)
    for layout in LAYOUTS[1:]:
        for found in run(*layout, tmp_path):
            for name, (digest, losses) in expected.items():
                assert found[name] == [digest, losses], (layout, name)
                assert found[f"{name}, restored"] == [digest, losses[5:]], (layout, name)
