"""Means that are still exact when they are put together from parts."""

import dataclasses
import math
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean as two sums: of values times weights, and of weights.

    The sum of the means of several batches, or of parts of one, is the mean of all rows, whatever the batches' sizes.

    Args:
        total: ``()``, sum of values times weights.
        weight: ``()``, sum of the weights: for example the number of rows, or tokens.
        value: ``()``, the mean itself, if it is known without the rounding of a product and a quotient.

    Raises:
        ValueError: by ``float(mean)``, if the sum of the weights is negative or not finite.

    Communicates: nothing; ``float(mean)`` waits for the devices.

    Example:
        >>> import paraxis as px
        >>> float(px.Mean(6.0, 3.0) + px.Mean(2.0, 1.0))
        2.0
    """

    total: Any
    weight: Any
    value: Any = None

    def __add__(self, other: "Mean") -> "Mean":
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.weight + other.weight)

    def __float__(self) -> float:
        weight = float(self.weight)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"px.Mean: weight must be the sum of the weights, at least 0, got {weight}; write px.Mean(6.0, 3.0)"
            )
        if self.value is not None:
            return float(self.value)
        return float(self.total) / weight if weight else math.nan

    def __repr__(self) -> str:
        try:
            return f"Mean({float(self):.6g}, of {float(self.weight):.6g})"
        except (TypeError, ValueError):  # traced, or shapes, or no mean
            return f"Mean(total={self.total!r}, weight={self.weight!r}, value={self.value!r})"

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)
