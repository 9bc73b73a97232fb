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
        *(
            ({"num_processes": x}, f"num_processes must be an integer of at least 1, got {x!r}; write -n 2, or num")
            for x in (0, 1.5, "2")
        ),
        *(({"devices": x}, f"devices must be an integer of at least 1, got {x!r}; write --dev") for x in (0, "two")),
        *(({"restarts": x}, f"restarts must be an integer of at least 0, got {x!r}; write --res") for x in (-1, None)),
        *(
            (
                {"grace": x},
                f"grace must be a finite number of seconds above 0, got {x!r}; write --grace 30, or",
            )
            for x in (0.0, float("inf"), float("nan"), "abc", True)
        ),
        ({"grace": 10**400}, "grace must be a finite number of seconds above 0, got 1000"),
        *(
            (
                {"stuck_after": x},
                f"stuck_after must be a finite number of seconds of at least 0, got {x}; write --stu",
            )
            for x in (-1.0, float("inf"), float("nan"), None)
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
