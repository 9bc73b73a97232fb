"""Programs whose communication, work and memory are known by hand, and reports on them."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.reports import Report
from tests._support import mesh_over

HERE = Path(__file__)


def struct(*shape: int, dtype: Any = jnp.float32, lies: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=lies)


def lies(over: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(over, P(*spec))


def sent(report: Report) -> list[tuple[Any, ...]]:
    return [(c.kind, c.bytes, c.times, c.axes) for c in report.collectives]


def line_with(marker: str, file: str | Path = HERE) -> int:
    """The number of a file's line that ends with a comment."""
    lines = Path(file).read_text("utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}"))


ROWS = px.Axis("rows", 16)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)  # product


def data_parallel(w, x, y):
    def mean_loss(w):
        losses = px.map_fn(loss, (px.broadcast(w, ROWS), x, y), ROWS)  # map
        return px.reduce_mean(losses, ROWS)

    def step(w, _):
        return w - px.reduce_max(jnp.abs(x), ROWS).max() * jax.grad(mean_loss)(w), None  # maximum

    return jax.lax.scan(step, w, length=7)[0]


def tensor_parallel(a, b, x):
    return jnp.tanh(x @ a) @ b  # hidden


def gathered(w, x):
    return x @ w  # weights


TENSOR = mesh_over(data=2, model=4)
FLAT = mesh_over(d=8)
STAGES, BATCHES, WIDTH = 4, 6, 8
PIPE = mesh_over(data=2, stage=STAGES)


def pipeline(w, x):
    """Return what layers make of batches: each stage has one layer, and hands on what it has made in each turn."""

    def body(w, x):
        stage, last = jax.lax.axis_index("stage"), STAGES - 1

        def turn(carry, t):
            held, out = carry
            done = jnp.tanh(jnp.where(stage == 0, x[jnp.minimum(t, BATCHES - 1)], held) @ w[0])
            out = out.at[jnp.maximum(t - last, 0)].set(done)
            return (jax.lax.ppermute(done, "stage", [(i, i + 1) for i in range(last)]), out), None  # hand on

        (_, out), _ = jax.lax.scan(turn, (jnp.zeros_like(x[0]), jnp.zeros_like(x)), jnp.arange(BATCHES + last))
        return jax.lax.psum(jnp.where(stage == last, out, 0), "stage")

    specs = P("stage"), P(None, "data")
    return jax.shard_map(body, mesh=PIPE, in_specs=specs, out_specs=specs[1], check_vma=False)(w, x)


def fsdp(w, x):
    def body(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ jax.lax.all_gather(w, "d", tiled=True))))(w)

    return jax.shard_map(body, mesh=FLAT, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False)(w, x)


HANDED_ON = ("collective_permute", 2 * WIDTH * 4, BATCHES + STAGES - 1, ("stage",))
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "data-parallel steps in a loop": (
        data_parallel,
        (struct(8, 4), struct(16, 3, 8), struct(16, 3, 4)),
        [("all_reduce", 8 * 4 * 4, 7, ("rows",)), ("all_reduce", 3 * 8 * 4, 1, ("rows",))],
    ),
    "tensor-parallel MLP": (
        tensor_parallel,
        (
            struct(8, 32, lies=lies(TENSOR, None, "model")),
            struct(32, 4, lies=lies(TENSOR, "model", None)),
            struct(6, 8, lies=lies(TENSOR, "data", None)),
        ),
        [("all_reduce", 3 * 4 * 4, 1, ("model",))],
    ),
    "sharded weights, gathered when used": (
        jax.jit(gathered, out_shardings=lies(FLAT, "d")),
        (struct(16, 4, lies=lies(FLAT, "d")), struct(64, 16, lies=lies(FLAT, "d"))),
        [("all_gather", 16 * 4 * 4, 1, ("d",))],
    ),
    "pipeline": (
        pipeline,
        (struct(STAGES, WIDTH, WIDTH), struct(BATCHES, 4, WIDTH)),
        [HANDED_ON, ("all_reduce", BATCHES * 2 * WIDTH * 4, 1, ("stage",))],
    ),
    "gradient of the pipeline": (
        jax.grad(lambda w, x: pipeline(w, x).sum()),
        (struct(STAGES, WIDTH, WIDTH), struct(BATCHES, 4, WIDTH)),
        [HANDED_ON, HANDED_ON, ("all_reduce", WIDTH * WIDTH * 4, 1, ("data",))],
    ),
    "weights in parts, gathered and scattered": (
        fsdp,
        (struct(16, 4), struct(64, 16)),
        [("all_gather", 16 * 4 * 4, 1, ("d",)), ("reduce_scatter", 16 * 4 * 4, 1, ("d",))],
    ),
}


@functools.cache
def report_on(name: str) -> Report:
    fn, args, _ = PROGRAMS[name]
    return px.explain(fn)(*args)
