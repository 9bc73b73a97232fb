"""Proximal operators: how far a penalty, or a constraint, moves a point.

The operator of a penalty g with strength ``scaling`` takes x to the minimum over z of
``scaling * g(z) + ||z - x||**2 / 2``; that of a constraint projects on what is allowed, whatever the scaling (Parikh
and Boyd, "Proximal algorithms", 2014). All have JAXopt's arguments ``(x, hyperparams=None, scaling=1.0)``, take any
pytree of floats and return its like. A hyperparameter is a number for all leaves, or a tree that is a prefix of ``x``;
each of its leaves may be an array that broadcasts against the leaves of ``x`` below it. Others raise a DataError.
Nothing is communicated. :class:`paraxis.solve.ProximalGradient` takes any function with these arguments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays
from paraxis.errors import DataError

__all__ = ["Prox", "box", "elastic_net", "first", "group", "l1", "non_negative", "none", "simplex"]

Prox = Callable[..., Any]
"""``(x, hyperparams=None, scaling=1.0)`` → the like of ``x``."""


def none(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Return ``x`` itself: no penalty."""
    return x


def l1(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply the penalty ``strength * sum(abs(x))``: values smaller than the strength become 0, others shrink by it.

    Args:
        hyperparams: the strength, not negative; default 1.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.l1(jnp.array([3.0, -0.5, -2.0]), 1.0)
        Array([ 2.,  0., -1.], dtype=float32)

    Source: Donoho and Johnstone 1994 (soft thresholding).
    """
    return _by_leaf("l1", lambda x, strength: x - jnp.clip(x, -strength * scaling, strength * scaling), x, hyperparams)


def elastic_net(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply the penalty ``l1 * sum(abs(x)) + l2 / 2 * sum(x**2)``.

    Args:
        hyperparams: a pair ``(l1, l2)``; default ``(1, 1)``. JAXopt's second number is our ``l2 / l1``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.elastic_net(jnp.array([3.0, -0.5, -2.0]), (1.0, 1.0))
        Array([ 1. ,  0. , -0.5], dtype=float32)

    Source: Zou and Hastie 2005.
    """
    strength, shrinkage = _pair("elastic_net", "(l1, l2)", (1.0, 1.0) if hyperparams is None else hyperparams)
    return _by_leaf("elastic_net", lambda x, l2: x / (1 + l2 * scaling), l1(x, strength, scaling), shrinkage)


def group(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply the group lasso, ``strength`` times the sum of the groups' norms: a group becomes zero as a whole.

    The rows ``x[i]`` of a leaf with two or more dimensions are groups: with coefficients ``(d, k)``, a feature is used
    for all outputs or for none. A leaf ``(d,)`` is one group, and so is a number.

    Args:
        hyperparams: the strength, not negative; default 1. For one strength per row, give an array ``(d, 1)``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.group(jnp.array([[6.0, 8.0], [0.3, 0.4]]), 5.0)
        Array([[3., 4.],
               [0., 0.]], dtype=float32)

    Source: Yuan and Lin 2006.
    """
    return _by_leaf("group", lambda x, own: jnp.maximum(1 - own * scaling / _group_norms(x), 0) * x, x, hyperparams)


def box(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Apply bounds: move each number to the nearest allowed one; the scaling has no effect.

    Args:
        hyperparams: a pair ``(lower, upper)``; an infinite bound leaves its side open. Default ``(0, 1)``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.box(jnp.array([3.0, -0.5, -2.0]), (-1.0, jnp.inf))
        Array([ 3. , -0.5, -1. ], dtype=float32)

    Source: Parikh and Boyd 2014, section 6.2.4.
    """
    lower, upper = _pair("box", "(lower, upper)", (0.0, 1.0) if hyperparams is None else hyperparams)
    return _by_leaf("box", jnp.minimum, _by_leaf("box", jnp.maximum, x, lower), upper)


def non_negative(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Replace negative numbers by zero. ``hyperparams`` and ``scaling`` have no effect.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.non_negative(jnp.array([3.0, -0.5]))
        Array([3., 0.], dtype=float32)

    Source: Parikh and Boyd 2014, section 6.2.4.
    """
    return _by_leaf("non_negative", jnp.maximum, x, 0.0)


def simplex(x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
    """Move each vector along the last axis to the nearest one without negative numbers and with the given sum.

    Args:
        x: each leaf is ``(..., d)``.
        hyperparams: the sum, positive; default 1. For one sum per vector, give an array ``(..., 1)``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.simplex(jnp.array([0.5, 1.5, -3.0]))
        Array([0., 1., 0.], dtype=float32)

    Source: Held, Wolfe and Crowder 1974; Duchi et al. 2008, figure 1 (by sorting).
    """

    def leaf(x: jax.Array, total: jax.Array) -> jax.Array:
        if not x.ndim:
            raise DataError("prox.simplex: each leaf of x must be a vector (..., d), got a number; write x[None]")
        x = x - jnp.max(x, -1, keepdims=True)  # changes no result, and leaves the digits where they count
        descending = -jnp.sort(-x, axis=-1)
        count = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        excess = (jnp.cumsum(descending, -1) - total) / count
        num_positive = jnp.sum(descending > excess, -1, keepdims=True)
        own = count == jnp.maximum(num_positive, 1)
        return jnp.maximum(x - jnp.sum(jnp.where(own, excess, 0), -1, keepdims=True), 0)

    return _by_leaf("simplex", leaf, x, hyperparams)


def first(operator: Prox) -> Prox:
    """Return an operator on the first of a pair ``(coef, intercept)`` only: the intercept is not penalised.

    Two results of ``first(l1)`` are equal, so a second one does not compile programs again. Applied to something other
    than a pair, it raises a DataError.

    Args:
        operator: an operator of this module, or a function with the same arguments. It gets ``hyperparams`` unchanged.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.solve.prox.first(px.solve.prox.l1)((jnp.array([3.0, -0.5]), jnp.array(0.5)), 1.0)
        (Array([2., 0.], dtype=float32), Array(0.5, dtype=float32, weak_type=True))
    """
    return _First(operator)


@dataclasses.dataclass(frozen=True)
class _First:
    operator: Prox

    def __call__(self, x: Any, hyperparams: Any = None, scaling: Any = 1.0) -> Any:
        if not isinstance(x, tuple) or len(x) != 2:
            raise DataError(
                f"prox.first: x must be a pair (coef, intercept), got {type(x).__name__}; for coefficients alone, "
                f"write prox.{getattr(self.operator, '__name__', self.operator)}"
            )
        return self.operator(x[0], hyperparams, scaling), x[1]


def penalty(operator: Prox, x: Any, hyperparams: Any) -> Any:
    """Return the penalty of an operator of this module, a scalar; of a constraint, and of a function of yours, 0."""
    while isinstance(operator, _First):
        operator, x = operator.operator, x[0]
    parts: dict[Prox, Any] = {
        l1: [(lambda x, strength: strength * jnp.abs(x), hyperparams)],
        group: [(lambda x, strength: strength * x**2 / _group_norms(x), hyperparams)],
    }
    if operator is elastic_net:
        strength, shrinkage = hyperparams
        parts[elastic_net] = [(parts[l1][0][0], strength), (lambda x, l2: 0.5 * l2 * x**2, shrinkage)]
    terms = [_by_leaf("penalty", term, x, hyper) for term, hyper in parts.get(operator, [])]
    return sum(map(jnp.sum, jax.tree.leaves(terms)), jnp.zeros(()))


def require_sensible(who: str, operator: Prox, x: Any, hyperparams: Any) -> None:
    """Check the hyperparameters of an operator of this module, as far as their values are at hand.

    Raises:
        TypeError: if there are none: a default strength of 1 makes most solutions zero.
        DataError: if one makes no sense.
    """
    while isinstance(operator, _First):
        operator, x = operator.operator, x[0]
    if hyperparams is None and operator in (l1, elastic_net, group, box):
        raise TypeError(f"{who}: prox.{operator.__name__} needs hyperparams_prox; write run(params, 0.1, …)")
    if hyperparams is None or arrays.is_traced((x, hyperparams)):
        return
    if operator is box:
        inside = box(jax.tree.map(jnp.zeros_like, x), hyperparams)
        raised = _by_leaf("box", jnp.maximum, inside, hyperparams[0])
        if not all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (inside, raised)), strict=True)):
            raise DataError(f"{who}: hyperparams_prox of prox.box must be (lower, upper), got a lower bound above")
    elif operator in (l1, group, elastic_net, simplex) and not all(
        np.all(np.asarray(leaf) >= 0) for leaf in jax.tree.leaves(hyperparams)
    ):
        raise DataError(f"{who}: hyperparams_prox of prox.{operator.__name__} must not be negative, got {hyperparams}")


def _group_norms(x: jax.Array) -> jax.Array:
    """Return the norms of a leaf's groups, in its dimensions; never zero, so that derivatives are finite."""
    axes = tuple(range(1 if x.ndim > 1 else 0, x.ndim))
    square = jnp.sum(x**2, axes, keepdims=True)
    return jnp.sqrt(jnp.where(square > 0, square, jnp.finfo(x.dtype).tiny))


def _pair(who: str, names: str, hyperparams: Any) -> Any:
    if not isinstance(hyperparams, tuple | list) or len(hyperparams) != 2:
        raise DataError(f"prox.{who}: hyperparams must be a pair {names}, got {hyperparams!r}")
    return hyperparams


def _by_leaf(who: str, operator: Callable[[jax.Array, jax.Array], jax.Array], x: Any, hyper: Any) -> Any:
    """Return the operator on each leaf, with the part of ``hyper`` that stands above it, 1 if it is ``None``."""

    def leaf(number: Any, value: Any) -> jax.Array:
        value = jnp.asarray(value)
        found = operator(value, jnp.asarray(number, value.dtype)).astype(value.dtype)
        if found.shape != value.shape:
            raise DataError(f"prox.{who}: hyperparams must broadcast against x {value.shape}, got {jnp.shape(number)}")
        return found

    hyper = 1.0 if hyper is None else hyper
    try:
        jax.tree.structure(hyper).flatten_up_to(x)
    except ValueError as error:
        write = "np.asarray(…) of the list" if isinstance(hyper, list) else "one number for all leaves"
        raise DataError(
            f"prox.{who}: hyperparams must be a number or a tree that is a prefix of x, got "
            f"{jax.tree.structure(hyper)} for {jax.tree.structure(x)}; write {write}"
        ) from error
    return jax.tree.map(lambda number, part: jax.tree.map(lambda value: leaf(number, value), part), hyper, x)
