"""Models that ``paraxis fit`` has made, for the tests of what is done with them.

Other tests of the commands, too, fit to 40 rows of two numbers on one device where they can: it is compiled once.
"""

import contextlib
import functools
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from paraxis.cli import main

LABELS = np.array(["a", "b", "c"])


def learnt(kind: str) -> tuple[dict[str, Any], list[str]]:
    """Rows to fit to, and what is asked of the fit."""
    rng = np.random.default_rng(1)
    u, v = rng.normal(1, 2, 40).round(3), rng.normal(2, 3, 40).round(3)
    second = rng.integers(0, 2, 40)
    z = u - v / 2 + rng.normal(size=40)
    return {
        "logistic": (
            {"u": u, "v": v, "city": np.array(["Bern", "Chur"])[second], "y": LABELS[np.digitize(z - second, [-1, 1])]},
            ["--text", "one-hot"],
        ),
        "squared": ({"u": u, "v": v, "y": z}, ["--missing", "mean"]),
        "weighted": ({"u": u, "v": v, "y": z, "w": 1 + second}, ["--weights", "w"]),
        "poisson": ({"u": u, "v": v, "y": rng.poisson(np.exp(z / 4))}, ["--objective", "poisson"]),
        "boolean": ({"u": u, "y": u > 0}, []),
        "integer": (
            {"u": u, "city": np.array(["007", "12"])[second], "y": np.where(u + second > 0.5, 5, 3)},
            ["--text", "one-hot"],
        ),
    }[kind]


@functools.cache
def model_file(kind: str) -> bytes:
    """What ``paraxis fit`` makes of them."""
    data, asked = learnt(kind)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        file, out = Path(directory, "data.npz"), Path(directory, "out")
        np.savez(file, **data)
        asked += ["--test-fraction", "0", "--devices", "1", "--out", str(out)]
        assert main(["fit", str(file), "--target", "y", *asked]) == 0
        return (out / "model.npz").read_bytes()


def saved(path: Path, kind: str = "logistic") -> Path:
    """A model: of two columns of numbers and, if it is logistic, one of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model_file(kind))
    return path
