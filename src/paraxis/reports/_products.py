"""Floating-point operations of one matrix product or convolution in a jaxpr, two for each multiplication.

What is multiplied with zeros that a convolution puts around or between its numbers does not count.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from paraxis._core import jax_api


def of_product(eqn: jax_api.JaxprEqn) -> int:
    """Return how many an operation takes; 0: it is neither a matrix product nor a convolution."""
    if eqn.primitive.name == "conv_general_dilated":
        return _of_convolution(eqn)
    if eqn.primitive.name not in ("dot_general", "ragged_dot_general"):
        return 0
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    shape = _shape(eqn.invars[0])
    size = 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(shape[d] for d in contracted)
    return size // groups(eqn) if ragged and ragged.lhs_ragged_dimensions[0] in contracted else size  # one for each


def groups(eqn: jax_api.JaxprEqn) -> int:
    """Return with how many groups' matrices JAX multiplies each row of ``jax.lax.ragged_dot``, but on TPUs: all."""
    if eqn.primitive.name != "ragged_dot_general":
        return 1
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    _, (batch, _) = numbers.dot_dimension_numbers
    return 1 if numbers.lhs_ragged_dimensions[0] in batch else max(_shape(eqn.invars[2])[-1], 1)


def of_convolution(apart: int, spatial: Iterable[tuple[int, ...]]) -> int:
    """Return how many a convolution takes.

    ``apart`` is the number of its results in one place times that of the channels that each is made of; ``spatial``
    has, for each dimension, what :func:`_met` takes.
    """
    return 2 * apart * math.prod(_met(*dimension) for dimension in spatial)


def _of_convolution(eqn: jax_api.JaxprEqn) -> int:
    params = eqn.params
    given, kernel, results = params["dimension_numbers"]
    shapes = [_shape(eqn.invars[0]), _shape(eqn.invars[1]), _shape(eqn.outvars[0])]
    apart = shapes[2][results[0]] * shapes[2][results[1]] * shapes[1][kernel[1]]
    sizes = ([shape[d] for d in spec[2:]] for shape, spec in zip(shapes, (given, kernel, results), strict=True))
    before = [low for low, _ in params["padding"]]
    ways = params["window_strides"], before, params["lhs_dilation"], params["rhs_dilation"]
    return of_convolution(apart, zip(*sizes, *ways, strict=True))


@functools.lru_cache(maxsize=1024)
def _met(given: int, kernel: int, results: int, stride: int, before: int, apart: int, spread: int) -> int:
    """Return how often numbers of the input and the kernel meet along a dimension, zeros put in between left out.

    ``before`` zeros stand before the input, its numbers are ``apart``, and those of the kernel are ``spread``.
    """
    (few, step), (many, stretch) = sorted([(kernel, spread), (results, stride)])
    places = np.arange(many) * stretch - before
    return sum(_held(places + step * number, given, apart) for number in range(few))


def _held(places: np.ndarray, given: int, apart: int) -> int:
    return int(np.count_nonzero((places >= 0) & (places <= (given - 1) * apart) & (places % apart == 0)))


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
