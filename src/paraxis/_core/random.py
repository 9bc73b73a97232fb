"""Randomness per element."""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import scope
from paraxis._core.axis import Axis
from paraxis.errors import ShapeError


def keys(key: jax.Array, axis: Axis | str | None = None) -> jax.Array:
    """Return one random key per element, which depends only on the element's index, not on the devices.

    The keys of the first ``n`` elements do not change when the axis grows.

    Args:
        key: one key, new-style (``jax.random.key``) or old-style (``jax.random.PRNGKey``).
        axis: the axis; inside a program also its name, or ``None`` if there is only one.

    Returns:
        Keys ``(size,)``, or ``(size, 2)`` for old-style keys.

    Raises:
        ShapeError: if ``key`` is not one key.

    Communicates: nothing.

    Example:
        >>> import jax, paraxis as px
        >>> px.keys(jax.random.key(0), px.Axis("members", 5)).shape
        (5,)
    """
    resolved = scope.resolve("keys", axis)
    if not is_one_key(key):
        got = f"{key.dtype}{list(key.shape)}" if isinstance(key, (jax.Array, np.ndarray)) else type(key).__name__
        raise ShapeError(f"keys: key must be one random key, got {got}; write jax.random.key(0)")
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(resolved.size))


def is_one_key(key: object) -> bool:
    """Return whether it is one random key, of the new kind or the old."""
    if not isinstance(key, (jax.Array, np.ndarray)):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.ndim == 0
    return key.ndim == 1 and key.dtype == np.uint32
