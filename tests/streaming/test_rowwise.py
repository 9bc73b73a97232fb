"""No public face: ``Parallel`` asks with other numbers of rows, with which these functions, or single rows, cannot be.

Where the rows come to lie in results is read from a trace: see also the tests of what ``Parallel`` says.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paraxis._jax import rowwise

N, M, K = 5, 6, 3  # rows, features, classes
UNSEEN = 10**9 + 7  # a number of rows that no value is shaped by: only those that come from the rows have them
MET = "rows meet"
RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


X, SQUARE, WORDS = _normal(N, M), _normal(N, N), _normal(N, 4, M)


def _mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w + 1.0) @ v


def _swapping(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, c: c.T + 1.0, x)


def _transposed_or_not(x: jax.Array, flag: jax.Array) -> jax.Array:
    return lax.cond(flag, lambda x: x.T, lambda x: x, x)


# function, arguments, where each has rows, where its result is said to have them
CASES: dict[str, tuple[Callable[..., Any], Sequence[Any], Sequence[int | None], int | str]] = {
    "rows in the weights too": (_mlp, (SQUARE, _normal(N, N), _normal(N, K)), (0, 0, None), MET),
    "batched matmul, one with rows": (lambda x, y: x @ y.mT, (WORDS, WORDS), (None, 0), 0),
    "rows along two dimensions": (lambda x: x + x.T, (SQUARE,), (0,), MET),
    "loop that turns rows": (_swapping, (SQUARE,), (0,), MET),
    "some columns written": (lambda x: x.at[:, jnp.array([0, 2])].add(x[:, :2]), (SQUARE,), (0,), 0),
    "a column each written": (
        jax.vmap(lambda x, at: x.at[at].set(7.0 * x[0])),
        (SQUARE, np.arange(N) % 3),
        (0, None),
        0,
    ),
    "each row written to the next": (lambda x: x.at[(jnp.arange(N) + 1) % N].add(x), (SQUARE,), (0,), MET),
    "written by rows": (lambda x: jnp.zeros((N, N)).at[:, 1].set(x[:, 0]), (SQUARE,), (0,), 0),
    "cond with rows turned": (_transposed_or_not, (SQUARE, True), (0, None), MET),
}


def _said(fn: Callable[..., Any], args: Sequence[Any], rows: Sequence[int | None]) -> list[rowwise.Rows]:
    return rowwise.results(jax.make_jaxpr(fn)(*args), rows, count=UNSEEN)


@pytest.mark.parametrize(("fn", "args", "rows", "expected"), CASES.values(), ids=CASES.keys())
def test_said_as_it_is(
    fn: Callable[..., Any], args: Sequence[Any], rows: Sequence[int | None], expected: int | str
) -> None:
    """Rows that are turned round, and back or not, are taken to have met."""
    (answer,) = _said(fn, args, rows)
    assert isinstance(answer, rowwise.Mixed) if isinstance(expected, str) else answer == expected
    run = jax.jit(fn)
    before = np.asarray(run(*args))
    for j in range(N):
        changed = list(args)
        for k, dim in enumerate(rows):
            if dim is not None:
                changed[k] = np.array(args[k])
                np.moveaxis(changed[k], dim, 0)[j] += 1
        change = before != np.asarray(run(*changed))
        assert change.any()
        assert np.delete(change, j, 0).any() == isinstance(expected, str)


def test_a_value_with_rows_in_two_dimensions_is_named() -> None:
    assert _said(_swapping, [SQUARE], [0]) == [rowwise.Mixed("scan with rows in two dimensions of one value")]


@pytest.mark.parametrize(
    ("fn", "rows", "expected"),
    [
        pytest.param(lambda x: x + 1.0, 0, 0, id="kept"),
        pytest.param(lambda x: x + jnp.ones((N, M)), 0, MET, id="row repeated by an operation"),
        pytest.param(lambda x: jnp.broadcast_to(x, (N, M)), 0, MET, id="row repeated"),
        pytest.param(lambda x: x + jnp.ones((1, 1)), 0, 0, id="feature repeated"),
        pytest.param(lambda x: x[0], 0, MET, id="row dimension dropped"),
        pytest.param(lambda x: x.reshape(M), 0, MET, id="row dimension merged"),
        pytest.param(lambda x: x.reshape(M, 1), 0, MET, id="another dimension of size 1"),
        pytest.param(lambda x: x.reshape(1, 1, M), 0, MET, id="either of two"),
        pytest.param(lambda x: x[None], 0, 1, id="a dimension in front"),
        pytest.param(lambda x: jnp.sum(x, 0), 0, MET, id="summed"),
    ],
)
def test_a_single_row_is_told_by_its_position(
    fn: Callable[[jax.Array], jax.Array], rows: int, expected: int | str
) -> None:
    (answer,) = _said(fn, [X[:1]], [rows])
    assert isinstance(answer, rowwise.Mixed) if isinstance(expected, str) else answer == expected


def test_a_mixed_argument_stays_mixed_and_alone() -> None:
    closed = jax.make_jaxpr(jax.jit(lambda x, y: (x + y, y * 2.0)))(X, X)
    mixed = rowwise.Mixed("elsewhere")
    assert rowwise.results(closed, [mixed, 0], count=UNSEEN) == [mixed, 0]
