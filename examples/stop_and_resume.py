"""A training run that is told to stop in the middle, and resumes: the same bits as without.

A checkpoint has the parameters, the optimiser's state, the random key, how many batches were taken, and the averages
shown so far. Which rows a batch has, what Dropout leaves out and the learning rate are functions of these: nothing else
has to be saved, on any number of devices. Here a run gets a SIGTERM, as from a scheduler that wants its machine back,
and resumes, once on the same devices and once on one device.

The digits are 5,000 of MNIST, 1,000 of them held out. Typical output of ``--devices 8``::

    400 steps of 100 digits on 8 devices
    a step communicates: 1 all_reduce (407,084 bytes), 1 all_gather (416 bytes)
    px.fit: SIGTERM: stopped after step 211, saved in /tmp/…/run/211; the same command resumes from there
    stopped after step 211
                    run  held-out loss  accuracy  differ from the run that was not stopped  largest, of a parameter
            not stopped         0.2125     0.944           0 of 12 arrays, 0 of 400 losses                        0
                resumed         0.2125     0.944           0 of 12 arrays, 0 of 400 losses                        0
    resumed on 1 device         0.2125     0.944         8 of 12 arrays, 134 of 400 losses                1.192e-07
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _setting
import _training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _mnist import Labelled, load_mnist

import paraxis as px
from paraxis.testing import communication

BATCH, HIDDEN, DROPPED, LEARNING_RATE, MOMENTUM = 100, 128, 0.2, 0.1, 0.9

Params = dict[str, jax.Array]


class Run(NamedTuple):
    """The state after the last step there was, and the history up to that."""

    state: px.TrainState
    history: px.train.History


# --- a model, and its loss as for one device -------------------------------------------------------------------------


def initial(key: jax.Array) -> Params:
    """Weights scaled for rectifiers (He et al. 2015), biases zero."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (784, HIDDEN)) * (2 / 784) ** 0.5,
        "hidden_bias": jnp.zeros(HIDDEN),
        "dense": jax.random.normal(second, (HIDDEN, 10)) * (2 / HIDDEN) ** 0.5,
        "dense_bias": jnp.zeros(10),
    }


def loss(params: Params, batch: Any, key: jax.Array) -> jax.Array:
    """Of each row, with Dropout."""
    hidden = _hidden(params, batch["images"])
    kept = jax.random.bernoulli(key, 1 - DROPPED, hidden.shape)
    return _scores(params, jnp.where(kept, hidden / (1 - DROPPED), 0), batch["labels"])["loss"]


def metrics(params: Params, batch: Any) -> dict[str, jax.Array]:
    """Of each row, with nothing dropped."""
    return _scores(params, _hidden(params, batch["images"]), batch["labels"])


def _hidden(params: Params, images: jax.Array) -> jax.Array:
    # A smooth activation keeps rounding errors small over many steps; behind the kinks of relu they grow.
    return jax.nn.gelu(images.reshape(len(images), -1) @ params["hidden"] + params["hidden_bias"])


def _scores(params: Params, hidden: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    logits = hidden @ params["dense"] + params["dense_bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return {"loss": losses, "accuracy": jnp.argmax(logits, -1) == labels}


# --- a run, whole or in parts ----------------------------------------------------------------------------------------


class Trainer:
    """What a run consists of, the same each time; ``axis`` says on which devices."""

    def __init__(self, data: tuple[Labelled, Labelled], num_epochs: int, axis: px.Axis) -> None:
        made, drawn = jax.random.split(jax.random.key(0))
        self.num_epochs, self.step = num_epochs, px.train_step(loss, axis=axis)
        self.data = px.loader(data[0]._asdict(), BATCH, axis=axis, seed=0)
        rate = optax.cosine_decay_schedule(LEARNING_RATE, num_epochs * len(self.data))
        self.state = px.TrainState.create(initial(made), optax.sgd(rate, MOMENTUM), key=drawn)
        held_out = px.loader(data[1]._asdict(), 500, axis=axis, shuffle=False)
        self.evaluate = px.Evaluate(px.eval_step(metrics, axis=axis), held_out, name="held-out")

    def run(self, checkpoint: Path | None = None, stop_after: int | None = None) -> Run:
        """Train, from the checkpoint if there is one; after so many steps, this process is sent a SIGTERM."""

        def stop(event: px.train.Event) -> None:
            if event.kind == "step" and event.step == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            fitted = px.fit(
                self.state, self.step, self.data, epochs=self.num_epochs, evaluate=self.evaluate,
                checkpoint=checkpoint, callbacks=[stop], progress=False,
            )  # fmt: skip
        except px.train.TrainingStopped as stopped:
            return Run(stopped.state, stopped.history)
        return Run(fitted.state, fitted.history)


def differing(one: Run, other: Run) -> str:
    """How many arrays of the states, and losses of the histories, are not the same bit by bit."""
    states = zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True)
    arrays = [_bytes(a) != _bytes(b) for a, b in states]
    losses = np.not_equal(*(run.history.curve("loss")[1] for run in (one, other)))
    return f"{sum(arrays)} of {len(arrays)} arrays, {losses.sum()} of {len(losses)} losses"


def _bytes(x: Any) -> bytes:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def draw(path: str | None, whole: Run, stopped: Run, resumed: Run) -> None:
    """The loss and the held-out accuracy of both runs, and where one of them was stopped, as a PNG."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure, cut = Figure(figsize=(10, 4), layout="constrained"), int(stopped.state.step)
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "held-out/accuracy"), strict=True):
        axes.plot(*whole.history.curve(metric), color="black", lw=5, alpha=0.2, label="not stopped")
        steps, values = resumed.history.curve(metric)
        for part, label in ((steps <= cut, "until it was stopped"), (steps > cut, "resumed")):
            axes.plot(steps[part], values[part], ".-", lw=1, ms=4, label=label)
        axes.axvline(cut, color="black", ls="--", lw=1)
        axes.set(xlabel="step", ylabel=metric.replace("/", " "))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    chosen = _setting.options(__doc__, argv, epochs=(10, "epochs of training"))
    data, num_epochs = load_mnist(), min(2, chosen.epochs) if chosen.quick else chosen.epochs
    trainer = Trainer(data, num_epochs, px.Axis("batch", 1))
    batch = next(trainer.data.batches())
    print(f"{num_epochs * len(trainer.data)} steps of {BATCH} digits on {_training.where()}")
    print(f"a step communicates: {communication(trainer.step, trainer.state, batch)}", flush=True)

    found = {"not stopped": trainer.run()}
    with tempfile.TemporaryDirectory() as folder:
        saved, copy = Path(folder, "run"), Path(folder, "copy")
        stopped = trainer.run(saved, stop_after=num_epochs * len(trainer.data) // 2 + 7)
        shutil.copytree(saved, copy)
        found["resumed"] = trainer.run(saved)
        if jax.device_count() > 1:
            found["resumed on 1 device"] = Trainer(data, num_epochs, _training.first_devices(1)).run(copy)

    whole, rows = found["not stopped"], []
    for name, run in found.items():
        last = run.history.evaluations[-1].metrics
        largest = _training.difference(run.state.params, whole.state.params)
        rows.append((name, last["held-out/loss"], last["held-out/accuracy"], differing(run, whole), largest))
    print(f"stopped after step {int(stopped.state.step)}")
    header = ["run", "held-out loss", "accuracy", "differ from the run that was not stopped", "largest, of a parameter"]
    _setting.table(header, rows)
    draw(chosen.plot, whole, stopped, found["resumed"])
    return found | {"stopped": stopped}


if __name__ == "__main__":
    main()
