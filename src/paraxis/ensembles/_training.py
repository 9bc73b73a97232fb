"""The members of an ensemble as the loop of ``px.fit`` trains them: a batch at a time, or an epoch in one program."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, jax_api, placing, pytrees, verbs
from paraxis.ensembles._members import Form, State
from paraxis.train._batches import rows_of
from paraxis.train._loader import Loader
from paraxis.train._loop import IsQuiet, Stretch, Stretches, Trained
from paraxis.train._sources import Batches, Keys, Position, Rows
from paraxis.train._step import EvalStep, TrainStep

_scanned: Any = weakref.WeakKeyDictionary()  # program → types of its arguments → whether it pays to scan


class Members(Trained):
    """The members of an Ensemble, the state, which the loop changes in place."""

    def __init__(self, ensemble: Any, step: Any) -> None:
        super().__init__(ensemble, step)
        self.shape = (len(ensemble),)

    @property
    def tree(self) -> Any:
        return self.state.state

    @tree.setter
    def tree(self, tree: Any) -> None:
        self.state.state = tree

    def stretches(self, data: Batches, start: Position, is_quiet: IsQuiet) -> Stretches:
        source = data.source if isinstance(data, Loader) else data
        if isinstance(source, Keys):
            fold = jax.jit(jax.vmap(jax.random.fold_in, (0, None)))
            keys = verbs.keys(source.key, self.state.axis)
            for position, _ in source.steps(start):
                yield Stretch(position, ((fold(keys, position.number), None), (0, None)), 1)
        elif isinstance(source, Rows) and source.arrays is not None:
            yield from self._resident(source, start, is_quiet)
        else:
            for position, batch in data.steps(start):
                yield Stretch(position, ((batch, None), (None, None)), rows_of(batch))

    def _resident(self, source: Rows, start: Position, is_quiet: IsQuiet) -> Stretches:
        """Yield numbers of rows, of arrays that lie on the devices; an epoch's at once where that is quicker."""
        order, chosen, number, scans = source.order, source.chosen, start.number, None
        data = pytrees.arrays("ensemble.fit", "data", source.arrays)
        data = arrays.device_put(data, arrays.sharding(self.state._placement, ()))
        num_whole = order.num_rows // order.batch_size  # batches of an epoch, without a last one that is shorter
        while True:
            epoch, within = divmod(number, len(order))
            at_once = within == 0 and scans is not False and num_whole and is_quiet(number, number + num_whole)
            count = num_whole if at_once else 1
            rows = np.stack([order.rows(k) for k in range(number, number + count)])
            rows = rows if chosen is None else chosen[..., rows]
            batch = (data, rows), (None, 0 if rows.ndim == 3 else None)
            if scans is None and count > 1:
                with placing.without_context():
                    program, args = self._prepared(((data, rows[..., :1, :]), batch[1]), None)
                    scans = _pays_to_scan(program, self.state._members, args)
                continue
            number += rows.shape[-2]
            last = (number - 1) % len(order)
            yield Stretch(
                Position(number - 1, epoch, last, last == len(order) - 1), batch, rows.shape[-1], rows.shape[-2]
            )

    def advance(self, batch: Any, active: np.ndarray | None) -> Any:
        with placing.without_context():
            return self.state._advance(*self._prepared(batch, active))

    def evaluate(self, step: Any, batch: Any) -> Any:
        return self.state.members(*_arguments(step, batch), apply=step)

    def _prepared(self, batch: Any, active: np.ndarray | None) -> tuple[Any, Any]:
        values, in_axes = batch
        return self.state._prepared("fit", self.step, _steps, (*values, active), (*in_axes, 0))


def _arguments(step: Any, batch: Any) -> tuple[Any, ...]:
    """Return what a step is called with besides the member: a tuple's parts, as by ``ens.train``."""
    return batch if type(batch) is tuple and not isinstance(step, (TrainStep, EvalStep)) else (batch,)


def _steps(form: Form, step: Callable[..., Any], state: State, inputs: Any) -> tuple[State, Any]:
    """Take some steps with a member, of these numbers of rows or of one batch; one that has stopped stays as it is."""
    data, rows, active = inputs

    def one(state: State, rows: Any) -> tuple[State, Any]:
        batch = data if rows is None else jax.tree.map(lambda x: x[rows], data)
        new, out = form.step(step, state, _arguments(step, batch))
        new = new if active is None else jax.tree.map(lambda a, b: jnp.where(active, a, b), new, state)
        return new, {} if out is None else out

    if rows is None:
        state, metrics = one(state, None)
        return state, jax.tree.map(lambda x: x[None], metrics)
    return jax.lax.scan(one, state, rows, unroll=len(rows) == 1)


def _pays_to_scan(program: Any, *args: Any) -> bool:
    """Return whether a loop on the devices is quicker than a call for each step. On CPU it runs on one thread."""
    if jax.default_backend() != "cpu":
        return True
    try:
        traced = program.trace(*args)
    except Exception:  # the step itself raises the same, and is named
        return False
    known, types = _scanned.setdefault(program, {}), tuple(traced.jaxpr.in_avals)
    if types not in known:
        is_slow = jax_api.holds(traced.jaxpr.jaxpr, "conv_general_dilated")
        known[types] = not is_slow and traced.lower().cost_analysis().get("flops", 0) <= 50_000_000
    return known[types]
