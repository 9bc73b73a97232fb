"""Layouts of arrays on devices: the number of blocks along each dimension, and which devices hold which block."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._jax import jax_api
from paraxis.reports._values import Layout


def of(compiled: Any, lowered: Any, names: Sequence[str] | None) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Return the layouts of the arguments that a program uses, and those of its results."""
    given, structure = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    if names is None or len(names) != len(given):
        names = argument_names(lowered)
    sides = structure.flatten_up_to(compiled.input_shardings) if given else []
    arguments = [
        of_array(name, info.shape, info.dtype, side, info.donated)
        for name, (_, info), side in zip(names, given, sides, strict=True)
        if side is not None  # nothing reads it
    ]
    infos, sides = jax_api.results_of(lowered, compiled)
    made, structure = jax.tree_util.tree_flatten_with_path(infos)
    results = [
        of_array(f"result{jax.tree_util.keystr(path)}", info.shape, info.dtype, side)
        for (path, info), side in zip(made, structure.flatten_up_to(sides), strict=True)
    ]
    return tuple(arguments), tuple(results)


def argument_names(lowered: Any) -> list[str]:
    """Return a name for each array of the arguments, by its place in them."""
    return [_argument_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]]


def _argument_name(path: Any) -> str:
    """Return a leaf's name in a pair of positional and named arguments."""
    part = jax.tree_util.keystr(path[1:])
    return f"args{part}" if path[:1] and getattr(path[0], "idx", 0) == 0 else part.strip("[]'")


def of_array(name: str, shape: Sequence[int], dtype: Any, sharding: Any, is_donated: bool = False) -> Layout:
    """Return how an array lies, by its sharding."""
    shape = tuple(shape)
    split, blocks = _blocks(sharding, shape)
    block = tuple(-(-n // parts) for n, parts in zip(shape, split, strict=True))
    sizes = _bytes(shape, dtype), _bytes(block, dtype)
    return Layout(name, shape, _named(dtype), split, blocks, *sizes, is_donated, _spec(sharding))


def unplaced(name: str, shape: Sequence[int], dtype: Any) -> Layout:
    """Return the same of an array that is on no device, or of which nobody knows where it lies."""
    shape = tuple(shape)
    size = _bytes(shape, dtype)
    return Layout(name, shape, _named(dtype), (1,) * len(shape), (), size, size)


def _named(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return what an array takes on a device, where numbers of less than a byte lie side by side."""
    return -(-math.prod(shape) * _bits(dtype) // 8)


def _bits(dtype: Any) -> int:
    if dtype == jax.dtypes.float0:
        return 0
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size * 32
    return jax.dtypes.itemsize_bits(dtype) if jnp.issubdtype(dtype, np.number) else np.dtype(dtype).itemsize * 8


def _spec(sharding: Any) -> str:
    spec = getattr(sharding, "spec", None)
    return "" if spec is None else f"P({', '.join(map(repr, spec))})"


@functools.lru_cache(maxsize=1024)
def _blocks(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the number of blocks along each dimension, and the devices that hold each."""
    if len(sharding.device_set) == 1:
        return (1,) * len(shape), (tuple(device.id for device in sharding.device_set),)
    held: dict[tuple[int, ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        held.setdefault(tuple(cut.start or 0 for cut in index), []).append(device.id)
    split = tuple(len({start[axis] for start in held}) for axis in range(len(shape)))
    return split, tuple(tuple(sorted(held[start])) for start in sorted(held))
