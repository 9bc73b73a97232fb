"""The blocks of an array in rows and columns, to be drawn: each with the devices that hold it.

The last dimension that is cut goes to the right, the one before it down, and each choice of blocks of those before that
is a panel of its own.
"""

import dataclasses
import itertools

from paraxis.reports._values import Layout

_MOST_COLUMNS, _MOST_ROWS, _MOST_PANELS = 12, 16, 8


@dataclasses.dataclass(frozen=True)
class Panel:
    """Blocks in two dimensions.

    Attributes:
        title: where along the other dimensions; empty if no other is cut.
        columns: what part of its dimension each column is.
        rows: the same of each row, with the devices of its blocks.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]


def cut(layout: Layout) -> list[int]:
    """Return the dimensions that are cut."""
    return [axis for axis, parts in enumerate(layout.split) if parts > 1]


def label(layout: Layout, *, sized: bool = True) -> str:
    """Return which dimension goes where; ``sized``: and its size."""
    sizes = [f" ({size:,})" if sized else "" for size in layout.shape]
    names = [f"dimension {axis}{sizes[axis]}" for axis in reversed(cut(layout))]
    ways = ["to the right", "down", *["in panels"] * len(names)]
    return ", ".join(f"{name} {way}" for name, way in zip(names, ways, strict=False))


def panels(layout: Layout, *, sized: bool = True) -> tuple[list[Panel], int]:
    """Return the panels of an array in blocks, and the number of blocks that are left out.

    Args:
        layout: at least one of its dimensions is cut.
        sized: whether parts are told by their places, such as ``0:16``, or by their numbers, such as ``1/4``.
    """
    *others, last = cut(layout)
    before = others.pop() if others else None
    parts = {axis: _parts(layout, axis, sized) for axis in cut(layout)}
    down = parts[before] if before is not None else [""]
    width, height = len(parts[last]), len(down)
    found = []
    for number, place in enumerate(itertools.product(*(parts[axis] for axis in others))):
        title = ", ".join(f"dimension {axis}: {part}" for axis, part in zip(others, place, strict=True))
        first = number * height * width
        rows = [
            (part, layout.blocks[first + row * width :][: min(width, _MOST_COLUMNS)]) for row, part in enumerate(down)
        ]
        found.append(Panel(title, tuple(parts[last][:_MOST_COLUMNS]), tuple(rows[:_MOST_ROWS])))
    found = found[:_MOST_PANELS]
    return found, len(layout.blocks) - sum(len(row) for panel in found for _, row in panel.rows)


def _parts(layout: Layout, axis: int, sized: bool) -> list[str]:
    size, number = layout.shape[axis], layout.split[axis]
    if not sized:
        return [f"{part + 1}/{number}" for part in range(number)]
    local = -(-size // number)
    return [f"{part * local}:{min((part + 1) * local, size)}" for part in range(number)]
