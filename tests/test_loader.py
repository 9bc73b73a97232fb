"""Which rows are in which batch, where they lie, and the thread that reads them ahead."""

import gc
import itertools
import threading
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._fits import noisy
from tests._support import axis_on

NUM_ROWS = 23
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 3))
SOURCE = {"number": np.arange(NUM_ROWS), "x": X}


def rows_of(batch: Any) -> list[int]:
    return np.asarray(batch["number"]).tolist()


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_loader_gives_each_row_once_an_epoch_in_the_same_order_on_any_devices(devices: int) -> None:
    data = px.loader(SOURCE, 5, seed=3, axis=axis_on(devices, 1, "batch"))
    batches = list(data.epoch(1))
    assert [len(rows_of(batch)) for batch in batches] == [5, 5, 5, 5, 3]
    assert sorted(itertools.chain(*map(rows_of, batches))) == list(range(NUM_ROWS))
    alone = px.loader(SOURCE, 5, seed=3)
    assert [rows_of(batch) for batch in batches] == [alone.rows(5 + k).tolist() for k in range(5)]
    for batch in batches:
        assert (str(batch["x"].dtype), str(batch["number"].dtype)) == ("float32", "int32")
        np.testing.assert_array_equal(batch["x"], X[rows_of(batch)].astype("float32"))


def test_loader_never_changes_the_order_of_a_seed() -> None:
    """It is in checkpoints' promises: another order here makes every run resume with other rows."""
    data = px.loader(np.arange(10), 10, seed=1)
    assert data.rows(0).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]
    assert data.rows(1).tolist() == [0, 6, 5, 3, 4, 9, 7, 8, 2, 1]


@pytest.mark.parametrize("read_ahead", [0, 3])
def test_loader_gives_batches_from_a_number_on_as_in_the_whole(read_ahead: int) -> None:
    data = px.loader(SOURCE, 5, read_ahead=read_ahead, transform=lambda rows: rows)
    for start in (1, 4, 5, 13):
        whole, later = itertools.islice(data.batches(), start, start + 6), itertools.islice(data.batches(start), 6)
        assert list(map(rows_of, whole)) == list(map(rows_of, later))


@pytest.mark.parametrize(("size", "kind"), [(8, jax.Array), (16, jax.Array), (5, np.ndarray)])
def test_loader_lays_rows_that_divide_on_the_devices_and_others_on_the_host(size: int, kind: type) -> None:
    axis = axis_on(8, 1, "batch")
    batch = next(px.loader(SOURCE, size, axis=axis).batches())
    assert isinstance(batch["x"], kind)
    assert kind is np.ndarray or len(batch["x"].sharding.device_set) == 8
    state = px.TrainState.create({"w": np.ones(3, "float32")}, optax.sgd(0.1))
    found = px.eval_step(lambda params, batch: batch["x"] @ params["w"], axis=axis)(state, batch)
    np.testing.assert_allclose(float(found["loss"]), np.mean(np.asarray(batch["x"]).sum(1)), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_loader_lays_a_batch_where_the_mesh_in_force_says(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("batch", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        found = px.loader(SOURCE, 4).batches()
    x = next(found)["x"]
    assert x.sharding.device_set == set(mesh.devices.flat)
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 3)}


def test_loader_draws_rows_by_their_weights_the_same_from_any_batch_on() -> None:
    weights = np.array([0, 3, 1, 0, 4, 2, 0], float)
    data = px.loader(np.arange(7), 3, weights=weights, seed=5)
    drawn = [np.asarray(batch).tolist() for batch in itertools.islice(data.batches(), 3000)]
    assert list(map(len, drawn[:4])) == [3, 3, 1, 3]
    assert drawn[7:9] == [np.asarray(batch).tolist() for batch in itertools.islice(data.batches(7), 2)]
    assert drawn[100] == data.rows(100).tolist()
    shares = np.bincount(list(itertools.chain(*drawn)), minlength=7) / 7000
    np.testing.assert_allclose(shares, weights / 10, atol=0.025)  # four standard deviations
    assert not shares[weights == 0].any()


def test_loader_draws_anew_for_a_row_that_comes_twice() -> None:
    noise = next(px.loader(np.arange(3), 3, weights=[0, 1, 0], transform=noisy).batches())["noise"]
    assert len(set(np.asarray(noise).tolist())) == 3


def test_loader_makes_batches_by_threads_and_gives_them_in_order() -> None:
    """The first rows of four batches wait for each other."""
    together = threading.Barrier(4)

    class Slow(Rows):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row % 10 == 0:
                together.wait(30)
            return {"number": row}

    data = px.loader(Slow(), 10, shuffle=False, threads=4)
    assert list(itertools.chain(*map(rows_of, data.epoch(0)))) == list(range(40))
    shuffled = [list(map(rows_of, px.loader(SOURCE, 5, seed=2, threads=n).epoch(1))) for n in (1, 3)]
    assert shuffled[0] == shuffled[1]


class Rows:
    """Rows by number, which notes what was asked for; row 17 cannot be read."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == 17:
            raise OSError("bad sector")
        self.asked.append(row)
        return {"number": row}


def test_loader_keeps_wide_numbers_where_they_are_in_force() -> None:
    with jax.enable_x64(True):
        found = px.loader({"x": np.full(4, 2**40)}, 4).batches()
        assert next(found)["x"].tolist() == [2**40] * 4


def readers() -> int:
    return sum(thread.name.startswith("paraxis-read") for thread in threading.enumerate())


@pytest.mark.parametrize("read_ahead", [0, 4])
def test_loader_names_batch_and_row_of_an_error_of_the_source_in_its_place(read_ahead: int) -> None:
    found = px.loader(Rows(), 5, shuffle=False, read_ahead=read_ahead).batches(8)
    assert [len(rows_of(next(found))) for _ in range(3)] == [5, 5, 5]
    with pytest.raises(OSError, match=r"(?s)bad sector.*row 17.*batch number 4 of epoch 2"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)
    assert readers() == 0


def test_loader_reads_no_more_ahead_than_asked_for() -> None:
    source = Rows()
    found = px.loader(source, 2, shuffle=False, read_ahead=3).batches()
    next(found)
    before = -1
    while before < len(source.asked):  # until nothing moves
        before = len(source.asked)
        threading.Event().wait(0.05)
    assert source.asked == list(range(8))  # the batch taken and three
    found.close()


@pytest.mark.parametrize("use", [lambda data: next(data.batches()), lambda data: list(data.epoch(0))])
def test_loader_ends_its_thread_with_the_batches(use: Any) -> None:
    use(px.loader(np.arange(10), 2, transform=lambda rows: rows))
    gc.collect()
    assert readers() == 0


def test_loader_reads_small_batches_of_arrays_without_a_thread() -> None:
    for width, threads in ((3, 0), (2**18, 1)):
        found = px.loader(np.ones((4, width), "f"), 2).batches()
        assert (next(found).shape, readers()) == ((2, width), threads)
        found.close()
