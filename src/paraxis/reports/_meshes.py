"""Along which axes of a mesh a collective goes: the program numbers devices, and meshes say what the numbers mean."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from paraxis._axes import placing
from paraxis._jax import jax_api
from paraxis.reports import _hlo

Shape = tuple[tuple[str, int], ...]
"""A mesh's axes and their sizes, in order."""


def used(jaxpr: jax_api.Jaxpr | None, shardings: Iterable[Any], num_devices: int) -> list[Shape]:
    """Return the meshes of a program that have all its devices: those that it names first."""
    of_shardings = (tuple(side.mesh.shape.items()) for side in shardings if hasattr(side, "mesh"))
    shapes = itertools.chain(named(jaxpr) if jaxpr is not None else (), of_shardings)
    return list(dict.fromkeys(shape for shape in shapes if math.prod(size for _, size in shape) == num_devices))


def named(jaxpr: jax_api.Jaxpr) -> Iterator[Shape]:
    """Yield the meshes that each operation of a program names."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "px_map" and (mesh := eqn.params["how"].placement.mesh) is not None:
            name = eqn.params["how"].placement.axis.name
            yield tuple((name if axis == placing.DEVICES else axis, size) for axis, size in mesh.shape.items())
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                mesh = item if hasattr(item, "axis_names") else getattr(item, "mesh", None)
                if mesh is not None and mesh.axis_names != (placing.DEVICES,):
                    yield tuple(mesh.shape.items())
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
