"""The verbs on two processes with two devices each: one more column of the law table, against NumPy in both."""

from pathlib import Path

import pytest

from tests.launch._support import Launch, launched  # noqa: F401  (a fixture)

LAWS = """
import gc, os, sys
gc.disable()  # tracing makes many objects, to look at which takes long
flags = " --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
import numpy as np
import jax, jax.numpy as jnp
import paraxis as px

px.initialize()
assert jax.device_count() == 4 and jax.local_device_count() == 2
random = np.random.RandomState(0)


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-6)


eight = px.Axis("rows", 8)
close(px.gather(px.scatter(np.arange(8.0), eight), eight), np.arange(8.0))
for size in map(int, sys.argv[1:]):
    rows = px.Axis("rows", size)
    x, w = random.randn(size, 3).astype("f"), random.randn(3).astype("f")

    def loss(w, x, rows=rows):
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum(jnp.sin(w * x)), (px.broadcast(w, rows), x), rows), rows)

    close(px.gather(px.map_fn(jnp.sin, x, rows), rows), np.sin(x))
    close(px.gather(px.scatter(x, rows), rows), x)
    close(px.gather(px.pmap(lambda x: x / px.psum(x, "i"), axis_name="i")(x), rows), x / x.sum(0))
    value, slope = np.sin(w * x).sum(1).mean(), (np.cos(w * x) * x).mean(0)
    program = px.program(rows=rows)(loss)
    close(program(w, x), value)

    @jax.jit
    def in_one_program(w, x, rows=rows, size=size, loss=loss, program=program):
        in_turns = px.Axis("rows", size, at_once=1)
        mapped = (
            px.map_fn(lambda x: x - px.pmean(x, "rows"), x, rows),
            px.map_fn(jax.random.uniform, px.keys(jax.random.key(0), rows), rows),
            px.map_fn(jax.random.bits, px.keys(jax.random.PRNGKey(0), rows), rows),
        )
        return mapped, (
            px.reduce_max(x, rows),
            px.reduce_weighted_mean(x, x[:, 0] ** 2, rows),
            *jax.value_and_grad(loss)(w, x),
            *jax.value_and_grad(program)(w, x),
            px.reduce_sum(px.map_fn(jnp.sin, x, in_turns), in_turns),
        )

    mapped, reduced = in_one_program(w, x)
    weighted = np.average(x, axis=0, weights=x[:, 0] ** 2)
    for got, wanted in zip(reduced, (x.max(0), weighted, value, slope, value, slope, np.sin(x).sum(0)), strict=True):
        close(got, wanted)
    centred, drawn, bits = px.gather(mapped, rows)
    close(centred, x - x.mean(0))
    close(drawn, [jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)) for i in range(size)])
    old = [jax.random.fold_in(jax.random.PRNGKey(0), i) for i in range(size)]
    np.testing.assert_array_equal(bits, [jax.random.bits(key) for key in old])
print("held for", size)
"""


@pytest.mark.parametrize("size", [7, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_the_verbs_are_the_same_on_two_processes(launched: Launch, tmp_path: Path, size: int) -> None:  # noqa: F811
    script = tmp_path / "laws.py"
    script.write_text(LAWS)
    status, out, error = launched(str(script), str(size), devices=2)
    assert status == 0, out + error
    assert out.count(f"held for {size}") == 2
