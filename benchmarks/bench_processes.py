"""Two processes with one device each, beside one process with two devices and with one: the same steps of training.

Each layout is a launch of its own, by ``paraxis launch -n … --devices …``, in turn. A step is ``px.train_step`` with
Adam on a batch that is laid out already. ``gradient alone`` is what such a step communicates and nothing else: one
all-reduce of as many numbers as the model has parameters; between processes by Gloo, over TCP on loopback.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import harness
import page

LAYOUTS = {"1 process x 1 device": (1, 1), "1 process x 2 devices": (1, 2), "2 processes x 1 device": (2, 1)}
BASE = "1 process x 2 devices"
COMMAND = [sys.executable, "-c", "import sys; from paraxis.cli import main; sys.exit(main())", "launch"]

Found = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="launches of each layout")
    parser.add_argument("--save", action="store_true", help="keep the tables in results/, for README.md")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    found: dict[str, list[Found]] = {name: [] for name in LAYOUTS}
    for turn in range(options.repeats):
        for name in list(LAYOUTS) if turn % 2 else list(LAYOUTS)[::-1]:
            found[name].append(launched(*LAYOUTS[name]))
    tables = {work: {name: row(work, found[name], found[BASE]) for name in LAYOUTS} for work in found[BASE][0]}
    harness.show(tables)
    if options.save:
        page.save("processes", "2 processes", "python benchmarks/bench_processes.py", tables)
        page.write()


def launched(num_processes: int, num_devices: int) -> Found:
    options = ["-n", str(num_processes), "--devices", str(num_devices)]
    done = subprocess.run([*COMMAND, *options, __file__, "--measure"], stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("[0] {"))
    return json.loads(line.removeprefix("[0] "))


def row(work: str, runs: list[Found], base: list[Found]) -> dict[str, Any]:
    """Return the medians over the launches; the last column is that of the ratios within a turn."""
    ratios = [run[work]["ms"] / other[work]["ms"] for run, other in zip(runs, base, strict=True)]
    ms = statistics.median(run[work]["ms"] for run in runs)
    sent = {name: int(runs[0][work][name]) for name in ("AR", "bytes")}
    return {"ms": ms, **sent, f"it / {BASE}": statistics.median(ratios)}


def measure() -> None:
    """Print a line of JSON, in the first process of a launch."""
    import paraxis as px

    here = px.initialize()
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from models import cnn_loss, cnn_params, mlp_loss, mlp_params

    from paraxis.testing import communication

    draw, found = np.random.default_rng(0), {}
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def timed(call: Any, program: Any, *args: Any) -> dict[str, float]:
        sent = communication(program, *args)
        ms = 1e3 * harness.in_turn({"": call}, repeats=5, calls=10)[""]
        return {"ms": ms, "AR": sent.count["all_reduce"], "bytes": sent.bytes["all_reduce"]}

    for name, loss, params, num_rows, shape in (
        ("MLP, 128 rows", mlp_loss, mlp_params(jax.random.key(0)), 128, (784,)),
        ("CNN, 32 rows", cnn_loss, cnn_params(jax.random.key(0)), 32, (28, 28, 1)),
    ):
        x = draw.standard_normal((num_rows, *shape)).astype(np.float32)
        y = draw.integers(0, 10, num_rows).astype(np.int32)
        batch = next(px.loader({"x": x, "y": y}, num_rows).batches())
        step = px.train_step(lambda model, batch, loss=loss: loss(model, batch["x"], batch["y"]))
        state = [px.TrainState.create(params, optax.adam(1e-3))]

        def train(step: Any = step, state: Any = state, batch: Any = batch) -> Any:
            state[0], _ = step(state[0], batch)
            return state[0]

        found[name] = timed(train, step, state[0], batch)
        size = sum(x.size for x in jax.tree.leaves(params))
        zeros = jax.jit(jnp.zeros, static_argnums=0, out_shardings=NamedSharding(mesh, P("d")))(mesh.size * size)
        add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
        alone = timed(lambda add=add, zeros=zeros: add(zeros), add, zeros)
        found[f"{name.partition(',')[0]}, gradient alone"] = alone
    if here.process == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
