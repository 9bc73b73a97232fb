"""FedAvg, FedAdam and SCAFFOLD on clients of different size, of which each round draws a cohort.

The clients' numbers of digits are log-normal, and most of a client's digits have two labels. `px.Groups` holds them as
they are. A cohort depends on the seed and the round alone; it is padded to a few lengths, with a mask.

A round is one program for the mesh and for a stream. With ``--engine stream`` it runs in chunks, with ``pool`` in other
processes: the curves are the same to rounding. SCAFFOLD keeps a vector for each client on the host; those of the cohort
go into the round as rows, and their successors come back as rows.

FedAvg (McMahan et al., 2017) takes the weighted mean of the clients' models. FedAdam (Reddi et al., 2021) gives the
mean change to Adam, as a gradient. SCAFFOLD (Karimireddy et al., 2020, option II) corrects each local step by the
difference between what all clients and this one would do.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

CLIENTS, COHORT = 60, 12
LOCAL_STEPS, LOCAL_RATE = 20, 0.1
ENGINES = ("mesh", "stream", "pool")


class Clients(NamedTuple):
    """The clients' digits, and those held out."""

    groups: px.Groups
    held_out: Any


def clients() -> Clients:
    """Deal the digits out: two labels each for the most part, log-normal numbers of rows."""
    data, rng = _setting.digits(1, by_label=False), np.random.default_rng(0)
    x, y = data.x[0], data.y[0]
    sizes = np.clip(rng.lognormal(3.0, 0.7, CLIENTS).astype(int), 4, 120)
    dealt = []
    for size in sizes:
        weights = np.where(np.isin(y, rng.choice(10, 2, replace=False)), 1.0, 0.02)
        rows = rng.choice(len(y), size, replace=False, p=weights / weights.sum())
        dealt.append({"x": x[rows], "y": y[rows]})
    return Clients(px.Groups(dealt, lengths=sizes), data)


def loss(model: Any, data: Any) -> jax.Array:
    """The mean over a client's real rows."""
    scores = jax.nn.log_softmax(_setting.logits(model, data["x"]))
    each = -jnp.take_along_axis(scores, data["y"][:, None], 1)[:, 0]
    return jnp.sum(jnp.where(data.mask, each, 0.0)) / data.count


def local_training(model: Any, data: Any, correction: Any) -> Any:
    """What a client makes of the model, its steps corrected by a vector."""

    def step(model: Any, _: Any) -> tuple[Any, None]:
        gradient = jax.grad(loss)(model, data)
        return jax.tree.map(lambda p, g, c: p - LOCAL_RATE * (g + c), model, gradient, correction), None

    return jax.lax.scan(step, model, None, length=LOCAL_STEPS)[0]


@px.program(clients=COHORT)
def mean_change(model: Any, data: Any) -> Any:
    """The mean of what the cohort's clients would add to the model, weighted by their rows."""

    def change(model: Any, data: Any) -> Any:
        after = local_training(model, data, jax.tree.map(jnp.zeros_like, model))
        return jax.tree.map(jnp.subtract, after, model)

    return px.reduce_weighted_mean(px.map_fn(change, (px.broadcast(model), data)), data.count)


@px.program(clients=COHORT)
def scaffold_round(model: Any, server: Any, data: Any, own: Any) -> tuple[Any, Any, Any]:
    """The model after a round, the mean change of the clients' vectors, and these vectors."""

    def of_client(model: Any, server: Any, data: Any, own: Any) -> tuple[Any, Any]:
        after = local_training(model, data, jax.tree.map(jnp.subtract, server, own))
        slope = jax.tree.map(lambda a, b: (a - b) / (LOCAL_STEPS * LOCAL_RATE), model, after)
        return after, jax.tree.map(lambda c, s, g: c - s + g, own, server, slope)

    after, new = px.map_fn(of_client, (px.broadcast(model), px.broadcast(server), data, own))
    return px.reduce_mean(after), px.reduce_mean(jax.tree.map(jnp.subtract, new, own)), new


def runner(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a function to be called with cohorts out of a program."""
    if name == "mesh":
        return lambda fn: lambda *args: jax.jit(fn)(*(x.arrays() if isinstance(x, px.Groups) else x for x in args))
    if name == "pool":  # its processes end with this one
        executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
        return px.Stream(at_once=3, map=executor.map).jit
    return px.Stream(at_once=3).jit


def with_server(optimizer: optax.GradientTransformation) -> Callable[..., list[float]]:
    """Return federated training whose server takes the mean change as a step of an optimiser."""

    def train(data: Clients, rounds: int, run: Callable[..., Any]) -> list[float]:
        step, model, told_right = run(mean_change), _setting.classifier(jax.random.key(0)), []
        state = optimizer.init(model)
        for number in range(rounds):
            change = step(model, data.groups.sample(COHORT, seed=(0, number)))
            updates, state = optimizer.update(jax.tree.map(jnp.negative, change), state, model)
            model = optax.apply_updates(model, updates)
            told_right.append(_setting.accuracy(model, data.held_out))
        return told_right

    return train


def scaffold(data: Clients, rounds: int, run: Callable[..., Any]) -> list[float]:
    """Return the held-out accuracy after each round."""
    step, model, told_right = run(scaffold_round), _setting.classifier(jax.random.key(0)), []
    server = jax.tree.map(jnp.zeros_like, model)
    own = jax.tree.map(lambda p: np.zeros((CLIENTS, *p.shape), np.float32), model)
    for number in range(rounds):
        cohort = data.groups.sample(COHORT, seed=(0, number))
        chosen = cohort.numbers
        vectors = px.Groups.of_arrays(jax.tree.map(lambda c, i=chosen: c[i], own))
        model, change, new = step(model, server, cohort, vectors)
        server = jax.tree.map(lambda c, d: c + d * COHORT / CLIENTS, server, change)
        for whole, rows in zip(jax.tree.leaves(own), jax.tree.leaves(new), strict=True):
            whole[chosen] = rows
        told_right.append(_setting.accuracy(model, data.held_out))
    return told_right


ALGORITHMS: dict[str, Callable[..., list[float]]] = {
    "FedAvg": with_server(optax.sgd(1.0)),
    "FedAdam": with_server(optax.adam(0.03)),
    "SCAFFOLD": scaffold,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = _setting.parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="mesh", help="what runs a round (default: the mesh)")
    chosen = _setting.parsed(parser, argv)
    data, rounds = clients(), 3 if chosen.quick else 60
    curves = {}
    for name, train in ALGORITHMS.items():
        curves[name] = dict(enumerate(train(data, rounds, runner(chosen.engine)), 1))
    sizes = np.asarray(data.groups.lengths)
    print(f"{CLIENTS} clients of {sizes.min()} to {sizes.max()} digits, {COHORT} a round")
    print(mean_change)
    rows = []
    for name, curve in curves.items():
        late = float(np.mean(list(curve.values())[-10:]))
        rows.append((name, _rounds_to(0.85, curve), curve[rounds], late))
    _setting.table(["algorithm", "rounds to 85 %", "accuracy", "mean of last 10"], rows)
    _setting.plot(chosen.plot, curves, "round", "held-out accuracy")


def _rounds_to(level: float, curve: dict[int, float]) -> Any:
    return next((number for number, found in curve.items() if found >= level), "never")


if __name__ == "__main__":
    main()
