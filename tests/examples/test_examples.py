"""Every example says what it is, and prints its table, or what its docstring shows; two run as commands."""

import ast
import contextlib
import io
import re
import subprocess
import sys
import textwrap
from importlib import import_module

import pytest

from tests.examples.conftest import EXAMPLES, Quick
from tests.processes._support import COMMAND, plain_environment

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_"))
TOURS = ["compilation", "parallelism", "vectorization"]  # a page's snippets in turn: no table, and no options


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOURS])
def test_an_example_prints_its_table_and_draws(name: str, quick: Quick) -> None:
    _, printed, picture = quick(name)
    assert "on 8 devices" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", TOURS)
def test_a_tour_prints_what_its_docstring_shows(name: str) -> None:
    doc, printed = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text("utf-8"))), io.StringIO()
    shown = textwrap.dedent(doc.partition("::\n\n")[2]) if doc else ""
    with contextlib.redirect_stdout(printed):
        import_module(name).main()
    rounded = [[_to_three_digits(line) for line in text.splitlines()] for text in (printed.getvalue(), shown)]
    assert rounded[0] == rounded[1]


def _to_three_digits(line: str) -> str:
    """Measured times are left out, and other numbers rounded, since compilers differ in the last digits."""
    text = re.sub(r"\d+\.\d{5} (plain|compiled)", r"\1", line)
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2g}", text)


LAUNCH = [*COMMAND, "launch", "-n", "2", "--devices", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ([sys.executable, str(EXAMPLES / "fedavg.py"), "--devices", "3"], "on 3 devices"),
        ([*LAUNCH, str(EXAMPLES / "mnist_cnn.py")], "rows on 2 devices of 2 processes;"),
    ],
)
def test_an_example_is_a_command(command: list[str], printed: str) -> None:
    command = [*command, "--quick"]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(printed) == 1
