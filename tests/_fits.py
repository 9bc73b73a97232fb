"""A small run for the tests of ``fit``, the same written by hand, and what is read of its files."""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px
from tests import _steps as models

ONE = models.axis(1)  # one device: that is where bits are promised
NUM_ROWS, BATCH = 56, 16
PER_EPOCH = 4  # 16, 16, 16, 8 rows


def arrays(num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).standard_normal((num_rows, 3)).astype(np.float32)
    return {"x": x, "y": (x @ np.array([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)}


def data(seed: int = 1, batch_size: int = BATCH, num_rows: int = NUM_ROWS, **options: Any) -> px.train.Loader:
    return px.loader(arrays(num_rows), batch_size, axis=ONE, seed=seed, **options)


def batches(source: px.train.Loader, numbers: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """The batches with these numbers, out of the arrays as they are."""
    return [{name: x[source.rows(number)] for name, x in arrays().items()} for number in numbers]


def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    noise = 0.1 * jax.random.normal(key, batch["y"].shape)
    return (batch["x"] @ params["w"] + params["b"] + noise - batch["y"]) ** 2


# One object, as a state of another optimiser is another type of value, which steps are compiled for anew.
_OPTIMIZER = optax.adam(optax.cosine_decay_schedule(0.1, 40))
step = px.train_step(loss, axis=ONE)


class Steps(NamedTuple):
    """A state that only counts."""

    step: int


def start() -> px.TrainState:
    return px.TrainState.create({"w": jnp.zeros(3), "b": jnp.zeros(())}, _OPTIMIZER, key=jax.random.key(7))


def by_hand(found: Sequence[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Parameters, optimiser's state and loss after each of these batches."""

    def fn(params: Any, rest: None, batch: Any, number: jax.Array) -> Any:
        return jnp.mean(loss(params, batch, jax.random.fold_in(jax.random.key(7), number))), rest

    model = models.Model(None, loss, {"w": np.zeros(3, "f"), "b": np.zeros((), "f")}, None, fn)
    for params, _, _, state, value in models.by_hand(model, _OPTIMIZER, list(found)):
        yield params, state, value


def members(epochs: int, **options: Any) -> list[Any]:
    """The averages of an ensemble's run, and each member's parameters."""
    keyed = lambda key: start().replace(params={"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}, key=key)  # noqa: E731
    ens, batches = px.ensemble(keyed, 5, 0), px.loader(arrays(), BATCH, seed=1)
    test = px.Evaluate(px.eval_step(lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2), batches)
    history = ens.fit(px.train_step(loss), batches, epochs=epochs, evaluate=test, progress=False, **options).history
    averages = [record.metrics for record in (*history.epochs, *history.evaluations)]
    return jax.tree.map(lambda x: np.asarray(x).tolist(), [averages, [member.params for member in ens]])


@jax.jit
def evaluate_step(state: px.TrainState, batch: Any) -> dict[str, px.Mean]:
    errors = (batch["x"] @ state.params["w"] + state.params["b"] - batch["y"]) ** 2
    return {"loss": px.Mean(jnp.sum(errors), jnp.float32(len(errors)))}


def noisy(batch: np.ndarray, random: Any) -> dict[str, np.ndarray]:
    """A transform of a loader that draws a number for each row."""
    return {"number": batch, "noise": np.array([generator.normal() for generator in random])}


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without the times."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        del line["time"]
    return found


def events(file: Path) -> list[Any]:
    """The whole records of TensorBoard's file: a length, its checksum, the message and its checksum."""
    from tensorboardX.proto import event_pb2

    message: Any = vars(event_pb2)["Event"]
    content, found = file.read_bytes(), []
    while len(content) >= 16 and len(content) >= 16 + (length := struct.unpack("<Q", content[:8])[0]):
        found.append(message.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def points(directory: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows, name → step → value: what was written before a restart is left out, and none is twice."""
    found: dict[str, dict[int, float]] = {}
    for event in (event for file in sorted(directory.iterdir()) for event in events(file)):
        if event.HasField("session_log"):
            found = {tag: {k: x for k, x in curve.items() if k < event.step} for tag, curve in found.items()}
        for value in event.summary.value:
            curve = found.setdefault(value.tag, {})
            assert event.step not in curve, (value.tag, event.step)
            curve[event.step] = value.simple_value
    return found
