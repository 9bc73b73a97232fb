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
from tests.train._fits import arrays, batches, bits, by_hand, data, lines, loss, start, step


def spoilt(rows: Any) -> dict[str, np.ndarray]:
    found = arrays()
    found["x"] = found["x"].copy()
    found["x"][rows, 1] = np.nan
    return found


def test_the_step_the_batch_and_the_rows_are_named_and_the_state_before_is_kept(tmp_path: Path) -> None:
    bad = batches(data(), range(8))
    bad[6] = {name: x[data().rows(6)] for name, x in spoilt(data().rows(6)[2]).items()}
    words = r"the loss is not finite in step 7, number 3 of epoch 2 \(loss nan\)\."
    with pytest.raises(px.NonFiniteError, match=words):
        px.fit(start(), step, lambda epoch: bad[4 * epoch : 4 * epoch + 4], epochs=2, progress=False)
    # A loader knows the rows.
    row = int(data().rows(2)[0])
    with pytest.raises(px.NonFiniteError) as caught:
        px.fit(
            start(),
            step,
            px.loader(spoilt(row), 16, axis=axis_on(1, 1, "batch"), seed=1),
            epochs=2,
            checkpoint=tmp_path,
            progress=False,
        )
    rows = data().rows(2)
    listed = ", ".join(map(str, rows))
    assert f"in step 3, number 3 of epoch 1 (loss nan), of rows {listed}: data.rows(2)." in str(caught.value)
    assert f"batch['x'] in rows {row}. Mend" in str(caught.value)
    params, opt_state, _ = list(by_hand(batches(data(), range(2))))[-1]
    found = caught.value.state
    assert (int(found.step), bool(found.ok)) == (2, True)
    assert bits((found.params, found.opt_state)) == bits((params, opt_state))
    assert px.Checkpoints(tmp_path).steps == (2,)
    assert bits(px.Checkpoints(tmp_path).restore(start()).tree) == bits(found)
    with np.load(tmp_path / "nonfinite-step-3.npz") as saved:
        assert f"np.load('{tmp_path}/nonfinite-step-3.npz')" in str(caught.value)
        np.testing.assert_array_equal(saved["x"], spoilt(row)["x"][rows])
        np.testing.assert_array_equal(saved["row numbers"], rows)


def test_started_again_it_meets_the_same_and_with_better_data_it_goes_on(tmp_path: Path) -> None:
    row = int(data().rows(2)[0])
    bad = px.loader(spoilt(row), 16, axis=axis_on(1, 1, "batch"), seed=1)
    for _ in range(2):
        with pytest.raises(
            px.NonFiniteError, match=r"in step 3, .* The state after step 2 is error.state, and saved in "
        ):
            px.fit(start(), step, bad, steps=9, checkpoint=tmp_path / "runs", log=tmp_path / "log", progress=False)
        assert [line["step"] for line in lines(tmp_path / "log")[1:]] == [1, 2]
    found = px.fit(start(), step, data(), steps=9, checkpoint=tmp_path / "runs", log=tmp_path / "log", progress=False)
    assert bits(found.state) == bits(px.fit(start(), step, data(), steps=9, progress=False).state)


def test_a_gradient_that_is_not_finite_is_caught_where_the_loss_is(tmp_path: Path) -> None:
    def root(params: Any, batch: Any) -> Any:
        return jnp.sqrt(jnp.sum((params["w"] * batch["x"]) ** 2))

    ones, zeros = {"x": np.ones((4, 3), np.float32)}, {"x": np.zeros((4, 3), np.float32)}
    state = px.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.01))
    with pytest.raises(px.NonFiniteError, match=r"the gradient is not finite in step 3, .* \(loss 0\)") as caught:
        px.fit(state, px.train_step(root), [ones, ones, zeros, ones], epochs=3, log=tmp_path / "log", progress=False)
    # d/dw sqrt(12 w²) is sqrt(12) in the direction of w, three times 2 / sqrt(3): 0.01 of that, twice.
    np.testing.assert_allclose(caught.value.state.params["w"], 1 - 0.01 * 2 * np.full(3, 2 / np.sqrt(3)), rtol=1e-5)
    assert caught.value.batch is zeros
    words = "All values of the batch are finite, so it is the model, or values that are too large: take smaller steps"
    assert words in str(caught.value)
    with np.load(tmp_path / "nonfinite-step-3.npz") as saved:
        np.testing.assert_array_equal(saved["x"], zeros["x"])


def test_the_rows_are_named_that_have_values_which_are_not_finite() -> None:
    def own_step(state: int, batch: Any) -> Any:
        return state + 1, {"loss": np.nan}

    x = np.ones((30, 2, 2))
    x[[3, 7], 1] = [np.inf, np.nan]
    y = jnp.ones(30, jnp.bfloat16).at[jnp.arange(1, 26)].set(-jnp.inf)
    batch = {"x": x, "y": y, "z": np.ones(30), "n": np.arange(30), "scale": np.float32(np.nan), "name": np.array("a")}
    listed = ", ".join(map(str, range(1, 21)))
    words = f"batch['scale']; batch['x'] in rows 3, 7 of the batch; batch['y'] in rows {listed}, … (25 in all) of the"
    with pytest.raises(px.NonFiniteError, match=re.escape(words)):
        px.fit(0, own_step, [batch], epochs=1, progress=False)


def test_over_several_devices_the_batch_is_saved_without_padding(tmp_path: Path) -> None:
    axis = axis_on(8, 1, "batch")
    row = int(data().rows(3)[0])
    source = px.loader(spoilt(row), 16, axis=axis, seed=1)
    with pytest.raises(px.NonFiniteError, match="in step 4, ") as caught:
        px.fit(start(), px.train_step(loss, axis=axis), source, epochs=2, log=tmp_path / "log", progress=False)
    with np.load(tmp_path / "nonfinite-step-4.npz") as saved:
        np.testing.assert_array_equal(saved["x"], spoilt(row)["x"][data().rows(3)])
    assert f"batch['x'] in rows {row}. Mend" in str(caught.value)
    assert len(data().rows(3)) == 8
    params = list(by_hand(batches(data(), range(3))))[-1][0]
    np.testing.assert_allclose(caught.value.state.params["w"], params["w"], rtol=1e-5)
