"""``ens.fit``: epochs over shuffled rows, evaluations, early stopping of each member, and a run that is resumed."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api, placing
from paraxis.ensembles import _members
from paraxis.ensembles._members import Form, State
from paraxis.errors import DataError, StateError

if TYPE_CHECKING:
    from paraxis.ensembles._ensemble import Ensemble

Metrics = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of all members. It prints as one line.

    Attributes:
        epoch, epochs: number of the epoch, from 0; and the total number.
        step: number of steps that a member that still trains has taken by then.
        metrics: of training, averaged over the epoch's steps, ``"loss"`` if the step returns one array; and of
            ``evaluate``, as in ``"test/loss"``: each ``(size, ...)``.
        active: which members still train, ``(size,)``.
    """

    epoch: int
    epochs: int
    step: int
    metrics: Metrics
    active: np.ndarray

    def __str__(self) -> str:
        shown = {name: x for name, x in self.metrics.items() if x.ndim == 1}
        means = [f"{name} {x.mean():.4g} ({x.min():.4g} to {x.max():.4g})" for name, x in shown.items()]
        active = f"{self.active.sum()} of {len(self.active)} active"
        return ", ".join([f"epoch {self.epoch + 1} of {self.epochs}", *means, active])


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
        >>> steps, losses.shape, history.stopped
        (array([ 4,  8, 12, 16, 20]), (5, 3), array([-1, -1, -1]))
    """

    def __init__(self, size: int, total: int, num_steps: int, rule: Any) -> None:
        self.epochs: list[Epoch] = []
        self.best_epoch, self.stopped = np.full(size, -1), np.full(size, -1)
        self._total, self._num_steps, self._rule = total, num_steps, rule
        self._least = np.full(size, np.inf)

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps ``(num_epochs,)`` after each epoch, and the members' values, ``(num_epochs, size, ...)``."""
        return np.array([one.step for one in self.epochs]), np.stack([one.metrics[metric] for one in self.epochs])

    def __str__(self) -> str:
        return "\n".join(map(str, self.epochs))

    @property
    def is_over(self) -> bool:
        """Return whether all epochs are done, or every member has stopped."""
        return len(self.epochs) >= self._total or bool((self.stopped >= 0).all())

    def add(self, metrics: Metrics) -> np.ndarray:
        """Add an epoch; return which members are better than ever, by the rule."""
        rule, epoch, active = self._rule, len(self.epochs), self.stopped < 0
        metrics = {name: x.astype(np.result_type(x, float)) for name, x in metrics.items()}  # as after a resume
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
        self.epochs.append(Epoch(epoch, self._total, (epoch + 1) * self._num_steps, metrics, self.stopped < 0))
        return improved


class Batches:
    """The rows of each step: shuffled by the key and the epoch's number, cut into batches; those left over sit out."""

    def __init__(
        self, ens: "Ensemble", data: Any, held_out: Any, batch_size: int, key: Any, rows: Any, per_member: Any
    ) -> None:
        counts = {np.shape(x)[:1] for x in jax.tree.leaves(data)}
        if not isinstance(data, tuple) or len(counts) != 1 or () in counts:
            shapes = jax.tree.map(np.shape, data)
            raise DataError(f"ensemble.fit: data must be a tuple of arrays with the same number of rows, got {shapes}")
        ((count,),) = counts
        self._rows = None if rows is None else np.asarray(rows)
        if self._rows is not None:
            if self._rows.dtype.kind not in "iu" or not 0 <= self._rows.min() <= self._rows.max() < count:
                raise DataError(f"ensemble.fit: rows must be numbers of the data's {count} rows, ({len(ens)}, m)")
            count = self._rows.shape[1]
        check.no_cut("ensemble.fit", "data", data)
        check.count("ensemble.fit", "batch_size", batch_size, most=count, error=DataError)
        self._size, self._count, self._key = batch_size, count, _members.one_key("ensemble.fit", key)
        self.num_steps = count // batch_size
        everywhere = arrays.sharding(ens._placement, rows=False)
        data, self.held_out = arrays.put(jax.tree.map(jnp.asarray, (data, held_out)), everywhere)
        self._given = data, per_member
        self.in_axes = (None, 0, None if rows is None else 0, 0)
        self.notes = {"rows": count, "batch": batch_size, "key": np.ravel(_members.numbers(self._key)).tolist()}

    def of(self, epoch: int, active: Any, scanned: bool) -> list[tuple[Any, ...]]:
        """Return the arguments of :func:`_steps` for an epoch, or for each of its steps."""
        order = _order(self._key, np.int32(epoch), self._count, self._size, self._rows)
        orders = [order] if scanned else np.split(np.asarray(order), self.num_steps, -2)
        return [(*self._given, one, active) for one in orders]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _order(key: jax.Array, epoch: Any, count: int, batch_size: int, rows: Any) -> jax.Array:
    """Row numbers of each step, ``(steps, batch_size)``; ``(size, steps, batch_size)`` of members with own rows."""
    found = jax.random.permutation(jax.random.fold_in(key, epoch), count)[: count // batch_size * batch_size]
    found = found if rows is None else rows[:, found]
    return found.reshape(*found.shape[:-1], -1, batch_size)


def fit(
    ens: "Ensemble",
    step: Callable[..., Any],
    batches: Batches,
    epochs: int,
    evaluate: Callable[..., Any] | None,
    stop_early: Any,
    checkpoint: Any,
    callbacks: Callable[[Epoch], Any] | None,
) -> History:
    """Train the members of an ensemble: :meth:`Ensemble.fit`."""
    check.count("ensemble.fit", "epochs", epochs, error=DataError)
    history, best, scanned = History(len(ens), epochs, batches.num_steps, stop_early), None, None
    with checkpoint or contextlib.nullcontext():
        if checkpoint is not None and checkpoint.latest is not None:
            best = _restore(ens, checkpoint, batches.notes, history, keeps_best=stop_early is not None)
        while not history.is_over:
            active = None if stop_early is None else history.stopped < 0
            scanned = _pays_to_scan(ens, step, batches, active) if scanned is None else scanned
            metrics = _trained(ens, step, batches.of(len(history.epochs), active, scanned), batches.in_axes)
            if evaluate is not None:
                found = _named(ens.members(*batches.held_out, apply=evaluate))
                metrics |= {f"test/{name}": np.asarray(x) for name, x in found.items()}
            improved = history.add(metrics)
            if stop_early is not None:
                best = _where(np.pad(improved, (0, ens._placement.num_padded - len(ens))), ens._members, best)
            taken = range(history.epochs[-1].step - batches.num_steps + 1, history.epochs[-1].step + 1)
            if checkpoint is not None and (
                history.is_over or checkpoint.every is None or any(map(checkpoint.is_due, taken))
            ):
                _save(ens, checkpoint, batches.notes, history, best)
            if callbacks is not None:
                callbacks(history.epochs[-1])
    ens._members = ens._members if best is None else best
    return history


def _trained(ens: "Ensemble", step: Any, given: list[tuple[Any, ...]], in_axes: tuple[Any, ...]) -> Metrics:
    """Train for an epoch; return the average metrics of its steps."""
    with placing.without_context():
        outs = [ens._advance(*ens._prepared("epoch", step, _steps, x, in_axes)) for x in given]
        out = outs[0] if len(outs) == 1 else jax.tree.map(lambda *y: jnp.mean(jnp.stack(y), 0), *outs)
        return {name: arrays.on_host(x)[: len(ens)] for name, x in out.items()}


def _steps(form: Form, step: Any, state: State, given: Any) -> tuple[State, Any]:
    """Take some steps with a member; one that has stopped stays as it is. The metrics are averaged."""
    data, per_member, order, active = given

    def one(state: State, rows: jax.Array) -> tuple[State, Any]:
        new, out = form.step(step, state, (*jax.tree.map(lambda x: x[rows], data), *per_member))
        new = new if active is None else jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state)
        return new, _named(out)

    state, metrics = jax.lax.scan(one, state, order, unroll=len(order) == 1)
    return state, jax.tree.map(lambda y: jnp.mean(y, 0), metrics)


def _pays_to_scan(ens: "Ensemble", step: Callable[..., Any], batches: Batches, active: Any) -> bool:
    """Return whether a loop on the devices is quicker than a call for each step. On CPU it runs on one thread."""
    if jax.default_backend() != "cpu":
        return True
    with placing.without_context():
        program, args = ens._prepared("epoch", step, _steps, batches.of(0, active, False)[0], batches.in_axes)
        traced = program.trace(ens._members, args)
    if jax_api.holds(traced.jaxpr.jaxpr, "conv_general_dilated"):
        return False
    return traced.lower().cost_analysis().get("flops", 0) <= 50_000_000


def _named(out: Any) -> dict[str, Any]:
    """Return what a step or an evaluation gives besides the member: arrays by name."""
    found = {} if out is None else dict(out) if isinstance(out, Mapping) else {"loss": out}
    if not jax.tree_util.all_leaves(found.values()):
        raise StateError("ensemble.fit: step and evaluate give one array, the loss, or a dict of arrays")
    return found


@jax.jit
def _where(chosen: jax.Array, new: State, old: State | None) -> State:
    """Return the new arrays of the chosen members, and the old ones of the others, if there are any."""
    pick = lambda a, b: jnp.where(chosen.reshape(-1, *(1,) * (a.ndim - 1)), a, b)  # noqa: E731
    return jax.tree.map(pick, new, new if old is None else old)


def _save(ens: "Ensemble", checkpoint: Any, run: Any, history: History, best: State | None) -> None:
    means = {name: float(x.mean()) for name, x in history.epochs[-1].metrics.items() if x.ndim == 1}  # for best=
    epochs = [{name: x.tolist() for name, x in one.metrics.items()} for one in history.epochs]
    tree = {"members": ens._members} if best is None else {"members": ens._members, "best": best}
    with placing.without_context():
        checkpoint.save(history.epochs[-1].step, ens._cut(tree), {**means, "run": run, "epochs": epochs})


def _restore(ens: "Ensemble", checkpoint: Any, run: Any, history: History, *, keeps_best: bool) -> State | None:
    """Give the members their saved state, and the history its epochs; return the members' best state."""
    found = checkpoint.restore({"members": ens.state, "best": ens.state} if keeps_best else {"members": ens.state})
    if found.notes.get("run") != run:
        raise StateError(
            f"ensemble.fit: the checkpoints in {checkpoint.path} are of a run with another key or other batches: "
            f"{found.notes.get('run')}, not {run}; write px.Checkpoints('{checkpoint.path}-2')"
        )
    ens.state = found.tree["members"]
    for metrics in found.notes["epochs"]:
        history.add({name: np.asarray(x) for name, x in metrics.items()})
    with placing.without_context():
        return arrays.laid_out(found.tree["best"], ens._placement) if keeps_best else None
