"""A run as lines of JSON, and for TensorBoard. When a run resumes, both lose what they have of later steps."""

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paraxis._calls.extras import needed
from paraxis.errors import DataError
from paraxis.train._callbacks import Event

_MARK = b'{"event": "start"'
"""The beginning of each log."""


class Log:
    """A file of JSON lines: one at the start, one for each step, epoch and evaluation.

    Args:
        path: of the file. What it has of later steps than ``start`` goes; of a run that starts anew, all of it.
        start: number of steps done before.
        facts: what is said in the first line.

    Raises:
        DataError: if there is a directory at that place, or a file that is no log.
        OSError: if it cannot be written to.
    """

    def __init__(self, path: Path, start: int, facts: dict[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass  # it is there from here on
        with path.open("rb") as old:
            head = old.read(len(_MARK))
            if not _MARK.startswith(head):
                raise DataError(f"px.fit: log: {path} is not a log of px.fit, so it was not touched; give another path")
            old.seek(0)
            kept = _length(old, start) if start else 0
        self._file: Any = path.open("r+b")
        self._file.truncate(kept)
        self._file.seek(kept)
        if not kept:
            self._add({"event": "start", **facts})

    def __call__(self, event: Event) -> None:
        """Note an event, if it is of a kind that is noted."""
        if event.kind not in ("step", "epoch", "evaluate"):
            return
        # JSON has no NaN.
        metrics = {name: value if math.isfinite(value) else None for name, value in event.metrics.items()}
        line = {"event": event.kind, "step": event.step, "epoch": event.epoch, "metrics": metrics}
        self._add(line | ({"rows": event.rows} if event.kind == "step" else {}))

    def flush(self) -> None:
        """Do nothing: each line is given to the system at once, which keeps it if this process is killed."""

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()

    def _add(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line | {"time": round(time.time(), 3)}, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._file = None
            warnings.warn(
                f"px.fit: log: {self._path} cannot be written: {error}; training continues, and the log ends here",
                stacklevel=2,
            )


def _length(lines: Iterable[bytes], step: int) -> int:
    """Return the length in bytes of the lines up to this step: those before the first that is later, or not whole."""
    length = 0
    for line in lines:
        try:
            found = json.loads(line)
            is_later = found["event"] != "start" and found["step"] > step
        except (ValueError, KeyError, TypeError):  # the last one, half written
            break
        if is_later or not line.endswith(b"\n"):
            break
        length += len(line)
    return length


class TensorBoard:
    """Event files for TensorBoard: ``train/…`` of steps, ``epoch/…``, and evaluations by their names.

    A run writes one, and the run that goes on another, which has TensorBoard leave out later steps of those before.
    """

    def __init__(self, directory: Path, start: int) -> None:
        with needed("px.fit: tensorboard=", "train"):
            from tensorboardX import SummaryWriter
        # TensorBoard reads files in the order of their names, and a run may be started again within a second.
        suffix = f".{start:012d}.{os.getpid()}"
        self._writer = SummaryWriter(str(directory), purge_step=start + 1, filename_suffix=suffix)
        self._directory = directory
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Note an event's metrics."""
        prefix = {"step": "train/", "epoch": "epoch/"}.get(event.kind, "")
        with self._writing():
            for name, value in event.metrics.items():
                self._writer.add_scalar(f"{prefix}{name}", value, event.step)

    def flush(self) -> None:
        """Give all points to the system."""
        with self._writing():
            self._writer.flush()

    def close(self) -> None:
        """No more points."""
        with self._writing():
            self._writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Warn of the first failure, say on a full disk: training continues."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(f"px.fit: tensorboard: {self._directory} cannot be written: {error}", stacklevel=4)
