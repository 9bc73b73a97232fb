"""Where rows and batches may come from."""

import itertools
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pandas as pd
import pytest

import paraxis as px
from tests._fits import noisy


def numbers(batch: Any) -> list[int]:
    return np.asarray(batch["number"] if isinstance(batch, dict) else batch).tolist()


def first(number: int, batches: Iterator[Any]) -> list[list[int]]:
    return [numbers(batch) for batch in itertools.islice(batches, number)]


class Tensor:
    """What a loader knows of a PyTorch tensor."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)
        self.shape, self.dtype = self.value.shape, f"torch.{self.value.dtype}"

    def detach(self) -> "Tensor":
        return self

    cpu = detach

    def numpy(self) -> np.ndarray:
        return self.value

    def __array__(self, *_: Any) -> np.ndarray:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class TensorDataset:
    """A map-style PyTorch dataset: a row is a tuple of a tensor and a number."""

    x = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return Tensor(self.x[row]), row


class SeveralAtOnce(TensorDataset):
    """As newer PyTorch datasets: all rows of a batch in one call."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [TensorDataset.__getitem__(self, row) for row in rows]

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("one by one")


class DataLoader:
    """A PyTorch ``DataLoader``: batches in an order of its own, another one at each pass."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(7)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        order = self.draw.permutation(10)
        return iter([{"number": Tensor(order[k : k + 4])} for k in (0, 4, 8)])


@pytest.mark.parametrize("kind", [TensorDataset, SeveralAtOnce])
def test_loader_reads_the_rows_of_a_dataset_of_tensors(kind: type[TensorDataset]) -> None:
    dataset = kind()
    data = px.loader(dataset, 4)
    for k, (x, row) in enumerate(data.epoch(0)):
        assert np.asarray(row).tolist() == data.rows(k).tolist()
        np.testing.assert_array_equal(x, dataset.x[data.rows(k)])


@pytest.mark.parametrize("start", [0, 5])
def test_loader_keeps_the_batches_and_the_order_of_a_data_loader(start: int) -> None:
    """With PyTorch's generator seeded alike, the order of a later pass depends on the passes before."""
    twin = DataLoader()
    expected = [batch["number"].value.tolist() for _ in range(3) for batch in twin]
    data = px.loader(DataLoader())
    assert len(data) == 3
    assert first(9 - start, data.batches(start)) == expected[start:]


def test_loader_lets_a_source_use_its_memory_again() -> None:
    buffer = np.zeros((64, 1024), np.float32)  # large enough for JAX to take it as it is

    def batches() -> Iterator[np.ndarray]:
        for k in range(3):
            buffer[:] = k
            yield buffer

    for found in (px.loader(batches, read_ahead=3).epoch(0), px.loader(batches, read_ahead=0).batches()):
        assert [float(batch.mean()) for batch in itertools.islice(found, 3)] == [0, 1, 2]
    fitted = px.fit(0, lambda s, batch: (s + 1, {"mean": batch.mean()}), batches, epochs=1, progress=False)
    assert [record.metrics["mean"] for record in fitted.history.steps] == [0, 1, 2]


def test_loader_takes_a_grain_dataset_with_other_random_numbers_in_each_epoch() -> None:
    dataset = grain.MapDataset.range(10).seed(3)
    drawn = px.loader(dataset.random_map(lambda x, rng: {"number": x, "noise": rng.normal()}), 10)
    found = [batch for epoch in (0, 1) for batch in drawn.epoch(epoch)]
    noise = [dict(zip(numbers(batch), np.asarray(batch["noise"]).tolist(), strict=True)) for batch in found]
    assert sorted(noise[0]) == sorted(noise[1]) == list(range(10))
    assert all(noise[0][row] != noise[1][row] for row in range(10))
    shuffled = dataset.shuffle()  # by itself: its order is kept
    rows = first(4, px.loader(shuffled, 5, shuffle=False).batches())
    assert list(itertools.chain(*rows)) == [shuffled[i] for i in range(20)]


def test_loader_asks_a_function_of_the_epoch_for_the_epoch_in_question_only() -> None:
    asked: list[int] = []

    def source(epoch: int) -> list[np.ndarray]:
        asked.append(epoch)
        return [np.full(2, 10 * epoch + k) for k in range(3)]

    data = px.loader(source)
    asked.clear()
    assert first(3, data.batches(3 * 4 + 1)) == [[41, 41], [42, 42], [50, 50]]
    assert min(asked) == 4
    unsized = px.loader(lambda epoch: (np.full(1, 10 * epoch + k) for k in range(epoch + 1)))
    assert first(5, unsized.batches(2)) == [[11], [20], [21], [22], [30]]


def drawn(size: int, epoch: int, seed: int = 0) -> dict[int, float]:
    batches = px.loader(np.arange(10), size, seed=seed, transform=noisy).epoch(epoch)
    return {row: float(x) for batch in batches for row, x in zip(numbers(batch), batch["noise"], strict=True)}


def test_loader_lets_a_transform_draw_by_the_seed_the_epoch_and_the_row() -> None:
    assert drawn(1, 1) == drawn(3, 1) == drawn(10, 1)
    found = [*drawn(4, 0).values(), *drawn(4, 1).values(), *drawn(4, 0, 1).values()]
    assert len(set(found)) == 30


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_loader_lets_a_transform_mix_the_rows_of_a_batch_in_one_process(read_ahead: int) -> None:
    x = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
    mixup = lambda batch: batch | {"x": (batch["x"] + batch["x"][::-1]) / 2}  # noqa: E731
    data = px.loader({"x": x, "number": np.arange(23)}, 8, transform=mixup, read_ahead=read_ahead)
    for number, batch in enumerate(data.epoch(0)):
        rows = x[data.rows(number)]
        np.testing.assert_array_equal(batch["x"], (rows + rows[::-1]) / 2)


ONES = {"x": np.ones(6)}
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("rows.npy", {"batch_size": 4}, px.DataError, "source is a str"),
    (iter([1, 2]), {}, px.DataError, "does not give batches anew"),
    ({"x": np.ones(6), "y": np.ones(5)}, {"batch_size": 4}, px.DataError, r"source must be a tree of .*'y': \(5,\)"),
    (ONES, {"batch_size": 7, "drop_last": True}, px.DataError, "there is no batch"),
    (DataLoader(), {"batch_size": 4}, px.DataError, "source gives batches"),
    (ONES, {"batch_size": 6, "transform": lambda b: {"x": b["x"][1:]}}, px.DataError, "must start with the 6 rows"),
    (lambda: [np.ones(2), {"x": np.ones(2), "y": np.ones(3)}], {}, px.DataError, "batch number 2 of epoch 1"),
    (lambda: [np.ma.masked_equal(np.ones(2), 1)], {}, px.DataError, "leaves entries out"),
    (pd.Series(np.ones(6)), {"batch_size": 2}, px.DataError, r"by its labels, .*write \.to_numpy"),
    ([np.ones(2)], {}, px.DataError, "a list of batches is data for px.fit"),
    (ONES, {"batch_size": 2, "weights": np.arange(5)}, px.DataError, r"weights must be \(6,\) numbers"),
    (ONES, {"batch_size": 2, "weights": [-1, 1, 1, 1, 1, 1]}, px.DataError, "at least 0"),
    (ONES, {"batch_size": 2, "weights": np.ones(6), "shuffle": False}, px.DataError, "and come without shuffle=False"),
    (DataLoader(), {"threads": 2}, px.DataError, "leave batch_size and what follows"),
]


@pytest.mark.parametrize(("source", "options", "kind", "message"), REFUSED)
def test_loader_refuses_what_cannot_be_read(source: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        first(3, px.loader(source, **options).batches())
