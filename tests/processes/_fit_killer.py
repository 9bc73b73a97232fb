"""Kills a run with SIGKILL at random times, starts it again, and says whether what came out is what would have.

``python -m tests.processes._fit_killer DIRECTORY NUM_KILLS SEED PROCESSES DEVICES`` prints one line of JSON. A run of
one process is forked when everything is imported and before JAX has started anything: so it begins within 0.2 seconds.
Several are started by ``paraxis launch``, and the launcher or one of them is killed.
"""

import contextlib
import dataclasses
import gc
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

import flax.linen
import flax.nnx
import jax
import optax
import tensorboardX
from orbax.checkpoint import v1

import paraxis as px
from paraxis.train import fit, loader
from tests import _support

_ONCE = flax.linen, flax.nnx, optax, tensorboardX, v1, fit, loader, _support  # imported once, for all runs

Layout = tuple[int, int]  # processes, and devices of each


def run(directory: Path) -> None:
    """The run: 24 steps, with everything on, saved after every third."""
    jax.config.update("jax_compilation_cache_dir", os.environ["TESTS_COMPILED"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    here = px.initialize()
    (directory / f"pid-{here.process}").write_text(str(os.getpid()))

    from tests import _fits as fits  # it makes arrays

    arrays = fits.arrays(64)  # all batches of one size: each run compiles the step once
    checkpoints = px.Checkpoints(directory / "checkpoints", every=3, keep=2, best=("test/loss", "min"))
    evaluated = px.eval_step(lambda p, batch: (batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)
    fitted = px.fit(
        fits.start(),
        px.train_step(fits.loss),
        px.loader(arrays, fits.BATCH, seed=1),
        epochs=6,
        evaluate=px.Evaluate(evaluated, px.loader(arrays, fits.BATCH, shuffle=False), every=5),
        checkpoint=checkpoints,
        log=directory / "log.jsonl",
        tensorboard=directory / "board",
        callbacks=lambda event: time.sleep(0.006),
        progress=False,
    )
    if here.process:
        return
    result = {
        "state": hashlib.sha256(b"".join(_support.bits(fitted.state))).hexdigest(),
        "history": json.dumps(dataclasses.asdict(fitted.history)),
        "log": fits.lines(directory / "log.jsonl"),
        "points": fits.points(directory / "board"),
        "steps": checkpoints.steps,
        "best": checkpoints.best,
    }
    part = directory / "result.part"
    part.write_text(json.dumps(result))
    part.rename(directory / "result.json")


def started(directory: Path, layout: Layout) -> int:
    """Start a run; of several processes, with a launcher between."""
    directory.mkdir(exist_ok=True)
    for file in directory.glob("pid-*"):
        file.unlink()
    if layout[0] == 1:
        if pid := os.fork():
            return pid
        gc.disable()  # tracing makes many objects, to look at which takes long
        try:
            run(directory)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    launch = ["-m", "paraxis", "launch", "-n", str(layout[0]), "--devices", str(layout[1])]
    command = [sys.executable, *launch, "-m", "tests.processes._fit_killer", "run", str(directory)]
    with (directory / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output).pid


def status_of(pid: int) -> int | None:
    """``None``: it runs; else 0, or below it the signal that ended it, or a rank that the launcher tells of."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    return None if not ended else 128 - code if code > 128 else code


def finished(directory: Path, layout: Layout) -> Any:
    """Run to the end, whatever was there before, and give what came out."""
    pid = started(directory, layout)
    while (status := status_of(pid)) is None:
        time.sleep(0.01)
    output = directory / "output.txt"
    assert status == 0, (status, output.read_text()[-3000:] if output.exists() else "")
    return json.loads((directory / "result.json").read_text())


def was_killed(directory: Path, layout: Layout, draw: random.Random) -> bool:
    """Start a run and kill it, or a rank of it, some milliseconds after it has come far enough; not if it ends before.

    How far it is, and not how long it has run: a machine at work on other things is slow.
    """
    log, pids = directory / "log.jsonl", [directory / f"pid-{rank}" for rank in range(layout[0])]
    enough = _num_lines(log) + draw.randrange(12)
    pid = started(directory, layout)
    while (status := status_of(pid)) is None and _num_lines(log) < enough:
        time.sleep(0.002)
    if status is None:
        time.sleep(draw.uniform(0, 0.06))
        ranks = [int(file.read_text() or 0) for file in pids if file.exists() and layout[0] > 1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice([pid, *filter(None, ranks)]), signal.SIGKILL)
        while (status := status_of(pid)) is None:
            time.sleep(0.002)
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def _num_lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def main(directory: Path, num_kills: int, seed: int, layout: Layout) -> dict[str, Any]:
    draw, place = random.Random(seed), directory / "run-0"
    expected = finished(directory / "first", layout)
    report: dict[str, Any] = {"kills": 0, "resumed": 0, "finished": 0, "wrong": []}
    while report["kills"] < num_kills:
        report["resumed"] += any(path.name.isdecimal() for path in (place / "checkpoints").glob("*"))
        killed = was_killed(place, layout, draw)
        report["kills"] += killed
        if report["kills"] == num_kills or not killed:
            found = finished(place, layout)
            if {*expected["steps"]} < {*found["steps"]}:  # killed before an old one was removed: the next save does so
                found["steps"] = expected["steps"]
            report["wrong"] += [part for part in expected if found[part] != expected[part]]
            report["finished"] += 1
            place = directory / f"run-{report['finished']}"
    return report


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
