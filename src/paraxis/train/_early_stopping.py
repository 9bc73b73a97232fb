"""Runs that end before their last step: when nothing gets better, or when they are told to."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paraxis._calls import check
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
    """A watch on whether a metric still becomes better.

    Args:
        rule: ``None``: there is nothing to watch.
        evaluations: the names of those there are.
        saved: what :meth:`saved` gave, to go on from there; of another metric, it does not count.

    Raises:
        DataError: if the metric is of an evaluation that is not there.
    """

    def __init__(
        self, rule: StopEarly | None, evaluations: Sequence[str] = (), saved: Mapping[str, Any] | None = None
    ) -> None:
        self._rule = rule
        self._source = rule.metric.rpartition("/")[0] if rule is not None else ""
        if rule is not None and self._source and self._source not in evaluations:
            there = " and ".join(repr(name) for name in evaluations) if evaluations else "none"
            raise DataError(
                f"px.fit: stop_early watches {rule.metric!r}, of an evaluation {self._source!r}, but there is {there}; "
                f"write evaluate=px.Evaluate(px.eval_step(loss), data, name={self._source!r})"
            )
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
        return self._rule is not None and not self._source

    def see(self, record: Record, source: str = "") -> None:
        """Look at new averages, of training or of an evaluation with this name.

        Raises:
            DataError: if they are those that should have the metric, and have not.
        """
        rule = self._rule
        if rule is None or source != self._source:
            return
        if rule.metric not in record.metrics:
            raise DataError(
                f"px.fit: stop_early watches {rule.metric!r}, but there are {', '.join(record.metrics)}; write "
                f"px.train.StopEarly({next(iter(record.metrics))!r})"
            )
        if self._is_better(record.metrics[rule.metric]):
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
        times = f"{self._since} times in a row" if self._since > 1 else "once"
        return (
            f"{rule.metric} was not better than {self.best.metrics[rule.metric]:.6g}, its best, of step "
            f"{self.best.step}, {times}"
        )

    def _is_better(self, value: float) -> bool:
        rule = self._rule
        assert rule is not None
        if self.best is None:
            return not math.isnan(value)
        before = self.best.metrics[rule.metric]
        return value < before - rule.min_change if rule.mode == "min" else value > before + rule.min_change
