"""Dtypes and kinds of random keys by their names, as files have them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_wide() -> bool:
    """Return whether 64-bit numbers are in force, in this thread."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def native(x: np.ndarray) -> np.ndarray:
    """Return the same numbers in this machine's byte order, the only one that JAX takes."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def named(name: str) -> np.dtype:
    """Return the dtype of numbers or booleans that has a name, JAX's own such as bfloat16 included.

    Raises:
        ValueError: if there is none.
    """
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name != name or not (dtype == np.bool_ or jnp.issubdtype(dtype, np.number)):
        raise ValueError(f"there is no dtype of numbers called {name[:40]!r}")
    return dtype


@functools.lru_cache(maxsize=64)
def of_keys(impl: str) -> tuple[Any, tuple[int, ...], np.dtype]:
    """Return the dtype of a kind of random keys; of the data of one key, the shape and the dtype.

    Raises:
        ValueError: if there is no such kind.
    """
    try:
        key = jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0)
    except ValueError:
        raise ValueError(f"there is no kind of random keys called {impl[:40]!r}") from None
    data = jax.eval_shape(jax.random.key_data, key)
    return key.dtype, data.shape, np.dtype(data.dtype)
