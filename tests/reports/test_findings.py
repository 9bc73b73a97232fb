"""Each finding has a program that causes it, and one that is alike and does not."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.reports import Report

pytestmark = pytest.mark.newest

MIB = 1024**2


def struct(*shape: int, dtype: Any = jnp.float32, lies: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=lies)


@functools.cache
def flat() -> Mesh:
    return Mesh(np.array(jax.devices()), ("d",))


def over(*spec: Any) -> NamedSharding:
    return NamedSharding(flat(), P(*spec))


def per_device(body: Callable[..., Any], *args: Any) -> Any:
    return jax.shard_map(body, mesh=flat(), in_specs=P("d"), out_specs=P(), check_vma=False)(*args)


def compared(x):
    return x @ x.T  # pairs of rows


def summed(x, *, integer):
    def body(x):
        count = (x > 0).astype(jnp.int32 if integer else jnp.float32)
        return jax.lax.psum(x, "d"), jax.lax.psum(count, "d")  # counts

    return per_device(body, x)


def many_rows(x, *, size):
    return px.map_fn(lambda x: x @ x, x, px.Axis("clients", size))  # clients


def trained(rows: int) -> Report:
    state = px.TrainState.create(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1))
    step = px.train_step(lambda model, batch: (model(batch) ** 2).mean())
    return px.explain(step)(state, np.ones((rows, 4), np.float32))


def everywhere(x):
    return jax.lax.with_sharding_constraint(x @ x, over())  # products


def divided(x):
    return jax.lax.with_sharding_constraint(x * 2, over("d")).sum()  # rows


def moved(state, x):
    return {name: value + x for name, value in state.items()}


STATE = {"a": struct(MIB // 8), "b": struct(MIB // 8)}
TABLE = np.ones(MIB // 4, np.float32)

# The kind, a program that causes it and one that does not; the marker of its line, and words of its text.
CASES: dict[str, tuple[Callable[[], Report], Callable[[], Report], str | None, str]] = {
    "gather": (
        lambda: px.explain(compared)(struct(256, 128, lies=over("d"))),
        lambda: px.explain(compared)(struct(256, 128, lies=over())),
        "pairs of rows",
        "x, which lies in blocks, is gathered on each device along 'd'",
    ),
    "redundant": (
        lambda: px.explain(everywhere)(struct(64, 64, lies=over())),
        lambda: px.explain(functools.partial(many_rows, size=64))(struct(64, 8, 8)),
        "products",
        "the same work is done 8.0 times: each device computes 524 kFLOP, an equal share is 65.5 kFLOP",
    ),
    "padding": (
        lambda: px.explain(functools.partial(many_rows, size=10))(struct(10, 8, 8)),
        lambda: px.explain(functools.partial(many_rows, size=15))(struct(15, 8, 8)),
        "clients",
        "the 10 elements of 'clients' on 8 devices are padded to 16: 38% of the places are empty",
    ),
    "idle": (
        lambda: px.explain(compared, devices=16)(struct(16, 8)),
        lambda: px.explain(compared, devices=16)(struct(16, 8, lies=over("d"))),
        None,
        "1 of the 16 devices that were asked for run it",
    ),
    "replicated": (
        lambda: px.explain(lambda x: x.sum())(struct(4 * MIB, lies=over())),
        lambda: px.explain(lambda x: x.sum())(struct(4 * MIB, lies=over("d"))),
        None,
        "x (16 MiB) is whole on each of 8 devices",
    ),
    "constant": (
        lambda: px.explain(lambda x: x + TABLE)(struct(MIB // 4)),
        lambda: px.explain(lambda x, table: x + table)(struct(MIB // 4), TABLE),
        None,
        "an array float32[262144] (1 MiB) is closed over",
    ),
    "undonated": (
        lambda: px.explain(moved)(STATE, struct()),
        lambda: px.explain(jax.jit(moved, donate_argnums=0))(STATE, struct()),
        None,
        "state (1 MiB on each device) is returned changed",
    ),
    "unused_donation": (
        lambda: px.explain(jax.jit(lambda x: x.sum(), donate_argnums=0))(struct(MIB // 4)),
        lambda: px.explain(jax.jit(lambda x: x * 2, donate_argnums=0))(struct(MIB // 4)),
        None,
        "1 MiB are donated",
    ),
    "unjoined": (
        lambda: px.explain(summed)(struct(16, 2), integer=True),
        lambda: px.explain(summed)(struct(16, 2), integer=False),
        "counts",
        "2 all-reduces, of ",
    ),
    "uneven": (
        lambda: px.explain(divided)(struct(10, 2)),
        lambda: px.explain(divided)(struct(16, 2)),
        "rows",
        "10 rows do not divide by 8",
    ),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("kind", CASES)
def test_a_finding_is_told_where_there_is_one_and_only_there(kind: Any) -> None:
    causes, does_not, marker, words = CASES[kind]
    (finding,) = causes().found(kind)
    assert words in finding.text
    assert finding.write in str(finding)
    lines = Path(__file__).read_text("utf-8").splitlines()
    expected = next((n for n, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")), None)
    assert (finding.line and finding.line.number) == expected
    assert 0 < finding.weight <= 1
    assert does_not().found(kind) == []


def test_a_padded_batch_is_found_and_is_no_work_done_twice() -> None:
    report = trained(9)
    assert [finding.kind for finding in report.findings] == ["padding"]
    assert "the 9 elements of 'batch' on 8 devices are padded to 16" in report.findings[0].text
    assert trained(16).findings == ()


def test_the_worst_comes_first_and_is_shown_with_what_to_write() -> None:
    report = px.explain(lambda x: (many_rows(x[:10], size=10), everywhere(x[0])))(struct(64, 64, 64, lies=over()))
    weights = [finding.weight for finding in report.findings]
    assert weights == sorted(weights, reverse=True)
    assert len(weights) >= 2
    text = str(report)
    assert all(finding.text in text and f"→ {finding.write}" in text for finding in report.findings)
