"""The places of a tree's arrays, as text and as a page."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis.reports import _as_html, _as_text, _grids, _leaves, units
from paraxis.reports._leaves import Leaf
from paraxis.reports._page import Page

_MANY = 24
"""Above so many arrays, those that differ by the numbers in their names alone share a line."""
_MOST_LINES = 60
_MOST_PICTURES = 8
_HEAD = ("array", "dtype", "shape", "bytes", "", "where")
_LABELS = {"deleted": "deleted", "traced": "traced, its place is not known", "host": "on the host"}


@dataclasses.dataclass(frozen=True, repr=False)
class Arrays(Page):
    """The arrays of a tree, and where they lie; made by :func:`paraxis.show`.

    It prints as text, and a notebook shows it with drawings; :meth:`save` writes these to a file.

    Attributes:
        leaves: each array; its ``layout`` has ``name``, ``shape``, ``dtype``, ``split``, ``blocks``, ``bytes`` and
            ``bytes_per_device``.
        others: what the leaves are that are no arrays.
    """

    leaves: tuple[Leaf, ...]
    others: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all arrays: each counts once, however many devices hold it; deleted ones hold nothing."""
        return sum(leaf.layout.bytes for leaf in self.leaves if leaf.state != "deleted" and not leaf.is_shared)

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes that each device holds, by its name, such as ``"gpu 3"``; of shapes, those that they would take."""
        found: collections.Counter[tuple[str, int]] = collections.Counter()
        for leaf in self.leaves:
            if leaf.state != "deleted" and not leaf.is_shared and not leaf.memory:
                for device in leaf.devices:
                    found[leaf.platform, device] += leaf.layout.bytes_per_device
        return {f"{platform} {device}": size for (platform, device), size in sorted(found.items())}

    @property
    def _title(self) -> str:
        count = units.of(len(self.leaves), "array")
        return f"{count}, {units.size(self.bytes)}" if self.leaves else count

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield self._title
        yield from (f"  {line}" for line in _held(self.bytes_per_device))
        if self.leaves:
            yield ""
            yield from _as_text.table(_rows(self.leaves), _MOST_LINES)
        if self.others:
            yield f"  No array: {_first(self.others)}"
        pictures = _pictures(self.leaves)
        for who, leaf, sized in pictures[:_MOST_PICTURES]:
            yield ""
            yield f"{who}: the devices of each block, {_grids.label(leaf.layout, sized=sized)}"
            yield from _as_text.picture(leaf.layout, sized=sized)
        if len(pictures) > _MOST_PICTURES:
            yield f"… and {units.of(len(pictures) - _MOST_PICTURES, 'layout')} more"

    def _parts(self) -> Iterator[str]:
        held = _held(self.bytes_per_device)
        if held:
            yield "".join(map(html.note, held))
        if self.leaves:
            yield html.table(_HEAD, _rows(self.leaves))
        if self.others:
            yield html.note(f"No array: {_first(self.others)}")
        for who, leaf, sized in _pictures(self.leaves)[:_MOST_PICTURES]:
            yield f"<div><code>{html.escaped(who)}</code></div>{_as_html.picture(leaf.layout, sized=sized)}"


@arguments.named(jax.ShapeDtypeStruct)
def show(x: Any) -> Arrays:
    """Return which arrays a tree has, how large they are, and which device holds which part of them.

    It reads shapes and shardings only: nothing is sent, copied or waited for, and any number of dimensions is shown.

    Args:
        x: an array, or a tree of arrays: parameters, a :class:`TrainState`, a module of NNX or Equinox; with NumPy's
            arrays, random keys, ``jax.ShapeDtypeStruct`` and arrays that were deleted among them.

    Returns:
        A :class:`paraxis.reports.Arrays`, which prints as text, is drawn by a notebook, and has ``save("x.html")``.

    Raises:
        TypeError: if ``x`` is no tree, as a dictionary whose keys have no order, or has a shape that its sharding does
            not divide.

    Communicates: nothing.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> w = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("model", "data")))
        >>> px.show({"w": w, "step": jnp.int32(3)})
        2 arrays, 516 bytes
          cpu 0: 68 bytes; cpu 1–7: 64 bytes each
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
    return Arrays(*_leaves.of(x))


def _held(bytes_per_device: dict[str, int]) -> list[str]:
    """Return sentences on what devices hold; those in a row that hold as much are named together."""
    by_size: dict[tuple[str, int], list[int]] = {}
    for device, size in bytes_per_device.items():
        platform, _, number = device.rpartition(" ")
        by_size.setdefault((platform, size), []).append(int(number))
    texts = [
        f"{platform} {units.runs(numbers)}: {units.size(size)}{' each' if len(numbers) > 1 else ''}"
        for (platform, size), numbers in by_size.items()
    ]
    return ["; ".join(texts[:4]) + ("; …" if len(texts) > 4 else "")] if texts else []


def _rows(leaves: Sequence[Leaf]) -> list[list[str]]:
    groups: dict[Any, list[Leaf]] = {}
    for number, leaf in enumerate(leaves):
        alike = (_without_numbers(leaf.layout.name), dataclasses.replace(leaf.layout, name=""), leaf.state)
        groups.setdefault((alike, leaf.memory, leaf.is_shared) if len(leaves) > _MANY else number, []).append(leaf)
    return [_row(group) for group in groups.values()]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _row(group: Sequence[Leaf]) -> list[str]:
    leaf, often = group[0], len(group)
    layout = leaf.layout
    name = layout.name if often == 1 else f"{often} × {_without_numbers(layout.name)}"
    each = " each" if often > 1 else ""
    size = "" if leaf.state == "host" and not layout.bytes else f"{units.size(layout.bytes)}{each}"
    local = f"{units.size(layout.bytes_per_device)} per device" if layout.bytes_per_device < layout.bytes else ""
    return [name, layout.dtype, str(layout).partition(",")[0], size, local, _where(leaf)]


def _where(leaf: Leaf) -> str:
    devices = f"{leaf.platform} {units.runs(leaf.devices)}" if leaf.devices else ""
    if leaf.layout.copies > 1:
        devices += f", {leaf.layout.copies} copies" if len(leaf.layout.blocks) > 1 else ", whole on each"
    text = _LABELS.get(leaf.state, devices)
    if leaf.state == "struct":
        text = f"only a shape{devices and f', for {devices}'}"
    shared = "the same array as one above" if leaf.is_shared else ""
    return ", ".join(filter(None, [text, leaf.memory, shared]))


def _pictures(leaves: Sequence[Leaf]) -> list[tuple[str, Leaf, bool]]:
    """Return each way to lie in blocks once: who lies so, one of them, and whether all have its sizes."""
    ways: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        if len(leaf.layout.blocks) > 1 and leaf.state != "deleted":
            parts = tuple((axis, leaf.layout.split[axis]) for axis in _grids.cut(leaf.layout))
            ways.setdefault((leaf.platform, parts, leaf.layout.blocks), []).append(leaf)
    return [
        (_first([leaf.layout.name or "The array" for leaf in alike]), alike[0], len(_sizes(alike)) == 1)
        for alike in ways.values()
    ]


def _sizes(leaves: Sequence[Leaf]) -> set[tuple[int, ...]]:
    return {tuple(leaf.layout.shape[axis] for axis in _grids.cut(leaf.layout)) for leaf in leaves}


def _first(names: Sequence[str], most: int = 2) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
