"""A compiled program of users' functions, made anew when something that they read has changed."""

import collections
import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax

from paraxis._calls.surroundings import Place, Reads
from paraxis._jax import jax_api, structure

_P = TypeVar("_P")
_OFTEN = 5  # changes, after which the user is told


class Latest(Generic[_P]):
    """A program that is called again and again, as its functions are now.

    What the functions read is looked at before each call. If something has changed, they are traced anew. That may make
    no difference, as of a list that a callback fills: then what was compiled is used on. It is looked at again all the
    same, since the next change may make one.

    Args:
        make: ``make(noticing)`` → a program that calls ``noticing(f)`` where it would call ``f``, each time that JAX
            traces it.
        functions: of users.
        reads: what they read.
    """

    def __init__(
        self, make: Callable[[Callable[..., Any]], _P], functions: Sequence[Any], reads: Reads | None = None
    ) -> None:
        self._make, self._functions = make, functions
        self._reads = Reads(functions) if reads is None else reads
        self._with: collections.Counter[str] = collections.Counter()
        self._without: collections.Counter[str] = collections.Counter()  # in the calls before this one, without a gap
        self._program, self._traces = self._made()
        self._traced: list[Any] = []  # for arguments of each kind, with copies of NumPy arrays as they were
        self._looked = 0

    def get(self, trace: Callable[[_P], Any]) -> _P:
        """Return the program to call now; call :meth:`note` then, with the same.

        Args:
            trace: ``trace(program)`` → what it is, traced, for the call to come.
        """
        if not self._traces():
            self._reads.begin()
            self._keep(trace(self._program))
            return self._program
        changes = self._reads.changed()
        if not changes:
            self._without.clear()
            return self._program
        new, traces = self._made()
        self._reads.begin()
        self._looked = -1
        now = trace(new)
        alike = [was for was in self._traced if was.in_avals == now.in_avals]
        if any(structure.key(was) == structure.key(now) for was in alike):
            self._tell(self._without, changes, "traced anew, without a difference")
            if self._traces() == 1:  # for this call; of other shapes nothing is known
                return self._program
        else:
            self._tell(self._with, changes, "traced and compiled anew")
        self._program, self._traces, self._traced = new, traces, []
        self._keep(now)
        return new

    def note(self, trace: Callable[[_P], Any]) -> None:
        """Look at what the functions read again, if they were traced."""
        if self._traces() != self._looked:
            self._reads.end()
            with contextlib.suppress(Exception):  # what cannot be traced, such as arguments that the call has consumed
                self._keep(trace(self._program))
            self._looked = self._traces()

    def _keep(self, traced: Any) -> None:
        if all(was.in_avals != traced.in_avals for was in self._traced):
            self._traced.append(jax_api.with_copies(traced))

    def _made(self) -> tuple[_P, Callable[[], int]]:
        count = 0

        def noticing(fn: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                return fn(*args, **kwargs)

            return traced

        return self._make(noticing), lambda: count

    def _tell(self, counts: collections.Counter[str], changes: Sequence[Place], what: str) -> None:
        names = [place.name for place in changes]
        counts.update(names)
        for name in names:
            if counts[name] == _OFTEN:
                called = next((f.__name__ for f in self._functions if hasattr(f, "__name__")), "a function")
                warnings.warn(
                    f"{called!r} reads {name}, which has changed {_OFTEN} times; each time it is {what}. Give it as an "
                    f"argument, which may change without that",
                    RuntimeWarning,
                    stacklevel=4,
                )


class Jitted:
    """``jax.jit`` of a function of ours that calls users' functions, as these are now.

    Args:
        fn: ours.
        functions, reads: as for :class:`Latest`.
        options: of ``jax.jit``.
    """

    def __init__(
        self, fn: Callable[..., Any], functions: Sequence[Any], reads: Reads | None = None, **options: Any
    ) -> None:
        # A function of its own for each: JAX keeps what it compiles with the function, and lets it go with that.
        self._latest = Latest(lambda noticing: jax.jit(noticing(fn), **options), functions, reads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def trace(jitted: Any) -> Any:
            return jitted.trace(*args, **kwargs).jaxpr

        try:
            return self._latest.get(trace)(*args, **kwargs)
        finally:
            self._latest.note(trace)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        def trace(jitted: Any) -> Any:
            return jitted.trace(*args, **kwargs).jaxpr

        try:
            return self._latest.get(trace).trace(*args, **kwargs)
        finally:
            self._latest.note(trace)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.trace(*args, **kwargs).lower()
