"""The passes of a program: which values each computes of a chunk, and what is computed once, between them.

Elements meet in reductions only. A value's *level* is the number of reductions, one after another, that it depends on:
pass ``k`` computes values of level ``k`` and the parts of reductions, whose totals have level ``k + 1``. A later pass
computes values of elements again. What a maximum was taken of, and what has effects, is kept: another executable may
give other last bits, and then no element would attain the maximum.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import arrays, jax_api, lowerings, maps, sums
from paraxis._core.jax_api import JaxprEqn, Literal
from paraxis._core.record import Map
from paraxis._core.reductions import REDUCTIONS, identity
from paraxis.errors import AxisError
from paraxis.streaming import _rowwise
from paraxis.streaming._trace import Flat, Operation, refuse_mixing, rows_p, size_p, verbs_in

_FOLDS = {primitive.name: kind for kind, primitive in REDUCTIONS.items()}
_FOLDS |= {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "any", "reduce_and": "all"}
_FOLDS |= {"dot_general": "sum"}
# Operations whose results have the last bits of an operand.
_SAME_ROWS = frozenset(("optimization_barrier", rows_p.name, "select_n", "convert_element_type"))


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass over the chunks; or, if ``is_once``, what is computed once before one.

    Attributes:
        operations: by their number in the trace, in order.
        shared, rows: the values that it is given whole, and those of which it is given a chunk's rows.
        results, kinds: parts of reductions, of these kinds, and then rows that are kept or returned.
        dims: for each value of the program, the dimension of its elements; ``None``: it is shared.
    """

    operations: list[int]
    shared: list[int]
    rows: list[int]
    results: list[int]
    kinds: tuple[str, ...]
    dims: list[int | None]
    is_once: bool = False

    def program(self, flat: Flat) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Return it as a function of shared values and rows, as many as a trace is for, and their shapes.

        Booleans may come last: which rows are elements, and not stand-ins for such. A part of a reduction is
        ``(1, ...)``, of a dtype to add parts in: on several devices, each gives its own.
        """
        arguments, folds = [*self.shared, *self.rows], dict(zip(self.results, self.kinds, strict=False))

        def run(*args: Any) -> list[Any]:
            real = args[len(arguments)] if len(args) > len(arguments) else None
            values = dict(zip(arguments, args, strict=False))
            for number in self.operations:
                eqn, inputs, outputs, _ = flat.operations[number]
                operands = [v.val if isinstance(v, Literal) else values[v] for v in inputs]
                dims = [None if isinstance(v, Literal) else self.dims[v] for v in inputs]
                if self.is_once and eqn.primitive is not rows_p:
                    results: Sequence[Any] = jax_api.bind(eqn, *operands)
                elif eqn.primitive is rows_p or eqn.primitive.name in _rowwise.PLACES:
                    results = operands
                elif eqn.primitive is maps.map_p:
                    results = _mapped(Map.of(eqn.params), operands, real)
                elif (kind := folds.get(outputs[0])) is None:
                    results = jax_api.bind(eqn, *operands)
                else:
                    operands = [_masked(kind, x, dim, real) for x, dim in zip(operands, dims, strict=True)]
                    results = [y[None].astype(sums.wide(y.dtype)) for y in jax_api.bind(eqn, *operands)]
                for v, y in zip(outputs, results, strict=True):
                    values.setdefault(v, y)  # what the pass is given is as an earlier one has computed it
            return [values[v] for v in self.results]

        size = next((flat.avals[v].shape[self.dims[v] or 0] for v in self.rows), 0)
        return run, [*(jax_api.struct(flat.avals[v]) for v in arguments), jax.ShapeDtypeStruct((size,), bool)]


def _mapped(m: Map, operands: Sequence[Any], real: jax.Array | None) -> list[jax.Array]:
    """Return rows, and sums ``(1, ...)`` over those that are real."""
    results = zip(lowerings.run(m._replace(in_blocks=True), operands, real), m.summed, strict=True)
    return [y if is_summed else arrays.unpad(y, m.placement) for y, is_summed in results]


def _masked(kind: str, x: Any, dim: int | None, real: jax.Array | None) -> Any:
    """Return an operand of a reduction in which rows that are not real go unnoticed."""
    if dim is None or real is None:
        return x
    return jnp.where(jnp.expand_dims(real, [d for d in range(x.ndim) if d != dim]), x, identity(kind, x.dtype))


class Plan:
    """The passes of a program, from its traces for all elements and for five.

    Attributes:
        dims: for each value, the dimension of its elements; ``None``: it is shared.
        kept: values of elements that a later pass is given.
        counts: values that are the number of all elements, by which a mean divides.
        steps, passes: the passes, with what is computed once before each, and without.

    Raises:
        AxisError: if elements meet elsewhere than in a reduction; it names the operation and its line.
    """

    def __init__(self, whole: Flat, part: Flat, axis: str, dims: list[int | None]) -> None:
        self._flat, self._axis, self.dims, self.kept, self.counts = whole, axis, dims, set[int](), set[int]()
        known = [*range(len(whole.closed.jaxpr.invars)), *whole.constants]
        self._sources = {v for v in known if dims[v] is not None}  # read from an array or from groups
        self._producer: dict[int, int] = {}
        self._level = dict.fromkeys(known, 0)
        self._folds: dict[int, str] = {}
        self._once: set[int] = set()  # operations that are done between passes
        for number, operation in enumerate(whole.operations):
            if operation.eqn.primitive is size_p and operation.eqn.params["axis"] == axis:
                self.counts.update(operation.outputs)
                self._level.update(dict.fromkeys(operation.outputs, 0))
                continue
            self._place(number, operation, part.operations[number].eqn)
            self._producer.update(dict.fromkeys(operation.outputs, number))
            level = self._level_of(operation)
            self._level.update((v, level + (v in self._folds)) for v in operation.outputs)
        self.steps = self._planned()
        self.passes = [one for one in self.steps if not one.is_once]

    @property
    def counts_at_once(self) -> bool:
        """Whether the first pass depends on the number of all elements, as a mean's gradient does."""
        depends = {*self.counts}
        for operation in self._flat.operations:
            if not depends.isdisjoint(operation.values):
                depends.update(operation.outputs)
        return any(not depends.isdisjoint(one.shared) for one in self.passes[:1])

    def line(self, value: int) -> str:
        return self._flat.operations[self._producer[value]].line

    def _level_of(self, operation: Operation) -> int:
        return max((self._level[v] for v in operation.values), default=0)

    def _place(self, number: int, operation: Operation, part: JaxprEqn) -> None:
        """Decide where an operation is done: between passes, or on the rows of a chunk; as a reduction or not."""
        eqn, name, axis = operation.eqn, operation.name, operation.eqn.params.get("axis")
        is_map, is_reduction = eqn.primitive is maps.map_p, name.startswith("px_reduce_")
        dims = [None if isinstance(v, Literal) else self.dims[v] for v in operation.inputs]
        outs = [self.dims[v] for v in operation.outputs]
        if is_map and axis == self._axis:
            self._map(operation, dims)
        elif any(e.params["axis"] == self._axis for sub in jax_api.jaxprs_in_params(eqn.params) for e in verbs_in(sub)):
            raise AxisError(
                f"Stream: elements meet inside {name}, at {operation.line}; write jax.vmap in place of a map of "
                f"another axis, and a loop in Python, around one round: step = px.Stream(at_once=64).jit(round), and "
                f"for _ in range(10): w = step(w, groups)"
            )
        elif all(dim is None for dim in dims):
            if outs == [None] or name not in ("px_broadcast", "broadcast_in_dim"):  # these give each element one row
                self._once.add(number)  # for all elements, if they have rows: a range, random keys
                self._sources.update(v for v in operation.outputs if self.dims[v] is not None)
        elif eqn.primitive is rows_p and dims != outs:
            raise AxisError(
                f"Stream: each element's part of an array, at {operation.line}, is wanted as an array again, as in a "
                f"gradient by it; give the array as px.Groups.of_arrays(x), and the gradient has a row for each element"
            )
        elif all(dim is None for dim in outs):
            if name not in _FOLDS or (is_reduction and axis != self._axis):
                refuse_mixing(operation, "it is no sum, maximum or minimum")
            self._folds[operation.outputs[0]] = _FOLDS[name]
        elif is_map or is_reduction:
            refuse_mixing(operation, f"it is along another axis, {axis!r}; write jax.vmap there")
        elif eqn.primitive is not rows_p:
            used = [v in self._flat.used for v in operation.outputs]
            if (reason := _rowwise.reason_rows_mix(part, dims, outs, used)) is not None:
                refuse_mixing(operation, reason)

    def _map(self, operation: Operation, dims: Sequence[int | None]) -> None:
        params = operation.eqn.params
        if params["axis"] in jax_api.free_axes(params["body"].jaxpr):
            raise AxisError(
                f"Stream: a mapped function reads its element's index or exchanges values along {self._axis!r}, at "
                f"{operation.line}; give np.arange(n) as an argument, and reduce after it: px.reduce_sum(px.map_fn(…))"
            )
        for dim, is_shared in zip(dims, params["shared"], strict=True):
            if is_shared and dim is not None:
                refuse_mixing(operation, "the mapped function closes over all elements' values")
        summed = zip(operation.outputs, params["summed"], strict=True)
        self._folds.update((v, "sum") for v, is_summed in summed if is_summed)

    def _planned(self) -> list[Pass]:
        operations, used = self._flat.operations, self._flat.used
        effectful = [n for n, x in enumerate(operations) if n not in self._once and jax_api.has_effects(x.eqn)]
        extremes = [v for v, kind in self._folds.items() if kind in ("max", "min")]
        candidates = {root for v in extremes for x in operations[self._producer[v]].values for root in self._roots(x)}
        candidates.update(v for n in effectful for v in operations[n].outputs if self.dims[v] is not None)
        returned = [v for v in self._flat.results if isinstance(v, int)]
        every = set(range(len(self.dims)))
        whole = {v for v in every if v not in self._producer or self._producer[v] in self._once}
        steps = list[Pass]()
        for level in reversed(range(1 + max(self._level.values(), default=0))):  # later passes say what earlier keep
            folds = [v for v in self._folds if v in used and self._level[v] == level + 1]
            rows = dict.fromkeys([*(v for v in returned if self.dims[v] is not None), *sorted(self.kept)])
            results = [*folds, *(v for v in rows if self._level[v] == level)]
            begin = [n for n in effectful if self._level_of(operations[n]) == level]
            if results or begin:
                known = {v for v in candidates if self._level[v] < level}.union(self._folds).difference(folds)
                steps.append(self._pass(begin, results, whole | known, folds))
                self.kept.update(candidates.intersection(steps[-1].rows))
            if once := [n for n in sorted(self._once) if self._level_of(operations[n]) == level]:
                outputs = [v for n in once for v in operations[n].outputs]
                read = {v for n, x in enumerate(operations) if n not in once for v in x.values}.union(returned)
                steps.append(self._pass(once, [v for v in outputs if v in read], every.difference(outputs)))
        return steps[::-1]

    def _roots(self, value: int) -> list[int]:
        """Return the values of elements whose last bits a value has."""
        if self.dims[value] is None or value in self._sources:
            return []
        operation = self._flat.operations[self._producer[value]]
        if operation.name not in _SAME_ROWS:
            return [value]
        return [root for v in operation.values for root in self._roots(v)]

    def _pass(self, begin: list[int], results: list[int], known: set[int], folds: Sequence[int] | None = None) -> Pass:
        """Return what computes results, and the operations ``begin``, of values that are known; no folds: once."""
        operations, done, inputs = self._flat.operations, set(begin), set[int]()
        wanted = [*results, *(v for n in begin for v in operations[n].values)]
        while wanted:
            v = wanted.pop()
            if v in known:
                inputs.add(v)
            elif self._producer[v] not in done:
                done.add(self._producer[v])
                wanted += operations[self._producer[v]].values
        rows = [] if folds is None else sorted(v for v in inputs if self.dims[v] is not None)
        kinds = tuple(self._folds[v] for v in folds or ())
        return Pass(sorted(done), sorted(inputs.difference(rows)), rows, results, kinds, self.dims, folds is None)


_MERGE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum, "any": jnp.bitwise_or, "all": jnp.bitwise_and}


def add(held: list[Any], part: list[Any], kinds: tuple[str, ...]) -> None:
    """Add the parts of the next chunk to those of ``2**rank`` chunks each, with their ranks, as in a binary counter.

    Whoever computed them, the same are put together. The error of a sum grows with the logarithm of their number.
    """
    rank = 0
    while held and held[-1][0] == rank:
        part, rank = _merged(kinds, held.pop()[1], part), rank + 1
    held.append([rank, part])


def total(held: Sequence[Any], kinds: tuple[str, ...]) -> list[Any]:
    """Return all parts together, those of each device for itself."""
    return functools.reduce(lambda part, other: _merged(kinds, other, part), [part for _, part in held[::-1]])


@functools.partial(jax.jit, static_argnums=0)
def _merged(kinds: tuple[str, ...], left: list[Any], right: list[Any]) -> list[Any]:
    return [_MERGE[kind](a, b) for kind, a, b in zip(kinds, left, right, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def met(kinds: tuple[str, ...], dtypes: tuple[Any, ...], where: Any, parts: list[Any]) -> list[Any]:
    """Return what the devices' parts ``(num_devices, ...)`` come to, on all of them: only here something is sent.

    Each device adds all parts: an all-reduce would add them in another order in several processes than in one.
    """
    parts = parts if where is None else jax.lax.with_sharding_constraint(parts, where)
    totals = [functools.reduce(_MERGE[kind], [*x]) for kind, x in zip(kinds, parts, strict=True)]
    return [x.astype(dtype) for x, dtype in zip(totals, dtypes, strict=True)]
