"""A function traced for all elements and for fewer, as two lists of the same operations.

The first trace has the true counts: a mean divides by the number of all elements. The second has the shapes of a chunk.
A dimension that differs is the elements'; everything else must be the same. What runs is the second trace with the
literals of the first.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api, maps, origins, scope
from paraxis._core.axis import Axis
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from paraxis.errors import AxisError, LoweringError

Atom = int | Literal
"""An operand: the number of a value, or a literal."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation, with the numbers of the values that it reads and makes, and the user's line that it is of."""

    eqn: JaxprEqn
    inputs: list[Atom]
    outputs: list[int]
    line: str

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def values(self) -> list[int]:
        return [v for v in self.inputs if isinstance(v, int)]

    @property
    def acts(self) -> bool:
        return jax_api.has_effects(self.eqn)


@dataclasses.dataclass
class Flat:
    """A traced function without calls: values by number, arguments first.

    Attributes:
        avals: of each value.
        constants: those that are known.
        operations: those that results or effects need, in order.
        live: the values that they, or the results, read.
        results: what the function returns.
        closed, out_tree: the jaxpr that it was made of, and the structure of its result.
    """

    avals: list[Any]
    constants: dict[int, Any]
    operations: list[Operation]
    live: set[int]
    results: list[Atom]
    closed: ClosedJaxpr
    out_tree: Any

    @classmethod
    def of(cls, closed: ClosedJaxpr, out_tree: Any) -> "Flat":
        flat = cls([], {}, [], set(), [], closed, out_tree)
        arguments = [flat._new(v.aval) for v in closed.jaxpr.invars]
        flat.results = flat._read(closed, arguments, "an unknown line")
        flat.live.update(v for v in flat.results if isinstance(v, int))
        needed = []
        for operation in reversed(flat.operations):
            if operation.acts or not flat.live.isdisjoint(operation.outputs):
                needed.append(operation)
                flat.live.update(operation.values)
        flat.operations = needed[::-1]
        return flat

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _read(self, closed: ClosedJaxpr, arguments: Sequence[Atom], outer: str) -> list[Atom]:
        known: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            known[v] = number = self._new(jax.typeof(x))
            self.constants[number] = x

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in closed.jaxpr.eqns:
            inputs, line = [read(v) for v in eqn.invars], jax_api.line_of(eqn) or outer
            if eqn.primitive.name in jax_api.CALLS:
                body = next(x for x in eqn.params.values() if isinstance(x, (ClosedJaxpr, Jaxpr)))
                body = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
                results = self._read(body, inputs, line)
            else:
                results = [self._new(v.aval) for v in eqn.outvars]
                self.operations.append(Operation(eqn, inputs, results, line))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in closed.jaxpr.outvars]


# --- tracing for a number of elements --------------------------------------------------------------------------------

rows_p = jax_api.Primitive("px_rows")
"""An array of all elements, from outside of the trace, where a verb takes it: its rows are those of the chunk."""
rows_p.def_abstract_eval(lambda x, *, size: x.update(shape=(size, *x.shape[1:])))
jax_api.define_lowering(rows_p, lambda x, *, size: x[:size])
jax_api.ad.deflinear2(rows_p, lambda ct, x, *, size: [rows_p.bind(ct, size=x.aval.shape[0])])
jax_api.batching.primitive_batchers[rows_p] = lambda xs, dims, *, size: (
    rows_p.bind(jnp.moveaxis(xs[0], dims[0], 1), size=size),
    1,
)


@contextlib.contextmanager
def sized(name: str | None, whole: int, size: int) -> Iterator[None]:
    """Within, verbs take the axis of this name, and of ``whole`` elements, to have ``size``; no name: as they are."""

    def axis(found: Axis) -> Axis:
        return dataclasses.replace(found, size=size) if found.name == name and found.size == whole else found

    def rows(x: Any, found: Axis) -> Any:
        sizes = (whole, size) if found.name == name else (found.size,)
        if np.ndim(x) == 0 or x.shape[0] not in sizes or origins.recall(x) is not None:
            return x
        return rows_p.bind(x, size=found.size)

    chunk = scope.Chunked(axis, lambda tree, found: jax.tree.map(lambda x: rows(x, found), tree))
    with scope.entered(dataclasses.replace(scope.current(), chunk=chunk)):
        yield


def verbs_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the operations that map or reduce along an axis, in bodies as well."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("px_") and "axis" in eqn.params:
            yield eqn
        for sub in jax_api.subjaxprs(eqn):
            yield from verbs_in(sub)


def axis_of(who: str, closed: ClosedJaxpr, count: int | None) -> tuple[Axis, Any]:
    """Return the axis that is streamed, the one of as many elements as groups have; and where it is first mapped.

    Raises:
        AxisError: if there is none, or more than one.
    """
    found = [(eqn.params["axis"], eqn.params["size"]) for eqn in verbs_in(closed.jaxpr)]
    fits = {axis for axis in found if count in (None, axis[1])}
    if len(fits) == 1:
        (axis,) = fits
        mapped = (e.params for e in verbs_in(closed.jaxpr) if e.primitive is maps.map_p)
        return Axis(*axis), next((params["how"].placement for params in mapped if params["axis"] == axis[0]), None)
    axes = ", ".join(f"{name!r} of {size}" for name, size in dict.fromkeys(found)) or "none"
    if count is None:
        raise AxisError(f"{who}: fn must map along one axis, or get px.Groups, which say along which; its axes: {axes}")
    raise AxisError(
        f"{who}: groups have {count} elements, and fn must map along one axis of that size; its axes: {axes}. Write "
        f"@px.program(clients={count})"
    )


# --- the two traces compared -----------------------------------------------------------------------------------------


def meet(who: str, operation: Operation, why: str) -> NoReturn:
    raise LoweringError(
        f"{who}: elements meet in {operation.name}, at {operation.line}: {why}. px.Stream runs elements in chunks, "
        f"which meet in reductions only: px.reduce_sum, px.reduce_max and the like, or jnp.sum over all elements"
    )


@dataclasses.dataclass(frozen=True)
class Pair:
    """The traces for all elements and for some, and how many these are."""

    who: str
    whole: Flat
    part: Flat
    size: int
    count: int

    def __post_init__(self) -> None:
        """Refuse a program that does other operations for another number of elements."""
        for a, b in zip(self.whole.operations, self.part.operations, strict=False):
            if a.name != b.name or [*map(_number, a.inputs)] != [*map(_number, b.inputs)]:
                raise LoweringError(
                    f"{self.who}: fn does {a.name} at {a.line} for {self.size} elements, but {b.name} at {b.line} for "
                    f"{self.count}; what it does must not depend on their number"
                    + (", so give at_once=2 or more" if self.count == 1 else "")
                )
        if len(self.whole.avals) != len(self.part.avals):
            raise LoweringError(f"{self.who}: fn does more for {self.size} elements than for {self.count}, or less")

    def dim(self, a: Any, b: Any) -> int | None:
        """Return the dimension of the elements in two avals of a value; ``None``: it has none.

        Raises:
            ValueError: if more than that differs.
        """
        differ = [d for d, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if sizes[0] != sizes[1]]
        if [(a.shape[d], b.shape[d]) for d in differ] not in ([], [(self.size, self.count)]):
            raise ValueError(f"of {self.size} of them it makes {list(a.shape)}, and of {self.count} {list(b.shape)}")
        return differ[0] if differ else None

    def dims(self) -> list[int | None]:
        """Return the dimension of the elements in each value.

        Raises:
            LoweringError: naming the operation that makes a value of all elements in another form.
        """
        made = {v: operation for operation in self.whole.operations for v in operation.outputs}
        found = []
        for number, (a, b) in enumerate(zip(self.whole.avals, self.part.avals, strict=True)):
            try:
                found.append(self.dim(a, b))
            except ValueError as error:
                meet(self.who, made[number], str(error))
        return found

    def on_rows(self, number: int) -> Iterator[tuple[JaxprEqn, list[int | None], list[int | None]]]:
        """Yield the operations on rows that an operation consists of, with the dimensions of their elements.

        Of a loop or branch over rows these are its bodies'; of anything else, itself.
        """
        yield from self._on_rows(self.whole.operations[number].eqn, self.part.operations[number].eqn)

    def _on_rows(self, a: JaxprEqn, b: JaxprEqn) -> Iterator[tuple[JaxprEqn, list[int | None], list[int | None]]]:
        def dims(a: Sequence[Any], b: Sequence[Any]) -> list[int | None]:
            return [self.dim(x.aval, y.aval) for x, y in zip(a, b, strict=True)]

        bodies = zip(jax_api.subjaxprs(a), jax_api.subjaxprs(b), strict=True)
        inner = [pair for x, y in bodies for pair in zip(x.eqns, y.eqns, strict=True)]
        rows = [pair for pair in inner if any(d is not None for d in dims(pair[0].invars, pair[1].invars))]
        for x, y in rows:
            yield from self._on_rows(x, y)
        if not rows:
            yield b, dims(a.invars, b.invars), dims(a.outvars, b.outvars)

    def with_literals(self) -> Flat:
        """Return the trace for some, with the literals of the one for all, in bodies, too."""
        operations = []
        for a, b in zip(self.whole.operations, self.part.operations, strict=True):
            params = _Merge(self.who, a).of(a.eqn.params, b.eqn.params)
            inputs = [*map(_literal, a.inputs, b.inputs)]
            operations.append(Operation(b.eqn.replace(params=params), inputs, b.outputs, a.line))
        return dataclasses.replace(self.part, operations=operations)


def _number(atom: Atom) -> int | None:
    return None if isinstance(atom, Literal) else atom


def _literal(whole: Any, part: Any) -> Any:
    """Return an operand of the trace for some; a literal as it is in the one for all."""
    both = isinstance(whole, Literal) and isinstance(part, Literal) and np.shape(whole.val) == np.shape(part.val)
    return whole if both else part


_SIZES = frozenset(
    (
        *("shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "size", "rows", "padded", "laid", "devices"),
        *("how", "sharding", "out_sharding"),
    )
)
"""Parameters that say shapes or places, in which two traces may differ."""


@dataclasses.dataclass(frozen=True)
class _Merge:
    """The parameters of an operation for some elements, with the literals of those for all."""

    who: str
    at: Operation

    def of(self, whole: Any, part: Any, name: str | None = None) -> Any:
        if isinstance(whole, ClosedJaxpr):  # which Jaxpr is, too, from JAX 0.12 on
            consts = [x if np.shape(x) == np.shape(y) else y for x, y in zip(whole.consts, part.consts, strict=True)]
            return ClosedJaxpr(self._body(whole.jaxpr, part.jaxpr), consts)
        if isinstance(whole, Jaxpr):
            return self._body(whole, part)
        if isinstance(whole, dict):
            return {key: self.of(value, part[key], key) for key, value in whole.items()}
        if (type(whole) in (tuple, list) or hasattr(whole, "_fields")) and len(whole) == len(part):
            items = [self.of(a, b, name) for a, b in zip(whole, part, strict=True)]
            return type(whole)(*items) if hasattr(whole, "_fields") else type(whole)(items)
        if isinstance(whole, (bool, int, float, complex, str)) and str(whole) != str(part) and name not in _SIZES:
            raise LoweringError(
                f"{self.who}: the number of elements is written out in {self.at.name}, at {self.at.line}: {name} is "
                f"{whole} for all of them, and {part} for a chunk; a program may count elements, as in a mean, but not "
                f"loop over them"
            )
        return part

    def _body(self, whole: Jaxpr, part: Jaxpr) -> Jaxpr:
        if len(part.eqns) != len(whole.eqns):
            meet(self.who, self.at, "its body depends on their number")
        eqns = []
        for a, b in zip(whole.eqns, part.eqns, strict=True):
            shapes = [[getattr(v.aval, "shape", ()) for v in eqn.outvars] for eqn in (a, b)]
            if a.primitive is not b.primitive or (self.at.eqn.primitive is maps.map_p and shapes[0] != shapes[1]):
                raise LoweringError(
                    f"{self.who}: a mapped function does {a.primitive.name} with as many entries as there are elements,"
                    f" at {jax_api.line_of(a) or self.at.line}; give each element its own row as an argument"
                )
            invars = [*map(_literal, a.invars, b.invars)]
            eqns.append(b.replace(invars=invars, params=self.of(a.params, b.params)))
        return part.replace(eqns=eqns, outvars=[*map(_literal, whole.outvars, part.outvars)])
