"""Parts of Flax that tell us something while we trace, and are as Flax made them before and after."""

import abc
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_MISSING = object()


class Hook(abc.ABC):
    """Something that is put in place while anyone is within, in any thread, and costs nothing when nobody is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            if not self._within:
                self.put()
            self._within += 1
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if not self._within:
                    self.take_away()

    @abc.abstractmethod
    def put(self) -> None: ...

    @abc.abstractmethod
    def take_away(self) -> None: ...


class Attribute(Hook):
    """Something in the place of an attribute of a class or of a file: a descriptor, a function. All threads use it."""

    def __init__(self, owner: Any, name: str, descriptor: Any) -> None:
        super().__init__()
        self._owner, self._name, self._descriptor = owner, name, descriptor
        self._before: Any = _MISSING

    def put(self) -> None:
        self._before = vars(self._owner).get(self._name, _MISSING)
        setattr(self._owner, self._name, self._descriptor)

    def take_away(self) -> None:
        if self._before is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
