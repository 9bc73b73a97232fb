"""Steps whose bits do not depend on the devices: rows in groups, a program of one device for each of them.

What a group gives are sums, which are added in a fixed tree; each device then does the update for itself, with the same
program on the same numbers. See ``_groups`` for why.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays
from paraxis.errors import StateError
from paraxis.train import _batches
from paraxis.train._batches import Batch
from paraxis.train.steps import _precision, _rows
from paraxis.train.steps._gradients import divided, totals_of_part
from paraxis.train.steps._groups import Groups
from paraxis.train.steps._kinds import PerKind
from paraxis.train.steps._losses import LossFunction, Outcome, Part
from paraxis.train.steps._mean import Mean
from paraxis.train.steps._state import TrainState
from paraxis.train.steps._update import Metrics, Options, finished


class GroupedStep:
    """A step of training; ``train_step`` makes it and says what it does."""

    def __init__(
        self,
        loss: LossFunction,
        rows: _rows.Rows,
        *,
        number: int,
        precision: str | None,
        update: Options,
        donate: bool,
    ) -> None:
        self._loss = loss
        self._engine = _Engine(loss, rows, number, self._sums)
        self._precision = precision
        self._update = update
        self._donate = donate
        self._finish = PerKind(self._finished)
        # What each device has of the state that was returned last; dropped with it. It is one value: another thread
        # may replace it at any time.
        self._last: tuple[Callable[[], TrainState | None], Groups | None, list[TrainState]] = (lambda: None), None, []

    @property
    def groups(self) -> int:
        """Return the number of groups that the rows of a batch are cut into."""
        return self._engine.number

    @property
    def depends_on(self) -> dict[str, Any]:
        """Return what its results depend on, by the names of ``train_step``'s arguments; but for the groups."""
        options = {"microbatches": 1, "shard": None, "reproducible": "any device count"}
        return {"loss": self._loss.function, "precision": self._precision, **vars(self._update), **options}

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step.

        Args:
            state: the state; the step consumes it unless ``donate=False``.
            batch: a tree of arrays ``(rows, ...)`` on the host or on devices, or a ``Batch`` of a loader.

        Raises:
            ShapeError, DataError, StateError: as for other steps.
            AxisError: if the number of devices does not divide the number of groups.
        """
        _rows.refuse_tracing("train_step", "step")
        devices = self._engine.rows.here()
        return devices.run(self._step, self._engine.groups_on(devices), devices, state, self._engine.taken(batch))

    def _trace(self, *_: Any, **__: Any) -> Any:
        raise _no_program("train_step")

    def _step(
        self, groups: Groups, devices: _rows.Devices, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        last, theirs, copies = self._last
        if state is None or last() is not state or theirs is not groups:  # what is gone is None, too
            self._engine.require(state)
            state = self._engine.placed(devices, state)
            copies = groups.copies(state)
        totals = self._engine.totals(groups, copies, batch)
        changed = [dataclasses.replace(copy, key=None, extra=None) for copy in copies]
        results = [self._finish(*given) for given in zip(changed, totals, strict=True)]
        new, metrics = groups.whole(results)
        new = dataclasses.replace(new, key=state.key, extra=state.extra)
        after = [
            dataclasses.replace(copy, key=before.key, extra=before.extra)
            for (copy, _), before in zip(results, copies, strict=True)
        ]
        if self._donate:
            _delete(state, copies[0], after[0])
        self._last = weakref.ref(new, lambda _: after.clear()), groups, after
        return new, metrics

    def _sums(self, state: TrainState, part: Part, number: Any, share: Any) -> dict[str, Any]:
        mutable = jax.tree.map(lambda x: _folded(x, number) if _is_key(x) else x, state.mutable)
        gradient, found = totals_of_part(self._loss, state, mutable, part, self._precision)
        kept = jax.tree.map(functools.partial(_contribution, number, share), state.mutable, mutable, found.mutable)
        return {"gradient": gradient, "loss": found.loss, "metrics": found.metrics, "mutable": kept, "share": share}

    def _finished(self, state: TrainState, sums: dict[str, Any]) -> tuple[TrainState, Metrics]:
        mutable = jax.tree.map(functools.partial(_merged, sums["share"]), state.mutable, sums["mutable"])
        gradient = divided(sums["gradient"], sums["loss"])
        return finished(state, gradient, Outcome(sums["loss"], sums["metrics"], mutable), self._update)


class GroupedEval:
    """Metrics of a batch; ``eval_step`` makes it and says what it does."""

    def __init__(self, fn: LossFunction, rows: _rows.Rows, *, number: int, precision: str | None, ema: bool) -> None:
        self._fn = fn
        self._engine = _Engine(fn, rows, number, self._metrics)
        self._precision = precision
        self._ema = ema

    def __call__(self, state: TrainState, batch: Any) -> Metrics:
        """Return the metrics of a batch; the state does not change.

        Raises:
            ShapeError, DataError, StateError: as for other steps.
            AxisError: if the number of devices does not divide the number of groups.
        """
        _rows.refuse_tracing("eval_step", "evaluate")
        devices = self._engine.rows.here()
        return devices.run(self._evaluate, self._engine.groups_on(devices), devices, state, self._engine.taken(batch))

    def _trace(self, *_: Any, **__: Any) -> Any:
        raise _no_program("eval_step")

    def _evaluate(self, groups: Groups, devices: _rows.Devices, state: TrainState, batch: Batch) -> Metrics:
        self._engine.require(state)
        used = dataclasses.replace(state, params=state.weights(ema=self._ema), opt_state=None, ema=None, extra=None)
        copies = groups.copies(self._engine.placed(devices, used))
        return groups.whole(self._engine.totals(groups, copies, batch))

    def _metrics(self, state: TrainState, part: Part, number: Any, share: Any) -> Metrics:
        part = dataclasses.replace(part, rows=_precision.lowered(part.rows, self._precision))
        params = _precision.lowered(state.params, self._precision)
        mutable = jax.tree.map(lambda x: _folded(x, number) if _is_key(x) else x, state.mutable)
        model, _ = state.recipe.form.make(params, mutable, part.key, "eval")
        found = self._fn.metrics(model, part, mutable)
        return {name: Mean(mean.total, mean.weight) for name, mean in found.items()}


class _Engine:
    """Calls a function for each group, and adds up what it gives.

    Args:
        fn: the user's function, for errors.
        rows: where rows go.
        number: of groups.
        sums: ``sums(state, part, number, share)`` → a tree of sums; ``number`` is the group's, ``share`` its rows as
            a share of those of the largest group.
    """

    def __init__(self, fn: LossFunction, rows: _rows.Rows, number: int, sums: Callable[..., Any]) -> None:
        self._fn = fn
        self.number = number
        self._sums = sums
        self._run = PerKind(self._group, [fn.function], static=1)
        self._last: Groups | None = None  # a value, replaced as a whole
        self.rows = rows

    def groups_on(self, devices: _rows.Devices) -> Groups:
        """Return the groups of rows on these devices: the same object as long as these are the same."""
        last = self._last
        if last is None or last.placement != devices.placement:
            last = self._last = Groups(self._fn.what, self.number, devices.placement)
        return last

    def taken(self, batch: Any) -> Batch:
        """Return a batch as it is, with its number of rows."""
        if isinstance(batch, Batch):
            return batch
        return Batch(batch, _batches.num_rows(self._fn.what, batch))

    def require(self, state: Any) -> None:
        """Refuse what the function cannot be called with."""
        _rows.require_state(self._fn.what, state, TrainState)
        if self._fn.wants_key and state.key is None:
            raise _rows.no_key(self._fn.what, self._fn.name)
        if gone := _rows.given_away(self._fn.what, state):
            raise gone

    def placed(self, devices: _rows.Devices, state: TrainState) -> TrainState:
        """Return the state whole on each device."""
        whole = devices.whole
        return state if whole is None else arrays.send(state, jax.tree.map(lambda _: whole, state))

    def totals(self, groups: Groups, copies: list[TrainState], batch: Batch) -> list[Any]:
        """Return the sums over all groups, on each device of this process."""
        bounds, rows = groups.bounds(batch.num_rows), groups.split(batch)
        used = [dataclasses.replace(copy, opt_state=None, ema=None, extra=None, ok=None) for copy in copies]
        results: list[list[Any]] = [[None] * groups.num_local for _ in copies]
        # A turn of all devices after another, so that all are soon busy.
        for turn in range(groups.num_local):
            for here, (device, _) in enumerate(groups.devices):
                number = groups.numbers(device)[turn]
                size = bounds[number][1] - bounds[number][0]
                scalars = np.int32(bounds[number][0]), np.int32(number), np.float32(size / bounds[0][1])
                if size:
                    results[here][turn] = self._run(size, used[here], rows[here][turn], *scalars)
        return groups.summed(results, lambda: self._struct(used[0], rows[0][0]))

    def _struct(self, state: TrainState, rows: Any) -> Any:
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]) if x.ndim else (), x.dtype), rows)
        return jax.eval_shape(functools.partial(self._group, 1), state, row, np.int32(0), np.int32(0), np.float32(1))

    def _group(self, size: int, state: TrainState, rows: Any, first: Any, number: Any, share: Any) -> Any:
        key = None if state.key is None else jax.random.fold_in(state.key, state.step)
        own = None if key is None else _folded(key, number)
        return self._sums(state, Part(rows, size, own, key, first + jnp.arange(size)), number, share)


def _folded(key: jax.Array, number: Any) -> jax.Array:
    """Return a group's key. They are numbered from the top down: those of rows from zero up."""
    data = jnp.uint32(2**32 - 1) - jnp.asarray(number, jnp.uint32)
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, data)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _contribution(number: Any, share: Any, old: jax.Array, given: jax.Array, new: jax.Array) -> jax.Array | None:
    """Return what a group adds to a leaf of mutable state: its share of a mean; not of floats, the first alone.

    ``None``: the leaf was not written. A key that was folded for the group, and only used, stays as it was.
    """
    if _is_key(old):
        data, used, kept = (jax.random.key_data(x) for x in (new, given, old))
        new = jnp.where(jnp.all(data == used), kept, data)
    elif new is given:
        return None
    elif jnp.issubdtype(new.dtype, jnp.inexact):
        return new * share.astype(new.dtype)
    if new.dtype == bool:
        new = new.astype(jnp.uint8)
    return jnp.where(number == 0, new, jnp.zeros_like(new))


def _merged(shares: jax.Array, old: jax.Array, total: jax.Array | None) -> jax.Array:
    if total is None:
        return old
    if _is_key(old):
        return jax.random.wrap_key_data(total, impl=jax.random.key_impl(old))
    if jnp.issubdtype(old.dtype, jnp.inexact):
        return total / shares.astype(old.dtype)
    return total.astype(old.dtype)


def _delete(state: TrainState, before: TrainState, after: TrainState) -> None:
    """Free the arrays of a state, but for those that the next one has too."""
    kept = {id(x) for x in jax.tree.leaves(after)}
    for x, held in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        if id(held) not in kept:
            x.delete()


def _no_program(maker: str) -> StateError:
    return StateError(
        f"explain: what {maker}(reproducible=…) makes is not one program, but one for each group of rows, and others "
        f"that add what these give; for the same without it, write px.explain(px.{maker}(loss_fn))(state, batch)"
    )
