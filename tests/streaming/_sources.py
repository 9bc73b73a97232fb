"""Sources of elements that another process can be sent; one of them ends who reads it, once."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np


class Rows:
    """Rows of numbers that depend on their index only."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return np.sin(np.arange(3, dtype="float32") * (index + 1)).astype("float32")


class Deadly(Rows):
    """An element kills the process that reads it, until it has left a mark."""

    def __init__(self, count: int, which: int, once: Path) -> None:
        super().__init__(count)
        self.which, self.once, self.here = which, once, os.getpid()

    def __getitem__(self, index: int) -> Any:
        if index == self.which and not self.once.exists() and os.getpid() != self.here:
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
