"""An ensemble in a file: a NumPy ``.npz`` with an array ``(size, ...)`` for each of a member's, by its name."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._host import files
from paraxis.errors import DataError, StateError


def write(path: Any, members: Mapping[str, Any]) -> None:
    """Write arrays by their names. An old file stays until the new one is whole."""
    with files.replaced(Path(path)) as file:
        entries: Any = {_entry(name): _plain(np.asarray(x)) for name, x in members.items()}
        np.savez(file, **entries)


def read(path: Any, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return arrays ``(size, ...)`` by name, each ``(...)`` as expected. The archive has a CRC-32 for each.

    Raises:
        DataError: if the file is damaged.
        StateError: if it holds members of another kind.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, TypeError) as error:
        raise DataError(f"load_ensemble: {path} is damaged, or no file of an ensemble ({error})") from error
    if odd := sorted({*map(_entry, like)} ^ {*found}):
        raise StateError(
            f"load_ensemble: the members in {path} are not like one that make gives; they differ in {odd[0]}"
        )
    return {name: _like(path, name, found[_entry(name)], struct) for name, struct in like.items()}


def _like(path: Any, name: str, x: np.ndarray, struct: jax.ShapeDtypeStruct) -> jax.Array:
    if x.dtype == _stored(struct.dtype):
        x = x.view(struct.dtype)
    if x.shape[1:] != struct.shape or x.dtype != struct.dtype or not x.shape:
        raise StateError(
            f"load_ensemble: {name} in {path} is {x.dtype}{list(x.shape[1:])}, but make gives "
            f"{struct.dtype}{list(struct.shape)}"
        )
    return jnp.asarray(x)


def _entry(name: str) -> str:
    return f"members/{name}"


def _plain(x: np.ndarray) -> np.ndarray:
    return x.view(_stored(x.dtype))


def _stored(dtype: Any) -> np.dtype:
    """Return the dtype in the file: of one that is not NumPy's own, such as bfloat16, the bits."""
    dtype = np.dtype(dtype)
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
