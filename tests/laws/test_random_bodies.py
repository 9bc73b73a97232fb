"""A program means what it says, whatever its body: random ones, against plain ``jax.vmap`` in float64.

A body is a row of random steps over shared and placed operands, branches, loops, weights and masks of elements among
them. Its results are any of the values that it came across: shared ones beside products with them, inputs, values used
twice. Some steps only look at a value, some call back, and every third body closes over what the others are given.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close, axis_on, in_double, values
from tests.laws.test_placement import with_gradients

NUM_AT_NIGHT = 600
SEEDS_OF_EVERY_DAY = [1, 2, 3, 4, 6, 35]  # every place, every reduction, and another body that calls back

Body = Callable[..., tuple[jax.Array, ...]]

UNARY: list[Callable[[jax.Array], jax.Array]] = [
    jnp.sin,
    jnp.tanh,
    jnp.negative,
    lambda v: v.T,
    lambda v: v.sum(0),
    lambda v: v.reshape(-1) / 3.0,
    lambda v: jax.jit(lambda u: u * 2.0)(v),
    lambda v: jnp.where(v > 1.0, v, 0.5 * v),
    lambda v: jax.lax.cond(v.sum() > 0, jnp.sin, jnp.cos, v),
    lambda v: jax.lax.fori_loop(0, 2, lambda _, u: 0.5 * u + jnp.sin(v), v),
    jax.checkpoint(lambda v: jnp.tanh(v) * v),
]
BINARY: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    lambda u, v: u / (2.0 + jnp.cos(v)),
    lambda u, v: u @ v / 4.0,
    lambda u, v: u @ v / 4.0,
    lambda u, v: jax.jit(lambda u, v: u.T @ v)(u, v) / 4.0,
    lambda u, v: jnp.outer(u, v) / 4.0 if u.ndim == v.ndim == 1 else jnp.asarray(0.5) * v,
]
WEIGHING: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    jnp.multiply,
    lambda number, v: v / (2.0 + jnp.cos(number)),
    lambda number, v: jnp.where(number > 0.2, v, 0.0),
    lambda number, v: jnp.where(number > 0.2, jnp.zeros_like(v), v),
]
LOOKING: list[Callable[[jax.Array], Any]] = [jnp.linalg.norm, lambda v: jnp.clip(v, -1.0, 1.0), lambda v: v.T @ v]


def random_body(seed: int) -> Body:
    """A function of shared ``p (3, 2)``, ``r ()``, and placed ``x (4, 3)``, ``y (4, 2)``, with 1 to 4 results.

    Which steps it takes, and on which values, hangs on the seed and on shapes alone.
    """
    looking = [*LOOKING, lambda v: jax.debug.callback(lambda _: None, v)]

    def body(p: jax.Array, r: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        closed_over = np.float32(rng.uniform(0.5, 1.5, (2,)))
        met: list[jax.Array] = [p, r, x, y, jnp.asarray(closed_over), x.T @ (x @ p - y) / 4.0]

        def any_of() -> jax.Array:
            return met[int(len(met) * rng.uniform() ** 0.6)]  # the later ones more often

        for _ in range(rng.integers(2, 7)):
            kind, unary, binary = rng.uniform(), rng.choice(len(UNARY)), rng.choice(len(BINARY))
            u, v = any_of(), any_of()
            if kind < 0.2:
                looking[rng.choice(len(looking))](u if u.ndim else jnp.atleast_1d(u))
            elif kind < 0.5:
                met.append(UNARY[unary](u) if u.ndim == 2 else jnp.sin(u))
            elif kind < 0.65:  # a weight or a mask, of each element or of all alike
                numbers = [r, x[0, 0], y.mean(), *(m for m in met if m.ndim == 0)]
                met.append(WEIGHING[rng.choice(len(WEIGHING))](numbers[rng.choice(len(numbers))], u))
            else:
                try:
                    met.append(BINARY[binary](u, v))
                except (TypeError, ValueError):  # the shapes do not fit
                    met.append(u * r + 1.0)
        return tuple(met[rng.choice(len(met))] if rng.uniform() < 0.5 else any_of() for _ in range(rng.integers(1, 5)))

    return body


REDUCTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda y, w, axis: px.reduce_sum(y, axis), lambda y, w: jax.tree.map(lambda v: v.sum(0), y)),
    (lambda y, w, axis: px.reduce_mean(y, axis), lambda y, w: jax.tree.map(lambda v: v.mean(0), y)),
    (
        lambda y, w, axis: px.reduce_weighted_mean(y, w, axis),
        lambda y, w: jax.tree.map(lambda v: jnp.tensordot(w, v, 1) / w.sum(), y),
    ),
    (
        lambda y, w, axis: px.reduce_mean(y, axis, where=np.arange(axis.size) > 0),
        lambda y, w: jax.tree.map(lambda v: v[1:].mean(0), y),
    ),
]
PLACES = [(8, 8, None), (2, 7, None), (3, 5, 2), (8, 10, None), (1, 3, None), (2, 8, 2)]


def arguments(size: int, seed: int) -> tuple[jax.Array, ...]:
    """``p, r, x, y`` and weights."""
    shapes = ((3, 2), (), (size, 4, 3), (size, 4, 2), (size,))
    return tuple(values(*shape, seed=seed + k) - 0.3 for k, shape in enumerate(shapes))


SEEDS = [s if s in SEEDS_OF_EVERY_DAY else pytest.param(s, marks=pytest.mark.slow) for s in range(NUM_AT_NIGHT)]


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_of_any_body_and_their_gradients_are_those_of_vmap(seed: int) -> None:
    devices, size, at_once = PLACES[seed % len(PLACES)]
    here, there = REDUCTIONS[seed // 2 % len(REDUCTIONS)]
    axis, args = axis_on(devices, size, at_once=at_once), arguments(size, seed)
    body = random_body(seed)

    def program(p: jax.Array, r: jax.Array, x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        if seed % 3 == 0:
            return here(px.map_fn(functools.partial(body, p, r), (x, y), axis), w, axis)
        shared = px.broadcast(p, axis), px.broadcast(r, axis)
        return here(px.map_fn(body, (*shared, x, y), axis), w, axis)

    def oracle(p: jax.Array, r: jax.Array, x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        return there(jax.vmap(functools.partial(body, p, r))(x, y), w)

    expected = in_double(with_gradients(oracle), *args)
    (_, results), gradient = expected
    scale = max(1.0, *(float(np.abs(leaf).max()) for leaf in jax.tree.leaves((results, gradient))))
    assert_close(jax.jit(with_gradients(program))(*args), expected, rtol=1e-4, atol=2e-5 * scale)
