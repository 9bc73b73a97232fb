"""What a placed value is made of, remembered while a trace lasts.

A value placed along an axis has the shape ``(size, ...)`` for whoever looks at it. Some have a better form to go on
with: a broadcast one is still the shared value it came from; a map's result still has its padding, with each row on
its device; and one computed in turns, or at more cost than its sum, need not be kept at all if only its
sum is wanted. The next verb looks the form
up by the identity of the tracer; an operation in between makes a new tracer, which has no form, and then the value
itself is used. The form not taken is dead code, which the compiler drops.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from paraxis._core import jax_api, mapping, summing
from paraxis._core.jax_api import Tracer
from paraxis._core.layout import Placement


@dataclasses.dataclass(frozen=True)
class Shared:
    """Every row equals ``value``."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """Rows with their padding at hand: ``padded``, or nothing if there is none.

    ``call`` is the map whose result with that index they are, if they are one.
    """

    placement: Placement
    padded: Any
    call: "Call | None" = None
    index: int = 0


class Call:
    """A map that was run, and the sums over its results that were asked for since.

    Sums are taken of all results together: a second one, of another result, is then at hand.
    """

    def __init__(self, of: mapping.Mapping, operands: Sequence[jax.Array], *, sums_preferred: bool) -> None:
        self.sums_preferred = sums_preferred
        self._mapping = of
        self._operands = operands
        self._trace = jax_api.get_opaque_trace_state()
        self._sums: dict[Any, tuple[Sequence[Any], list[jax.Array]]] = {}

    def sums(self, term: summing.Term, extras: Sequence[jax.Array]) -> list[jax.Array]:
        if jax_api.get_opaque_trace_state() != self._trace:  # in a loop's body, say: its values do not outlive it
            return mapping.run_sum(self._mapping, term, self._operands, extras)
        key = (term, *map(id, extras))
        if key not in self._sums:  # the extras are kept, so that their ids stay theirs
            self._sums[key] = (extras, mapping.run_sum(self._mapping, term, self._operands, extras))
        return self._sums[key][1]


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
