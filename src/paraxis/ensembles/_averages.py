"""Averages over members: what is taken of each, and how it is combined."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from paraxis._core.placing import Axis
from paraxis._core.reductions import reduce_mean
from paraxis._core.verbs import broadcast, map_fn
from paraxis.errors import DataError
from paraxis.train._loss import wide

Name = Literal["softmax", "sigmoid", "mean", "moments", "mixture"]
NAMES: tuple[str, ...] = get_args(Name)
Average = Name | Callable[[Any, Axis, Any], Any]  # of predictions (size, ...), the members' axis, and which count


def of_each(average: Average, prediction: Any, inputs: tuple[Any, ...]) -> Any:
    """Return what is averaged of one member's prediction, at least float32."""
    if average == "mixture" and not (isinstance(prediction, tuple) and len(prediction) == 2):
        raise DataError("ensemble.predict: average='mixture' needs a model that gives (mean, variance)")
    rows = jnp.shape(next(iter(jax.tree.leaves(inputs)), 0))
    if average == "softmax":
        return jax.tree.map(lambda x: _softmax(x, rows), prediction)
    scores = jax.tree.map(wide, prediction)
    return jax.tree.map(jax.nn.sigmoid, scores) if average == "sigmoid" else scores


def combined(average: Average, rows: Any, axis: Axis, where: Any) -> Any:
    """Combine what :func:`of_each` took, ``(size, ...)``. Communicates: one all-reduce for each part of the result."""
    if callable(average):
        return average(rows, axis, where)
    if average in ("softmax", "sigmoid", "mean"):
        return reduce_mean(rows, axis, where=where)
    means, within = rows if average == "mixture" else (rows, None)
    # The mean of squares less the square of the mean would lose a variance that is small beside the mean.
    center = reduce_mean(means, axis, where=where)
    far = lambda x, c: jnp.real((x - c) * jnp.conj(x - c))  # noqa: E731
    squares = map_fn(lambda x, c: jax.tree.map(far, x, c), (means, broadcast(center, axis)), axis)
    if within is not None:
        squares = jax.tree.map(jnp.add, squares, within)
    return center, reduce_mean(squares, axis, where=where)


def _softmax(logits: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    one_per_row = len(rows) > 1 and logits.shape == rows[:1]
    if logits.ndim == 0 or logits.shape[-1] < 2 or one_per_row:
        raise DataError(
            f"ensemble.predict: average='softmax' needs logits (..., classes), but the model gives {logits.shape}. "
            "Write average='sigmoid' for one logit of a yes or no, average='moments' for a regression"
        )
    return jax.nn.softmax(wide(logits))
