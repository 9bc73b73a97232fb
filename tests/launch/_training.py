"""What each rank of a test runs: steps that add up a number over all ranks; one rank does as it is told at step 10."""

import os
import signal
import sys
import time

import jax
import numpy as np

import paraxis as px
from paraxis._core import processes


def main(what: str, who: int) -> None:
    me = px.initialize()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    numbers = np.arange(jax.device_count(), dtype=np.float32)
    placed = jax.make_array_from_callback(numbers.shape, over, lambda part: numbers[part])
    total = jax.jit(lambda x, k: x.sum() + k)
    with processes.StopSignal() as stop:
        for step in range(20 if what == "finish" else 100_000):
            value = float(total(placed, step))
            processes.note_progress()
            if step in (0, 10):
                say(f"step {step}: {value:g}")
            if step == 10 and me.process == who:
                misbehave(what)
            if stop.asked():
                say(f"stopped at {step} by {stop.asked()}")
                break
            time.sleep(0.005)
    processes.end_progress()
    processes.barrier("the end")
    say(f"left {me.process} of {me.num_processes}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("a bug of the user")
    if what == "stuck":
        time.sleep(1000)
    if what == "_exit0":
        os._exit(0)
    if what.startswith("exit"):
        sys.exit(int(what.removeprefix("exit")))
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)
