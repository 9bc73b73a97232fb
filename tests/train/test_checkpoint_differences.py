"""A checkpoint and a target that differ: all differences are listed, and what agrees can be taken."""

import dataclasses
from pathlib import Path
from typing import Any

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
    assert f"step 5 in {checkpoints.path}" in str(caught.value)
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
