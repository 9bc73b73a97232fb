"""A checkpoint and a target that differ: all differences are listed, and what agrees can be taken."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

SAVED: dict[str, Any] = {
    "head": {"w": np.ones((4, 3), "float32"), "b": np.ones(3, "float32")},
    "body": np.ones(5),
    "n": 3,
}
TARGET: dict[str, Any] = {
    "head": {"w": np.zeros((4, 7), "float32"), "c": np.zeros(3, "float32")},
    "body": np.zeros(5, "float32"),
    "n": 3.0,
}
LINES = [
    r"  ['body']: float64 (5,) in the checkpoint, float32 (5,) in the target",
    r"  ['head']['c']: missing in the checkpoint, float32 (3,) in the target",
    r"  ['head']['w']: float32 (4, 3) in the checkpoint, float32 (4, 7) in the target",
    r"  ['n']: Python int in the checkpoint, Python float in the target",
    r"  ['head']['b']: float32 (3,) in the checkpoint, missing in the target",
]


@pytest.fixture
def checkpoints(tmp_path: Path) -> px.Checkpoints:
    found = px.Checkpoints(tmp_path)
    found.save(5, SAVED)
    found.wait()
    return found


def test_all_that_differs_is_listed(checkpoints: px.Checkpoints) -> None:
    with pytest.raises(px.StateError, match=r"restore\(target, partial=True\)") as caught:
        checkpoints.restore(TARGET)
    assert str(caught.value).splitlines()[1:-1] == LINES
    assert f"of step 5 in {checkpoints.path}" in str(caught.value)
    assert checkpoints.steps == (5,)


def test_what_agrees_is_taken_and_the_rest_is_reported(checkpoints: px.Checkpoints) -> None:
    target: dict[str, Any] = {**TARGET, "n": 0, "head": {**TARGET["head"], "b": np.zeros(3, "float32")}}
    restored = checkpoints.restore(target, partial=True)
    assert restored.tree["n"] == 3
    np.testing.assert_array_equal(restored.tree["head"]["b"], np.ones(3))
    for kept in (restored.tree["head"]["w"], restored.tree["head"]["c"], restored.tree["body"]):
        assert not kept.any()
    assert [f"  {difference}" for difference in restored.differences] == LINES[:3]
    assert dataclasses.asdict(restored.differences[1]) == {
        "path": "['head']['c']",
        "saved": None,
        "wanted": "float32 (3,)",
    }


def test_all_agrees(checkpoints: px.Checkpoints) -> None:
    restored = checkpoints.restore(jax.tree.map(np.zeros_like, {**SAVED, "n": 0}) | {"n": 0}, partial=True)
    assert restored.differences == ()


def test_a_leaf_without_a_value_cannot_be_kept(checkpoints: px.Checkpoints) -> None:
    target = {**SAVED, "new": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(px.StateError, match=r"\['new'\]: missing in the checkpoint"):
        checkpoints.restore(target, partial=True)


def test_keys_of_another_kind_differ(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(1, {"key": jax.random.key(0)})
    with pytest.raises(px.StateError, match=r"\['key'\]: key<fry> \(\) in the checkpoint, key<rbg> \(\) in the target"):
        checkpoints.restore({"key": jax.random.key(0, impl="rbg")})


def test_a_long_list_ends(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(1, {})
    with pytest.raises(px.StateError, match=r"\[19\]: missing in .*\n  and 5 more\n"):
        checkpoints.restore(list(range(25)))
