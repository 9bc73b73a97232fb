"""Laws 4 and 5: what is sent is what the docstrings promise, and memory does not grow with the axis when bounded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.testing import assert_communication
from tests._support import REDUCTIONS, assert_close, axis_on, values

NOTHING = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, "all_to_all": 0, "collective_permute": 0}
ONE_ALL_REDUCE = NOTHING | {"all_reduce": 1}


def laid_out(axis: px.Axis, *shape: int) -> jax.Array:
    return px.scatter(values(axis.size, *shape), axis)


def model() -> dict[str, Any]:
    return {"hidden": {"w": values(4, 8), "b": values(8)}, "out": {"w": values(8, 2), "b": values(2)}}


def client_loss(p: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ p["hidden"]["w"] + p["hidden"]["b"])
    return jnp.mean((hidden @ p["out"]["w"] + p["out"]["b"]) ** 2)


@pytest.mark.parametrize("size", [8, 32])
def test_a_map_sends_nothing(size: int) -> None:
    axis = axis_on(8, size)
    assert_communication(lambda x: px.map_fn(jnp.sin, x, axis), laid_out(axis, 3), **NOTHING, max_bytes=0)
    shared = jax.device_put(values(3), px.reduce_sum(laid_out(axis, 3), axis).sharding)
    assert_communication(lambda w, x: px.map_fn(lambda w, x: w * x, (px.broadcast(w, axis), x), axis), shared,
                         laid_out(axis, 3), **NOTHING, max_bytes=0)  # fmt: skip


def test_elements_that_are_dealt_change_devices_twice() -> None:
    axis = axis_on(8, 64, layout="cyclic")
    sent = {**NOTHING, "all_to_all": 2}  # operands, and results
    assert_communication(lambda x: px.map_fn(jnp.sin, x, axis), laid_out(axis, 3), **sent)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_is_one_all_reduce(name: str) -> None:
    axis = axis_on(8, 16)
    found = assert_communication(lambda x: REDUCTIONS[name](x, axis), laid_out(axis, 3), **ONE_ALL_REDUCE)
    assert found.total_bytes == 3 * (1 if name in ("any", "all") else 4)


def test_a_tree_is_reduced_in_one_all_reduce() -> None:
    axis = axis_on(8, 16)
    tree = {"a": laid_out(axis, 3), "b": (laid_out(axis), laid_out(axis, 2, 2))}
    found = assert_communication(lambda x: px.reduce_mean(x, axis), tree, **ONE_ALL_REDUCE)
    assert found.total_bytes == (3 + 1 + 4) * 4
    weights = laid_out(axis)
    assert_communication(lambda x, w: px.reduce_weighted_mean(x, w, axis), tree, weights, **ONE_ALL_REDUCE)
    keep = np.arange(16) % 2 == 0
    assert_communication(lambda x: px.reduce_mean(x, axis, where=keep), tree, all_gather=0, all_reduce=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "size", "at_once"), [(8, 8, None), (8, 16, None), (2, 8, 2), (8, 10, None)])
def test_a_mean_of_losses_and_its_gradient_are_one_all_reduce(devices: int, size: int, at_once: int | None) -> None:
    axis = axis_on(devices, size, at_once=at_once)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(p, axis), x), axis), axis)

    x = laid_out(axis, 5, 4)
    found = assert_communication(jax.value_and_grad(loss), model(), x, **ONE_ALL_REDUCE)
    num_numbers = sum(leaf.size for leaf in jax.tree.leaves(model())) + 1
    assert found.total_bytes == 4 * num_numbers


def temporary_bytes(fn: Any, *args: Any) -> int:
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at_once", [None, 4])
@pytest.mark.parametrize("size", [64, 60])
def test_a_map_holds_no_copy_of_the_parameters_per_element(size: int, at_once: int | None) -> None:
    """Of a parameter that outweighs all else: a copy per element on a device would be 32 of them."""
    axis = axis_on(2, size, at_once=at_once)
    w = jnp.ones((256, 256))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.tanh(x @ w).sum(), (px.broadcast(w, axis), x), axis), axis)

    assert temporary_bytes(jax.value_and_grad(loss), w, laid_out(axis, 256)) <= 4 * w.nbytes


def test_at_once_bounds_the_memory() -> None:
    """Sixteen times the elements, as many at once: the same memory, forward and backward."""

    def loss(axis: px.Axis) -> Any:
        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            for _ in range(4):
                x = jnp.tanh(x * w)
            return x.sum()

        return lambda w, x: px.reduce_mean(px.map_fn(body, (px.broadcast(w, axis), x[:, None]), axis), axis)

    def needed(size: int, at_once: int | None) -> int:
        axis = axis_on(2, size, at_once=at_once)
        return temporary_bytes(jax.value_and_grad(loss(axis)), jnp.ones(4096), laid_out(axis))

    assert needed(256, 4) <= 1.3 * needed(16, 4)
    assert needed(256, 4) < needed(256, None) / 4


def test_a_gradient_of_nested_maps_that_leave_devices_idle_is_one_all_reduce() -> None:
    """Ten clients on eight devices, each with a map over its rows: the gradient's one all-reduce, and no residuals."""
    clients, rows = axis_on(8, 10, name="clients"), px.Axis("rows", 4)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def client(x: jax.Array) -> jax.Array:
            return px.reduce_mean(px.map_fn(lambda x: client_loss(p, x[None]), x, rows), rows)

        return px.reduce_mean(px.map_fn(client, x, clients), clients)

    def plain(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(jax.vmap(lambda x: client_loss(p, x[None])))(x))

    x = values(10, 4, 4)
    found = assert_communication(jax.grad(loss), model(), x, **ONE_ALL_REDUCE)
    assert found.total_bytes == 4 * sum(leaf.size for leaf in jax.tree.leaves(model()))
    assert_close(*(jax.jit(jax.grad(f))(model(), x) for f in (loss, plain)))
