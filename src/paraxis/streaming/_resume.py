"""What a run has done, in one file of its folder, so that the same call goes on after it was killed, to the same bits.

The file is written whole, under another name first. It says by a digest what the run depends on.
"""

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import dtypes
from paraxis.errors import CheckpointError

_EVERY = 10.0
"""Seconds between two savings; more where saving takes long."""


class Saved:
    """The file of a run: within, it is kept up to date; an error leaves it, and success removes it.

    Args:
        who: the method, for errors.
        folder: is made if it is not there.
        depends: texts and arrays that the run depends on.

    Raises:
        CheckpointError: if the folder holds another run, or its file is damaged or cannot be read.
    """

    def __init__(self, who: str, folder: str | Path, depends: Sequence[Any]) -> None:
        self._who, self._path = who, Path(folder) / "paraxis-run.npz"
        self._digest = digest(jax.__version__, *depends)
        self._due = time.monotonic() + _EVERY
        self._make: Callable[[], Any] | None = None
        self.found: Any = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self.found = self._read()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{who}: {str(self._path)!r} cannot be read: {type(error).__name__}: {error}; remove it to begin anew"
            ) from error

    def _read(self) -> Any:
        def restored(found: dict[str, Any]) -> Any:
            if "array" not in found:
                return found
            bits, kind, shape = file[found["array"]], found["kind"], found["shape"]  # which checks a CRC
            if not kind.startswith("key:"):
                return bits.view(dtypes.named(kind)).reshape(shape)
            return jax.random.wrap_key_data(jnp.asarray(bits.view(np.uint32).reshape(shape)), impl=kind[4:])

        with self._path.open("rb") as opened, np.load(opened) as file:
            if bytes(file["digest"]).decode() != self._digest:
                raise CheckpointError(
                    f"{self._who}: folder {str(self._path.parent)!r} holds another run, of other arguments, data, "
                    f"chunks or code; give this one another folder, or remove {str(self._path)!r}"
                )
            return json.loads(bytes(file["state"]), object_hook=restored)

    def __enter__(self) -> Self:
        return self

    def keep(self, make: Callable[[], Any]) -> None:
        """Note how to make what the run has done: numbers and arrays in lists and dicts. It is saved if it is time.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        self._make = make
        began = time.monotonic()
        if began >= self._due:
            self._write()
            self._due = time.monotonic() + max(_EVERY, 20 * (time.monotonic() - began))

    def _write(self) -> None:
        assert self._make is not None
        arrays: dict[str, np.ndarray] = {}

        def noted(x: Any) -> dict[str, Any]:
            host, name = plain(x), f"a{len(arrays)}"
            arrays[name] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
            kind = f"key:{jax.random.key_impl(x)}" if is_key(x) else host.dtype.name
            return {"array": name, "kind": kind, "shape": host.shape}

        state = json.dumps(self._make(), default=noted)
        arrays |= {
            "digest": np.frombuffer(self._digest.encode(), np.uint8),
            "state": np.frombuffer(state.encode(), np.uint8),
        }
        part = self._path.with_name(f".paraxis-run-{os.getpid()}.npz")
        try:
            with part.open("wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(f"{self._who}: {str(self._path)!r} cannot be written: {error}") from error

    def state(self) -> tuple[list[int], list[Any]] | None:
        """Return the numbers and arrays that a solver saved as its whole state; ``None`` if it saved none."""
        return self.found

    def save_state(self, numbers: Sequence[int], arrays: Sequence[Any], *, now: bool = False) -> None:
        """Save numbers and arrays as the whole state of a solver, if it is time, or when it stops."""
        self.keep(lambda: ([*map(int, numbers)], [*arrays]))

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self._path.unlink(missing_ok=True)
            if not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()
        elif self._make is not None:
            self._write()
            error.add_note(f"{self._who}: saved; the same call goes on from there")


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def plain(x: Any) -> np.ndarray:
    """Return an array in the host's memory; of random keys, their data."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


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
