"""A function as a solver asks about it: its value at a point, and its course along a line.

A solver never calls the function itself. It asks a *problem* for a point, and for the line through that point along a
direction. A trial on the line gives value, slope and, where it costs nothing, curvature. What a trial computes and the
next point needs, it keeps. For most functions that is the gradient (:class:`Function`); a generalised linear model
keeps its predictions instead, so that a trial does not read the data (:class:`paraxis.solve._linear.Linear`, which has
the same attributes and methods).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from paraxis.solve import _trees as trees


class Point(NamedTuple):
    """Parameters, and what the function is there. ``cache`` is the problem's own."""

    params: Any
    value: jax.Array
    grad: Any
    aux: Any
    cache: Any


class Trial(NamedTuple):
    """The function at one place of a line: scalars, and what the point there is made of."""

    value: jax.Array
    slope: jax.Array
    curvature: jax.Array  # NaN: not known
    kept: Any


class Line(Protocol):
    """The function along ``params + stepsize * direction``."""

    @property
    def origin(self) -> Trial:
        """Return the trial at step size 0, known without looking."""
        ...

    def at(self, stepsize: jax.Array) -> Trial:
        """Return the trial at a step size."""
        ...


class Passes(NamedTuple):
    """The number of times something reads all the data."""

    start: int
    line: int
    trial: int
    end: int


@dataclasses.dataclass(frozen=True)
class FunctionLine:
    """Any function along a line."""

    value_and_grad: Callable[[Any], tuple[tuple[jax.Array, Any], Any]]
    point: Point
    direction: Any

    @property
    def origin(self) -> Trial:
        slope = trees.dot(self.point.grad, self.direction)
        return Trial(self.point.value, slope, jnp.full_like(slope, jnp.nan), (self.point.grad, self.point.aux))

    def at(self, stepsize: jax.Array) -> Trial:
        (value, aux), grad = self.value_and_grad(trees.along(self.point.params, stepsize, self.direction))
        slope = trees.dot(grad, self.direction)
        return Trial(value, slope, jnp.full_like(slope, jnp.nan), (grad, aux))


@dataclasses.dataclass(frozen=True)
class Function:
    """Any function: each trial computes value and gradient."""

    value_and_grad: Callable[[Any], tuple[tuple[jax.Array, Any], Any]]
    is_linear = False  # whether trials read no data, and what a point keeps is added up from step to step
    is_table = False  # whether loops around it are Python's
    passes = Passes(start=2, line=0, trial=2, end=0)

    def start(self, params: Any) -> Point:
        """Return the point at these parameters."""
        (value, aux), grad = self.value_and_grad(params)
        return Point(params, value, grad, aux, ())

    def ahead(self, direction: Any) -> Any:
        """Return what a line along this direction uses instead of the data; linear in the direction."""
        return ()

    def line(self, point: Point, direction: Any, ahead: Any) -> Line:
        """Return the line from a point; ``ahead`` is that of the direction."""
        return FunctionLine(self.value_and_grad, point, direction)

    def end(self, line: Any, stepsize: jax.Array, trial: Trial) -> Point:
        """Return the point at a step size, of which ``trial`` is the trial."""
        grad, aux = trial.kept
        return Point(trees.along(line.point.params, stepsize, line.direction), trial.value, grad, aux, ())
