"""What may not be asked of a launch."""

import re
from pathlib import Path
from typing import Any

import pytest

import paraxis as px
from paraxis.launch import Options


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"num_processes": 0}, "-n 0 must be at least 1; write -n 2"),
        ({"devices": 0}, "--devices 0 must be at least 1; write --devices 1"),
        ({"restarts": -1}, "--restarts -1 must not be negative; write --restarts 3"),
        ({"grace": 0.0}, "--grace 0 must be above 0 seconds, and finite; write --grace 30"),
        ({"grace": float("inf")}, "--grace inf must be above 0"),
        ({"grace": float("nan")}, "--grace nan must be above 0"),
        ({"stuck_after": -1.0}, "--stuck-after -1 must be seconds, not negative; write --stuck-after 0 for never"),
        ({"stuck_after": float("nan")}, "--stuck-after nan must be seconds"),
        ({"target": "nowhere.py"}, "there is no file nowhere.py; write: paraxis launch -n 2 train.py"),
        ({"target": "no_such.module", "module": True}, "there is no module no_such.module; write: paraxis launch"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(px.ProcessError, match=re.escape(message)):
        Options(**{"num_processes": 2, "target": __file__, **wishes})


def test_a_module_need_not_be_imported_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "__init__.py").write_text("raise SystemExit('imported')")
    assert Options(2, "somewhere.train", module=True).target == "somewhere.train"
