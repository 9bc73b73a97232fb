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


def test_drjax_document_takes_a_step_of_linear_regression():
    model, data = jnp.array([2.0, -1.0]), jnp.array([[1.0, 2.0], [3.0, -4.0], [-7.0, 6.0]])
    np.testing.assert_allclose(compute_loss(jnp.array([2.0, 3.0]), jnp.array([5.0, 6.0])), 364.5, rtol=1e-6)
    np.testing.assert_allclose(partitioned_eval(model, data), 87.16667, rtol=1e-6)
    np.testing.assert_allclose(grad_fn(model, data), [57.666668, -54.666668], rtol=1e-6)
    np.testing.assert_allclose(partitioned_eval(distributed_sgd_step(model, data), data), 35.551258, rtol=1e-6)
