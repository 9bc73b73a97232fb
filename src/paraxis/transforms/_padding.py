"""The test that rows may be added to a share: only if each result has one row per row, made of that row alone.

The function is traced for a prime number of rows, which no other dimension has. So a value comes from the rows if it
has that dimension; an operation keeps rows apart if each result has it once, and it is known not to act along it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._core import jax_api, tree
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn


def harm(
    body: Callable[..., Any],
    real: tuple[ClosedJaxpr, Any],
    avals: Sequence[Any],
    row_dims: Sequence[int | None],
    share: int,
    reduce: Any,
) -> str | None:
    """Return what rows that are added would change; ``None``: nothing.

    ``body`` gives new values of variables by their number, and a result. ``real`` is what it is traced to for one share
    of so many rows, and the structure of its results. ``row_dims`` are the dimensions that the rows lie along.
    """
    sizes = {size for a in (*avals, *real[0].out_avals) for size in a.shape}
    count = next(n for n in itertools.count(101) if all(n % k for k in range(2, n)) and all(s % n for s in sizes if s))
    shapes = [_with_rows(a.shape, at, count) for a, at in zip(avals, row_dims, strict=True)]
    traced, structure = jax_api.trace(body, [a.update(shape=s) for a, s in zip(avals, shapes, strict=True)], {})
    if (name := _meeting(jax_api.without_dead(traced), count)) is not None:
        return f"rows may meet in {name}"
    dims = [_dims(aval, count) for aval in traced.out_avals]
    new, result = jax.tree.unflatten(structure, range(len(dims)))
    if any(dims[i] for i in jax.tree.leaves(new)):
        return "a variable is written with what depends on the rows"
    for (path, i), kind in zip(jax.tree_util.tree_leaves_with_path(result), tree.entries(reduce, result), strict=True):
        if dims[i] != [0] and (dims[i] or (traced.out_avals[i].shape and kind != "same")):
            return f"{tree.name('result', path)} does not have the rows along its first axis"
        if dims[i] and kind != "concat":
            return f"{tree.name('result', path)} is reduced by {kind!r}, and the devices have shares of different sizes"
    wanted = [_with_rows(a.shape, at[0] if at else None, share) for a, at in zip(traced.out_avals, dims, strict=True)]
    if structure != real[1] or [a.shape for a in real[0].out_avals] != wanted:
        return f"with {share} rows per device the function does something else than with more"
    return None


def _with_rows(shape: tuple[int, ...], at: int | None, count: int) -> tuple[int, ...]:
    return shape if at is None else (*shape[:at], count, *shape[at + 1 :])


def _dims(aval: Any, count: int) -> list[int]:
    """Return the dimensions that have so many rows."""
    return [dim for dim, size in enumerate(_shape(aval)) if size == count]


def _shape(aval: Any) -> tuple[int, ...]:
    return getattr(aval, "shape", ())


def _meeting(jaxpr: Jaxpr, count: int) -> str | None:
    """Return the first operation that is not known to keep rows apart."""
    for eqn in jaxpr.eqns:
        ins, outs = ([_dims(v.aval, count) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
        name, bodies = eqn.primitive.name, []
        if name in jax_api.CALLS or name in ("cond", "while") or (name == "scan" and eqn.params["length"] != count):
            bodies = list(jax_api.subjaxprs(eqn))
        elif any(ins) and name not in _PASSED_ON:
            once = all(len(dims) == 1 for dims in outs) and all(len(dims) < 2 for dims in ins)
            if not once or not _keeps(eqn, [dims[0] if dims else None for dims in ins], outs[0][0], count):
                return name
        if (name := next(filter(None, (_meeting(body, count) for body in bodies)), None)) is not None:
            return name
    return None


def _keeps(eqn: JaxprEqn, ins: Sequence[int | None], out: int, count: int) -> bool:
    """Return whether an operation keeps rows apart that lie in these dimensions of its operands and results."""
    name, params, at = eqn.primitive.name, eqn.params, ins[0]
    if name in _ELEMENTWISE or name == "dynamic_update_slice":
        return all(dim in (None, out) for dim in ins)
    if name in _KEPT or (name.startswith(("reduce_", "arg")) and "window" not in name):
        return True  # along the rows, it would give results without them, or with another number
    before, after = (_shape(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    if name in _ALONG:
        along = params[_ALONG[name]]
        return at not in [a % len(before) for a in (along if isinstance(along, Sequence) else [along])]
    if name == "reshape":  # in row-major order a dimension stays if what is before it has as many numbers
        return math.prod(before[:at]) == math.prod(after[:out])
    if name == "pad":
        return at is not None and tuple(params["padding_config"][at]) == (0, 0, 0)
    if name.startswith("reduce_window"):
        return at is not None and params["window_dimensions"][at] == 1 and tuple(params["padding"][at]) == (0, 0)
    if name == "conv_general_dilated":
        return at == params["dimension_numbers"].lhs_spec[0] and ins[1] is None
    if name == "gather":
        with_indices = at in params["dimension_numbers"].operand_batching_dims
        return at is None or with_indices or (ins[1] is None and params["slice_sizes"][at] == count)
    return name.startswith("random_") and not any("rbg" in str(v.aval) for v in eqn.invars)


_PASSED_ON = ("optimization_barrier", jax_api.ONCE, "device_put", "reshard")  # result k is operand k
_ALONG = {"sort": "dimension", "rev": "dimensions", "top_k": "axis", "cumsum": "axis", "cumprod": "axis"}
_ALONG |= {"cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis"}
_KEPT = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "dot_general", "dynamic_slice", "slice", "split", "squeeze"),
        *("stack", "tile", "transpose", "unstack"),
    )
)
_ELEMENTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e"),
        *("bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "copy", "copy_p"),
        *("convert_element_type", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp"),
        *("exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to"),
        *("lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne"),
        *("neg", "nextafter", "not", "one_minus_square", "or", "polygamma", "population_count", "pow", "real"),
        *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sharding_constraint", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient"),
        *("sub", "tan", "tanh", "xor", "zeta"),
    )
)
