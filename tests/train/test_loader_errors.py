"""What a loader refuses, and what it says."""

import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest

import paraxis as px

X = np.ones((6, 2))


class Rows:
    """Rows by number, out of a list."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


class IterableDataset:
    """PyTorch's base class of datasets that give rows one by one; those inherit a ``__getitem__``."""

    def __getitem__(self, row: int) -> Any:
        raise NotImplementedError


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Frame:
    """A table of pandas."""

    iloc = None
    shape = (3, 2)


def two_arguments(epoch: int, rank: int) -> Any: ...


SOURCES = [
    (Path("rows.npy"), r"source is a PosixPath.*np\.load"),
    ("rows.npy", r"source is a str, 'rows\.npy'; open the file"),
    ({}, r"source has no arrays, got \{\}"),
    (None, r"source has no arrays, got None"),
    ({"x": X, "n": 3}, r"source\['n'\] is a int, not an array \(num_rows, \.\.\.\).*np\.stack"),
    ([(np.ones(2), 0), (np.ones(2), 1)], r"source\[0\]\[1\] is a int, not an array"),
    ({"x": X, "y": np.ones(5)}, r"source\['y'\] has 5 rows, but source\['x'\] has 6"),
    ({"x": np.ones((0, 2))}, r"source has no rows; a loader needs at least one"),
    (Rows(), r"source, a Rows, has no rows"),
    (jax.random.split(jax.random.key(0), 4), r"source is of key<fry>, not of numbers.*row_keys"),
    (grain.MapDataset.range(4).repeat(), r"is endless; leave out its repeat\(\)"),
    (Frame(), r"source is a pandas Frame.*to_numpy\(\)"),
    (Stream(), r"a Stream, gives rows one by one; write .*DataLoader\(source, batch_size=32\)"),
    (iter([X]), r"source, a list_iterator, can be iterated only once.*px\.loader\(lambda epoch: read_batches"),
    (two_arguments, r"the function 'two_arguments', takes 2 arguments"),
    (7, r"source is a int, which has no rows"),
    (
        types.MappingProxyType({"x": X}),
        r"entries cannot be taken by number; pass a dict of them: px\.loader\(\{'x': so",
    ),
]


@pytest.mark.parametrize(("source", "message"), SOURCES, ids=lambda x: x[:24] if isinstance(x, str) else None)
def test_what_has_no_rows_is_refused(source: Any, message: str) -> None:
    with pytest.raises((px.DataError, px.ShapeError), match=message):
        px.loader(source, 2)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, r"batch_size is missing; source gives 6 rows by number: px\.loader\(source, 32\)"),
    ({"batch_size": 0}, r"batch_size must be an integer of at least 1, got 0"),
    ({"batch_size": 2.5}, r"batch_size must be an integer of at least 1, got 2\.5"),
    ({"batch_size": 7, "drop_last": True}, r"with drop_last and batch_size 7 there is no batch.*write batch_size=6"),
    ({"batch_size": 2, "seed": -1}, r"seed must be an integer of at least 0, got -1"),
    ({"batch_size": 2, "seed": 2**64}, r"seed must be below 2\*\*64"),
    ({"batch_size": 2, "seed": True}, r"seed must be an integer of at least 0, got True; write seed=0"),
    ({"batch_size": 2, "read_ahead": -1}, r"read_ahead must be an integer of at least 0, got -1"),
    ({"batch_size": 2, "transform": 3}, r"transform must be a function of a batch, got int"),
]


@pytest.mark.parametrize(("options", "message"), ARGUMENTS)
def test_a_malformed_argument_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(px.DataError, match=message):
        px.loader(X, **options)


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"shuffle": True}, {"drop_last": True}], ids=str)
def test_a_source_of_batches_is_not_put_in_other_batches(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(
        px.DataError, match=rf"source gives batches.* but {name} is {value}; write px\.loader\(source\)"
    ):
        px.loader(lambda: [X], **options)


def fails(batch: Any) -> Any:
    raise KeyError("mean")


READING: list[tuple[Any, dict[str, Any], str]] = [
    (Rows(np.ones(3), np.ones(3), np.ones(4)), {}, r"row of row 2 of the source is float64\(4,\), but that of row 0"),
    (Rows({"x": 1}, {"x": 1.5}), {}, r"row\['x'\] of row 1 of the source is float64\(\), but that of row 0 is int64"),
    (Rows({"x": 1}, {"y": 1}), {}, r"row 1 of the source is PyTreeDef.*'y'.*, but row 0 is PyTreeDef.*'x'"),
    (Rows({"x": "a"}, {"x": "b"}), {}, r"batch\['x'\] is of str, not of numbers.*transform=encode"),
    (Rows({"x": object()}, {"x": object()}), {}, r"batch\['x'\] is of object, not of numbers"),
    (
        grain.MapDataset.range(4).filter(lambda x: x > 1),
        {},
        r"row 0 of the source is None; a Grain dataset with a filt",
    ),
    (np.array(["a", "b"]), {}, r"batch is of <U1, not of numbers"),
    (np.array([1, 2**31]), {}, r"batch holds 2147483648 \(int64\), which int32 does not hold.*jax_enable_x64"),
    (X, {"transform": fails}, r"transform raised KeyError: 'mean'"),
    (X, {"transform": lambda x: x[:1]}, r"transform returned batch with 1 rows for the 6 it was given; .*px.loader\("),
    (X, {"transform": lambda x: {"x": x[x[:, 0] < 0]}}, r"transform returned batch\['x'\] with 0 rows for the 6 "),
    (X, {"transform": lambda x: None}, "transform returned None, not a batch; end it with the line `return batch`"),
    (X, {"transform": lambda x: {}}, r"transform returned \{\}, not a batch"),
    (X, {"transform": lambda x: {"x": x, "mean": x.mean()}}, r"batch\['mean'\] for a row alone"),
    (
        np.arange(6.0),
        {"transform": lambda x: x - x.mean()},
        r"another batch for a row alone.*def transform\(batch, rand",
    ),
    (
        np.arange(6.0),
        {"transform": lambda x: x if len(x) > 1 else (x,)},
        r"transform gives PyTreeDef\(\*\) for several",
    ),
]


@pytest.mark.parametrize(("source", "options", "message"), READING)
def test_what_is_no_batch_is_refused_with_its_number(source: Any, options: dict[str, Any], message: str) -> None:
    data = px.loader(source, 6, shuffle=False, **options)
    with pytest.raises((px.DataError, px.ShapeError), match=rf"px\.loader: batch number 1 of epoch 1: .*(?:{message})"):
        next(data.batches())


def lengthless() -> Iterator[Any]:
    yield {"x": X, "y": np.ones(6)}
    yield {"x": X, "y": np.ones(5)}


def shorter(epoch: int) -> list[Any]:
    return [X] * (3 - epoch)


class Sized:
    """Three batches, whatever it says."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter([X] * 3)


STREAMS: list[tuple[Any, str]] = [
    (lengthless, r"batch number 2 of epoch 1: batch\['y'\] has 5 rows, but batch\['x'\] has 6"),
    (lambda: [X, (X, 3)], r"batch number 2 of epoch 1: batch\[1\] is a single int, without rows.*\.batch\(32\)"),
    (lambda: [X, X[:0]], r"batch number 2 of epoch 1: the source gave a batch without rows"),
    (lambda: [X, {}], r"batch number 2 of epoch 1: the source gave \{\}, which has no arrays"),
    (
        grain.MapDataset.range(4).to_iter_dataset(),
        r"batch number 1 of epoch 1: batch is a single .*int.*, without rows",
    ),
    (
        lambda: 3,
        r"batch number 1 of epoch 1: beginning to read the source raised TypeError: 'int' object is not",
    ),
    (lambda: (1 // 0 for _ in "ab"), r"batch number 1 of epoch 1: reading it from the source raised ZeroDivisionError"),
    (lambda: [np.ones((2, 0), object)], r"batch number 1 of epoch 1: batch is of object, not of numbers"),
    (Sized(2), r"the source has more batches in epoch 1, but 2 by its len\(\), by .*px\.loader\(lambda: source\)"),
    (Sized(4), r"the source has 3 batches in epoch 1, but 4 by its len\(\), by which training resumes"),
    (lambda: iter(()), r"the source has no batch in epoch 1; if it can be iterated only once"),
    (shorter, r"the source has 2 batches in epoch 2, but 3 by its len\(\), by which training resumes"),
]


@pytest.mark.parametrize(("source", "message"), STREAMS)
def test_what_is_no_batch_of_a_source_of_batches_is_refused(source: Any, message: str) -> None:
    found = px.loader(source).batches()
    with pytest.raises((px.DataError, px.ShapeError), match=message):
        list(itertools.islice(found, 10))


def test_the_number_of_batches_may_be_unknown() -> None:
    with pytest.raises(px.DataError, match="does not say how many batches an epoch has; count steps instead of epochs"):
        len(px.loader(lengthless))


def test_which_epoch_is_meant_must_be_said() -> None:
    with pytest.raises(px.DataError, match=r"`for batch in data\.epoch\(0\)`, or `data\.batches\(\)`"):
        list(px.loader(X, 2))


def test_a_source_of_batches_does_not_tell_its_rows() -> None:
    with pytest.raises(px.DataError, match="does not tell which rows are in them"):
        px.loader(lengthless).rows(0)


@pytest.mark.parametrize(
    "call", [lambda data: data.batches(-1), lambda data: data.epoch(1.5), lambda data: data.rows("a")]
)
def test_a_number_that_is_none_is_refused(call: Any) -> None:
    with pytest.raises(px.DataError, match=r"(start|number) must be an integer of at least 0, got"):
        call(px.loader(X, 2))


def test_an_axis_that_is_none_is_refused() -> None:
    with pytest.raises(px.AxisError, match=r"px\.loader: axis must be a name, or .*, got 8; write axis='batch'"):
        px.loader(X, 2, axis=8)  # type: ignore[arg-type]
    with pytest.raises(px.AxisError, match=r"without at_once, got Axis\('batch', 1, at_once=2\).* microbatches=4\)"):
        px.loader(X, 2, axis=px.Axis("batch", 1, at_once=2))


def test_an_axis_that_cannot_be_placed_is_refused_before_anything_is_read() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    with pytest.raises(px.AxisError, match="'batch'"):
        px.loader(X, 2, axis=px.Axis("batch", 1, mesh=mesh)).batches()


def test_a_batch_that_is_taken_for_its_arrays_says_how_to_get_at_them():
    batch = next(px.loader((X, X[:, 0]), 5, shuffle=False).batches())
    with pytest.raises(TypeError, match=r"no item 'x'; write batch\.rows\(\)"):
        _ = batch["x"]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError, match=r"`x, y = batch\.rows\(\)`"):
        _, _ = batch  # pyright: ignore[reportGeneralTypeIssues]
    x, y = batch.rows()  # of the padding on eight devices, nothing
    assert (x.shape, y.shape) == ((5, 2), (5,))
