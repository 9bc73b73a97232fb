"""Proximal operators: how far a penalty, or a constraint, moves a point.

The operator of a penalty g with strength ``scaling`` takes x to the minimum over z of
``scaling * g(z) + ||z - x||**2 / 2``; that of a constraint projects on what is allowed, whatever the scaling (Parikh
and Boyd, "Proximal algorithms", 2014, whose chapter 6 has these). All have JAXopt's arguments ``(x, hyperparams=None,
scaling=1.0)``, take any pytree of floats and return its like. A hyperparameter is a number for all leaves, or a tree
that is a prefix of ``x``; each of its leaves may be an array that broadcasts to the leaves of ``x`` below it: of a pair
``(coef, intercept)``, a strength ``(0.1, 0.0)`` lets the intercept go free. Nothing is communicated.
:class:`paraxis.solve.ProximalGradient` takes any function with these arguments.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, jax_api
from paraxis.errors import DataError

__all__ = ["box", "elastic_net", "group", "l1", "none"]


def none(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Return ``x`` itself: no penalty."""
    return x


def l1(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply the penalty ``hyperparams * sum(abs(x))``: smaller values become 0, others shrink by it; default 1.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.l1(jnp.array([3.0, -0.5, -2.0]), 1.0)
        Array([ 2.,  0., -1.], dtype=float32)
    """
    return _by_leaf(lambda x, strength: x - jnp.clip(x, -strength * scaling, strength * scaling), x, hyperparams)


def elastic_net(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply ``l1 * sum(abs(x)) + l2 / 2 * sum(x**2)``, of a pair ``(l1, l2)``; JAXopt's second one is our ``l2 / l1``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.elastic_net(jnp.array([3.0, -0.5, -2.0]), (1.0, 1.0))
        Array([ 1. ,  0. , -0.5], dtype=float32)
    """
    strength, shrinkage = (1.0, 1.0) if hyperparams is None else hyperparams
    return _by_leaf(lambda x, l2: x / (1 + l2 * scaling), l1(x, strength, scaling), shrinkage)


def group(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply the group lasso, ``hyperparams`` times the sum of the groups' norms: a group becomes zero as a whole.

    The rows ``x[i]`` of a leaf with two or more dimensions are groups: with coefficients ``(d, k)``, a feature is used
    for all outputs or for none. A leaf ``(d,)`` is one group. For one strength per row, give an array ``(d, 1)``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.group(jnp.array([[6.0, 8.0], [0.3, 0.4]]), 5.0)
        Array([[3., 4.],
               [0., 0.]], dtype=float32)
    """
    return _by_leaf(lambda x, strength: jnp.maximum(1 - strength * scaling / _group_norms(x), 0) * x, x, hyperparams)


def box(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Move each number between bounds, a pair ``(lower, upper)``, of which one may be infinite; default ``(0, 1)``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.box(jnp.array([3.0, -0.5, -2.0]), (-1.0, jnp.inf))
        Array([ 3. , -0.5, -1. ], dtype=float32)
    """
    lower, upper = (0.0, 1.0) if hyperparams is None else hyperparams
    return _by_leaf(jnp.minimum, _by_leaf(jnp.maximum, x, lower), upper)


def penalty(operator: Callable[..., Any], x: Any, hyperparams: Any) -> Any:
    """Return the penalty of an operator of this module, a scalar; of a constraint, and of a function of yours, 0."""
    if operator is elastic_net:
        return penalty(l1, x, hyperparams[0]) + _sum(lambda x, l2: 0.5 * l2 * x**2, x, hyperparams[1])
    if operator is l1:
        return _sum(lambda x, strength: strength * jnp.abs(x), x, hyperparams)
    return _sum(lambda x, strength: strength * x**2 / _group_norms(x), x, hyperparams) if operator is group else 0.0


def require_sensible(who: str, operator: Callable[..., Any], x: Any, hyperparams: Any) -> None:
    """Check the hyperparameters of an operator of this module. With none, a strength of 1 makes most solutions zero."""
    who = f"{who}: hyperparams_prox of prox.{getattr(operator, '__name__', operator)}"
    if hyperparams is None and operator in (l1, elastic_net, group, box):
        raise TypeError(f"{who} is missing; write run(params, 0.1, …)")
    known = [] if jax_api.is_tracing() else [*map(arrays.on_host, jax.tree.leaves(hyperparams))]
    if operator is box and hyperparams is not None and known:  # between bounds that are in order, nothing is moved
        raised = _by_leaf(jnp.maximum, inside := box(x, hyperparams), hyperparams[0])
        if not all(jax.tree.leaves(jax.tree.map(np.array_equal, inside, raised))):
            raise DataError(f"{who} must be (lower, upper), got a lower bound above")
    elif operator in (l1, elastic_net, group) and not all(np.all(x >= 0) for x in known):
        raise DataError(f"{who} must not be negative, got {hyperparams}")


def _group_norms(x: jax.Array) -> jax.Array:
    """Return the norms of a leaf's groups, in its dimensions; never zero, so that derivatives are finite."""
    square = jnp.sum(x**2, tuple(range(1 if x.ndim > 1 else 0, x.ndim)), keepdims=True)
    return jnp.sqrt(jnp.where(square > 0, square, jnp.finfo(x.dtype).tiny))


def _sum(term: Callable[[jax.Array, jax.Array], jax.Array], x: Any, hyper: Any) -> Any:
    return sum(map(jnp.sum, jax.tree.leaves(_by_leaf(term, x, hyper))))


def _by_leaf(operator: Callable[[jax.Array, jax.Array], jax.Array], x: Any, hyper: Any) -> Any:
    """Return the operator on each leaf, with the part of ``hyper`` that stands above it, 1 if it is ``None``."""

    def leaf(value: Any, number: Any) -> jax.Array:
        value = jnp.asarray(value)
        return operator(value, jnp.broadcast_to(jnp.asarray(number, value.dtype), value.shape)).astype(value.dtype)

    return jax.tree.map(leaf, x, jax.tree.broadcast(1.0 if hyper is None else hyper, x))
