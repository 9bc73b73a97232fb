"""The thread that reads ahead: what it raises, and when it ends."""

import gc
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import paraxis as px


def readers() -> int:
    return sum(thread.name == "paraxis-read-ahead" for thread in threading.enumerate())


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
        self.reached = threading.Event()
        self.read = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, row: int) -> int:
        if row == self.stop_at:
            self.reached.set()
            self.open.wait(20)
        self.read += 1
        return row


@pytest.mark.parametrize("read_ahead", [0, 1, 4])
def test_an_error_names_the_batch_and_the_row_and_comes_in_its_place(read_ahead: int) -> None:
    found = px.loader(Failing(), 5, shuffle=False, read_ahead=read_ahead).batches(8)
    taken = [next(found).num_rows for _ in range(3)]
    with pytest.raises(px.DataError, match=r"batch number 4 of epoch 2: reading row 17 of the source raised OSError:"):
        next(found)
    assert taken == [5, 5, 5]
    assert readers() == 0


def test_an_error_is_the_end() -> None:
    found = px.loader(Failing(), 40).batches()
    with pytest.raises(px.DataError, match="row 17"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)


def test_an_error_keeps_nothing_of_the_consumer() -> None:
    class Held:
        pass

    def consume() -> weakref.ref[Held]:
        mine = Held()
        with pytest.raises(px.DataError, match="row 17"):
            list(px.loader(Failing(), 40).batches())
        return weakref.ref(mine)

    found = consume()
    gc.collect()
    assert found() is None


def test_the_error_of_the_source_is_the_cause() -> None:
    with pytest.raises(px.DataError) as caught:
        next(px.loader(Failing(), 40).batches())
    causes: list[BaseException] = []
    error: BaseException | None = caught.value
    while error is not None:
        causes.append(error)
        error = error.__cause__
    assert isinstance(causes[-1], OSError)


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_any_error_says_of_which_batch_it_is_and_where_it_came_from(
    read_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(jax, "make_array_from_callback", no_room)
    found = px.loader(np.arange(9), 3, read_ahead=read_ahead).batches(4)
    with pytest.raises(MemoryError, match=r"(?s)no room.*raised when batch number 2 of epoch 2 was made") as caught:
        next(found)
    assert caught.traceback[-1].name == "no_room"
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


def test_batches_are_read_while_the_consumer_does_something_else() -> None:
    source = Gated(stop_at=35)
    found = px.loader(source, 10, shuffle=False, read_ahead=3).batches()
    next(found)
    assert source.reached.wait(20)
    source.open.set()
    found.close()


def test_closing_ends_the_thread_and_the_batches() -> None:
    found = px.loader(np.arange(10), 2).batches()
    next(found)
    assert readers() == 1
    found.close()
    found.close()
    assert readers() == 0
    with pytest.raises(StopIteration):
        next(found)


def test_the_thread_ends_with_the_epoch() -> None:
    found = px.loader(np.arange(10), 2).epoch(0)
    assert len(list(found)) == 5
    assert readers() == 0


def test_leaving_a_loop_ends_the_thread() -> None:
    for _ in px.loader(np.arange(10), 2).batches():
        break
    gc.collect()
    assert readers() == 0


def test_an_error_in_the_consumer_ends_the_thread() -> None:
    def consume() -> None:
        for _ in px.loader(np.arange(10), 2).batches():
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        consume()
    gc.collect()
    assert readers() == 0


def test_several_iterators_of_one_loader_do_not_disturb_each_other() -> None:
    data = px.loader(np.arange(10), 3, seed=2)
    pairs = zip(data.epoch(0), data.epoch(1), data.epoch(0), strict=True)
    for k, (a, b, c) in enumerate(pairs):
        for batch, number in ((a, k), (b, 4 + k), (c, k)):
            assert np.asarray(batch.tree)[: batch.num_rows].tolist() == data.rows(number).tolist()


def test_ctrl_c_is_heard_while_waiting_for_a_row() -> None:
    source = Gated(stop_at=0)
    found = px.loader(source, 2, shuffle=False).batches()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(found)
    source.open.set()
    assert np.asarray(next(found).tree)[:2].tolist() == [0, 1]
    found.close()


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


def test_a_generator_of_batches_is_closed_in_the_thread_that_runs_it() -> None:
    threads: list[Any] = []

    def source() -> Any:
        try:
            while True:
                yield np.ones(2)
        finally:
            threads.append(threading.current_thread().name)

    found = px.loader(source).batches()
    next(found)
    found.close()
    assert threads == ["paraxis-read-ahead"]
