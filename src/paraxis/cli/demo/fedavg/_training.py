"""The rounds, one after the other."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paraxis._axes.axis import Axis
from paraxis._core.verbs import scatter
from paraxis.cli.demo._digits import Labelled
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.fedavg import _model
from paraxis.cli.demo.fedavg._rounds import make_round, make_test
from paraxis.reports import Communication, of_program

_NUM_STEPS, _BATCH = 4, 10


class Round(NamedTuple):
    """The results of a round. ``seconds``: sampling, sending the digits and training; not the test."""

    number: int
    accuracy: float
    loss: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Run:
    """A whole training run."""

    rounds: list[Round]
    params: dict[str, np.ndarray]
    communication: Communication
    compile_seconds: float

    @property
    def seconds_per_round(self) -> float:
        return statistics.median(r.seconds for r in self.rounds)

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in self.params.values())


def train(
    federation: Labelled,
    held_out: Labelled,
    options: Options,
    devices: Sequence[Any],
    on_round: Callable[[Round], None],
) -> Run:
    """Train on the given devices. All randomness comes from the seed, the round and the client's place in it.

    Args:
        federation: the digits of each client.
        held_out: the digits to test with, after each round.
        options: number of rounds and of clients in each, and the seed.
        devices: where to run.
        on_round: called after each round.
    """
    mesh = Mesh(np.array(devices), ("devices",))
    clients = Axis("clients", options.per_round, mesh=mesh, over="devices")
    digits = Axis("digits", len(held_out.labels), mesh=mesh, over="devices")
    testing, test = scatter(tuple(held_out), digits), make_test(digits)
    params = jax.device_put(_model.init(jax.random.key(options.seed)), NamedSharding(mesh, PartitionSpec()))

    begin = time.perf_counter()
    first = scatter(sample(federation, options, 1), clients)
    federated_round = jax.jit(make_round(clients)).lower(params, *first).compile()
    compile_seconds = time.perf_counter() - begin

    rounds: list[Round] = []
    for number in range(1, options.rounds + 1):
        begin = time.perf_counter()
        params, loss = federated_round(params, *scatter(sample(federation, options, number), clients))
        jax.block_until_ready(params)
        seconds = time.perf_counter() - begin
        rounds.append(Round(number, float(test(params, *testing)), float(loss), seconds))
        on_round(rounds[-1])
    communication = of_program(federated_round.as_text() or "")
    return Run(rounds, jax.tree.map(np.asarray, params), communication, compile_seconds)


def sample(federation: Labelled, options: Options, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a round's clients: images, labels, and which digits each step takes ``(clients, steps, batch)``."""
    rng = np.random.default_rng((options.seed, number))
    num_clients, num_digits = federation.labels.shape
    chosen = rng.choice(num_clients, options.per_round, replace=False)
    batch = min(_BATCH, num_digits // _NUM_STEPS)
    shuffled = rng.permuted(np.tile(np.arange(num_digits, dtype=np.int32), (options.per_round, 1)), axis=1)
    order = shuffled[:, : _NUM_STEPS * batch].reshape(options.per_round, _NUM_STEPS, batch)
    return federation.images[chosen], federation.labels[chosen], order


def largest_difference(one: Run, other: Run) -> float:
    """Return the largest difference of any parameter at the end of two runs."""
    return max(float(np.max(np.abs(one.params[name] - other.params[name]))) for name in one.params)
