"""The thread that reads ahead: what it raises, and when it ends."""

import gc
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import paraxis as px


def readers() -> int:
    return sum(thread.name.startswith("paraxis-read") for thread in threading.enumerate())


class Failing:
    """Its row 17 cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> int:
        if row == 17:
            raise OSError("bad sector")
        return row


class Gated:
    """Counts the rows read, and waits before one of them."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.open = threading.Event()
        self.read = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, row: int) -> int:
        if row == self.stop_at:
            self.open.wait(20)
        self.read += 1
        return row


@pytest.mark.parametrize("read_ahead", [0, 1, 4])
def test_an_error_names_the_batch_and_the_row_and_comes_in_its_place(read_ahead: int) -> None:
    found = px.loader(Failing(), 5, shuffle=False, read_ahead=read_ahead).batches(8)
    assert [len(next(found)) for _ in range(3)] == [5, 5, 5]
    with pytest.raises(OSError, match="bad sector") as caught:
        next(found)
    notes = "".join(caught.value.__notes__)
    assert "row 17" in notes
    assert "batch number 4 of epoch 2" in notes
    with pytest.raises(StopIteration):
        next(found)
    assert readers() == 0


def test_no_more_is_read_ahead_than_asked_for() -> None:
    source = Gated(stop_at=99)
    found = px.loader(source, 10, shuffle=False, read_ahead=3).batches()
    next(found)
    for _ in range(200):  # until nothing moves
        before = source.read
        threading.Event().wait(0.01)
        if before == source.read == 40:
            break
    assert source.read == 40  # the one taken and three
    found.close()


def left_at_once(data: px.train.Loader) -> None:
    for _ in data.batches():
        break


def left_by_an_error(data: px.train.Loader) -> None:
    found = data.batches()
    next(found)
    with pytest.raises(ValueError, match="mine"):
        found.throw(ValueError("mine"))


@pytest.mark.parametrize(
    "use", [left_at_once, left_by_an_error, lambda data: list(data.epoch(0)), lambda data: data.batches().close()]
)
def test_the_thread_ends_with_the_batches(use: Any) -> None:
    use(px.loader(np.arange(10), 2))
    gc.collect()
    assert readers() == 0


def test_ctrl_c_is_heard_while_waiting_for_a_row() -> None:
    source = Gated(stop_at=0)
    found = px.loader(source, 2, shuffle=False).batches()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    threading.Timer(1, source.open.set).start()  # the row is read to its end before the thread can end
    with pytest.raises(KeyboardInterrupt):
        next(found)


AT_EXIT = """
import numpy as np
import paraxis as px

class Slow:
    def __len__(self):
        return 10**6
    def __getitem__(self, row):
        return np.zeros(1000)

kept = [px.loader(Slow(), 50).batches() for _ in range(3)]
next(kept[0])
print("done")
"""


@pytest.mark.slow
def test_a_program_ends_while_batches_are_read() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
