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


def rows_of(batch: Any) -> list[int]:
    """The row numbers of a batch of ``source``."""
    return np.asarray(batch["number"]).tolist()


def source(num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(num_rows, 3))
    return {"number": np.arange(num_rows), "x": x}


def test_every_row_comes_once_in_an_epoch() -> None:
    data = px.loader(source(), 5, seed=3)
    batches = [rows_of(batch) for batch in data.epoch(0)]
    assert len(data) == 5
    assert [len(rows) for rows in batches] == [5, 5, 5, 5, 3]
    assert sorted(itertools.chain(*batches)) == list(range(NUM_ROWS))


def test_a_row_keeps_its_values() -> None:
    values = source()
    for batch in px.loader(values, 8).epoch(0):
        rows = rows_of(batch)
        assert batch["x"].dtype == np.float32
        assert batch["number"].dtype == np.int32
        np.testing.assert_array_equal(batch["x"], values["x"][rows].astype(np.float32))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_devices_do_not_change_the_order(devices: int) -> None:
    data = px.loader(source(), 5, seed=3, axis=axis_on(devices, 1, "batch"))
    other = px.loader(source(), 5, seed=3)
    assert [rows_of(batch) for batch in data.epoch(1)] == [other.rows(5 + k).tolist() for k in range(5)]


def test_the_order_of_a_seed_never_changes() -> None:
    """It is in checkpoints' promises: another order here makes every run resume with other rows."""
    data = px.loader(source(10), 10, seed=1)
    assert data.rows(0).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert data.rows(1).tolist() == [0, 6, 5, 3, 4, 9, 7, 8, 2, 1]


@pytest.mark.parametrize("start", [0, 1, 4, 5, 13])
@pytest.mark.parametrize("read_ahead", [0, 3])
def test_beginning_later_is_skipping(start: int, read_ahead: int) -> None:
    data = px.loader(source(), 5, read_ahead=read_ahead)
    whole, later = data.batches(), data.batches(start)
    for _ in range(start):
        next(whole)
    assert [rows_of(next(whole)) for _ in range(6)] == [rows_of(next(later)) for _ in range(6)]


@pytest.mark.parametrize(("size", "kind"), [(8, jax.Array), (16, jax.Array), (5, np.ndarray)])
def test_rows_that_divide_by_the_devices_lie_there_and_others_on_the_host(size: int, kind: type) -> None:
    batch = next(px.loader(source(), size, axis=axis_on(8, 1, "batch")).batches())
    assert isinstance(batch["x"], kind)
    assert batch["x"].shape == (size, 3)
    if kind is jax.Array:
        assert len(batch["x"].sharding.device_set) == 8
    state = px.TrainState.create({"w": np.ones(3, "float32")}, optax.sgd(0.1))
    found = px.eval_step(lambda params, batch: batch["x"] @ params["w"], axis=axis_on(8, 1, "batch"))(state, batch)
    np.testing.assert_allclose(float(found["loss"]), np.mean(np.asarray(batch["x"]).sum(1)), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_lies_where_the_mesh_in_force_says(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("batch", "model"), axis_types=(kind,) * 2)
    data = px.loader(source(), 4)
    with jax.set_mesh(mesh):
        found = data.batches()
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
    counting = Counting()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "model"))
    data = px.loader(counting, 5, axis=px.Axis("batch", 1, mesh=mesh), read_ahead=0)
    batch = next(data.batches())
    assert counting.asked == data.rows(0).tolist() == rows_of(batch)


def test_of_a_file_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", source()["x"])

    class Watched(np.memmap):
        taken: list[int] = []  # noqa: RUF012 - shared by its views

        def __getitem__(self, index: Any) -> Any:
            Watched.taken += np.asarray(index).tolist()
            return super().__getitem__(index)

    rows = np.load(tmp_path / "rows.npy", mmap_mode="r").view(Watched)
    data = px.loader(rows, 4, read_ahead=0)
    batch = next(data.batches())
    assert Watched.taken == sorted(data.rows(0))
    np.testing.assert_array_equal(batch, source()["x"][data.rows(0)].astype(np.float32))


def test_the_same_loader_is_described_alike_and_another_one_is_not() -> None:
    same = px.loader(source(), 5, seed=3).describe()
    assert same == px.loader(source(), 5, seed=3, axis=axis_on(2, 1), read_ahead=0).describe()
    others = [
        px.loader(source(), 6, seed=3),
        px.loader(source(), 5, seed=4),
        px.loader(source(), 5, seed=3, shuffle=False),
        px.loader(source(), 5, seed=3, drop_last=True),
        px.loader(source(22), 5, seed=3),
        px.loader({"number": np.arange(NUM_ROWS)}, 5, seed=3),
    ]
    assert all(same != other.describe() for other in others)


def test_wide_numbers_stay_wide_where_they_are_in_force() -> None:
    with jax.enable_x64(True):
        found = px.loader({"x": np.full(4, 2**40)}, 4).batches()
        assert next(found)["x"].tolist() == [2**40] * 4
    (narrow,) = px.loader({"x": np.ones(4)}, 4).epoch(0)
    assert narrow["x"].dtype == np.float32
