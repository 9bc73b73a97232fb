"""The same bits for any layout of processes and devices, and for runs that go on on another one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAYOUTS = [(1, 1), (1, 8), (2, 1), (4, 2)]
"""Processes, and devices of each; the first one writes the checkpoints."""


def run(num_processes: int, num_devices: int, path: Path) -> list[dict[str, Any]]:
    """What each process found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "XLA_FLAGS": flags, "PJRT_NPROC": "8"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # its entries are not written atomically
    command = [sys.executable, "-m", "tests.train._layouts", str(num_processes)]
    started = [
        subprocess.Popen(
            [*command, str(process), port, str(path)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(num_processes)
    ]
    try:
        done = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * num_processes, done
    lines = [out.splitlines() for out, _ in done]
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
