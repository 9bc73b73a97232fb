"""An initial Hessian from the rows' Gram matrix, for a linear problem.

The Hessian of a generalised linear model is ``X.T @ C @ X``, with C the rows' curvatures. Where the model starts these
hardly differ, and for a softmax they are close to the same matrix in every row (Böhning 1992), so that one matrix,
``(d, d)``, stands for all outputs. Elsewhere, some classes are told from others by more rows than the rest: another
matrix, ``(k, k)``, is the mean of the rows' curvatures by two outputs, and the Hessian is taken for the Kronecker
product of both (as Martens and Grosse 2015 do for a layer). L-BFGS corrects what is wrong in it. Some rows are enough:
the directions that matter are those in which X is large.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, layout, placing
from paraxis._host import threads
from paraxis.solve import _trees as trees
from paraxis.solve._linear import Block, Linear
from paraxis.solve._losses import Loss
from paraxis.solve._problem import Problem
from paraxis.solve._streaming import MAX_FEATURES, TableRows, sample_of

_FEWEST_ITERATIONS = 10
_MOST_ITERATIONS = 100
_TYPICAL_CLASSES = 4
_SPEED_OF_LARGE_PRODUCTS = 6
_BLOCK = 512  # rows; the weighted copy of more would not stay in a cache
_WIDE_ENOUGH = 200  # columns; of fewer, a third of them makes products so narrow that they are slower
_LAPACK = 100  # columns
_LEAST_PIVOT = 8  # roundings per column
_LEAST_BEND = 0.1  # of a combination of outputs, beside the mean of them
_JITTER = 1e-3  # of what a column would weigh, were all its rows as large as the largest


class Inverse(NamedTuple):
    """The inverse of a Hessian that is the Kronecker product of two matrices."""

    columns: jax.Array  # (d, d), or (d + 1, d + 1) with an intercept
    outputs: Any  # (k, k); ``None``: as the unit matrix


def _used(problem: Linear) -> range:
    """Return the numbers of the rows that are used. They do not depend on where the rows lie, nor on padding."""
    num_rows, num_features = problem.design.shape
    if isinstance(problem.design, TableRows):
        return sample_of(problem.design.num_rows, num_features)
    if problem.weight is None or arrays.is_traced(problem.weight):
        return sample_of(num_rows, num_features)
    return sample_of(num_rows, num_features, int(np.count_nonzero(arrays.on_host(problem.weight))))


def matrix(problem: Linear, params: Any, block: int) -> tuple[jax.Array, jax.Array, Any]:
    """Return the Gram matrix, weighted by the curvatures at ``params``, of so many rows at a time.

    Returns:
        The matrix, ``(d, d)``, or ``(d + 1, d + 1)`` with an intercept; what its diagonal would be, were all rows as
        large as the largest that counts; and the sum of the rows' curvatures by two outputs, ``(k, k)``, or ``None``.
        All in float32 at least: LAPACK takes no narrower numbers, whose sums would soon overflow besides.
    """
    problem, params = jax.tree.map(_wide, (problem, params))
    z = problem.predictions(params)
    given = None if problem.weight is None else problem.weight.astype(z.dtype)
    shares = 1 / len(problem.design) if given is None else given / jnp.sum(given)
    weight = shares * problem.loss.curvature(z, problem.targets)

    def of_rows(x: jax.Array, weight: jax.Array) -> _Upper:
        if problem.intercept:
            x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], 1)
        return _upper(x * weight[:, None], x)

    def add(index: jax.Array, total: _Upper) -> _Upper:
        some = (jax.lax.dynamic_slice_in_dim(rows, index * block, block) for rows in (problem.design, weight))
        return jax.tree.map(jnp.add, total, of_rows(*some))

    whole = len(weight) // block * block
    rest = of_rows(problem.design[whole:], weight[whole:])
    squares = jnp.max(jnp.where(weight[:, None] > 0, problem.design**2, 0), 0)
    largest = jnp.append(squares, 1) if problem.intercept else squares
    gram = _symmetric(jax.lax.fori_loop(0, len(weight) // block, add, rest) if whole else rest)
    coupling = None if problem.loss.coupling is None else problem.loss.coupling(z, shares)
    return gram, jnp.sum(weight) * largest.astype(gram.dtype), coupling


def _wide(x: Any) -> Any:
    dtype = jnp.result_type(x)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.asarray(x, jnp.float32) if is_narrow else x


_Upper = tuple[jax.Array, ...]


def _upper(weighted: jax.Array, x: jax.Array) -> _Upper:
    """Return ``weighted.T @ x``, a symmetric matrix, by some rows at a time, each from the diagonal on."""
    columns, parts = trees.of_columns(weighted), 3 if x.shape[1] >= _WIDE_ENOUGH else 2
    bounds = np.linspace(0, x.shape[1], parts + 1).astype(int).tolist()
    return tuple(
        jnp.matmul(columns[start:stop], x[:, start:], precision=trees.EXACT)
        for start, stop in itertools.pairwise(bounds)
    )


def _symmetric(upper: _Upper) -> jax.Array:
    size = upper[0].shape[1]
    whole = jnp.concatenate([jnp.pad(rows, ((0, 0), (size - rows.shape[1], 0))) for rows in upper])
    return jnp.triu(whole) + jnp.triu(whole, 1).T


def inverse(gram: jax.Array, largest: jax.Array, coupling: Any, l2: Any, intercept: bool) -> Inverse:
    """Return the inverse of what :func:`matrix` gives, and a penalty, which an intercept has not."""
    return Inverse(_of_columns(gram, largest, l2, intercept), None if coupling is None else _of_outputs(coupling))


def _of_outputs(coupling: jax.Array) -> jax.Array:
    """Return the inverse of the outputs' part, which is 1 in the mean: how large the whole is, columns tell.

    To add the same to all outputs of a row changes no softmax: in that direction, too, it is 1.
    """
    count = len(coupling)
    mean = jnp.trace(coupling) / max(count - 1, 1)
    added = 1 / count + _LEAST_BEND * jnp.eye(count, dtype=coupling.dtype)
    factor = jnp.linalg.cholesky(coupling / jnp.where(mean > 0, mean, 1) + added)
    found = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(count, dtype=coupling.dtype))
    return jnp.where((mean > 0) & jnp.all(jnp.isfinite(found)), found, jnp.eye(count, dtype=coupling.dtype))


def _of_columns(gram: jax.Array, largest: jax.Array, l2: Any, intercept: bool) -> jax.Array:
    l2 = jnp.broadcast_to(jnp.asarray(0 if l2 is None else l2, gram.dtype), largest.shape)
    if intercept:
        l2 = l2.at[-1].set(0)
    hessian = gram + jnp.diag(l2)
    # Each column's jitter is on its own scale: what the largest needs would drown the smallest. It is by the largest
    # row, not by the mean: where few rows hold anything, the mean is small, and soon another one. Where columns depend
    # on each other, there are many solutions, and with one jitter for all, the inverse takes what the rows span to what
    # they span: a solver that begins at zero then finds the smallest solution, and with a small penalty needs no
    # iterations for directions in which there is nothing but the penalty.
    all_alike = jnp.full_like(largest, jnp.mean(largest))
    own = jnp.where(largest > 0, largest, all_alike)
    added = jnp.diag(_JITTER * jnp.where(_is_singular(gram), all_alike, own) + jnp.finfo(gram.dtype).tiny)
    scale = _scale(hessian + added)
    factor = jnp.linalg.cholesky((hessian + added) * scale[:, None] * scale)
    found = _of_factor(factor) * scale[:, None] * scale
    # Of values whose squares overflow: each coefficient for itself.
    return jnp.where(jnp.all(jnp.isfinite(found)), found, jnp.diag(scale**2))


def _of_factor(factor: jax.Array) -> jax.Array:
    """Return the inverse of a matrix of which this is the Cholesky factor, by products of halves that are not zero."""
    if len(factor) <= _LAPACK:
        root = _inverse_factor(factor)
        return _product(root.T, root)
    first, below, last = _inverse_in_parts(factor)
    beside = _product(below.T, last)
    above = _product(first.T, first) + _product(below.T, below)
    return jnp.block([[above, beside], [beside.T, _product(last.T, last)]])


def _inverse_factor(factor: jax.Array) -> jax.Array:
    """Return the inverse of a lower triangular matrix. Products use all cores, and LAPACK one."""
    if len(factor) <= _LAPACK:
        return jax.scipy.linalg.solve_triangular(factor, jnp.eye(len(factor), dtype=factor.dtype), lower=True)
    first, below, last = _inverse_in_parts(factor)
    return jnp.block([[first, jnp.zeros_like(below.T)], [below, last]])


def _inverse_in_parts(factor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return three of the quarters of the inverse: above on the left, below it, and the last; the fourth is zero."""
    half = len(factor) // 2
    first, last = _inverse_factor(factor[:half, :half]), _inverse_factor(factor[half:, half:])
    return first, -_product(last, _product(factor[half:, :half], first)), last


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=trees.EXACT)


def _scale(matrix: jax.Array) -> jax.Array:
    """Return what makes the diagonal 1 if it is multiplied with each row and each column; of nothing, 1."""
    diagonal = jnp.diagonal(matrix)
    return jax.lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1))


def _is_singular(matrix: jax.Array) -> jax.Array:
    """Return whether rounding does not tell some column from a combination of others; one of zeros is none."""
    scale = _scale(matrix)
    empty = jnp.diag(jnp.where(jnp.diagonal(matrix) > 0, 0, 1).astype(matrix.dtype))
    pivots = jnp.diagonal(jnp.linalg.cholesky(matrix * scale[:, None] * scale + empty)) ** 2  # NaN: not positive
    return ~jnp.all(pivots > _LEAST_PIVOT * len(matrix) * jnp.finfo(matrix.dtype).eps)


def apply(inverse: Inverse, params: Any) -> Any:
    """Return the inverse times coefficients ``(d,)`` or ``(d, k)``, or a pair of these and an intercept."""
    intercept, dtype = isinstance(params, tuple), jnp.result_type(*jax.tree.leaves(params))
    whole = jnp.concatenate([params[0], params[1][None]]) if intercept else params
    whole = _product(inverse.columns, whole)
    if inverse.outputs is not None:
        whole = _product(whole, inverse.outputs)
    whole = whole.astype(dtype)
    return (whole[:-1], whole[-1]) if intercept else whole


def asked_for(problem: Problem, params: Any, precondition: str | None) -> Any:
    """Return the inverse for a linear problem, if it is asked for or likely to cost less than it saves; else ``None``.

    There is none where the rows' sharding is a type under ``jit``: of such rows, none can be picked.
    """
    if precondition is None or not isinstance(problem, Linear):
        return None
    is_table = isinstance(problem.design, TableRows)
    if not is_table and layout.tells_in_type(problem.design) and _is_traced(problem, params):
        return None
    if isinstance(problem.design, TableRows) and problem.design.shape[1] > MAX_FEATURES:
        if precondition == "gram":
            raise ValueError(
                f"precondition='gram' takes a sample of the rows, which of a table with more than {MAX_FEATURES:,} "
                f"columns is not held; leave precondition out"
            )
        return None
    return prepared(problem, params) if precondition == "gram" or _pays(problem) else None


def _pays(problem: Linear) -> bool:
    return 1 < problem.design.shape[1] <= MAX_FEATURES and _cost(problem) <= _MOST_ITERATIONS


def refresh_after(problem: Linear) -> int:
    """After how many iterations a matrix with the curvatures found by then is worth it: no fewer than it costs."""
    return max(_FEWEST_ITERATIONS, round(_cost(problem)))


def _cost(problem: Linear) -> float:
    """About what a matrix costs, in iterations: operations, of which large products run faster than narrow ones."""
    n, d = problem.design.shape
    used = len(_used(problem))
    outputs = problem.targets.size // problem.design.shape[0] if not problem.loss.classes else _TYPICAL_CLASSES
    matrix = 1.33 * used * d**2 + 2.5 * d**3  # of the products two thirds, of the inverse what is not zero
    return matrix / (4 * n * d * outputs + 2 * d**2 * outputs) / _SPEED_OF_LARGE_PRODUCTS


def prepared(problem: Linear, params: Any) -> Any:
    """Return the inverse, whole on each device that the rows lie on.

    Outside ``jit`` it is computed on one device, which does not make the others do the same work. Where rows are on
    disk and their curvature is the same everywhere, one pass over all of them saves many.
    """
    if isinstance(problem.design, TableRows) and problem.loss.flat and problem.targets.ndim == 1:
        total = problem.read(_products, (), problem.shares(params))[1]
        with placing.without_context():
            total, l2 = arrays.unbound((total, problem.l2))
            found = _inverse(total, jnp.diagonal(total), None, l2, problem.intercept)
        return _beside(found, problem.targets)
    used = _used(problem)
    if _is_traced(problem, params):
        design, targets, weight = jax.tree.map(
            lambda x: x[: used.stop : used.step], (problem.design, problem.targets, problem.weight)
        )
        some = Linear(problem.loss, design, targets, weight, problem.l2, problem.intercept)
        # Of several problems, one matrix after the other: LAPACK's batched functions wait for tasks of their own on the
        # threads that they hold, and where all are held, for ever.
        one_by_one = jax.custom_batching.sequential_vmap(functools.partial(inverse, intercept=problem.intercept))
        return one_by_one(*matrix(some, params, len(some.design) + 1), problem.l2)
    of_rows = functools.partial(_of_concrete, problem.loss, problem.intercept, used)
    with threads.lapack_alone(problem.design.shape[1]):
        found = arrays.on_auto_mesh(of_rows, problem.design, problem.targets, problem.weight, problem.l2, params)
        return jax.block_until_ready(found)


def _products(block: Block, _: Any, shares: jax.Array) -> Any:
    """Return the part of the Gram matrix that is a block's, of a loss of which all curvatures are 1."""
    x = _wide(block.design)
    if block.intercept:
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], 1)
    return (), _symmetric(_upper(x * shares[:, None], x))


def _of_concrete(
    loss: Loss, intercept: bool, used: range, design: jax.Array, targets: Any, weight: Any, l2: Any, params: Any
) -> Inverse:
    beside = targets if isinstance(design, TableRows) else design
    with placing.without_context():
        numbers = np.asarray(used)
        some, at = _some_of(design, numbers)
        targets, weight = jax.tree.map(lambda x: arrays.on_host(x)[at], (targets, weight))
        l2, params = arrays.unbound((l2, params))
        # Two programs: in one, XLA lays the product out for the factorisation, and takes half as long again.
        found = _matrix(loss, intercept, some, targets, weight, l2, params)
        found = _inverse(*found, l2, intercept)
    return _beside(found, beside)


def _beside(found: Inverse, other: Any) -> Inverse:
    return jax.tree.map(lambda x: arrays.whole_beside(x, other), found)


def _some_of(design: Any, numbers: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return rows by their numbers, and where the other values of these are."""
    if not isinstance(design, TableRows):
        return arrays.some_rows(design, numbers), numbers
    some = design.some
    return some if design.shift is None else some - np.asarray(design.shift), design.places(numbers)


def _is_traced(problem: Linear, params: Any) -> bool:
    return arrays.is_traced((problem.design, problem.targets, problem.weight, problem.l2, params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _matrix(
    loss: Loss, intercept: bool, design: Any, targets: Any, weight: Any, l2: Any, params: Any
) -> tuple[jax.Array, jax.Array, Any]:
    return matrix(Linear(loss, design, targets, weight, l2, intercept), params, _BLOCK)


_inverse = jax.jit(inverse, static_argnums=4)
