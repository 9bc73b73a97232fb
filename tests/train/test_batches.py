"""Rows laid out over devices: all there, in order, where they should be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis._core import batches, layout
from tests._support import axis_on


def place(devices: int, size: int) -> Any:
    return batches.on_auto(layout.place(axis_on(devices, size)))


def whole(size: int) -> dict[str, Any]:
    return {"x": np.arange(size * 3.0).reshape(size, 3), "n": np.arange(size), "temperature": np.float32(2)}


@pytest.mark.parametrize(("devices", "size"), [(1, 5), (2, 5), (3, 8), (8, 3), (8, 16)])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_the_real_rows_come_first_and_padding_repeats_the_last(devices: int, size: int, turns: int, of: Any) -> None:
    laid_out = batches.lay_out(jax.tree.map(of, whole(size)), place(devices, size), turns=turns)
    num_padded = len(laid_out.tree["n"])
    assert (num_padded % (devices * turns), num_padded - size < devices * turns) == (0, True)
    np.testing.assert_array_equal(laid_out.tree["n"], np.minimum(np.arange(num_padded), size - 1))
    np.testing.assert_array_equal(laid_out.tree["x"][:size], whole(size)["x"])
    assert laid_out.tree["x"].dtype == jnp.float32
    assert float(laid_out.tree["temperature"]) == 2
    assert {s.data.shape for s in laid_out.tree["x"].addressable_shards} == {(num_padded // devices, 3)}
    np.testing.assert_array_equal(jax.jit(lambda b: b.rows()["n"])(laid_out), np.arange(size))


@pytest.mark.parametrize(("devices", "size", "turns"), [(8, 13, 3), (2, 16, 4), (1, 7, 7)])
@pytest.mark.parametrize("laid_out_for", [1, "turns"])
def test_turns_take_every_row_once(devices: int, size: int, turns: int, laid_out_for: Any) -> None:
    """Also out of a batch that was laid out for another number of them."""
    laid_out = batches.lay_out(whole(size), place(devices, size), turns=turns if laid_out_for == "turns" else 1)
    for index in range(turns):
        numbers = np.arange(index, size, turns)
        taken = jax.jit(batches.Batch.turn, static_argnums=(2, 3))(laid_out, index, turns, len(numbers))
        np.testing.assert_array_equal(taken["n"], numbers)
        np.testing.assert_array_equal(taken["x"], whole(size)["x"][numbers])


def test_a_reader_is_asked_once_for_the_rows_of_this_process() -> None:
    asked = []

    def reader(numbers: np.ndarray) -> Any:
        asked.append(numbers)
        return {"n": numbers * 2}

    laid_out = batches.read(reader, place(8, 13))
    assert [list(numbers) for numbers in asked] == [list(range(13))]
    np.testing.assert_array_equal(laid_out.tree["n"][:13], 2 * np.arange(13))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_buffer_may_be_used_again_at_once(devices: int) -> None:
    buffer = np.ones((64, 1024), "float32")
    laid_out = batches.lay_out(buffer, place(devices, 64))
    buffer[:] = 0
    assert float(jnp.min(laid_out.tree)) == 1


def test_keys_and_arrays_on_other_devices_are_rows_too() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 5), jax.devices()[3])
    laid_out = batches.lay_out(keys, place(2, 5))
    np.testing.assert_array_equal(jax.random.key_data(laid_out.tree)[:5], jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, px.ShapeError, r"step: batch\['y'\] has 4 rows, batch\['x'\] has 3"),
        ({"x": np.ones((0, 2))}, px.DataError, "step: the batch has no rows"),
        ({"rate": 1.0}, px.DataError, "step: the batch has no rows"),
        (
            {"x": [[1.0, 2.0]] * 8},
            px.ShapeError,
            r"batch\['x'\] is a list of numbers, not an array; write np",
        ),
        ({"x": np.array(["a", "b"])}, px.ShapeError, r"step: batch\['x'\] is <U1, not numbers"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        batches.num_rows("step", batch)
