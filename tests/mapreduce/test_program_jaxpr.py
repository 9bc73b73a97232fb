"""Programs are closed under differentiation, traced anew at each call, and compiled once."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close, compilations, equations


def verbs_by_axis(fn, *args):
    return collections.Counter(
        (eqn.primitive.name, eqn.params["axis"])
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name.startswith("px_")
    )


def primitives(fn, *args):
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args))}


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


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES.keys())
def test_nothing_opaque_stands_in_their_place(derivative):
    opaque = {"custom_jvp_call", "custom_vjp_call", "pure_callback", "io_callback", "custom_call", "psum", "all_gather"}
    assert not primitives(derivative(loss), W, X) & opaque


def test_a_broadcast_becomes_a_sum_and_a_sum_a_broadcast():
    spread = px.program(clients=4)(lambda x: px.broadcast(x) * X)
    assert verbs_by_axis(lambda ct: jax.vjp(spread, W)[1](ct), X)["px_reduce_sum", "clients"] == 1
    summed = px.program(clients=4)(lambda x: px.reduce_sum(x))
    assert verbs_by_axis(lambda ct: jax.vjp(summed, X)[1](ct), W)["px_broadcast", "clients"] == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES.keys())
def test_derivatives_are_those_of_vmap(derivative):
    def oracle(w, x):
        return jax.vmap(lambda x: jnp.sum(jnp.sin(w * x)))(x).mean()

    assert_close(derivative(loss)(W, X), derivative(oracle)(W, X))


# --- traced once -----------------------------------------------------------------------------------------------------


class Counted:
    """A body that counts how often Python runs it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, w, x):
        self.calls += 1
        return w * x


def test_each_call_traces_once_and_only_the_first_compiles():
    body, client = Counted(), Counted()

    @px.program(clients=4)
    def fn(w, x):
        return px.reduce_sum(px.map_fn(client, (px.broadcast(body(w, 1.0)), x)))

    for number, scale in enumerate((1.0, 2.0, 3.0)):
        with compilations() as compiled:
            np.testing.assert_allclose(fn(W * scale, X + scale), W * scale * (X + scale).sum(), rtol=1e-5)
        assert (body.calls, client.calls) == (number + 1, number + 1)
        assert not number or not compiled


def test_under_jit_a_second_call_traces_nothing():
    body = Counted()
    fn = jax.jit(px.program(clients=4)(lambda w, x: px.reduce_sum(px.broadcast(body(w, 1.0)) * x)))
    for _ in range(2):
        fn(np.ones(2, np.float32), np.ones((4, 2), np.float32))
        fn(np.ones(3, np.float32), np.ones((4, 3), np.float32))
    assert body.calls == 2


def test_programs_of_the_same_structure_share_what_was_compiled():
    """A new function each time, as in a method or a loop: what it computes is the same, and is found."""

    def made(scale):
        return px.program(clients=4)(
            lambda w, x: px.reduce_sum(px.map_fn(lambda w, x: w * x * scale, (px.broadcast(w), x)))
        )

    made(2.0)(W, X)
    with compilations() as compiled:
        again = made(2.0)(W, X)
    assert not compiled
    assert_close(again, 2 * W * X.sum())
    assert_close(made(3.0)(W, X), 3 * W * X.sum())


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


def test_primitives_are_registered_once():
    def found(fn):
        return {eqn.primitive for eqn in equations(jax.make_jaxpr(fn)(1.0)) if "px_" in eqn.primitive.name}

    first = found(px.program(clients=4)(lambda x: px.reduce_sum(px.broadcast(x))))
    second = found(px.program(members=9)(lambda x: px.reduce_sum(px.broadcast(x))))
    assert first == second
    assert len(first) == 2
