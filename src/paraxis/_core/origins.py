"""The parts that a placed value was made from, remembered while a trace lasts.

A value placed along an axis has the shape ``(size, ...)`` for whoever looks at it. Two have a better form to go on
with: a broadcast one is still the shared value it came from; and a map's result that was computed in turns, or at more
cost than its sum, need not be kept at all if only its sum is wanted. The next verb looks the form up by the identity
of the tracer; an operation in between makes a new tracer, which has no form, and then the value itself is used. The
form not taken is dead code, which the compiler drops.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._core import jax_api, maps
from paraxis._core.jax_api import Tracer
from paraxis._core.placing import Placement


@dataclasses.dataclass(frozen=True)
class Shared:
    """Every row equals ``value``."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a map with that index."""

    call: "Call"
    index: int


Term = Callable[..., jax.Array]
"""An element's result and its extras, any number of each in front → what is summed. Equal ones do the same."""


class Call:
    """A map that was run, and the sums over its results that were asked for since.

    Sums are taken of all results together: a second one, of another result, is then at hand.
    """

    def __init__(self, made: maps.Map) -> None:
        self.map = made
        self._trace = jax_api.get_opaque_trace_state()
        self._sums: dict[Any, tuple[Sequence[Any], list[jax.Array]]] = {}

    def is_to_sum(self, placement: Placement) -> bool:
        """Return whether sums of its results along a placed axis are better taken by :meth:`sums`."""
        return self.map.how.placement == placement and self.map.sums_preferred

    def sums(self, term: Term, extras: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the sums of a term of each result; ``extras`` are rows, of which each element gets its own."""
        if jax_api.get_opaque_trace_state() != self._trace:  # in a loop's body, say: its values do not outlive it
            return self._bound(term, extras)
        key = (term, *map(id, extras))
        if key not in self._sums:  # the extras are kept, so that their ids stay theirs
            self._sums[key] = (extras, self._bound(term, extras))
        return self._sums[key][1]

    def _bound(self, term: Term, extras: Sequence[jax.Array]) -> list[jax.Array]:
        made, count = self.map, len(self.map.operands)

        def terms(*args: Any) -> list[jax.Array]:
            return [term(y, *args[count:]) for y in jax_api.jaxpr_as_fun(made.body)(*args[:count])]

        operands, shared = [*made.operands, *extras], [*made.shared, *[False] * len(extras)]
        return maps.Map.of(terms, operands, shared, made.how)[0].bind([True] * len(made.body.out_avals))


_forms: dict[int, tuple[weakref.ref[Any], Shared | Result]] = {}


def remember(y: Any, form: Shared | Result) -> Any:
    """Note the form of a traced value. Concrete arrays are what they are."""
    if isinstance(y, Tracer):
        key = id(y)
        _forms[key] = (weakref.ref(y, lambda _: _forms.pop(key, None)), form)
    return y


def recall(y: Any) -> Shared | Result | None:
    entry = _forms.get(id(y))
    return entry[1] if entry is not None and entry[0]() is y else None
