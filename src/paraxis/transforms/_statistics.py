"""Detection of statistics that come back to the rows, as in batch normalisation, and are of one device's share only.

Which values have rows shows between two traces with different numbers of them: as a dimension that differs. A sum, mean
or maximum that is made of rows and has none itself is a *statistic*, until a collective combines it with those of the
other devices. A statistic that meets rows again is what is looked for. Derivatives are left out: by their nature they
take the sums in a loss, such as that of its weights, back to the rows.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paraxis._core import collectives
from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, scan_parts


@dataclasses.dataclass(frozen=True)
class _Value:
    """The origins of a value: the rows of one share, and a statistic, with its place in the user's code."""

    of_rows: bool = False
    taken: str | None = None

    def __or__(self, other: "_Value") -> "_Value":
        return _Value(self.of_rows or other.of_rows, self.taken or other.taken)


def of_shares(
    body: Callable[..., Any], traced: ClosedJaxpr, avals: Sequence[Any], row_dims: Sequence[int], axis: str
) -> list[str]:
    """Return where the user's code takes statistics of one share's rows and applies them to rows.

    A function that does something else with twice as many rows is not looked at.

    Args:
        body: function of arrays.
        traced: what it does.
        avals: shapes of the arrays.
        row_dims: for each, the dimension that the rows lie along; below zero: it has none.
        axis: the name by which collectives combine the shares.
    """

    def times(factor: int) -> ClosedJaxpr:
        shapes = [
            a.shape if at < 0 else (*a.shape[:at], factor * a.shape[at], *a.shape[at + 1 :])
            for a, at in zip(avals, row_dims, strict=True)
        ]
        return jax_api.trace(body, [a.update(shape=s) for a, s in zip(avals, shapes, strict=True)], {})[0]

    is_single = any(at >= 0 and a.shape[at] == 1 for a, at in zip(avals, row_dims, strict=True))
    try:
        # JAX writes operations on a single row otherwise.
        one, other = (times(2), times(4)) if is_single else (traced, times(2))
    except Exception:  # the user's own, of a number of rows that was not asked for
        return []
    found: dict[str, None] = {}
    with contextlib.suppress(_Unlike):
        look = _Look(axis, found)
        look.run(one.jaxpr, other.jaxpr, [_Value(of_rows=at >= 0) for at in row_dims], forward=True)
    return list(found)


class _Unlike(Exception):  # noqa: N818  two traces are of different programs: an outcome, not an error
    pass


@dataclasses.dataclass(frozen=True)
class _Look:
    axis: str
    found: dict[str, None]

    def run(self, one: Jaxpr, other: Jaxpr, values: Sequence[_Value], *, forward: bool) -> list[_Value]:
        if len(one.eqns) != len(other.eqns) or len(one.invars) != len(values):
            raise _Unlike
        known = dict.fromkeys(one.constvars, _Value()) | dict(zip(one.invars, values, strict=True))
        has_rows = {v for v, w in _paired(one.invars, other.invars) if v.aval.shape != w.aval.shape}

        def read(atom: Any) -> _Value:
            return _Value() if isinstance(atom, Literal) else known[atom]

        for eqn, twin in zip(one.eqns, other.eqns, strict=True):
            if eqn.primitive is not twin.primitive:
                raise _Unlike
            has_rows |= {v for v, w in _paired(eqn.outvars, twin.outvars) if v.aval.shape != w.aval.shape}
            rows = [not isinstance(v, Literal) and v in has_rows for v in (*eqn.invars, *eqn.outvars)]
            inputs, is_forward = [read(v) for v in eqn.invars], forward and not jax_api.is_transposed(eqn)
            known.update(zip(eqn.outvars, self._made(eqn, twin, inputs, rows, forward=is_forward), strict=True))
        return [read(v) for v in one.outvars]

    def _made(
        self, eqn: JaxprEqn, twin: JaxprEqn, inputs: Sequence[_Value], rows: Sequence[bool], *, forward: bool
    ) -> Sequence[_Value]:
        of_rows = any(value.of_rows for value in inputs)
        into, out = rows[: len(inputs)], rows[len(inputs) :]
        if self.axis in collectives.named_axes(eqn):
            return [_Value()] * len(out)  # of all shares
        if not of_rows or not forward:
            return [_Value(of_rows=of_rows)] * len(out)
        is_statistic = str(eqn.params.get("name", "")).lstrip("_") in _STATISTICS
        if eqn.primitive.name in _NESTED and not is_statistic:
            return self._nested(eqn, twin, inputs)
        taken = next((v.taken for v, has in zip(inputs, into, strict=True) if v.taken and not has), None)
        if taken and any(out):
            self.found[taken] = None
        takes = is_statistic or eqn.primitive.name in _TAKING
        if taken is None and takes and any(v.of_rows and has for v, has in zip(inputs, into, strict=True)):
            taken = jax_api.line_of(eqn) or "an unknown line"
        return [_Value(of_rows=True, taken=None if has else taken) for has in out]

    def _nested(self, eqn: JaxprEqn, twin: JaxprEqn, inputs: Sequence[_Value]) -> Sequence[_Value]:
        name, bodies = eqn.primitive.name, list(zip(jax_api.subjaxprs(eqn), jax_api.subjaxprs(twin), strict=True))
        fixed, num_carry = 0, 0
        if name == "cond":
            inputs = inputs[1:]
        elif name == "scan":
            fixed, num_carry = scan_parts(eqn)
        elif name == "while":
            bodies = [(eqn.params["body_jaxpr"].jaxpr, twin.params["body_jaxpr"].jaxpr)]
            fixed, num_carry = eqn.params["body_nconsts"], len(eqn.outvars)
            inputs = inputs[eqn.params["cond_nconsts"] :]
        outputs = [_Value()] * len(eqn.outvars)
        for one, other in bodies:
            outputs = _joined(outputs, self.run(one, other, inputs, forward=True))
            carried = _joined(inputs[fixed : fixed + num_carry], outputs[:num_carry])
            if carried:  # a loop, whose next step gets what this one makes
                again = [*inputs[:fixed], *carried, *inputs[fixed + num_carry :]]
                outputs = _joined(outputs, self.run(one, other, again, forward=True))
        return outputs


_TAKING = frozenset(
    (
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        *("dot_general", "scatter-add"),
    )
)
_STATISTICS = frozenset(("var", "nanvar", "std", "nanstd"))  # of jax.numpy: what meets inside stays there
_NESTED = frozenset((*jax_api.CALLS, "cond", "while", "scan"))


def _joined(one: Sequence[_Value], other: Sequence[_Value]) -> list[_Value]:
    return [a | b for a, b in zip(one, other, strict=True)]


def _paired(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if len(one) != len(other):
        raise _Unlike
    return zip(one, other, strict=True)
