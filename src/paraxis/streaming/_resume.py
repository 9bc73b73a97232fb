"""The state of a run in one file, so that the same call resumes after it was killed, to the same bits."""

import contextlib
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._host import files
from paraxis._host.digests import plain
from paraxis.errors import CheckpointError

_EVERY = 10.0  # seconds between two savings; more where saving takes long


class Saved(contextlib.AbstractContextManager["Saved"]):
    """The file of a run: within, it is kept up to date; an error leaves it, and success removes it.

    Each process has its own in the folder. A run ``depends`` on a tree of texts, numbers and arrays.

    Attributes:
        state: what an earlier process saved, numbers in arrays as well; ``None``: nothing.
    """

    def __init__(self, folder: str | Path, depends: Any) -> None:
        suffix = f"-{jax.process_index()}" if jax.process_index() else ""
        path = self._path = Path(folder) / f"paraxis-run{suffix}.npz"
        self._digest = _digest(jax.tree.leaves((jax.__version__, depends)))
        self._due, self._make, self.state = time.monotonic() + _EVERY, None, None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = files.locked(path.with_suffix(".lock"))
        try:
            files.remove_rests(path)
            if path.exists():
                self.state = self._read()
        except BaseException as error:
            os.close(self._lock)
            if not isinstance(error, (OSError, ValueError, KeyError, zipfile.BadZipFile)):
                raise
            raise CheckpointError(
                f"Stream: {str(path)!r} cannot be read: {type(error).__name__}: {error}; remove it to begin anew"
            ) from error

    def _read(self) -> Any:
        with self._path.open("rb") as raw, np.load(raw) as file:  # which checks a CRC
            about = json.loads(bytes(file["about"]))
            if about["digest"] != self._digest:
                raise CheckpointError(
                    f"Stream: checkpoint {str(self._path.parent)!r} holds another run, of other arguments, data, "
                    f"chunks or code; give this one another folder, or remove {str(self._path)!r}"
                )
            leaves = [file[f"arr_{at}"].view(jnp.dtype(kind)) for at, kind in enumerate(about["dtypes"])]
        return jax.tree.map(leaves.__getitem__, about["tree"])

    def keep(self, make: Callable[[], Any] | None) -> None:
        """Note how to make the state, numbers and arrays in lists and dicts; save it if it is time, or at an error."""
        self._make, began = make, time.monotonic()
        if make is not None and began >= self._due:
            self._write(make())
            self._due = time.monotonic() + max(_EVERY, 20 * (time.monotonic() - began))

    def _write(self, state: Any) -> None:
        leaves, structure = jax.tree.flatten(state)
        host, tree = [*map(np.asarray, leaves)], structure.unflatten(range(len(leaves)))
        about = {"digest": self._digest, "tree": tree, "dtypes": [x.dtype.name for x in host]}
        try:
            with files.replaced(self._path) as file:
                np.savez(file, *host, about=np.frombuffer(json.dumps(about).encode(), np.uint8))  # pyright: ignore
        except OSError as error:
            raise CheckpointError(f"Stream: {str(self._path)!r} cannot be written: {error}") from error

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            if error is None:
                for path in (self._path, self._path.with_suffix(".lock")):
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # something else is in it
                    self._path.parent.rmdir()
            elif self._make is not None:
                self._write(self._make())
                error.add_note("Stream: saved; the same call goes on from there")
        finally:
            os.close(self._lock)


def _digest(parts: Iterable[Any]) -> str:
    """Return a digest of texts and numbers, and of arrays' numbers."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part)
        if hasattr(part, "dtype"):
            host = plain(part)
            text = f"{host.dtype}{host.shape}"
            digest.update(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()
