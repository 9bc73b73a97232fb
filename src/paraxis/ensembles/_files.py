"""Members in files: one NumPy ``.npz`` each, with a name and a checksum for every array, put in place when whole."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core.errors import DataError, StateError
from paraxis._host import files

_HEADER = "paraxis"  # what NumPy cannot tell: names in order, dtypes that are not its own, kinds of random keys


def write(path: Any, arrays: Mapping[str, jax.Array]) -> None:
    """Write arrays by their names. An old file stays until the new one is whole."""
    with files.replaced(Path(path)) as file:
        _write(file, arrays)


def write_directory(path: Any, members: Iterable[Mapping[str, jax.Array]]) -> None:
    """Write a directory of files, ``member-000.npz`` and so on. An old one stays until the new one is whole.

    Raises:
        StateError: if there is something else at that place.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or _strange(target)):
        raise StateError(
            f"ensemble.save: {target} is there and is not a directory of members only; give a new place: "
            f"ens.save('{target}-ensemble')"
        )
    with files.replaced_directory(target) as directory:
        for index, arrays in enumerate(members):
            write(directory / f"member-{index:03d}.npz", arrays)


def member_files(path: Any) -> list[Path]:
    """The files of a directory that was written, in order.

    Raises:
        StateError: if there are none, or one is missing.
    """
    found = sorted(Path(path).glob("member-*.npz"), key=lambda file: (len(file.name), file.name))
    expected = [f"member-{index:03d}.npz" for index in range(len(found))]
    if not found or [file.name for file in found] != expected:
        raise StateError(
            f"load_ensemble: {path} holds {len(found)} files member-*.npz, "
            f"{'numbered with gaps' if found else 'which is none'}; give the directory that ens.save wrote"
        )
    return found


def read(path: Any) -> dict[str, jax.Array]:
    """The arrays of a file by their names.

    Raises:
        DataError: if it is not whole, or not one of ours.
    """
    try:
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(bytes(file[_HEADER]).decode())
            found = {entry["name"]: (file[str(i)], entry) for i, entry in enumerate(header)}
    except files.ABSENT:
        raise
    except files.DAMAGED as error:
        raise DataError(
            f"load_member: {path} is damaged, or no file of a member ({error}); load another one, the others are not "
            f"touched by it"
        ) from error
    return {name: _decoded(name, *stored) for name, stored in found.items()}


def _write(file: Any, arrays: Mapping[str, jax.Array]) -> None:
    encoded = [_encoded(x) for x in arrays.values()]
    header = [{"name": name, **entry} for name, (_, entry) in zip(arrays, encoded, strict=True)]
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    contents: dict[str, Any] = {_HEADER: text} | {str(i): x for i, (x, _) in enumerate(encoded)}
    np.savez(file, **contents)


def _encoded(x: jax.Array) -> tuple[np.ndarray, dict[str, str]]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x)), {"key": str(jax.random.key_impl(x))}
    plain = np.asarray(x)
    entry = {"dtype": plain.dtype.name}
    if plain.dtype.isbuiltin != 1:  # bfloat16 and the like: their bits
        return plain.view(f"u{plain.dtype.itemsize}"), entry
    return plain, entry


def _decoded(name: str, x: np.ndarray, entry: Mapping[str, str]) -> jax.Array:
    if "key" in entry:
        return jax.random.wrap_key_data(jnp.asarray(x), impl=entry["key"])
    dtype = jnp.dtype(entry["dtype"])
    made = jnp.asarray(x if x.dtype == dtype else x.view(dtype))
    if made.dtype != dtype:
        raise StateError(
            f"load_member: {name} is {dtype} in the file, which JAX would round to {made.dtype}; write "
            f'jax.config.update("jax_enable_x64", True) first'
        )
    return made


def _strange(directory: Path) -> bool:
    return any(not (file.name.startswith("member-") and file.suffix == ".npz") for file in directory.iterdir())
