"""The places of a tree's arrays, as text and as a page."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from paraxis._core import jax_api
from paraxis.reports import _layout, units
from paraxis.reports._page import Page, Section

LeafState = Literal["device", "host", "deleted", "struct", "traced"]
_MOST_LINES = 60
_HEAD = ("array", "dtype", "shape", "bytes", "", "where")


@dataclasses.dataclass(frozen=True)
class Leaf(_layout.Layout):
    """An array of a tree: its layout, and what holds it.

    Attributes:
        state: ``"device"``; ``"host"``: NumPy's, or a number; ``"deleted"``: it was donated or deleted, and holds
            nothing; ``"struct"``: only a shape; ``"traced"``: a value of a function that JAX traces.
        platform: of its devices, such as ``"gpu"``; empty if it has none.
        memory: of the devices, if it is not their usual one, such as ``"pinned_host"``.
    """

    state: LeafState = "host"
    platform: str = ""
    memory: str = ""

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices that hold it, or a part of it."""
        return tuple(sorted({device for block in self.blocks for device in block}))


@dataclasses.dataclass(frozen=True, repr=False)
class Arrays(Page):
    """The arrays of a tree, and where they lie; made by :func:`paraxis.show`.

    Attributes:
        leaves: each array; one that the tree has twice, once.
    """

    leaves: tuple[Leaf, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays: each counts once, however many devices hold it; deleted ones hold nothing."""
        return sum(leaf.bytes for leaf in self.leaves if leaf.state != "deleted")

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes that each device holds, by its name, such as ``"gpu 3"``; of shapes, those that they would take."""
        sizes: collections.Counter[tuple[str, int]] = collections.Counter()
        for leaf in self.leaves:
            if leaf.state != "deleted" and not leaf.memory:
                for device in leaf.devices:
                    sizes[leaf.platform, device] += leaf.bytes_per_device
        return {f"{platform} {device}": size for (platform, device), size in sorted(sizes.items())}

    @property
    def _title(self) -> str:
        parts = [units.of(len(self.leaves), "array"), *[units.size(self.bytes)] * bool(self.leaves)]
        if sizes := self.bytes_per_device:
            parts.append(f"at most {units.size(max(sizes.values()))} per device on {units.of(len(sizes), 'device')}")
        return ", ".join(parts)

    def _sections(self) -> Iterator[Section]:
        ways: dict[Any, list[Leaf]] = collections.defaultdict(list)  # arrays that lie alike are drawn once
        for leaf in self.leaves:
            if len(leaf.blocks) > 1 and leaf.state != "deleted":
                parts = tuple((axis, leaf.split[axis], leaf.shape[axis]) for axis in leaf.cut)
                ways[leaf.platform, parts, leaf.blocks].append(leaf)
        if self.leaves:
            yield Section("", [_row(x) for x in self.leaves], _HEAD, most=_MOST_LINES)
        for alike in ways.values():
            name, more = alike[0].name or "The array", f" and {len(alike) - 1:,} more" * (len(alike) > 1)
            yield from _layout.drawing(name + more, alike[0])


def show(x: Any) -> Arrays:
    """Return which arrays a tree has, how large they are, and which device holds which part of them.

    It reads shapes and shardings only: nothing is sent, copied or waited for, and any number of dimensions is shown.

    Args:
        x: any tree of arrays, such as parameters, a :class:`TrainState`, a module of NNX or Equinox; of JAX or NumPy,
            deleted, or ``jax.ShapeDtypeStruct``.

    Raises:
        TypeError: if ``x`` is no tree, such as an ensemble, whose arrays are ``ens.state``.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> w = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("model", "data")))
        >>> px.show({"w": w, "step": jnp.int32(3)})
        2 arrays, 516 bytes, at most 68 bytes per device on 8 devices
        <BLANKLINE>
          ['step']  int32    scalar      4 bytes                         cpu 0
          ['w']     float32  8/4 × 16/2  512 bytes  64 bytes per device  cpu 0–7
        <BLANKLINE>
        ['w']: the devices of each block, dimension 1 (16) to the right, dimension 0 (8) down
               0:8  8:16
          0:2  0    4
          2:4  1    5
          4:6  2    6
          6:8  3    7
    """
    leaves: dict[Any, Leaf] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(x)[0]:
        name = jax.tree_util.keystr(path).removeprefix(".")
        if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
            leaves[name] = Leaf(name, (), type(value).__name__, (), (), 0, 0)
        elif _layout.is_array(value):
            leaves.setdefault(id(value), _leaf(name, value))
        elif not path:
            raise TypeError(f"show: {type(x).__name__} is no tree of arrays; give its arrays, as ens.state")
    return Arrays(tuple(leaves.values()))


def _leaf(name: str, x: Any) -> Leaf:
    is_host = isinstance(x, (np.ndarray, np.generic))
    sharding = None if is_host or isinstance(x, jax_api.Tracer) else getattr(x, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        sharding = None  # it has no devices
    state: LeafState = "host" if is_host else "device" if isinstance(x, (jax.Array, jax.Ref)) else "struct"
    if isinstance(x, jax_api.Tracer):
        state = "traced"
    elif isinstance(x, jax.Array) and x.is_deleted():
        state = "deleted"
    layout = vars(_layout.layout_of(name, x.shape, x.dtype, sharding))
    if sharding is None:
        return Leaf(**layout, state=state)
    device = next(iter(sharding.device_set))
    is_usual = sharding.memory_kind in (None, device.default_memory().kind)
    return Leaf(**layout, state=state, platform=device.platform, memory="" if is_usual else sharding.memory_kind)


def _row(leaf: Leaf) -> list[str]:
    size = "" if leaf.state == "host" and not leaf.bytes else units.size(leaf.bytes)
    local = f"{units.size(leaf.bytes_per_device)} per device" if leaf.bytes_per_device < leaf.bytes else ""
    devices = f"{leaf.platform} {units.runs(leaf.devices)}" if leaf.devices else ""
    if leaf.copies > 1:
        devices += f", {leaf.copies} copies" if len(leaf.blocks) > 1 else ", whole on each"
    if leaf.memory:
        devices += f", {leaf.memory}"
    shape = f"only a shape{devices and f', for {devices}'}"
    labels = {"deleted": "deleted", "host": "on the host", "struct": shape, "traced": "traced, its place is not known"}
    return [leaf.name, leaf.dtype, str(leaf).partition(",")[0], size, local, labels.get(leaf.state, devices)]
