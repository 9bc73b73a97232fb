"""DrJAX's introductory notebook, with only the import changed. The expected numbers are the ones printed there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as drjax

pytestmark = pytest.mark.floor


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


def test_drjax_document_shows_the_verbs():
    @drjax.program(placements={"data_groups": 3})
    def partitioned_add(x):
        return drjax.map_fn(lambda x: x + jnp.array([1.0, 2.0]), x)

    @drjax.program(placements={"data_groups": 3})
    def broadcast(x):
        return drjax.broadcast(x)

    result = partitioned_add(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    np.testing.assert_array_equal(result, [[2.0, 4.0], [4.0, 6.0], [6.0, 8.0]])
    np.testing.assert_array_equal(broadcast(jnp.array([-1.0, 1.0])), [[-1.0, 1.0]] * 3)


def test_drjax_document_differentiates_a_sum_of_a_broadcast():
    @drjax.program(placements={"data_groups": 3})
    def broadcast_and_sum(x):
        return drjax.reduce_sum(drjax.broadcast(x))

    assert str(broadcast_and_sum(2.0)) == "6.0"
    assert str(jax.grad(broadcast_and_sum, argnums=0)(2.0)) == "3.0"


def test_drjax_document_takes_a_step_of_linear_regression():
    model, data = jnp.array([2.0, -1.0]), jnp.array([[1.0, 2.0], [3.0, -4.0], [-7.0, 6.0]])
    np.testing.assert_allclose(compute_loss(jnp.array([2.0, 3.0]), jnp.array([5.0, 6.0])), 364.5, rtol=1e-6)
    np.testing.assert_allclose(partitioned_eval(model, data), 87.16667, rtol=1e-6)
    np.testing.assert_allclose(grad_fn(model, data), [57.666668, -54.666668], rtol=1e-6)
    np.testing.assert_allclose(partitioned_eval(distributed_sgd_step(model, data), data), 35.551258, rtol=1e-6)
