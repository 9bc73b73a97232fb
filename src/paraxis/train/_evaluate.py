"""Evaluations of a run, a step that changes nothing over all of some data, and ``StopEarly``, which ends the run."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from paraxis._core import check
from paraxis._host import processes
from paraxis.errors import DataError
from paraxis.train._batches import rows_of
from paraxis.train._history import Record, Sums, add, fetch, means_of, send
from paraxis.train._loader import Loader
from paraxis.train._sources import Batches
from paraxis.train._step import TrainStep

AHEAD = 4  # batches that the host may be ahead of the devices: a batch's metrics are fetched then


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
        self._data = data if isinstance(data, Loader) else Batches("px.Evaluate: data", data)

    def __call__(self, state: Any, asked: Callable[[], Any] = bool) -> dict[str, float]:
        """Return the averages over all data, by names that begin with its own.

        Args:
            state: is left as it is.
            asked: whether to give up, and return nothing; called before each batch.

        Raises:
            DataError: if there are no batches, or no metrics.

        Communicates: what the step does; waits for the devices at the end.
        """
        sums: Sums = {}
        pending: collections.deque[Any] = collections.deque()
        with contextlib.closing(self._data.epoch(0)) as batches:
            for batch in batches:
                if asked():
                    return {}
                pending.append((send(self.step(state, batch)), rows_of(batch)))
                if len(pending) > AHEAD:
                    sums = add(sums, fetch(*pending.popleft()))
                processes.note_progress()
        for metrics in pending:
            sums = add(sums, fetch(*metrics))
        if not sums:
            raise DataError(f"px.fit: evaluation {self.name!r} has no batches, or no metrics")
        return {f"{self.name}/{name}": value for name, value in means_of(sums).items()}


def evaluations_of(evaluate: Any) -> dict[str, Evaluate]:
    found = () if evaluate is None else tuple(evaluate) if isinstance(evaluate, (list, tuple)) else (evaluate,)
    if wrong := [one for one in found if not isinstance(one, Evaluate)]:
        raise DataError(f"px.fit: evaluate is a {type(wrong[0]).__name__}; write px.Evaluate(px.eval_step(loss), data)")
    by_name = {one.name: one for one in found}
    if len(by_name) < len(found):
        raise DataError("px.fit: two evaluations have one name; write px.Evaluate(…, name='second')")
    return by_name


@dataclasses.dataclass(frozen=True)
class StopEarly:
    """A rule that ends a run when a metric has not improved for a while.

    Args:
        metric: a metric of an evaluation, such as ``"test/loss"``; or of training, averaged over each epoch, such as
            ``"loss"``.
        patience: how many times in a row the metric may fail to improve.
        mode: whether lower (``"min"``) or higher (``"max"``) values are better. The default is ``"min"`` for names that
            contain ``loss`` or ``error``; other metrics need a mode.
        min_change: the smallest change that counts as an improvement, in the metric's unit.

    Raises:
        DataError: if an argument is malformed.

    Example:
        >>> import paraxis as px
        >>> px.train.StopEarly("test/accuracy", patience=5, mode="max")
        StopEarly(metric='test/accuracy', patience=5, mode='max', min_change=0.0)
    """

    metric: str = "test/loss"
    patience: int = 3
    mode: Literal["min", "max"] | None = None
    min_change: float = 0.0

    def __post_init__(self) -> None:
        check.count("px.train.StopEarly", "patience", self.patience, write="patience=3", error=DataError)
        if self.mode is None and any(word in self.metric.rpartition("/")[2] for word in ("loss", "error")):
            object.__setattr__(self, "mode", "min")
        if self.mode not in ("min", "max"):
            raise DataError(
                f"px.train.StopEarly: mode must be 'min' or 'max', got {self.mode!r} for {self.metric!r}; write "
                "mode='max' if more is better, as of accuracy"
            )

    def judge(self, records: Iterable[Record]) -> tuple[Record | None, str | None]:
        """Return the best of the averages so far, and why to stop; ``None``: go on."""
        best, since, sign = None, 0, -1 if self.mode == "max" else 1
        for record in (record for record in records if self.metric in record.metrics):
            bound = math.inf if best is None else sign * best.metrics[self.metric] - self.min_change
            best, since = (record, 0) if sign * record.metrics[self.metric] < bound else (best, since + 1)
        if since < self.patience:
            return best, None
        if best is None:
            return None, f"{self.metric} was not a number {since} times"
        return best, (
            f"{self.metric} was not better than {best.metrics[self.metric]:.6g}, its best, of step {best.step}, "
            f"{since} times in a row"
        )


def source_of(metric: str) -> str:
    """Return the name of the evaluation whose metric it is; empty: it is one of training."""
    return metric.rpartition("/")[0]
