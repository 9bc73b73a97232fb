"""Operations that turn the rounding of an operand into another result: a comparison, a square root near zero.

``x - max(x)`` is zero for an element that attains the maximum. If ``x`` is computed again, by another executable, it
may be 1e-8: then ``x == max(x)`` is false, and ``sqrt(max(x) - x)`` is not a number.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from paraxis._jax import jax_api
from paraxis._jax.jax_api import Literal
from paraxis.engines._flat import LOOPS

_JUMPS = frozenset(
    (*("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"), *("sign", "floor", "ceil", "round", "is_finite"))
)
"""Operations that jump where two values are equal, or their difference is zero."""

_SMOOTH = frozenset(
    (
        *("add", "add_any", "sub", "mul", "neg", "abs", "max", "min", "clamp", "square", "select_n", "select_and_add"),
        *("exp", "exp2", "expm1", "tanh", "logistic", "sin", "cos", "atan", "sinh", "cosh", "asinh", "erf", "erfc"),
        *("dot_general", "conv_general_dilated", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "cumsum"),
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "concatenate", "pad", "rev", "copy"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-add", "split", "stack"),
        *("real", "imag", "complex", "conj", "optimization_barrier", "device_put", "reduce_precision", "copy_p"),
        *("not", "and", "or", "xor", "reduce_and", "reduce_or", "sharding_constraint", jax_api.ONCE),
        *("px_broadcast", "px_reduce_sum", "px_reduce_max", "px_reduce_min", "px_reduce_prod", "px_reduce_prod_others"),
    )
)
"""Operations of which the result changes by about as much as its operands do. Others may not be."""


class Of(enum.IntEnum):
    """Ways to depend on maxima and minima: not at all, on them only, and on other values that may be near them, too."""

    NONE = 0
    ALONE = 1
    TOGETHER = 2


def of_results(invars: Sequence[Any], told: Sequence[Of]) -> Of:
    """Return how an operation's results depend on extrema, from how its operands do."""
    if not any(told):
        return Of.NONE
    together = max(told) == Of.TOGETHER or any(
        not now and not isinstance(v, Literal) for v, now in zip(invars, told, strict=True)
    )
    return Of.TOGETHER if together else Of.ALONE


def is_steep(step: Any, told: Sequence[Of]) -> bool:
    """Return whether roundings of a value near an extremum matter to an operation, or to one inside it.

    Args:
        step: the operation.
        told: how its operands depend on extrema.
    """
    name = step.primitive.name
    if not any(told):
        return False
    if name in _JUMPS:
        return True
    # Of a map, the other jaxprs among its parameters say how this one is run.
    bodies = [step.params["body"].jaxpr] if name == "px_map" else list(jax_api.subjaxprs(step))
    if name == "div":  # by an extremum it is smooth, by the difference to one it is not
        return told[1] == Of.TOGETHER
    if not bodies:
        return _is_unknown(step) and of_results(step.invars, told) == Of.TOGETHER
    if len(bodies) > 1 or len(bodies[0].invars) != len(told) or name in LOOPS:
        return any(map(_holds_one, bodies))
    body = bodies[0]
    found = dict(zip(body.invars, told, strict=True))
    for eqn in body.eqns:
        inner = [Of.NONE if isinstance(v, Literal) else found.get(v, Of.NONE) for v in eqn.invars]
        if is_steep(eqn, inner):
            return True
        found.update(dict.fromkeys(eqn.outvars, of_results(eqn.invars, inner)))
    return False


def _is_unknown(step: Any) -> bool:
    name = step.primitive.name
    if name == "convert_element_type":
        return not jnp.issubdtype(step.params["new_dtype"], jnp.inexact)
    if name == "integer_pow":
        return step.params["y"] < 0
    return name not in _SMOOTH


def _holds_one(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _JUMPS
        or (not list(jax_api.subjaxprs(eqn)) and _is_unknown(eqn))
        or any(map(_holds_one, jax_api.subjaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
