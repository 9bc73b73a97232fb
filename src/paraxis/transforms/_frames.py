"""The variables that stand for others while a transform runs its function.

A transform gives its function modules of its own, whose variables hold the values of this run. A wrapped function
that was made outside, and is called inside, has the variables from outside: here it finds those that stand for them.
A context variable, so that threads never see each other's.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax.nnx import Variable

from paraxis._modules import graphs
from paraxis.errors import StateError


@dataclasses.dataclass(frozen=True)
class Frame:
    """``inner[id(outer)]`` stands for ``outer``. ``sealed``: a variable from outside that is not here is an error.

    What is compiled is sealed: a value taken from outside would stay what it is for ever, without a word.
    """

    transform: str
    inner: Mapping[int, Variable[Any]]
    sealed: bool

    def find(self, variable: Variable[Any]) -> Variable[Any] | None:
        """Return what stands for a variable here; one of this run's own stands for itself."""
        inner = self.inner.get(id(variable))
        return variable if inner is None and id(variable) in self._own else inner

    @functools.cached_property
    def _own(self) -> frozenset[int]:
        return frozenset(map(id, self.inner.values()))


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar("paraxis_frames", default=())


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    token = _frames.set((*_frames.get(), frame))
    try:
        yield
    finally:
        _frames.reset(token)


def resolved(variables: Sequence[Variable[Any]], names: Sequence[str], transform: str) -> Sequence[Variable[Any]]:
    """Return the variables that stand for these here.

    Raises:
        StateError: if one is used in a compiled function that it was not given to.
    """
    frames = _frames.get()
    if not frames:
        return variables
    return [_one(v, name, frames, transform) for v, name in zip(variables, names, strict=True)]


def _one(variable: Variable[Any], name: str, frames: Sequence[Frame], transform: str) -> Variable[Any]:
    missing = None
    for frame in frames:  # from the outermost: what stands for it there may be what the next one knows
        inner = frame.find(variable)
        if inner is not None:
            variable, missing = inner, None
        elif frame.sealed and missing is None:
            missing = frame
    if missing is not None and not graphs.is_writable(variable):
        raise StateError(
            f"{transform}: variable {name} is used inside a function compiled by {missing.transform}, which was not "
            f"given it, so its value would be frozen there. Give {missing.transform} its module as well: "
            f"px.{missing.transform}(f, net, …)"
        )
    return variable
