"""The memory of L-BFGS: the last steps, and how each changed the gradient.

Source: Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", 1989; the two loops are
algorithm 7.4 of Nocedal and Wright, "Numerical Optimization", 2006.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.solve import _trees as trees

_AT_ONCE = 2  # pairs; on an H100, a loop of steps one by one takes three times as long

Precondition = Callable[[tuple[Any, Any]], tuple[Any, Any]]
"""Takes two vectors at once: what takes long is to read a matrix."""


class Memory(NamedTuple):
    """Pairs ``(history_size, ...)`` in a ring; ``rho`` is 0 where there is none."""

    s: Any  # steps
    y: Any  # changes of the gradient
    rho: jax.Array  # 1 / <s, y>
    gamma: jax.Array  # the scale of the initial Hessian's inverse, of the last direction; without pairs, of the next
    num_pairs: jax.Array  # seen since the memory was empty


def empty(params: Any, size: int, gamma: jax.Array) -> Memory:
    """Return a memory without pairs."""
    rho = jnp.zeros((size,), gamma.dtype)
    return Memory(trees.zeros(params, size), trees.zeros(params, size), rho, gamma, jnp.zeros((), jnp.int32))


def forget(memory: Memory, gamma: jax.Array) -> Memory:
    """Return the memory without its pairs. The arrays stay, with a weight of zero."""
    return memory._replace(rho=jnp.zeros_like(memory.rho), gamma=gamma, num_pairs=jnp.zeros_like(memory.num_pairs))


def push(memory: Memory, s: Any, y: Any) -> Memory:
    """Return the memory with one more pair, unless its curvature is not positive beyond rounding, or too small."""
    sy = trees.dot(s, y)
    eps = jnp.finfo(sy.dtype).eps
    rho = 1 / jnp.where(sy == 0, 1, sy)
    good = (sy > eps * trees.norm(s) * trees.norm(y)) & jnp.isfinite(rho)  # of a short step in float16 it is not
    index = memory.num_pairs % memory.rho.shape[0]

    def put(history: jax.Array, new: jax.Array) -> jax.Array:
        return history.at[index].set(jnp.where(good, new, history[index]))

    return Memory(
        jax.tree.map(put, memory.s, s),
        jax.tree.map(put, memory.y, y),
        put(memory.rho, rho),
        memory.gamma,
        memory.num_pairs + good,
    )


def descent(memory: Memory, grad: Any, precondition: Precondition) -> tuple[Any, jax.Array]:
    """Minus the inverse Hessian, as far as it is remembered, times the gradient; and the scale where it began."""
    size = memory.rho.shape[0]
    newest_last = (memory.num_pairs + jnp.arange(size)) % size

    def backwards(r: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        s, y = _pair(memory, index)
        alpha = memory.rho[index] * trees.dot(s, r)
        return trees.along(r, -alpha, y), alpha

    def forwards(r: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        index, alpha = step
        s, y = _pair(memory, index)
        return trees.along(r, alpha - memory.rho[index] * trees.dot(y, r), s), None

    r, alphas = jax.lax.scan(backwards, trees.scaled(-1, grad), newest_last, reverse=True, unroll=_AT_ONCE)
    newest = newest_last[-1]
    s, y = _pair(memory, newest)
    r, of_y = precondition((r, y))
    scale = jnp.where(memory.rho[newest] > 0, trees.dot(y, of_y), 0)
    gamma = jnp.where(scale > 0, trees.dot(s, y) / jnp.where(scale > 0, scale, 1), memory.gamma)
    return jax.lax.scan(forwards, trees.scaled(gamma, r), (newest_last, alphas), unroll=_AT_ONCE)[0], gamma


def _pair(memory: Memory, index: jax.Array) -> tuple[Any, Any]:
    return jax.tree.map(lambda history: history[index], (memory.s, memory.y))
