"""All tests run on eight simulated CPU devices; each worker of pytest-xdist starts its own."""

import atexit
import gc
import importlib.metadata
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Tests of single devices pass on a GPU, too: CONTRIBUTING.md says how to run them there.
NUM_DEVICES = int(os.environ.get("TEST_DEVICES", "8"))
TESTS = Path(__file__).parent
ON_FLOOR = {"laws"}  # their tests are marked `floor`

# More than half of the time goes into compiling. The XLA of jax 0.10 compiles twice as fast with the older of its two
# code generators for CPUs, which is gone from later ones: there the tests see the newer one, as do, everywhere, those
# that start processes with flags of their own: of examples, commands, and several processes. Level 1 of the machine
# code's optimisation takes a tenth off; level 0 would take a fifth, but with it a program on a mesh gave wrong numbers.
# Nor is a program divided into parts for several threads to generate the code of: each would be set up for by itself.
_FASTER = "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FASTER += " --xla_cpu_use_fusion_emitters=false"

# JAX reads these when it starts, which importing a test module may do.
PLATFORMS = os.environ.get("TEST_PLATFORMS", "cpu")
_FLAGS = f"--xla_force_host_platform_device_count={NUM_DEVICES} {_FASTER if PLATFORMS == 'cpu' else ''}"
os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["JAX_PLATFORMS"] = PLATFORMS
os.environ.setdefault("PJRT_NPROC", str(max(16, 2 * NUM_DEVICES)))  # with fewer threads, devices of jax 0.10 may hang

# Tests, the commands that they start, and later runs share what was compiled. JAX finds it by the program, and by its
# own version and flags. Each worker has its own, as entries are not written atomically.
COMPILED = TESTS.parent / ".pytest_cache" / "xla" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)  # a worker finds that of the process that started it
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# What tests and their processes leave for temporary goes with the run. What pytest itself keeps lies where it did.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="paraxis-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# A shell starts what runs in its background with SIGINT ignored, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Seconds of CPU, since on a machine that others use as well the time on the clock says little.
MOST_SECONDS = 20.0  # of a test without the mark `slow`, and of the processes that it starts


def _seconds() -> float:
    """This process's CPU time so far, with that of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test of every day that takes too long, and would otherwise pass."""
    begin = _seconds()
    result = yield
    took = _seconds() - begin
    if took > MOST_SECONDS and item.get_closest_marker("slow") is None and "COVERAGE_RUN" not in os.environ:
        pytest.fail(f"takes {took:.1f} s of CPU, more than {MOST_SECONDS:.0f}; make it cheaper, or mark it slow")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``sampled(n)``, all cases but n, spread evenly, are slow. Laws hold on the floor.

    The last case, of most devices, is always kept: of the first, on one device, most laws hold whatever is wrong.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        kept = {(k + 1) * len(found) // marker.args[0] - 1 for k in range(marker.args[0])}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in ON_FLOOR:
            item.add_marker(pytest.mark.floor)


def pytest_collection_finish() -> None:
    """Look less often for what is garbage: tracing makes many objects, and a twentieth of the time went there."""
    _keep_what_is_there()
    gc.set_threshold(50_000, 20, 20)


def _keep_what_is_there() -> None:
    """Do not look again at what is no garbage now: modules, tests, and what is compiled. It took seconds each time."""
    gc.collect()
    gc.freeze()


# Each compiled program takes some dozens of the memory maps that Linux lets a process have, 65,530; without one, XLA
# crashes. The tests of a worker compile more than that.
MAPS = Path("/proc/self/maps")
MOST_MAPS = 20_000
_done = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Every few tests: let go of compiled programs, if there are many."""
    if (done := next(_done)) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.unfreeze()
    if done % 100 == 0:
        _keep_what_is_there()
