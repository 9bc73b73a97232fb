"""``eval_step``: metrics of a batch on all devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp

from paraxis._axes.axis import Axis
from paraxis._calls import arguments
from paraxis._jax.structure import Recent
from paraxis.train._batches import Batch
from paraxis.train.steps import _precision, _reproducible, _rows
from paraxis.train.steps._gradients import in_turns
from paraxis.train.steps._grouped import GroupedEval
from paraxis.train.steps._kinds import AT_MOST, PerKind
from paraxis.train.steps._losses import LossFunction, Part
from paraxis.train.steps._mean import Mean
from paraxis.train.steps._state import TrainState

_EXAMPLE = "px.eval_step(lambda model, batch: {'accuracy': jnp.argmax(model(batch['x']), -1) == batch['y']})"


class EvalStep:
    """A function that computes metrics of a batch, made and described by :func:`eval_step`."""

    def __init__(self, fn: LossFunction, rows: _rows.Rows, *, precision: str | None, ema: bool) -> None:
        self._fn = fn
        self._rows = rows
        self._precision = precision
        self._ema = ema
        self._compiled: Recent[PerKind] = Recent(AT_MOST)

    @arguments.named()
    def __call__(self, state: TrainState, batch: Any) -> dict[str, Mean]:
        """Return the metrics of a batch; the state does not change.

        Raises:
            ShapeError: if the arrays of the batch differ in their rows, or a metric is not a mean over them.
            DataError: if the batch has no rows.
            StateError: if the state does not fit the function, or a training step has consumed it; or inside
                ``jit``, ``grad`` or ``vmap``.
        """
        devices, run, used, laid_out = self._placed(state, batch)
        devices.settle(used, laid_out.tree)
        try:
            metrics = devices.run(run, used, laid_out)
        except TypeError as error:
            raise _rows.without_values("eval_step", state, batch) or error from error.__cause__
        devices.settle(metrics)  # the next one, of the same state, would not wait for this one
        return metrics

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Return the program, as ``jax.jit(f).lower`` does, without running it."""
        devices, run, used, laid_out = self._placed(state, batch)
        return devices.run(run.lower, used, laid_out)

    def _trace(self, state: TrainState, batch: Any) -> Any:
        devices, run, used, laid_out = self._placed(state, batch)
        return devices.run(run.trace, used, laid_out)

    def _placed(self, state: TrainState, batch: Any) -> tuple[_rows.Devices, PerKind, TrainState, Batch]:
        _rows.refuse_tracing("eval_step", "evaluate")
        _rows.require_state("eval_step", state, TrainState)
        if gone := _rows.given_away("eval_step", state):
            raise gone
        if self._fn.wants_key and state.key is None:
            raise _rows.no_key("eval_step", self._fn.name)
        devices = self._rows.here()
        run = self._compiled.get(devices.placement, lambda: self._made(devices))
        weights = state.weights(ema=self._ema)
        used = dataclasses.replace(state, params=weights, opt_state=None, ema=None, extra=None)
        return devices, run, devices.beside(used), devices.laid_out(batch)

    def _made(self, devices: _rows.Devices) -> PerKind:
        whole = devices.whole
        options = {} if whole is None else {"out_shardings": whole}
        return PerKind(self._body, [self._fn.function], **options)

    def _body(self, state: TrainState, batch: Batch) -> dict[str, Mean]:
        key = None if state.key is None else jax.random.fold_in(state.key, state.step)
        turns = self._rows.turns(batch.num_rows)
        if turns == 1:
            return self._metrics(state, Part(batch.rows(), batch.num_rows, key, key, jnp.arange(batch.num_rows)))
        return in_turns(lambda part: self._metrics(state, part), batch, key, turns)

    def _metrics(self, state: TrainState, part: Part) -> dict[str, Mean]:
        part = dataclasses.replace(part, rows=_precision.lowered(part.rows, self._precision))
        params = _precision.lowered(state.params, self._precision)
        model, _ = state.recipe.form.make(params, state.mutable, part.key, "eval")
        return self._fn.metrics(model, part, state.mutable)


@overload
def eval_step(
    fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int | None = None,
    precision: str | None = None,
    ema: bool = False,
    reproducible: None = None,
    groups: int = _reproducible.GROUPS,
) -> EvalStep: ...
@overload
def eval_step(
    fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int | None = None,
    precision: str | None = None,
    ema: bool = False,
    reproducible: str,
    groups: int = _reproducible.GROUPS,
) -> GroupedEval: ...
@arguments.named(at_once="microbatches", dtype="precision")
def eval_step(
    fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int | None = None,
    precision: str | None = None,
    ema: bool = False,
    reproducible: str | None = None,
    groups: int = _reproducible.GROUPS,
) -> EvalStep | GroupedEval:
    """Make a function that computes metrics of a batch on all devices: ``metrics = evaluate(state, batch)``.

    Args:
        fn: ``fn(model, batch)``, with the model that the state was made from (an NNX module in ``eval()`` mode; a Linen
            module, called as ``model(x, train=False)``; or the parameters) and the real rows of the batch. It may take
            ``key``, ``row_keys`` and ``mutable`` as a loss function does. It returns a dict of metrics, or what a
            loss function returns. Its changes to the model are discarded.
        axis: as for :func:`train_step`.
        microbatches: likewise.
        precision: likewise.
        ema: whether to use the averaged parameters.
        reproducible: as for :func:`train_step`.
        groups: likewise.

    Returns:
        ``evaluate(state, batch)`` → a dict of :class:`Mean`. To combine several batches, add their means:
        ``a["loss"] + b["loss"]``.

    Raises:
        StateError: as :func:`train_step` does.

    Communicates: one all-reduce of the metrics, 8 bytes each, and whatever the model computes over the batch.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
        >>> evaluate = px.eval_step(lambda params, batch: {"positive": batch["x"] @ params["w"] > 0})
        >>> float(evaluate(state, {"x": jnp.ones((10, 3))})["positive"])
        1.0
    """
    arguments.flag("eval_step", "ema", ema)
    function = LossFunction("eval_step", fn, _EXAMPLE, "fn")
    _precision.check("eval_step", precision)
    rows = _rows.Rows("eval_step", axis, microbatches)
    if _reproducible.is_asked_for("eval_step", reproducible, groups, microbatches=microbatches):
        return GroupedEval(function, rows, number=groups, precision=precision, ema=ema)
    return EvalStep(function, rows, precision=precision, ema=ema)
