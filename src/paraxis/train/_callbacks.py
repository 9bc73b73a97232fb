"""The events of a run, and their receivers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from paraxis.errors import DataError

Kind = Literal["start", "step", "epoch", "evaluate", "checkpoint", "end"]
KINDS: tuple[Kind, ...] = ("start", "step", "epoch", "evaluate", "checkpoint", "end")


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
        >>> class Best:
        ...     loss = float("inf")
        ...     def on_epoch(self, event: px.train.Event) -> None:
        ...         self.loss = min(self.loss, event.metrics["loss"])
        >>> best = Best()
        >>> best.on_epoch(px.train.Event("epoch", step=100, epoch=0, metrics={"loss": 0.5}))
        >>> best.loss
        0.5
    """

    kind: Kind
    step: int
    epoch: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: int = 0
    state: Any = None


Listener = Callable[[Event], Any]


class Callbacks:
    """The user's callbacks, each told of what it asks for, in their order.

    Raises:
        DataError: if one is none.
    """

    def __init__(self, callbacks: Any) -> None:
        found = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
        self._by_kind: dict[Kind, list[tuple[str, Listener]]] = {kind: [] for kind in KINDS}
        for callback in found:
            for kind, listener in _hooks(callback).items():
                self._by_kind[kind].append((_name(callback, kind), listener))

    def hear(self, kind: Kind) -> bool:
        """Return whether one is told of such events."""
        return bool(self._by_kind[kind])

    def __call__(self, event: Event) -> None:
        """Tell those who asked for it. What one raises says which it was, and after which step."""
        for name, listener in self._by_kind[event.kind]:
            try:
                listener(event)
            except Exception as error:
                error.add_note(f"px.fit: raised by the callback {name}, after step {event.step}")
                raise


def _hooks(callback: Any) -> dict[Kind, Listener]:
    named = [name for name in dir(callback) if name.startswith("on_")]
    known: list[Kind] = [kind for kind in KINDS if f"on_{kind}" in named]
    unknown = sorted(set(named) - {f"on_{kind}" for kind in KINDS})
    if unknown and not isinstance(callback, type):
        raise DataError(
            f"px.fit: callbacks: {type(callback).__name__} has a method {unknown[0]}, which is never called; there are "
            f"{_names()}"
        )
    if isinstance(callback, type) or (not known and not callable(callback)):
        raise DataError(
            f"px.fit: callbacks: {callback!r} is not a callback; write a function of an event, or an object with "
            f"methods such as on_step(event): there are {_names()}"
        )
    if known:
        return {kind: getattr(callback, f"on_{kind}") for kind in known}
    return dict.fromkeys(KINDS, callback)


def _name(callback: Any, kind: Kind) -> str:
    if hasattr(callback, f"on_{kind}"):
        return f"{type(callback).__name__}.on_{kind}"
    return getattr(callback, "__name__", type(callback).__name__)


def _names() -> str:
    return ", ".join(f"on_{kind}" for kind in KINDS)
