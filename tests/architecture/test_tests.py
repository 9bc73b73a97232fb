"""What holds of the tests themselves: they speak through the public interface."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# In an import, in a text that is run, or as the name of what is replaced.
PRIVATE = re.compile(r"\bparaxis(\.[a-z]+)*(\.| import )_[a-z]")
REASON = "No public face:"


def names_a_private_module(source: str) -> bool:
    """Whether a file does so without giving the reason in its first line."""
    if not PRIVATE.search(source):
        return False
    return not (ast.get_docstring(ast.parse(source)) or "").startswith(REASON)


def test_a_test_that_imports_a_private_module_says_why_in_its_first_line() -> None:
    files = [path for path in sorted(TESTS.rglob("*.py")) if names_a_private_module(path.read_text("utf-8"))]
    assert [str(path.relative_to(TESTS)) for path in files] == []


def test_private_modules_are_seen_wherever_they_are_named() -> None:
    room = "paraxis.train"
    for module in (f"{room}._step", f"{room}.runs._fit"):
        assert names_a_private_module(f"from {module} import fit")
        assert names_a_private_module(f"code = 'import {module}'")
        assert not names_a_private_module(f'"""No public face: what this tests is never shown."""\nimport {module}')
    assert names_a_private_module(f"from {room} import _step")
    assert not names_a_private_module(f"from {room} import fit\nimport paraxis")
