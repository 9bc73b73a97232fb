"""Several processes of one program, without the launcher."""

import os
import subprocess
import sys
from pathlib import Path

from tests.launch._support import held_port

ROOT = Path(__file__).parents[2]


def outputs_of(number: int, *arguments: str | Path, devices: int, **variables: str) -> list[str]:
    """What each process printed, once all have ended well. None outlives the test.

    Args:
        number: of processes.
        *arguments: of Python. A free port, and the number of the process, are given after them.
        devices: of each process.
        **variables: of their environment.
    """
    with held_port() as port:
        return _outputs_of(number, *arguments, str(port), devices=devices, **variables)


def _outputs_of(number: int, *arguments: str | Path, devices: int, **variables: str) -> list[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags} | variables
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # its entries are not written atomically
    started = [
        subprocess.Popen(
            [sys.executable, *arguments, str(process)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(number)
    ]
    try:
        done = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * number, done
    return [out for out, _ in done]
