"""Kills a run with SIGKILL at random times, starts it again, and says whether what came out is what would have.

Called as ``python -m tests.train._fit_killer DIRECTORY NUM_KILLS SEED``. Prints one line of JSON. Each run is a process
of its own, forked when everything is imported and before JAX has started anything: so it begins within 0.2 seconds.
"""

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paraxis as px
from paraxis.train import Checkpoints, fit, loader  # noqa: F401  imported once, for all runs


def run(directory: Path) -> None:
    """The run: 24 steps, saved after every third."""
    from tests.train import _fits as fits

    fitted = px.fit(
        fits.start(),
        fits.step,
        fits.data(),
        epochs=6,
        evaluate=px.Evaluate(fits.evaluate_step, [fits.arrays()], every=5),
        checkpoint=px.Checkpoints(directory / "checkpoints", every=3),
        log=directory / "log.jsonl",
        callbacks=lambda event: time.sleep(0.006),
        progress=False,
    )
    digest = hashlib.sha256(b"".join(fits.bits(fitted.state))).hexdigest()
    result = {
        "state": digest,
        "history": json.dumps(dataclasses.asdict(fitted.history)),
        "log": fits.lines(directory / "log.jsonl"),
    }
    (directory / "result.json").write_text(json.dumps(result))


def forked(directory: Path) -> int:
    directory.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        run(directory)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def finished(directory: Path) -> Any:
    """Run to the end, whatever was there before, and give what came out."""
    _, status = os.waitpid(forked(directory), 0)
    assert status == 0, f"a run that was not killed ended with {status}"
    return json.loads((directory / "result.json").read_text())


def main(directory: Path, num_kills: int, seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    expected = finished(directory / "first")
    assert finished(directory / "second") == expected
    report = {"kills": 0, "resumed": 0, "finished": 0, "wrong": 0}
    place = directory / "run-0"
    while report["kills"] < num_kills:
        report["resumed"] += any(name.isdecimal() for name in _names(place / "checkpoints"))
        enough = _num_lines(place / "log.jsonl") + draw.randrange(12)
        status = killed(
            forked(place), lambda place=place, enough=enough: _num_lines(place / "log.jsonl") >= enough, draw
        )
        report["kills"] += os.WIFSIGNALED(status)
        if report["kills"] == num_kills or not os.WIFSIGNALED(status):
            report["wrong"] += finished(place) != expected
            report["finished"] += 1
            place = directory / f"run-{report['finished']}"
    return report


def killed(child: int, may_die: Callable[[], bool], draw: random.Random) -> int:
    """Kill a process some milliseconds after it has come far enough, unless it ends before; its status.

    How far it is, and not how long it has run: a machine at work on other things is slow.
    """
    while not may_die():
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _num_lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def _names(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
