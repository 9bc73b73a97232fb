"""What a run has done, in one file of its folder, so that the same call goes on after it was killed, to the same bits.

The file is written whole, under another name first. It says what the run depends on, by digests.
"""

import hashlib
import json
import os
import re
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._jax import dtypes
from paraxis.errors import CheckpointError

_EVERY = 10.0
"""Seconds between two savings; more where saving takes long."""


class Saved:
    """The file of a run.

    Args:
        who: the method, for errors.
        folder: is made if it is not there.
        depends: what the run depends on, as digests by name.

    Raises:
        CheckpointError: if the folder holds another run, or its file is damaged or cannot be read.
    """

    def __init__(self, who: str, folder: Path, depends: Mapping[str, str]) -> None:
        self._who, self._path, self._depends = who, folder / "paraxis-run.npz", dict(depends)
        self._due = time.monotonic() + _EVERY
        self._found: tuple[dict[str, Any], list[Any]] | None = None
        self._waiting: tuple[Mapping[str, Any], Sequence[Any]] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._found = self._read()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{who}: {str(self._path)!r} cannot be read: {type(error).__name__}: {error}; remove it to begin anew"
            ) from error

    def _read(self) -> tuple[dict[str, Any], list[Any]]:
        with self._path.open("rb") as opened, np.load(opened) as file:
            head = json.loads(bytes(file["head"]))
            arrays = [_restored(file[f"a{n}"], *kind) for n, kind in enumerate(head["kinds"])]  # checks each CRC
        depends = head["depends"]
        differs = [name for name, digest in self._depends.items() if depends.get(name) != digest]
        if differs:
            raise CheckpointError(
                f"{self._who}: folder {str(self._path.parent)!r} holds another run: {differs[0]} differs; give this "
                f"one another folder, or remove {str(self._path)!r}"
            )
        return head["said"], arrays

    def load(self) -> tuple[dict[str, Any], list[Any]] | None:
        """Return what was saved last, numbers and arrays; ``None`` if nothing was."""
        return self._found

    def save(self, said: Mapping[str, Any], arrays: Sequence[Any], *, now: bool = False) -> None:
        """Save numbers and arrays, if it is time.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        began = time.monotonic()
        self._waiting = None if now or began >= self._due else (said, arrays)
        if self._waiting:
            return
        hosts = [plain(x) for x in arrays]
        kinds = [[_kind(x), list(y.shape)] for x, y in zip(arrays, hosts, strict=True)]
        head = json.dumps({"depends": self._depends, "said": dict(said), "kinds": kinds}).encode()
        part = self._path.with_name(f".paraxis-run-{os.getpid()}.npz")
        try:
            with part.open("wb") as file:
                bits = {f"a{n}": np.ascontiguousarray(x).reshape(-1).view(np.uint8) for n, x in enumerate(hosts)}
                np.savez(file, head=np.frombuffer(head, np.uint8), **bits)  # pyright: ignore[reportArgumentType]
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(f"{self._who}: {str(self._path)!r} cannot be written: {error}") from error
        now_is = time.monotonic()
        self._due = now_is + max(_EVERY, 20 * (now_is - began))

    def state(self) -> tuple[list[int], list[Any]] | None:
        """Return the numbers and arrays that a solver saved last as its whole state; ``None`` if it saved none."""
        return None if self._found is None else (self._found[0]["numbers"], self._found[1])

    def save_state(self, numbers: Sequence[int], arrays: Sequence[Any], *, now: bool = False) -> None:
        """Save numbers and arrays as the whole state of a solver, if it is time."""
        self.save({"numbers": [*map(int, numbers)]}, arrays, now=now)

    def flush(self) -> None:
        """Save what was given last, and was not yet due."""
        if self._waiting:
            self.save(*self._waiting, now=True)

    def clear(self) -> None:
        """Remove the file of a run that is done, and the folder if nothing else is in it."""
        self._path.unlink(missing_ok=True)
        if not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()


def plain(x: Any) -> np.ndarray:
    """Return an array in the host's memory; of random keys, their data."""
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _kind(x: Any) -> str:
    is_key = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return f"key:{jax.random.key_impl(x)}" if is_key else np.asarray(x).dtype.name


def _restored(bits: np.ndarray, kind: str, shape: Sequence[int]) -> Any:
    if not kind.startswith("key:"):
        return bits.view(dtypes.named(kind)).reshape(shape)
    return jax.random.wrap_key_data(jnp.asarray(bits.view(np.uint32).reshape(shape)), impl=kind[4:])


def digest(*parts: Any) -> str:
    """Return a digest of texts and of arrays' numbers."""
    found = hashlib.sha256()
    for part in parts:
        if not isinstance(part, str):
            host = plain(part)
            part = f"{host.dtype}{host.shape}"
            found.update(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)
        found.update(f"{len(part)} {part}".encode())
    return found.hexdigest()


def text_of(jaxpr: Any) -> str:
    """Return a program's text without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))
