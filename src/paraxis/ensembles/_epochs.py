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
"""Floating-point operations of a step for which a loop on the devices pays on CPU, where it runs on one thread."""


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of all members, for ``progress``. It prints as one line.

    Attributes:
        number, epochs: from 0, or from ``first_epoch``; and their total number.
        outputs, metrics: as in :class:`History`, of this epoch: ``(size, ...)``.
        active: which members still train, ``(size,)``.
    """

    number: int
    epochs: int
    outputs: Any
    metrics: Mapping[str, np.ndarray]
    active: np.ndarray

    def __str__(self) -> str:
        shown = [*[("output", x) for x in jax.tree.leaves(self.outputs) if x.ndim == 1][:1], *self.metrics.items()]
        means = [f"{name} {x.mean():.4g} ({x.min():.4g} to {x.max():.4g})" for name, x in shown]
        active = f"{self.active.sum()} of {len(self.active)} active"
        return ", ".join([f"epoch {self.number + 1} of {self.epochs}", *means, active])


@dataclasses.dataclass(frozen=True)
class History:
    """The result of ``fit``: one row per epoch of the call.

    Attributes:
        outputs: the step's results, averaged over each epoch's steps: leaves ``(num_epochs, size, ...)``.
        metrics: of ``evaluate``, by name, each ``(num_epochs, size)``.
        best_epoch: each member's best epoch by the metric of ``stop_early``, ``(size,)``, -1 if there was none but NaN.
        stopped: the epoch after which a member was stopped, ``(size,)``, -1 if it was not.
        scanned: whether whole epochs ran in one program each.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> step = lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.mean((w - x) ** 2))(w), jnp.mean((w - x) ** 2))
        >>> ens = px.ensemble(lambda key: jax.random.normal(key), 3, 0)
        >>> history = ens.fit(step, (jnp.ones(40),), batch_size=10, epochs=5, key=1)
        >>> history.outputs.shape, history.stopped
        ((5, 3), array([-1, -1, -1]))
    """

    outputs: Any
    metrics: Mapping[str, np.ndarray]
    best_epoch: np.ndarray | None
    stopped: np.ndarray
    scanned: bool


def watched(rule: Any, metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return each member's value of the metric of a rule such as ``px.train.StopEarly``: lower is better."""
    name = rule.metric.rpartition("/")[2]
    if name not in metrics:
        raise ShapeError(f"ensemble.fit: stop_early watches {name!r}, but evaluate gives {', '.join(metrics)}")
    return metrics[name] if rule.mode == "min" else -metrics[name]


def steps(form: Form, step: Any, state: State, given: Any) -> tuple[State, Any]:
    """Take some steps with a member; one that has stopped stays as it is. The results are averaged."""
    data, per_member, order, active = given

    def one(state: State, rows: jax.Array) -> tuple[State, Any]:
        new, out = form.step(step, state, (*jax.tree.map(lambda x: x[rows], data), *per_member))
        return new if active is None else jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state), out

    state, outs = jax.lax.scan(one, state, order, unroll=len(order) == 1)
    return state, jax.tree.map(lambda y: jnp.mean(y, 0), outs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def order(key: jax.Array, number: Any, num_rows: int, batch_size: int, own: int | None, rows: Any = None) -> jax.Array:
    """Row numbers of each step, ``(steps, batch_size)``; what is left over sits out.

    Or ``(size, steps, batch_size)``, if each of ``own`` members has its own order, or ``rows`` ``(size, num_rows)``.
    They depend on the key, the epoch's number and the member's index only.
    """
    key = jax.random.fold_in(key, number)
    keys = key if own is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(own))
    shuffle = jnp.vectorize(lambda key: jax.random.permutation(key, num_rows), signature="()->(n)")
    found = shuffle(keys)
    if rows is not None:
        found = jnp.take_along_axis(rows, jnp.broadcast_to(found, rows.shape), 1)
    return found[..., : num_rows // batch_size * batch_size].reshape(*found.shape[:-1], -1, batch_size)


def num_rows(size: int, data: Any, batch_size: int, rows: np.ndarray | None) -> int:
    """Return the number of rows that a member goes through in an epoch.

    Raises:
        ShapeError: if data, rows and the batch do not fit together. A number out of range would be another row's.
    """
    counts = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if not isinstance(data, tuple) or len(counts) != 1 or () in counts:
        shapes = jax.tree.map(np.shape, data)
        raise ShapeError(f"ensemble.fit: data must be a tuple of arrays with the same number of rows, got {shapes}")
    ((count,),) = counts
    if rows is not None:
        if (
            rows.ndim != 2
            or len(rows) != size
            or rows.dtype.kind not in "iu"
            or not 0 <= rows.min() <= rows.max() < count
        ):
            raise ShapeError(
                f"ensemble.fit: rows must be numbers ({size}, m) of the data's {count} rows, some for each member, got "
                f"{check.described(rows)}"
            )
        count = rows.shape[1]
    return check.count("ensemble.fit", "batch_size", batch_size, most=count, error=ShapeError) and count
