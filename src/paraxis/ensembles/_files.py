"""An ensemble in a file: a NumPy ``.npz`` with an array ``(size, ...)`` for each of a member's, by its name."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paraxis._host import files
from paraxis.errors import DataError, StateError


def write(path: Any, members: Mapping[str, Any]) -> None:
    """Write arrays by their names. An old file stays until the new one is whole."""
    with files.replaced(Path(path)) as file:
        entries: Any = {f"members/{name}": np.asarray(x).view(_stored(x.dtype)) for name, x in members.items()}
        np.savez(file, **entries)


def read(path: Any, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Return arrays ``(size, ...)`` by name, each ``(...)`` as expected. The archive has a CRC-32 for each.

    Raises:
        DataError: if the file is damaged.
        StateError: if it holds members of another kind.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name.removeprefix("members/"): archive[name] for name in archive.files}
    except (ValueError, EOFError, KeyError, NotImplementedError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"load_ensemble: {path} is damaged, or no file of an ensemble ({error})") from error
    if odd := sorted({*like} ^ {*found}):
        raise StateError(f"load_ensemble: members in {path} are not like one that make gives; they differ in {odd[0]}")
    for name, struct in like.items():
        x = found[name]
        if (x.shape[1:], x.dtype) != (struct.shape, _stored(struct.dtype)) or not x.shape:
            raise StateError(
                f"load_ensemble: {name} in {path} is {x.dtype}{list(x.shape[1:])}, but make gives "
                f"{struct.dtype}{list(struct.shape)}"
            )
    return {name: found[name].view(struct.dtype) for name, struct in like.items()}


def _stored(dtype: Any) -> np.dtype:
    """Return the dtype in the file: of one that is not NumPy's own, such as bfloat16, the bits."""
    dtype = np.dtype(dtype)
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
