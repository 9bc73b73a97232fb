"""Sources of elements that another process can be sent: their elements tell who read them, or end who reads them."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np


class Rows:
    """Rows of numbers that depend on their index only, with the reader's process."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return {"x": np.arange(3, dtype="float32") * (index + 1) / self.count, "process": np.int32(os.getpid())}


class Deadly(Rows):
    """One of the elements kills who reads it: always, or until it has left a mark."""

    def __init__(self, count: int, which: int, once: Path | None = None) -> None:
        super().__init__(count)
        self.which, self.once = which, once

    def __getitem__(self, index: int) -> Any:
        if index == self.which and (self.once is None or not self.once.exists()):
            if self.once is not None:
                self.once.touch()
            self._kill()
        return super().__getitem__(index)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DeadlyToNodes(Deadly):
    """One of the elements kills what Ray started its reader with, and so all of its node's processes and values."""

    def _kill(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # until the node's processes have noticed


class Bad(Rows):
    """One of the elements cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Typed(Rows):
    """Reading one of the elements starts a program that reads what is typed."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            subprocess.run(["head", "-c1"], check=True, timeout=60)
        return super().__getitem__(index)


class Slow(Rows):
    """Reading takes a while."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)
