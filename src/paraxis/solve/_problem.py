"""A function as a solver asks about it: its value at a point, and its course along a line.

A solver never calls the function itself. It asks a *problem* for a point, and for the line through that point along a
direction. A trial on the line gives value, slope and, where it costs nothing, curvature. What a trial computes and the
next point needs, it keeps. For most functions that is the gradient (:class:`Function`); a generalised linear model
keeps its predictions instead, so that a trial does not read the data (:mod:`paraxis.solve._linear`).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Line(NamedTuple):
    """The function along ``params + stepsize * direction``."""

    origin: Trial  # at stepsize 0, known without looking
    at: Callable[[jax.Array], Trial]
    end: Callable[[jax.Array, Trial], Point]


@dataclasses.dataclass(frozen=True)
class Passes:
    """The number of times something reads all the data."""

    start: int
    line: int
    trial: int
    end: int
    product: int
    refresh: int


class Problem(abc.ABC):
    """A function with its arguments given, to be minimised over ``params``."""

    tight: bool  # whether a trial costs so little that a thorough search pays
    adds_up: bool  # whether what a point keeps is added up from step to step

    @property
    @abc.abstractmethod
    def passes(self) -> Passes:
        """Return how often each question reads all the data."""

    @abc.abstractmethod
    def start(self, params: Any) -> Point:
        """Return the point at these parameters."""

    def refreshed(self, point: Point) -> Point:
        """Return the same point with what it adds up from step to step computed anew."""
        return point

    @abc.abstractmethod
    def line(self, point: Point, direction: Any, cached: Any = None) -> Line:
        """Return the line from a point; ``cached`` is what :meth:`products` or :meth:`ahead` gave for the direction."""

    @abc.abstractmethod
    def ahead(self, direction: Any) -> Any:
        """Return what a line along this direction uses instead of the data; linear in the direction."""

    @abc.abstractmethod
    def products(self, point: Point) -> tuple[Callable[[Any], tuple[Any, Any]], Any]:
        """Return the Hessian at a point, as a function: direction → product, and what a line along it can use.

        The latter is linear in the direction; the second value is that of the direction zero.
        """


@dataclasses.dataclass(frozen=True)
class Function(Problem):
    """Any function: each trial computes value and gradient."""

    value_and_grad: Callable[[Any], tuple[tuple[jax.Array, Any], Any]]
    tight = False
    adds_up = False

    @property
    def passes(self) -> Passes:
        return Passes(start=2, line=0, trial=2, end=0, product=2, refresh=0)

    def start(self, params: Any) -> Point:
        (value, aux), grad = self.value_and_grad(params)
        return Point(params, value, grad, aux, ())

    def line(self, point: Point, direction: Any, cached: Any = None) -> Line:
        unknown = jnp.full((), jnp.nan, point.value.dtype)
        origin = Trial(point.value, trees.dot(point.grad, direction), unknown, (point.grad, point.aux))

        def at(stepsize: jax.Array) -> Trial:
            (value, aux), grad = self.value_and_grad(trees.along(point.params, stepsize, direction))
            return Trial(value, trees.dot(grad, direction), unknown, (grad, aux))

        def end(stepsize: jax.Array, trial: Trial) -> Point:
            grad, aux = trial.kept
            return Point(trees.along(point.params, stepsize, direction), trial.value, grad, aux, ())

        return Line(origin, at, end)

    def ahead(self, direction: Any) -> Any:
        return ()

    def products(self, point: Point) -> tuple[Callable[[Any], tuple[Any, Any]], Any]:
        def product(direction: Any) -> tuple[Any, Any]:
            return jax.jvp(lambda p: self.value_and_grad(p)[1], (point.params,), (direction,))[1], ()

        return product, ()
