"""The only file that knows Orbax: arrays under names, to and from a directory."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls.extras import needed

with needed("px.Checkpoints", "train"):
    from orbax.checkpoint import v1 as ocp

_STATE = "state"


@dataclasses.dataclass(frozen=True)
class Wish:
    """The form in which to load an array: onto devices, or without a sharding as a NumPy array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any = None


def start_save(directory: Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Begin to write arrays to a directory that is not there yet, and give what waits for the end of it.

    When this returns, the arrays have been copied and may be changed or donated. The directory gets its name when all
    is written; until then its name is longer. An error while writing is raised by what is returned.

    Communicates: several processes meet at barriers of JAX's coordination service.
    """
    # Orbax refuses to write nothing.
    held = dict(arrays) or {"": np.zeros(1, np.uint8)}
    with _quiet(), _context():
        response = ocp.save_checkpointables_async(os.fspath(directory), {_STATE: held})

    def finish() -> None:
        with _quiet():
            response.result()

    return finish


def load(directory: Path, wishes: Mapping[str, Wish]) -> dict[str, Any]:
    """Return some of the arrays in a directory, as wished.

    Communicates: nothing.

    Raises:
        Exception: of any kind, if the files are not what was written; see ``tells_of_damage``.
    """
    if not wishes:
        return {}
    abstract = {name: _abstract(wish) for name, wish in wishes.items()}
    # Each process by itself: one that finds its part damaged would leave the others waiting inside Orbax.
    me = ocp.multihost.process_index()
    context = _context()
    context.multiprocessing.primary_host, context.multiprocessing.active_processes = me, {me}
    context.pytree.loading.partial_load = True
    with _quiet(), context:
        loaded = ocp.load_checkpointables(os.fspath(directory), {_STATE: abstract})
    return dict(loaded[_STATE])


def tells_of_damage(error: Exception) -> bool:
    """Return whether an error of ``load`` tells of damaged files, rather than of missing memory or permissions."""
    text = str(error)
    short = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Permission denied", "Too many open files")
    return not isinstance(error, (MemoryError, PermissionError)) and not any(words in text for words in short)


def can_hold(dtype: np.dtype) -> bool:
    """Return whether arrays of a type can be written."""
    if jnp.issubdtype(dtype, np.number):
        wide = dtype.itemsize > (16 if jnp.issubdtype(dtype, np.complexfloating) else 8)
        return not wide and dtype.name not in {"uint2", "uint4"}
    return dtype == np.bool_


def _context() -> Any:
    """Orbax's, with the one handler that is needed: it makes each that it knows of, twice for every checkpoint."""
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.PyTreeHandler)
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


def _abstract(wish: Wish) -> Any:
    if wish.sharding is None:
        return np.broadcast_to(np.zeros((), wish.dtype), wish.shape)  # no memory but that of one number
    return jax.ShapeDtypeStruct(wish.shape, wish.dtype, sharding=wish.sharding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax's threads log the traceback of an error once for each of them; it is raised as well, which is enough."""
    logger, drop = logging.getLogger("absl"), _Drop()
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


class _Drop(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "_SignalingThread" not in record.getMessage()
