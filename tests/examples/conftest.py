"""Examples as modules, and what each of them gives and prints, run once."""

import contextlib
import functools
import importlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

Example = Callable[[str], ModuleType]
Quick = Callable[[str], tuple[Any, str, Path]]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Example:
    """Import an example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    """Run an example's ``main`` with ``--quick``, once: what it returns, what it prints, and its picture."""

    @functools.cache
    def run(name: str) -> tuple[Any, str, Path]:
        folder, printed = tmp_path_factory.mktemp(name), io.StringIO()
        arguments = ["--quick", "--devices", "8", "--plot", str(folder / "plot.png")]
        own = ["--folder", str(folder / "kept")] if name == "large_csv" else []
        with contextlib.redirect_stdout(printed), warnings.catch_warnings(action="ignore"):
            found = importlib.import_module(name).main([*arguments, *own])
        return found, printed.getvalue(), folder / "plot.png"

    return run


@pytest.fixture
def quick(example: Example, runs: Quick) -> Quick:
    """The same, where the examples find each other."""
    return runs
