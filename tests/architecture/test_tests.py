"""What holds of the tests themselves: they speak through the public interface, and none takes too long."""

import ast
import re
import time
import types
from pathlib import Path
from typing import Any

import pytest

from tests import _cpu_time

TESTS = Path(__file__).resolve().parents[1]
# In an import, in a text that is run, or as the name of what is replaced.
PRIVATE = re.compile(r"\bparaxis(\.[a-z]+)*(\.| import )_[a-z]")
REASON = "No public face:"
GENERATORS = {"np.random.default_rng", "np.random.RandomState", "random.Random"}
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


def generators_shared_by_tests(source: str) -> list[str]:
    """Tests that draw from a generator of their module: what they get depends on which others ran before."""
    module = ast.parse(source)
    generators = {
        ast.unparse(node.targets[0])
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in GENERATORS
    }
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    found = []
    for test in tests:
        names = [node for line in test.body for node in ast.walk(line) if isinstance(node, ast.Name)]
        own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        if generators & {node.id for node in names} - own:
            found.append(test.name)
    return found


def test_each_test_draws_from_a_generator_of_its_own() -> None:
    found = {str(path.relative_to(TESTS)): generators_shared_by_tests(path.read_text("utf-8")) for path in FILES}
    assert {path: tests for path, tests in found.items() if tests} == {}


def test_a_shared_generator_is_seen() -> None:
    module = "rng = np.random.default_rng(0)\nX = rng.normal(size=3)\n"
    assert generators_shared_by_tests(f"{module}def test_a():\n    return rng.normal()") == ["test_a"]
    assert not generators_shared_by_tests(f"{module}def test_b():\n    rng = np.random.default_rng(1); return rng, X")


def test_a_test_of_every_day_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = types.SimpleNamespace(get_closest_marker=lambda name: None)
    with monkeypatch.context() as patch:
        patch.setattr(_cpu_time, "MOST", 0.1)
        patch.delenv("COVERAGE_RUN", raising=False)
        test = _cpu_time.pytest_runtest_call(item)
        next(test)
        begin = time.process_time()
        while time.process_time() < begin + 0.2:
            pass
        with pytest.raises(pytest.fail.Exception):
            test.send(None)
