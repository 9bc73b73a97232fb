"""Two mistakes that are found by running again with other rows: rows that meet, and padding that counts.

**Rows that meet**: an operation on rows of some elements keeps them apart if a row of its results stays as it is
whatever the other rows are.

**Padding that counts**, where a mask was forgotten. Elements of different length are padded by repeating the last row.
A function that uses the mask gives the same bits whatever the rows between hold; a mean that counts them does not. So
one chunk of each pass runs again, by the same compiled program, with other rows of the same elements there: with the
shared values at hand, and with others, because at some values, such as weights of zero, all rows give the same. The
very last row stays the element's own last one, and the others are its own as well, so that ``x[-1]``, a maximum, or a
shift by one changes nothing either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import JaxprEqn, Literal
from paraxis.streaming._resume import is_key, plain

_COPIES = frozenset(("sharding_constraint", "reshard", "device_put", "optimization_barrier", jax_api.ONCE))
"""Operations whose results are their operands."""


def why_mixed(eqn: JaxprEqn, dims: Sequence[int | None], outs: Sequence[int | None], count: int) -> str | None:
    """Return why rows meet in an operation; ``None`` if row ``i`` of its results is made of row ``i`` of its operands.

    It is run on rows that are in no order, and again with half of them changed, so that of any two one stays.

    Args:
        eqn: traced for ``count`` rows, three or more.
        dims, outs: the dimensions of the rows of its operands and results.
        count: how many there are.
    """
    name = eqn.primitive.name
    if jax_api.has_effects(eqn) or "callback" in name:
        return f"{name}, which is not known to keep rows apart"
    if name in _COPIES:
        return None
    if None in outs:
        return f"{name} over the rows"

    def results(changed: np.ndarray) -> list[Any]:
        given = [_operand(v, dim, count, changed) for v, dim in zip(eqn.invars, dims, strict=True)]
        found = jax_api.bind(eqn, eqn.params, given)
        return [_rows_first(y, dim) for y, dim in zip(found, outs, strict=True)]

    before, rows = results(np.zeros(count, bool)), np.arange(count)
    for half in (rows >> bit & 1 == side for bit in range(count.bit_length()) for side in (0, 1)):
        for y, z in zip(before, results(half), strict=True):
            if y[~half].tobytes() != z[~half].tobytes():
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
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        bits = np.broadcast_to(level[..., None], data.shape)
        return jax.random.wrap_key_data(jnp.asarray(bits, data.dtype), impl=aval.dtype._impl.name)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.asarray(level, aval.dtype)
    return jnp.asarray((level + np.random.default_rng(0).uniform(size=aval.shape)) / (count + 1), aval.dtype)


def _rows_first(y: Any, dim: int | None) -> np.ndarray:
    return np.moveaxis(plain(y), dim or 0, 0)


# --- padding ---------------------------------------------------------------------------------------------------------

_ROUNDING = 64
"""Units in the last place, of the largest number, that a shift which cancels out may cost."""


def share_that_differs(lengths: np.ndarray, length: int) -> float:
    """Return of how many elements padding can hold other rows, two, and two rows of their own; half is enough."""
    return min(0.5, ((lengths > 1) & (lengths < length - 1)).mean())


def counted(
    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    shared: Sequence[Any],
    rows: Sequence[Any],
    lengths: Sequence[np.ndarray | None],
) -> list[int]:
    """Return the numbers of the results in which padding is counted.

    Args:
        run: a pass, as a function of shared values and of the chunk's rows.
        shared, rows: what it is given.
        lengths: for each of the rows, the elements' own numbers of rows; ``None``: it is not padded.
    """
    others = [x if own is None else _otherwise(np.asarray(x), own) for x, own in zip(rows, lengths, strict=True)]
    random, wrong = np.random.default_rng(0), set[int]()
    for values in (shared, [_elsewhere(x, random) for x in shared]):
        found, given = run(values, rows), run(values, others)
        if any(plain(a).tobytes() != plain(b).tobytes() for a, b in zip(found, given, strict=True)):
            again = run(values, rows)  # some devices add in an order of their own
            wrong |= {n for n, three in enumerate(zip(found, given, again, strict=True)) if _differ(*map(plain, three))}
    return sorted(wrong)


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
    near = near * (1 + 0.1 * random.normal(size=near.shape)) + 0.1 * random.normal(size=near.shape)
    return near.astype(jnp.result_type(x))


def _differ(found: np.ndarray, given: np.ndarray, again: np.ndarray) -> bool:
    """Return whether two results differ by more than rounding, and more than those of the same rows do."""
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found.tobytes() != given.tobytes() and found.tobytes() == again.tobytes()
    unit = min(_ROUNDING * float(jnp.finfo(found.dtype).eps), 0.01)
    a, b, c = (
        x.astype(np.result_type(x.dtype, float) if x.dtype.kind in "fc" else float) for x in (found, given, again)
    )
    with np.errstate(invalid="ignore"):
        size, noise = (np.nan_to_num(np.abs(x), nan=0.0, posinf=0.0).max(initial=0.0) for x in (a, a - c))
    return not np.allclose(a, b, rtol=0.0, atol=unit * size + 100 * noise, equal_nan=True)
