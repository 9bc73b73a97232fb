"""A CNN on MNIST, data-parallel: a loss for one device, a step on all of them.

The loss function knows nothing of devices. ``px.train_step(loss)`` gives each device its part of the batch, here of 125
rows, which 8 devices need not divide; what they exchange is the sum of the gradients, and the first table reads out of
the compiled programs how much that is. It also takes the same steps, with Dropout, on one device and on all of them:
the numbers are the same, to rounding. The second table is of a whole run, tested with the parameters as they are and
with their moving average (``ema=``).

The digits are real ones, 5,000 of MNIST, 1,000 of them held out. Typical output of ``--devices 8``::

    20 steps of 125 rows on 8 devices; parameters of 827,688 bytes
           on  last loss  largest difference of a parameter                                     a step communicates
     1 device   0.613898                                  0                                        no communication
    8 devices   0.613898                          2.495e-05  1 all_reduce (827,696 bytes), 1 all_gather (512 bytes)
    epoch  train loss  test loss  test accuracy  of averaged parameters: test loss  test accuracy
        1       0.945     0.3619           0.91                             0.5435           0.89
        2      0.2959     0.2104           0.95                              0.261          0.927
        3      0.1832     0.1541          0.963                             0.1799          0.956
        4      0.1231     0.1572          0.961                             0.1439          0.964
        5     0.09326     0.1326          0.967                             0.1245           0.97

The 512 bytes are the labels: by number, of a batch that the devices do not divide, the compiler looks them up together.
With 1,000 digits, an accuracy of 0.97 has a standard error of 0.005.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import _setting
import _training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist import load_mnist
from flax import nnx

import paraxis as px
from paraxis.testing import Communication, communication

BATCH, LEARNING_RATE = 125, 2e-3

Arrays = dict[str, np.ndarray]


class CNN(nnx.Module):
    """Two convolutions, two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(7 * 7 * 32, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``(batch, 28, 28, 1)`` → ``(batch, 10)``."""
        for convolution in (self.first, self.second):
            x = nnx.max_pool(nnx.relu(convolution(x)), window_shape=(2, 2), strides=(2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(self.dropout(x))


def loss(model: Any, batch: Any) -> Any:
    """Of each row; and whether it is told right."""
    logits = model(batch["images"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses, {"accuracy": jnp.argmax(logits, -1) == batch["labels"]}


def initial() -> px.TrainState:
    return px.TrainState.create(CNN(nnx.Rngs(0)), optax.adam(LEARNING_RATE), ema=0.95)


def load(*, quick: bool) -> tuple[Arrays, Arrays]:
    """4,000 digits to train on and 1,000 to test with, or the first 500 and 200."""
    train, test = load_mnist()
    if quick:
        train, test = train.first(500), test.first(200)
    return train._asdict(), test._asdict()


# --- the same on any devices -----------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Some steps: the loss at each, the parameters after the last, and what a step communicates."""

    losses: list[float]
    params: Any
    communicated: Communication


def some_steps(train: Arrays, num_steps: int, axis: str | px.Axis = "batch") -> Steps:
    """By a loop of one's own."""
    step, data = px.train_step(loss, axis=axis), px.loader(train, BATCH, seed=1, axis=axis)
    state, losses, batches = initial(), [], list(itertools.islice(data.batches(), num_steps))
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return Steps(losses, state.params, communication(step, state, batches[0]))


def compare(train: Arrays, num_steps: int) -> dict[str, Steps]:
    """On one device and on all."""
    found = {"1 device": some_steps(train, num_steps, _training.first_devices(1))}
    if jax.device_count() > 1:
        found[_training.where()] = some_steps(train, num_steps)
    one = found["1 device"]
    size = sum(4 * x.size for x in jax.tree.leaves(one.params))
    print(f"{num_steps} steps of {BATCH} rows on {_training.where()}; parameters of {size:,} bytes")
    rows = [
        (name, f"{run.losses[-1]:.6f}", _training.difference(run.params, one.params), str(run.communicated))
        for name, run in found.items()
    ]
    _setting.table(["on", "last loss", "largest difference of a parameter", "a step communicates"], rows)
    return found


# --- a whole run -----------------------------------------------------------------------------------------------------


def train_and_test(train: Arrays, test: Arrays, num_epochs: int, checkpoint: str | None) -> px.train.Fitted:
    tests = px.loader(test, 200, shuffle=False)
    evaluated = px.eval_step(loss)

    def averaged(state: px.TrainState, batch: Arrays) -> dict[str, px.Mean]:
        return evaluated(state.replace(params=state.ema), batch)

    evaluate = [px.Evaluate(evaluated, tests), px.Evaluate(averaged, tests, name="averaged")]
    data = px.loader(train, BATCH, seed=0)
    fitted = px.fit(initial(), px.train_step(loss), data, epochs=num_epochs, evaluate=evaluate, checkpoint=checkpoint)

    rows = []
    for epoch in fitted.history.epochs:
        tested: dict[str, float] = {}
        for record in fitted.history.evaluations:
            tested |= record.metrics if record.step == epoch.step else {}
        names = ("test/loss", "test/accuracy", "averaged/loss", "averaged/accuracy")
        rows.append((epoch.epoch + 1, epoch.metrics["loss"], *(tested[name] for name in names)))
    header = ["epoch", "train loss", "test loss", "test accuracy", "of averaged parameters: test loss", "test accuracy"]
    _setting.table(header, rows)
    return fitted


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _training.options(__doc__, argv, epochs=(5, "epochs of training"))
    num_epochs = min(2, chosen.epochs) if chosen.quick else chosen.epochs
    train, test = load(quick=chosen.quick)

    steps = compare(train, 3 if chosen.quick else 20)
    fitted = train_and_test(train, test, num_epochs, chosen.checkpoint)
    curves = {"of the parameters": "test/accuracy", "of their average": "averaged/accuracy"}
    shown = {label: dict(zip(*fitted.history.curve(name), strict=True)) for label, name in curves.items()}
    _setting.plot(chosen.plot, shown, "step", "test accuracy")
    return {"data": (train, test), "steps": steps, "fitted": fitted}


if __name__ == "__main__":
    main()
