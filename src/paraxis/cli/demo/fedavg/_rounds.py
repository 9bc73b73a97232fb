"""The programs for the devices: one round of federated averaging, and the test on held-out digits."""

import jax
import jax.numpy as jnp

from paraxis._axes.axis import Axis
from paraxis._core.reductions import reduce_mean
from paraxis._core.verbs import broadcast, map_fn
from paraxis.cli.demo.fedavg._model import Params, logits, mean_loss
from paraxis.mapreduce import Program, program

LEARNING_RATE = 0.15


def make_round(clients: Axis) -> Program:
    """Return a round of as many clients as the axis has elements.

    The program takes the shared model and, per client, images ``(clients, digits, 28, 28, 1)``, labels
    ``(clients, digits)`` and the digits of each step ``(clients, steps, batch)``. It returns the next model and the
    clients' mean training loss.

    Clients have equally many digits, so the plain mean is the one weighted by digits.

    Communicates: one all-reduce the size of the model, the loss included.
    """

    @program(clients=clients)
    def federated_round(
        params: Params, images: jax.Array, labels: jax.Array, order: jax.Array
    ) -> tuple[Params, jax.Array]:
        changes, losses = map_fn(local_change, (broadcast(params), images, labels, order))
        change, loss = reduce_mean((changes, losses))
        return jax.tree.map(jnp.add, params, change), loss

    return federated_round


def local_change(params: Params, images: jax.Array, labels: jax.Array, order: jax.Array) -> tuple[Params, jax.Array]:
    """Train on one client's digits by gradient descent; how the model changed, and its mean loss on the way."""
    trained, losses = params, []
    for batch in order:  # written out: XLA's convolutions on CPUs are several times slower inside a loop
        loss, gradient = jax.value_and_grad(mean_loss)(trained, images[batch], labels[batch])
        trained = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, trained, gradient)
        losses.append(loss)
    return jax.tree.map(jnp.subtract, trained, params), jnp.mean(jnp.stack(losses))


def make_test(digits: Axis) -> Program:
    """Return the share of digits that a model gets right. Communicates: one all-reduce of one number."""

    @program(digits=digits)
    def accuracy(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        # All digits meet the same weights, so vectorised they are a plain batch.
        right = map_fn(_is_right, (broadcast(params), images, labels), lowering="vmap")
        return reduce_mean(right)

    return accuracy


def _is_right(params: Params, image: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.argmax(logits(params, image[None])[0]) == label
