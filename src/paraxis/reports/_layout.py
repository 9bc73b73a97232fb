"""Layouts of arrays on devices: the blocks along each dimension, the devices that hold each, and drawings of both."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis import _html as html
from paraxis.reports import _page, units

_MOST_COLUMNS, _MOST_ROWS, _MOST_PANELS = 12, 16, 8


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
        cut = " × ".join(
            f"{size}/{parts}" if parts > 1 else f"{size}" for size, parts in zip(self.shape, self.split, strict=True)
        )
        also = f", on {self.copies} devices each" if self.copies > 1 else ""
        return f"{cut or 'scalar'}{also}"


def layout_of(name: str, shape: Sequence[int], dtype: Any, sharding: Any, *, is_donated: bool = False) -> Layout:
    """Return how an array lies, by its sharding; ``None``: it is on no device, or nobody knows where."""
    shape = tuple(shape)
    split, blocks = ((1,) * len(shape), ()) if sharding is None else _blocks(sharding, shape)
    block = tuple(-(-n // parts) for n, parts in zip(shape, split, strict=True))
    named = "float0" if dtype == jax.dtypes.float0 else str(dtype)
    return Layout(name, shape, named, split, blocks, _bytes(shape, dtype), _bytes(block, dtype), is_donated)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return what an array takes on a device, where numbers of less than a byte lie side by side."""
    return -(-math.prod(shape) * _bits(dtype) // 8)


def _bits(dtype: Any) -> int:
    if dtype == jax.dtypes.float0:
        return 0
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size * 32
    return jax.dtypes.itemsize_bits(dtype) if jnp.issubdtype(dtype, np.number) else np.dtype(dtype).itemsize * 8


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


# --- drawn -----------------------------------------------------------------------------------------------------------

# The last dimension that is cut goes to the right, the one before it down, and each choice of blocks of those before
# that is a panel of its own.


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Blocks in two dimensions: where along the others, the parts to the right, and each part down with its blocks."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]


def picture(name: str, layout: Layout) -> _page.Picture:
    """Return a drawing of an array's blocks, which are several, each with the devices that hold it."""
    names = [f"dimension {axis} ({layout.shape[axis]:,})" for axis in reversed(layout.cut)]
    ways = ["to the right", "down", *["in panels"] * len(names)]
    label = ", ".join(f"{name} {way}" for name, way in zip(names, ways, strict=False))
    panels, left_out = _panels(layout)
    lines: list[str] = []
    for panel in panels:
        lines += [f"  {panel.title}"] if panel.title else []
        rows = [[part, *map(units.runs, devices)] for part, devices in panel.rows]
        lines += _page.table([["", *panel.columns], *rows], len(rows) + 1)
    rest = [f"and {left_out:,} more blocks"] if left_out else []
    drawn = f'<div role="img" aria-label="{html.escaped(label)}">{"".join(map(_html_panel, panels))}</div>'
    drawn += "".join(map(html.note, rest))
    return _page.Picture(f"{name}: the devices of each block, {label}", [*lines, *(f"  {x}" for x in rest)], drawn)


def _panels(layout: Layout) -> tuple[list[_Panel], int]:
    """Return the panels of an array in blocks, and the number of blocks that are left out."""
    *others, last = layout.cut
    before = others.pop() if others else None
    parts = {axis: _parts(layout, axis) for axis in layout.cut}
    down = parts[before] if before is not None else [""]
    width, height = len(parts[last]), len(down)
    found = []
    for number, place in enumerate(itertools.product(*(parts[axis] for axis in others))):
        title = ", ".join(f"dimension {axis}: {part}" for axis, part in zip(others, place, strict=True))
        first = number * height * width
        rows = [
            (part, layout.blocks[first + row * width :][: min(width, _MOST_COLUMNS)]) for row, part in enumerate(down)
        ]
        found.append(_Panel(title, tuple(parts[last][:_MOST_COLUMNS]), tuple(rows[:_MOST_ROWS])))
    found = found[:_MOST_PANELS]
    return found, len(layout.blocks) - sum(len(row) for panel in found for _, row in panel.rows)


def _parts(layout: Layout, axis: int) -> list[str]:
    size, number = layout.shape[axis], layout.split[axis]
    local = -(-size // number)
    return [f"{part * local}:{min((part + 1) * local, size)}" for part in range(number)]


_PANEL = "border-collapse: collapse; display: inline-table; width: auto; margin: 0.2em 0.8em 0.2em 0; color: inherit"
_BLOCK = "border: 1px solid currentColor; padding: 0.2em 0.7em; text-align: center; font-size: 0.85em"
_HEAD = "padding: 0.1em 0.5em; font-weight: normal; font-size: 0.8em; opacity: 0.7; border: none; background: none"


def _html_panel(panel: _Panel) -> str:
    style = f"{_HEAD}; text-align: left; white-space: nowrap"
    title = f'<caption style="{style}">{html.escaped(panel.title)}</caption>' if panel.title else ""
    head = "".join(f'<th scope="col" style="{_HEAD}">{html.escaped(part)}</th>' for part in panel.columns)
    rows = [
        f'<tr><th scope="row" style="{_HEAD}">{html.escaped(part)}</th>{"".join(map(_cell, devices))}</tr>'
        for part, devices in panel.rows
    ]
    return f'<table style="{_PANEL}">{title}<tbody><tr><td></td>{head}</tr>{"".join(rows)}</tbody></table>'


def _cell(devices: tuple[int, ...]) -> str:
    tone = f"hsl({47 * devices[0] % 360} 70% 50% / 0.3)"  # text is read on it, on dark and on light
    return f'<td style="{_BLOCK}; background: {tone}">{html.escaped(units.runs(devices))}</td>'
