"""Training under ``px.Parallel``: the step of one device, and errors before anything runs where it would not be."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_communication, communication
from tests._modules import MLP, mesh_of, mlp
from tests._support import assert_close, values

DEVICES = [1, 2, 3, 8]
X, Y = values(24, 3), values(24, 4, seed=1)


def loss(net: MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((net(x) - y) ** 2).mean()


def train(net: MLP, opt: px.Optimizer, x: jax.Array, y: jax.Array, lr: float) -> jax.Array:
    gradients, value = px.GradValues(loss, net)(x, y)
    opt(lr, px.pmean(gradients, "device"))
    return px.pmean(value, "device")


GRAPH, PARAMS = nnx.split(mlp())


def plain_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return loss(nnx.merge(GRAPH, params), x, y)


def trained_by_hand(rule: optax.GradientTransformation, steps: int) -> tuple[Any, list[float]]:
    params, state, losses = PARAMS, rule.init(PARAMS), []

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(plain_loss)(params, X, Y)
        updates, state = rule.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", DEVICES)
def test_parallel_takes_the_training_step_of_one_device(devices: int) -> None:
    expected, losses = trained_by_hand(optax.sgd(0.1, momentum=0.9), 5)
    net = mlp()
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    step = px.Parallel(train, net, opt, reduce="first", mesh=mesh_of(devices))
    np.testing.assert_allclose([step(X, Y, 0.1) for _ in range(5)], losses, rtol=1e-6, atol=1e-6)
    assert_close(nnx.state(net), expected, rtol=0, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_parallel_takes_the_training_step_in_the_words_of_nnx_and_lax(devices: int) -> None:
    def step(net: MLP, opt: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(net, x, y)
        opt.update(net, jax.lax.pmean(gradients, "device"))
        return jax.lax.pmean(value, "device")

    expected, losses = trained_by_hand(optax.adam(0.01), 5)
    net = mlp()
    opt = nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param)
    fast = px.Parallel(step, net, opt, reduce="same", mesh=mesh_of(devices))
    assert_close(np.array([fast(X, Y) for _ in range(5)]), np.array(losses, "float32"), rtol=1e-6, atol=1e-6)
    assert_close(nnx.state(net), expected, rtol=0, atol=1e-6)
    assert int(opt.step[...]) == 5


def test_parallel_refuses_a_forgotten_mean_before_anything_runs() -> None:
    ran: list[int] = []

    def step(net: MLP, opt: px.Optimizer, x: jax.Array, y: jax.Array, lr: float) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        gradients, value = px.GradValues(loss, net)(x, y)
        opt(lr, gradients)
        return px.pmean(value, "device")

    net = mlp()
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    before = [v[...] for v in px.variables((net, opt))]
    culprit = r"variable \(MLP\)\.first\(Linear\)\.bias could be left with different values.*px\.pmean\(g, 'device'\)"
    for _ in range(2):
        with pytest.raises(px.StateError, match=culprit):
            px.Parallel(step, net, opt, reduce="first")(X, Y, 0.1)
    jax.effects_barrier()
    assert ran == []
    assert all(v[...] is old for v, old in zip(px.variables((net, opt)), before, strict=True))
    px.Parallel(step, net, opt, reduce="first", check=False)(X, Y, 0.1)
    jax.effects_barrier()
    assert ran != []


REDUCED: list[tuple[str, Callable[..., Any]]] = [
    ("mean", loss),
    ("first", lambda net, x, y: px.pmean(loss(net, x, y), "device")),
    ("same", lambda net, x, y: px.pmean(loss(net, x, y), "device")),
    ("mean", lambda net, x, y: px.pmean(loss(net, x, y), "device")),
]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_parallel_does_not_scale_gradients_taken_outside(devices: int) -> None:
    mesh = mesh_of(devices)
    value, (slopes, of_x) = jax.value_and_grad(plain_loss, argnums=(0, 1))(PARAMS, X, Y)
    of_params = [np.asarray(slope) for slope in jax.tree.leaves(slopes)]
    for reduce, body in REDUCED:
        net = mlp()
        fast = px.Parallel(body, net, reduce=reduce, mesh=mesh)
        gradients, got = px.GradValues(lambda fast, x, y: fast(x, y), fast)(X, Y)
        assert_close(np.asarray(got), np.asarray(value), rtol=1e-6)
        assert_close([np.asarray(slope) for slope in gradients], of_params, rtol=0, atol=1e-6)
        assert_close(np.asarray(jax.grad(fast)(X, Y)), np.asarray(of_x), rtol=0, atol=1e-6)
    rows = px.Parallel(mlp(), mesh=mesh)
    assert_close(np.asarray(jax.grad(lambda x: ((rows(x) - Y) ** 2).mean())(X)), np.asarray(of_x), rtol=0, atol=1e-6)
    gradients, _ = px.GradValues(lambda rows, x: ((rows(x) - Y) ** 2).mean(), rows)(X)
    assert_close(np.asarray(gradients[0]), of_params[0], rtol=0, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parallel_communicates_what_a_step_by_hand_does(devices: int) -> None:
    rule, mesh = optax.sgd(0.1, momentum=0.9), mesh_of(devices)

    def by_hand(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(plain_loss)(params, x, y)
        updates, state = rule.update(jax.lax.pmean(gradients, "device"), state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "device")

    specs = (P(), P(), P("device"), P("device"))
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    expected = communication(jax.jit(mapped), PARAMS, rule.init(PARAMS), X, Y)
    net = mlp()
    step = px.Parallel(train, net, px.Optimizer(net, optax.sgd, momentum=0.9), reduce="first", mesh=mesh)
    for _ in range(2):
        found = assert_communication(step, X, Y, 0.1, all_reduce=expected.count["all_reduce"], all_gather=0)
        assert found.total_count == expected.total_count
        assert found.total_bytes == expected.total_bytes
        step(X, Y, 0.1)
    assert_communication(px.Parallel(net, mesh=mesh), X, max_bytes=0)
