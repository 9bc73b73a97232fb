"""DrJAX's introductory notebook, with only the import changed. The expected numbers are the ones printed there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as drjax

pytestmark = pytest.mark.newest

PARTITIONED = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
NONPARTITIONED = np.array([-1.0, 1.0], np.float32)


def compute_loss(x, y):
    return 0.5 * jnp.square(jnp.dot(x, y) - 1.0)


@drjax.program(placements={"data_groups": 3})
def partitioned_eval(model, partitioned_data):
    broadcast_vector = drjax.broadcast(model)
    partitioned_losses = drjax.map_fn(compute_loss, (broadcast_vector, partitioned_data))
    return drjax.reduce_mean(partitioned_losses)


grad_fn = jax.grad(partitioned_eval, argnums=0)


@drjax.program(placements={"data_groups": 3})
def distributed_sgd_step(model, partitioned_data):
    grad = grad_fn(model, partitioned_data)
    return model - 0.01 * grad


def model_and_data():
    return jnp.array([2.0, -1.0]), jnp.array([[1.0, 2.0], [3.0, -4.0], [-7.0, 6.0]])


def test_map_over_groups():
    def add_constant(x):
        return x + jnp.array([1.0, 2.0])

    @drjax.program(placements={"data_groups": 3})
    def partitioned_add_one(x):
        return drjax.map_fn(add_constant, x)

    result = partitioned_add_one(jnp.array(PARTITIONED))
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, [[2.0, 4.0], [4.0, 6.0], [6.0, 8.0]])


def test_broadcast():
    @drjax.program(placements={"data_groups": 3})
    def broadcast(x):
        return drjax.broadcast(x)

    np.testing.assert_array_equal(broadcast(jnp.array(NONPARTITIONED)), [[-1.0, 1.0]] * 3)


def test_broadcast_and_sum_and_its_derivative():
    @drjax.program(placements={"data_groups": 3})
    def broadcast_and_sum(x):
        broadcast_x = drjax.broadcast(x)
        return drjax.reduce_sum(broadcast_x)

    assert str(broadcast_and_sum(2.0)) == "6.0"
    assert str(jax.grad(broadcast_and_sum, argnums=0)(2.0)) == "3.0"


def test_linear_regression_and_its_derivative():
    np.testing.assert_allclose(compute_loss(jnp.array([2.0, 3.0]), jnp.array([5.0, 6.0])), 364.5, rtol=1e-6)
    np.testing.assert_allclose(partitioned_eval(*model_and_data()), 87.16667, rtol=1e-6)
    np.testing.assert_allclose(grad_fn(*model_and_data()), [57.666668, -54.666668], rtol=1e-6)


def test_distributed_sgd_step():
    model, partitioned_data = model_and_data()
    updated_model = distributed_sgd_step(model, partitioned_data)
    np.testing.assert_allclose(partitioned_eval(updated_model, partitioned_data), 35.551258, rtol=1e-6)
