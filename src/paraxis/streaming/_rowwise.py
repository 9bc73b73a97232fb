"""Rows that meet in an operation outside of maps: found by running it, and again with other rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import JaxprEqn, Literal
from paraxis._host.digests import is_key, plain

PLACES = frozenset(("sharding_constraint", "reshard", "device_put"))  # they only say where an operand is to lie
# Operations that are not run to see what they do: which branch they take, and when they end, depends on values.
_UNKNOWN = ("while", "cond", "pure_callback", "io_callback", "debug_callback", "debug_print")


def reason_rows_mix(
    eqn: JaxprEqn, dims: Sequence[int | None], outs: Sequence[int | None], used: Sequence[bool]
) -> str | None:
    """Return why rows meet in an operation; ``None`` if row ``i`` of its results is made of row ``i`` of its operands.

    It is run on rows that are in no order, and again for each row with all others changed; ``dims`` and ``outs`` are
    the dimensions of the rows of its operands and results, and ``used`` says which results are read.
    """
    name = eqn.primitive.name
    if name in _UNKNOWN or any(jax_api.holds(body, *_UNKNOWN) for body in jax_api.jaxprs_in_params(eqn.params)):
        return "it is not known to keep them apart; write it in a mapped function, px.map_fn"
    if name in PLACES or name == "optimization_barrier":
        return None
    shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    count = next(shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None)

    def results(changed: np.ndarray) -> list[Any]:
        operands = [_operand(v, dim, count, changed) for v, dim in zip(eqn.invars, dims, strict=True)]
        return [*map(plain, jax_api.bind(eqn, *operands))]

    before = results(np.zeros(count, bool))
    for row in range(count):
        for y, z, dim, is_used in zip(before, results(np.arange(count) != row), outs, used, strict=True):
            if is_used and (dim is None or y.take(row, dim).tobytes() != z.take(row, dim).tobytes()):
                return f"{name} over the rows"
    return None


def _operand(atom: Any, dim: int | None, count: int, changed: np.ndarray) -> Any:
    """Return numbers for an operand, small integers and what lies between, so that they are indices of rows as well."""
    if isinstance(atom, Literal):
        return atom.val
    aval = atom.aval
    rows = np.roll(np.arange(count), 1) + changed if dim is not None else np.zeros(1, int)
    form = [-1 if d == dim else 1 for d in range(aval.ndim)]
    level = np.broadcast_to((rows % (2 if aval.dtype == np.bool_ else count)).reshape(form), aval.shape)
    if is_key(aval):
        return jnp.vectorize(lambda seed: jax.random.key(seed, impl=aval.dtype._impl.name))(level)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.asarray(level, aval.dtype)
    return jnp.asarray((level + np.random.default_rng(0).uniform(size=aval.shape)) / (count + 1), aval.dtype)
