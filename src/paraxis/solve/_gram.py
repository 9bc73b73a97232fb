"""An initial Hessian from the rows' Gram matrix, for a linear problem.

The Hessian of a generalised linear model is ``X.T @ C @ X``, with C the rows' curvatures. For a softmax, these are
close to the same matrix in every row (Böhning 1992), so that one matrix, ``(d, d)``, stands for all outputs. Some
classes are told from others by more rows than the rest: another, ``(k, k)``, is the mean of the rows' curvatures by two
outputs, and the Hessian is taken for the Kronecker product of both (as Martens and Grosse 2015 do for a layer). Some
rows are enough: the directions that matter are those in which X is large.

It pays where the eigenvalues lie apart. Their spread is ``d * sum(eigenvalues²) / sum(eigenvalues)²``, for which
products of the rows with a few vectors are enough (Hutchinson 1990).

Outside ``jit``, NumPy computes the matrix, so there is nothing to compile. Inside, products make the inverse: LAPACK's
threads and XLA's would wait for each other, if it is one of several, for ever.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from paraxis._core import arrays
from paraxis._host import threads
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Function, Linear
from paraxis.solve._streaming import MAX_FEATURES, TableRows, sample_of

_SPREAD = 2.0  # of eigenvalues; if their logarithms are uniform, the largest is about fifty times the smallest
_PROBES = 8
_SWEPT = 64  # columns
_BLOCK = 1024  # rows; the weighted copy of more would not stay in a cache
_LEAST_CURVATURE = 0.1  # of a combination of outputs, beside the mean of them
_JITTER = 1e-3  # of what a column would weigh, were all its rows as large as the largest


class Inverse(NamedTuple):
    """The inverse of a Hessian that is the Kronecker product of two matrices."""

    columns: jax.Array  # (d, d), or (d + 1, d + 1) with an intercept
    outputs: Any  # (k, k); ``None``: the unit matrix


class _Sample(NamedTuple):
    """Rows that tell the Hessian, ``x.T @ (weight * x)`` and an L2 penalty; an intercept's column is the last."""

    x: Any  # (m, d), float32 at least: LAPACK takes no narrower numbers
    weight: Any  # (m,)
    largest: Any  # (d,): the diagonal, were all rows as large as the largest
    coupling: Any
    l2: Any  # (d,)


def prepared(problem: Linear | Function, params: Any, precondition: str | None) -> Inverse | None:
    """Return the inverse for a linear problem, whole on each device, if it is asked for or likely to pay.

    There is none where the rows' sharding is a type under ``jit``: of such rows, none can be picked.
    """
    if precondition is None or not isinstance(problem, Linear):
        return None
    num_rows, num_features = problem.design.shape
    is_traced = arrays.is_traced((problem, params))
    if precondition == "auto" and not 1 < num_features <= min(MAX_FEATURES, num_rows):
        return None
    if num_features > MAX_FEATURES and problem.is_table:
        raise ValueError(f"precondition='gram' takes at most {MAX_FEATURES:,} columns of a table; leave it out")
    if is_traced and arrays.tells_in_type(problem.targets):
        return None
    if not is_traced:
        with threads.lapack_alone():
            sample = _sampled_on_host(problem, params)
            if precondition == "auto" and not _spread(sample, np) > _SPREAD:
                return None
            gram = _gram(sample, np)
        with threads.lapack_alone(num_features):
            found = _inverse(sample, gram, np)
        return jax.tree.map(lambda x: arrays.whole_beside(jnp.asarray(x), problem.targets), found)
    used = sample_of(num_rows, num_features) or range(num_rows)
    design, targets, weight = jax.tree.map(lambda x: x[:: used.step], (problem.design, problem.targets, problem.weight))
    problem = Linear(problem.loss, design, targets, weight, problem.l2, problem.intercept)
    sample = _sample(problem, problem.design, _wide(problem.predict(params)), problem.weight, jnp)
    if precondition == "gram":
        return _inverse(sample, _gram(sample, jnp), jnp)
    # Without a matrix, a number times the unit matrix, with which L-BFGS is as without.
    pays = _spread(sample, jnp) > _SPREAD
    return jax.lax.cond(pays, lambda sample: _inverse(sample, _gram(sample, jnp), jnp), _unit, sample)


def _sampled_on_host(problem: Linear, params: Any) -> _Sample:
    design, weight = problem.design, None if problem.weight is None else arrays.on_host(problem.weight)
    if isinstance(design, TableRows):
        at = np.asarray(design.sampled)
        x, at = design.some if design.shift is None else design.some - np.asarray(design.shift), design.places(at)
    else:
        counted = None if weight is None else int(np.count_nonzero(weight))
        at = np.asarray(sample_of(len(design), design.shape[1], counted) or range(len(design)))
        at = at if weight is None else at[weight[at] > 0]
        x = _rows_at(design, at)
    params = jax.tree.map(lambda p: _wide(arrays.on_host(jnp.asarray(p))), params)
    coef, bias = params if problem.intercept else (params, 0)
    return _sample(problem, x, (_wide(x) @ coef + bias).T, None if weight is None else weight[at], np)


def _rows_at(x: jax.Array, numbers: np.ndarray) -> np.ndarray:
    """Return rows of a concrete array by ascending numbers, on the host. Each device gives those that it holds."""
    if not x.is_fully_addressable or any(shard.data.shape[1:] != x.shape[1:] for shard in x.addressable_shards):
        return arrays.on_host(_rows(x, numbers))
    held = {shard.index[0].indices(len(x))[:2]: shard.data for shard in x.addressable_shards}
    found = []
    for (start, stop), block in sorted(held.items(), key=lambda item: item[0]):
        own = numbers[(numbers >= start) & (numbers < stop)] - start
        on_cpu = jax.default_backend() == "cpu"  # where it can be read, there is nothing to compile
        found.append(np.asarray(block)[own] if on_cpu else np.asarray(_rows(block, own)))
    return np.concatenate(found)


@jax.jit
def _rows(x: jax.Array, numbers: jax.Array) -> jax.Array:
    return x[numbers]


def _sample(problem: Linear, x: Any, z: Any, weight: Any, xp: Any) -> _Sample:
    shares = xp.full(len(x), 1 / len(x), z.dtype) if weight is None else weight.astype(z.dtype)
    shares = shares / xp.sum(shares)
    coupling = None if problem.loss.coupling is None else problem.loss.coupling(z, shares, xp)
    l2 = xp.full(x.shape[1], 0 if problem.l2 is None else problem.l2, z.dtype)
    x = _wide(x)
    if problem.intercept:
        x, l2 = xp.concatenate([x, xp.ones_like(x[:, :1])], 1), xp.append(l2, xp.zeros((), l2.dtype))
    if xp is jnp and weight is not None:
        x = x * (weight > 0)[:, None]
    weight = shares * problem.loss.curvature(z, xp)
    largest = xp.sum(weight) * xp.maximum(xp.max(x, 0), -xp.min(x, 0)) ** 2
    return _Sample(x, weight, largest, coupling, l2)


def _wide(x: Any) -> Any:
    dtype = jnp.result_type(x)
    return x.astype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else x


def _spread(sample: _Sample, xp: Any) -> Any:
    """Return how far the eigenvalues lie apart: 1 if all are the same."""
    x, size = sample.x, sample.x.shape[1]
    probes = np.sign(np.random.default_rng(0).standard_normal((size, _PROBES))).astype(x.dtype)
    product = _sum_over_rows(lambda x, weight: x.T @ (weight[:, None] * (x @ probes)), sample, xp)
    product = product + sample.l2[:, None] * probes
    total = xp.vdot(sample.weight, xp.einsum("nd,nd->n", x, x)) + xp.sum(sample.l2)
    # Of so few rows, also those of equal eigenvalues are apart.
    return size * xp.sum(product**2) / _PROBES / total**2 - size / len(x)


def _mirrored(upper: np.ndarray) -> np.ndarray:
    """Return a symmetric matrix of which the upper half is given, and the rest is zero."""
    return upper + np.triu(upper, 1).T


def _sum_over_rows(fn: Callable[[Any, Any], Any], sample: _Sample, xp: Any) -> Any:
    """Return a sum over the rows of what ``fn(x, weight)`` returns of some.

    NumPy's threads would wait for each other, spinning, where others use the cores; those here take the next rows.
    """
    if xp is jnp:
        return fn(sample.x, sample.weight)
    pieces = (slice(start, start + _BLOCK) for start in range(0, len(sample.x), _BLOCK))
    with concurrent.futures.ThreadPoolExecutor(threads.num_cores()) as pool:
        return functools.reduce(np.add, pool.map(lambda piece: fn(sample.x[piece], sample.weight[piece]), pieces))


def _gram(sample: _Sample, xp: Any) -> Any:
    def product(x: Any, weight: Any) -> Any:
        x = x * xp.sqrt(weight)[:, None]
        return xp.matmul(x.T, x, **({} if xp is np else {"precision": trees.EXACT}))

    return _sum_over_rows(product, sample, xp)


def _inverse(sample: _Sample, gram: Any, xp: Any) -> Inverse:
    _, _, largest, coupling, l2 = sample
    # A column's jitter is on the scale of its largest row: what the largest column needs would drown the smallest.
    # Where columns depend on each other, one jitter for all keeps what the rows span: a solver that begins at zero
    # finds the smallest solution, and needs no iterations where there is nothing but the penalty.
    own, alike = xp.where(largest > 0, largest, xp.mean(largest)), xp.full_like(largest, xp.mean(largest))
    added = _JITTER * xp.where(_is_singular(gram, xp), alike, own) + xp.finfo(gram.dtype).tiny
    hessian = gram + xp.diag(l2 + added)
    scale = _scale(hessian, xp)
    found = _inv(hessian * scale[:, None] * scale, xp)
    found = (found + found.T) / 2 * scale[:, None] * scale
    # Of values whose squares overflow: each coefficient for itself.
    found = xp.where(xp.all(xp.isfinite(found)), found, xp.diag(scale**2))
    return Inverse(found, None if coupling is None else _outputs(coupling, xp))


def _unit(sample: _Sample) -> Inverse:
    mean = (jnp.vdot(sample.weight, jnp.einsum("nd,nd->n", sample.x, sample.x)) + jnp.sum(sample.l2)) / len(sample.l2)
    columns = jnp.eye(len(sample.l2), dtype=sample.x.dtype) / jnp.where(mean > 0, mean, 1)
    return Inverse(columns, None if sample.coupling is None else jnp.eye(len(sample.coupling), dtype=columns.dtype))


def _outputs(coupling: Any, xp: Any) -> Any:
    """Return the inverse of the outputs' part, which is 1 in the mean: how large the whole is, columns tell.

    To add the same to all outputs of a row changes no softmax: in that direction, too, it is 1.
    """
    count, unit = len(coupling), xp.eye(len(coupling), dtype=coupling.dtype)
    mean = xp.trace(coupling) / max(count - 1, 1)
    found = _inv(coupling / xp.where(mean > 0, mean, 1) + 1 / count + _LEAST_CURVATURE * unit, xp)
    return xp.where((mean > 0) & xp.all(xp.isfinite(found)), found, unit)


def _scale(matrix: Any, xp: Any) -> Any:
    """Return what makes the diagonal 1 if it is multiplied with each row and each column; of nothing, 1."""
    diagonal = xp.diagonal(matrix)
    return 1 / xp.sqrt(xp.where(diagonal > 0, diagonal, 1))


def _is_singular(matrix: Any, xp: Any) -> Any:
    """Return whether rounding does not tell some column from a combination of others; one of zeros is none."""
    scale, rounding = _scale(matrix, xp), 8 * len(matrix) * xp.finfo(matrix.dtype).eps
    empty = xp.where(xp.diagonal(matrix) > 0, 0, 1).astype(matrix.dtype)
    matrix = matrix * scale[:, None] * scale + xp.diag(empty)
    if xp is np:
        (factored,) = scipy.linalg.get_lapack_funcs(("potrf",), (matrix,))
        factor, failed = factored(matrix.T, clean=False)
        return failed or not np.diagonal(factor).min() ** 2 > rounding
    # The reciprocals of the inverse's diagonal are what no other columns explain of each.
    found = jnp.diagonal(_inv(matrix + rounding / len(matrix) * jnp.eye(len(matrix), dtype=matrix.dtype), jnp))
    return ~jnp.all((found > 0) & (found * rounding < 1))


def _inv(matrix: Any, xp: Any) -> Any:
    """Return the inverse of a positive definite matrix; NaN if it is none.

    Inside a program, it is made by sweeps of some columns at a time.
    """
    if xp is np:
        factor, inverse = scipy.linalg.get_lapack_funcs(("potrf", "potri"), (matrix,))
        upper, failed = factor(matrix.T)
        return np.full_like(matrix, np.nan) if failed else _mirrored(inverse(upper, overwrite_c=True)[0])
    size = len(matrix)
    num_blocks = -(-size // _SWEPT)
    width = -(-size // num_blocks)
    padding = num_blocks * width - size
    padded = jnp.pad(matrix, (0, padding)) + jnp.diag(
        jnp.pad(jnp.zeros_like(matrix[0]), (0, padding), constant_values=1)
    )
    swept = jax.lax.fori_loop(0, num_blocks, lambda k, a: _swept(a, k * width, width), padded)
    return swept[:size, :size]


def _swept(a: jax.Array, start: Any, width: int) -> jax.Array:
    """Return the matrix after a sweep of some of its columns (Goodnight 1979); after all, it is the inverse."""
    rows = jax.lax.dynamic_slice_in_dim(a, start, width, 0)
    columns = jax.lax.dynamic_slice_in_dim(a, start, width, 1)
    pivot = jax.lax.dynamic_slice_in_dim(rows, start, width, 1)
    inverse = 1 / pivot if width == 1 else jax.lax.fori_loop(0, width, lambda k, p: _swept(p, k, 1), pivot)
    product = functools.partial(jnp.matmul, precision=trees.EXACT)
    a = a - product(columns, product(inverse, rows))
    a = jax.lax.dynamic_update_slice_in_dim(a, product(inverse, rows), start, 0)
    a = jax.lax.dynamic_update_slice_in_dim(a, -product(columns, inverse), start, 1)
    return jax.lax.dynamic_update_slice(a, inverse, (start, start))


def apply(inverse: Inverse, params: Any) -> Any:
    """Return the inverse times coefficients ``(d,)`` or ``(d, k)``, or a pair of these and an intercept."""
    intercept, dtype = isinstance(params, tuple), jnp.result_type(*jax.tree.leaves(params))
    whole = jnp.concatenate([params[0], params[1][None]]) if intercept else params
    whole = jnp.matmul(inverse.columns, whole, precision=trees.EXACT)
    if inverse.outputs is not None:
        whole = jnp.matmul(whole, inverse.outputs, precision=trees.EXACT)
    whole = whole.astype(dtype)
    return (whole[:-1], whole[-1]) if intercept else whole
