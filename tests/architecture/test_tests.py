"""What holds of the tests themselves: they speak through the public interface, and none takes too long."""

import ast
import re
import time
import types
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
# In an import, in a text that is run, or as the name of what is replaced.
PRIVATE = re.compile(r"\bparaxis(\.[a-z]+)*(\.| import )_[a-z]")
REASON = "No public face:"
FILES = sorted(TESTS.rglob("*.py"))


def names_a_private_module(source: str) -> bool:
    """Whether a file does so without giving the reason in its first line."""
    if not PRIVATE.search(source):
        return False
    return not (ast.get_docstring(ast.parse(source)) or "").startswith(REASON)


def test_a_test_that_imports_a_private_module_says_why_in_its_first_line() -> None:
    files = [path for path in FILES if names_a_private_module(path.read_text("utf-8"))]
    assert [str(path.relative_to(TESTS)) for path in files] == []


def test_private_modules_are_seen_wherever_they_are_named() -> None:
    room = "paraxis.train"
    for code in (f"from {room}.runs._fit import fit", f"code = 'import {room}._step'"):
        assert names_a_private_module(code)
        assert not names_a_private_module(f'"""No public face: what this tests is never shown."""\n{code}')
    assert not names_a_private_module(f"from {room} import fit\nimport paraxis")


def test_a_test_of_every_day_that_takes_too_long_fails(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    item: Any = types.SimpleNamespace(get_closest_marker=lambda name: None)
    with monkeypatch.context() as patch:
        patch.setattr(conftest, "MOST_SECONDS", 0.1)
        patch.delenv("COVERAGE_RUN", raising=False)
        test = conftest.pytest_runtest_call(item)
        next(test)
        begin = time.process_time()
        while time.process_time() < begin + 0.2:
            pass
        with pytest.raises(pytest.fail.Exception):
            test.send(None)
