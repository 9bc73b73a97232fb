"""The product of all factors but one, and its derivatives, by reductions over the elements.

    Π xⱼ, j ≠ i  =  (Π fⱼ / fᵢ) · Π (1 + eⱼ / fⱼ) · Π gⱼ · Π hⱼ        xⱼ + eⱼ = fⱼ + eⱼ, or gⱼ = eⱼ, or hⱼ = ±∞, NaN

The factors ``f`` are neither zero nor infinite, ``g`` are the zeros, and ``h`` the rest, of which only the number
counts; ``f`` has the signs of infinities. ``e`` is zero, and it is what derivatives are taken of. So a product of ``n``
values ``e`` has no derivative of another order than ``n``, and up to that order the products are elementary symmetric
polynomials in ``e``, which Newton's identities make of sums of powers. An element is left out of a sum by subtraction.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import primitives
from paraxis._jax import jax_api


def others(x: jax.Array, *along: jax.Array, **params: Any) -> jax.Array:
    """Return for each element the product of the others, or its derivative along some values, exact at zeros."""
    x = jax_api.computed_once(x)  # else what the count finds to be zero may not be zero in the product

    def left(y: jax.Array) -> jax.Array:
        """Return for each element the sum of the others."""
        y = y.astype(np.int32) if y.dtype == bool else y
        return primitives.sum_p.bind(y, **params)[None] - y

    is_zero, is_infinite = x == 0, jnp.isinf(x)
    is_regular = jnp.isfinite(x) & ~is_zero
    factors = jnp.where(is_regular, x, jnp.where(is_infinite, jnp.sign(x), jnp.ones_like(x)))
    zeros, infinite, unknown = left(is_zero), left(is_infinite) > 0, left(jnp.isnan(x)) > 0
    product = primitives.prod_p.bind(factors, **params)[None] / factors
    product *= jnp.where(unknown, np.nan, jnp.where(infinite, np.inf, 1)).astype(x.dtype)

    def near(e: jax.Array) -> jax.Array:
        none, degree = jnp.zeros_like(e), len(along)
        relative = sum(_symmetric(jnp.where(is_regular, e / factors, none), degree, left))
        of_zeros = enumerate(_symmetric(jnp.where(is_zero, e, none), degree, left))
        return product * relative * sum(jnp.where(zeros == number, y, none) for number, y in of_zeros)

    derived: Callable[[jax.Array], jax.Array] = near
    for v in along:
        derived = _along(derived, v)
    return derived(jnp.zeros_like(x))


def _along(of: Callable[[jax.Array], jax.Array], v: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.jvp(of, (x,), (v,))[1]


def _symmetric(x: jax.Array, degree: int, left: Callable[[jax.Array], jax.Array]) -> list[Any]:
    """Return for each element the elementary symmetric polynomials of the others, from degree 0 on."""
    powers, found = [left(x**n) for n in range(1, degree + 1)], [jnp.ones_like(x)]
    for n in range(1, degree + 1):
        terms = ((-1) ** (k - 1) * found[n - k] * powers[k - 1] for k in range(1, n + 1))
        found.append(sum(terms, jnp.zeros_like(x)) / n)
    return found
