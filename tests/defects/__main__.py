"""Apply each defect to a copy of the project, run the tests that have to notice, and report: python -m tests.defects.

The tests are those of ``make test``: without the mark ``slow``. The exit status is 0 if every defect was caught.
"""

import argparse
import concurrent.futures
import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.defects._defect import Defect, copy_tree, read_lists, tests_of

CAUGHT = "caught"
TIMEOUT = 600.0  # seconds that the tests of one defect may take
_BY_STATUS_OF_PYTEST = {
    0: "NOT CAUGHT: its tests pass",
    1: CAUGHT,
    2: "NOT CAUGHT: the package cannot even be imported, which is no small defect",
    5: "NOT CAUGHT: no test was run",
    -signal.SIGINT: CAUGHT,  # which a test sends to itself, and the healthy package takes
}


def run_tests(copy: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, on the package that is in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(copy / "src")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a file is changed again, perhaps within a second
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-m", "not slow", *options, *tests]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def outcome(defect: Defect, copy: Path) -> tuple[str, str]:
    """Say what became of a defect, ``CAUGHT`` or why not, and what pytest printed. The copy is mended afterwards."""
    try:
        path = defect.find(copy)
    except ValueError as error:
        return "STALE", str(error)
    before = path.read_bytes()
    try:
        defect.apply(copy)
        done = run_tests(copy, list(defect.tests), "-x")
    except subprocess.TimeoutExpired as error:
        return f"NOT CAUGHT: its tests hang for {TIMEOUT:.0f} s", str(error.stdout)
    finally:
        path.write_bytes(before)
    printed = done.stdout + done.stderr
    return _BY_STATUS_OF_PYTEST.get(done.returncode, f"NOT CAUGHT: pytest ended with {done.returncode}"), printed


@contextlib.contextmanager
def _copies(number: int) -> Iterator["queue.Queue[Path]"]:
    """So many copies of the project, each for one defect at a time and with its own cache of compiled programs."""
    with tempfile.TemporaryDirectory(prefix="paraxis-defects-") as folder:
        free: queue.Queue[Path] = queue.Queue()
        for k in range(number):
            copy_tree(Path(folder) / str(k))
            free.put(Path(folder) / str(k))
        yield free


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if every chosen defect was caught, 1 if not, 2 if it cannot be told."""
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only defects whose name, or file, has one of these words in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="defects at a time (default: the cores)")
    parser.add_argument("--verbose", action="store_true", help="print what pytest said of each that was not caught")
    parser.add_argument("--no-healthy-run", dest="healthy", action="store_false", help="skip the run without defects")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [defect for defect in read_lists() if any(word in f"{defect.name} {defect.file}" for word in words)]
    if not chosen:
        print(f"no defect has any of {', '.join(words)} in its name or file", file=sys.stderr)
        return 2

    with _copies(options.jobs) as free:
        if options.healthy:
            copy = free.get()
            done = run_tests(copy, tests_of(chosen), "-n", str(options.jobs), "--dist", "loadfile")
            free.put(copy)
            if done.returncode:
                print(done.stdout + done.stderr, "The tests fail without any defect: mend that first.", sep="\n")
                return 2

        def work(defect: Defect) -> tuple[Defect, str, str, float]:
            copy, start = free.get(), time.monotonic()
            try:
                return defect, *outcome(defect, copy), time.monotonic() - start
            finally:
                free.put(copy)

        num_caught = 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(work, defect) for defect in chosen]):
                defect, what, printed, seconds = done.result()
                num_caught += what == CAUGHT
                print(f"{what:8}  {seconds:5.0f} s  {defect.file}: {defect.name}", flush=True)
                if options.verbose and what != CAUGHT:
                    print(printed)
    print(f"{num_caught} of {len(chosen)} defects caught")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
