"""What each rank of a test runs: steps that add up a number over all ranks; one rank does as it is told at step 10."""

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import paraxis as px


def main(what: str, who: int) -> None:
    me = px.initialize()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    numbers = np.arange(jax.device_count(), dtype=np.float32)
    placed = jax.make_array_from_callback(numbers.shape, over, lambda part: numbers[part])
    total = jax.jit(lambda x, k: x.sum() + k)

    def step(number: int, batch: Any) -> tuple[int, dict[str, float]]:
        value = float(total(placed, number))
        if number in (0, 10):
            say(f"step {number}: {value:g}")
        if number == 10 and me.process == who:
            misbehave(what)
        time.sleep(0.005)
        return number + 1, {"value": value}

    try:
        px.fit(0, step, [np.zeros(1)] * 20, steps=20 if what == "finish" else 100_000, progress=False)
    except px.TrainingStopped as stopped:
        say(f"stopped at {stopped.state}")
    say(f"left {me.process} of {me.num_processes}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("a bug of the user")
    if what.startswith("exit"):
        sys.exit(int(what.removeprefix("exit")))
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
