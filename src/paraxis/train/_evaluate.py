"""Evaluations of a run, a step that changes nothing over all of some data, and ``StopEarly``, which ends the run."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from paraxis._core import check
from paraxis._host import processes
from paraxis.errors import DataError
from paraxis.train._batches import rows_of
from paraxis.train._history import Record, add, cell, fetch, late, means_of
from paraxis.train._loader import batches_of
from paraxis.train._loss import Metrics
from paraxis.train._step import TrainStep


class Evaluate:
    """An evaluation of a run on a whole data set, the same each time, with exact averages for any batch size.

    Args:
        step: ``step(state, batch)`` returns a dict of metrics, as ``px.eval_step`` makes it; numbers are means over
            the batch's rows.
        data: as for :func:`fit`; of a loader, its first epoch. For several data sets, use several evaluations.
        every: ``"epoch"``: after each epoch; or a number of steps. Each evaluation also runs at the end.
        name: prefix of the names of its metrics, as in ``"test/loss"``.

    Raises:
        DataError: if ``every`` is neither, or ``step`` is a training step.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> evaluate = px.eval_step(lambda params, batch: (batch["x"] @ params["w"]) ** 2)
        >>> px.Evaluate(evaluate, px.loader({"x": jnp.ones((10, 3))}, 4), every=100).name
        'test'
    """

    def __init__(self, step: Any, data: Any, every: int | Literal["epoch"] = "epoch", name: str = "test") -> None:
        if isinstance(step, TrainStep):
            raise DataError("px.Evaluate: step is a training step; write px.Evaluate(px.eval_step(loss), data)")
        self.every = None if every == "epoch" else check.count("px.Evaluate", "every", every, error=DataError)
        self.name, self.step = name, step
        self._data = batches_of("px.Evaluate: data", data)

    def __call__(self, trained: Any, asked: Callable[[], Any]) -> dict[str, Any]:
        """Return the averages over all data, by names that begin with its own; none, once ``asked()`` to give up."""
        sums: Metrics = {}
        with contextlib.closing(self._data.epoch(0)) as batches:
            under_way = (None if asked() else (trained.evaluate(self.step, x), rows_of(x)) for x in batches)
            for waiting in late(under_way):
                if waiting is None:
                    return {}
                sums = add(sums, fetch(*waiting, shape=trained.shape))
                processes.note_progress()
        if not sums:
            raise DataError(f"px.fit: evaluation {self.name!r} has no batches, or no metrics")
        return {f"{self.name}/{name}": value for name, value in means_of(sums).items()}


@dataclasses.dataclass(frozen=True)
class StopEarly:
    """A rule that ends a run when a metric has not improved for a while.

    Args:
        metric: a metric of an evaluation, such as ``"test/loss"``; or of training, averaged over each epoch, such as
            ``"loss"``.
        patience: how many times in a row the metric may fail to improve.
        mode: whether lower (``"min"``) or higher (``"max"``) values are better. The default is ``"min"`` for names that
            end with ``loss`` or ``error``; other metrics need a mode.
        min_change: the smallest change that counts as an improvement, in the metric's unit.

    Raises:
        DataError: if an argument is malformed.

    Example:
        >>> import paraxis as px
        >>> px.StopEarly("test/accuracy", patience=5, mode="max")
        StopEarly(metric='test/accuracy', patience=5, mode='max', min_change=0.0)
    """

    metric: str = "test/loss"
    patience: int = 3
    mode: Literal["min", "max"] | None = None
    min_change: float = 0.0

    def __post_init__(self) -> None:
        check.count("px.StopEarly", "patience", self.patience, write="patience=3", error=DataError)
        if self.mode is None and self.metric.endswith(("loss", "error")):
            object.__setattr__(self, "mode", "min")
        if self.mode not in ("min", "max"):
            raise DataError(f"px.StopEarly: mode must be 'min' or 'max', got {self.mode!r} for {self.metric!r}")


class Verdict:
    """What a rule, if there is one, says of the records so far: of one run, or of each member of an ensemble.

    Attributes:
        best: the best record; of members, its entries are arrays ``(size,)``: -1 and NaN of one that has none.
        reason: why to stop; ``None``: go on.
        active: what still trains, booleans ``()`` or ``(size,)``.
    """

    best: Record | None = None
    reason: str | None = None

    def __init__(self, rule: StopEarly | None, shape: tuple[int, ...]) -> None:
        self.active = np.ones(shape, bool)
        self._rule, self._least, self._since = rule, np.full(shape, math.inf), np.zeros(shape, int)

    def add(self, record: Record) -> np.ndarray:
        """Add a record; return what has improved by it: NaN is no improvement."""
        if self._rule is None or (metric := self._rule.metric) not in record.metrics:
            return np.zeros_like(self.active)
        value = record.metrics[metric] * (-1 if self._rule.mode == "max" else 1)
        improved = self.active & (value < self._least - self._rule.min_change)
        self._least = np.where(improved, value, self._least)
        self._since = np.where(improved, 0, self._since + self.active)
        self.active = self._since < self._rule.patience
        if self.active.ndim == 0:
            self.best = record if improved else self.best
        else:
            old = self.best or Record(-1, -1, {})
            pick = lambda new, old: np.where(improved, new, old)  # noqa: E731
            metrics = {name: pick(x, old.metrics.get(name, math.nan)) for name, x in record.metrics.items()}
            self.best = Record(pick(record.step, old.step), pick(record.epoch, old.epoch), metrics, record.evaluation)
        if not self.active.any():
            best = self.best
            than = best and f"better than {cell(best.metrics[metric])}, its best, of step {cell(best.step)},"
            self.reason = f"{metric} was not {than or 'a number'} {self._rule.patience} times in a row"
        return improved
