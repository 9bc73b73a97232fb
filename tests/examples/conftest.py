"""Examples as modules, and as the commands they are."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import an example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture(scope="session")
def run_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run an example in a process of its own; what it printed."""
    kept = str(tmp_path_factory.mktemp("kept"))  # what an example keeps for its next run

    def run(name: str, *options: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"TMPDIR": kept}
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
