"""A training pipeline on a table, after Nasy's talk "JAX -- Now and Future": model, state, steps, data, loop, saving.

There, the pipeline stands beside PyTorch's, to be read; as printed it does not run. Here it does, with the same model
(Dense, BatchNorm, Dropout, in Linen; ``--nnx``: in NNX) and AdamW, on a real table: 569 cells from breast tumours, 30
measures of each, malignant or benign. Each part is one line, and each may be another one:

    state = px.TrainState.create(model, optax.adamw(1e-3), key=key, sample=…)    parameters, statistics, key, optimiser
    step = px.train_step(loss)                                                   all devices; or a jitted function
    data = px.loader(arrays, 32, seed=0)                                         or any batches of arrays
    test = px.Evaluate(px.eval_step(metrics), held_out)
    fitted = px.fit(state, step, data, epochs=30, evaluate=test, checkpoint=…)    or a for loop

The last table takes some steps with one part after the other replaced by plain Flax, optax and NumPy: the state that
comes out is the same. On one device it is the same bit by bit.

Typical output of ``--devices 8``, without the picture of the model at its top::

    399 rows, 170 held out; 30 epochs on 8 devices
    epoch  held-out loss  held-out accuracy
        5        0.06444             0.9824
       10         0.1054             0.9471
       15         0.0676             0.9765
       20        0.09661             0.9588
       25        0.07289             0.9588
       30        0.04821             0.9882
                                 model  held-out loss  held-out accuracy
                           the network        0.04821             0.9882
    scikit-learn's logistic regression        0.06749             0.9824
                replaced, on 1 device  largest difference of a held-out probability
                              nothing                                             0
                px.fit, by a for loop                                             0
                  px.loader, by NumPy                                             0
    state and step, by Flax and optax                                             0
                           everything                                             0
                nothing, on 8 devices                                     6.878e-05

With 170 cells, an accuracy of 0.97 has a standard error of 0.013: the network is no better than the linear model.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import _setting
import _training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training import train_state
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import paraxis as px

HELD_OUT, BATCH, LEARNING_RATE = 170, 32, 1e-3

Arrays = dict[str, np.ndarray]


# --- data ------------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Rows ``x (n, 30)`` and ``y (n,)``, float32: to train on, and held out."""

    train: Arrays
    held_out: Arrays


def load() -> Table:
    """The cells, always in the same order; each measure with mean 0 and deviation 1 over the training rows."""
    x, y = map(np.asarray, load_breast_cancer(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    parts = ({"x": x[rows].astype(np.float32), "y": y[rows].astype(np.float32)} for rows in (train, test))
    return Table(*parts)


# --- model -----------------------------------------------------------------------------------------------------------


class JM(linen.Module):
    """The talk's model."""

    h1 = 300
    h2 = 200
    h3 = 100

    @linen.compact
    def __call__(self, x: jax.Array, training: bool = True) -> jax.Array:
        """``(batch, features)`` → ``(batch, 1)``."""
        x = linen.Dense(self.h1)(x)
        x = linen.BatchNorm()(x, use_running_average=not training)
        x = linen.Dropout(0.2)(x, deterministic=not training)
        x = jax.nn.relu(x)
        x = linen.Dense(self.h2)(x)
        x = jax.nn.relu(x)
        x = linen.Dense(self.h3)(x)
        x = jax.nn.relu(x)
        return linen.Dense(1)(x)


def nnx_model(num_features: int) -> nnx.Module:
    """The same in NNX: whether it trains is a state of the module."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(num_features, 300, rngs=rngs),
        nnx.BatchNorm(300, rngs=rngs),
        nnx.Dropout(0.2, rngs=rngs),
        nnx.relu,
        *(nnx.Linear(300, 200, rngs=rngs), nnx.relu),
        *(nnx.Linear(200, 100, rngs=rngs), nnx.relu),
        nnx.Linear(100, 1, rngs=rngs),
    )


# --- state and steps -------------------------------------------------------------------------------------------------


def scores(logits: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of each row: they are averaged over the rows that there are, on whatever devices."""
    logits = logits[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, y), {"accuracy": (logits > 0) == (y > 0.5)}


def linen_loss(model: Any, batch: Any) -> Any:
    return scores(model(batch["x"], training=True), batch["y"])


def linen_metrics(model: Any, batch: Any) -> Any:
    return scores(model(batch["x"], training=False), batch["y"])


def nnx_scores(model: Any, batch: Any) -> Any:
    return scores(model(batch["x"]), batch["y"])


def linen_state(num_features: int) -> px.TrainState:
    sample = {"x": jnp.ones((1, num_features)), "training": False}
    return px.TrainState.create(JM(), optax.adamw(LEARNING_RATE), key=jax.random.key(42), sample=sample)


def nnx_state(num_features: int) -> px.TrainState:
    return px.TrainState.create(nnx_model(num_features), optax.adamw(LEARNING_RATE))


# --- the pipeline ----------------------------------------------------------------------------------------------------


def train(table: Table, num_epochs: int, *, is_nnx: bool = False, checkpoint: str | None = None) -> px.train.Fitted:
    """The whole of it."""
    num_features = table.train["x"].shape[1]
    state = (nnx_state if is_nnx else linen_state)(num_features)
    step = px.train_step(nnx_scores if is_nnx else linen_loss)
    metrics = px.eval_step(nnx_scores if is_nnx else linen_metrics)
    data = px.loader(table.train, BATCH, seed=0)
    held_out = px.loader(table.held_out, HELD_OUT, shuffle=False)
    evaluate = px.Evaluate(metrics, held_out, name="held-out")
    return px.fit(state, step, data, epochs=num_epochs, evaluate=evaluate, checkpoint=checkpoint)


# --- the same without any of it --------------------------------------------------------------------------------------


class HandState(train_state.TrainState):
    """Flax's, with what the talk adds to it."""

    batch_stats: Any
    key: jax.Array


def hand_state(num_features: int) -> HandState:
    model, key = JM(), jax.random.key(42)
    variables = model.init(key, jnp.ones((1, num_features)), training=False)
    return HandState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adamw(LEARNING_RATE),
        batch_stats=variables["batch_stats"],
        key=key,
    )


@jax.jit
def hand_step(state: HandState, batch: Any) -> tuple[HandState, dict[str, jax.Array]]:
    """The talk's ``train_step``: with gradients of the parameters that it is given, and the new statistics kept."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {"dropout": jax.random.fold_in(state.key, state.step)}
        logits, written = state.apply_fn(variables, batch["x"], training=True, rngs=rngs, mutable=["batch_stats"])
        losses, _ = scores(logits, batch["y"])
        return losses.mean(), written["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


def hand_batches(table: Table, data: px.train.Loader) -> Iterator[Arrays]:
    """What the loader gives, by NumPy: it tells which rows they are."""
    for number in itertools.count():
        rows = data.rows(number)
        yield {name: x[rows] for name, x in table.train.items()}


def replaced(table: Table, num_steps: int) -> dict[str, Any]:
    """The state after some steps on one device, with one part of the pipeline after the other replaced; and on all."""
    num_features, found = table.train["x"].shape[1], {}
    axis = _training.first_devices(1)
    data = px.loader(table.train, BATCH, seed=0, axis=axis)
    step = px.train_step(linen_loss, axis=axis, guard=False)  # as a plain one has none; with it, last bits differ

    def fitted(state: Any, step: Any, data: Any) -> Any:
        return px.fit(state, step, data, steps=num_steps, progress=False).state

    def looped(state: Any, step: Any, batches: Any) -> Any:
        for batch in itertools.islice(batches, num_steps):
            state, _ = step(state, batch)
        return state

    def by_numpy() -> Iterator[Arrays]:
        return hand_batches(table, data)

    found["nothing"] = fitted(linen_state(num_features), step, data)
    found["px.fit, by a for loop"] = looped(linen_state(num_features), step, data.batches())
    found["px.loader, by NumPy"] = fitted(linen_state(num_features), step, by_numpy)
    found["state and step, by Flax and optax"] = fitted(hand_state(num_features), hand_step, by_numpy)
    found["everything"] = looped(hand_state(num_features), hand_step, by_numpy())
    everywhere = px.train_step(linen_loss), px.loader(table.train, BATCH, seed=0)
    found[f"nothing, on {_training.where()}"] = fitted(linen_state(num_features), *everywhere)
    return found


def probabilities(state: Any, x: np.ndarray) -> np.ndarray:
    """That each row is benign, ``(n,)``."""
    if isinstance(state, px.TrainState):
        model = state.model()
    else:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        model = functools.partial(state.apply_fn, variables)
    return np.asarray(jax.nn.sigmoid(model(x, training=False)))[:, 0]


# --- tables ----------------------------------------------------------------------------------------------------------


def print_model(is_nnx: bool, num_features: int) -> None:
    shown, plain = jnp.ones((1, num_features)), {"width": 100, "force_terminal": False}
    if is_nnx:
        print(nnx.tabulate(nnx_model(num_features), shown, console_kwargs=plain))
    else:
        print(JM().tabulate(jax.random.key(42), shown, training=False, console_kwargs=plain))


def print_results(table: Table, fitted: px.train.Fitted) -> None:
    names = ("held-out/loss", "held-out/accuracy")
    rows = [(record.epoch + 1, *map(record.metrics.get, names)) for record in fitted.history.evaluations]
    _setting.table(["epoch", "held-out loss", "held-out accuracy"], rows[:: -max(1, len(rows) // 6)][::-1])
    linear = LogisticRegression().fit(table.train["x"], table.train["y"])
    x, y = table.held_out["x"], table.held_out["y"]
    by_linear = float(log_loss(y, linear.predict_proba(x))), float(linear.score(x, y))
    beside = [("the network", *rows[-1][1:]), ("scikit-learn's logistic regression", *by_linear)]
    _setting.table(["model", "held-out loss", "held-out accuracy"], beside)


def print_differences(table: Table, parts: dict[str, Any]) -> None:
    found = {name: probabilities(state, table.held_out["x"]) for name, state in parts.items()}
    rows = [(name, _training.difference(x, found["nothing"])) for name, x in found.items()]
    _setting.table(["replaced, on 1 device", "largest difference of a held-out probability"], rows)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    flags = {"nnx": "the model as an NNX module instead"}
    chosen = _training.options(__doc__, argv, flags=flags, epochs=(30, "epochs of training"))
    num_epochs = min(2, chosen.epochs) if chosen.quick else chosen.epochs
    table = load()

    print_model(chosen.nnx, table.train["x"].shape[1])
    print(f"{len(table.train['y'])} rows, {HELD_OUT} held out; {num_epochs} epochs on {_training.where()}")
    fitted = train(table, num_epochs, is_nnx=chosen.nnx, checkpoint=chosen.checkpoint)
    print_results(table, fitted)
    parts = replaced(table, 3 if chosen.quick else 20)
    print_differences(table, parts)

    curves = {
        "training": {record.step: record.metrics["loss"] for record in fitted.history.epochs},
        "held out": {record.step: record.metrics["held-out/loss"] for record in fitted.history.evaluations},
    }
    _setting.plot(chosen.plot, curves, "step", "loss")
    return {"table": table, "fitted": fitted, "parts": parts}


if __name__ == "__main__":
    main()
