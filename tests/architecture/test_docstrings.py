"""Docstrings begin with a noun or an imperative: "Return whether it ended", not "Whether it ended" or "Of a run"."""

import re
from pathlib import Path

SOURCES = sorted((Path(__file__).resolve().parents[2] / "src").rglob("*.py"))
CLAUSE = re.compile(r'"""(?:What|Whether|How|Who|Which|Where|When|Why|Of|As|If|So|There|That)\b.*')


def test_no_docstring_begins_with_a_clause():
    assert len(SOURCES) > 200
    found = [f"{path.name}: {text}" for path in SOURCES for text in CLAUSE.findall(path.read_text("utf-8"))]
    assert not found, "begin with a noun or an imperative:\n" + "\n".join(found)


def test_a_clause_is_noticed():
    assert CLAUSE.findall('def f():\n    """Whether it ended."""\n') == ['"""Whether it ended."""']
    assert not CLAUSE.search('"""Return whether it ended."""')
    assert not CLAUSE.search('"""Whatever it is, return it."""')
