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
        ({"num_processes": 0}, "-n 0 must be an integer of at least 1; write -n 2"),
        ({"devices": 0}, "--devices 0 must be an integer of at least 1; write --devices 1"),
        ({"restarts": -1}, "--restarts -1 must be an integer of at least 0; write"),
        *(
            ({"grace": x}, f"--grace {x} must be a finite number of seconds above 0; write --grace 30")
            for x in (0.0, float("inf"), float("nan"), 10**400)
        ),
        *(
            ({"stuck_after": x}, f"--stuck-after {x} must be a finite number of seconds; write --stuck-after 1800, or")
            for x in (-1.0, float("inf"), float("nan"))
        ),
        *(
            ({name: x}, f"launch.Options: {name} must be a whole number, got {x!r}; write {name}=2")
            for name, x in (("num_processes", 1.5), ("num_processes", "2"), ("devices", "two"), ("restarts", None))
        ),
        *(
            ({name: x}, f"launch.Options: {name} must be seconds, got {x!r}; write {name}=30")
            for name, x in (("grace", "abc"), ("grace", True), ("stuck_after", None))
        ),
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
