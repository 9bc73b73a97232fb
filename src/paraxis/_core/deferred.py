"""Records beside traced values: broadcast values, and map results whose sums can be taken by another map.

A record is found by the tracer's identity, and goes with it.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from paraxis._core import jax_api, lowerings, maps, sums
from paraxis._core.placing import Placement, current
from paraxis._core.record import Map


class Shared(NamedTuple):
    """A broadcast value: every row equals ``value``."""

    value: Any


class DeferredSums:
    """Sums over a map's results, taken together by another map: the first is dead code if nothing else reads it."""

    def __init__(self, m: Map, operands: Sequence[Any]) -> None:
        self._map, self._operands, self._trace = m, operands, jax_api.get_opaque_trace_state()
        self._sums: dict[Any, tuple[Sequence[Any], list[jax.Array]]] = {}

    @functools.cached_property
    def _preferred(self) -> bool:
        """Return whether a map of sums costs less than the results, or keeps none of them. Effects happen once."""
        m = self._map
        if jax_api.has_effects(m.body.jaxpr) or lowerings.rematerializes(m.placement):
            return not jax_api.has_effects(m.body.jaxpr)
        if m.uses_axis or sums.split(m.body, m.shared, [True] * len(m.body.out_avals)) is None:
            return False
        return current().chunk is not None or not lowerings.unrolls(m)

    def take(self, at: int, placement: Placement, term: Any, extras: Sequence[jax.Array]) -> jax.Array | None:
        """Return the sum of ``term(result number at, *extras)``; ``None``: it is better taken of results."""
        if not self._map.placement.is_where(placement) or not self._preferred:
            return None
        if jax_api.get_opaque_trace_state() != self._trace:  # in a loop's body, say: its values do not outlive it
            return self._bound(term, extras)[at]
        key = (term, *map(id, extras))
        if key not in self._sums:  # the extras are kept, so that their ids stay theirs
            self._sums[key] = (extras, self._bound(term, extras))
        return self._sums[key][1][at]

    def _bound(self, term: Callable[..., jax.Array], extras: Sequence[jax.Array]) -> list[jax.Array]:
        m, count = self._map, len(self._operands)

        def terms(*args: Any) -> list[jax.Array]:
            return [term(y, *args[count:]) for y in jax_api.jaxpr_as_fun(m.body)(*args[:count])]

        shared, alike = ([*mask, *[False] * len(extras)] for mask in (m.shared, m.alike))
        traced, operands, _ = maps.trace_like(m, terms, [*self._operands, *extras], shared, alike)
        return maps.bind(traced._replace(summed=[True] * len(m.body.out_avals)), operands)


_forms: dict[int, Any] = {}


def remember(y: Any, form: Any) -> Any:
    """Note what a traced value is, a :class:`Shared` one or a result of :meth:`DeferredSums.take`."""
    if isinstance(y, jax_api.Tracer):
        _forms[id(y)] = form
        weakref.finalize(y, _forms.pop, id(y), None)
    return y


def recall(y: Any) -> Any:
    """Return what :func:`remember` was told of a value, or ``None``."""
    return _forms.get(id(y))
