"""Along which axes of a mesh a collective goes: the program numbers devices, and meshes say what the numbers mean."""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from paraxis._core import jax_api, placing

Groups = tuple[tuple[int, ...], ...]  # the numbers of the devices that take part together
Shape = tuple[tuple[str, int], ...]  # a mesh's axes and their sizes, in order


def used(jaxpr: jax_api.Jaxpr, shardings: Iterable[Any], num_devices: int) -> list[Shape]:
    """Return the meshes of a program that have all its devices: those that it names first."""
    of_shardings = (tuple(side.mesh.shape.items()) for side in shardings if hasattr(side, "mesh"))
    shapes = itertools.chain(named(jaxpr), of_shardings)
    return [s for s in dict.fromkeys(shapes) if s and math.prod(size for _, size in s) == num_devices]


def named(jaxpr: jax_api.Jaxpr) -> Iterator[Shape]:
    for eqn in jax_api.equations(jaxpr):
        place = placement(eqn)
        if place is not None and place.mesh is not None:
            sizes = place.mesh.shape.items()
            yield tuple((place.axis.name if axis == placing.DEVICES else axis, size) for axis, size in sizes)
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                mesh = item if hasattr(item, "axis_names") else getattr(item, "mesh", None)
                if mesh is not None and mesh.axis_names != (placing.DEVICES,):
                    yield tuple(mesh.shape.items())


def placement(eqn: Any) -> placing.Placement | None:
    """Return where a map's elements lie; ``None``: the operation is no map."""
    return eqn.params["placement"] if eqn.primitive.name == "px_map" else None


@functools.lru_cache(maxsize=1024)
def axes(groups: Groups, meshes: tuple[Shape, ...]) -> tuple[str, ...]:
    """Return the axes that groups cross, of a mesh in which they fill these; if there is none, of the first mesh."""
    candidates = list[tuple[str, ...]]()
    for mesh in meshes:
        places = [np.stack(np.unravel_index(group, [size for _, size in mesh]), -1) for group in groups]
        differ = np.any([(place != place[0]).any(0) for place in places], 0)
        crossed = [axis for axis, differs in zip(mesh, differ, strict=True) if differs]
        candidates.append(tuple(name for name, _ in crossed))
        if math.prod(size for _, size in crossed) == max(map(len, groups)):
            return candidates[-1]
    return candidates[0] if candidates else ()


# --- who takes part ----------------------------------------------------------------------------------------------

# Written in one of four ways: every group in full, {{0,1},{2,3}}; as rows of a range that is reshaped and transposed,
# [2,2]<=[2,2]T(1,0); by axes of a mesh, mesh['d'=4,'m'=2] {'m'}, where 'd':(1)2 is a part of an axis; or as pairs.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_RESHAPED = re.compile(r"replica_groups=\[(\d+),(\d+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_BY_AXES = re.compile(r"replica_groups=mesh(?P<mesh>[^{]*)\{(?P<axes>[^}]*)\}")


def groups(text: str) -> Groups:
    """Return the numbers of the devices that take part together, as an operation's text says it; ``()``: all."""
    if reshaped := _RESHAPED.search(text):
        return _rows(_arranged(reshaped[3] or str(int(reshaped[1]) * int(reshaped[2])), reshaped[4]), int(reshaped[2]))
    if by_axes := _BY_AXES.search(text):
        return _along(by_axes["mesh"], by_axes["axes"])
    listed = _LISTED.search(text)
    return tuple(tuple(_ints(group)) for group in listed[1].strip("{}").split("},{")) if listed else ()


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _arranged(sizes: str, order: str | None) -> np.ndarray:
    shape = _ints(sizes)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_ints(order) if order else None)


def _rows(ids: np.ndarray, size: int) -> Groups:
    return tuple(tuple(map(int, row)) for row in ids.reshape(-1, size))


def _along(mesh: str, axes: str) -> Groups:
    """Return the groups along axes of a mesh, or along parts of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    cuts = {
        name: (int(before or 1), int(part or sizes[name]))
        for name, before, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    }
    shape, along = list[int](), list[bool]()
    for name, size in sizes.items():  # what is before the part of an axis, the part, and what is after
        before, part = cuts.get(name, (1, 1))
        shape += [before, part, size // (before * part)]
        along += [False, name in cuts, False]
    ids = np.arange(math.prod(shape))
    if permuted := re.search(r"device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?", mesh):
        ids = _arranged(permuted[1], permuted[2]).ravel()
    ids = ids.reshape(shape).transpose(sorted(range(len(shape)), key=along.__getitem__))
    return _rows(ids, math.prod(size for size, is_part in zip(shape, along, strict=True) if is_part))
