"""Steps and predictions may be called without reading what they give: nothing waits for itself for ever."""

import subprocess
import sys

import pytest

LOOP = """
from paraxis.testing import simulate_devices

simulate_devices(8)
import jax
import jax.numpy as jnp

import paraxis as px

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def apply(w, x):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=DIMENSIONS).mean((1, 2))


def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(apply(w, x) ** 2))(w)
    return w - 0.1 * gradient, loss


ens = px.ensemble(lambda key: jax.random.normal(key, (5, 5, 16, 32)), 7, 0, apply=apply)
x = jnp.ones((32, 28, 28, 16))
unread = [(ens.train(step, x), ens.predict(x), ens.members(x)) for _ in range(30)]
print(all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(unread)))
"""

EXCHANGE = """
from paraxis.testing import simulate_devices

simulate_devices(8)
import jax
import jax.numpy as jnp

import paraxis as px


def alone(p):
    for _ in range(3):
        p = {k: jnp.tanh(v @ v) for k, v in p.items()}
    return p, p["w0"][0, 0]


def together(p):
    return {k: v + jax.lax.pmean(v, "members") for k, v in p.items()}, p["w0"][0, 0]


ens = px.ensemble(lambda key: {f"w{i}": jax.random.normal(key, (64, 64)) for i in range(30)}, 8, 0)
unread = [(ens.train(alone), ens.train(together)) for _ in range(30)]
print(all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(unread)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [LOOP, EXCHANGE], ids=["steps and predictions", "members that exchange values"])
def test_a_loop_that_reads_nothing_comes_to_its_end(program: str) -> None:
    # In a process of its own: a program that waits for itself is ended by XLA, and Python with it, after 40 seconds.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "True"
