"""Classical test functions with what is known of their minima, for the tests of the solvers.

Sources: Moré, Garbow and Hillstrom, "Testing unconstrained optimization software", 1981; Jamil and Yang, "A literature
survey of benchmark functions for global optimization problems", 2013. Written in arithmetic that NumPy and JAX share.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Classic(NamedTuple):
    """A function of a vector, which is 0 at its minima, and vectors to start from."""

    fun: Callable[[Any], Any]
    starts: tuple[tuple[float, ...], ...]


def in_float64(test: Callable[..., None]) -> Callable[..., None]:
    """The test, with float64 as JAX's dtype while it runs."""

    @functools.wraps(test)
    def wide(*args: Any, **kwargs: Any) -> None:
        with jax.enable_x64(True):
            test(*args, **kwargs)

    return wide


def rosenbrock(x: Any) -> Any:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def beale(x: Any) -> Any:
    return sum((c - x[0] * (1 - x[1] ** p)) ** 2 for c, p in ((1.5, 1), (2.25, 2), (2.625, 3)))


def wood(x: Any) -> Any:
    a, b, c, d = x
    valleys = 100 * (b - a**2) ** 2 + (1 - a) ** 2 + 90 * (d - c**2) ** 2 + (1 - c) ** 2
    return valleys + 10 * (b + d - 2) ** 2 + 0.1 * (b - d) ** 2


def powell_singular(x: Any) -> Any:
    a, b, c, d = x
    return (a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4


def ill_conditioned(x: Any) -> Any:
    """A quadratic whose curvatures are 1 to 1e4."""
    return 0.5 * (np.logspace(0, 4, 12) * (x - np.arange(12) / 6) ** 2).sum()


CLASSICS = {
    "Rosenbrock": Classic(rosenbrock, ((-1.2, 1), (0, 0), (3, -2), (-4, 10))),
    "Beale": Classic(beale, ((1, 1), (0, 0), (2, 0), (3.5, 0.2))),
    "Wood": Classic(wood, ((-3, -1, -3, -1), (0, 0, 0, 0), (2, 2, 2, 2))),
    "Powell's singular": Classic(powell_singular, ((3, -1, 0, 1), (1, 1, 1, 1), (-2, 4, 2, 0))),
    "condition 1e4": Classic(ill_conditioned, ((0,) * 12, (1, -1) * 6)),
}


def labelled(num_rows: int, num_features: int, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows and classes that overlap, so that a minimum exists without a penalty; float64 and int32."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_features))
    scores = x @ rng.normal(size=(num_features, num_classes)) + 2 * rng.gumbel(size=(num_rows, num_classes))
    return x, scores.argmax(1).astype(np.int32)


def softmax(z: np.ndarray) -> np.ndarray:
    """Probabilities ``(n, k)`` by NumPy."""
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
