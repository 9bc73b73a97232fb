"""A function traced for all elements and for a chunk, as two lists of the same operations.

The first trace has the true counts: a mean divides by the number of all elements. The second has the shapes. A
dimension that differs is the elements'; all else must be the same. The second runs, with the literals of the first.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import deferred, jax_api, maps
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from paraxis._core.placing import Axis
from paraxis.errors import AxisError

Atom = int | Literal  # an operand: the number of a value, or a literal


class Operation(NamedTuple):
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


class Flat:
    """A jaxpr without calls, and the structure of its result: values by number, arguments first.

    Attributes:
        avals, constants: the type of each value; those that are known.
        operations, results: in order, those that results or effects need; and what the function returns.
        used: the values that operations read, and those returned.
    """

    def __init__(self, closed: ClosedJaxpr, out_tree: Any) -> None:
        self.closed, self.out_tree = closed, out_tree
        self.avals, self.constants, self.operations = list[Any](), dict[int, Any](), list[Operation]()
        arguments = [self._new(v.aval) for v in closed.jaxpr.invars]
        self.results = self._read(jax_api.dce(closed)[0], arguments, "an unknown line")
        self.used = {v for x in self.operations for v in x.values}.union(v for v in self.results if isinstance(v, int))

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
            inputs, line = [*map(read, eqn.invars)], jax_api.line_of(eqn) or outer
            if eqn.primitive.name in jax_api.CALLS:
                body = next(x for x in eqn.params.values() if isinstance(x, (ClosedJaxpr, Jaxpr)))
                results = self._read(body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ()), inputs, line)
            else:
                results = [self._new(v.aval) for v in eqn.outvars]
                self.operations.append(Operation(eqn, inputs, results, line))
            known.update(zip(eqn.outvars, results, strict=True))
        return [*map(read, closed.jaxpr.outvars)]


# The first rows of an array of all elements, or more of them: as many as a trace is for.
rows_p = jax_api.Primitive("px_rows")
rows_p.def_abstract_eval(lambda x, *, size: x.update(shape=(size, *x.shape[1:])))
jax_api.define_lowering(rows_p, lambda x, *, size: x[:size])
jax_api.ad.deflinear2(rows_p, lambda ct, x, *, size: [rows_p.bind(ct, size=x.aval.shape[0])])
jax_api.batching.primitive_batchers[rows_p] = lambda x, at, **to: (rows_p.bind(jnp.moveaxis(x[0], at[0], 1), **to), 1)

# The number of elements of an axis by which a mean divides: fewer than all, if some are lost.
size_p = jax_api.Primitive("px_size")
size_p.def_abstract_eval(lambda *, axis, size: jax_api.ShapedArray((), np.dtype(np.int32)))
jax_api.define_lowering(size_p, lambda *, axis, size: jnp.int32(size))


@dataclasses.dataclass(frozen=True)
class Sized:
    """Verbs take the axis of this name, and of ``whole`` elements, to have ``size``; no name: as they are.

    Where they take an array of all elements, from outside of the trace, its rows are those of the chunk.
    """

    name: str | None
    whole: int
    size: int

    def __call__(self, axis: Axis, tree: Any) -> tuple[Axis, Any]:
        """Return the axis and the values that a verb takes in place of these."""
        if axis.name == self.name and axis.size == self.whole:
            axis = dataclasses.replace(axis, size=self.size)
        sizes = (self.whole, self.size) if axis.name == self.name else (axis.size,)

        def rows(x: Any) -> Any:
            is_rows = np.ndim(x) > 0 and x.shape[0] in sizes and deferred.recall(x) is None
            return rows_p.bind(x, size=axis.size) if is_rows else x

        return axis, jax.tree.map(rows, tree)

    def count(self, axis: Axis) -> Any:
        """Return the number of elements by which a mean along an axis divides."""
        return size_p.bind(axis=axis.name, size=axis.size)


def verbs_in(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the operations that map or reduce along an axis, in bodies as well."""
    return [eqn for eqn in jax_api.equations(jaxpr) if eqn.primitive.name.startswith("px_") and "axis" in eqn.params]


def axis_of(closed: ClosedJaxpr, count: int | None) -> Axis:
    """Return the axis that is streamed, the only one of as many elements as groups have."""
    candidates = dict[tuple[str, int], Axis]()
    for eqn in verbs_in(closed.jaxpr):
        key = eqn.params["axis"], eqn.params["size"]
        if key not in candidates or eqn.primitive is maps.map_p:  # which knows where the axis is to lie
            candidates[key] = eqn.params["placement"].axis if eqn.primitive is maps.map_p else Axis(*key)
    fits = [axis for key, axis in candidates.items() if count in (None, key[1])]
    if len(fits) == 1:
        return fits[0]
    none = "none: for x.T @ x write px.reduce_sum(px.map_fn(lambda x: jnp.outer(x, x), x))"
    axes = ", ".join(f"{name!r} of {size}" for name, size in candidates) or none
    which = "px.Groups say along which" if count is None else f"of {count} elements, as groups have"
    raise AxisError(f"Stream: fn must map along one axis ({which}), and has {axes}; write @px.program(clients=…)")


def refuse_mixing(operation: Operation, why: str) -> NoReturn:
    raise AxisError(
        f"Stream: elements meet in {operation.name}, at {operation.line}: {why}. px.Stream runs elements in chunks, "
        f"which meet in reductions only: px.reduce_sum, px.reduce_max and the like, or jnp.sum over all elements"
    )


def require_same(whole: Flat, part: Flat, of: str) -> None:
    """Refuse a function that does other operations when it is traced otherwise."""
    for a, b in zip(whole.operations, part.operations, strict=False):
        if (a.name, len(a.inputs), a.values) != (b.name, len(b.inputs), b.values):
            raise AxisError(
                f"Stream: fn does {a.name} at {a.line}, but {b.name} at {b.line} for {of}; what it does must not "
                f"depend on the number of elements"
            )
    if len(whole.avals) != len(part.avals):
        raise AxisError(f"Stream: fn does more, or less, for {of}; that must not depend on the number of elements")


def dims_of(whole: Flat, part: Flat, size: int, count: int) -> list[int | None]:
    """Return the dimension of the elements in each value of the same function for all and for ``count``."""
    dims = []
    for number, (a, b) in enumerate(zip(whole.avals, part.avals, strict=True)):
        differ = [d for d, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if sizes[0] != sizes[1]]
        if [(a.shape[d], b.shape[d]) for d in differ] not in ([], [(size, count)]):
            mixing = next(operation for operation in whole.operations if number in operation.outputs)
            refuse_mixing(mixing, f"of {size} of them it makes {list(a.shape)}, and of {count} {list(b.shape)}")
        dims.append(differ[0] if differ else None)
    return dims


def with_literals(whole: Flat, part: Flat) -> list[Operation]:
    """Return the operations for some elements, with the literals of those for all, in bodies, too."""
    return [
        Operation(_equation(a, a.eqn, b.eqn), [*map(_literal, a.inputs, b.inputs)], b.outputs, a.line)
        for a, b in zip(whole.operations, part.operations, strict=True)
    ]


def require_uncounted(whole: Flat, part: Flat, size: int) -> None:
    """Refuse a function that has the number of all elements as a number of its own, of which some may be lost."""
    lines = [
        x.line for x in whole.operations if x.name == "div" and any(getattr(v, "val", None) == size for v in x.inputs)
    ]
    for a, b in zip(*(jax_api.equations(flat.closed.jaxpr) for flat in (whole, part)), strict=True):
        pairs = zip(a.invars, b.invars, strict=True)
        if not all(np.array_equal(getattr(x, "val", 0), getattr(y, "val", 0)) for x, y in pairs):
            lines.append(jax_api.line_of(a) or "an unknown line")
    if lines:
        raise AxisError(
            f"Stream: lost='mask', but at {lines[0]} there is the number of all {size} elements, of which some may be "
            f"lost; divide by those that are there: px.reduce_mean(x), or px.reduce_sum(jnp.ones(len(x)))"
        )


def _literal(whole: Any, part: Any) -> Any:
    both = isinstance(whole, Literal) and isinstance(part, Literal) and np.shape(whole.val) == np.shape(part.val)
    return whole if both else part


def _equation(at: Operation, whole: JaxprEqn, part: JaxprEqn) -> JaxprEqn:
    params = dict(part.params)
    for name, a in whole.params.items():
        if jax.tree.structure(a) == jax.tree.structure(params[name]):
            params[name] = jax.tree.map(functools.partial(_parameter, at, name), a, params[name])
    return part.replace(invars=[*map(_literal, whole.invars, part.invars)], params=params)


_SIZES = (  # parameters that say shapes or places, in which two traces may differ
    "shape new_sizes limit_indices slice_sizes sizes size rows padded layout devices placement axis_env sharding "
    "out_sharding"
)


def _parameter(at: Operation, name: str, whole: Any, part: Any) -> Any:
    if isinstance(whole, ClosedJaxpr):  # which Jaxpr is, too, from JAX 0.12 on
        consts = [x if np.shape(x) == np.shape(y) else y for x, y in zip(whole.consts, part.consts, strict=True)]
        return ClosedJaxpr(_body(at, whole.jaxpr, part.jaxpr), consts)
    if isinstance(whole, Jaxpr):
        return _body(at, whole, part)
    if isinstance(whole, (bool, int, float, complex, str)) and str(whole) != str(part) and name not in _SIZES.split():
        raise AxisError(
            f"Stream: the number of elements is written out in {at.name}, at {at.line}: {name} is {whole} for all of "
            f"them, and {part} for a chunk; a program may count elements, as in a mean, but not loop over them"
        )
    return part


def _body(at: Operation, whole: Jaxpr, part: Jaxpr) -> Jaxpr:
    if [eqn.primitive for eqn in whole.eqns] != [eqn.primitive for eqn in part.eqns]:
        refuse_mixing(at, "its body depends on their number")
    eqns = []
    for a, b in zip(whole.eqns, part.eqns, strict=True):
        shapes = [[getattr(v.aval, "shape", ()) for v in eqn.outvars] for eqn in (a, b)]
        if at.eqn.primitive is maps.map_p and shapes[0] != shapes[1]:
            raise AxisError(
                f"Stream: a mapped function does {a.primitive.name} with as many entries as there are elements, at "
                f"{jax_api.line_of(a) or at.line}; give each element its own row as an argument"
            )
        eqns.append(_equation(at, a, b))
    return part.replace(eqns=eqns, outvars=[*map(_literal, whole.outvars, part.outvars)])
