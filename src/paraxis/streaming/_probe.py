"""Two mistakes that are found by running again with other rows: rows that meet, and padding that counts.

**Padding that counts**, where a mask was forgotten: elements of different length are padded by repeating the last row,
and a function that uses the mask gives the same bits whatever the rows between hold. So one chunk of each pass runs
again, by the same compiled program, with other rows of the same elements there: at the shared values at hand, and at
others, because at some, such as weights of zero, all rows give the same. The very last row stays, and the others are
the element's own, so that ``x[-1]``, a maximum, or a shift by one changes nothing either.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import JaxprEqn, Literal
from paraxis.streaming._resume import is_key, plain

_COPIES = frozenset(("sharding_constraint", "reshard", "device_put", "optimization_barrier", jax_api.ONCE))
"""Operations whose results are their operands."""
_UNKNOWN = ("while", "cond", "pure_callback", "io_callback", "debug_callback", "debug_print")
"""Operations that are not run to see what they do: which branch they take, and when they end, depends on values."""


def why_mixed(
    eqn: JaxprEqn, dims: Sequence[int | None], outs: Sequence[int | None], used: Sequence[bool]
) -> str | None:
    """Return why rows meet in an operation; ``None`` if row ``i`` of its results is made of row ``i`` of its operands.

    It is run on rows that are in no order, and again for each row with all others changed; ``dims`` and ``outs`` are
    the dimensions of the rows of its operands and results, and ``used`` says which results are read.
    """
    name = eqn.primitive.name
    if name in _UNKNOWN or any(jax_api.holds(body, *_UNKNOWN) for body in jax_api.subjaxprs(eqn)):
        return "it is not known to keep them apart; write it in a mapped function, px.map_fn"
    if name in _COPIES:
        return None
    shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    count = next(shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None)

    def results(changed: np.ndarray) -> list[Any]:
        given = [_operand(v, dim, count, changed) for v, dim in zip(eqn.invars, dims, strict=True)]
        return [*map(plain, jax_api.bind(eqn, eqn.params, given))]

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


# --- padding ---------------------------------------------------------------------------------------------------------

_ROUNDING = 64  # units in the last place, of the largest number, that a shift which cancels out may cost


def counted(
    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    shared: Sequence[Any],
    rows: Sequence[Any],
    lengths: Mapping[int, np.ndarray],
) -> int | None:
    """Return the number of a result of a pass in which padding is counted, if there is one.

    ``lengths`` are, of those rows that are padded, the elements' own numbers of rows.
    """
    others = [_otherwise(x, lengths[n]) if n in lengths else x for n, x in enumerate(rows)]
    random = np.random.default_rng(0)
    for values in (shared, [_elsewhere(x, random) for x in shared]):
        found, given = run(values, rows), run(values, others)
        if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(found, given, strict=True)):
            for number, results in enumerate(zip(found, given, run(values, rows), strict=True)):
                if _differ(*results):
                    return number
    return None


def _otherwise(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return rows with others of the same element as padding, but for the very last one."""
    at, own = np.arange(rows.shape[1]), np.maximum(lengths, 1)[:, None]
    kept = (at < own) | (at == rows.shape[1] - 1)
    places = np.where(kept, np.minimum(at, own - 1), at % own)
    return np.take_along_axis(rows, places.reshape(*places.shape, *[1] * (rows.ndim - 2)), axis=1)


def _elsewhere(x: Any, random: np.random.Generator) -> Any:
    """Return other numbers near a shared value's."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    near = np.asarray(x, np.float64)
    return (near + 0.1 * (1 + np.abs(near)) * random.normal(size=near.shape)).astype(jnp.result_type(x))


def _differ(found: Any, given: Any, again: Any) -> bool:
    """Return whether results differ by more than rounding, and more than those of the same rows do on some devices."""
    eps = float(jnp.finfo(found.dtype).eps) if jnp.issubdtype(found.dtype, jnp.inexact) else 0.0
    a, b, c = (np.asarray(x).astype(complex) for x in (found, given, again))
    with np.errstate(invalid="ignore"):
        size, noise = (np.nan_to_num(np.abs(x), nan=0.0, posinf=0.0).max(initial=0.0) for x in (a, a - c))
    return not np.allclose(a, b, rtol=0.0, atol=min(_ROUNDING * eps, 0.01) * size + 100 * noise, equal_nan=True)
