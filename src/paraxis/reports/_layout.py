"""Layouts of arrays on devices: the blocks along each dimension, the devices that hold each, and tables of both."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.reports import _page, units

_MOST_COLUMNS, _MOST_ROWS, _MOST_TABLES = 12, 16, 8


@dataclasses.dataclass(frozen=True)
class Layout:
    """An array on its devices.

    Attributes:
        name: such as ``w['a']``.
        shape: of all of it.
        dtype: by name.
        split: for each dimension, into how many blocks it is cut.
        blocks: for each block, in the order of the dimensions, the numbers of the devices that hold it.
        bytes: of all of it.
        bytes_per_device: of what one device holds.
        is_donated: whether its memory is given away.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    bytes: int
    bytes_per_device: int
    is_donated: bool = False

    @property
    def copies(self) -> int:
        """Return the number of devices that hold the same."""
        return max(map(len, self.blocks), default=1)

    @property
    def cut(self) -> list[int]:
        """Return the dimensions that are cut."""
        return [axis for axis, parts in enumerate(self.split) if parts > 1]

    def __str__(self) -> str:
        cut = " × ".join(f"{n}/{k}" if k > 1 else f"{n}" for n, k in zip(self.shape, self.split, strict=True))
        also = f", on {self.copies} devices each" if self.copies > 1 else ""
        return f"{cut or 'scalar'}{also}"


def is_array(leaf: Any) -> bool:
    """Return whether a leaf of a tree is an array, or stands for one; a number of Python's is none."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def layout_of(name: str, shape: Sequence[int], dtype: Any, sharding: Any, *, is_donated: bool = False) -> Layout:
    """Return how an array lies, by its sharding; ``None``: it is on no device, or nobody knows where."""
    shape = tuple(shape)
    split, blocks = ((1,) * len(shape), ()) if sharding is None else _blocks(sharding, shape)
    block = tuple(-(-n // parts) for n, parts in zip(shape, split, strict=True))
    named = "float0" if dtype == jax.dtypes.float0 else str(dtype)
    return Layout(name, shape, named, split, blocks, _bytes(shape, dtype), _bytes(block, dtype), is_donated)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return what an array takes on a device, where numbers of less than a byte lie side by side."""
    is_number = jnp.issubdtype(dtype, np.number)
    return -(-math.prod(shape) * (jax.dtypes.itemsize_bits(dtype) if is_number else dtype.itemsize * 8) // 8)


@functools.lru_cache(maxsize=1024)
def _blocks(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the number of blocks along each dimension, and the devices that hold each."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(tuple(cut.start or 0 for cut in index), []).append(device.id)
    split = tuple(len({start[axis] for start in holders}) for axis in range(len(shape)))
    return split, tuple(tuple(sorted(holders[start])) for start in sorted(holders))


def drawing(name: str, layout: Layout, *, in_text: bool = True) -> Iterator[_page.Section]:
    """Yield tables of an array's blocks, which are several, with the devices that hold each.

    The last dimension that is cut goes to the right, the one before it down, and each choice of blocks of those before
    that is a table of its own.
    """
    names = [f"dimension {axis} ({layout.shape[axis]:,})" for axis in reversed(layout.cut)]
    ways = ["to the right", "down", *["in tables"] * len(names)]
    title = f"{name}: the devices of each block, {', '.join(map(' '.join, zip(names, ways, strict=False)))}"
    *others, down, right = [[""], *(_parts(layout, axis) for axis in layout.cut)][-max(len(names), 2) :]
    places = [*itertools.product(*others)]
    blocks = np.array([units.runs(devices) for devices in layout.blocks]).reshape(len(places), len(down), len(right))
    shown = blocks[:_MOST_TABLES, :_MOST_ROWS, :_MOST_COLUMNS]
    for number, (place, table) in enumerate(zip(places, shown, strict=False)):
        where = ", ".join(f"dimension {axis}: {part}" for axis, part in zip(layout.cut, place, strict=False))
        rows = [[part, *map(str, row)] for part, row in zip(down, table, strict=False)]
        is_last = number == len(shown) - 1 and shown.size < blocks.size
        yield _page.Section(
            title="\n  ".join(filter(None, (title * (not number), where))),
            rows=rows,
            head=["", *right[:_MOST_COLUMNS]],
            has_head=True,
            notes=[f"and {blocks.size - shown.size:,} more blocks"] * is_last,
            in_text=in_text,
            most=len(rows),
        )


def _parts(layout: Layout, axis: int) -> list[str]:
    size, number = layout.shape[axis], layout.split[axis]
    local = -(-size // number)
    return [f"{part * local}:{min((part + 1) * local, size)}" for part in range(number)]
