"""Maxima and minima of floats in which NaN wins, on any number of devices, as it does in ``jnp.max`` on one.

Where devices exchange their extremes, they may compare floats and drop the NaN of one of them: XLA's all-reduce on CPU
does. So they exchange integers of the same order, with NaN beyond all.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def largest(x: jax.Array, axis: int) -> jax.Array:
    """Return what ``jnp.max`` does."""
    return _by_integers(lambda x: jnp.max(x, axis), x, nan_is_top=True)


def smallest(x: jax.Array, axis: int) -> jax.Array:
    """Return what ``jnp.min`` does."""
    return _by_integers(lambda x: jnp.min(x, axis), x, nan_is_top=False)


FOLDS = {"max": largest, "min": smallest}


def _across(collective: Callable[..., jax.Array], *, nan_is_top: bool) -> Callable[[jax.Array, str], jax.Array]:
    """Return ``jax.lax.pmax`` or ``pmin`` in which NaN wins; it has no derivative either."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def extreme(x: jax.Array, name: str) -> jax.Array:
        return _by_integers(lambda x: collective(x, name), x, nan_is_top=nan_is_top)

    @extreme.defjvp
    def _(name: str, primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(f"{collective.__name__} has no derivative; reduce after the map instead")

    return extreme


ACROSS = {"pmax": _across(jax.lax.pmax, nan_is_top=True), "pmin": _across(jax.lax.pmin, nan_is_top=False)}


def farthest(dtype: Any, *, below: bool) -> np.ndarray:
    """Return the float that no other is below, or above; some kinds of eight bits have no infinity."""
    info = jnp.finfo(dtype)
    with np.errstate(all="ignore"):
        infinite = np.array(-np.inf if below else np.inf, dtype)
    return infinite if np.isinf(infinite.astype(np.float64)) else np.array(info.min if below else info.max, dtype)


def _by_integers(fold: Callable[[jax.Array], jax.Array], x: jax.Array, *, nan_is_top: bool) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return fold(x)
    own, x = x.dtype, x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    info = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    keys = _flipped(jax.lax.bitcast_convert_type(x, info.dtype))
    keys = jnp.where(jnp.isnan(x), np.array(info.max if nan_is_top else info.min, info.dtype), keys)
    return jax.lax.bitcast_convert_type(_flipped(fold(keys)), x.dtype).astype(own)


def _flipped(bits: jax.Array) -> jax.Array:
    """Return a float's bits as an integer of the same order, or such an integer as bits."""
    return jnp.where(bits < 0, bits ^ np.array(jnp.iinfo(bits.dtype).max, bits.dtype), bits)
