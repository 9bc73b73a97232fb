"""Epochs of training: the data on the devices once, a whole epoch in one program where that pays, early stopping."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis._calls import arguments
from paraxis.ensembles import _arguments, _history, _order, _resident as resident
from paraxis.ensembles._arguments import Arguments
from paraxis.ensembles._averages import same
from paraxis.ensembles._forms import guarded
from paraxis.ensembles._history import Epoch, History
from paraxis.ensembles._population import Population
from paraxis.ensembles._programs import Current, Everywhere
from paraxis.ensembles._resident import Resident
from paraxis.errors import ShapeError, StateError


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of ``fit``, checked."""

    step: Callable[..., Any]
    data: tuple[Any, ...]
    batch_size: int
    num_epochs: int
    first_epoch: int
    key: jax.Array
    rows: np.ndarray | None
    weights: Any
    per_member: tuple[Any, ...]
    own_order: bool
    validate: Callable[..., Any] | None
    validation: tuple[Any, ...]
    patience: int | None

    @property
    def num_rows(self) -> int:
        """Rows that one member goes through in an epoch."""
        return self.rows.shape[1] if self.rows is not None else np.shape(jax.tree.leaves(self.data)[0])[0]


def fit(population: Population, plan: Plan, progress: bool | _history.Show) -> History:
    """Train for some epochs. Between any two steps, the members are whole."""
    check(plan, population.size)
    size = population.size
    active = np.ones(size, bool)
    stopping = Stopping(population, plan)
    training = Training(population, plan)
    outputs, failed = [], np.zeros(size, bool)
    end = plan.first_epoch + plan.num_epochs
    with _history.shown(progress, end) as show:
        for number in range(plan.first_epoch, end):
            out = training.epoch(number, active)
            validation = stopping.validated()
            outputs.append(out)
            failed = _report_failed(out, validation, failed, number)
            active = stopping.still_active(number, validation, active)
            show(Epoch(number, end, out, validation, active))
            if not active.any():
                break
    stopping.restore_best()
    return History(
        jax.tree.map(lambda *xs: np.stack(xs), *outputs),
        stopping.losses(),
        stopping.best_epoch,
        stopping.stopped,
        tuple(map(int, np.flatnonzero(failed))),
        training.scanned,
    )


class Training:
    """Epochs of steps on data that stays on the devices."""

    def __init__(self, population: Population, plan: Plan) -> None:
        self._population = population
        self._plan = plan
        self._own_weights = plan.weights is not None and np.ndim(plan.weights) == 2
        self._data = Everywhere(plan.data, population.placement).tree
        self.scanned = self._pays_to_scan()

    def epoch(self, number: int, active: np.ndarray) -> Any:
        """Make all steps of an epoch; return their results' averages over it, leaves ``(size, ...)`` on the host."""
        args, num_steps = self._placed(number, active)
        program = self._program(args, scan=self.scanned)
        if self.scanned:
            return jax.tree.map(np.asarray, self._population.step(program, args).readable())
        # Results stay where they are until the end: nothing is waited for between steps.
        outs = [self._population.step(program, args, self._number(step)) for step in range(num_steps)]
        return jax.tree.map(_mean_of_steps, *(out.readable() for out in outs))

    def _placed(self, number: int, active: np.ndarray) -> tuple[Arguments, int]:
        plan, size = self._plan, self._population.size
        own = size if plan.own_order else None
        order = _order.epoch_order(plan.key, number, plan.num_rows, plan.batch_size, own, plan.rows)
        frozen = None if plan.patience is None else active
        args = (self._data, plan.weights, plan.per_member, order, frozen)
        own_order = 0 if order.ndim == 3 else None
        axes = (None, 0 if self._own_weights else None, 0, own_order, 0)
        return _arguments.place("ensemble.fit", args, axes, self._population.placement), order.shape[-2]

    def _number(self, step: int) -> Everywhere:
        return Everywhere(np.int32(step), self._population.placement)

    def _pays_to_scan(self) -> bool:
        """Return whether a loop on the devices is quicker than a call for each step.

        It is where a call costs more than the work. On CPU a convolution in a loop runs on one thread, and so does
        large work: there it is not.
        """
        args, _ = self._placed(self._plan.first_epoch, np.ones(self._population.size, bool))
        if jax.default_backend() != "cpu":
            return True
        one = self._program(args, scan=False)
        return one.small([self._population.state, *args.rows], [args.shared, self._number(0)])

    def _program(self, args: Arguments, *, scan: bool) -> Current:
        # Compiled functions are kept by the population: they must not hold the data, nor what holds it.
        form, layout = self._population.form, args.layout
        step = self._plan.step
        own = guarded("step", step)

        def stepped(state: Any, rows: jax.Array, given: Any) -> tuple[Any, Any]:
            data, weights, per_member, _, active = given
            batch = jax.tree.map(lambda x: x[rows], (*data, *(() if weights is None else (weights,))))
            new, out = form.stepped(own, state, (*batch, *per_member))
            _require_numbers(out)
            if active is not None:
                new = jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state)
            return new, out

        def whole(state: Any, *leaves: Any) -> tuple[Any, Any]:
            given = layout.rebuilt(leaves)
            state, outs = jax.lax.scan(lambda state, rows: stepped(state, rows, given), state, given[3])
            return state, jax.tree.map(lambda y: jnp.mean(y, 0), outs)

        def single(state: Any, *leaves: Any) -> tuple[Any, Any]:
            given = layout.rebuilt(leaves[:-1])
            return stepped(state, given[3][leaves[-1]], given)

        def make() -> Callable[..., Any]:
            return whole if scan else single

        return self._population.program(f"fit {scan}", step, args.key, make, donate=self._population.donate)


class Stopping:
    """Validation after each epoch; who still trains; and the best state of each member."""

    def __init__(self, population: Population, plan: Plan) -> None:
        self._population = population
        self._plan = plan
        self._losses: list[np.ndarray] = []
        self._best: Resident | None = None
        self._least = np.full(population.size, np.inf)
        self.best_epoch = None if plan.validate is None else np.full(population.size, -1)
        self.stopped = np.full(population.size, -1)

    def losses(self) -> np.ndarray | None:
        """``(num_epochs, size)``."""
        return np.stack(self._losses) if self._losses else None

    def validated(self) -> np.ndarray | None:
        """Return each member's validation loss, ``(size,)``."""
        if self._plan.validate is None:
            return None
        placement = self._population.placement
        args = _arguments.place("ensemble.fit", self._plan.validation, None, placement)
        given = self._population.applied(args, self._plan.validate, same).readable()
        if not isinstance(given, jax.Array) or given.shape != (placement.size,):
            got = f"shape {given.shape[1:]}" if isinstance(given, jax.Array) else f"a {type(given).__name__}"
            raise ShapeError(
                f"ensemble.fit: validate must give one number for a member, got {got}; write "
                f"validate=lambda model, x, y: loss(model, x, y).mean()"
            )
        losses = np.asarray(given)
        self._losses.append(losses)
        return losses

    def still_active(self, number: int, losses: np.ndarray | None, active: np.ndarray) -> np.ndarray:
        """Note who has improved, and stop those who have not for too long."""
        if losses is None or self.best_epoch is None:
            return active
        improved = losses < self._least  # never so for NaN
        self._least = np.where(improved, losses, self._least)
        self.best_epoch = np.where(improved, number, self.best_epoch)
        if self._plan.patience is None:
            return active
        if improved.any() or self._best is None:
            self._keep(improved)
        waited = number - np.maximum(self.best_epoch, self._plan.first_epoch - 1)
        stop = active & (waited >= self._plan.patience)
        self.stopped = np.where(stop, number, self.stopped)
        return active & ~stop

    def restore_best(self) -> None:
        """Give each member the state with which it did best."""
        if self._best is not None:
            self._population.state = self._best

    def _keep(self, improved: np.ndarray) -> None:
        state = self._population.state
        rows = resident.on_devices(improved, state.placement)
        program = self._population.program("select", None, (), lambda: _select)
        self._best = program([rows, state, self._best or state], [])


def _select(chosen: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old)


def _mean_of_steps(*outs: jax.Array) -> np.ndarray:
    mean = np.mean(np.stack([np.asarray(out, float) for out in outs]), 0)
    return np.asarray(mean, jnp.promote_types(outs[0].dtype, outs[0].dtype if _is_inexact(outs[0]) else jnp.float32))


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _require_numbers(out: Any) -> None:
    """Raise unless results can be averaged over the steps.

    Raises:
        StateError: naming the one that cannot.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
            raise StateError(
                f"ensemble.fit: {tree.name('out', path)} of what step returned is a random key; results are averaged "
                f"over an epoch's steps, so return numbers only: return state, loss"
            )


def _report_failed(out: Any, validation: np.ndarray | None, failed: np.ndarray, epoch: int) -> np.ndarray:
    """Warn of members whose results are not finite, once each; all that have failed so far."""
    now = failed.copy()
    for leaf in [*jax.tree.leaves(out), *([] if validation is None else [validation])]:
        if _is_inexact(leaf):
            now |= ~np.isfinite(leaf.astype(float).reshape(len(failed), -1)).all(1)
    if new := list(map(int, np.flatnonzero(now & ~failed))):
        warnings.warn(
            f"ensemble.fit: in epoch {epoch + 1}, members {new} gave results that are not finite. Leave them out of "
            f"the average, ens.predict(x, where=ens.finite()), or drop them: ens = ens.drop{tuple(new)}",
            RuntimeWarning,
            stacklevel=6,  # where fit is called: past Ensemble.fit and what it is wrapped in
        )
    return now


def check(plan: Plan, size: int) -> None:
    """Raise on what cannot be done.

    Raises:
        ShapeError: naming the argument.
    """
    for name, value in (("data", plan.data), ("per_member", plan.per_member), ("validation", plan.validation)):
        if not isinstance(value, tuple):
            raise ShapeError(
                f"ensemble.fit: {name} must be a tuple, one entry per argument of the function, got "
                f"{type(value).__name__}; write {name}=(x,)"
            )
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in jax.tree.leaves(plan.data)}
    if len(counts) != 1 or None in counts:
        raise ShapeError(
            f"ensemble.fit: data must be a tuple of arrays with the same number of rows, got "
            f"{jax.tree.map(np.shape, plan.data)}; write ens.fit(step, (x, y), …)"
        )
    (num_rows,) = counts
    assert num_rows is not None
    for path, leaf in jax.tree_util.tree_leaves_with_path(plan.per_member):
        if np.ndim(leaf) == 0 or np.shape(leaf)[0] != size:
            raise ShapeError(
                f"ensemble.fit: {tree.name('per_member', path)} has shape {np.shape(leaf)}, but each of the {size} "
                f"members has its own, ({size}, ...)"
            )
    if plan.rows is not None and (plan.rows.ndim != 2 or len(plan.rows) != size or plan.rows.dtype.kind not in "iu"):
        raise ShapeError(
            f"ensemble.fit: rows must be whole numbers ({size}, num_rows), one row of them per member, got "
            f"{plan.rows.dtype}{list(plan.rows.shape)}; write rows=ens.bootstrap_rows(key, {num_rows})"
        )
    if plan.rows is not None and plan.rows.size and not (plan.rows.min() >= 0 and plan.rows.max() < num_rows):
        raise ShapeError(
            f"ensemble.fit: rows must be between 0 and {num_rows - 1}, the data's rows; they go from "
            f"{plan.rows.min()} to {plan.rows.max()}"
        )
    if plan.weights is not None and np.shape(plan.weights) not in ((num_rows,), (size, num_rows)):
        raise ShapeError(
            f"ensemble.fit: weights must be ({num_rows},), or ({size}, {num_rows}) for each member its own, got "
            f"{np.shape(plan.weights)}"
        )
    wholes = [("batch_size", plan.batch_size, 1), ("num_epochs", plan.num_epochs, 1), ("patience", plan.patience, 1)]
    for name, value, least in (*wholes, ("first_epoch", plan.first_epoch, 0)):
        if name == "patience" and value is None:
            continue
        arguments.count("ensemble.fit", name, value, least=least, error=ShapeError)
    if plan.batch_size > plan.num_rows:
        raise ShapeError(
            f"ensemble.fit: batch_size={plan.batch_size} is more than the {plan.num_rows} rows there are; write "
            f"batch_size={plan.num_rows}"
        )
    if (plan.validate is None) != (not plan.validation) or (plan.patience is not None and plan.validate is None):
        raise ShapeError(
            "ensemble.fit: validate and validation go together, and patience needs both; write "
            "validate=lambda model, x, y: …, validation=(x, y), patience=3"
        )
