"""Which rows are in which batch, and where they lie."""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._support import axis_on

NUM_ROWS = 23
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 3))
SOURCE = {"number": np.arange(NUM_ROWS), "x": X}


def rows_of(batch: Any) -> list[int]:
    return np.asarray(batch["number"]).tolist()


def test_every_row_comes_once_in_an_epoch_with_its_values() -> None:
    data = px.loader(SOURCE, 5, seed=3)
    batches = list(data.epoch(0))
    assert [len(rows_of(batch)) for batch in batches] == [5, 5, 5, 5, 3]
    assert sorted(itertools.chain(*map(rows_of, batches))) == list(range(NUM_ROWS))
    for batch in batches:
        assert (str(batch["x"].dtype), str(batch["number"].dtype)) == ("float32", "int32")
        np.testing.assert_array_equal(batch["x"], X[rows_of(batch)].astype("float32"))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_devices_do_not_change_the_order(devices: int) -> None:
    data = px.loader(SOURCE, 5, seed=3, axis=axis_on(devices, 1, "batch"))
    other = px.loader(SOURCE, 5, seed=3)
    assert [rows_of(batch) for batch in data.epoch(1)] == [other.rows(5 + k).tolist() for k in range(5)]


def test_the_order_of_a_seed_never_changes() -> None:
    """It is in checkpoints' promises: another order here makes every run resume with other rows."""
    data = px.loader(np.arange(10), 10, seed=1)
    assert data.rows(0).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert data.rows(1).tolist() == [0, 6, 5, 3, 4, 9, 7, 8, 2, 1]


@pytest.mark.parametrize("start", [0, 1, 4, 5, 13])
@pytest.mark.parametrize("read_ahead", [0, 3])
def test_beginning_later_is_skipping(start: int, read_ahead: int) -> None:
    data = px.loader(SOURCE, 5, read_ahead=read_ahead)
    whole, later = itertools.islice(data.batches(), start, start + 6), itertools.islice(data.batches(start), 6)
    assert list(map(rows_of, whole)) == list(map(rows_of, later))


@pytest.mark.parametrize(("size", "kind"), [(8, jax.Array), (16, jax.Array), (5, np.ndarray)])
def test_rows_that_divide_by_the_devices_lie_there_and_others_on_the_host(size: int, kind: type) -> None:
    axis = axis_on(8, 1, "batch")
    batch = next(px.loader(SOURCE, size, axis=axis).batches())
    assert isinstance(batch["x"], kind)
    assert kind is np.ndarray or len(batch["x"].sharding.device_set) == 8
    state = px.TrainState.create({"w": np.ones(3, "float32")}, optax.sgd(0.1))
    found = px.eval_step(lambda params, batch: batch["x"] @ params["w"], axis=axis)(state, batch)
    np.testing.assert_allclose(float(found["loss"]), np.mean(np.asarray(batch["x"]).sum(1)), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_lies_where_the_mesh_in_force_says(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("batch", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        found = px.loader(SOURCE, 4).batches()
    x = next(found)["x"]
    assert x.sharding.device_set == set(mesh.devices.flat)
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 3)}


class Counting:
    """Rows by number, which notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.asked.append(row)
        return {"number": row}


def test_a_row_is_read_once_also_for_several_devices_and_padding() -> None:
    counting, mesh = Counting(), Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "model"))
    data = px.loader(counting, 5, axis=px.Axis("batch", 1, mesh=mesh), read_ahead=0)
    assert rows_of(next(data.batches())) == data.rows(0).tolist() == counting.asked


class Watched(np.memmap):
    taken: list[int] = []  # noqa: RUF012 - shared by its views

    def __getitem__(self, index: Any) -> Any:
        Watched.taken += np.asarray(index).tolist()
        return super().__getitem__(index)


def test_of_a_file_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", X)
    data = px.loader(np.load(tmp_path / "rows.npy", mmap_mode="r").view(Watched), 4, read_ahead=0)
    np.testing.assert_array_equal(next(data.batches()), X[data.rows(0)].astype("float32"))
    assert Watched.taken == sorted(data.rows(0))


def test_the_same_loader_is_described_alike_and_another_one_is_not() -> None:
    same = px.loader(SOURCE, 5, seed=3).describe()
    assert same == px.loader(SOURCE, 5, seed=3, axis=axis_on(2, 1), read_ahead=0).describe()
    others = [
        px.loader(SOURCE, 6, seed=3),
        px.loader(SOURCE, 5, seed=4),
        px.loader(SOURCE, 5, seed=3, shuffle=False),
        px.loader(SOURCE, 5, seed=3, drop_last=True),
        px.loader({"number": np.arange(22), "x": X[:22]}, 5, seed=3),
        px.loader({"number": np.arange(NUM_ROWS)}, 5, seed=3),
    ]
    assert all(same != other.describe() for other in others)


def test_wide_numbers_stay_wide_where_they_are_in_force() -> None:
    with jax.enable_x64(True):
        found = px.loader({"x": np.full(4, 2**40)}, 4).batches()
        assert next(found)["x"].tolist() == [2**40] * 4
    (narrow,) = px.loader({"x": np.ones(4)}, 4).epoch(0)
    assert narrow["x"].dtype == np.float32
