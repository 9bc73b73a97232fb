"""The product of all factors but one, and its derivatives, by reductions over the elements.

    Π xⱼ, j ≠ i  =  (Π fⱼ / fᵢ) · Π (1 + eⱼ / fⱼ) · Π gⱼ · Π hⱼ        xⱼ + eⱼ = fⱼ + eⱼ, or gⱼ = eⱼ, or hⱼ = ±∞, NaN

The factors ``f`` are neither zero nor infinite, ``g`` are the zeros, and ``h`` the rest, of which only the number
counts; ``f`` has the signs of infinities. ``e`` is zero, and it is what derivatives are taken of. So a product of ``n``
values ``e`` has no derivative of another order than ``n``, and up to that order the products are elementary symmetric
polynomials in ``e``, which Newton's identities make of sums of powers. An element is left out of a sum by subtraction.

Factors are multiplied as numbers near 1, and powers of two, whose exponents are added: the product of all may be
beyond what a float holds where that of the others is not. Terms are not: where the product of two is beyond it, so are
third derivatives.

Sums and subtraction lose all digits where a few terms are far larger than the others: a factor of 1e-8 among ones has a
term of 1e8. So for each of the ``n`` directions, the ``n`` elements with the largest terms are taken out, and
multiplied one by one.
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
    product, exponent = _divided(factors, params)
    product *= jnp.where(unknown, np.nan, jnp.where(infinite, np.inf, 1)).astype(x.dtype)
    apart, rest = _largest([jnp.where(is_regular, v / factors, 0 * v) for v in along], is_regular, params)
    zeros_apart, zeros_rest = _largest([jnp.where(is_zero, v, 0 * v) for v in along], is_zero, params)

    def near(e: jax.Array) -> jax.Array:
        none, degree = jnp.zeros_like(e), len(along)
        relative = sum(_symmetric(jnp.where(rest, e / factors, none), degree, left))
        for one in apart:
            relative *= 1 + left(jnp.where(one, e / factors, none))
        of_zeros = _symmetric(jnp.where(zeros_rest, e, none), degree, left)
        for one in zeros_apart:
            y = left(jnp.where(one, e, none))
            of_zeros = [of_zeros[0], *(a + y * b for a, b in zip(of_zeros[1:], of_zeros[:-1], strict=True))]
        return product * relative * sum(jnp.where(zeros == number, y, none) for number, y in enumerate(of_zeros))

    derived: Callable[[jax.Array], jax.Array] = near
    for v in along:
        derived = _along(derived, v)
    return _scaled(derived(jnp.zeros_like(x)), exponent)


def _divided(factors: jax.Array, params: Any) -> tuple[jax.Array, jax.Array]:
    """Return for each element the product of the others, as a number and the exponent of two that goes with it."""
    size = jnp.abs(factors)
    info = jnp.finfo(size.dtype)
    bits = jax.lax.bitcast_convert_type(size, f"int{info.bits}")
    exponent = (bits >> info.nmant).astype(np.int32) + (info.minexp - 1)
    mantissa = _scaled(factors, -exponent)  # from 1 to 2
    high = jnp.abs(mantissa) > np.sqrt(2)  # so that many multiplied stay near 1
    mantissa, exponent = jnp.where(high, mantissa / 2, mantissa), exponent + high
    whole, plain = (primitives.prod_p.bind(y, **params)[None] for y in (mantissa, factors))
    others = primitives.sum_p.bind(exponent, **params)[None] - exponent
    size = jnp.abs(whole)
    is_held = (size > jnp.finfo(size.dtype).tiny) & (size < np.inf)
    return jnp.where(is_held, whole / mantissa, plain / factors), jnp.where(is_held, others, 0)


def _scaled(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return a number times a power of two, exactly."""
    info = jnp.finfo(x.dtype)

    def power(exponent: jax.Array) -> jax.Array:
        bits = jax.lax.clamp(info.minexp, exponent, info.maxexp - 1) - (info.minexp - 1)
        return jax.lax.bitcast_convert_type(bits.astype(f"int{info.bits}") << info.nmant, info.dtype)

    half = exponent >> 1
    return x * power(half) * power(exponent - half)


def _along(of: Callable[[jax.Array], jax.Array], v: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.jvp(of, (x,), (v,))[1]


def _largest(terms: list[jax.Array], among: jax.Array, params: Any) -> tuple[list[jax.Array], jax.Array]:
    """Return which element is the largest in each of the terms, the next one, and so on; and which are left."""

    def extremum(kind: str, y: jax.Array) -> jax.Array:
        return primitives.REDUCTIONS[kind].bind(y, **params)[None]

    found: list[jax.Array] = []
    for y in [jax_api.computed_once(jnp.abs(y)) for y in terms for _ in terms]:
        size = jnp.where(among, y, jnp.full_like(y, -1))
        largest = among & (size == extremum("max", size))
        if len(terms) > 1:  # else several as large may be together: one of them is left beside another
            number = jax.lax.broadcasted_iota(np.int32, y.shape, 0)
            largest &= number == extremum("min", jnp.where(largest, number, np.iinfo(np.int32).max))
        found.append(largest)
        among &= ~largest
    return found, among


def _symmetric(x: jax.Array, degree: int, left: Callable[[jax.Array], jax.Array]) -> list[Any]:
    """Return for each element the elementary symmetric polynomials of the others, from degree 0 on."""
    powers, found = [left(x**n) for n in range(1, degree + 1)], [jnp.ones_like(x)]
    for n in range(1, degree + 1):
        terms = ((-1) ** (k - 1) * found[n - k] * powers[k - 1] for k in range(1, n + 1))
        found.append(sum(terms, jnp.zeros_like(x)) / n)
    return found
