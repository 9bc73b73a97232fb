"""Type checkers see a user's mistakes, and what each call gives. ``make lint`` runs this too, each time."""

import subprocess
import sys

import pytest

from tests.types.__main__ import ROOT, differences, marked

SOURCES = {"a.py": "x = 1\ny = z  # wrong\nz = y  # wrong\n"}


def test_what_is_missed_and_what_is_made_up_are_told() -> None:
    mistakes = marked(SOURCES)
    assert list(mistakes) == [("a.py", 2), ("a.py", 3)]
    assert differences(mistakes, {("a.py", 2): "no z", ("a.py", 3): "no y"}) == []
    told = ["a.py:1: no x", "a.py:3: nothing was said of 'z = y  # wrong'"]
    assert differences(mistakes, {("a.py", 1): "no x", ("a.py", 2): "no z"}) == told


@pytest.mark.slow
def test_both_type_checkers_see_all_mistakes_of_a_user_and_no_others() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.types"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
