"""Several processes of one program, without the launcher."""

import os
import subprocess
import sys
from pathlib import Path

from tests.launch._support import held_port, plain_environment

ROOT = Path(__file__).parents[2]


def started(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """A Python process that finds the project and its tests."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    # The cache's entries are not written atomically, so each process goes without.
    env = plain_environment() | {"PYTHONPATH": path} | variables
    command = [sys.executable, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def outputs_of(number: int, *arguments: object, devices: int) -> list[str]:
    """What each process printed, once all have ended well. A free port, and its number, are given after the others."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    with held_port() as port:
        processes = [started(*arguments, port, process, XLA_FLAGS=flags) for process in range(number)]
        try:
            done = [process.communicate(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0] * number, done
    return [out for out, _ in done]
