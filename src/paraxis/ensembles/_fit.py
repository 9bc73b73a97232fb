"""Parts of ``ens.fit``: the record of its epochs, with early stopping of each member, and the steps of an epoch."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, jax_api
from paraxis.ensembles._members import Form, State
from paraxis.errors import DataError, StateError

Metrics = dict[str, np.ndarray]
_scanned: Any = weakref.WeakKeyDictionary()  # program → types of its arguments → whether it pays to scan


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of all members. It prints as one line.

    Attributes:
        epoch, epochs: number of the epoch, from 0; and the total number.
        step: number of steps that a member that still trains has taken by then.
        metrics: ``(size, ...)`` each: ``"loss"``, or what the step named, averaged over the epoch; ``"test/…"``.
        active: which members still train, ``(size,)``.
    """

    epoch: int
    epochs: int
    step: int
    metrics: Metrics
    active: np.ndarray

    def __str__(self) -> str:
        means = [f"{n} {x.mean():.4g} ({x.min():.4g} to {x.max():.4g})" for n, x in self.metrics.items() if x.ndim == 1]
        means.append(f"{self.active.sum()} of {len(self.active)} active")
        return ", ".join([f"epoch {self.epoch + 1} of {self.epochs}", *means])


class History:
    """The result of ``ens.fit``. It prints as a line for each epoch.

    Attributes:
        epochs: an :class:`Epoch` for each, those before a resume included.
        best_epoch: each member's best epoch by the metric of ``stop_early``, ``(size,)``, -1 if there was none.
        stopped: the epoch after which a member was stopped, ``(size,)``, -1 if it was not.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> step = lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.mean((w - x) ** 2))(w), jnp.mean((w - x) ** 2))
        >>> ens = px.ensemble(lambda key: jax.random.normal(key), 3, 0)
        >>> history = ens.fit(step, (jnp.ones(40),), batch_size=10, epochs=5, key=1)
        >>> steps, losses = history.curve("loss")
        >>> steps, losses.shape
        (array([ 4,  8, 12, 16, 20]), (5, 3))
    """

    def __init__(self, size: int, total: int, num_steps: int, rule: Any) -> None:
        self.epochs: list[Epoch] = []
        self.best_epoch, self.stopped, self._least = np.full(size, -1), np.full(size, -1), np.full(size, np.inf)
        self.num_steps, self._total, self._rule = num_steps, total, rule

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps ``(num_epochs,)`` after each epoch, and the members' values, ``(num_epochs, size, ...)``."""
        return np.array([one.step for one in self.epochs]), np.stack([one.metrics[metric] for one in self.epochs])

    def __str__(self) -> str:
        return "\n".join(map(str, self.epochs))

    @property
    def is_over(self) -> bool:
        return len(self.epochs) >= self._total or bool((self.stopped >= 0).all())

    def add(self, metrics: Metrics) -> np.ndarray:
        """Add an epoch; return which members are better than ever, by the rule."""
        rule, epoch, active = self._rule, len(self.epochs), self.stopped < 0
        # As after a resume.
        metrics = {name: np.asarray(x, np.result_type(x.dtype, float)) for name, x in metrics.items()}
        improved = active
        if rule is not None:
            if np.shape(metrics.get(rule.metric, 0.0)) != active.shape:
                there = ", ".join(name for name, x in metrics.items() if x.shape == active.shape)
                raise DataError(f"ensemble.fit: stop_early watches {rule.metric!r}, but the metrics are {there}")
            value = metrics[rule.metric] * (1 if rule.mode == "min" else -1)
            improved = active & (value < self._least - rule.min_change)  # never so for NaN
            self._least = np.where(improved, value, self._least)
            self.best_epoch = np.where(improved, epoch, self.best_epoch)
            self.stopped = np.where(active & (epoch - self.best_epoch >= rule.patience), epoch, self.stopped)
        self.epochs.append(Epoch(epoch, self._total, (epoch + 1) * self.num_steps, metrics, self.stopped < 0))
        return improved

    def is_due(self, checkpoint: Any) -> bool:
        """Return whether to save after the last epoch: at the end, or where the checkpoint's schedule says so."""
        return self.is_over or checkpoint.every is None or self.epochs[-1].step % checkpoint.every < self.num_steps

    def notes(self) -> dict[str, Any]:
        """Return all metrics as JSON has them; and the last means, for ``best=`` of a checkpoint."""
        means = {name: float(x.mean()) for name, x in self.epochs[-1].metrics.items() if x.ndim == 1}
        return means | {"epochs": [{name: x.tolist() for name, x in one.metrics.items()} for one in self.epochs]}


def num_rows(data: Any, rows: np.ndarray | None) -> int:
    counts = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
    if not isinstance(data, tuple) or len(counts) != 1 or () in counts:
        shapes = jax.tree.map(np.shape, data)
        raise DataError(f"ensemble.fit: data must be a tuple of arrays with the same number of rows, got {shapes}")
    ((count,),) = counts
    if rows is not None and (rows.ndim != 2 or rows.dtype.kind not in "iu" or not np.isin(rows, range(count)).all()):
        raise DataError(f"ensemble.fit: rows must be numbers of the data's {count} rows, integers (size, m)")
    return count if rows is None else rows.shape[1]


@functools.partial(jax.jit, static_argnums=(2, 3))
def order(key: jax.Array, epoch: Any, count: int, batch_size: int, rows: Any) -> jax.Array:
    """Row numbers of each step, ``(steps, batch_size)``; ``(size, steps, batch_size)`` of members with own rows."""
    found = jax.random.permutation(jax.random.fold_in(key, epoch), count)[: count // batch_size * batch_size]
    found = found if rows is None else rows[:, found]
    return found.reshape(*found.shape[:-1], -1, batch_size)


def steps(form: Form, step: Callable[..., Any], state: State, given: Any) -> tuple[State, Any]:
    """Take some steps with a member; one that has stopped stays as it is. The metrics are averaged."""
    data, per_member, order, active = given

    def one(state: State, rows: jax.Array) -> tuple[State, Any]:
        new, out = form.step(step, state, (*jax.tree.map(lambda x: x[rows], data), *per_member))
        new = new if active is None else jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state)
        return new, named(out)

    state, metrics = jax.lax.scan(one, state, order, unroll=len(order) == 1)
    return state, jax.tree.map(lambda y: jnp.mean(y, 0), metrics)


def pays_to_scan(program: Any, *args: Any) -> bool:
    """Return whether a loop on the devices is quicker than a call for each step. On CPU it runs on one thread."""
    if jax.default_backend() != "cpu":
        return True
    traced = program.trace(*args)
    known, types = _scanned.setdefault(program, {}), tuple(traced.jaxpr.in_avals)
    if types not in known:
        is_slow = jax_api.holds(traced.jaxpr.jaxpr, "conv_general_dilated")
        known[types] = not is_slow and traced.lower().cost_analysis().get("flops", 0) <= 50_000_000
    return known[types]


def mean(outs: list[dict[str, jax.Array]], size: int) -> Metrics:
    out = outs[0] if len(outs) == 1 else jax.tree.map(lambda *y: jnp.mean(jnp.stack(y), 0), *outs)
    return {name: arrays.on_host(x)[:size] for name, x in out.items()}


def named(out: Any, prefix: str = "") -> dict[str, Any]:
    """Return what a step or an evaluation gives besides the member: arrays by name."""
    found = {} if out is None else dict(out) if isinstance(out, Mapping) else {"loss": out}
    if not jax.tree_util.all_leaves(found.values()):
        raise StateError("ensemble.fit: step and evaluate give one array, the loss, or a dict of arrays")
    return {f"{prefix}{name}": x for name, x in found.items()}


@jax.jit
def where(chosen: jax.Array, new: State, old: State | None) -> State:
    """Return the new arrays of the chosen members, and the old ones of the others, if there are any."""
    chosen = jnp.pad(chosen, (0, len(next(iter(new.values()))) - len(chosen)))
    pick = lambda a, b: jnp.where(chosen.reshape(-1, *(1,) * (a.ndim - 1)), a, b)  # noqa: E731
    return jax.tree.map(pick, new, new if old is None else old)


def restored(checkpoint: Any, run: Any, like: Any, history: History) -> Any:
    """Return the tree that was saved last; the history gets its epochs."""
    found = checkpoint.restore(like)
    if odd := ", ".join([name for name in run if found.notes.get("run", {}).get(name) != run[name]]):
        raise StateError(f"ensemble.fit: {checkpoint.path} has a run with other {odd}; write px.Checkpoints('new')")
    for metrics in found.notes["epochs"]:
        history.add({name: np.asarray(x) for name, x in metrics.items()})
    return found.tree
