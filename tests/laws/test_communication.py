"""What is sent is what was promised, counted in the compiled program; and a derivative hides nothing."""

import jax
import jax.numpy as jnp
import pytest

import paraxis as px
from paraxis.testing import assert_communication
from tests._support import equations, values

CLIENTS = px.Axis("clients", 16)
PARAMS = {"a": jnp.ones((4, 5)), "b": jnp.ones(5), "c": jnp.ones((5, 2))}
SIZE = 4 * (20 + 5 + 10)


def _loss(w, x):
    return jnp.mean(jnp.tanh(x @ w["a"] + w["b"]) @ w["c"])


def _mean_loss(w, x):
    return px.reduce_mean(px.map_fn(_loss, (px.broadcast(w, CLIENTS), x), CLIENTS), CLIENTS)


def _mean_gradient(w, x):
    return px.reduce_mean(px.map_fn(jax.value_and_grad(_loss), (px.broadcast(w, CLIENTS), x), CLIENTS), CLIENTS)


def _conv_round(w, x):
    def train(w, x):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(y**2)

    def step(w, x):
        for _ in range(2):
            w = w - 0.1 * jax.grad(train)(w, x)
        return w

    return px.reduce_mean(px.map_fn(step, (px.broadcast(w, CLIENTS), x), CLIENTS), CLIENTS)


X = values(16, 6, 4)
PROMISES = {
    "a map": (lambda x: px.map_fn(jnp.sin, x, CLIENTS), (X,), 0, 0),
    "a broadcast and a map": (lambda w, x: px.map_fn(_loss, (px.broadcast(w, CLIENTS), x), CLIENTS), (PARAMS, X), 0, 0),
    "a reduction of a tree": (
        lambda x: px.reduce_mean({"a": x, "b": x * 2}, CLIENTS),
        (px.scatter(X, CLIENTS),),
        1,
        4 * 48,
    ),
    "a mean of losses": (_mean_loss, (PARAMS, X), 1, 4),
    "value and gradient": (jax.value_and_grad(_mean_loss), (PARAMS, X), 1, SIZE + 4),
    "gradient in the map": (_mean_gradient, (PARAMS, X), 1, SIZE + 4),
    "gradient by the data": (jax.grad(_mean_loss, 1), (PARAMS, X), 0, 0),
    "a round of convolutions": (_conv_round, (jnp.ones((3, 3, 1, 2)), values(16, 2, 5, 5, 1)), 1, 4 * 18),
}


@pytest.mark.parametrize("name", PROMISES)
def test_promises(name):
    fn, args, all_reduce, size = PROMISES[name]
    found = assert_communication(fn, *args, all_reduce=all_reduce, all_gather=0, max_bytes=size)
    assert found.total_count == all_reduce


def test_a_derivative_moves_values_by_our_primitives_only():
    jaxpr = jax.make_jaxpr(jax.grad(_mean_loss))(PARAMS, X)
    names = [eqn.primitive.name for eqn in equations(jaxpr)]
    ours = [eqn for eqn in equations(jaxpr) if eqn.primitive.name.startswith("px_")]
    assert {"px_broadcast", "px_reduce_sum"} <= set(names)
    assert {eqn.params["axis"] for eqn in ours} == {"clients"}
    assert not {"psum", "psum_invariant", "all_gather", "reduce_scatter", "custom_vjp_call"} & set(names)


def test_the_gradient_holds_no_copy_of_the_parameters_per_element():
    """64 elements on 8 devices: 8 copies of 1 MB each on a device would not fit below the bound."""
    axis = px.Axis("clients", 64)
    shapes = (jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((64, 2, 512), jnp.float32))

    def mean(w, x):
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum(jnp.tanh(x @ w)), (px.broadcast(w, axis), x), axis), axis)

    analysis = jax.jit(jax.grad(mean)).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 3e6
