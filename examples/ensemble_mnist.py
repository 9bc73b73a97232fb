"""An ensemble of CNNs on MNIST, after Flax's page "Ensembling on multiple devices": any size, any number of devices.

There the ensemble has as many members as there are devices, and three functions become parallel ones. Here the three
functions of a single model stay as they are: ``px.ensemble(create_train_state, size, key)`` makes the members,
``ens.train(train_step, images, labels)`` is a step of each, ``ens.predict(images)`` averages their probabilities on
the devices. ``train_step`` is the page's ``apply_model`` and ``update_model`` in turn. A member's training accuracy is
its own: to average probabilities in every training step, too, is a collective in every step; ``px.pmean(probs,
"members")`` inside the step would do it. A second part does the same with an NNX module, and a third makes ensembles of
1, 2, 5 and 7 members on 2 and on 8 devices: they have the same members.

The digits are real ones, 5,000 of MNIST, 1,000 of them held out; the page's numbers come from 60,000. Typical output
of ``--devices 8`` (three minutes on two cores, one of them for compiling)::

    Ensemble(7 members of 1,648,917 numbers, on 8 devices)
    epoch  train loss  train accuracy  test loss  test accuracy  test accuracy of a member
        1      0.6083          0.8114     0.2245          0.936                     0.9241
        2      0.1856          0.9437     0.1732          0.947                      0.933
        3      0.1009          0.9681     0.1247          0.972                     0.9609
    NNX: Ensemble(3 members of 1,648,917 numbers, on 8 devices)
    epoch  train loss  train accuracy  test loss  test accuracy  test accuracy of a member
        1      0.6136          0.8033     0.1858           0.95                      0.936
    members  devices  largest difference to the members of 7 on 2 devices  of the averaged probabilities
          1        2                                                    0                              0
          1        8                                                    0                              0
          2        2                                                    0                              0
          2        8                                                    0                              0
          5        2                                                    0                              0
          5        8                                                    0                      1.192e-07
          7        2                                                    0                              0
          7        8                                                    0                      1.192e-07

With 1,000 digits, an accuracy of 0.97 has a standard error of 0.005. How an ensemble's scores depend on its size, and
how surely: ``ensemble_uncertainty.py``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist import Labelled, load_mnist
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import paraxis as px

LEARNING_RATE, MOMENTUM, BATCH = 0.1, 0.9, 32
SIZES, DEVICES = (1, 2, 5, 7), (2, 8)


class CNN(nn.Module):
    """The page's network."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``(batch, 28, 28, 1)`` → ``(batch, 10)``."""
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


# --- a single model --------------------------------------------------------------------------------------------------


def create_train_state(key: jax.Array) -> TrainState:
    cnn = CNN()
    params = cnn.init(key, jnp.ones((1, 28, 28, 1)))["params"]
    return TrainState.create(apply_fn=cnn.apply, params=params, tx=optax.sgd(LEARNING_RATE, MOMENTUM))


def apply_model(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Gradients, loss and accuracy on a batch."""

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)


def update_model(state: TrainState, grads: Any) -> TrainState:
    return state.apply_gradients(grads=grads)


def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, Any]:
    grads, loss, accuracy = apply_model(state, images, labels)
    return update_model(state, grads), (loss, accuracy)


# --- the ensemble ----------------------------------------------------------------------------------------------------


def batches(train: Labelled, key: jax.Array, num_steps: int | None = None) -> list[Labelled]:
    """The digits in random order, cut into batches; all there are, or the first so many."""
    perms = np.asarray(jax.random.permutation(key, len(train.labels)))
    perms = perms[: len(perms) // BATCH * BATCH].reshape(-1, BATCH)[:num_steps]
    return [Labelled(train.images[perm], train.labels[perm]) for perm in perms]


def train_epoch(
    ens: px.Ensemble, train: Labelled, key: jax.Array, step: Any, num_steps: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Each member's mean loss and accuracy, ``(size,)``. ``ens.fit`` is this loop, and more."""
    found = [jax.device_get(ens.train(step, *batch)) for batch in batches(train, key, num_steps)]
    loss, accuracy = (np.mean(values, 0) for values in zip(*found, strict=True))
    return loss, accuracy


def tested(ens: px.Ensemble, test: Labelled) -> tuple[float, float, np.ndarray]:
    """Loss and accuracy of the averaged probabilities, and the accuracy of each member ``(size,)``."""
    probs = np.asarray(ens.predict(test.images))
    loss = -np.log(probs[np.arange(len(probs)), test.labels]).mean()
    own = np.asarray(ens.members(test.images)).argmax(-1) == test.labels
    return float(loss), float((probs.argmax(-1) == test.labels).mean()), own.mean(1)


def train(ens: px.Ensemble, data: tuple[Labelled, Labelled], num_epochs: int, step: Any, num_steps: int | None) -> Any:
    """The page's loop. One row per epoch."""
    key, rows = jax.random.key(1), []
    for epoch in range(num_epochs):
        loss, accuracy = train_epoch(ens, data[0], jax.random.fold_in(key, epoch), step, num_steps)
        test_loss, test_accuracy, own = tested(ens, data[1])
        rows.append(
            (epoch + 1, float(loss.mean()), float(accuracy.mean()), test_loss, test_accuracy, float(own.mean()))
        )
    header = ["epoch", "train loss", "train accuracy", "test loss", "test accuracy", "test accuracy of a member"]
    _setting.table(header, rows)
    return rows


# --- the same with an NNX module -------------------------------------------------------------------------------------


def create_net(key: jax.Array) -> tuple[nnx.Module, nnx.Optimizer]:
    rngs, pool = nnx.Rngs(key), functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
    net = nnx.Sequential(
        *(nnx.Conv(1, 32, (3, 3), rngs=rngs), nnx.relu, pool, nnx.Conv(32, 64, (3, 3), rngs=rngs), nnx.relu, pool),
        lambda x: x.reshape(len(x), -1),
        *(nnx.Linear(7 * 7 * 64, 256, rngs=rngs), nnx.relu, nnx.Linear(256, 10, rngs=rngs)),
    )
    return net, nnx.Optimizer(net, optax.sgd(LEARNING_RATE, MOMENTUM), wrt=nnx.Param)


def net_step(net: Any, opt: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The members are changed in place, so that only loss and accuracy are returned."""

    def loss_fn(net: Any) -> tuple[jax.Array, jax.Array]:
        logits = net(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(net)
    opt.update(net, grads)
    return loss, jnp.mean(jnp.argmax(logits, -1) == labels)


# --- the same members whatever the devices ---------------------------------------------------------------------------


def on_devices(size: int, num_devices: int, data: tuple[Labelled, Labelled], num_steps: int) -> tuple[Any, np.ndarray]:
    """The members' parameters ``(size, ...)`` after some steps on the first devices, and what they predict together."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("members",))
    ens = px.ensemble(create_train_state, size, 0, mesh=mesh)
    train_epoch(ens, data[0], jax.random.key(2), train_step, num_steps)
    params = jax.tree.map(np.asarray, ens.stacked().params)
    return params, np.asarray(ens.predict(data[1].images[:200]))


def compare(
    data: tuple[Labelled, Labelled], num_steps: int, sizes: Sequence[int] = SIZES
) -> dict[tuple[int, int], Any]:
    """Ensembles of each size on each number of devices there are, after some steps."""
    counts = [count for count in DEVICES if count <= jax.device_count()] or [1]
    found = {(size, count): on_devices(size, count, data, num_steps) for size in sizes for count in counts}
    largest, rows = found[max(sizes), counts[0]][0], []
    for (size, count), (params, probs) in found.items():
        # Member 0 of one is member 0 of seven; the probabilities are of as many members only.
        same = jax.tree.map(lambda x, size=size: x[:size], largest), found[size, counts[0]][1]
        rows.append((size, count, _difference(params, same[0]), _difference(probs, same[1])))
    title = f"to the members of {max(sizes)} on {counts[0]} devices"
    _setting.table(["members", "devices", f"largest difference {title}", "of the averaged probabilities"], rows)
    return found


def _difference(a: Any, b: Any) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _setting.options(__doc__, argv, members=(7, "members"), epochs=(3, "epochs of training"))
    data, num_steps = load_mnist(), None
    if chosen.quick:
        data, num_steps = (data[0], data[1].first(200)), 10
    num_epochs = 1 if chosen.quick else chosen.epochs

    ens = px.ensemble(create_train_state, chosen.members, 0)
    print(ens)
    linen = train(ens, data, num_epochs, train_step, num_steps)

    nets = px.ensemble(create_net, 3, 0)
    print(f"NNX: {nets}")
    modules = train(nets, data, 1, net_step, num_steps)

    members = compare(data, 3, (2, 7)) if chosen.quick else compare(data, 10)
    curves = {"of the ensemble": {row[0]: row[4] for row in linen}, "of a member": {row[0]: row[5] for row in linen}}
    _setting.plot(chosen.plot, curves, "epoch", "test accuracy")
    return {"linen": linen, "nnx": modules, "members": members}


if __name__ == "__main__":
    main()
