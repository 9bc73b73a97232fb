"""Along which axes of a mesh a collective goes: the program numbers devices, and meshes say what the numbers mean."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from paraxis._jax import jax_api
from paraxis.reports import _hlo

Shape = tuple[tuple[str, int], ...]
"""A mesh's axes and their sizes, in order."""


def used(jaxpr: jax_api.Jaxpr | None, shardings: Iterable[Any], num_devices: int) -> list[Shape]:
    """Return the meshes of a program that have all its devices: those that it names first."""
    found: dict[Shape, None] = {}
    for mesh in itertools.chain(
        named(jaxpr) if jaxpr is not None else (), (getattr(s, "mesh", None) for s in shardings)
    ):
        if mesh is not None and not mesh.empty and mesh.size == num_devices:
            found[tuple(mesh.shape.items())] = None
    return list(found)


def named(jaxpr: jax_api.Jaxpr) -> Iterator[Any]:
    """Yield the meshes, or nothing, that each operation of a program names."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "px_map":
            yield eqn.params["how"].placement.mesh
        for value in eqn.params.values():
            values = value if isinstance(value, (tuple, list)) else (value,)
            yield from (value if hasattr(value, "axis_names") else getattr(value, "mesh", None) for value in values)
        for sub in jax_api.subjaxprs(eqn):
            yield from named(sub)


@functools.lru_cache(maxsize=1024)
def axes(groups: _hlo.Groups, meshes: tuple[Shape, ...]) -> tuple[str, ...]:
    """Return the fewest axes of a mesh along which such groups lie; if these fill none, the axes that they cross."""
    wanted = {frozenset(group) for group in groups}
    for mesh in meshes:
        names, sizes = [name for name, _ in mesh], [size for _, size in mesh]
        ids = np.arange(int(np.prod(sizes))).reshape(sizes)
        for number in range(1, len(names) + 1):
            for chosen in itertools.combinations(range(len(names)), number):
                if wanted == _groups(ids, chosen):
                    return tuple(names[i] for i in chosen)
    return axes_crossed(groups, meshes)


@functools.lru_cache(maxsize=1024)
def axes_crossed(groups: _hlo.Groups, meshes: tuple[Shape, ...]) -> tuple[str, ...]:
    """Return the axes of the first mesh in which devices of a group differ; a permutation's groups are its pairs."""
    for mesh in meshes:
        sizes = [size for _, size in mesh]
        if max(map(max, groups), default=0) < int(np.prod(sizes)):
            places = [np.stack(np.unravel_index(group, sizes), -1) for group in groups]
            differ = np.any([(place != place[0]).any(0) for place in places], 0)
            return tuple(name for (name, _), crosses in zip(mesh, differ, strict=True) if crosses)
    return ()


def _groups(ids: np.ndarray, chosen: Sequence[int]) -> set[frozenset[int]]:
    rest = [axis for axis in range(ids.ndim) if axis not in chosen]
    size = int(np.prod([ids.shape[axis] for axis in chosen]))
    return {frozenset(map(int, row)) for row in ids.transpose(*rest, *chosen).reshape(-1, size)}
