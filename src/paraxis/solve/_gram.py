"""An initial Hessian from the rows' Gram matrix, for a linear problem.

The Hessian of a generalised linear model is ``X.T @ C @ X``, with C the rows' curvatures. For a softmax, these are
close to the same matrix in every row (Böhning 1992), so that one matrix, ``(d, d)``, stands for all outputs. Some
classes are told from others by more rows than the rest: another, ``(k, k)``, is the mean of the rows' curvatures by two
outputs, and the Hessian is taken for the Kronecker product of both (as Martens and Grosse 2015 do for a layer). Some
rows are enough: the directions that matter are those in which X is large.

It pays where the eigenvalues lie apart. Their spread is ``d * sum(eigenvalues²) / sum(eigenvalues)²``, for which
products of the rows with a few vectors are enough (Hutchinson 1990).

Products make the inverse, not LAPACK, whose threads and XLA's would wait for each other, for ever, if it is one of
several.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Function, Linear
from paraxis.solve._rows import beside, sent
from paraxis.solve._streaming import MAX_FEATURES, TableRows, sample_of

_SPREAD = 2.0  # of eigenvalues; if their logarithms are uniform, the largest is about fifty times the smallest
_PROBES = 8
_SWEPT = 64  # columns
_LEAST_CURVATURE = 0.1  # of a combination of outputs, beside the mean of them
_APART = 1e3  # squares of columns, from which on their scales are different
_JITTER = 1e-3  # of what a column would weigh, were all its rows as large as the largest

_matmul = functools.partial(jnp.matmul, precision=trees.EXACT)


class Inverse(NamedTuple):
    """The inverse of a Hessian that is the Kronecker product of two matrices."""

    columns: jax.Array  # (d, d), or (d + 1, d + 1) with an intercept
    outputs: Any  # (k, k); ``None``: the unit matrix


def prepared(problem: Linear | Function, params: Any, precondition: str | None) -> Inverse | None:
    """Return the inverse for a linear problem, whole on each device, if it is asked for or likely to pay."""
    if precondition is None or not isinstance(problem, Linear):
        return None
    (num_rows, num_features), is_forced = problem.design.shape, precondition == "gram"
    if not is_forced and not 1 < num_features <= min(MAX_FEATURES, num_rows):
        return None
    if num_features > MAX_FEATURES and problem.is_table:
        raise ValueError(f"precondition='gram' takes at most {MAX_FEATURES:,} columns of a table; leave it out")
    if arrays.is_traced((problem, params)):
        return _on_auto_axes(functools.partial(_traced_inverse, is_forced=is_forced), problem, params)
    rows, weight = problem.design, problem.weight
    if isinstance(rows, TableRows):
        sample = _picked(problem, rows.places(rows.sampled))
    else:
        numbers = _numbers(problem, weight if weight is None else arrays.on_host(weight))
        numbers, l2 = (sent(x, problem.targets) for x in (numbers, problem.l2))
        sample = _compiled_picked(dataclasses.replace(problem, l2=l2), numbers)
    here = jax.device_put(jax.tree.map(lambda x: arrays.on_host(jnp.asarray(x)), (sample, params)))  # on one device
    if not is_forced and not _compiled_pays(*here):  # the larger program, of the inverse, is not compiled then
        return None
    return jax.tree.map(lambda x: beside(x, problem.targets), _compiled_inverse(*here))


def _on_auto_axes(call: Any, problem: Linear, *operands: Any) -> Any:
    """Call with a problem: of rows whose sharding is a type, none can be picked."""
    if jax.typeof(problem.targets).sharding.mesh.explicit_axes:
        call = jax.sharding.auto_axes(call, out_sharding=arrays.whole_on(problem.targets))
    return call(problem, *operands)


def _traced_inverse(problem: Linear, params: Any, is_forced: bool) -> Inverse:
    """Return the inverse; or, if it does not pay, a number times the unit matrix: L-BFGS is as without either."""
    sample = _picked(problem, _numbers(problem, problem.weight))
    if is_forced:
        return _inverse(sample, params)

    def unit() -> Inverse:
        x, weight, l2, _, coupling = _weighed(sample, params)
        total = _trace(x, weight, l2)
        columns = jnp.where(total > 0, len(l2) / total, 1) * jnp.eye(len(l2), dtype=x.dtype)
        return Inverse(columns, None if coupling is None else jnp.eye(len(coupling), dtype=coupling.dtype))

    return jax.lax.cond(_pays(sample, params), lambda: _inverse(sample, params), unit)


def _numbers(problem: Linear, weight: Any) -> Any:
    """Return the numbers of some of the rows up to the last one that counts, the same with padding and without."""
    (num_rows, num_features), xp = problem.design.shape, trees.numpy_of(weight)
    end = num_rows if weight is None else 1 + xp.max(xp.where(weight > 0, np.arange(num_rows), 0))
    return sample_of(end, num_rows, num_features)


def _picked(problem: Linear, numbers: Any) -> Linear:
    rows, weight = problem.design, problem.weight
    if isinstance(rows, TableRows):
        design = rows.some if rows.shift is None else rows.some - np.asarray(rows.shift)
    else:
        design = rows[numbers]
    targets, weight, offset = jax.tree.map(lambda x: x[numbers], (problem.targets, weight, problem.offset))
    return dataclasses.replace(problem, design=design, targets=targets, weight=weight, offset=offset)


_compiled_picked = jax.jit(functools.partial(_on_auto_axes, _picked))


def _weighed(sample: Linear, params: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Any]:
    """Return rows, which have a 1 for an intercept, their weights in the Hessian, L2, which rows count, and outputs."""
    both, weight = (sample.shifted(sample.predict(params)), sample.design), sample.weight
    z, x = (some.astype(jnp.promote_types(some.dtype, jnp.float32)) for some in both)
    shares = jnp.full(len(x), 1 / len(x), z.dtype) if weight is None else weight.astype(z.dtype) / jnp.sum(weight)
    coupling = None if sample.loss.coupling is None else sample.loss.coupling(z, shares)
    counts = shares > 0
    x = x * counts[:, None].astype(x.dtype)
    l2 = jnp.full(x.shape[1], sample.l2, z.dtype)
    if sample.intercept:
        x, l2 = jnp.concatenate([x, jnp.ones_like(x[:, :1])], 1), jnp.append(l2, jnp.zeros((), l2.dtype))
    return x, shares * sample.loss.curvature(z, sample.targets), l2, counts, coupling


def _trace(x: jax.Array, weight: jax.Array, l2: jax.Array) -> jax.Array:
    return jnp.vdot(weight, jnp.einsum("nd,nd->n", x, x)) + jnp.sum(l2)


def _pays(sample: Linear, params: Any) -> jax.Array:
    """Return whether eigenvalues lie apart."""
    x, weight, l2, counts, _ = _weighed(sample, params)
    probes = np.sign(np.random.default_rng(0).standard_normal((len(l2), _PROBES))).astype(x.dtype)
    some, share = x[::4], weight[::4] * (jnp.sum(weight) / jnp.sum(weight[::4]))  # which are enough to tell
    product = _matmul(some.T * share[None], _matmul(some, probes)) + l2[:, None] * probes
    # Of so few rows, also those of equal eigenvalues are apart.
    spread = len(l2) * (jnp.sum(product**2) / _PROBES / _trace(some, share, l2) ** 2 - 1 / jnp.sum(counts[::4]))
    return (spread > _SPREAD) & (jnp.sum(counts) >= sample.design.shape[1])


def _inverse(sample: Linear, params: Any) -> Inverse:
    """Return the inverse of the Hessian that some rows tell."""
    x, weight, l2, _, coupling = _weighed(sample, params)
    gram, largest = _matmul((x * weight[:, None]).T, x), jnp.sum(weight) * jnp.max(jnp.abs(x), 0) ** 2
    # One jitter for all columns keeps what the rows span: where columns depend on each other, a solver that begins at
    # zero finds the smallest solution. On scales far apart, what the largest column needs would drown the smallest:
    # there, each has its own.
    by_column = jnp.where(largest > 0, largest, mean := jnp.mean(largest))
    jitter = _JITTER * jnp.where(jnp.min(by_column) * _APART < jnp.max(by_column), by_column, mean)
    hessian = gram + jnp.diag(l2 + jitter + jnp.finfo(gram.dtype).tiny)
    scale = jax.lax.rsqrt(jnp.diagonal(hessian))
    inverse = _inv(hessian * scale[:, None] * scale[None])
    inverse = (inverse + inverse.T) / 2 * scale[:, None] * scale[None]
    # Of values whose squares overflow: each coefficient for itself.
    columns = jnp.where(jnp.all(jnp.isfinite(inverse)), inverse, jnp.diag(scale**2))
    return Inverse(columns, None if coupling is None else _outputs(coupling))


_compiled_pays, _compiled_inverse = jax.jit(_pays), jax.jit(_inverse)


def _outputs(coupling: jax.Array) -> jax.Array:
    """Return the inverse of the outputs' part, which is 1 in the mean: how large the whole is, columns tell.

    To add the same to all outputs of a row changes no softmax: in that direction, too, it is 1.
    """
    count, unit = len(coupling), jnp.eye(len(coupling), dtype=coupling.dtype)
    mean = jnp.trace(coupling) / max(count - 1, 1)
    inverse = _inv(coupling / jnp.where(mean > 0, mean, 1) + 1 / count + _LEAST_CURVATURE * unit)
    return jnp.where((mean > 0) & jnp.all(jnp.isfinite(inverse)), inverse, unit)


def _inv(matrix: jax.Array) -> jax.Array:
    """Return the inverse of a positive definite matrix, by sweeps of some columns at a time; NaN if it is none."""
    size = len(matrix)
    num_blocks = -(-size // _SWEPT)
    width = -(-size // num_blocks)
    padding = num_blocks * width - size
    padded = jnp.pad(matrix, (0, padding)) + jnp.diag((jnp.arange(size + padding) >= size).astype(matrix.dtype))
    return jax.lax.fori_loop(0, num_blocks, lambda k, a: _swept(a, k * width, width), padded)[:size, :size]


def _swept(a: jax.Array, start: Any, width: int) -> jax.Array:
    """Return the matrix after a sweep of some of its columns (Goodnight 1979); after all, it is the inverse."""
    rows = jax.lax.dynamic_slice_in_dim(a, start, width, 0)
    columns = jax.lax.dynamic_slice_in_dim(a, start, width, 1)
    pivot = jax.lax.dynamic_slice_in_dim(rows, start, width, 1)
    inverse = 1 / pivot if width == 1 else jax.lax.fori_loop(0, width, lambda k, p: _swept(p, k, 1), pivot)
    a = a - _matmul(columns, _matmul(inverse, rows))
    a = jax.lax.dynamic_update_slice_in_dim(a, _matmul(inverse, rows), start, 0)
    a = jax.lax.dynamic_update_slice_in_dim(a, -_matmul(columns, inverse), start, 1)
    return jax.lax.dynamic_update_slice(a, inverse, (start, start))


def apply(inverse: Inverse | None, x: Any) -> Any:
    """Return the inverse times coefficients ``(d,)`` or ``(d, k)``, or times a pair of these and an intercept."""
    if inverse is None:
        return x
    whole = jnp.concatenate([x[0], x[1][None]]) if isinstance(x, tuple) else x
    product = _matmul(inverse.columns, whole)
    product = (product if inverse.outputs is None else _matmul(product, inverse.outputs)).astype(whole.dtype)
    return (product[:-1], product[-1]) if isinstance(x, tuple) else product
