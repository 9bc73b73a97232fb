"""The output of the ranks, line by line and marked by rank, so that lines never mix."""

import collections
import contextlib
import os
import re
import selectors
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import BinaryIO, TextIO

NUM_KEPT = 30
_LONGEST = 1 << 16

# A progress display rewrites its line after a carriage return; in a stream of marked lines each is a line of its own.
# One at the end of what is there may be half of \r\n.
_END = re.compile(rb"\r?\n|\r(?!\n|\Z)")
_NAMES = {"out": "standard output", "error": "standard error"}
_COLOURS = (36, 33, 35, 32, 34, 31)

# How XLA's log begins a message, and how it goes on; what JAX's network on CPU writes, from several threads at once.
_LOGGED = re.compile(
    rb"\[Gloo\] |[\w \[\]]*is connected to \d+ peer ranks\.|"
    rb"[IWEF]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+\.(cc|h|cpp|cu):\d+\] |"
    rb"\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [IWEF] |WARNING: All log messages before absl::InitializeLog"
)
_LOGGED_ON = re.compile(
    rb"\s*$|Additional GRPC|:[A-Z_]+:|:?\{|=== Source Location Trace|external/\S+:\d+$|RPC: |\. This is only expected|"
    rb"\*\*\* Check failure|    @ +0x"
)


class Lines:
    """Cuts a stream of bytes into lines; one longer than 64 KiB into several."""

    def __init__(self) -> None:
        self._pending = b""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that this completes, without their ends."""
        *lines, self._pending = _END.split(self._pending + data)
        yield from lines
        while len(self._pending) > _LONGEST:
            yield self._pending[:_LONGEST]
            self._pending = self._pending[_LONGEST:]

    def rest(self) -> Iterator[bytes]:
        """Yield what is left when the stream has ended without the end of a line."""
        if self._pending:
            yield self._pending
        self._pending = b""


class Screen:
    """The launcher's own streams, on which whole lines are written by several threads."""

    def __init__(self, out: TextIO | None = None, error: TextIO | None = None) -> None:
        self._streams = {"out": out or sys.stdout, "error": error or sys.stderr}
        # Python has none for a stream that was closed when it started.
        self._lost = {name for name, text in self._streams.items() if text is None}
        self._lock = threading.Lock()
        self.is_cut_off = False
        """True if lines were lost for another reason than that nobody reads them any more."""

    def write(self, stream: str, mark: str, line: bytes, colour: int | None = None) -> None:
        """Write a line. Where that fails, it and those after it are lost: training goes on without, and it is said.

        But not if nobody reads any more: such as ``| head``, or a terminal that is gone.
        """
        if stream in self._lost:
            return
        text = self._streams[stream]
        with self._lock:
            try:
                if colour is not None and text.isatty() and not os.environ.get("NO_COLOR"):
                    mark = f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{mark}\x1b[0m"
                text.flush()
                if hasattr(text, "buffer"):
                    text.buffer.write(mark.encode() + line + b"\n")
                else:  # a notebook's
                    text.write(f"{mark}{line.decode(errors='replace')}\n")
                text.flush()
            except (OSError, ValueError) as error:
                self._lost.add(stream)
                _lose(text)
                if isinstance(error, (BrokenPipeError, ValueError)):  # nobody reads, or wants to
                    return
                self.is_cut_off, reason = True, error.strerror
            else:
                return
        self.say(f"{_NAMES[stream]} cannot be written: {reason}; the ranks continue, and what they write there is lost")

    def say(self, message: str) -> None:
        """Write the launcher's own message, line by line, to stderr."""
        for line in message.splitlines():
            self.write("error", "paraxis launch: ", line.encode(errors="backslashreplace"))


def _lose(stream: TextIO) -> None:
    """Let what is written to it vanish; Python would fail at its end, when it writes what is left."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Kept:
    """The last lines of a rank, of both its streams, in the order in which they came.

    When a peer is gone, the log of XLA may have more lines than are kept. So these have a place of their own.
    """

    def __init__(self) -> None:
        self._own: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=NUM_KEPT)
        self._logged: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=NUM_KEPT)
        self._num_lines = 0
        self._in_log = False
        self._lock = threading.Lock()

    def add(self, line: bytes) -> None:
        """Keep a line, and let go of the oldest."""
        with self._lock:
            self._in_log = bool(_LOGGED.match(line) or (self._in_log and _LOGGED_ON.match(line)))
            (self._logged if self._in_log else self._own).append((self._num_lines, line))
            self._num_lines += 1

    def lines(self, *, logged: bool = False) -> tuple[str, ...]:
        """Return the lines, as text: those of the script and of Python, or with the log of XLA and Gloo among them."""
        with self._lock:
            found = sorted([*self._own, *self._logged]) if logged else list(self._own)
        return tuple(line.decode(errors="replace") for _, line in found)


def pump(streams: Mapping[str, BinaryIO], rank: int, num_ranks: int, screen: Screen, kept: Kept) -> threading.Thread:
    """Start a thread that writes the lines of a rank's streams until they end.

    Args:
        streams: what to read: ``"out"``, ``"error"``. Of what is there at once, the first's comes first: a traceback
            comes last, and in one piece.
        rank: whose they are.
        num_ranks: of how many.
        screen: where to write them.
        kept: of the last lines.
    """
    mark = f"[{rank:>{len(str(num_ranks - 1))}}] "

    def put(stream: str, lines: Iterator[bytes]) -> None:
        for line in lines:
            kept.add(line)
            screen.write(stream, mark, line, rank)

    def run() -> None:
        cut = {name: Lines() for name in streams}
        with selectors.DefaultSelector() as selector:
            for name, source in streams.items():
                selector.register(source, selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in sorted(selector.select(), key=lambda ready: list(streams).index(ready[0].data)):
                    if data := os.read(key.fd, _LONGEST):
                        put(key.data, cut[key.data].cut(data))
                    else:
                        put(key.data, cut[key.data].rest())
                        selector.unregister(key.fileobj)
                        streams[key.data].close()

    thread = threading.Thread(target=run, name=f"output of rank {rank}", daemon=True)
    thread.start()
    return thread
