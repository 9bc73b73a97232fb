"""Values that threads read ahead of their use."""

import collections
import concurrent.futures
import contextlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
_END: Any = object()


def ahead(calls: Iterable[Callable[[], _T]], threads: int, waiting: int) -> Generator[_T, None, None]:
    """Yield what calls return, in their order; threads make them, at most so many ahead of what was yielded last."""
    futures: collections.deque[concurrent.futures.Future[_T]] = collections.deque()
    is_finalizing = sys.is_finalizing  # an iterator may be dropped when modules have lost their names
    pool = concurrent.futures.ThreadPoolExecutor(threads, "paraxis-read")
    try:
        for call in calls:
            futures.append(pool.submit(call))
            if len(futures) > waiting:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        if not is_finalizing():  # then the interpreter has ended the threads
            pool.shutdown(cancel_futures=True)


def items_ahead(items: Iterator[_T], waiting: int) -> Generator[_T, None, None]:
    """Yield the items of an iterator, which a thread takes from it, at most so many ahead."""
    with contextlib.closing(ahead(itertools.repeat(lambda: next(items, _END)), 1, waiting)) as pulled:
        for item in pulled:
            if item is _END:
                return
            yield item
