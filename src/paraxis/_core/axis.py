"""An axis: a named, repeated dimension of a program. A value; it holds no arrays and no devices' state."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from paraxis._core import check
from paraxis.errors import AxisError


@dataclasses.dataclass(frozen=True, repr=False)
class Axis:
    """A named dimension of a program, with a size and, if you like, the devices to lie on.

    The number of elements need not match the number of devices, and the answer never depends on the devices.

    The first of these that applies decides where the elements go:

    * ``mesh`` is given: along the axes ``over`` of that mesh (default: the mesh axis of the same name);
    * ``jax.set_mesh`` is in force: likewise on that mesh; a mesh that lacks the axis is an error;
    * otherwise: over all devices.

    Inside the function that another axis maps, an axis takes the mesh axes that are still free, and runs within one
    device if there are none.

    Args:
        name: what the elements are, in the plural: ``"clients"``.
        size: number of elements, at least 1.
        mesh: a ``jax.sharding.Mesh`` with Auto or Explicit axes. Its other axes are left to the compiler.
        over: the mesh axis, or a tuple of mesh axes (the first varies slowest), along which this axis lies.
        at_once: the largest number of elements per device in flight, forward and backward. It bounds memory and does
            not change the answer. Inside ``jit`` or a program, results of a map that are only summed or averaged are
            not stored; results that are both summed and used themselves are computed twice.

    Raises:
        AxisError: if an argument is malformed, or if a verb uses an axis that cannot be placed.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> members = px.Axis("members", 7)
        >>> px.reduce_sum(jnp.arange(7.0), members)
        Array(21., dtype=float32)
    """

    name: str
    size: int
    _: dataclasses.KW_ONLY
    mesh: Mesh | None = None
    over: str | tuple[str, ...] | None = None
    at_once: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            got = check.described(self.name)
            raise AxisError(f"Axis: name must be a non-empty string, got {got}; write px.Axis('clients', 8)")
        object.__setattr__(self, "size", _positive(self, "size", self.size))
        if self.at_once is not None:
            object.__setattr__(self, "at_once", _positive(self, "at_once", self.at_once))
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise AxisError(
                f"Axis {self.name!r}: mesh must be a jax.sharding.Mesh, got {type(self.mesh).__name__}; "
                f"write px.Axis({self.name!r}, {self.size}, mesh=jax.sharding.Mesh(jax.devices(), ({self.name!r},)))"
            )
        if isinstance(self.over, list):
            object.__setattr__(self, "over", tuple(self.over))
        names = self.mesh_names
        if not names or not all(isinstance(n, str) and n for n in names) or len(set(names)) < len(names):
            got = check.described(self.over)
            raise AxisError(
                f"Axis {self.name!r}: over must be a mesh axis or a tuple of different ones, got {got}; "
                f"write px.Axis({self.name!r}, {self.size}, over='data')"
            )

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """The mesh axes this axis asks for."""
        if self.over is None:
            return (self.name,)
        return self.over if isinstance(self.over, tuple) else (self.over,)

    def __repr__(self) -> str:
        parts = [repr(self.name), str(self.size)]
        if self.mesh is not None:
            parts.append(f"mesh={dict(self.mesh.shape)}")
        if self.over is not None:
            parts.append(f"over={self.over!r}")
        if self.at_once is not None:
            parts.append(f"at_once={self.at_once}")
        return f"Axis({', '.join(parts)})"


def _positive(axis: Axis, argument: str, value: Any) -> int:
    write = f"px.Axis({axis.name!r}, {'8' if argument == 'size' else f'{axis.size}, at_once=8'})"
    return check.count(f"Axis {axis.name!r}", argument, value, write=write, error=AxisError)
