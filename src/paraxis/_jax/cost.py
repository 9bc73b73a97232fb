"""The cost of one element's function: enough to choose how a device runs several of them."""

import math
from typing import Any

from paraxis._jax import jax_api


def convolves(jaxpr: jax_api.Jaxpr) -> bool:
    """Return whether there is a convolution in it."""
    return any(
        eqn.primitive.name == "conv_general_dilated" or any(map(convolves, jax_api.subjaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def flops(jaxpr: jax_api.Jaxpr) -> int:
    """Floating-point operations of its matrix products and convolutions, two for each multiplication.

    A ``scan`` counts as often as it runs, a ``while`` once, all branches of a ``cond``.
    """
    return sum(_of(eqn) for eqn in jaxpr.eqns)


def _of(eqn: jax_api.JaxprEqn) -> int:
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    return of_product(eqn) or times * sum(map(flops, jax_api.subjaxprs(eqn)))


def of_product(eqn: jax_api.JaxprEqn) -> int:
    """Return the same of one operation; 0: it is neither a matrix product nor a convolution."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = _shape(eqn.invars[0])
        return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(shape[d] for d in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) // max(out_channels, 1)
    return 0


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
