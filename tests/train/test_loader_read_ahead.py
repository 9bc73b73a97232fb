"""The thread that reads ahead: what it raises, and when it ends."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

import paraxis as px


def readers() -> int:
    return sum(thread.name.startswith("paraxis-read") for thread in threading.enumerate())


class Rows:
    """Its row 17 cannot be read; it counts the others."""

    read = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> int:
        if row == 17:
            raise OSError("bad sector")
        self.read += 1
        return row


@pytest.mark.parametrize("read_ahead", [0, 1, 4])
def test_an_error_names_the_batch_and_the_row_and_comes_in_its_place(read_ahead: int) -> None:
    found = px.loader(Rows(), 5, shuffle=False, read_ahead=read_ahead).batches(8)
    assert [len(next(found)) for _ in range(3)] == [5, 5, 5]
    with pytest.raises(OSError, match=r"(?s)bad sector.*row 17.*batch number 4 of epoch 2"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)
    assert readers() == 0


def test_no_more_is_read_ahead_than_asked_for() -> None:
    source = Rows()
    found = px.loader(source, 2, shuffle=False, read_ahead=3).batches()
    next(found)
    for _ in range(200):  # until nothing moves
        before = source.read
        threading.Event().wait(0.01)
        if before == source.read == 8:
            break
    assert source.read == 8  # the batch taken and three
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
