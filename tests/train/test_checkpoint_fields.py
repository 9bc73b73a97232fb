"""Each field of a record, damaged under a right checksum: the checkpoint before is used, and a warning says so."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import paraxis as px
from tests._damage import damaged, wrapped

NOTES = {"loss": 0.5}


def tree(step: int) -> dict[str, Any]:
    return {
        "small": np.arange(5.0) + step,
        "half": jax.numpy.full((2, 2), step, "bfloat16"),
        "large": np.full((200, 200), step, "float32"),
        "none": np.zeros((0, 3)),
        "keys": jax.random.split(jax.random.key(step), 2),
        "values": [True, step, 0.5, 1j, "text"],
    }


def bits(found: Any) -> list[Any]:
    leaves = jax.tree.leaves({**found, "keys": jax.random.key_data(found["keys"])})
    return [x if isinstance(x, (bool, int, float, complex, str)) else np.asarray(x).tobytes() for x in leaves]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    checkpoints = px.Checkpoints(place, asynchronous=False)
    for step in (1, 12):
        checkpoints.save(step, tree(step), NOTES)
    return place


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def outcome(place: Path) -> int | str:
    """The step that is used, whose bits are right, and the warning is there if it is not the last; or the error."""
    checkpoints = px.Checkpoints(place, best=("loss", "min"))
    assert checkpoints.steps == (1, 12)
    assert checkpoints.best in (1, 12)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            restored = checkpoints.restore(tree(0))
        except px.StateError as error:
            return str(error)
    assert bits(restored.tree) == bits(tree(restored.step))
    assert ["step 12" in str(one.message) for one in said] == [True] * (restored.step == 1)
    return restored.step


def test_any_field_damaged_is_noticed_and_the_checkpoint_before_is_used(place: Path) -> None:
    path = place / "12" / "paraxis.json"
    whole = json.loads(path.read_text())
    checkpoints, target = px.Checkpoints(place), tree(0)
    # What stands in the fields that are left out is of the user's choice: any of that type is as good.
    record = damaged(json.loads(whole["record"]), but=("notes", "surroundings", "value"))
    cases = [(what, wrapped(text)) for what, text in record]
    cases += [(f"around: {what}", text.decode(errors="replace")) for what, text in damaged(whole)]
    assert len(cases) > 500
    otherwise = []
    for number, (what, text) in enumerate(cases):
        path.write_text(text)
        with pytest.raises((px.CheckpointError, px.StateError), match="the checkpoint of step 12 ") as caught:
            checkpoints.restore(target, 12)
        if isinstance(caught.value, px.StateError):
            otherwise.append(what)
        else:
            assert "12: its record " in str(caught.value) or what.startswith("['packed'][0] = '"), what
        if isinstance(caught.value, px.CheckpointError) and number % 20 == 0:
            assert outcome(place) == 1
            (place / "damaged-12").rename(place / "12")
    # That there was such a leaf, or of which shape, is said nowhere else of one that is not among the small arrays.
    assert all(any(name in what for name in ("large", "none", "values")) for what in otherwise), otherwise
    assert len(otherwise) < 20, otherwise


@pytest.mark.parametrize("other", [None, [], {}, [1], {"odd": 1}, [[[]]]])
def test_a_python_value_of_another_type_is_noticed(other: Any, place: Path) -> None:
    path = place / "12" / "paraxis.json"
    whole = json.loads(json.loads(path.read_text())["record"])
    leaves = [name for name, entry in whole["leaves"].items() if "value" in entry]
    assert len(leaves) == 5
    for name in leaves:
        entry = {**whole["leaves"][name], "value": other}
        path.write_text(wrapped(json.dumps({**whole, "leaves": {**whole["leaves"], name: entry}}).encode()))
        with pytest.raises(px.CheckpointError, match=r"12: its record .* is not what was written: .*value"):
            px.Checkpoints(place).restore(tree(0), 12)


@pytest.mark.slow
def test_the_surroundings_are_told_as_far_as_they_are_read(place: Path) -> None:
    path = place / "12" / "paraxis.json"
    record = json.loads(json.loads(path.read_text())["record"])
    for what, text in damaged(record["surroundings"]):
        whole = json.dumps({**record, "surroundings": "\0here"}).encode().replace(b'"\\u0000here"', text)
        path.write_text(wrapped(whole))
        if outcome(place) == 1:
            (place / "damaged-12").rename(place / "12")
        else:
            assert what.startswith(("without", "more", "all = {")) or what.endswith(("-1", "''", "'odd'")), what


@pytest.mark.parametrize("gone", ["paraxis.json", "paraxis.txt", "state", "orbax.checkpoint"])
def test_whatever_is_missing_a_run_goes_on_past_that_step(gone: str, place: Path) -> None:
    path = place / "12" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = outcome(place)
    assert found == (12 if gone in ("paraxis.txt", "orbax.checkpoint") else 1)
    checkpoints = px.Checkpoints(place, asynchronous=False)
    checkpoints.save(12, tree(12), NOTES)
    assert checkpoints.steps == (1, 12)
    assert outcome(place) == 12


def test_one_without_a_record_may_be_replaced_unread(place: Path) -> None:
    (place / "12" / "paraxis.json").unlink()
    px.Checkpoints(place, asynchronous=False).save(12, tree(12), NOTES)
    assert outcome(place) == 12
    assert sorted(os.listdir(place)) == [".paraxis", "1", "12"]


def test_the_checkpoint_of_another_step_is_not_taken_for_that_of_its_name(place: Path) -> None:
    shutil.copytree(place / "12", place / "700")
    with pytest.warns(UserWarning, match=r"step 700 in .* is damaged: its record .*: it is of step 12, not 700; it is"):
        assert px.Checkpoints(place).restore(tree(0)).step == 12


@pytest.mark.parametrize("notes", [{"x": []}, {1: "a", "1": "b"}, {"x": float("nan")}], ids=["deep", "twice", "NaN"])
def test_notes_that_could_not_be_read_again_are_refused(notes: dict[Any, Any], tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    if "x" in notes and isinstance(notes["x"], float):
        checkpoints.save(1, {}, notes)
        assert np.isnan(checkpoints.restore({}).notes["x"])
        return
    inner = notes.get("x")
    for _ in range(100_000 if inner is not None else 0):
        inner = [inner]
    with pytest.raises(px.DataError, match=r"save: notes must be JSON values: .*write numbers as"):
        checkpoints.save(1, {}, notes if inner is None else {"x": inner})
    assert not list(tmp_path.iterdir())
