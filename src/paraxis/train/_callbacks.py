"""The events of a run, which callbacks, the display and logs are told of."""

import dataclasses
from typing import Any, Literal

Kind = Literal["start", "step", "epoch", "evaluate", "checkpoint", "end"]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in a run, passed to callbacks.

    Attributes:
        kind: ``"start"``, ``"step"``, ``"epoch"``, ``"evaluate"``, ``"checkpoint"`` or ``"end"``.
        step: number of steps taken by then.
        epoch: number of the epoch, from 0.
        metrics: Python floats by name: of the step, averaged over the epoch, or of the evaluation (``"test/loss"``);
            otherwise empty.
        rows: number of rows of the step's batch.
        state: the state after that many steps; ``None`` for ``"step"``, whose metrics arrive when later steps have
            been started, so that the devices need not wait.

    Example:
        >>> import paraxis as px
        >>> losses = []
        >>> on_epoch = lambda event: losses.append(event.metrics["loss"]) if event.kind == "epoch" else None
        >>> on_epoch(px.train.Event("epoch", step=100, epoch=0, metrics={"loss": 0.5}))
        >>> losses
        [0.5]
    """

    kind: Kind
    step: int
    epoch: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: int = 0
    state: Any = None


class Reporter:
    """A display or a log, which is told of events."""

    def __call__(self, event: Event) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Give all that was told to the system: a checkpoint comes next. By default, nothing waits."""

    def close(self) -> None:
        """Write what waits."""
