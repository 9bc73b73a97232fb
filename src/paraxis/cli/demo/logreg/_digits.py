"""Small digits, on which scikit-learn's Newton solver takes less than a second: 784 columns would take it minutes."""

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

_NUM_HELD_OUT = 360


class Labelled(NamedTuple):
    """Pixels ``(n, 64)`` float64 in [0, 1], and labels ``(n,)`` int32."""

    pixels: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """1,437 digits to fit and 360 to test with."""

    train: Labelled
    held_out: Labelled


def load(seed: int) -> Digits:
    """scikit-learn's digits in an order drawn from the seed; the first 360 are held out."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(labels))
    whole = Labelled(pixels[order] / 16, labels[order].astype(np.int32))
    return Digits(*(Labelled(*(x[part] for x in whole)) for part in (slice(_NUM_HELD_OUT, None), slice(_NUM_HELD_OUT))))
