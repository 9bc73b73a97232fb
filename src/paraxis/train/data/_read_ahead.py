"""A thread that makes the next items of an iterator while the present one is used."""

import collections
import contextlib
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

PATIENCE = 5.0
"""Seconds that closing waits for an item under way. The thread goes on to its end, and no further, in any case."""


class ReadAhead(Iterator[Item], Generic[Item]):
    """The items of a generator, made by a thread, at most ``depth`` of them before they are asked for.

    What the generator raises is raised in the place of the item; after that there are no further ones. The thread ends
    with the generator, at :meth:`close`, when the iterator is not used any more, and at the end of the program.

    Args:
        items: a generator; it is run, and closed, in the thread.
        depth: at least 1.
    """

    def __init__(self, items: Generator[Item, None, None], depth: int) -> None:
        self._shelf = _Shelf(depth)
        # It knows the shelf and not this iterator, which could not be dropped otherwise.
        self._thread = threading.Thread(target=_fill, args=(items, self._shelf), name="paraxis-read-ahead", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._shelf, self._thread)
        self._thread.start()

    def __next__(self) -> Item:
        try:
            return self._shelf.take()
        finally:
            if self._shelf.is_over:
                self._thread.join(PATIENCE)

    def close(self) -> None:
        """End the thread; there are no further items."""
        self._finalizer()


class _Shelf:
    """A bounded shelf on which items wait."""

    def __init__(self, depth: int) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._depth = depth
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Return whether nothing waits, nor will."""
        with self._changed:
            return self._ended and not self._items

    def wait_for_room(self) -> bool:
        """Return whether one more item is wanted; returns when that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._items) < self._depth)
            return not self._ended

    def put(self, item: Any) -> None:
        with self._changed:
            if not self._ended:
                self._items.append(item)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Say that there are no further items; an error comes after those that wait."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
            self._changed.notify_all()

    def drop(self) -> None:
        with self._changed:
            self._items.clear()
            self._error = None

    def take(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended)
            self._changed.notify_all()
            if self._items:
                return self._items.popleft()
            # Not kept: by its traceback it would keep the consumer's variables, this iterator among them.
            error, self._error = self._error, None
        try:
            raise StopIteration if error is None else error
        finally:
            del error


def _fill(items: Generator[Any, None, None], shelf: _Shelf) -> None:
    try:
        with contextlib.closing(items):
            while shelf.wait_for_room():
                shelf.put(next(items))
    except StopIteration:
        shelf.end()
    except BaseException as error:  # the consumer's to see
        shelf.end(error)


def _stop(shelf: _Shelf, thread: threading.Thread) -> None:
    shelf.end()
    shelf.drop()
    if thread is not threading.current_thread():  # the collector may run in any thread
        thread.join(PATIENCE)
