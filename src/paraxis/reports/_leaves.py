"""The arrays of a tree, and where they lie: what is known of them without looking into any.

Modules of NNX are taken apart as NNX does, each of their variables once.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis._jax import jax_api
from paraxis.reports import _layouts
from paraxis.reports._values import Layout

LeafState = Literal["device", "host", "deleted", "struct", "traced"]
_ARRAYS = (jax.Array, jax.Ref, jax.ShapeDtypeStruct, jax_api.ShapedArray)
_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a tree.

    Attributes:
        layout: ``name``, ``shape``, ``dtype``, ``split``, ``blocks``, ``copies``, ``bytes`` and ``bytes_per_device``.
        state: ``"device"``; ``"host"``: NumPy's, or a number; ``"deleted"``: it was donated or deleted, and holds
            nothing; ``"struct"``: only a shape; ``"traced"``: a value of a function that JAX traces.
        platform: of its devices, such as ``"gpu"``; empty if it has none.
        memory: of the devices, if it is not their usual one, such as ``"pinned_host"``.
        is_shared: whether it is an array that the tree has before, so that it takes no memory of its own.
    """

    layout: Layout
    state: LeafState
    platform: str = ""
    memory: str = ""
    is_shared: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices that hold it, or a part of it."""
        return tuple(sorted({device for block in self.layout.blocks for device in block}))


def of(tree: Any) -> tuple[tuple[Leaf, ...], tuple[str, ...]]:
    """Return the arrays of a tree, and what its other leaves are."""
    seen: set[int] = set()
    found: list[Leaf] = []
    others: list[str] = []
    for name, value in named(tree):
        if isinstance(value, _NUMBERS) and not isinstance(value, np.generic):
            kind = type(value).__name__
            found.append(Leaf(Layout(name, (), kind, (), (), 0, 0), "host"))
        elif _is_array(value):
            found.append(_leaf(name, value, id(value) in seen))
            seen.add(id(value))
        else:
            others.append(f"{name or 'it'} is {arguments.described(value)}")
    return tuple(found), tuple(others)


def _is_array(x: Any) -> bool:
    """Return whether it is an array, or a shape, of NumPy's or JAX's: PyTorch's have dtypes of their own."""
    return isinstance(x, _ARRAYS) or (hasattr(x, "shape") and isinstance(getattr(x, "dtype", None), np.dtype))


def named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield each leaf, with its path."""
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=pytrees.is_nnx)[0]:
        name = jax.tree_util.keystr(path).removeprefix(".")
        if pytrees.is_nnx(part):
            yield from _of_nnx(name, part)
        else:
            yield name, part


def _of_nnx(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    from flax import nnx  # it is there: a module of it is

    if isinstance(module, nnx.Variable):
        flat: Any = [((), module)]
    else:
        flat = nnx.to_flat_state(nnx.state(module))
    for keys, variable in flat:
        at = name + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
        value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            yield f"{at}{jax.tree_util.keystr(path)}".removeprefix("."), leaf


def _leaf(name: str, x: Any, is_shared: bool) -> Leaf:
    if arguments.is_traced(x):
        return Leaf(_layouts.unplaced(name, x.shape, x.dtype), "traced")
    if isinstance(x, (np.ndarray, np.generic)):
        return Leaf(_layouts.unplaced(name, x.shape, x.dtype), "host", is_shared=is_shared)
    state = "device" if isinstance(x, (jax.Array, jax.Ref)) else "struct"
    if isinstance(x, jax.Array) and x.is_deleted():
        state = "deleted"
    sharding = getattr(x, "sharding", None)
    try:
        devices = sharding.device_set if sharding is not None else ()
    except ValueError:  # of an abstract mesh, which has none
        devices = ()
    if not devices:
        return Leaf(_layouts.unplaced(name, x.shape, x.dtype), state, is_shared=is_shared)
    device = next(iter(devices))
    memory = getattr(sharding, "memory_kind", None)
    usual = memory in (None, device.default_memory().kind)
    layout = _layouts.of_array(name, x.shape, x.dtype, sharding)
    return Leaf(layout, state, device.platform, "" if usual else str(memory), is_shared)
