"""Where rows and batches may come from."""

import itertools
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest

import paraxis as px


def numbers(batch: Any) -> list[int]:
    """The real rows of a batch whose tree is one array, or has one named ``number``."""
    return np.asarray(batch["number"] if isinstance(batch, dict) else batch).tolist()


class Tensor:
    """What a loader knows of a PyTorch tensor."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)
        self.shape = self.value.shape
        self.dtype = f"torch.{self.value.dtype}"

    def __getitem__(self, index: Any) -> "Tensor":
        return Tensor(self.value[index])

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> np.ndarray:
        return self.value

    def __array__(self, *_: Any) -> np.ndarray:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class TensorDataset:
    """A map-style PyTorch dataset: a row is a tuple of a tensor and a number."""

    def __init__(self, num_rows: int) -> None:
        self.x = np.random.default_rng(0).normal(size=(num_rows, 2)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return Tensor(self.x[row]), row


class SeveralAtOnce(TensorDataset):
    """As newer PyTorch datasets: all rows of a batch in one call."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [super(SeveralAtOnce, self).__getitem__(row) for row in rows]

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("one by one")


class DataLoader:
    """A PyTorch ``DataLoader``: batches in an order of its own, another one at each pass."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.draw = np.random.default_rng(7)
        self.open = 0

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = self.draw.permutation(len(self.dataset))
        self.open += 1
        try:
            for k in range(len(self)):
                rows = order[k * self.batch_size : (k + 1) * self.batch_size]
                yield {"x": Tensor(self.dataset.x[rows]), "number": Tensor(rows)}
        finally:
            self.open -= 1


@pytest.mark.parametrize("kind", [TensorDataset, SeveralAtOnce])
def test_a_dataset_of_tensors_gives_its_rows(kind: type[TensorDataset]) -> None:
    dataset = kind(10)
    data = px.loader(dataset, 4)
    for k, batch in enumerate(data.epoch(0)):
        x, row = batch
        assert np.asarray(row).tolist() == data.rows(k).tolist()
        np.testing.assert_array_equal(x, dataset.x[data.rows(k)])


def test_a_data_loader_keeps_its_batches_and_its_order() -> None:
    data = px.loader(DataLoader(TensorDataset(10), 4))
    twin = DataLoader(TensorDataset(10), 4)
    expected = [batch["number"].value.tolist() for _ in range(2) for batch in twin]
    found = data.batches()
    assert len(data) == 3
    assert [numbers(next(found)) for _ in range(6)] == expected


def test_resuming_a_data_loader_goes_through_what_was_before() -> None:
    """With PyTorch's generator seeded alike, the order of a later pass depends on the passes before."""
    twin = DataLoader(TensorDataset(10), 4)
    expected = [batch["number"].value.tolist() for _ in range(3) for batch in twin][5:]
    found = px.loader(DataLoader(TensorDataset(10), 4)).batches(5)
    assert [numbers(next(found)) for _ in range(4)] == expected


def test_a_source_may_use_its_memory_again() -> None:
    buffer = np.zeros((64, 1024), np.float32)  # large enough for JAX to take it as it is

    def batches() -> Iterator[np.ndarray]:
        for k in range(3):
            buffer[:] = k
            yield buffer

    assert [float(batch.mean()) for batch in px.loader(batches, read_ahead=3).epoch(0)] == [0, 1, 2]


def grain_rows() -> Any:
    return grain.MapDataset.range(10).seed(3)


def test_a_grain_dataset_has_the_same_rows_and_other_random_numbers_in_each_epoch() -> None:
    dataset = grain_rows().random_map(lambda x, rng: {"number": x, "noise": rng.normal()})
    data = px.loader(dataset, 10)
    first, second = (next(data.batches(epoch)) for epoch in (0, 1))
    assert sorted(np.asarray(first["number"])[:10]) == sorted(np.asarray(second["number"])[:10]) == list(range(10))
    noise = [dict(zip(t["number"].tolist(), t["noise"].tolist(), strict=True)) for t in (first, second)]
    assert all(noise[0][row] != noise[1][row] for row in range(10))
    assert next(data.batches(1))["noise"].tolist() == second["noise"].tolist()


def test_a_grain_dataset_that_shuffles_itself_keeps_its_order() -> None:
    dataset = grain_rows().shuffle()
    data = px.loader(dataset, 5, shuffle=False)
    found = data.batches()
    assert list(itertools.chain(*(numbers(next(found)) for _ in range(4)))) == [dataset[i] for i in range(20)]


def test_a_function_of_the_epoch_is_asked_for_the_epoch_in_question_only() -> None:
    asked: list[int] = []

    def source(epoch: int) -> list[np.ndarray]:
        asked.append(epoch)
        return [np.full(2, 10 * epoch + k) for k in range(3)]

    data = px.loader(source)
    asked.clear()
    found = data.batches(3 * 4 + 1)
    assert [numbers(next(found)) for _ in range(3)] == [[41, 41], [42, 42], [50, 50]]
    found.close()
    assert min(asked) == 4
    assert [numbers(batch) for batch in data.epoch(2)] == [[20, 20], [21, 21], [22, 22]]


def test_epochs_of_unknown_length_are_gone_through() -> None:
    def source(epoch: int) -> Iterator[np.ndarray]:
        return (np.full(1, 10 * epoch + k) for k in range(epoch + 1))

    found = px.loader(source).batches(2)
    assert [numbers(next(found)) for _ in range(5)] == [[11], [20], [21], [22], [30]]


def test_a_transform_sees_all_rows_of_a_batch_at_once() -> None:
    def encode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"number": batch["number"], "length": np.array([len(text) for text in batch["text"]])}

    class Texts:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, row: int) -> dict[str, Any]:
            return {"number": row, "text": "x" * row}

    for batch in px.loader(Texts(), 4, transform=encode).epoch(0):
        assert batch["length"].tolist() == batch["number"].tolist()


def noisy(batch: np.ndarray, random: Any) -> dict[str, np.ndarray]:
    return {"number": batch, "noise": np.array([generator.normal() for generator in random])}


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_what_a_transform_draws_for_a_row_depends_on_the_seed_the_epoch_and_the_row(batch_size: int) -> None:
    def drawn(size: int, epoch: int, seed: int = 0) -> dict[int, float]:
        found = {}
        for batch in px.loader(np.arange(10), size, seed=seed, transform=noisy).epoch(epoch):
            found |= dict(zip(numbers(batch), batch["noise"].tolist(), strict=False))
        return found

    assert drawn(batch_size, 1) == drawn(3, 1)
    all_drawn = [*drawn(batch_size, 0).values(), *drawn(batch_size, 1).values(), *drawn(batch_size, 0, 1).values()]
    assert len(set(all_drawn)) == 30


def mixed_up(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mixup: each row with another one of its batch."""
    return batch | {"x": (batch["x"] + batch["x"][::-1]) / 2}


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_in_one_process_a_transform_may_mix_the_rows_of_a_batch(read_ahead: int) -> None:
    x = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
    data = px.loader({"x": x, "number": np.arange(23)}, 8, transform=mixed_up, read_ahead=read_ahead)
    for number, batch in enumerate(data.epoch(0)):
        rows = x[data.rows(number)]
        np.testing.assert_array_equal(batch["x"], (rows + rows[::-1]) / 2)


def one_row_less(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x[1:] for name, x in batch.items()}


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: px.loader("rows.npy", 4), px.DataError, "source is a str"),
        (lambda: px.loader(iter([1, 2])), px.DataError, "does not give batches anew"),
        (
            lambda: px.loader({"x": np.ones(6), "y": np.ones(5)}, 4),
            px.ShapeError,
            r"source\['y'\] has 5 rows where others have 6",
        ),
        (lambda: px.loader({"x": np.ones(6), "y": 3}, 4), px.DataError, r"source\['y'\] is a int, not an array"),
        (lambda: px.loader(np.ones(6)), px.DataError, "batch_size must be an integer"),
        (lambda: px.loader(np.ones(6), 7, drop_last=True), px.DataError, "there is no batch"),
        (lambda: px.loader(DataLoader(TensorDataset(6), 2), 4), px.DataError, "source gives batches"),
        (lambda: px.loader(np.ones(6), 4, seed=-1), px.DataError, "seed must be an integer"),
    ],
)
def test_what_cannot_be_read_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        ({"x": np.full(6, 2**40)}, {"batch_size": 6}, px.DataError, "holds 1099511627776"),
        ({"x": np.array(["a"] * 6)}, {"batch_size": 6}, px.DataError, "not of numbers"),
        ({"x": np.ones(6)}, {"batch_size": 6, "transform": one_row_less}, px.ShapeError, "must start with the 6 rows"),
        (
            {"x": np.ones(6)},
            {"batch_size": 6, "transform": lambda batch: None},
            px.DataError,
            "transform returned None",
        ),
        (lambda: [np.ones(2), {"x": np.ones(2), "y": np.ones(3)}], {}, px.ShapeError, "batch number 2 of epoch 1"),
        (list, {}, px.DataError, "source has no batches in epoch 1"),
    ],
)
def test_what_is_no_batch_is_refused_with_its_number(
    source: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    found = px.loader(source, **options).batches()
    with pytest.raises(kind, match=message):
        [next(found) for _ in range(3)]
