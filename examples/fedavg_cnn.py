"""Federated averaging of a CNN over 100 clients, 16 of them in a round (McMahan et al. 2017, arXiv 1602.05629).

Each client holds 40 digits of MNIST, most of two labels only: none could learn all ten alone. In a round, 16 clients
start from the shared model, take four steps on their own digits, and send back how their model changed; the mean of the
changes is the next model. Which clients take part is drawn on the host, so that only their digits are sent. On one
device, the same rounds end with the same model, to rounding.

1,000 other digits are held out. Typical output of ``--devices 8``::

    <program federated_round: clients=16 on 8 devices (2 each)>, drawn from 100
    round  20  loss 0.254  held-out accuracy 0.864
    round  40  loss 0.149  held-out accuracy 0.912
    round  60  loss 0.219  held-out accuracy 0.925
    round  80  loss 0.083  held-out accuracy 0.930
    round 100  loss 0.056  held-out accuracy 0.936
    round 120  loss 0.064  held-out accuracy 0.943
    <program federated_round: clients=16 on 1 device (16 each)>, drawn from 100
    round  20  loss 0.254  held-out accuracy 0.864
    round  40  loss 0.149  held-out accuracy 0.912
    round  60  loss 0.219  held-out accuracy 0.925
    round  80  loss 0.083  held-out accuracy 0.930
    round 100  loss 0.056  held-out accuracy 0.936
    round 120  loss 0.064  held-out accuracy 0.943
           on  accuracy  ms per round (median)         a round communicates  largest difference of a parameter
    8 devices     0.943                  219.4  1 all_reduce (45,100 bytes)                           2.98e-07
     1 device     0.943                  138.9             no communication                                  0

Simulated devices share one CPU: that eight take longer than one tells nothing of real ones.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import _setting
import jax
import jax.numpy as jnp
import numpy as np
from _mnist import Labelled, load_mnist
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paraxis as px
from paraxis.testing import Communication, communication

CLIENTS, PER_ROUND, STEPS, BATCH, LEARNING_RATE = 100, 16, 4, 10, 0.15
SHAPES = {"conv1": (5, 5, 1, 8), "conv2": (5, 5, 8, 16), "dense": (7 * 7 * 16, 10)}

Params = dict[str, jax.Array]


class Run(NamedTuple):
    """Held-out accuracy and seconds by round, the model after the last, and what a round communicates."""

    accuracy: dict[int, float]
    seconds: list[float]
    model: Params
    communicated: Communication


# --- a model, and one client -----------------------------------------------------------------------------------------


def initial(key: jax.Array) -> Params:
    """Weights scaled for rectifiers (He et al. 2015), biases zero."""
    params: Params = {}
    for (name, shape), own in zip(SHAPES.items(), jax.random.split(key, len(SHAPES)), strict=True):
        params[name] = jax.random.normal(own, shape) * math.sqrt(2 / math.prod(shape[:-1]))
        params[f"{name}_bias"] = jnp.zeros(shape[-1])
    return params


def logits(params: Params, images: jax.Array) -> jax.Array:
    """``(batch, 28, 28, 1)`` → ``(batch, 10)``."""
    x, form = images, ("NHWC", "HWIO", "NHWC")
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, params[name], (2, 2), "SAME", dimension_numbers=form)
        # A smooth activation keeps rounding errors small over many rounds; behind the kinks of relu they grow.
        x = jax.nn.gelu(x + params[f"{name}_bias"])
    return x.reshape(len(x), -1) @ params["dense"] + params["dense_bias"]


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    found = jnp.take_along_axis(jax.nn.log_softmax(logits(params, images)), labels[:, None], axis=1)
    return -jnp.mean(found)


@jax.jit
def accuracy(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(jnp.argmax(logits(params, images), -1) == labels)


def local_change(params: Params, images: jax.Array, labels: jax.Array, order: jax.Array) -> tuple[Params, jax.Array]:
    """One client: gradient descent on its own digits; how the model changed, and the mean loss on the way."""
    trained, losses = params, []
    for batch in order:  # written out: XLA's convolutions on CPUs are several times slower inside a loop
        loss, gradient = jax.value_and_grad(mean_loss)(trained, images[batch], labels[batch])
        trained = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, trained, gradient)
        losses.append(loss)
    return jax.tree.map(jnp.subtract, trained, params), jnp.mean(jnp.stack(losses))


# --- the federation --------------------------------------------------------------------------------------------------


def make_round(clients: px.Axis) -> Any:
    """A round as a program of the model and, by client, images, labels, and which digits each step takes."""

    @px.program(clients=clients)
    def federated_round(params: Params, images: Any, labels: Any, order: Any) -> tuple[Params, jax.Array]:
        changes, losses = px.map_fn(local_change, (px.broadcast(params), images, labels, order))
        change, loss = px.reduce_mean((changes, losses))  # clients have equally many digits
        return jax.tree.map(jnp.add, params, change), loss

    return federated_round


def split_by_label(digits: Labelled, num_clients: int) -> Labelled:
    """Two runs of the digits sorted by label for each client: ``(clients, digits, ...)``. A remainder is left out."""
    rng, num_runs = np.random.default_rng(0), 2 * num_clients
    kept = rng.permutation(len(digits.labels))[: len(digits.labels) // num_runs * num_runs]
    by_label = kept[np.argsort(digits.labels[kept], kind="stable")].reshape(num_runs, -1)
    chosen = by_label[rng.permutation(num_runs)].reshape(num_clients, -1)
    return Labelled(digits.images[chosen], digits.labels[chosen])


def sample(federation: Labelled, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The clients of a round: images, labels, and which digits each step takes ``(clients, steps, batch)``."""
    rng = np.random.default_rng((1, number))
    num_clients, num_digits = federation.labels.shape
    chosen = rng.choice(num_clients, PER_ROUND, replace=False)
    order = rng.permuted(np.tile(np.arange(num_digits, dtype=np.int32), (PER_ROUND, 1)), axis=1)
    order = order[:, : STEPS * BATCH].reshape(PER_ROUND, STEPS, BATCH)
    return federation.images[chosen], federation.labels[chosen], order


def train(num_devices: int, num_rounds: int, data: tuple[Labelled, Labelled]) -> Run:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("clients",))
    clients, federation = px.Axis("clients", PER_ROUND, mesh=mesh), split_by_label(data[0], CLIENTS)
    print(f"{make_round(clients)}, drawn from {CLIENTS}", flush=True)
    federated_round, told_right, seconds = jax.jit(make_round(clients)), {}, []
    # Laid out as later models are, so that a round is compiled once.
    model = jax.device_put(initial(jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    for number in range(1, num_rounds + 1):
        begin = time.perf_counter()
        model, loss = jax.block_until_ready(federated_round(model, *px.scatter(sample(federation, number), clients)))
        seconds.append(time.perf_counter() - begin)
        told_right[number] = float(accuracy(model, *data[1]))
        if number % max(1, num_rounds // 6) == 0:
            print(f"round {number:3}  loss {float(loss):.3f}  held-out accuracy {told_right[number]:.3f}", flush=True)
    sent = communication(federated_round, model, *px.scatter(sample(federation, 1), clients))
    return Run(told_right, seconds, jax.tree.map(np.asarray, model), sent)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    chosen = _setting.options(__doc__, argv)
    num_rounds, data = 3 if chosen.quick else 120, load_mnist()
    numbers = sorted({jax.device_count(), 1}, reverse=True)
    found = {f"{n} device{'s' if n > 1 else ''}": train(n, num_rounds, data) for n in numbers}
    one, rows = found["1 device"].model, []
    for name, run in found.items():
        largest = max(float(np.abs(run.model[key] - one[key]).max()) for key in one)
        rows.append(
            (name, run.accuracy[num_rounds], 1000 * float(np.median(run.seconds)), str(run.communicated), largest)
        )
    header = ["on", "accuracy", "ms per round (median)", "a round communicates", "largest difference of a parameter"]
    _setting.table(header, rows)
    _setting.plot(chosen.plot, {name: run.accuracy for name, run in found.items()}, "round", "held-out accuracy")
    return found


if __name__ == "__main__":
    main()
