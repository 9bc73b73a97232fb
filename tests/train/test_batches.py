"""No public face: a step shows none of the padding, the turns and the copies that it lays rows out with.

Rows laid out over devices: all there, in order, where they should be.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis._axes import placing
from paraxis.train import _batches
from tests._support import axis_on


def place(devices: int, size: int, turns: int = 1) -> Any:
    return placing.on_auto(placing.place(axis_on(devices, 1))).holding(size, turns=turns)


def whole(size: int) -> dict[str, Any]:
    return {"x": np.arange(size * 3.0).reshape(size, 3), "n": np.arange(size), "temperature": np.float32(2)}


@pytest.mark.parametrize(("devices", "size"), [(1, 5), (2, 5), (3, 8), (8, 3), (8, 16)])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_the_real_rows_come_first_and_padding_repeats_the_last(devices: int, size: int, turns: int, of: Any) -> None:
    laid_out = _batches.lay_out(jax.tree.map(of, whole(size)), place(devices, size, turns))
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
    laid_out = _batches.lay_out(whole(size), place(devices, size, turns if laid_out_for == "turns" else 1))
    for index in range(turns):
        numbers = np.arange(index, size, turns)
        taken = jax.jit(_batches.Batch.turn, static_argnums=(2, 3))(laid_out, index, turns, len(numbers))
        np.testing.assert_array_equal(taken["n"], numbers)
        np.testing.assert_array_equal(taken["x"], whole(size)["x"][numbers])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_buffer_may_be_used_again_at_once(devices: int) -> None:
    buffer = np.ones((64, 1024), "float32")
    laid_out = _batches.lay_out(buffer, place(devices, 64))
    buffer[:] = 0
    assert float(jnp.min(laid_out.tree)) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_an_aligned_buffer_may_be_used_again_at_once(devices: int) -> None:
    raw = np.ones(64 * 1024 + 16, "float32")
    start = -raw.ctypes.data % 64 // 4
    buffer = raw[start : start + 64 * 1024].reshape(64, 1024)
    laid_out = _batches.lay_out(buffer, place(devices, 64))
    buffer[:] = 0
    assert float(jnp.min(laid_out.tree)) == 1
