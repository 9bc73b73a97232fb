"""The events of a run, and their receivers."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from paraxis.errors import DataError

Kind = Literal["start", "step", "epoch", "evaluate", "checkpoint", "end"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)


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
    """Something of ours that is told of events."""

    def __call__(self, event: Event) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Give all that was told to the system: a checkpoint comes next. By default, nothing waits."""

    def close(self) -> None:
        """Write what waits."""


class Callbacks(Reporter):
    """The user's callbacks, each told of what it asks for, in their order."""

    def __init__(self, callbacks: Any) -> None:
        self._by_kind: dict[Kind, list[Callable[[Event], Any]]] = {kind: [] for kind in KINDS}
        known = [f"on_{kind}" for kind in KINDS]
        for callback in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
            hooks = [name for name in dir(callback) if name.startswith("on_")]
            unknown = sorted(set(hooks) - set(known))
            if unknown or not (hooks or callable(callback)):
                raise DataError(
                    f"px.fit: callbacks: {callback!r} must be a function of an event, or an object with some of the "
                    f"methods {', '.join(known)}" + (f"; {unknown[0]} would never be called" if unknown else "")
                )
            for kind in KINDS:
                if not hooks or f"on_{kind}" in hooks:
                    self._by_kind[kind].append(getattr(callback, f"on_{kind}", callback))

    def hear(self, kind: Kind) -> bool:
        """Return whether one is told of such events."""
        return bool(self._by_kind[kind])

    def __call__(self, event: Event) -> None:
        for callback in self._by_kind[event.kind]:
            try:
                callback(event)
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                error.add_note(f"px.fit: raised by the callback {name}, after step {event.step}")
                raise
