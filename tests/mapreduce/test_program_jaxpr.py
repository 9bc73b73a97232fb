"""Programs are closed under differentiation, traced anew at each call, and compiled once."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import compilations, equations


def verbs_by_axis(fn, *args):
    return collections.Counter(
        (eqn.primitive.name, eqn.params["axis"])
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name.startswith("px_")
    )


@px.program(clients=4)
def loss(w, x):
    return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum(jnp.sin(w * x)), (px.broadcast(w), x)))


@px.program(pods=2, clients=3)
def nested(w, x):
    def pod(w, rows):
        return px.reduce_sum(
            px.map_fn(lambda w, x: jnp.sin(w * x), (px.broadcast(w, "clients"), rows), "clients"), "clients"
        )

    return px.reduce_mean(px.map_fn(pod, (px.broadcast(w, "pods"), x), "pods"), "pods")


W, X = np.float32(1.5), np.linspace(-1, 1, 4, dtype=np.float32)
NESTED_X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
DERIVATIVES = {
    "value": lambda f: f,
    "grad": jax.grad,
    "value and grad": jax.value_and_grad,
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (jnp.ones_like(w),)),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
    "third": lambda f: jax.grad(jax.grad(jax.grad(f))),
    "jit": lambda f: jax.jit(jax.grad(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES.keys())
def test_derivatives_show_the_verbs_by_axis(derivative):
    found = verbs_by_axis(derivative(loss), W, X)
    assert found["px_broadcast", "clients"] >= 1
    assert found["px_reduce_sum", "clients"] >= 1
    assert {axis for _, axis in found} == {"clients"}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES.keys())
def test_derivatives_of_nested_axes_show_both(derivative):
    found = verbs_by_axis(derivative(nested), W, NESTED_X)
    for axis in ("pods", "clients"):
        assert found["px_map", axis] >= 1
    assert found["px_reduce_sum", "pods"] >= 1


def test_a_broadcast_becomes_a_sum_and_a_sum_a_broadcast():
    spread = px.program(clients=4)(lambda x: px.broadcast(x) * X)
    assert verbs_by_axis(lambda ct: jax.vjp(spread, W)[1](ct), X)["px_reduce_sum", "clients"] == 1
    summed = px.program(clients=4)(lambda x: px.reduce_sum(x))
    assert verbs_by_axis(lambda ct: jax.vjp(summed, X)[1](ct), W)["px_broadcast", "clients"] == 1


# --- traced once -----------------------------------------------------------------------------------------------------


class Counted:
    """A body that counts how often Python runs it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, w, x):
        self.calls += 1
        return w * x


def test_differentiation_traces_a_body_once_each_time():
    body = Counted()

    @px.program(clients=4)
    def fn(w, x):
        return px.reduce_sum(px.map_fn(body, (px.broadcast(w), x)))

    for number in range(1, 4):
        with compilations() as compiled:
            jax.grad(fn)(W, X)
        assert body.calls == number
        assert number == 1 or not compiled
