"""Runs that end before their last step: when nothing gets better, or when they are told to."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from paraxis._core import check
from paraxis.errors import DataError
from paraxis.train._history import History, Record


class TrainingStopped(SystemExit):
    """Raised when Ctrl-C or SIGTERM has ended a run after a step. Uncaught, it ends the program.

    The exit status is 0, or 1 if ``checkpoint=`` was given and the last step could not be saved.

    Attributes:
        state: the state after the last step.
        history: the history up to that step.

    Example:
        >>> import os, signal
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> def stop(event):
        ...     if event.kind == "step" and event.step == 3:
        ...         os.kill(os.getpid(), signal.SIGTERM)
        >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> step = px.train_step(lambda params, batch: (batch @ params["w"] - 1) ** 2)
        >>> try:
        ...     fitted = px.fit(state, step, [jnp.ones((8, 3))], steps=1000, callbacks=stop, progress=False)
        ... except px.TrainingStopped as stopped:
        ...     print(int(stopped.state.step) < 1000)
        True
    """

    __module__ = "paraxis"  # as a traceback names it

    def __init__(self, state: Any, history: History, *, is_saved: bool = True) -> None:
        super().__init__(0 if is_saved else 1)
        self.state = state
        self.history = history


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
        check.number(
            "px.train.StopEarly", "min_change", self.min_change, least=0, write="min_change=0", error=DataError
        )
        if not isinstance(self.metric, str) or not self.metric:
            got = check.described(self.metric)
            raise DataError(f"px.train.StopEarly: metric must be a name such as 'test/loss', got {got}")
        if self.mode is None and any(word in self.metric.rpartition("/")[2] for word in ("loss", "error")):
            object.__setattr__(self, "mode", "min")
        if not isinstance(self.mode, str) or self.mode not in ("min", "max"):
            got = check.described(self.mode)
            raise DataError(
                f"px.train.StopEarly: mode must be 'min' or 'max', got {got} for {self.metric!r}; write mode='max' "
                f"if more is better, as of accuracy"
            )


class Watch:
    """A watch on whether a metric still becomes better."""

    def __init__(self, rule: StopEarly | None, saved: Mapping[str, Any] | None = None) -> None:
        self._rule = rule
        self.best: Record | None = None
        self._since = 0
        if rule is not None and saved and (saved["metric"], saved["mode"]) == (rule.metric, rule.mode):
            self.best = None if saved["best"] is None else Record(*saved["best"])
            self._since = saved["since"]

    def saved(self) -> dict[str, Any] | None:
        """Return all of it, as JSON values."""
        if self._rule is None:
            return None
        best = None if self.best is None else dataclasses.astuple(self.best)
        return {"metric": self._rule.metric, "mode": self._rule.mode, "best": best, "since": self._since}

    @property
    def sees_epochs(self) -> bool:
        """Return whether the metric is one of training."""
        return self._rule is not None and not source_of(self._rule.metric)

    def see(self, record: Record, source: str = "") -> None:
        """Look at new averages, of training or of an evaluation with this name."""
        rule = self._rule
        if rule is None or source != source_of(rule.metric):
            return
        value, sign = record.metrics[rule.metric], -1 if rule.mode == "max" else 1
        best = math.inf if self.best is None else sign * self.best.metrics[rule.metric]
        if sign * value < best - (0 if self.best is None else rule.min_change):
            self.best, self._since = record, 0
        else:
            self._since += 1

    @property
    def reason(self) -> str | None:
        """Return why to stop; ``None``: go on."""
        rule = self._rule
        if rule is None or self._since < rule.patience:
            return None
        if self.best is None:
            return f"{rule.metric} was not a number {self._since} times"
        return (
            f"{rule.metric} was not better than {self.best.metrics[rule.metric]:.6g}, its best, of step "
            f"{self.best.step}, {self._since} times in a row"
        )


def source_of(metric: str) -> str:
    """Return the name of the evaluation whose metric it is; empty: it is one of training."""
    return metric.rpartition("/")[0]


def require_metric(argument: str, metric: str, there: Mapping[str, float]) -> None:
    """Check that a metric that an argument names is there."""
    if metric not in there:
        names = ", ".join(map(repr, there)) or "none"
        raise DataError(f"px.fit: {argument} names the metric {metric!r}, but there is {names}; write one of these")
