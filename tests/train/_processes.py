"""A process of its own for a program of the tests."""

import os
import subprocess
import sys
from pathlib import Path

from tests.launch._support import plain_environment

ROOT = Path(__file__).parents[2]


def started(*arguments: object) -> subprocess.Popen[str]:
    """A Python process that finds the project and its tests."""
    # The cache's entries are not written atomically, so each process goes without.
    env = plain_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
