"""Leaves of any pytree as arrays that can be written, and back: numbers, keys, weak types, and where they lie."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._host import processes
from paraxis._jax import jax_api
from paraxis.errors import StateError
from paraxis.train.checkpoints import _orbax
from paraxis.train.checkpoints._differences import Kind
from paraxis.train.checkpoints._orbax import Wish

_PYTHON = (bool, int, float, complex, str)


def named(tree: Any, who: str) -> dict[str, Any]:
    """Return the leaves by their paths, in order.

    Raises:
        StateError: if two have the same path.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    if len(found) < len(leaves):
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise StateError(f"{who}: two leaves have the path {twice}; give the keys of the tree other names")
    return found


def kind(path: str, leaf: Any, who: str) -> Kind:
    """Return what a leaf is.

    Raises:
        StateError: if it cannot be saved.
    """
    if isinstance(leaf, jax_api.Tracer):
        raise StateError(f"{who}: {path} is traced by JAX; call {who} outside jit and its kind")
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return Kind(str(leaf.dtype), tuple(leaf.shape))
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        if _orbax.can_hold(np.dtype(leaf.dtype)):
            return Kind(np.dtype(leaf.dtype).name, tuple(leaf.shape))
        raise StateError(
            f"{who}: {path} has dtype {leaf.dtype}, which cannot be saved; save numbers, and keep the rest in notes="
        )
    if type(leaf) in _PYTHON:
        return Kind(f"Python {type(leaf).__name__}", None)
    raise StateError(
        f"{who}: {path} is a {type(leaf).__name__}, which cannot be saved; write arrays, numbers or random keys there"
    )


def stored(leaf: Any) -> tuple[dict[str, Any], Any]:
    """Return what is noted of a leaf, and the array that is written; ``None`` if there is nothing more to write.

    A NumPy array stands for leaves that this process has to itself: the first process's is written.
    """
    if type(leaf) in _PYTHON:
        return {"value": [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf}, None
    note = {}
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        note, leaf = {"key": str(jax.random.key_impl(leaf))}, jax.random.key_data(leaf)
        note |= {"data shape": list(leaf.shape), "data dtype": leaf.dtype.name}
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf, np.asarray(leaf).dtype.newbyteorder("="), order="C")
    elif processes.count() > 1 and leaf.is_fully_addressable:
        leaf = np.asarray(leaf)
    return note, leaf if leaf.size else None


def wish(path: str, note: Mapping[str, Any], like: Any) -> Wish | None:
    """Return how the array of a leaf is to be loaded to become one like another; ``None`` if there is none.

    Raises:
        StateError: if it cannot lie as it should.
    """
    if "value" in note or 0 in like.shape:
        return None
    shape, dtype = _written(note, like)
    if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        _check_wide(path, dtype)
    if not _is_placed(like) or (processes.count() > 1 and like.sharding.is_fully_addressable):
        return Wish(shape, dtype)
    try:
        like.sharding.shard_shape(shape)
    except ValueError as error:
        raise StateError(
            f"restore: {path} has shape {shape}, which cannot be laid out by the target's {like.sharding} ({error}); "
            f"give it another sharding in the target"
        ) from error
    return Wish(shape, dtype, like.sharding)


def restored(note: Mapping[str, Any], data: Any, like: Any) -> Any:
    """Return a leaf like another with the value that was saved. ``data`` is as wished for."""
    if "value" in note:
        return type(like)(*note["value"]) if isinstance(like, complex) else type(like)(note["value"])
    if data is None:
        data = np.zeros(*_written(note, like))
    if isinstance(like, np.generic):
        return data[()]
    if isinstance(like, np.ndarray):
        return data
    if "key" in note:
        data = jax.random.wrap_key_data(data, impl=note["key"])
    if not isinstance(data, jax.Array):
        data = jnp.asarray(data)
    if getattr(like, "weak_type", False):
        data = _weak(data)
    return jax.device_put(data, like.sharding) if _is_placed(like) and not data.committed else data


def _written(note: Mapping[str, Any], like: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array that is written for a leaf."""
    if "key" in note:
        return tuple(note["data shape"]), np.dtype(note["data dtype"])
    return tuple(like.shape), np.dtype(like.dtype).newbyteorder("=")


def _check_wide(path: str, dtype: np.dtype) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise StateError(
            f"restore: {path} has dtype {dtype}, which JAX would narrow; "
            f"write jax.config.update('jax_enable_x64', True), or a NumPy array in the target"
        )


def _is_placed(like: Any) -> bool:
    """Return whether an array is bound to its devices. One that is not goes where it is used."""
    return like.committed if isinstance(like, jax.Array) else getattr(like, "sharding", None) is not None


def _weak(x: jax.Array) -> jax.Array:
    """Return the same values of a type that yields to others, as far as JAX has one of that width."""
    # What is set into an array takes its type.
    base = jnp.broadcast_to(jnp.asarray(x.dtype.type(0).item()), x.shape)
    return base.at[...].set(x) if base.weak_type and base.dtype == x.dtype else x
