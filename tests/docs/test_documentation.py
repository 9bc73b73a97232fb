"""Every line of Python in the README, the documentation and the docstrings runs, and prints what it says."""

import doctest
import re
import types
from pathlib import Path

import pytest

from tests.architecture.test_public_names import MODULES

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path for path in FILES if "\n```python" in path.read_text("utf-8")}
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
EVERY = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
NAMES = {path: EVERY[path] for path in {id(value): path for path, value in EVERY.items()}.values()}  # each once


def blocks(text: str) -> list[tuple[int, str]]:
    """Each Python block with the number of the line before it."""
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in FENCE.finditer(text)]


def run_page(text: str, filename: str) -> int:
    """Run a page's blocks in order in one namespace; those written as a session are compared with what they print.

    Returns:
        The number of blocks.
    """
    # A module, since dataclasses and pickling look up the module that a class says it is from.
    namespace = types.ModuleType("page").__dict__
    for line, code in blocks(text):
        if code.startswith(">>> "):
            _compare(doctest.DocTestParser().get_doctest(code, namespace, filename, filename, line))
        else:
            exec(compile("\n" * line + code, filename, "exec"), namespace)
    return len(blocks(text))


def _compare(test: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)


def test_the_documentation_has_at_most_38_000_words_and_the_architecture_12_kb():
    texts = [path.read_text("utf-8") for path in (*FILES, ROOT / "benchmarks" / "README.md")]
    assert sum(len(text.split()) for text in texts) <= 38_000
    assert (ROOT / "docs" / "architecture.md").stat().st_size <= 12_000


@pytest.mark.page
@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_every_block_of_a_page_runs(path):
    text = path.read_text("utf-8")
    assert text.count("\n```python") == run_page(text, str(path))


# Pages and docstrings are of the night; but `.ci/run` runs all of them.
@pytest.mark.slow
@pytest.mark.page
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_docstring_print_what_they_say(name):
    for test in doctest.DocTestFinder(recurse=isinstance(NAMES[name], type)).find(NAMES[name], name, globs={}):
        _compare(test)


def test_a_block_that_fails_is_reported_with_its_place():
    with pytest.raises(ZeroDivisionError, match="by zero") as error:
        run_page("text\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n", "page.md")
    assert error.traceback[-1].lineno == 6


def test_a_session_that_prints_something_else_is_reported():
    with pytest.raises(AssertionError, match=r"Expected:\s+2\s+Got:\s+1"):
        run_page("```python\n>>> 1\n2\n```\n", "page.md")
