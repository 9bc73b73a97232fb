"""A loss or a gradient that is not finite is caught at its step, and nothing after it counts."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests._support import axis_on
from tests.train._fits import arrays, batches, bits, by_hand, data, lines, loss, start


def spoilt(rows: Any) -> dict[str, np.ndarray]:
    found = arrays()
    found["x"][rows, 1] = np.nan
    return found


@pytest.mark.parametrize("devices", [1, 8])
def test_the_step_the_batch_and_the_rows_are_named_and_the_state_before_is_kept(devices: int, tmp_path: Path) -> None:
    """The fourth batch has half as many rows; started again, it meets the same, and with better data it goes on."""
    axis, rows = axis_on(devices, 1, "batch"), data().rows(3)
    own, bad = px.train_step(loss, axis=axis), px.loader(spoilt(rows[0]), 16, axis=axis, seed=1)
    paths: dict[str, Any] = {"checkpoint": tmp_path / "runs", "log": tmp_path / "log", "progress": False}
    listed = re.escape(f"(loss nan), of rows {', '.join(map(str, rows))}: data.rows(3).")
    found: Any = None
    for _ in range(2):
        words = rf"in step 4, number 4 of epoch 1 {listed} .*batch\['x'\] in rows {rows[0]}\. Mend"
        with pytest.raises(px.NonFiniteError, match=words) as caught:
            px.fit(start(), own, bad, steps=9, **paths)
        assert [line["step"] for line in lines(tmp_path / "log")[1:]] == [1, 2, 3]
        found = caught.value.state
    expected = list(by_hand(batches(data(), range(3))))[-1]
    assert (int(found.step), bool(found.ok), px.Checkpoints(tmp_path / "runs").steps) == (3, True, (3,))
    np.testing.assert_allclose(found.params["w"], expected[0]["w"], rtol=1e-5)
    assert bits(px.Checkpoints(tmp_path / "runs").restore(start()).tree) == bits(found)
    np.testing.assert_array_equal(caught.value.batch["x"], spoilt(rows[0])["x"][rows])
    better = px.loader(arrays(), 16, axis=axis, seed=1)
    whole = px.fit(start(), own, better, steps=9, progress=False)
    assert bits(px.fit(start(), own, better, steps=9, **paths).state) == bits(whole.state)


def test_a_gradient_that_is_not_finite_is_caught_where_the_loss_is(tmp_path: Path) -> None:
    def root(params: Any, batch: Any) -> Any:
        return jnp.sqrt(jnp.sum((params["w"] * batch["x"]) ** 2))

    ones, zeros = {"x": np.ones((4, 3), np.float32)}, {"x": np.zeros((4, 3), np.float32)}
    state = px.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.01))
    words = (
        r"the gradient is not finite in step 3, .* \(loss 0\).* All values of the batch are finite, so it is the model"
    )
    with pytest.raises(px.NonFiniteError, match=words) as caught:
        px.fit(state, px.train_step(root), [ones, ones, zeros, ones], epochs=3, log=tmp_path / "log", progress=False)
    # d/dw sqrt(12 w²) is sqrt(12) in the direction of w, three times 2 / sqrt(3): 0.01 of that, twice.
    np.testing.assert_allclose(caught.value.state.params["w"], 1 - 0.01 * 2 * np.full(3, 2 / np.sqrt(3)), rtol=1e-5)
    assert caught.value.batch is zeros


def test_the_rows_are_named_that_have_values_which_are_not_finite() -> None:
    x = np.ones((30, 2, 2))
    x[[3, 7], 1] = [np.inf, np.nan]
    y = jnp.ones(30, jnp.bfloat16).at[jnp.arange(1, 26)].set(-jnp.inf)
    batch = {"x": x, "y": y, "z": np.ones(30), "n": np.arange(30), "scale": np.float32(np.nan), "name": np.array("a")}
    listed = ", ".join(map(str, range(1, 21)))
    words = f"batch['scale']; batch['x'] in rows 3, 7 of the batch; batch['y'] in rows {listed}, … (25 in all) of the"
    with pytest.raises(px.NonFiniteError, match=re.escape(words)):
        px.fit(0, lambda state, batch: (state + 1, {"loss": np.nan}), [batch], epochs=1, progress=False)
