"""The passes of a program: which values each computes of a chunk, and what is computed once, between them.

Elements meet in reductions only. A value's *level* is the number of reductions, one after another, that it depends on:
pass ``k`` computes values of level ``k``, chunk by chunk, and the parts of reductions, whose totals have level
``k + 1``. Values of elements that a later pass needs are computed again from the data. What a maximum or minimum was
taken of is kept instead: computed again, by another executable, it may have other last bits; then no element would
attain the maximum, and the derivative would be zero. So is what has effects.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from paraxis._core import collectives, maps
from paraxis._jax import jax_api, rowwise
from paraxis._jax.jax_api import Literal
from paraxis.errors import CollectiveError, LoweringError
from paraxis.streaming._trace import Flat, Operation, meet, rows_p, uses

_FOLDS = {f"px_reduce_{kind}": kind for kind in ("sum", "max", "min", "any", "all")}
_FOLDS |= {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "any", "reduce_and": "all"}
_FOLDS |= {"dot_general": "sum"}
_SAME_ROWS = frozenset((jax_api.ONCE, rows_p.name, "select_n", "convert_element_type"))
"""Operations whose results have the last bits of an operand."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass over the chunks; or what is computed once before one, of which all is shared.

    Attributes:
        operations: by their number in the trace, in order.
        shared, rows: the values that it is given whole, and those of which it is given a chunk's rows.
        results: what it computes: parts of reductions first, then rows that are kept or returned.
        kinds: how the parts are put together.
    """

    operations: list[int]
    shared: list[int]
    rows: list[int]
    results: list[int]
    kinds: list[str]

    def program(self, flat: Flat) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
        """Return it as a function of shared values and rows, as many as a trace is for, and their shapes."""

        def run(*args: Any) -> list[Any]:
            values = dict(zip(given, args, strict=True))
            for number in self.operations:
                operation = flat.operations[number]
                found: Sequence[Any] = [v.val if isinstance(v, Literal) else values[v] for v in operation.inputs]
                if operation.eqn.primitive is not rows_p:
                    found = jax_api.bind(operation.eqn, operation.eqn.params, found)
                for v, y in zip(operation.outputs, found, strict=True):
                    values.setdefault(v, y)  # what the pass is given is as an earlier one has computed it
            return [values[v] for v in self.results]

        given = [*self.shared, *self.rows]
        avals = [flat.avals[v] for v in given]
        return run, [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]


class Plan:
    """The passes of a program.

    Attributes:
        dims: for each value, the dimension of its elements; ``None``: it is shared.
        sources: values of elements that are read from an array or from groups.
        made: the number of the operation that makes a value.
        kept: values of elements that a later pass is given.
        passes, between: pass ``k``, if there is anything to compute, comes after what is computed before it.

    Raises:
        LoweringError: if elements meet elsewhere than in a reduction; it names the operation and its line.
        CollectiveError: if a mapped function exchanges values.
    """

    def __init__(self, who: str, flat: Flat, dims: Sequence[int | None], axis: str) -> None:
        self._who, self._flat, self._axis = who, flat, axis
        self.dims = dims
        given = range(len(flat.closed.jaxpr.invars))
        known = [*given, *flat.constants]
        self.sources = {v for v in known if dims[v] is not None}
        self._level = dict.fromkeys(known, 0)
        self._folds: dict[int, str] = {}
        self._once: set[int] = set()  # operations that are done between passes
        self._shared_of_rows: set[int] = set()  # such as the counter of a loop over rows
        self.made: dict[int, int] = {}
        for number, operation in enumerate(flat.operations):
            level = max((self._level[v] for v in operation.values), default=0)
            self.made.update(dict.fromkeys(operation.outputs, number))
            self._place(number, operation)
            self._level.update((v, level + (v in self._folds)) for v in operation.outputs)
        results = [v for v in flat.results if not isinstance(v, Literal)]
        for v in self._shared_of_rows.intersection(results):
            meet(who, flat.operations[self.made[v]], "it gives a value of all elements beside one of each")
        self._live = self._needed_for(results)
        self.kept: set[int] = set()
        self.passes = self._planned()
        self.between = [self._before(level) for level in range(self._num_levels)]

    @property
    def _num_levels(self) -> int:
        return 1 + max(self._level.values(), default=0)

    def line(self, value: int) -> str:
        """Return the line of the user's that computes a value."""
        return self._flat.operations[self.made[value]].line

    # --- one operation ---------------------------------------------------------------------------------------------

    def _place(self, number: int, operation: Operation) -> None:
        """Decide where an operation is done: between passes, or on the rows of a chunk; as a reduction or not."""
        dims = [None if isinstance(v, Literal) else self.dims[v] for v in operation.inputs]
        outs, name, params = [self.dims[v] for v in operation.outputs], operation.name, operation.eqn.params
        has_rows = any(dim is not None for dim in dims) or not self._shared_of_rows.isdisjoint(operation.values)
        if operation.eqn.primitive is maps.map_p and params["axis"] == self._axis:
            self._map(operation, dims)
        elif uses(operation.eqn, self._axis):
            raise LoweringError(
                f"{self._who}: elements meet inside {name}, at {operation.line}; write the loop in Python, around one "
                f"round: step = px.Stream(at_once=64).jit(round), and for _ in range(10): w = step(w, groups)"
            )
        elif operation.eqn.primitive is rows_p or name == "px_broadcast":
            if name == "px_broadcast" and has_rows:
                meet(self._who, operation, "it repeats what differs between elements")
            if operation.eqn.primitive is rows_p and not has_rows and any(dim is not None for dim in outs):
                self._read_whole(number, operation)
            elif dims != outs and has_rows:
                meet(self._who, operation, "all elements are needed as one array")
            elif not any(dim is not None for dim in outs):
                self._once.add(number)
        elif not has_rows:
            if name == "broadcast_in_dim" and outs[0] is not None:
                return  # the same row for each element
            self._once.add(number)
            if any(dim is not None for dim in outs):
                self._read_whole(number, operation)
        elif all(dim is None for dim in outs):
            if name not in _FOLDS or (name.startswith("px_") and params["axis"] != self._axis):
                meet(self._who, operation, "it is no sum, maximum or minimum")
            self._folds[operation.outputs[0]] = _FOLDS[name]
        else:
            if operation.eqn.primitive is maps.map_p or (name.startswith("px_reduce_") and name != jax_api.ONCE):
                meet(self._who, operation, f"it is along another axis, {params['axis']!r}; write jax.vmap there")
            for moved, out in zip(rowwise.moved(operation.eqn, dims), outs, strict=True):
                if moved != out:
                    reason = moved.reason if isinstance(moved, rowwise.Mixed) else "rows change places"
                    meet(self._who, operation, reason)
            self._shared_of_rows.update(v for v in operation.outputs if self.dims[v] is None)

    def _read_whole(self, number: int, operation: Operation) -> None:
        """Make an operation's results for all elements, between passes, and read their rows: a range, random keys."""
        self._once.add(number)
        self.sources.update(v for v in operation.outputs if self.dims[v] is not None)

    def _map(self, operation: Operation, dims: Sequence[int | None]) -> None:
        params = operation.eqn.params
        if collectives.mentions(params["body"].jaxpr, params["how"].mapped[-1]):
            raise CollectiveError(
                f"{self._who}: a mapped function reads its element's index or exchanges values along "
                f"{self._axis!r}, at {operation.line}; elements of a chunk do not see the others. Give the index as "
                f"an argument, np.arange(n), and reduce after the map: px.reduce_sum(px.map_fn(…))"
            )
        for dim, is_shared in zip(dims, params["shared"], strict=True):
            if is_shared and dim is not None:
                meet(self._who, operation, "the mapped function closes over all elements' values")
            if not is_shared and dim != 0:
                meet(self._who, operation, "the elements' values are not in the first dimension")
        summed = zip(operation.outputs, params["summed"], strict=True)
        self._folds.update((v, "sum") for v, is_summed in summed if is_summed)

    # --- what is computed when -------------------------------------------------------------------------------------

    def _needed_for(self, results: Iterable[int]) -> set[int]:
        """Return the values that results, and what has effects, depend on."""
        acting = [x for x in self._flat.operations if jax_api.has_effects(x.eqn)]
        wanted, found = [*results, *(v for x in acting for v in (*x.values, *x.outputs))], set[int]()
        while wanted:
            v = wanted.pop()
            if v not in found:
                found.add(v)
                wanted += self._flat.operations[self.made[v]].values if v in self.made else []
        return found

    def _planned(self) -> list[Pass | None]:
        operations = self._flat.operations
        extremes = [operations[self.made[v]] for v, kind in self._folds.items() if kind in ("max", "min")]
        candidates = {root for operation in extremes for v in operation.values for root in self._roots(v)}
        acting = [x for x in operations if jax_api.has_effects(x.eqn)]
        candidates.update(v for x in acting for v in x.outputs if self.dims[v] is not None)
        returned = [v for v in self._flat.results if not isinstance(v, Literal) and self.dims[v] is not None]
        kept = self.kept
        passes: list[Pass | None] = [None] * self._num_levels
        for level in reversed(range(self._num_levels)):  # later passes say what earlier ones keep
            folds = [v for v in self._folds if v in self._live and self._level[v] == level + 1]
            rows = dict.fromkeys(v for v in (*returned, *sorted(kept)) if self._level[v] == level)
            effects = [n for n, x in enumerate(operations) if x in acting and n not in self._once]
            begin = [n for n in effects if max((self._level[v] for v in operations[n].values), default=0) == level]
            if folds or rows or begin:
                one = self._pass(level, folds, [*rows], begin, candidates)
                kept.update(v for v in one.rows if v in candidates and v not in self.sources)
                passes[level] = one
        return passes

    def _roots(self, value: int) -> list[int]:
        """Return the values of elements whose last bits a value has."""
        if self.dims[value] is None or value in self.sources:
            return []
        operation = self._flat.operations[self.made[value]]
        if operation.name not in _SAME_ROWS:
            return [value]
        return [root for v in operation.values for root in self._roots(v)]

    def _pass(self, level: int, folds: list[int], rows: list[int], begin: list[int], candidates: set[int]) -> Pass:
        operations, done, given = self._flat.operations, set(begin), dict[int, None]()
        wanted = [*folds, *rows, *(v for n in begin for v in operations[n].values)]
        targets, seen = {*folds, *rows}, set[int]()
        while wanted:
            v = wanted.pop()
            if v in seen:
                continue
            seen.add(v)
            is_whole = v in self.sources or v not in self.made or self.made[v] in self._once
            if is_whole or (v in self._folds and v not in targets) or (v in candidates and self._level[v] < level):
                given[v] = None
            else:
                done.add(self.made[v])
                wanted += operations[self.made[v]].values
        order = sorted(given)
        shared = [v for v in order if self.dims[v] is None]
        kinds = [self._folds[v] for v in folds]
        return Pass(sorted(done), shared, [v for v in order if v not in shared], [*folds, *rows], kinds)

    def _before(self, level: int) -> Pass | None:
        """Return what is computed between pass ``level - 1`` and pass ``level``."""
        operations = self._flat.operations
        numbers = [
            n
            for n in sorted(self._once)
            if max((self._level[v] for v in operations[n].values), default=0) == level
            and (self._live.intersection(operations[n].outputs) or jax_api.has_effects(operations[n].eqn))
        ]
        if not numbers:
            return None
        own = {v for n in numbers for v in operations[n].outputs}
        inputs = dict.fromkeys(v for n in numbers for v in operations[n].values if v not in own)
        inside = set(numbers)
        used = {v for n, x in enumerate(operations) if n not in inside for v in x.values}
        used.update(v for v in self._flat.results if not isinstance(v, Literal))
        return Pass(numbers, [*inputs], [], [v for v in sorted(own) if v in used], [])
