"""A test of whether a function is row-wise: row ``i`` of each result depends on row ``i`` of the arguments only.

The rows are followed through the function's jaxpr, equation by equation. For each primitive that keeps rows apart, a
rule tells in which dimension of its results they come to lie. A primitive without a rule is taken to mix them.

A value shaped by the number of rows, such as ``jnp.ones(len(x))``, has rows too, if no other dimension has that size:
trace with an odd one. What a function does with the number itself is for ``row_count`` to find.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, subjaxprs


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value in which rows have met; ``reason`` says in which operation."""

    reason: str


_NO_COUNT = 2**62  # as many rows as no dimension has

Rows: TypeAlias = int | Mixed | None
"""The dimension along which a value has rows; ``None``: it does not depend on them; ``Mixed``: rows have met."""


def results(closed: ClosedJaxpr, rows: Sequence[Rows], count: int) -> list[Rows]:
    """Return, for each result of a jaxpr the dimension that carries its rows, given that of each argument.

    ``count`` is the number of rows. A value that does not come from them, but has a dimension of that size, has rows.
    """
    return _run(closed.jaxpr, rows, count)


def moved(eqn: JaxprEqn, rows: Sequence[Rows]) -> list[Rows]:
    """Return the dimension of the rows of an equation's results, given that of each operand.

    Only what comes from operands with rows has some, whatever its shape.
    """
    return list(_apply(eqn, rows, _NO_COUNT))


def _run(jaxpr: Jaxpr, rows: Sequence[Rows], count: int) -> list[Rows]:
    known: dict[Any, Rows] = {v: _shaped_by(v, count) for v in jaxpr.constvars}
    known.update(zip(jaxpr.invars, rows, strict=True))

    def read(atom: Any) -> Rows:
        return None if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _apply(eqn, [read(v) for v in eqn.invars], count), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: JaxprEqn, rows: Sequence[Rows], count: int) -> Sequence[Rows]:
    name = eqn.primitive.name
    if name in _NESTED:
        return _NESTED[name](eqn, rows, functools.partial(_run, count=count))
    if all(row is None for row in rows):
        return [_shaped_by(v, count) for v in eqn.outvars]
    if name in _PASSED_ON:
        return rows
    return [_moved(eqn, rows)] * len(eqn.outvars)


def _shaped_by(var: Any, count: int) -> Rows:
    """Follow rows to a value made without them, such as a mask: it has them if it is made for so many."""
    dims = [dim for dim, size in enumerate(_shape(var)) if size and size % count == 0]
    if not dims:
        return None
    only = dims[0] if len(dims) == 1 and _shape(var)[dims[0]] == count else None
    return Mixed("a value shaped by the number of rows in several ways") if only is None else only


def _moved(eqn: JaxprEqn, rows: Sequence[Rows]) -> Rows:
    """Return where the rows of an equation's results lie, the same for all of them."""
    dims: list[int | None] = []
    for row in rows:
        if isinstance(row, Mixed):
            return row
        dims.append(row)
    name = eqn.primitive.name
    if name in _OPERAND_RULES:
        place = _OPERAND_RULES[name](eqn, dims)
    elif name in _RULES:
        common = _common(dims)
        place = None if common is None else _RULES[name](eqn, common)
    else:
        return Mixed(f"{name}, which is not known to keep rows apart")
    return _over_rows(eqn) if place is None else int(place)  # JAX writes some dimensions as numbers of NumPy


def _common(dims: Sequence[int | None]) -> int | None:
    """Return the dimension of the rows of all operands that have any."""
    found = {dim for dim in dims if dim is not None}
    return found.pop() if len(found) == 1 else None


def _over_rows(eqn: JaxprEqn) -> Mixed:
    return Mixed(f"{eqn.primitive.name} over the rows")


# --- operations on operands with rows in one dimension: that of the results; None if rows meet or change places -------

_Rule: TypeAlias = Callable[[JaxprEqn, int], int | None]


def _along(key: str) -> _Rule:
    """Acts along the dimensions in a parameter and keeps them."""
    return lambda eqn, dim: None if dim in _dimensions(eqn, key) else dim


def _dropping(key: str) -> _Rule:
    """Acts along the dimensions in a parameter and drops them."""

    def rule(eqn: JaxprEqn, dim: int) -> int | None:
        dropped = _dimensions(eqn, key)
        return None if dim in dropped else dim - sum(other < dim for other in dropped)

    return rule


def _whole(operand: int) -> _Rule:
    """Follow rows through taking from an operand, or putting it, at scalar indices: all if there are as many."""
    return lambda eqn, dim: dim if _shape(eqn.invars[operand])[dim] == _shape(eqn.outvars[0])[dim] else None


def _stack(eqn: JaxprEqn, dim: int) -> int | None:
    return dim + (eqn.params["axis"] % len(_shape(eqn.outvars[0])) <= dim)


def _transpose(eqn: JaxprEqn, dim: int) -> int | None:
    return tuple(eqn.params["permutation"]).index(dim)


def _broadcast_in_dim(eqn: JaxprEqn, dim: int) -> int | None:
    new = eqn.params["broadcast_dimensions"][dim]
    return new if _shape(eqn.invars[0])[dim] == _shape(eqn.outvars[0])[new] else None


def _reshape(eqn: JaxprEqn, dim: int) -> int | None:
    """Return where the dimension is afterwards: in row-major order it survives if its size and what is before it do."""
    old, new = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    places = [k for k in range(len(new)) if new[k] == old[dim] and math.prod(new[:k]) == math.prod(old[:dim])]
    # A single row beside other dimensions of size 1 may be in several places, and none is known to be the right one.
    return places[0] if len(places) == 1 and eqn.params["dimensions"] is None else None


def _pad(eqn: JaxprEqn, dim: int) -> int | None:
    return dim if tuple(eqn.params["padding_config"][dim]) == (0, 0, 0) else None


def _reduce_window(eqn: JaxprEqn, dim: int) -> int | None:
    steps = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = all(eqn.params[key][dim] == 1 for key in steps)
    return dim if alone and tuple(eqn.params["padding"][dim]) == (0, 0) else None


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split", "top_k"), _along("axis")),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    "rev": _along("dimensions"),
    **dict.fromkeys(
        (f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or", "xor")), _dropping("axes")
    ),
    **dict.fromkeys(("argmax", "argmin"), _dropping("axes")),
    "squeeze": _dropping("dimensions"),
    "unstack": _dropping("axis"),
    **dict.fromkeys(("slice", "dynamic_slice", "tile"), _whole(0)),
    "dynamic_update_slice": _whole(1),
    "stack": _stack,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "pad": _pad,
    **dict.fromkeys((f"reduce_window{kind}" for kind in ("", "_sum", "_max", "_min")), _reduce_window),
}

_PASSED_ON = frozenset(("optimization_barrier", jax_api.ONCE, "device_put", "reshard"))  # result k is operand k


# --- operations to which it matters which operand has rows -----------------------------------------------------------


def _elementwise(eqn: JaxprEqn, dims: Sequence[int | None]) -> int | None:
    """Follow rows through an operation whose operands may be scalars, or have one row that would be repeated."""
    shape = _shape(eqn.outvars[0])
    if any(len(_shape(v)) not in (0, len(shape)) for v in eqn.invars):
        return None  # numbers have been cut in parts, or put together from them, along a dimension of their own
    every = all(dim is None or _shape(v)[dim] == shape[dim] for v, dim in zip(eqn.invars, dims, strict=True))
    return _common(dims) if every else None


def _random(eqn: JaxprEqn, dims: Sequence[int | None]) -> int | None:
    """Dimensions of keys lead those of what is made of them. Not all kinds of keys are independent row by row."""
    dtypes = [_dtype(v) for v in (*eqn.invars, *eqn.outvars)]
    keys = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jax.dtypes.prng_key)]
    return _common(dims) if keys and all(dtype == jax.eval_shape(_threefry).dtype for dtype in keys) else None


def _threefry() -> jax.Array:
    return jax.random.key(0, impl="threefry2x32")


def _conv_general_dilated(eqn: JaxprEqn, dims: Sequence[int | None]) -> int | None:
    numbers = eqn.params["dimension_numbers"]
    by_row = dims[1] is None and dims[0] == numbers.lhs_spec[0] and eqn.params["batch_group_count"] == 1
    return numbers.out_spec[0] if by_row else None


def _dot_general(eqn: JaxprEqn, dims: Sequence[int | None]) -> int | None:
    """Follow rows to a product: it has the batch dimensions, then the left operand's free ones, then the right's.

    So the places of two operands' rows agree in a batch dimension or not at all.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = (_rest(v, contracted[side], batch[side]) for side, v in enumerate(eqn.invars))
    orders = ([*batch[0], *left], [*batch[1], *(-1 for _ in left), *right])
    places = [order.index(dim) if dim in order else None for dim, order in zip(dims, orders, strict=True)]
    return _common(places) if places.count(None) == dims.count(None) else None


def _gather(eqn: JaxprEqn, dims: Sequence[int | None]) -> int | None:
    """Follow rows to the result's dimensions: of the slices at ``offset_dims``, of the indices in order elsewhere."""
    numbers, (operand, indices) = eqn.params["dimension_numbers"], dims
    batching = numbers.operand_batching_dims
    kept = _rest(eqn.invars[0], numbers.collapsed_slice_dims, batching)
    if operand in kept:
        whole = eqn.params["slice_sizes"][operand] == _shape(eqn.invars[0])[operand]
        return numbers.offset_dims[kept.index(operand)] if whole and indices is None else None
    if operand is not None and operand not in batching:
        return None
    partner = None if operand is None else numbers.start_indices_batching_dims[batching.index(operand)]
    dim = _common((partner, indices))
    elsewhere = _rest(eqn.outvars[0], numbers.offset_dims)
    # The last dimension of the indices, the index vector, is not among those of the result.
    return elsewhere[dim] if dim is not None and dim < len(elsewhere) else None


SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


def scattered(eqn: JaxprEqn) -> list[tuple[int, int, int]]:
    """Return which dimensions of operand, indices (-1: none) and updates go together in a scatter."""
    numbers = eqn.params["dimension_numbers"]
    batching, windows = numbers.operand_batching_dims, numbers.update_window_dims
    elsewhere = _rest(eqn.invars[2], windows)
    pairs = zip(_rest(eqn.invars[0], numbers.inserted_window_dims, batching), windows, strict=True)
    whole = [(own, -1, at) for own, at in pairs if _shape(eqn.invars[0])[own] == _shape(eqn.invars[2])[at]]
    together = zip(batching, numbers.scatter_indices_batching_dims, strict=True)
    return [*((own, at, elsewhere[at]) for own, at in together), *whole]


def _scatter(eqn: JaxprEqn, dims: Sequence[int | None]) -> int | None:
    """Follow rows to the operand's own: one index belongs to one row, or the updates have all rows."""
    for places in scattered(eqn):
        if all(dim in (None, place) for dim, place in zip(dims, places, strict=True)):
            return places[0]
    return None


_OPERAND_RULES: dict[str, Callable[[JaxprEqn, Sequence[int | None]], int | None]] = {
    **dict.fromkeys(
        (
            *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
            *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj"),
            *("convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf"),
            *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag"),
            *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to"),
            *("max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or"),
            *("polygamma", "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt"),
            *("select_n", "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
            *("sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta"),
        ),
        _elementwise,
    ),
    **dict.fromkeys(("random_bits", "random_fold_in", "random_split", "random_unwrap", "random_wrap"), _random),
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
}


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _dimensions(eqn: JaxprEqn, key: str) -> set[int]:
    value, rank = eqn.params[key], len(_shape(eqn.invars[0]))
    return {dim % rank for dim in (value if isinstance(value, Sequence) else (value,))}


def _rest(var: Any, *taken: Sequence[int]) -> list[int]:
    return [dim for dim in range(len(_shape(var))) if not any(dim in dims for dims in taken)]


# --- bodies ----------------------------------------------------------------------------------------------------------


_Runs: TypeAlias = Callable[[Jaxpr, Sequence[Rows]], list[Rows]]


def _call(eqn: JaxprEqn, rows: Sequence[Rows], run: _Runs) -> Sequence[Rows]:
    (body,) = subjaxprs(eqn)
    return run(body, rows)


def _cond(eqn: JaxprEqn, rows: Sequence[Rows], run: _Runs) -> Sequence[Rows]:
    if rows[0] is not None:
        return [_deciding(eqn, rows[0])] * len(eqn.outvars)
    first, *others = (run(branch, rows[1:]) for branch in subjaxprs(eqn))
    for other in others:
        first = _joined(eqn, first, other)
    return first


def _while(eqn: JaxprEqn, rows: Sequence[Rows], run: _Runs) -> Sequence[Rows]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    fixed = rows[num_cond : num_cond + num_body]
    carry = _settled(eqn, rows[num_cond + num_body :], lambda carry: run(body, [*fixed, *carry]))
    (decision,) = run(condition, [*rows[:num_cond], *carry])
    return carry if decision is None else [_deciding(eqn, decision)] * len(carry)


def _scan(eqn: JaxprEqn, rows: Sequence[Rows], run: _Runs) -> Sequence[Rows]:
    (body,) = subjaxprs(eqn)
    num_fixed, num_carry = jax_api.scan_parts(eqn)
    fixed, carry, xs = rows[:num_fixed], rows[num_fixed : num_fixed + num_carry], rows[num_fixed + num_carry :]
    # A step sees one row if rows are scanned over. Its values are Mixed there, as other rows must not come near them.
    meeting = _over_rows(eqn)
    slices = [meeting if dim == 0 else dim - 1 if isinstance(dim, int) else dim for dim in xs]
    carry = _settled(eqn, carry, lambda carry: run(body, [*fixed, *carry, *slices])[:num_carry])
    ys = run(body, [*fixed, *carry, *slices])[num_carry:]
    # Where no other value has rows, nor any carry comes to, each step's results are of its own row.
    if all(row is None for row in (*fixed, *carry)) and all(dim in (None, 0) for dim in xs):
        return [*carry, *(None if y is None else 0 for y in ys)]
    return [*carry, *(y + 1 if isinstance(y, int) else y for y in ys)]


def _settled(eqn: JaxprEqn, carry: Sequence[Rows], step: Callable[[Sequence[Rows]], Sequence[Rows]]) -> list[Rows]:
    """Return what a loop's carry may be after any number of steps. It changes twice at most: to a dimension, Mixed."""
    before, after = None, list(carry)
    while after != before:
        before, after = after, _joined(eqn, after, step(after))
    return after


def _joined(eqn: JaxprEqn, left: Sequence[Rows], right: Sequence[Rows]) -> list[Rows]:
    """Values that may be either of two."""

    def one(a: Rows, b: Rows) -> Rows:
        if a is None or b is None:
            return b if a is None else a
        if isinstance(a, Mixed) or a == b:
            return a
        return b if isinstance(b, Mixed) else Mixed(f"{eqn.primitive.name} with rows in two dimensions of one value")

    return [one(a, b) for a, b in zip(left, right, strict=True)]


def _deciding(eqn: JaxprEqn, decision: Rows) -> Mixed:
    return decision if isinstance(decision, Mixed) else Mixed(f"{eqn.primitive.name} decided by the rows")


_NESTED: dict[str, Callable[[JaxprEqn, Sequence[Rows], _Runs], Sequence[Rows]]] = {
    **dict.fromkeys(jax_api.CALLS, _call),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
