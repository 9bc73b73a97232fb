"""Examples as modules, and what each of them gives and prints, run once."""

import contextlib
import functools
import importlib
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

Quick = Callable[[str], tuple[Any, str, Path]]

sys.path.append(str(EXAMPLES))  # where the examples find each other


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quick:
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
