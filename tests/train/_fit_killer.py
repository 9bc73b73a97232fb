"""Kills a run with SIGKILL at random times, starts it again, and says whether what came out is what would have.

Called as ``python -m tests.train._fit_killer DIRECTORY NUM_KILLS SEED PROCESSES DEVICES``. Prints one line of JSON. A
run of one process is forked when everything is imported and before JAX has started anything: so it begins within 0.2
seconds. Several are started by ``paraxis launch``, and the launcher or one of them is killed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import tensorboardX  # noqa: F401  imported once, for all runs

import paraxis as px
from paraxis.train import Checkpoints, fit, loader  # noqa: F401  imported once, for all runs

PARTS = ("state", "history", "log", "points", "steps", "best")
Layout = tuple[int, int]  # processes, and devices of each


def run(directory: Path) -> None:
    """The run: 24 steps, with everything on, saved after every third."""
    jax.config.update("jax_compilation_cache_dir", os.environ["TESTS_COMPILED"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    here = px.initialize()
    (directory / f"pid-{here.process}").write_text(str(os.getpid()))

    from tests.train import _fits as fits  # it makes arrays
    from tests.train._points import points

    checkpoints = px.Checkpoints(directory / "checkpoints", every=3, keep=2, best=("test/loss", "min"))
    evaluated = px.eval_step(lambda p, batch: (batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)
    fitted = px.fit(
        fits.start(),
        px.train_step(fits.loss),
        px.loader(fits.arrays(), fits.BATCH, seed=1),
        epochs=6,
        evaluate=px.Evaluate(evaluated, px.loader(fits.arrays(), fits.BATCH, shuffle=False), every=5),
        checkpoint=checkpoints,
        log=directory / "log.jsonl",
        tensorboard=directory / "board",
        callbacks=lambda event: time.sleep(0.006),
        progress=False,
    )
    if here.process:
        return
    result = {
        "state": hashlib.sha256(b"".join(fits.bits(fitted.state))).hexdigest(),
        "history": json.dumps(dataclasses.asdict(fitted.history)),
        "log": fits.lines(directory / "log.jsonl"),
        "points": points(directory / "board"),
        "steps": checkpoints.steps,
        "best": checkpoints.best,
    }
    part = directory / "result.part"
    part.write_text(json.dumps(result))
    part.rename(directory / "result.json")


class Attempt:
    """A run in a child of this process; of several processes, with a launcher between."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._pids, self._status = [directory / f"pid-{number}" for number in range(layout[0])], 0
        directory.mkdir(exist_ok=True)
        for file in self._pids:
            file.unlink(missing_ok=True)
        self._is_forked = layout[0] == 1
        self._pid = self._forked(directory) if self._is_forked else self._launched(directory, *layout)

    def _forked(self, directory: Path) -> int:
        if pid := os.fork():
            return pid
        try:
            run(directory)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _launched(self, directory: Path, processes: int, devices: int) -> int:
        launch = ["-m", "paraxis", "launch", "-n", str(processes), "--devices", str(devices)]
        ours = ["-m", "tests.train._fit_killer", "run", str(directory)]
        with (directory / "output.txt").open("ab") as output:
            return subprocess.Popen([sys.executable, *launch, *ours], stdout=output, stderr=output).pid

    def is_over(self) -> bool:
        ended, self._status = os.waitpid(self._pid, os.WNOHANG)
        return bool(ended)

    def kill(self, draw: random.Random) -> None:
        """Either the child, with which all end, or one of the launcher's processes."""
        found = [] if self._is_forked else [int(file.read_text() or 0) for file in self._pids if file.exists()]
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice([self._pid, *filter(None, found)]), signal.SIGKILL)

    @property
    def status(self) -> int:
        """0, or below it the signal that ended the child, or a rank that the launcher tells of."""
        code = os.waitstatus_to_exitcode(self._status)
        return 128 - code if code > 128 else code


def finished(directory: Path, layout: Layout) -> Any:
    """Run to the end, whatever was there before, and give what came out."""
    attempt = Attempt(directory, layout)
    while not attempt.is_over():
        time.sleep(0.01)
    output = directory / "output.txt"
    assert attempt.status == 0, (attempt.status, output.read_text()[-3000:] if output.exists() else "")
    return json.loads((directory / "result.json").read_text())


def differences(found: Any, expected: Any) -> list[str]:
    """Which parts of what came out are others."""
    return [part for part in PARTS if found.get(part) != expected.get(part)]


def main(directory: Path, num_kills: int, seed: int, layout: Layout) -> dict[str, Any]:
    draw, place = random.Random(seed), directory / "run-0"
    expected = finished(directory / "first", layout)
    report: dict[str, Any] = {"kills": 0, "resumed": 0, "finished": 0, "wrong": [], "state": expected["state"]}
    while report["kills"] < num_kills:
        report["resumed"] += any(path.name.isdecimal() for path in (place / "checkpoints").glob("*"))
        enough = _num_lines(place / "log.jsonl") + draw.randrange(12)
        was_killed = killed(Attempt(place, layout), place / "log.jsonl", enough, draw)
        report["kills"] += was_killed
        if report["kills"] == num_kills or not was_killed:
            report["wrong"] += differences(finished(place, layout), expected)
            report["finished"] += 1
            place = directory / f"run-{report['finished']}"
    return report


def killed(attempt: Attempt, log: Path, enough: int, draw: random.Random) -> bool:
    """Kill a run some milliseconds after it has come far enough, unless it ends before; whether it was killed.

    How far it is, and not how long it has run: a machine at work on other things is slow.
    """
    while not (is_over := attempt.is_over()) and _num_lines(log) < enough:
        time.sleep(0.002)
    if not is_over:
        time.sleep(draw.uniform(0, 0.06))
        attempt.kill(draw)
        while not attempt.is_over():
            time.sleep(0.002)
    assert attempt.status in (0, -signal.SIGKILL), attempt.status
    return attempt.status == -signal.SIGKILL


def _num_lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    os.environ["PJRT_NPROC"] = "8"  # the bits are to be the same in all layouts
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]))
    else:
        where, kills, seed, processes, devices = Path(sys.argv[1]), *map(int, sys.argv[2:])
        os.environ["TESTS_COMPILED"] = str(where / "compiled")  # by the run that is not killed
        given = os.environ.get("XLA_FLAGS", "")  # by which tests are compiled faster
        os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={devices}"
        print(json.dumps(main(where, kills, seed, (processes, devices))))  # noqa: T201
