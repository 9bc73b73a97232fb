"""Two processes with one device each, beside one process with two devices and with one: the same steps of training.

Each layout is a launch of its own, ``paraxis launch -n … --devices … benchmarks/bench_processes.py``, in turn, and the
median over the launches counts. A step is ``px.train_step`` with Adam on a batch that is laid out already. ``gradient
alone`` is what such a step communicates and nothing else: one all-reduce of as many numbers as the model has
parameters.

What two processes lose is the all-reduce: by Gloo, over TCP on loopback, it takes longer than within a process, where
each device adds up what lies in shared memory; little longer for megabytes, where copying and adding count, several
times as long for kilobytes, where a round of messages does, for which each process has to be awake. In a small step
there is more to lose than that: two processes have twice the threads for the same cores, and whoever is done first
waits for the other one. And on cores that are shared, one device has all of them already: more devices, of whatever
process, add what they communicate, and a second update of the same parameters.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import harness
import page

LAYOUTS = {"1 process x 1 device": (1, 1), "1 process x 2 devices": (1, 2), "2 processes x 1 device": (2, 1)}
COMMAND = [sys.executable, "-c", "import sys; from paraxis.cli import main; sys.exit(main())", "launch"]
CHUNKS, CHUNK = 5, 10

Found = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="launches of each layout")
    parser.add_argument("--save", action="store_true", help="keep what is printed in results/, for README.md")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    tables = report(compare(options.repeats))
    harness.show(tables)
    if options.save:
        page.save("processes", "2 processes", "python benchmarks/bench_processes.py", tables)
        page.write()


# --- the launches ----------------------------------------------------------------------------------------------------


def compare(repeats: int) -> dict[str, list[Found]]:
    """What each launch of each layout has found."""
    found: dict[str, list[Found]] = {name: [] for name in LAYOUTS}
    for turn in range(repeats):
        for name in list(LAYOUTS) if turn % 2 else list(LAYOUTS)[::-1]:
            found[name].append(launched(*LAYOUTS[name]))
    return found


def launched(num_processes: int, num_devices: int) -> Found:
    options = ["-n", str(num_processes), "--devices", str(num_devices)]
    done = subprocess.run([*COMMAND, *options, __file__, "--measure"], stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("[0] {"))
    return json.loads(line.removeprefix("[0] "))


def report(found: dict[str, list[Found]]) -> harness.Tables:
    """The last column is the median of the ratios within a turn."""
    base = found["1 process x 2 devices"]
    return {
        work: {
            name: {
                "ms": statistics.median(run[work]["ms"] for run in runs),
                "all-reduces": int(runs[0][work]["all_reduces"]),
                "bytes": int(runs[0][work]["bytes"]),
                "it / 1 process x 2 devices": statistics.median(
                    run[work]["ms"] / its[work]["ms"] for run, its in zip(runs, base, strict=True)
                ),
            }
            for name, runs in found.items()
        }
        for work in base[0]
    }


# --- one of them -----------------------------------------------------------------------------------------------------


def measure() -> None:
    """Print a line of JSON, in the first process."""
    import paraxis as px

    here = px.initialize()
    import jax
    from models import cnn_loss, cnn_params, mlp_loss, mlp_params

    key, found = jax.random.key(0), {}
    for name, loss, params, num_rows, shape in (
        ("MLP, 128 rows", mlp_loss, mlp_params(key), 128, (784,)),
        ("CNN, 32 rows", cnn_loss, cnn_params(key), 32, (28, 28, 1)),
    ):
        found[name] = steps(loss, params, num_rows, shape)
        found[f"{name.partition(',')[0]}, gradient alone"] = all_reduce(params)
    if here.process == 0:
        print(json.dumps(found), flush=True)


def steps(loss: Callable[..., Any], params: Any, num_rows: int, shape: tuple[int, ...]) -> dict[str, float]:
    import jax
    import numpy as np
    import optax

    import paraxis as px

    draw = np.random.default_rng(0)
    rows = {
        "x": draw.standard_normal((num_rows, *shape)).astype(np.float32),
        "y": draw.integers(0, 10, num_rows).astype(np.int32),
    }
    batch = next(iter(px.loader(rows, num_rows, seed=0).batches()))
    step = px.train_step(lambda model, batch: loss(model, batch["x"], batch["y"]))
    state = px.TrainState.create(params, optax.adam(1e-3))
    program = step.lower(state, batch).compile().as_text()

    def some(number: int) -> None:
        nonlocal state
        for _ in range(number):
            state, _ = step(state, batch)
        jax.block_until_ready(state)

    return {"ms": milliseconds(some), **communicated(program)}


def all_reduce(params: Any) -> dict[str, float]:
    """As many numbers as there are parameters, of each device: added up, one time after the other."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    size = sum(x.size for x in jax.tree.leaves(params))
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("d",))
    over = NamedSharding(mesh, P("d"))
    x = jax.make_array_from_callback((len(devices) * size,), over, lambda part: np.zeros(size, np.float32))
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
    program = add.lower(x).compile().as_text()

    def some(number: int) -> None:
        for _ in range(number):
            jax.block_until_ready(add(x))

    return {"ms": milliseconds(some), **communicated(program)}


def milliseconds(some: Callable[[int], None]) -> float:
    """Of one: the median over the chunks."""
    some(3)
    found = []
    for _ in range(CHUNKS):
        start = time.perf_counter()
        some(CHUNK)
        found.append((time.perf_counter() - start) / CHUNK)
    return statistics.median(found) * 1e3


def communicated(program: str | None) -> dict[str, float]:
    from paraxis.reports import of_program

    found = of_program(program or "")
    return {"all_reduces": found.count["all_reduce"], "bytes": found.bytes["all_reduce"]}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
