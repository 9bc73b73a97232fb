"""A small transformer that learns to write like Python's documentation, with its parameters split over the devices.

``px.train_step(loss, shard="params")`` lets each device keep a part of every large parameter, of Adam's two averages of
it, and of nothing else: for a model of N bytes on D devices about 3 N / D bytes, where each device would have 3 N. A
parameter is brought together where it is used (FSDP; ZeRO, Rajbhandari et al., 2020, arXiv 1910.02054). The loss
function stays that of one device, and the numbers stay the same to rounding: the first table.

The text is the language reference that Python ships with for ``help()``, about half a million characters, of which the
last tenth is held out. The second table compares the bits per character with those of counting: single characters,
pairs, triples. At the end the transformer writes a few lines.

Typical output of ``--devices 8`` (three minutes on two cores)::

    10 steps of 32 windows on 8 devices
    parameters  last loss  relative difference  state, bytes on a device   temporary
         whole   3.272851                    0                 5,254,689   9,937,160
         split   3.272851                    0                   695,841  11,023,368
    a step with whole parameters communicates 1 all_reduce (1,751,556 bytes)
    a step with split parameters communicates 16 all_reduce (1,751,616 bytes), 15 all_gather (1,736,704 bytes)
                  predicted by  bits per held-out character
           counting characters                        4.662
                counting pairs                        3.336
              counting triples                        2.504
    the transformer, 150 steps                        2.989
    the transformer, 300 steps                        2.442
    the transformer, 450 steps                        2.214
    the transformer, 600 steps                        2.098
    The mad_stmt that object arguments can and execution the "__get__()" methods the with is returns
    produled to int the "__r()" is call class definition.

            Pase and class when the statement change
    (use of the object.__returent__(self, other), other) methods or cole in       | "xx" | "r" |
    …

The bytes of an all-reduce are those of whole gradients: XLA on the CPU adds them up on each device, which keeps a part.
"""

import itertools
from collections.abc import Sequence
from pydoc_data import topics
from typing import Any, NamedTuple

import _setting
import _training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import paraxis as px
from paraxis.testing import Communication, communication

CHARACTERS = 128  # of ASCII
BATCH, LEARNING_RATE = 32, 3e-3


# --- text ------------------------------------------------------------------------------------------------------------


def load() -> tuple[np.ndarray, np.ndarray]:
    """The text as numbers of characters, uint8: to train on, and held out."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:]


def windows(codes: np.ndarray, length: int) -> np.ndarray:
    """``(num_windows, length + 1)``, without copying: each begins where the one before predicts its last character."""
    return np.lib.stride_tricks.sliding_window_view(codes, length + 1)[::length]


def bits_by_counting(train: np.ndarray, test: np.ndarray, order: int) -> float:
    """Bits per held-out character, predicted from the ``order - 1`` before it by how often they were seen together."""
    base = CHARACTERS ** np.arange(order)[::-1]
    seen, asked = (np.lib.stride_tricks.sliding_window_view(x, order) @ base for x in (train, test))
    together = np.bincount(seen, minlength=CHARACTERS**order)
    before = together.reshape(-1, CHARACTERS).sum(1)
    # A tenth of a time more than they were, so that what was never seen is not impossible.
    probabilities = (together[asked] + 0.1) / (before[asked // CHARACTERS] + 0.1 * CHARACTERS)
    return float(-np.log2(probabilities).mean())


# --- model -----------------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    """Attention to the characters before, then a network of each; both added to what comes in."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs) -> None:
        self.before = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, width, decode=False, rngs=rngs)
        self.between = nnx.LayerNorm(width, rngs=rngs)
        self.grow = nnx.Linear(width, 4 * width, rngs=rngs)
        self.shrink = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """``(batch, length, width)`` → the same."""
        x = x + self.dropout(self.attention(self.before(x), mask=mask))
        return x + self.dropout(self.shrink(nnx.gelu(self.grow(self.between(x)))))


class Transformer(nnx.Module):
    """Scores of the next character, at each place."""

    def __init__(self, length: int, width: int, num_blocks: int, rngs: nnx.Rngs) -> None:
        self.characters = nnx.Embed(CHARACTERS, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, CHARACTERS, rngs=rngs)

    def __call__(self, codes: jax.Array) -> jax.Array:
        """``(batch, length)`` → ``(batch, length, 128)``."""
        x = self.characters(codes) + self.places(jnp.arange(codes.shape[1]))
        mask = nnx.make_causal_mask(codes)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(self.norm(x))


def loss(model: Any, batch: jax.Array) -> jax.Array:
    """Of each window: in nats per character."""
    codes = batch.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(model(codes[:, :-1]), codes[:, 1:]).mean(1)


class Size(NamedTuple):
    """Of the transformer: characters it sees, numbers per character, blocks."""

    length: int
    width: int
    num_blocks: int


def initial(size: Size) -> px.TrainState:
    return px.TrainState.create(Transformer(*size, nnx.Rngs(0)), optax.adamw(LEARNING_RATE))


# --- split and whole -------------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Some steps: losses, bytes of the state on a device, what a step needs beside it, and communicates."""

    losses: np.ndarray
    state_bytes: int
    temporary_bytes: int
    communicated: Communication


def some_steps(text: np.ndarray, size: Size, num_steps: int, **where: Any) -> Steps:
    """Some steps of training, by a loop of one's own."""
    step, data = px.train_step(loss, **where), px.loader(windows(text, size.length), BATCH, seed=1)
    state, losses, batches = initial(size), [], list(itertools.islice(data.batches(), num_steps))
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    temporary = step.lower(state, batches[0]).compile().memory_analysis().temp_size_in_bytes
    return Steps(np.array(losses), bytes_of_a_device(state), temporary, communication(step, state, batches[0]))


def bytes_of_a_device(state: Any) -> int:
    """That the arrays of a state take on the first device of this process."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def compare(text: np.ndarray, size: Size, num_steps: int) -> dict[str, Steps]:
    """With whole parameters on each device, and with split ones."""
    found = {"whole": some_steps(text, size, num_steps), "split": some_steps(text, size, num_steps, shard="params")}
    print(f"{num_steps} steps of {BATCH} windows on {_training.where()}")
    rows = []
    for name, run in found.items():
        difference = float(np.abs(run.losses / found["whole"].losses - 1).max())
        rows.append((name, f"{run.losses[-1]:.6f}", difference, run.state_bytes, run.temporary_bytes))
    header = ["parameters", "last loss", "relative difference", "state, bytes on a device", "temporary"]
    _setting.table(header, rows)
    for name, run in found.items():
        print(f"a step with {name} parameters communicates {run.communicated}")
    return found


# --- a whole run -----------------------------------------------------------------------------------------------------


def train(train: np.ndarray, test: np.ndarray, size: Size, num_steps: int, checkpoint: str | None) -> px.train.Fitted:
    data, held_out = (px.loader(windows(text, size.length), BATCH, seed=0) for text in (train, test))
    evaluate = px.Evaluate(px.eval_step(loss), held_out, every=max(1, num_steps // 4), name="held-out")
    saved = px.Checkpoints(checkpoint, every=50) if checkpoint else None
    step = px.train_step(loss, shard="params", clip=1.0)
    return px.fit(initial(size), step, data, steps=num_steps, evaluate=evaluate, checkpoint=saved)


def whole(state: px.TrainState) -> px.TrainState:
    """The state with every array whole on every device, so that each process can compute with it by itself."""
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=everywhere)(state)


def write(model: Any, start: str, num_characters: int, length: int) -> str:
    """Go on with a text, a character at a time, drawn by their probabilities."""
    model.eval()

    @nnx.jit
    def scores(model: Any, codes: Any, last: Any) -> jax.Array:
        return model(codes)[0, last]

    codes, draw = [ord(c) for c in start], np.random.default_rng(0)
    for _ in range(num_characters):
        seen = codes[-length:]
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(seen)] = seen
        logits = np.asarray(scores(model, padded, len(seen) - 1), np.float64)
        probabilities = np.exp((logits - logits.max()) / 0.7)
        codes.append(int(draw.choice(CHARACTERS, p=probabilities / probabilities.sum())))
    return "".join(map(chr, codes))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _training.options(__doc__, argv, steps=(600, "steps of training"))
    text, held_out = load()
    size, num_steps = Size(64, 128, 2), chosen.steps
    if chosen.quick:
        size, num_steps, text, held_out = Size(16, 32, 1), min(20, chosen.steps), text[:20_000], held_out[:2_000]

    steps = compare(text, size, 3 if chosen.quick else 10)
    fitted = train(text, held_out, size, num_steps, chosen.checkpoint)
    counted = [
        (f"counting {name}", bits_by_counting(text, held_out, order))
        for order, name in enumerate(("characters", "pairs", "triples"), 1)
    ]
    found = [
        (f"the transformer, {r.step} steps", r.metrics["held-out/loss"] / float(np.log(2)))
        for r in fitted.history.evaluations
    ]
    _setting.table(["predicted by", "bits per held-out character"], [*counted, *found])
    print(write(whole(fitted.state).model(), "The ", 40 if chosen.quick else 400, size.length))

    curves = {"training": fitted.history.curve("loss"), "held out": fitted.history.curve("held-out/loss")}
    shown = {label: dict(zip(*curve, strict=True)) for label, curve in curves.items()}
    _setting.plot(chosen.plot, shown, "step", "loss, nats per character")
    return {"text": (text, held_out), "steps": steps, "fitted": fitted, "bits": dict([*counted, *found])}


if __name__ == "__main__":
    main()
