"""What each rank of a test runs: steps that add up a number over all ranks; one rank does as it is told at step 10."""

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import paraxis as px


def main(what: str, who: int = 1) -> None:
    me = px.initialize()
    ranks = px.Axis("ranks", jax.device_count())
    total = jax.jit(lambda x, k: px.reduce_sum(x, ranks) + k)

    def step(number: int, batch: Any) -> tuple[int, dict[str, float]]:
        value = float(total(np.arange(ranks.size, dtype="f"), number))
        if number in (0, 10):
            sys.stdout.write(f"step {number}: {value:g}\n")
        if number == 10 and me.process == who:
            misbehave(what)
        time.sleep(0.005)
        return number + 1, {"value": value}

    try:
        px.fit(0, step, [np.zeros(1)] * 20, steps=100_000, progress=False)
    except px.TrainingStopped as stopped:
        sys.stdout.write(f"stopped at {stopped.state}\n")
    sys.stdout.write(f"left {me.process} of {me.num_processes}\n")


def misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("a bug of the user")
    if what.startswith("exit"):
        sys.exit(int(what.removeprefix("exit")))
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
