"""Pytrees of arrays as vectors."""

from typing import Any

import jax
import jax.numpy as jnp

EXACT = jax.lax.Precision.HIGHEST
"""Accelerators multiply float32 with fewer bits unless asked not to; a solver would stall on that."""


def dot(a: Any, b: Any) -> Any:
    """Inner product over all leaves, a scalar."""
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.vdot(x, y, precision=EXACT), a, b)))


def norm(a: Any) -> jax.Array:
    """Euclidean norm over all leaves, a scalar."""
    return jnp.sqrt(dot(a, a))


def scaled(factor: Any, a: Any) -> Any:
    """``factor * a``, in the dtypes of ``a``."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, a)


def along(a: Any, stepsize: Any, direction: Any) -> Any:
    """Return ``a + stepsize * direction``, in the dtypes of ``a``."""
    return jax.tree.map(lambda x, d: x + jnp.asarray(stepsize, x.dtype) * d, a, direction)


def minus(a: Any, b: Any) -> Any:
    """Return ``a - b``."""
    return jax.tree.map(jnp.subtract, a, b)


def choose(which: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where ``which``, a scalar, holds; else ``b``. Neither makes the other NaN."""
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), a, b)
