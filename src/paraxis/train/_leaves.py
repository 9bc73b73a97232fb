"""The leaves of a checkpoint by their paths: what Orbax writes of each, and which differ from a target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import prng_key

from paraxis._core import pytrees
from paraxis._core.check import needed
from paraxis.errors import StateError
from paraxis.train._models import is_a

BEST = "best"  # before the paths of a second tree: no other path begins with a letter
_PYTHON = (bool, int, float, str)


def orbax() -> Any:
    """Return Orbax, which takes a second or two to load. Its types are narrower than what it takes."""
    with needed("px.Checkpoints", "train"):
        from orbax.checkpoint import v1
    return v1


def by_path(tree: Any, prefix: str = "") -> dict[str, Any]:
    return {pytrees.name(prefix, path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def split(leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays that Orbax writes, and a record of JSON values beside them, by path.

    The record has the ``kinds`` of all leaves, the ``values`` of Python numbers and texts, and the implementation of
    random ``keys``.
    """
    arrays, values, keys = dict[str, Any](), dict[str, Any](), dict[str, str]()
    kinds = {path: kind(path, leaf) for path, leaf in leaves.items()}
    for path, leaf in leaves.items():
        if type(leaf) in _PYTHON:
            values[path] = leaf
            continue
        if is_a(prng_key, leaf):
            keys[path], leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array) or (jax.process_count() > 1 and leaf.is_fully_addressable):
            leaf = np.asarray(leaf)  # the same in all processes; the first one's is written
        if leaf.size:  # Orbax refuses empty arrays
            arrays[path] = leaf
    return arrays or {"": np.zeros(1)}, {"kinds": kinds, "values": values, "keys": keys}


def load(directory: Path, record: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {path: _abstract(x) for path, x in targets.items() if path not in record["values"] and 0 not in x.shape}
    ocp = orbax()
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load(directory, wanted, checkpointable_name="state") if wanted else {}
    return {path: _like(x, record, loaded, path) for path, x in targets.items()}


def _abstract(leaf: Any) -> Any:
    """Return the form in which Orbax loads a leaf: on its devices if it is bound to some, else as a NumPy array."""
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if is_a(prng_key, leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # the memory of one number
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _like(target: Any, record: Mapping[str, Any], loaded: Mapping[str, Any], path: str) -> Any:
    if path in record["values"]:
        return type(target)(record["values"][path])
    x: Any = loaded[path] if path in loaded else np.zeros(_abstract(target).shape, _abstract(target).dtype)
    if isinstance(target, (np.generic, np.ndarray)):
        return x
    x = jax.random.wrap_key_data(x, impl=record["keys"][path]) if path in record["keys"] else jnp.asarray(x)
    is_placed = getattr(target, "committed", True) and getattr(target, "sharding", None) is not None
    return jax.device_put(x, target.sharding) if is_placed and not x.committed else x


def compare(saved: Mapping[str, str], wanted: Mapping[str, Any], *, best: bool = False) -> dict[str, str]:
    """Return all differences by path: the target's leaves in their order, then the checkpoint's others."""
    saved = {path: kind for path, kind in saved.items() if path.startswith(BEST) == best}
    kinds = {path: kind(path, leaf) for path, leaf in wanted.items()}
    both = {path: (saved.get(path, "missing"), kinds.get(path, "missing")) for path in {**kinds, **saved}}
    return {
        path: f"{path or 'the whole tree'}: {was} in the checkpoint, {is_now} in the target"
        for path, (was, is_now) in both.items()
        if was != is_now
    }


def kind(path: str, leaf: Any) -> str:
    """Return what a leaf is: ``"float32 (3, 4)"``, ``"key<fry> ()"`` or ``"Python int"``."""
    if type(leaf) in _PYTHON:
        return f"Python {type(leaf).__name__}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not (is_a(prng_key, leaf) or dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
        what = type(leaf).__name__ if dtype is None else f"an array of {dtype}"
        raise StateError(f"px.Checkpoints: {path} is {what}, which cannot be saved; keep it out, or in notes=")
    return f"{dtype if is_a(prng_key, leaf) else np.dtype(dtype).name} {tuple(leaf.shape)}"
