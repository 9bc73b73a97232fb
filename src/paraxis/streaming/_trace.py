"""A function traced for all elements and for fewer, as two lists of the same operations.

The first trace has the true counts: a mean divides by the number of all elements. The second has the shapes of a chunk.
A dimension that differs is the elements'; everything else must be the same. What runs is the second trace with the
literals of the first.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import placing, scope
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._core import maps, origins
from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
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
        return [v for v in self.inputs if not isinstance(v, Literal)]


@dataclasses.dataclass
class Flat:
    """A traced function without calls: values by number, arguments first.

    Attributes:
        avals: of each value.
        constants: those that are known.
        operations: in order.
        results: what the function returns.
        closed, out_tree: the jaxpr that it was made of, and the structure of its result.
    """

    avals: list[Any]
    constants: dict[int, Any]
    operations: list[Operation]
    results: list[Atom]
    closed: ClosedJaxpr
    out_tree: Any

    @classmethod
    def of(cls, closed: ClosedJaxpr, out_tree: Any) -> "Flat":
        flat = cls([], {}, [], [], closed, out_tree)
        arguments = [flat._new(v.aval) for v in closed.jaxpr.invars]
        flat.results = flat._read(closed, arguments, "an unknown line")
        return flat

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, x: Any) -> int:
        number = self._new(jax.typeof(x))
        self.constants[number] = x
        return number

    def _read(self, closed: ClosedJaxpr, arguments: Sequence[Atom], outer: str) -> list[Atom]:
        known: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        known.update((v, self._constant(x)) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in closed.jaxpr.eqns:
            inputs, line = [read(v) for v in eqn.invars], jax_api.line_of(eqn) or outer
            if eqn.primitive.name in jax_api.CALLS:
                results = self._read(_body(eqn), inputs, line)
            else:
                results = [self._new(v.aval) for v in eqn.outvars]
                self.operations.append(Operation(_alone(eqn), inputs, results, line))
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in closed.jaxpr.outvars]


def _body(eqn: JaxprEqn) -> ClosedJaxpr:
    body = next(value for value in eqn.params.values() if isinstance(value, (ClosedJaxpr, Jaxpr)))
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def _alone(eqn: JaxprEqn) -> JaxprEqn:
    """Return a map that stood in another one, which ``vmap`` has taken over, as one that stands alone."""
    if eqn.primitive is not maps.map_p or len(eqn.params["how"].mapped) == 1:
        return eqn
    how = eqn.params["how"]
    placement = placing.place(dataclasses.replace(how.placement.axis, mesh=None, over=None))
    how = dataclasses.replace(how, placement=placement, mapped=(placement.axis,))
    return eqn.replace(params={**eqn.params, "how": how, "devices": placing.named_devices(placement)})


# --- tracing for a number of elements --------------------------------------------------------------------------------

rows_p = jax_api.Primitive("px_rows")
"""An array of all elements, from outside of the trace, where a verb takes it: its rows are those of the chunk."""
rows_p.def_abstract_eval(lambda x, *, size: x.update(shape=(size, *x.shape[1:])))
jax_api.define_lowering(rows_p, lambda x, *, size: x[:size])
jax_api.define_linear(rows_p, lambda ct, x, *, size: [rows_p.bind(ct, size=x.aval.shape[0])])
jax_api.define_batching(rows_p, lambda x, dim, *, size: (rows_p.bind(jnp.moveaxis(x, dim, 1), size=size), 1))


@contextlib.contextmanager
def sized(name: str | None, whole: int, size: int) -> Iterator[None]:
    """Within, verbs take the axis of this name, and of ``whole`` elements, to have ``size``; no name: all as they are.

    Chunks are as many elements as run at once: what an axis itself says about that is left out.
    """

    def axis(found: Axis) -> Axis:
        resized = size if found.name == name and found.size == whole else found.size
        return dataclasses.replace(found, size=resized, at_once=None)

    def rows(x: Any, found: Axis) -> Any:
        sizes = (whole, size) if found.name == name else (found.size,)
        if np.ndim(x) == 0 or x.shape[0] not in sizes or origins.recall(x) is not None:
            return x
        return rows_p.bind(x, size=found.size)

    with scope.chunked(scope.Chunked(axis, lambda tree, found: jax.tree.map(lambda x: rows(x, found), tree))):
        yield


def axes_of(jaxpr: Jaxpr) -> dict[str, int]:
    """Return the axes along which a program maps or reduces, with their sizes."""
    found: dict[str, int] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("px_") and "axis" in eqn.params:
            found[eqn.params["axis"]] = eqn.params["size"]
        for sub in jax_api.subjaxprs(eqn):
            found |= {name: size for name, size in axes_of(sub).items() if name not in found}
    return found


def uses(eqn: JaxprEqn, axis: str) -> bool:
    """Return whether an equation maps or reduces along an axis in its bodies."""
    return any(axis in axes_of(sub) for sub in jax_api.subjaxprs(eqn))


def placement_of(jaxpr: Jaxpr, axis: str) -> Placement | None:
    """Return where a program first maps this axis; ``None`` if it does not."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is maps.map_p and eqn.params["axis"] == axis:
            return eqn.params["how"].placement
        found = [placement_of(sub, axis) for sub in jax_api.subjaxprs(eqn)]
        if any(found):
            return next(filter(None, found))
    return None


def opened(closed: ClosedJaxpr, axis: str) -> ClosedJaxpr:
    """Return a program in which maps along other axes, where this one is mapped inside, are ``vmap``."""

    def outer(eqn: JaxprEqn) -> bool:
        return eqn.primitive is maps.map_p and eqn.params["axis"] != axis and uses(eqn, axis)

    def special(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        if eqn.primitive.name in jax_api.CALLS:
            return jax_api.evaluate(_body(eqn), operands, lambda _: False, special)
        if not outer(eqn):
            return None
        params = eqn.params
        in_axes = [None if is_shared else 0 for is_shared in params["shared"]]
        body = jax_api.jaxpr_as_fun(params["body"])
        found = jax.vmap(body, in_axes, axis_name=params["axis"], axis_size=params["size"])(*operands)
        return [y.sum(0) if is_summed else y for y, is_summed in zip(found, params["summed"], strict=True)]

    def stands(jaxpr: Jaxpr) -> bool:
        return any(outer(eqn) or any(map(stands, jax_api.subjaxprs(eqn))) for eqn in jaxpr.eqns)

    if not stands(closed.jaxpr):
        return closed
    one = functools.partial(jax_api.evaluate, closed, inline=lambda _: False, special=special)
    return opened(jax_api.trace(lambda *args: one(args), closed.in_avals, {})[0], axis)


# --- the two traces compared -----------------------------------------------------------------------------------------


def elements_dims(who: str, whole: Flat, part: Flat, size: int, count: int) -> list[int | None]:
    """Return for each value the dimension of its elements, ``size`` in one trace and ``count`` in the other.

    Raises:
        LoweringError: if more than that differs; it names the operation and its line.
    """
    dims: list[int | None] = []
    made = {v: operation for operation in whole.operations for v in operation.outputs}
    require_same_operations(who, whole, part, size, count)
    for number, (a, b) in enumerate(zip(whole.avals, part.avals, strict=True)):
        differ = [d for d, sizes in enumerate(zip(a.shape, b.shape, strict=False)) if sizes[0] != sizes[1]]
        if a.ndim != b.ndim or any((a.shape[d], b.shape[d]) != (size, count) for d in differ) or len(differ) > 1:
            meet(who, made[number], f"of {size} of them it makes {list(a.shape)}, and of {count} {list(b.shape)}")
        dims.append(differ[0] if differ else None)
    return dims


def require_same_operations(who: str, whole: Flat, part: Flat, size: int, count: int) -> None:
    """Refuse a program that does other operations for another number of elements."""
    for a, b in zip(whole.operations, part.operations, strict=False):
        inputs = [[None if isinstance(v, Literal) else v for v in x.inputs] for x in (a, b)]
        if a.name != b.name or inputs[0] != inputs[1]:
            raise LoweringError(
                f"{who}: fn does {a.name} at {a.line} for {size} elements, but {b.name} at {b.line} for {count}; "
                f"what it does must not depend on their number" + (", so give at_once=2 or more" if count == 1 else "")
            )
    if len(whole.operations) != len(part.operations) or len(whole.avals) != len(part.avals):
        raise LoweringError(f"{who}: fn does more operations for {size} elements than for {count}, or fewer")


def meet(who: str, operation: Operation, why: str) -> NoReturn:
    raise LoweringError(
        f"{who}: elements meet in {operation.name}, at {operation.line}: {why}. px.Stream runs elements in chunks, "
        f"which meet in reductions only: px.reduce_sum, px.reduce_max and the like, or jnp.sum over all elements"
    )


_SIZES = frozenset(
    (
        *("shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "size", "rows", "padded", "laid", "devices"),
        *("how", "sharding", "out_sharding"),
    )
)
"""Parameters that say shapes or places, in which two traces may differ."""


def with_literals(who: str, part: Flat, whole: Flat) -> Flat:
    """Return a chunk's trace with the literals of the one for all elements, in bodies, too."""
    operations = []
    for b, a in zip(part.operations, whole.operations, strict=True):
        eqn = b.eqn.replace(params=_merged(who, a, b.eqn.params, a.eqn.params, None))
        operations.append(Operation(eqn, _literals(a.inputs, b.inputs), b.outputs, a.line))
    return dataclasses.replace(part, operations=operations)


def _literals(whole: Sequence[Any], part: Sequence[Any]) -> list[Any]:
    return [
        x if isinstance(x, Literal) and isinstance(y, Literal) and np.shape(x.val) == np.shape(y.val) else y
        for x, y in zip(whole, part, strict=True)
    ]


def _merged(who: str, at: Operation, part: Any, whole: Any, name: str | None) -> Any:
    """Return a parameter of an operation on a chunk, with the literals of the one on all elements."""
    if isinstance(whole, ClosedJaxpr):  # which Jaxpr is, too, from JAX 0.12 on
        merged = _merged_jaxpr(who, at, part.jaxpr, whole.jaxpr)
        consts = [x if np.shape(x) == np.shape(y) else y for x, y in zip(whole.consts, part.consts, strict=True)]
        return ClosedJaxpr(merged, consts)
    if isinstance(whole, Jaxpr):
        return _merged_jaxpr(who, at, part, whole)
    if isinstance(whole, dict):
        return {key: _merged(who, at, part[key], value, key) for key, value in whole.items()}
    if (type(whole) in (tuple, list) or hasattr(whole, "_fields")) and len(whole) == len(part):
        items = [_merged(who, at, b, a, name) for a, b in zip(whole, part, strict=True)]
        return type(whole)(*items) if hasattr(whole, "_fields") else type(whole)(items)
    if isinstance(whole, (bool, int, float, complex, str)) and str(whole) != str(part) and name not in _SIZES:
        raise LoweringError(
            f"{who}: the number of elements is written out in {at.name}, at {at.line}: {name} is {whole} for all of "
            f"them, and {part} for a chunk; a program may count elements, as in a mean, but not loop over them"
        )
    return part


def _merged_jaxpr(who: str, at: Operation, part: Jaxpr, whole: Jaxpr) -> Jaxpr:
    eqns = []
    if len(part.eqns) != len(whole.eqns):
        meet(who, at, "its body depends on their number")
    for b, a in zip(part.eqns, whole.eqns, strict=True):
        shapes = [[getattr(v.aval, "shape", ()) for v in eqn.outvars] for eqn in (a, b)]
        if a.primitive is not b.primitive or (at.eqn.primitive is maps.map_p and shapes[0] != shapes[1]):
            raise LoweringError(
                f"{who}: a mapped function does {a.primitive.name} with as many entries as there are elements, at "
                f"{jax_api.line_of(a) or at.line}; give each element its own row as an argument"
            )
        params = _merged(who, at, b.params, a.params, None)
        eqns.append(b.replace(invars=_literals(a.invars, b.invars), params=params))
    return part.replace(eqns=eqns)


def axis_of(who: str, closed: ClosedJaxpr, count: int | None) -> Axis:
    """Return the axis that is streamed: the one of as many elements as groups have.

    Raises:
        AxisError: if there is none, or more than one.
    """
    found = axes_of(closed.jaxpr)
    fits = {name: size for name, size in found.items() if count in (None, size)}
    if len(fits) == 1:
        return Axis(*next(iter(fits.items())))
    axes = ", ".join(f"{name!r} of {size}" for name, size in found.items()) or "none"
    if count is None:
        raise AxisError(f"{who}: fn must map along one axis, or get px.Groups, which say along which; its axes: {axes}")
    raise AxisError(
        f"{who}: groups have {count} elements, and fn must map along one axis of that size; its axes: {axes}. Write "
        f"@px.program(clients={count})"
    )
