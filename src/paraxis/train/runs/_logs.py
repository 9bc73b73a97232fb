"""A run as lines of JSON, and for TensorBoard. A resumed run's are what an unbroken one's would have been."""

import contextlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paraxis._calls.extras import needed
from paraxis.errors import DataError
from paraxis.train.runs._events import Event
from paraxis.train.runs._growing import Growing, is_free

_MARK = b'{"event": "start"'
"""The beginning of each log."""


class Log:
    """A file of JSON lines: one at the start, one for each step, epoch and evaluation.

    Args:
        path: of the file. What it has of later steps than ``start`` goes once there is a step to note; of a run that
            starts anew, all of it.
        start: how many steps have been done.
        facts: what is said in the first line.
        every: how many steps lie between those that have a line.

    Raises:
        DataError: if there is a directory at that place, or a file that is no log.
        OSError: if it cannot be written to, or another run does.
    """

    def __init__(self, path: Path, start: int, facts: dict[str, Any], every: int) -> None:
        if path.is_dir():
            raise DataError(f"px.fit: log: {path} is a directory; name a file in it: log='{path / 'log.jsonl'}'")
        self._every = every
        self._file = Growing("log", path)
        self._facts: dict[str, Any] | None = facts
        try:
            self._kept = self._length_kept(path, start)
            if not self._file.is_regular or not path.stat().st_size:
                self._begin()
            self._file.write_now()
        except BaseException:
            self._file.drop()
            raise

    def __call__(self, event: Event) -> None:
        """Note an event, if it is of a kind that is noted."""
        if event.kind in ("step", "epoch", "evaluate"):
            self._begin()
        if event.kind == "step" and event.step % self._every == 0:
            self._add(_line(event) | {"rows": event.rows})
        elif event.kind in ("epoch", "evaluate"):
            self._add(_line(event))
            self._file.flush()

    def flush(self) -> None:
        """Have all lines on the disk."""
        self._begin()
        self._file.flush(to_disk=True)

    def withdraw(self) -> None:
        """Leave things as if there had been no run: an older log stays as it is, and a new file goes."""
        self._facts = None
        self._file.withdraw()

    def close(self) -> None:
        """No more lines."""
        self._begin()
        self._file.close()

    def _begin(self) -> None:
        """Drop what an older log has of later steps. Not before there is something else to say."""
        if self._facts is None:
            return
        facts, self._facts = self._facts, None
        if self._file.is_regular:
            os.ftruncate(self._file.handle, self._kept)
        if not self._kept:
            self._add({"event": "start", **facts})

    def _length_kept(self, path: Path, start: int) -> int:
        """Bytes of an older log that are of the steps before."""
        if not self._file.is_regular:
            return 0
        with path.open("rb") as old:
            head = old.read(len(_MARK))
            if not (head.startswith(_MARK) or _MARK.startswith(head)):  # the first line may be half written
                raise DataError(
                    f"px.fit: log: {path} exists and is not a log of px.fit, so it was not touched; give another: "
                    f"log='{path.with_name(f'{path.stem}-2.jsonl')}'"
                )
            old.seek(0)
            return _length(old, start) if start else 0

    def _add(self, line: dict[str, Any]) -> None:
        line["time"] = round(time.time(), 3)
        self._file.add(json.dumps(line, allow_nan=False).encode() + b"\n")


def _line(event: Event) -> dict[str, Any]:
    # JSON has no NaN.
    metrics = {name: value if math.isfinite(value) else None for name, value in event.metrics.items()}
    return {"event": event.kind, "step": event.step, "epoch": event.epoch, "metrics": metrics}


def _length(lines: Iterable[bytes], step: int) -> int:
    """Return the length in bytes of the lines up to this step: those before the first that is later, or not whole."""
    length = 0
    for line in lines:
        try:
            found = json.loads(line)
            is_later = found["event"] != "start" and found["step"] > step
        except (ValueError, KeyError, TypeError, RecursionError):  # the last one, half written
            break
        if is_later or not line.endswith(b"\n"):
            break
        length += len(line)
    return length


class TensorBoard:
    """Event files for TensorBoard: ``train/…`` of steps, ``epoch/…``, and evaluations by their names.

    A run writes one, and the run that goes on another, which begins by telling TensorBoard to leave out what those
    before have of later steps.

    Args:
        directory: where they are.
        start: how many steps have been done.
        every: how many steps lie between those that are noted.

    Raises:
        OSError: if the directory cannot be written to, or another run does.
    """

    def __init__(self, directory: Path, start: int, every: int) -> None:
        from tensorboardX import summary
        from tensorboardX.proto import event_pb2

        messages: Any = vars(event_pb2)  # made when it is imported, of a description
        self._event, self._scalar = messages["Event"], summary.scalar
        self._every = every
        _refuse_another_run(directory)
        # TensorBoard reads files in the order of their names, and a run may be started again within a second.
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{start:012d}.{now:020d}"
        self._file = Growing("tensorboard", directory / name)
        try:
            self._add(file_version="brain.Event:2")
            log = messages["SessionLog"]
            self._add(step=start + 1, session_log=log(status=log.START))
            self._file.write_now()
        except BaseException:
            self._file.drop()
            raise

    def __call__(self, event: Event) -> None:
        """Note an event's metrics."""
        prefix = {"step": "train/", "epoch": "epoch/"}.get(event.kind, "")
        if event.kind != "step" or event.step % self._every == 0:
            for name, value in event.metrics.items():
                self._add(step=event.step, summary=self._scalar(f"{prefix}{name}", value))

    def flush(self) -> None:
        """Have all points on the disk."""
        self._file.flush(to_disk=True)

    def withdraw(self) -> None:
        """Leave things as if there had been no run, if the file was made for it."""
        self._file.withdraw()

    def close(self) -> None:
        """No more points."""
        self._file.close()

    def _add(self, **fields: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        self._file.add(b"".join((length, next(checks), data, next(checks))))


def _refuse_another_run(directory: Path) -> None:
    """Two runs in one directory would have TensorBoard leave out each other's points."""
    for path in sorted(directory.glob("events.out.tfevents.*")) if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            handle = os.open(path, os.O_RDONLY)
            try:
                if not is_free(handle):
                    raise BlockingIOError(None, "another run is writing to it", str(path))
            finally:
                os.close(handle)


def require_tensorboard() -> None:
    """Raise now if event files could not be written.

    Raises:
        ModuleNotFoundError: saying what to install.
    """
    with needed("px.fit: tensorboard=", "train"):
        import tensorboardX  # noqa: F401  looked for, and used later
