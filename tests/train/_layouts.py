"""What is trained on several layouts of devices, and a process of one of them.

``python -m tests.train._layouts NUM_PROCESSES CHECKPOINT PORT PROCESS`` prints the digests of all models after ten
steps; with a checkpoint of the fifth in that folder, those of runs that went on from there as well, else it makes one.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import paraxis as px
from tests.train._models import data, plain_loss, plain_params, rows

ANY = "any device count"
NUM_STEPS = 10


class ConvNet(nnx.Module):
    """Two convolutions with batch normalisation, for 8 × 8 images."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.last = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.last(jnp.mean(jax.nn.relu(self.second(x)), (1, 2)))


class Transformer(nnx.Module):
    """One block with dropout, over 9 tokens of 17."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(17, 24, rngs=rngs)
        self.before, self.between = nnx.LayerNorm(24, rngs=rngs), nnx.LayerNorm(24, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 24, dropout_rate=0.1, decode=False, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(24, 96, rngs=rngs), nnx.Linear(96, 24, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(24, 17, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        x = x + self.dropout(self.attention(self.before(x), mask=nnx.make_causal_mask(tokens)))
        x = x + self.dropout(self.narrow(jax.nn.gelu(self.wide(self.between(x)))))
        return self.last(x)


def image_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(losses), {"right": jnp.argmax(logits, -1) == batch["label"]}


def text_loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:])


def images(number: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"image": rng.normal(size=(number, 8, 8, 1)).astype("float32"), "label": rng.integers(0, 5, number)}


def texts(number: int, seed: int) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(seed).integers(0, 17, (number, 9))}


Case = tuple[Callable[[], Any], Callable[..., Any], Callable[[int, int], dict[str, np.ndarray]]]
CASES: dict[str, Case] = {
    "mlp": (lambda: plain_params(width=64), plain_loss, rows),
    "conv": (ConvNet, image_loss, images),
    "transformer": (Transformer, text_loss, texts),
}


def start(name: str) -> px.TrainState:
    return px.TrainState.create(CASES[name][0](), optax.adam(1e-2), key=jax.random.key(1), ema=0.9)


def batches(name: str, first: int = 0, last: int = NUM_STEPS) -> Iterator[dict[str, np.ndarray]]:
    """Of one, some with rows that no number of devices divides: that takes more programs on each device."""
    for step in range(first, last):
        yield CASES[name][2](13 if step % 5 == 4 and name == "mlp" else 16, step)


def trained(state: Any, step: Any, given: Iterator[Any]) -> tuple[Any, list[float]]:
    losses = []
    for batch in given:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def digest(tree: Any) -> str:
    """Of all bits, on one of the devices of this process."""
    leaves = [x.addressable_shards[0].data if isinstance(x, jax.Array) else x for x in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(data(x).tobytes() for x in leaves)).hexdigest()


def main(num_processes: int, path: Path, port: int, process: int) -> None:
    if num_processes > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, num_processes, process, cluster_detection_method="deactivate")
    found = {}
    for name, (_, loss, _) in CASES.items():
        step = px.train_step(loss, reproducible=ANY)
        with px.Checkpoints(path / name) as checkpoints:
            if checkpoints.latest is None:
                state, losses = trained(start(name), step, batches(name, 0, 5))
                checkpoints.save(5, state)
                state, more = trained(state, step, batches(name, 5))
                found[name] = [digest(state), [*losses, *more]]
                continue
            state, losses = trained(start(name), step, batches(name))
            found[name] = [digest(state), losses]
            restored = checkpoints.restore(start(name))
            state, losses = trained(restored.tree, step, batches(name, 5))
            found[f"{name}, restored"] = [digest(state), losses]
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.write(f"{jax.device_count()} devices, {os.environ['PJRT_NPROC']} threads\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
