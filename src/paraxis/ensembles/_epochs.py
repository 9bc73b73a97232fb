"""Epochs of training: the rows of each step, who still trains, and what is told of it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import check
from paraxis.ensembles._members import Form, State
from paraxis.errors import ShapeError

SMALL = 50_000_000
"""Floating-point operations of a step. On CPU a loop on the devices runs on one thread, which pays for less work only.
Measured with two-layer networks from 8 × 16 to 784 × 2,048."""


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of all members, which is passed to the function given as ``progress``. It prints as one line.

    Attributes:
        number: from 0, or from ``first_epoch``.
        epochs: their total number.
        outputs: the step's results, averaged over the epoch's steps: leaves ``(size, ...)``.
        metrics: of ``evaluate``, each ``(size,)``.
        active: which members still train, ``(size,)``.
    """

    number: int
    epochs: int
    outputs: Any
    metrics: Mapping[str, np.ndarray]
    active: np.ndarray

    def __str__(self) -> str:
        """Say the mean and the range over the members of the first result and of each metric, and who still trains."""
        numbers = [("output", x) for x in jax.tree.leaves(self.outputs) if x.ndim == 1][:1]
        texts = [
            f"{name} {x.mean():.4g} ({x.min():.4g} to {x.max():.4g})" for name, x in [*numbers, *self.metrics.items()]
        ]
        return ", ".join(
            [f"epoch {self.number + 1} of {self.epochs}", *texts, f"{self.active.sum()} of {len(self.active)} active"]
        )


@dataclasses.dataclass(frozen=True)
class History:
    """The result of ``fit``: one row per epoch of the call.

    Attributes:
        outputs: the step's results, averaged over each epoch's steps: leaves ``(num_epochs, size, ...)``.
        metrics: of ``evaluate``, by name, each ``(num_epochs, size)``.
        best_epoch: for each member the epoch with the best value of the metric of ``stop_early``, ``(size,)``; -1 if
            there was none but NaN; ``None`` without ``stop_early``.
        stopped: for each member the epoch after which it was stopped, or -1 if it was not, ``(size,)``.
        failed: indices of the members with a result or a metric that was not finite.
        scanned: whether whole epochs ran in one program each.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> step = lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.mean((w - x) ** 2))(w), jnp.mean((w - x) ** 2))
        >>> ens = px.ensemble(lambda key: jax.random.normal(key), 3, 0)
        >>> history = ens.fit(step, (jnp.ones(40),), batch_size=10, epochs=5, key=1)
        >>> history.outputs.shape, history.failed
        ((5, 3), ())
    """

    outputs: Any
    metrics: Mapping[str, np.ndarray]
    best_epoch: np.ndarray | None
    stopped: np.ndarray
    failed: tuple[int, ...]
    scanned: bool


class Stopping:
    """Who still trains, by a rule such as ``px.train.StopEarly``, and the epoch in which each member was best."""

    def __init__(self, rule: Any, size: int, first_epoch: int) -> None:
        self._rule = rule
        self._first = first_epoch
        self._least = np.full(size, np.inf)
        self.best_epoch = np.full(size, -1)
        self.stopped = np.full(size, -1)
        self.active = np.ones(size, bool)

    def see(self, number: int, metrics: Mapping[str, np.ndarray]) -> np.ndarray:
        """Note the metrics of an epoch; return who was never better.

        Raises:
            ShapeError: if the metric of the rule is not among them.
        """
        name = self._rule.metric.rpartition("/")[2]
        if name not in metrics:
            raise ShapeError(
                f"ensemble.fit: stop_early watches {name!r}, but evaluate gives {', '.join(metrics)}; write "
                f"evaluate=lambda model, x, y: {{{name!r}: …}}"
            )
        value = metrics[name] if self._rule.mode == "min" else -metrics[name]
        improved = self.active & (value < self._least - self._rule.min_change)  # never so for NaN
        self._least = np.where(improved, value, self._least)
        self.best_epoch = np.where(improved, number, self.best_epoch)
        waited = number - np.maximum(self.best_epoch, self._first - 1)
        stop = self.active & (waited >= self._rule.patience)
        self.stopped = np.where(stop, number, self.stopped)
        self.active = self.active & ~stop
        return improved


def one(form: Form, step: Any, state: State, given: Any) -> tuple[State, Any]:
    """Take one step of an epoch with a member; one that has stopped stays as it is."""
    data, weights, per_member, order, active, at = given
    batch = jax.tree.map(lambda x: x[order[at]], data if weights is None else (*data, weights))
    new, out = form.step(step, state, (*batch, *per_member))
    return new if active is None else jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state), out


def whole(form: Form, step: Any, state: State, given: Any) -> tuple[State, Any]:
    """Take all steps of an epoch with a member; the results are averaged."""
    steps = jnp.arange(given[3].shape[0])
    state, outs = jax.lax.scan(lambda state, at: one(form, step, state, (*given, at)), state, steps)
    return state, jax.tree.map(lambda y: jnp.mean(y, 0), outs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def order(key: jax.Array, number: Any, num_rows: int, batch_size: int, own: int | None, rows: Any = None) -> jax.Array:
    """Row numbers of each step of an epoch, ``(steps, batch_size)``; rows left over sit out.

    With a leading ``(size,)`` if each of ``own`` members goes through the rows in its own order, or has ``rows`` of its
    own, ``(size, num_rows)``. They depend on the key, the epoch's number and the member's index only.
    """
    key = jax.random.fold_in(key, number)
    if own is None:
        found = jax.random.permutation(key, num_rows)
    else:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(own))
        found = jax.vmap(jax.random.permutation, in_axes=(0, None))(keys, num_rows)
    if rows is not None:
        found = jnp.take_along_axis(rows, jnp.broadcast_to(found, rows.shape), 1)
    steps = num_rows // batch_size
    return found[..., : steps * batch_size].reshape(*found.shape[:-1], steps, batch_size)


def num_rows(size: int, data: Any, batch_size: int, rows: np.ndarray | None, weights: Any) -> int:
    """Return the number of rows that a member goes through in an epoch.

    Raises:
        ShapeError: if data, rows, weights and the batch do not fit together: out of range, a row number would be
            that of another row in silence.
    """
    counts = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if not isinstance(data, tuple) or len(counts) != 1 or () in counts:
        raise ShapeError(
            f"ensemble.fit: data must be a tuple of arrays with the same number of rows, got "
            f"{jax.tree.map(np.shape, data)}; write ens.fit(step, (x, y), …)"
        )
    ((count,),) = counts
    if rows is not None and (
        rows.ndim != 2 or len(rows) != size or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= count
    ):
        raise ShapeError(
            f"ensemble.fit: rows must be numbers ({size}, m) of the data's {count} rows, a row for each member, "
            f"got {check.described(rows)}; write rows=ens.bootstrap_rows(key, {count})"
        )
    if weights is not None and np.shape(weights) not in ((count,), (size, count)):
        raise ShapeError(
            f"ensemble.fit: weights must be ({count},), or ({size}, {count}) for each member its own, got "
            f"{np.shape(weights)}"
        )
    count = count if rows is None else rows.shape[1]
    check.count("ensemble.fit", "batch_size", batch_size, most=count, error=ShapeError)
    return count


def not_finite(outputs: Any, metrics: Mapping[str, np.ndarray], size: int) -> np.ndarray:
    """Return which members have a result that is not finite, ``(size,)``."""
    found = [x for x in [*jax.tree.leaves(outputs), *metrics.values()] if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = [~np.isfinite(x.astype(np.complex64)).reshape(size, -1).all(1) for x in found]
    return np.any(bad, 0) if bad else np.zeros(size, bool)
