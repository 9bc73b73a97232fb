"""A test that takes too long fails the run, unless it is one of the night, whatever else its result."""

import os
import subprocess
import sys
from pathlib import Path

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

@pytest.fixture
def costly():
    work(0.3)

def test_short():
    pass

@pytest.mark.slow
def test_of_the_night():
    work(0.3)

def test_itself():
    work(0.3)

def test_fixture(costly):
    pass

def test_child():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)
"""


def test_what_takes_too_long_fails_a_run_that_would_pass(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (tmp_path / "test_it.py").write_text(TESTS)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take longer than the tests
    env.pop("COVERAGE_RUN", None)  # under which no bound holds
    for words, status in (("", 1), ("short or night", 0)):
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-k", words]
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout
        for name in ("itself", "fixture", "child"):
            assert (f"FAILED test_it.py::test_{name}: takes 0." in done.stdout) == (status == 1)
        assert "FAILED test_it.py::test_of_the_night" not in done.stdout
        assert "s  test_it.py::test_of_the_night" in done.stdout  # among the slowest it is shown
