"""The leaves of a checkpoint by their paths: what Orbax writes of each, and which differ from a target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.errors import StateError

_PYTHON = (bool, int, float, complex, str)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf that is not the same in a checkpoint and in the target.

    Attributes:
        path: of the leaf, as in ``".params['w']"``.
        saved: the leaf in the checkpoint, as in ``"float32 (3, 4)"``; ``None`` if it is missing there.
        wanted: the leaf in the target, likewise.
    """

    path: str
    saved: str | None
    wanted: str | None

    def __str__(self) -> str:
        saved, wanted = self.saved or "missing", self.wanted or "missing"
        return f"{self.path or 'the whole tree'}: {saved} in the checkpoint, {wanted} in the target"


@dataclasses.dataclass(frozen=True)
class Record:
    """The JSON values beside a checkpoint's arrays.

    Attributes:
        kinds: by path, dtype and shape of each leaf, or its Python type.
        values: by path, the Python numbers and texts, which Orbax does not keep whole.
        keys: by path, the implementation of random keys.
        notes: the user's.
    """

    kinds: dict[str, str]
    values: dict[str, Any]
    keys: dict[str, str]
    notes: dict[str, Any]


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, in order."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def split(leaves: Mapping[str, Any], notes: dict[str, Any]) -> tuple[dict[str, Any], Record]:
    """Return the arrays that Orbax writes, and the record beside them."""
    arrays, record = {}, Record({path: kind(path, leaf) for path, leaf in leaves.items()}, {}, {}, notes)
    for path, leaf in leaves.items():
        if type(leaf) in _PYTHON:
            record.values[path] = [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf
            continue
        if _is_key(leaf):
            record.keys[path], leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array) or (jax.process_count() > 1 and leaf.is_fully_addressable):
            leaf = np.asarray(leaf)  # the same in all processes; the first one's is written
            leaf = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
        if leaf.size:  # Orbax refuses empty arrays
            arrays[path] = leaf
    return arrays or {"": np.zeros(1)}, record


def abstract(leaf: Any) -> Any:
    """Return the form in which Orbax loads a leaf: on its devices if it is bound to some, else as a NumPy array."""
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # the memory of one number
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def merge(record: Record, loaded: Mapping[str, Any], path: str, like: Any) -> Any:
    """Return the saved leaf of a path, in the form of the target's."""
    if path in record.values:
        value = record.values[path]
        return complex(*value) if isinstance(like, complex) else type(like)(value)
    x: Any = loaded[path] if path in loaded else np.zeros(abstract(like).shape, abstract(like).dtype)
    if isinstance(like, (np.generic, np.ndarray)):
        return x[()] if isinstance(like, np.generic) else x
    x = jax.random.wrap_key_data(x, impl=record.keys[path]) if path in record.keys else jnp.asarray(x)
    is_placed = getattr(like, "committed", True) and getattr(like, "sharding", None) is not None
    return jax.device_put(x, like.sharding) if is_placed and not x.committed else x


def compare(saved: Mapping[str, str], wanted: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return all differences: the target's leaves in their order, then the checkpoint's others."""
    kinds = {path: kind(path, leaf) for path, leaf in wanted.items()}
    return tuple(Difference(p, saved.get(p), kinds.get(p)) for p in {**kinds, **saved} if saved.get(p) != kinds.get(p))


def kind(path: str, leaf: Any) -> str:
    """Return what a leaf is: ``"float32 (3, 4)"``, ``"key<fry> ()"`` or ``"Python int"``."""
    if type(leaf) in _PYTHON:
        return f"Python {type(leaf).__name__}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not (_is_key(leaf) or dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
        what = type(leaf).__name__ if dtype is None else f"an array of {dtype}"
        raise StateError(
            f"px.Checkpoints: {path} is {what}, which cannot be saved; write arrays, numbers or random keys there, "
            "and keep the rest in notes="
        )
    return f"{dtype if _is_key(leaf) else np.dtype(dtype).name} {tuple(leaf.shape)}"


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
