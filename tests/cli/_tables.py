"""Tables as users hand them over, drawn from a seed, with pandas and the ``csv`` module to say what is in them."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

NUM_ROWS = 24

LABELS: dict[str, list[Any]] = {
    "beyond 2^53": [2**60 + 10, 2**60 + 11],
    "ends of int64": [-(2**63), 2**63 - 1, 0],
    "beyond int64": [2**64 - 1, 2**64 - 2, 0],
    "booleans": [True, False],
    "words": ["low", "high", "5", "x,y", 'q"uote', "two\nlines", " spaced ", "é"],
    "zeros in front": ["00", "01", "1"],
    "beyond 64 bits": [str(2**70), str(2**70 + 1), "7"],
    "missing by name": ["NA", "nan", "None", "-", "null", "EU"],
    "whole": [-1, 0, 7],
}


class Labels(NamedTuple):
    """Labels of a kind, each of them several times, in the order of the rows."""

    kind: str
    values: list[Any]


def labels(kind: str, seed: int) -> Labels:
    rng = np.random.default_rng(seed)
    of_kind = LABELS[kind]
    chosen = rng.permutation(NUM_ROWS) % len(of_kind)
    return Labels(kind, [of_kind[i] for i in chosen])


def text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def csv_text(
    columns: dict[str, list[Any]],
    rng: np.random.Generator,
    *,
    delimiter: str = ",",
) -> str:
    """Quoted as it comes, with line ends as they come."""
    stream = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if rng.integers(2) else csv.QUOTE_MINIMAL
    writer = csv.writer(stream, delimiter=delimiter, quoting=quoting, lineterminator=["\n", "\r\n"][rng.integers(2)])
    writer.writerow(columns)
    writer.writerows([text_of(value) for value in row] for row in zip(*columns.values(), strict=True))
    return stream.getvalue()


def as_csv(path: Path, columns: dict[str, list[Any]], rng: np.random.Generator) -> list[str]:
    """Write them in some encoding, with some delimiter; what to say of it on the command line."""
    delimiter = str(rng.choice([",", ";", "\t", "|"]))
    encoding = str(rng.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "utf-16-le"]))
    path.write_bytes(csv_text(columns, rng, delimiter=delimiter).encode(encoding))
    said = ["--encoding", encoding] if encoding in ("latin-1", "utf-16-le") else []
    return said + (["--delimiter", "tab" if delimiter == "\t" else delimiter] if delimiter != "," else [])


def as_parquet(path: Path, columns: dict[str, list[Any]], rng: np.random.Generator) -> list[str]:
    """With an index of some kind that tells the classes; it must not be learnt from."""
    frame = pd.DataFrame({name: values_of(values) for name, values in columns.items()})
    frame = frame.sort_values(list(columns)[-1], key=lambda y: y.astype(str), ignore_index=True)
    if rng.integers(2):
        frame.index = pd.Index(range(len(frame)), name="leak" if rng.integers(2) else None)
        frame.to_parquet(path, index=True)
    else:
        frame.to_parquet(path, index=None if rng.integers(2) else False)
    return []


def as_npz(path: Path, columns: dict[str, list[Any]], rng: np.random.Generator) -> list[str]:
    arrays: dict[str, Any] = {name: values_of(values) for name, values in columns.items()}
    np.savez(path, **arrays)
    return []


def values_of(values: list[Any]) -> np.ndarray:
    """Integers in 64 bits, with a sign or without."""
    if isinstance(values[0], int) and not isinstance(values[0], bool):
        return np.array(values, np.uint64 if max(values) >= 2**63 else np.int64)
    return np.array(values)


WRITERS: dict[str, Callable[[Path, dict[str, list[Any]], np.random.Generator], list[str]]] = {
    ".csv": as_csv,
    ".parquet": as_parquet,
    ".npz": as_npz,
}
