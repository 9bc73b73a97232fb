"""The derivative of a solution.

A solution is differentiated as what it is, the place where an optimality condition is zero, and not through the steps
that led there (Blondel et al., "Efficient and modular implicit differentiation", 2022). So the derivative does not
depend on the solver, costs a linear solve, and keeps nothing of the iterations.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp

from paraxis.solve import _trees as trees


def right_side(condition: Callable[[Any, Any], Any], params: Any, arguments: Any, moved: Any) -> Any:
    """Return what a condition's derivative by the parameters takes their tangent to; ``moved`` is the arguments'."""
    return trees.scaled(-1, jax.jvp(lambda a: condition(params, a), (arguments,), (moved,))[1])


def through_prox(prox: Callable[[Any], Any], hessian: Callable[[Any], Any], right: Any) -> Any:
    """Return what the derivative of ``params - prox(params - grad)``, by the parameters, takes to ``right``.

    With M the derivative of ``prox`` and H that of ``grad``, it is ``A = I - M + M H``. That is not symmetric, but both
    M and H are, and M lies between 0 and I. Let ``rest = right - M right``. If w solves ``S w = M (right + rest - H
    rest)`` with ``S = M - M M + M H M``, then ``A (rest + M w) = right``; and S is symmetric, and no less definite than
    H where M is not zero. For a projection, this is the elimination of what it holds fast.
    """
    rest = trees.minus(right, prox(right))

    def operator(w: Any) -> Any:
        kept = prox(w)
        return trees.along(kept, -1, prox(trees.minus(kept, hessian(kept))))

    free = prox(trees.minus(jax.tree.map(jnp.add, right, rest), hessian(rest)))
    return jax.tree.map(jnp.add, rest, prox(solved(operator, free)))


def solved(operator: Callable[[Any], Any], right: Any) -> Any:
    """``operator(x) = right`` for a symmetric operator, by conjugate gradients.

    On one vector: of a tree, some leaves might not depend on what is differentiated, which JAX cannot transpose.
    """
    vector, unravel = jax.flatten_util.ravel_pytree(right)

    def product(x: jax.Array) -> jax.Array:
        return jax.flatten_util.ravel_pytree(operator(unravel(x)))[0]

    def conjugate(product: Any, b: Any) -> Any:
        tolerance = float(10 * max(jnp.finfo(x.dtype).eps for x in jax.tree.leaves(b)))
        return jax.scipy.sparse.linalg.cg(product, b, tol=tolerance)[0]

    return unravel(jax.lax.custom_linear_solve(product, vector, conjugate, symmetric=True))
