"""``StopEarly``: a run that ends before its last step, since nothing gets better."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from paraxis._core import check
from paraxis.errors import DataError
from paraxis.train._history import Record


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
