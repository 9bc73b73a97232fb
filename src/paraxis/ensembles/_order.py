"""The rows of each step: a function of the key, the epoch and the member, and of nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def epoch_order(
    key: jax.Array, epoch: int, num_rows: int, batch_size: int, own: int | None, rows: np.ndarray | None
) -> np.ndarray:
    """Row numbers of each step, ``(steps, batch_size)``; or ``(own, steps, batch_size)``, if each member has its own.

    The rows are shuffled and cut into batches; what is left over sits out this epoch.

    Args:
        key: of all epochs.
        epoch: its number.
        num_rows: of the data, or of each member's share.
        batch_size: rows of a step.
        own: number of members, if each goes through the rows in its own order.
        rows: each member's share ``(size, num_rows)``, as numbers of rows of the data.
    """
    now = jax.random.fold_in(key, epoch)
    order = np.asarray(_shuffled(now, num_rows, own))
    if rows is not None:
        order = np.take_along_axis(rows, order, 1) if own else rows[:, order]
    steps = num_rows // batch_size
    kept = order[..., : steps * batch_size]
    return kept.reshape(*kept.shape[:-1], steps, batch_size).astype(np.int32)


def _shuffled(key: jax.Array, num_rows: int, own: int | None) -> jax.Array:
    if own is None:
        return jax.random.permutation(key, num_rows)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(own))
    return jax.vmap(jax.random.permutation, in_axes=(0, None))(keys, num_rows)


def bootstrap_rows(key: Any, num_members: int, num_rows: int) -> np.ndarray:
    """Return, for each member, as many rows as there are, drawn with replacement: ``(num_members, num_rows)``."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_members))
    draw = jax.vmap(lambda key: jax.random.randint(key, (num_rows,), 0, num_rows))
    return np.asarray(draw(keys))
