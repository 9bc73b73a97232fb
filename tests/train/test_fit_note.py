"""What a run noted in its checkpoint, field by field: where it is damaged, the run goes on from the one before."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paraxis as px
from tests._damage import damaged, wrapped

ROWS = [np.arange(3.0) + row for row in range(4)]


def step(state: dict[str, Any], rows: Any) -> tuple[dict[str, Any], dict[str, float]]:
    total = state["total"] + float(np.sum(rows))
    return {"total": total, "n": state["n"] + 1}, {"loss": total}


def run(place: Path, steps: int) -> dict[str, Any]:
    """Steps on the host: no program is compiled."""
    stop = px.train.StopEarly("loss", patience=100, mode="max")
    checkpoints = px.Checkpoints(place, every=2, asynchronous=False)
    done = px.fit(
        {"total": 0.0, "n": 0}, step, ROWS, steps=steps, checkpoint=checkpoints, stop_early=stop, progress=False
    )
    return done.state


NUM_PARTS = 20
FREE = ("['next'][3]", "shown", "stop early", "due", "groups", "run")


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))])
def test_a_damaged_note_is_noticed_and_the_run_goes_on_from_the_checkpoint_before(part: int, tmp_path: Path) -> None:
    expected = run(tmp_path / "at once", 6)
    run(tmp_path / "run", 4)
    path = tmp_path / "run" / "4" / "paraxis.json"
    record = json.loads(json.loads(path.read_text())["record"])
    cases = list(damaged(record["notes"]["fit"], but=("data",)))
    assert len(cases) > 200
    taken = []
    for number, (what, text) in list(enumerate(cases))[part::NUM_PARTS]:
        note = json.dumps({**record, "notes": {"fit": "\0here"}}).encode().replace(b'"\\u0000here"', text)
        path.write_text(wrapped(note))
        place = tmp_path / "case" / str(number)
        shutil.copytree(tmp_path / "run", place)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert run(place, 6) == expected, what
        messages = [str(one.message) for one in said if "step 4 in" in str(one.message)]
        assert all("is damaged: its notes are" in text or "is damaged: its record " in text for text in messages)
        taken += [] if messages else [what]
        shutil.rmtree(place)
    # Averages may be any numbers, lists of any length, names any text; and newer versions may note more.
    assert all(what.startswith("more in") or any(name in what for name in FREE) for what in taken), taken
