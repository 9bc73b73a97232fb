"""Values that threads read ahead of their use."""

import collections
import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
_END: Any = object()


def ahead(calls: Iterable[Callable[[], _T]], threads: int, waiting: int) -> Generator[_T, None, None]:
    """Yield what calls return, in their order; threads make them, at most so many ahead of what was yielded last."""
    made: collections.deque[concurrent.futures.Future[_T]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads, "paraxis-read") as pool:
        try:
            for call in calls:
                made.append(pool.submit(call))
                if len(made) > waiting:
                    yield made.popleft().result()
            while made:
                yield made.popleft().result()
        finally:
            for future in made:
                future.cancel()


def items_ahead(items: Iterator[_T], waiting: int) -> Generator[_T, None, None]:
    """Yield the items of an iterator, which a thread takes from it, at most so many ahead."""
    with contextlib.closing(ahead(itertools.repeat(lambda: next(items, _END)), 1, waiting)) as taken:
        for item in taken:
            if item is _END:
                return
            yield item
