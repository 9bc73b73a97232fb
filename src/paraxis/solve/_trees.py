"""Pytrees of arrays as vectors, and the linear solve of a solution's derivative."""

from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

EXACT = jax.lax.Precision.HIGHEST  # else accelerators multiply float32 with fewer bits, on which a solver stalls


def dot(a: Any, b: Any) -> Any:
    """Inner product over all leaves, a scalar."""
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.vdot(x, y, precision=EXACT), a, b)))


def norm(a: Any) -> jax.Array:
    return jnp.sqrt(dot(a, a))


def scaled(factor: Any, a: Any) -> Any:
    """``factor * a``, in the dtypes of ``a``."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, a)


def along(a: Any, stepsize: Any, direction: Any) -> Any:
    """Return ``a + stepsize * direction``, in the dtypes of ``a``."""
    return jax.tree.map(lambda x, d: x + numpy_of(x).asarray(stepsize, x.dtype) * d, a, direction)


def minus(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.subtract, a, b)


def numpy_of(x: Any) -> Any:
    """Return ``numpy`` for an array or a number of the host, else ``jax.numpy``: one rule for both."""
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def choose(which: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where ``which``, a scalar, holds; else ``b``. Neither makes the other NaN."""
    if numpy_of(which) is np:
        return a if which else b
    return jax.tree.map(lambda x, y: jnp.where(which, x, y), a, b)


def inverse(derivative: Callable[[Any], Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return what the derivative of a solution's two functions takes to ``right``.

    With M the derivative of ``prox`` and H that of the gradient, that is ``A x = right[1] + M right[0] = b`` for the
    parameters, where ``A = I - M + M H``. A is not symmetric, but both M and H are, and M lies between 0 and I. Let
    ``rest = b - M b``. If ``S w = M (b + rest - H rest)`` with ``S = M - M M + M H M``, then ``x = rest + M w``; and S
    is symmetric, and no less definite than H where M is not zero. (Of a projection, what it holds fast is eliminated.)
    """
    zero = jax.tree.map(jnp.zeros_like, right[0])
    hessian = lambda x: derivative((x, zero))[0]  # noqa: E731
    prox = lambda x: derivative((zero, x))[1]  # noqa: E731
    whole = along(right[1], 1, prox(right[0]))
    rest = minus(whole, prox(whole))
    # On one vector: of a tree, some leaves might not depend on what is differentiated, which JAX cannot transpose.
    vector, unravel = jax.flatten_util.ravel_pytree(prox(minus(along(whole, 1, rest), hessian(rest))))

    def operator(vector: jax.Array) -> jax.Array:
        w = unravel(vector)
        projected = prox(w)
        return jax.flatten_util.ravel_pytree(prox(along(minus(w, projected), 1, hessian(projected))))[0]

    def conjugate(operator: Any, b: jax.Array) -> jax.Array:
        return jax.scipy.sparse.linalg.cg(operator, b, tol=10 * float(jnp.finfo(b.dtype).eps))[0]

    w = unravel(jax.lax.custom_linear_solve(operator, vector, conjugate, symmetric=True))
    params = along(rest, 1, prox(w))
    return params, minus(hessian(params), right[0])
