"""A small file for the commands to read, with columns of every kind, and the commands as a user types them."""

import csv
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis.cli import main

NUMBERS = ("age", "income", "tiny")
CITIES = np.array(["Basel", "Bern", "Chur"])
NUM_ROWS = 60


def columns() -> dict[str, Any]:
    """Columns on very different scales, and a target of each kind that depends on them."""
    rng = np.random.default_rng(0)
    age = rng.integers(18, 80, NUM_ROWS)
    income = rng.lognormal(10, 0.5, NUM_ROWS).round(2)
    tiny = (5 + 1e-3 * rng.normal(size=NUM_ROWS)).round(8)
    city = CITIES[rng.integers(0, 3, NUM_ROWS)]
    z = (age - 45) / 15 + (city == "Bern") - np.log(income / 22_000) + 500 * (tiny - 5)
    noise = rng.logistic(size=NUM_ROWS)
    return {
        "age": age,
        "income": income,
        "tiny": tiny,
        "city": city,
        "bought": np.where(z + noise > 0, "yes", "no"),
        "group": np.digitize(z + noise, [-1, 1]),
        "price": (100 + 7 * z + noise).round(4),
        "visits": rng.poisson(np.exp(np.clip(z, -2, 2))),
    }


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """A CSV file; ``None`` is written as nothing."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(data)
        writer.writerows(zip(*data.values(), strict=True))
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def complaints(err: str) -> list[str]:
    """The complaints on stderr, each one line; below them may be a command line that settles them, by itself."""
    lines = err.removesuffix("\n").split("\n")
    there = [line.removeprefix("paraxis: ") for line in lines if line.startswith("paraxis: ")]
    rest = lines[len(there) :]
    assert there
    assert not rest or (len(rest) == 2 and rest[0].endswith(":") and rest[1].startswith("paraxis "))
    return there


def settled_by(err: str) -> list[str]:
    """The arguments of the command line that is said to settle all complaints; as a shell reads them."""
    *_, words, line = err.removesuffix("\n").split("\n")
    assert re.fullmatch(r"this settles (it|both|all \d+):", words)
    return pasted(line)


def pasted(line: str) -> list[str]:
    """The arguments of a command line, as a shell reads them."""
    script = "paraxis() { printf '%s\\0' \"$@\"; }\n" + line
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return found.stdout.removesuffix("\0").split("\0")


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
