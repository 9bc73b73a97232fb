"""A server learning rate that tunes itself (Federated Automatic Differentiation, arXiv 2301.07806).

In a round of federated learning each client trains a little on its own data and the server adds the average of their
updates, times a server learning rate, to the shared model. The whole round is made of programs, so what comes out of
it can be differentiated with respect to that rate, through the evaluation on all clients, the averaging, the clients'
local training and the broadcast of the model. Before the server takes its step it looks one round ahead,

    next model    = model + rate * average update(model)
    hypergradient = d loss(next model + rate * average update(next model)) / d log rate,

and Adam moves the logarithm of the rate along it, one step in each round. Looking ahead costs one more local training;
judged by the loss right after the step, rates come out too small.

The data are Synthetic(alpha, beta) (Li et al. 2020, arXiv 1812.06127), generated here: alpha spreads the clients'
labelling models, beta their inputs. The table compares, for starting rates over four decades, a rate that stays as
it is and one that tunes itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

CLIENTS, ROWS, FEATURES, CLASSES = 30, 50, 60, 10
LOCAL_STEPS, CLIENT_RATE = 10, 0.01
Model = dict[str, jax.Array]
tuner = optax.adam(0.1)


class State(NamedTuple):
    """What the server keeps: the model, the logarithm of its learning rate, and the tuner's moments."""

    model: Model
    log_rate: jax.Array
    tuning: Any


def synthetic(alpha: float, beta: float, rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Synthetic(alpha, beta): ``x (clients, rows, 60)`` and ``y (clients, rows)`` from 10 classes."""
    rng = np.random.default_rng(seed)
    deviation = np.arange(1, FEATURES + 1) ** -0.6  # of the inputs: their covariance is diagonal, j ** -1.2
    xs, ys = [], []
    for _ in range(CLIENTS):
        u, b = rng.normal(0, alpha**0.5), rng.normal(0, beta**0.5)
        weights, bias = rng.normal(u, 1, (FEATURES, CLASSES)), rng.normal(u, 1, CLASSES)
        x = rng.normal(rng.normal(b, 1, FEATURES), deviation, (rows, FEATURES))
        xs.append(x)
        ys.append(np.argmax(x @ weights + bias, axis=1))
    return np.stack(xs).astype(np.float32), np.stack(ys).astype(np.int32)


def client_loss(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ model["w"] + model["b"], y).mean()


def client_update(model: Model, x: jax.Array, y: jax.Array) -> Model:
    """What some steps of gradient descent on one client's data add to the model."""

    def step(local: Model, _: None) -> tuple[Model, None]:
        gradient = jax.grad(client_loss)(local, x, y)
        return jax.tree.map(lambda p, g: p - CLIENT_RATE * g, local, gradient), None

    return jax.tree.map(jnp.subtract, jax.lax.scan(step, model, length=LOCAL_STEPS)[0], model)


@px.program(clients=CLIENTS)
def mean_loss(model: Model, x: Any, y: Any) -> jax.Array:
    return px.reduce_mean(px.map_fn(client_loss, (px.broadcast(model), x, y)))


@px.program(clients=CLIENTS)
def average_update(model: Model, x: Any, y: Any) -> Model:
    return px.reduce_mean(px.map_fn(client_update, (px.broadcast(model), x, y)))


def moved(model: Model, update: Model, log_rate: jax.Array) -> Model:
    return jax.tree.map(lambda p, u: p + jnp.exp(log_rate) * u, model, update)


def loss_after_round(log_rate: jax.Array, model: Model, x: Any, y: Any) -> jax.Array:
    """One whole round: local training, averaging, the server's step; and the evaluation on all clients."""
    return mean_loss(moved(model, average_update(model, x, y), log_rate), x, y)


def hypergradient(log_rate: jax.Array, model: Model, update: Model, x: Any, y: Any) -> jax.Array:
    """How the loss after the next round changes with the rate of both."""
    return jax.grad(lambda r: loss_after_round(r, moved(model, update, r), x, y))(log_rate)


@jax.jit
def static_round(state: State, x: Any, y: Any) -> State:
    return state._replace(model=moved(state.model, average_update(state.model, x, y), state.log_rate))


@jax.jit
def tuned_round(state: State, x: Any, y: Any) -> State:
    """A round that first moves its learning rate along the hypergradient, then takes its step with it."""
    update = average_update(state.model, x, y)
    change, tuning = tuner.update(hypergradient(state.log_rate, state.model, update, x, y), state.tuning)
    log_rate = jax.tree.map(jnp.add, state.log_rate, change)
    return State(moved(state.model, update, log_rate), log_rate, tuning)


def train(rate: float, num_rounds: int, *, tuned: bool, x: Any, y: Any) -> tuple[State, list[float]]:
    """The server's state after so many rounds from a zero model, and the mean training loss after each."""
    log_rate = jnp.log(jnp.float32(rate))
    model = {"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}
    state, losses = State(model, log_rate, tuner.init(log_rate)), []
    for _ in range(num_rounds):
        state = (tuned_round if tuned else static_round)(state, x, y)
        losses.append(float(mean_loss(state.model, x, y)))
    return state, losses


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv)
    num_rounds, rates = (
        (3, (0.1, 10.0)) if chosen.quick else (100, tuple(10.0**e for e in np.arange(-2, 2.1, 0.5).tolist()))
    )
    x, y = synthetic(1.0, 1.0)
    curves, rows = {}, []
    for rate in rates:
        _, still = train(rate, num_rounds, tuned=False, x=x, y=y)
        state, moving = train(rate, num_rounds, tuned=True, x=x, y=y)
        curves[f"tuned from {rate:.2g}"] = dict(enumerate(moving, 1))
        rows.append((rate, still[-1], moving[-1], float(jnp.exp(state.log_rate))))
    print(mean_loss)
    _setting.table(["first rate", "loss, static", "loss, tuned", "last rate, tuned"], rows)
    best, worst = min(row[1] for row in rows), max(row[2] for row in rows)
    print(f"best static: {best:.4g}; tuned, from the worst start: {worst:.4g} ({worst / best:.2f} x)")
    _setting.plot(chosen.plot, curves, "round", "mean training loss", log=True)


if __name__ == "__main__":
    main()
