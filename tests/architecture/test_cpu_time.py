"""A test that takes too long fails the run, unless it is one of the night, whatever else its result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import sys
sys.path.insert(0, {root!r})
import tests._cpu_time as cpu_time
cpu_time.MOST = 0.2

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: at night")
    config.pluginmanager.register(cpu_time.CpuTime())
"""
TESTS = """
import subprocess, sys, time, pytest

def work(seconds):
    start = time.process_time()
    while time.process_time() < start + seconds:
        pass

def test_short():
    pass

@pytest.mark.slow
def test_of_the_night():
    work(0.3)
"""
ITSELF = """
def test_itself():
    work(0.3)
"""
FIXTURE = """
@pytest.fixture
def costly():
    work(0.3)

def test_fixture(costly):
    pass
"""
CHILD = """
def test_child():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)
"""


def run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (folder / "test_it.py").write_text(TESTS + tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take longer than the tests
    env.pop("COVERAGE_RUN", None)  # under which no bound holds
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_what_takes_too_long_fails_a_run_that_would_pass(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, ITSELF + FIXTURE + CHILD, *options)
    assert done.returncode == 1, done.stdout
    assert "5 passed" in done.stdout
    for name in ("itself", "fixture", "child"):
        assert f"FAILED test_it.py::test_{name}: takes 0." in done.stdout
    assert "more than 0; make it cheaper, or mark it slow" in done.stdout
    assert "FAILED test_it.py::test_of_the_night" not in done.stdout
    assert "s  test_it.py::test_of_the_night" in done.stdout  # among the slowest it is shown


def test_a_run_of_which_nothing_takes_long_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert "CPU time" in done.stdout
