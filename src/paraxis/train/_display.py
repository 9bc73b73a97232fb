"""The line of a run: its step, metrics and speed."""

import datetime
import time
from collections.abc import Mapping

from paraxis._host import progress
from paraxis.train._callbacks import Event, Reporter


class RunDisplay(Reporter):
    """Shows the steps of a run as they are done, and each evaluation in a line that stays."""

    def __init__(self, start: int, total: int | None, epochs: int | None) -> None:
        self._display = progress.Display()
        self.say, self.close = self._display.say, self._display.close
        self._total, self._epochs = total, epochs
        self._step, self._epoch, self._rows = start, 0, 0
        self._metrics: Mapping[str, float] = {}
        self._is_new = False  # whether these metrics are in no line that stays
        self._begin = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first step, which compiles, was done

    def __call__(self, event: Event) -> None:
        self._step, self._epoch = event.step, event.epoch
        if event.kind == "step":
            self._metrics, self._is_new = event.metrics, True
            self._rows += event.rows
            if self._first is None:
                self._first, self._rows = (time.monotonic(), event.step), 0
            self._display.show(self._line, event.step, self._total)
        if event.kind == "evaluate":
            trained = _numbers(self._metrics) if self._is_new else ""
            parts = filter(None, [self._position(), trained, _numbers(event.metrics)])
            self._display.say("  ".join(parts), instead=True)
            self._is_new = False

    def _line(self) -> str:
        return "  ".join(filter(None, [self._position(), _numbers(self._metrics), self._rate()]))

    def _position(self) -> str:
        step = f"step {self._step:,}" + (f" of {self._total:,}" if self._total else "")
        return f"{step}, epoch {self._epoch + 1}" + (f" of {self._epochs}" if self._epochs else "")

    def _rate(self) -> str:
        """Return rows and steps in a second, and the time that is left."""
        if self._first is None or self._step == self._first[1]:
            return ""
        seconds, steps = time.monotonic() - self._first[0], self._step - self._first[1]
        left, elapsed = ((self._total or 0) - self._step) * seconds / steps, time.monotonic() - self._begin
        rate = f"{self._rows / seconds:,.4g} rows/s  {steps / seconds:,.4g} steps/s"
        left = f"  {datetime.timedelta(seconds=int(left))} left" if self._total else ""
        return f"{rate}{left}  {datetime.timedelta(seconds=int(elapsed))} elapsed"


def _numbers(metrics: Mapping[str, float]) -> str:
    names = sorted(metrics.keys() - {"grad_norm"}, key=lambda name: (name != "loss", name))
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in names)
