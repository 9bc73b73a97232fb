"""Checks of probabilities and labels before they are scored."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paraxis._calls import arguments
from paraxis._jax.jax_api import Tracer
from paraxis.errors import DataError, ShapeError

ROWS = ("n", "classes")
MEMBERS = ("members", "n", "classes")


def check_probabilities(function: str, probabilities: Any, shape: tuple[str, ...] = ROWS) -> None:
    """Refuse probabilities of another shape and, where there are values, rows that do not sum to one."""
    argument = "member_probabilities" if shape == MEMBERS else "probabilities"
    arguments.array(function, argument, probabilities)
    got, expected = np.shape(probabilities), ", ".join(shape)
    if not (len(got) >= 1 if shape[0] == "..." else len(got) == len(shape)):
        raise ShapeError(
            f"{function}: {argument} has shape {got}, expected ({expected}); {_way_to(shape, len(got), argument)}"
        )
    if 0 in got:
        raise ShapeError(f"{function}: {argument} has shape {got}, expected at least one of each in ({expected})")
    if not isinstance(probabilities, Tracer):
        _check_sums(function, argument, jnp.asarray(probabilities))


def check_labels(function: str, labels: Any, n: int, classes: int) -> None:
    """Refuse labels of another shape or dtype and, where there are values, labels that are no class."""
    arguments.array(function, "labels", labels)
    arguments.no_cut(function, "labels", labels)
    got, y = np.shape(labels), jnp.asarray(labels)
    if got == (n, 1):
        raise ShapeError(f"{function}: labels has shape {got}, expected integers ({n},); write labels[:, 0]")
    if got == (n, classes):
        raise ShapeError(
            f"{function}: labels has shape {got}, expected integers ({n},); from one-hot labels write labels.argmax(-1)"
        )
    if got != (n,):
        raise ShapeError(
            f"{function}: labels has shape {got}, expected integers ({n},), one for each row of the probabilities; "
            f"write labels[:{n}] if the first rows were predicted"
        )
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise ShapeError(f"{function}: labels has dtype {y.dtype}, expected integers ({n},); write labels.astype(int)")
    if isinstance(y, Tracer):
        return
    bad = _bad_labels(y, classes)
    if bad.any():
        row = np.argmax(bad)
        raise DataError(
            f"{function}: labels: {y[row]} in row {row} is not a class, expected 0 to {classes - 1}; leave such rows "
            f"out, or write labels - labels.min() if they count from another number"
        )


def _way_to(shape: tuple[str, ...], ndim: int, argument: str) -> str:
    if shape == MEMBERS and ndim == 2:
        return f"for one model write {argument}[None]"
    if shape == ROWS and ndim == 3:
        return f"to average over the members write {argument}.mean(0)"
    if shape == ROWS and ndim == 1:
        return "from the probability p of the second of two classes write jnp.stack([1 - p, p], -1)"
    return "write jax.nn.softmax(logits), with the classes on the last axis"


def _check_sums(function: str, argument: str, p: jax.Array) -> None:
    bad, sums = _bad_sums(p)
    if bad.any():
        at = np.unravel_index(np.argmax(bad), bad.shape)
        where = " of ".join(f"{name} {i}" for name, i in zip(("row", "member"), at[::-1], strict=False)) or "the row"
        raise DataError(
            f"{function}: {argument}: {where} sums to {np.asarray(sums)[at]:.6g}, expected 1; from logits write "
            f"jax.nn.softmax(logits)"
        )


@jax.jit
def _bad_sums(p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which rows do not sum to one, and the sums."""
    # Each probability is rounded by half an eps of itself at most, so a row's sum is too: with bfloat16 by 0.004.
    tolerance = max(1e-3, float(jnp.finfo(p.dtype).eps)) if jnp.issubdtype(p.dtype, jnp.floating) else 1e-3
    sums = floating(p).sum(-1)
    return jnp.isfinite(sums) & (jnp.abs(sums - 1) > tolerance), sums


@functools.partial(jax.jit, static_argnums=1)
def _bad_labels(labels: jax.Array, classes: int) -> jax.Array:
    """Return which labels are no class."""
    # The number of classes may be too large for the labels' own dtype.
    y = labels.astype(jnp.int32)
    return (y < 0) | (y >= classes)


def checked(
    function: str, probabilities: ArrayLike, labels: ArrayLike, shape: tuple[str, ...] = ROWS
) -> tuple[jax.Array, jax.Array]:
    """Probabilities as floats and labels as integers, looked at."""
    check_probabilities(function, probabilities, shape)
    p = floating(probabilities)
    check_labels(function, labels, *p.shape[-2:])
    return p, jnp.asarray(labels).astype(jnp.int32)


def floating(x: ArrayLike) -> jax.Array:
    """Return ``x`` as floats of 32 bits at least."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
