"""Mixed precision: what is computed in bfloat16, and what stays as it is."""

from typing import Any

import jax
import jax.numpy as jnp

from paraxis._calls import arguments
from paraxis.errors import StateError


def check(what: str, precision: Any) -> None:
    """Refuse precisions that cannot be had.

    Raises:
        StateError: saying why, and what to write.
    """
    if precision is None or (isinstance(precision, str) and precision == "bfloat16"):
        return
    why = (
        "its gradients underflow without a scale for the loss, which bfloat16 does not need"
        if isinstance(precision, str) and precision == "float16"
        else "there are None (as the arrays are) and 'bfloat16'"
    )
    raise StateError(
        f"{what}: precision={arguments.described(precision)} is not available: {why}; write precision='bfloat16'"
    )


def lowered(tree: Any, precision: str | None) -> Any:
    """Return the same tree with wider floating arrays in the given precision; its derivative is in theirs."""
    if precision is None:
        return tree
    target = jnp.dtype(precision)
    return jax.tree.map(lambda x: x.astype(target) if _is_wide(x) else x, tree)


def summed(x: jax.Array) -> jax.Array:
    """Return ``x`` in a dtype that means are taken in: float32, or what is wider."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4:
        return x
    return x.astype(jnp.float32)


def _is_wide(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 2
