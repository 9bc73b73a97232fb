"""A run as lines of JSON, and for TensorBoard. A resumed run's are what an unbroken one's would have been."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paraxis._core.errors import DataError
from paraxis._host import files
from paraxis.train.runs._events import Event

_FLUSH_SECONDS = 0.2


class Log:
    """A file of JSON lines: one at the start, one for each step, epoch and evaluation.

    Args:
        path: of the file. What it has of later steps than ``start`` goes; of a run that starts anew, all of it.
        start: how many steps have been done.
        facts: what is said in the first line.
        every: how many steps lie between those that have a line.

    Raises:
        DataError: if there is a directory at that place.
        OSError: if it cannot be written to.
    """

    def __init__(self, path: Path, start: int, facts: dict[str, Any], every: int) -> None:
        if path.is_dir():
            raise DataError(f"px.fit: log: {path} is a directory; name a file in it: log='{path / 'log.jsonl'}'")
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not (start and _cut(path, start))
        self._file = path.open("wb" if is_new else "ab", buffering=0)
        self._every = every
        self._lines: list[bytes] = []
        self._flushed = time.monotonic()
        if is_new:
            self._add({"event": "start", **facts})
        self.flush()

    def __call__(self, event: Event) -> None:
        """Note an event, if it is of a kind that is noted."""
        if event.kind == "step" and event.step % self._every == 0:
            self._add(_line(event) | {"rows": event.rows})
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self.flush()
        elif event.kind in ("epoch", "evaluate"):
            self._add(_line(event))
            self.flush()

    def flush(self) -> None:
        """Give whole lines to the system, which keeps them if this process is killed."""
        if self._lines:
            self._file.write(b"".join(self._lines))
            self._lines.clear()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """No more lines."""
        self.flush()
        self._file.close()

    def _add(self, line: dict[str, Any]) -> None:
        line["time"] = round(time.time(), 3)
        self._lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")


def _line(event: Event) -> dict[str, Any]:
    # JSON has no NaN.
    metrics = {name: value if math.isfinite(value) else None for name, value in event.metrics.items()}
    return {"event": event.kind, "step": event.step, "epoch": event.epoch, "metrics": metrics}


def _cut(path: Path, step: int) -> bool:
    """Drop the lines of later steps, all at once; whether a file with a first line is there."""
    if not path.is_file():
        return False
    mode, count = path.stat().st_mode, 0
    with path.open("rb") as old, files.replaced(path) as new:
        for line in _kept(old, step):
            new.write(line)
            count += 1
    path.chmod(mode)
    return count > 0


def _kept(lines: IO[bytes], step: int) -> Iterator[bytes]:
    for line in lines:
        try:
            found = json.loads(line)
            is_later = found["event"] != "start" and found["step"] > step
        except (ValueError, KeyError, TypeError):  # the last one, half written
            return
        if is_later or not line.endswith(b"\n"):
            return
        yield line


class TensorBoard:
    """Event files for TensorBoard: ``train/…`` of steps, ``epoch/…``, and evaluations by their names.

    Args:
        directory: TensorBoard leaves out what earlier files in it have of later steps than ``start``.
        start: how many steps have been done.
        every: how many steps lie between those that are noted.

    Raises:
        OSError: if the directory cannot be written to.
    """

    def __init__(self, directory: Path, start: int, every: int) -> None:
        # Without it, a run that is started again within a second would overwrite the file of the one before.
        suffix = f".{start:012d}.{os.getpid()}"
        self._writer = _summary_writer()(os.fspath(directory), purge_step=start + 1, filename_suffix=suffix)
        self._every = every

    def __call__(self, event: Event) -> None:
        """Note an event's metrics."""
        prefix = {"step": "train/", "epoch": "epoch/"}.get(event.kind, "")
        if event.kind != "step" or event.step % self._every == 0:
            for name, value in event.metrics.items():
                self._writer.add_scalar(f"{prefix}{name}", value, event.step)

    def flush(self) -> None:
        """Nothing has to be there at once."""

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "px.fit: tensorboard= needs tensorboardX, which is not installed; write pip install tensorboardX",
            name=error.name,
        ) from error
    return SummaryWriter


def require_tensorboard() -> None:
    """Raise now if event files could not be written later."""
    _summary_writer()
