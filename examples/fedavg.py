"""Federated averaging (McMahan et al. 2017, arXiv 1602.05629): several local steps for each exchange.

24 clients hold handwritten digits of about two labels each. In a round every client takes some steps of gradient
descent on its own digits, starting from the shared model, and the results are averaged. With one local step this is
distributed gradient descent; with more, fewer rounds reach the same accuracy, and each round costs the same
communication: one all-reduce the size of the model.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import _setting
import jax

import paraxis as px
from paraxis.testing import communication

CLIENTS = 24  # they divide evenly among 2, 3, 4, 6 and 8 devices, so no row of data is sent to fill a gap
Model = dict[str, jax.Array]


def local_training(model: Model, x: jax.Array, y: jax.Array, *, num_steps: int, learning_rate: float) -> Model:
    """One client: gradient descent on its own ``x (rows, 64)``, ``y (rows,)``."""

    def step(model: Model, _: None) -> tuple[Model, None]:
        gradient = jax.grad(_setting.cross_entropy)(model, x, y)
        return jax.tree.map(lambda p, g: p - learning_rate * g, model, gradient), None

    return jax.lax.scan(step, model, length=num_steps)[0]


def make_round(num_steps: int, learning_rate: float = 0.1) -> Callable[..., Model]:
    """A round of federated averaging as a program of ``(model, x, y)``."""
    client = functools.partial(local_training, num_steps=num_steps, learning_rate=learning_rate)

    @px.program(clients=CLIENTS)
    def federated_round(model: Model, x: Any, y: Any) -> Model:
        return px.reduce_mean(px.map_fn(client, (px.broadcast(model), x, y)))

    return federated_round


def train(num_steps: int, num_rounds: int) -> tuple[Model, list[float]]:
    """The model after so many rounds, and the held-out accuracy after each."""
    data = _setting.digits(CLIENTS, by_label=True)
    federated_round = make_round(num_steps)
    model, told_right = _setting.classifier(jax.random.key(0)), []
    for _ in range(num_rounds):
        model = federated_round(model, data.x, data.y)
        told_right.append(_setting.accuracy(model, data))
    return model, told_right


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv)
    num_rounds = 5 if chosen.quick else 60
    data = _setting.digits(CLIENTS, by_label=True)
    curves, rows = {}, []
    for num_steps in (1, 5, 20):
        model, told_right = train(num_steps, num_rounds)
        curves[f"{num_steps} local steps"] = dict(enumerate(told_right, 1))
        sent = communication(make_round(num_steps), model, data.x, data.y)
        reached = next((i + 1 for i, share in enumerate(told_right) if share >= 0.8), "never")
        rows.append((num_steps, told_right[-1], reached, sent.total_count, sent.total_bytes))
    print(make_round(1))
    _setting.table(["local steps", "accuracy", "rounds to 80 %", "collectives/round", "bytes/round"], rows)
    _setting.plot(chosen.plot, curves, "round", "held-out accuracy")


if __name__ == "__main__":
    main()
