"""The events of a run, and what reports them besides callbacks: a display, a log of JSON lines, TensorBoard."""

import abc
import contextlib
import dataclasses
import datetime
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from paraxis._core.check import needed
from paraxis._host import files, progress
from paraxis.errors import DataError
from paraxis.train._history import cell

Kind = Literal["start", "step", "epoch", "evaluate", "checkpoint", "end"]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in a run, passed to callbacks.

    Attributes:
        kind: ``"start"``, ``"step"``, ``"epoch"``, ``"evaluate"``, ``"checkpoint"`` or ``"end"``.
        step: number of steps taken by then.
        epoch: number of the epoch, from 0.
        metrics: floats, or of an ensemble's members ``(size,)``, by name: of the step, averaged over the epoch, or of
            the evaluation (``"test/loss"``); otherwise empty.
        rows: number of rows of the step's batch.
        state: the state after that many steps, which the next step consumes; ``None`` for ``"step"``, whose metrics
            arrive when later steps have been started, so that the devices need not wait. Of an ensemble, it is the
            ensemble itself, which a callback may change.

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
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = 0
    state: Any = None


class Callback(Protocol):
    """What :func:`fit` calls with each :class:`Event`."""

    def __call__(self, event: Event, /) -> Any: ...


class Reporter(abc.ABC):
    """A display or a log of events. A log's first failure, say on a full disk, is a warning: training continues."""

    def __init__(self, argument: str, path: str | os.PathLike[str], lock: str = "") -> None:
        self._argument, self._path, self._has_failed = argument, Path(path).expanduser(), False
        locked = self._path / lock
        locked.parent.mkdir(parents=True, exist_ok=True)
        self._locked = files.locked(locked)

    @abc.abstractmethod
    def __call__(self, event: Event) -> None:
        """Show or write an event."""

    def flush(self) -> None:  # noqa: B027  # by default, nothing waits
        """Write what waits: a checkpoint comes next."""

    def close(self) -> None:
        """Write what waits, at the end, and let other runs write there."""
        os.close(self._locked)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                warnings.warn(
                    f"px.fit: {self._argument}: {self._path} cannot be written: {error}; it ends here", stacklevel=4
                )
            self._has_failed = True


class RunDisplay(Reporter):
    def __init__(self, total: int | None, epochs: int | None) -> None:
        self._display = progress.Display()
        self.say, self.close = self._display.say, self._display.close
        self._total, self._epochs, self._metrics = total, epochs, dict[str, Any]()
        self._first: tuple[float, int] | None = None  # when the first step, which compiles, was done

    def __call__(self, event: Event) -> None:
        if event.kind == "step":
            self._metrics, self._first = event.metrics, self._first or (time.monotonic(), event.step)
            self._display.show(lambda: self._line(event, self._rate(event.step)), event.step, self._total)
        if event.kind == "evaluate":
            self._display.say(self._line(event, _numbers(event.metrics)), instead=True)

    def _line(self, event: Event, rest: str) -> str:
        step = f"step {event.step:,}" + (f" of {self._total:,}" if self._total else "")
        epoch = f"epoch {event.epoch + 1}" + (f" of {self._epochs}" if self._epochs else "")
        return "  ".join(filter(None, [f"{step}, {epoch}", _numbers(self._metrics), rest]))

    def _rate(self, step: int) -> str:
        began, first = self._first or (0.0, step)
        seconds, steps = time.monotonic() - began, step - first
        if not steps or not seconds:
            return ""
        left = datetime.timedelta(seconds=int(((self._total or 0) - step) * seconds / steps))
        return f"{steps / seconds:,.4g} steps/s" + (f"  {left} left" if self._total else "")


def _numbers(metrics: Mapping[str, Any]) -> str:
    names = sorted(metrics.keys() - {"grad_norm"}, key=lambda name: (name != "loss", name))
    return "  ".join(f"{name} {cell(metrics[name])}" for name in names)


_MARK = b'{"event": "start"'  # the beginning of each log


class Log(Reporter):
    def __init__(self, path: str | os.PathLike[str], start: int, facts: dict[str, Any]) -> None:
        super().__init__("log", path)
        self._file = self._path.open("ab", buffering=0)  # each line is the system's at once, and stays after a kill
        content = self._path.read_bytes()
        if not _MARK.startswith(content[: len(_MARK)]):
            raise DataError(f"px.fit: log: {self._path} is not a log of px.fit, and is left alone; give another path")
        kept = 0
        with contextlib.suppress(ValueError):  # of the last line, half written
            for line in content.splitlines(keepends=True) if start else ():
                if json.loads(line).get("step", 0) > start or not line.endswith(b"\n"):
                    break
                kept += len(line)
        self._file.truncate(kept)
        if not kept:
            self._add({"event": "start", **facts})

    def __call__(self, event: Event) -> None:
        if event.kind not in ("step", "epoch", "evaluate"):
            return
        of_json = lambda value: value if math.isfinite(value) else None  # noqa: E731  # JSON has no NaN
        metrics = {k: [*map(of_json, x.tolist())] if np.ndim(x) else of_json(x) for k, x in event.metrics.items()}
        line = {"event": event.kind, "step": event.step, "epoch": event.epoch, "metrics": metrics}
        self._add(line | ({"rows": event.rows} if event.kind == "step" else {}))

    def close(self) -> None:
        super().close()
        self._file.close()

    def _add(self, line: dict[str, Any]) -> None:
        content = json.dumps(line | {"time": round(time.time(), 3)}, allow_nan=False).encode() + b"\n"
        with self._writing():
            if not self._has_failed and self._file.write(content) < len(content):
                raise OSError("the disk is full")


class TensorBoard(Reporter):
    """Event files for TensorBoard: ``train/…`` of steps, ``epoch/…``, and evaluations; of members, ``train/loss/0``, ….

    A run that resumes writes another file, which has TensorBoard leave out later steps of those before.
    """

    def __init__(self, path: str | os.PathLike[str], start: int) -> None:
        with needed("px.fit: tensorboard=", "train"):
            from tensorboardX import SummaryWriter
        super().__init__("tensorboard", path, "paraxis.lock")
        # TensorBoard reads files in the order of their names, and a run may be started again within a second.
        self._writer = SummaryWriter(str(self._path), purge_step=start + 1, filename_suffix=f".{time.time_ns()}")

    def __call__(self, event: Event) -> None:
        prefix = {"step": "train/", "epoch": "epoch/"}.get(event.kind, "")
        with self._writing():
            for name, value in event.metrics.items():
                # An evaluation may be called "train": its curves stay apart from those of the steps.
                apart = "evaluate/" if not prefix and name.startswith(("train/", "epoch/")) else prefix
                for number, one in enumerate(np.atleast_1d(value)):
                    tag = f"{apart}{name}" + (f"/{number}" if np.ndim(value) else "")
                    self._writer.add_scalar(tag, one, event.step)

    def flush(self) -> None:
        with self._writing():
            self._writer.flush()

    def close(self) -> None:
        super().close()
        with self._writing():
            self._writer.close()
