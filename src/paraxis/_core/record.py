"""The record of a map, which holds what its primitive's parameters say, and the names of masks over lists.

A map's ``body`` is the jaxpr of one element, traced outside of any mesh with the names of all mapped axes bound,
everything it closes over made an operand.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, ShapedArray
from paraxis._core.placing import Placement

Lowering = Literal["auto", "vmap", "unroll", "lanes"]

OperandMask = Sequence[bool]
"""A boolean for each operand of a map."""
ResultMask = Sequence[bool]
"""A boolean for each result of a map."""


class Map(NamedTuple):
    """A map over the elements of an axis.

    Attributes:
        body: the jaxpr of one element: operands and results ``(...)``.
        shared: which operands all elements share, ``(...)``; the others are rows ``(size, ...)``.
        alike: which of these rows are alike for all elements that a device runs together. A library's loop may count
            its steps so: it has to see one number, and not one for each element.
        summed: which results are summed over the elements, ``(...)``; the others are rows ``(size, ...)``.
        linear: in which operands the body is linear, if it is the transpose of another.
        placement, lowering: where the elements lie, and how a device runs its own.
        axis_env: name and size of each axis that the body may name.
        in_blocks: results stay as devices have them: rows ``(num_padded, ...)``; sums of each device's own elements,
            ``(num_devices, ...)``, of a dtype to add them in.
    """

    body: ClosedJaxpr
    shared: OperandMask
    alike: OperandMask
    summed: ResultMask
    linear: OperandMask
    placement: Placement
    lowering: Lowering
    axis_env: tuple[tuple[str, int], ...]
    in_blocks: bool = False

    @classmethod
    def of(cls, params: Any) -> "Map":
        """Return the record of a primitive's parameters."""
        return cls._make(map(params.__getitem__, cls._fields))

    @property
    def outs(self) -> tuple[int | ShapedArray, ...]:
        """What results in blocks are to be, as :func:`paraxis._core.arrays.from_blocks` is told."""
        return tuple([a if s else 0 for a, s in zip(self.body.out_avals, self.summed, strict=True)])

    @property
    def uses_axis(self) -> bool:
        """Whether the body names its own axis: elements exchange values, or ask for their number."""
        return self.placement.axis.name in jax_api.free_axes(self.body.jaxpr)
