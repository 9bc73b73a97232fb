"""Dtypes by their names, as files have them."""

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
