"""Whether rows may be added to a batch is said rightly: it is held against what changes when one row is changed.

``Parallel`` says it when the rows of a batch do not divide over the devices; it is traced for that, and not compiled.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import paraxis as px

N, M, K = 5, 6, 3  # rows, features, classes
MET, CAUTIOUS = "rows meet", "rows do not meet, but it is refused"
COUNTED = "rows do not meet, but JAX writes it with their number"
RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


X, W, V = _normal(N, M), _normal(M, M), _normal(M, K)
SQUARE, IMAGES, WORDS = _normal(N, N), _normal(N, 8, 8, 2), _normal(N, 4, M)
KERNEL, TABLE, LABELS = _normal(3, 3, 2, 4), _normal(K, M), RNG.integers(0, K, N)
ORDER = np.array([3, 0, 4, 1, 2])


def _mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w + 1.0) @ v


def _conv_net(x: jax.Array, kernel: jax.Array) -> jax.Array:
    x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(x.shape[0], -1)


def _mean_pool(x: jax.Array, window: tuple[int, ...]) -> jax.Array:
    return lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 1, 1), "SAME")


def _layer_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _batch_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5)


def _entropy_along(x: jax.Array, v: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ v), labels[:, None], 1)[:, 0]


def _entropy_one_hot(x: jax.Array, v: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.sum(jax.nn.log_softmax(x @ v) * jax.nn.one_hot(labels, K), -1)


def _entropy_arange(x: jax.Array, v: jax.Array, labels: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(x @ v)[jnp.arange(len(x)), labels]


def _attention(x: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)


def _rnn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(h: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w + word)
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros((len(x), M)), jnp.moveaxis(x, 1, 0))


def _running(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(lambda total, row: (total + row, total * row), jnp.zeros(M), x)


def _numbered(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(lambda i, row: (i + 1.0, row @ w * i), jnp.zeros(()), x)


def _until_small(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.1, lambda x: x / 2.0, x)


def _either(x: jax.Array, flag: jax.Array) -> jax.Array:
    return lax.cond(flag, lambda x: x * 2.0, lambda x: jnp.zeros_like(x), x)


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.minimum(x, 1.0)


_clipped.defvjp(lambda x: (_clipped(x), None), lambda _, g: (g,))


def _dropout(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)


def _choleskys(x: jax.Array) -> jax.Array:
    return jnp.linalg.cholesky(jnp.einsum("bij,bkj->bik", x, x) + 9.0 * jnp.eye(4))


def _convolved(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


Case = tuple[Callable[..., Any], Sequence[Any], Sequence[int | None], Sequence[int | str | None]]

# function, arguments, where each has rows, where each result is said to have them (None: it has none)
CASES: dict[str, Case] = {
    # models
    "mlp": (_mlp, (X, W, V), (0, None, None), [0]),
    "jitted mlp": (jax.jit(_mlp), (X, W, V), (0, None, None), [0]),
    "conv net": (_conv_net, (IMAGES, KERNEL), (0, None), [0]),
    "conv with rows as height": (_convolved, (IMAGES, KERNEL), (1, None), [MET]),
    "conv with rows as kernels": (_convolved, (IMAGES, KERNEL), (None, 3), [CAUTIOUS]),
    "pool along features": (lambda x: _mean_pool(x, (1, 2, 2, 1)), (IMAGES,), (0,), [0]),
    "pool over rows": (lambda x: _mean_pool(x, (2, 1, 1, 1)), (IMAGES,), (0,), [MET]),
    "attention": (_attention, (WORDS, W), (0, None), [0]),
    "attention over rows": (_attention, (WORDS, W), (1, None), [MET]),
    "rnn": (_rnn, (WORDS, W), (0, None), [0, 1]),
    "layer norm": (_layer_norm, (X,), (0,), [0]),
    "batch norm in training": (_batch_norm, (X,), (0,), [MET]),
    "batch norm in use": (lambda x, m: (x - m) / 2.0, (X, _normal(M)), (0, None), [0]),
    "relu, gelu, silu": (lambda x: jax.nn.relu(x) + jax.nn.gelu(x) + jax.nn.silu(x), (X,), (0,), [0]),
    "dropout": (_dropout, (X, KEY), (0, None), [0]),
    "embedding": (lambda table, i: table[i], (TABLE, LABELS), (None, 0), [0]),
    "embedding, columns": (lambda table, i: table[:, i], (TABLE, LABELS), (None, 0), [1]),
    "embedding of rows": (lambda x, i: x[i], (X, LABELS), (0, 0), [MET]),
    # losses
    "mean loss": (lambda x, v: jnp.mean((x @ v) ** 2), (X, V), (0, None), [MET]),
    "loss per row and its sum": (lambda x: (x.sum(1), x.sum(1).sum(), x * 2.0), (X,), (0,), [0, MET, 0]),
    "entropy, take_along_axis": (_entropy_along, (X, V, LABELS), (0, None, 0), [0]),
    "entropy, one_hot": (_entropy_one_hot, (X, V, LABELS), (0, None, 0), [0]),
    "entropy, arange": (_entropy_arange, (X, V, LABELS), (0, None, 0), [CAUTIOUS]),
    "take_along_axis over rows": (lambda x: jnp.take_along_axis(x, ORDER[:, None], 0), (X,), (0,), [MET]),
    "softmax": (jax.nn.softmax, (X,), (0,), [0]),
    "softmax over rows": (lambda x: jax.nn.softmax(x, 0), (X,), (0,), [MET]),
    "gradient per row": (jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))), (X,), (0,), [0]),
    "gradient of weights": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), (W, X), (None, 0), [MET]),
    # products
    "gram of features": (lambda x: x.T @ x, (X,), (0,), [MET]),
    "gram of rows": (lambda x: x @ x.T, (X,), (0,), [MET]),
    "batched matmul": (lambda x, y: x @ y.mT, (WORDS, WORDS), (0, 0), [0]),
    "rows on the right": (lambda w, x: w @ x, (W, X.T), (None, 1), [1]),
    "rows between": (lambda x, w: jnp.einsum("ibj,jk->ibk", x, w), (WORDS, W), (1, None), [1]),
    "vmapped": (jax.vmap(lambda x, w: jnp.sum(x @ w), (0, None)), (WORDS, W), (0, None), [0]),
    "vmapped along 1": (jax.vmap(jnp.cumsum, 1, 1), (X,), (1,), [1]),
    # moves
    "x[:, idx]": (lambda x: x[:, jnp.array([2, 0])], (X,), (0,), [0]),
    "x[idx]": (lambda x: x[ORDER], (X,), (0,), [MET]),
    "x[0]": (lambda x: x[0], (X,), (0,), [MET]),
    "x[1:]": (lambda x: x[1:], (X,), (0,), [MET]),
    "x[:, 1::2]": (lambda x: x[:, 1::2], (X,), (0,), [0]),
    "x[:, i]": (lambda x, i: x[:, i], (X, 2), (0, None), [COUNTED]),
    "x[i]": (lambda x, i: x[i], (X, 2), (0, None), [MET]),
    "flatten features": (lambda x: x.reshape(len(x), -1), (WORDS,), (0,), [0]),
    "merge rows and features": (lambda x: x.reshape(-1), (X,), (0,), [MET]),
    "merge and part again": (lambda x: x.reshape(-1).reshape(-1, M), (X,), (0,), [CAUTIOUS]),
    "same size elsewhere": (lambda x: x.reshape(M, -1), (X,), (0,), [MET]),
    "part features": (lambda x: x.reshape(-1, 2, 3), (X,), (0,), [0]),
    "part what is before": (lambda x: x.reshape(2, 3, -1), (X.T,), (1,), [2]),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), (WORDS,), (0,), [1]),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, *x.shape)), (X,), (0,), [1]),
    "expand and squeeze": (lambda x: x[:, None, :, None].squeeze(1), (X,), (0,), [0]),
    "reverse features": (lambda x: x[:, ::-1], (X,), (0,), [0]),
    "reverse rows": (lambda x: x[::-1], (X,), (0,), [MET]),
    "concatenate features": (lambda x: jnp.concatenate([x, x * 2.0], 1), (X,), (0,), [0]),
    "concatenate rows": (lambda x: jnp.concatenate([x, x * 2.0]), (X,), (0,), [MET]),
    "concatenate in front of rows": (lambda x, w: jnp.concatenate([w, x]), (X, W), (0, None), [CAUTIOUS]),
    "stack": (lambda x: jnp.stack([x, x * 2.0]), (X,), (0,), [1]),
    "stack behind": (lambda x: jnp.stack([x, x * 2.0], -1), (X,), (0,), [0]),
    "tile features": (lambda x: jnp.tile(x, (2, 1, 3)), (X,), (0,), [1]),
    "tile rows": (lambda x: jnp.tile(x, (2, 1)), (X,), (0,), [CAUTIOUS]),
    "split": (lambda x: tuple(jnp.split(x, 2, 1)), (X,), (0,), [0, 0]),
    "split rows": (lambda x: tuple(jnp.split(x, [2])), (X,), (0,), [MET, MET]),
    "pad features": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), (X,), (0,), [0]),
    "pad rows": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), (X,), (0,), [MET]),
    "roll rows": (lambda x: jnp.roll(x, 1, 0), (X,), (0,), [MET]),
    "update": (lambda x: lax.dynamic_update_slice(x, x[:, :2], (0, 3)), (X,), (0,), [0]),
    "update one row": (lambda x: lax.dynamic_update_slice(x, x[:, :2].T[:, :2], (3, 1)), (X,), (0,), [MET]),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32) >> 3, (X,), (0,), [0]),
    "bits of rows put together": (
        lambda x: lax.bitcast_convert_type(x.T.astype(jnp.int16).reshape(3, -1, 2), jnp.int32),
        (_normal(2, M),),
        (0,),
        [MET],
    ),
    "plus row number": (lambda x: x + jnp.arange(len(x))[:, None], (X,), (0,), [0]),
    # along a dimension
    "sort": (lambda x: jnp.sort(x), (X,), (0,), [0]),
    "argsort": (lambda x: jnp.argsort(x), (X,), (0,), [0]),
    "sort rows": (lambda x: jnp.sort(x, 0), (X,), (0,), [MET]),
    "top_k": (lambda x: tuple(lax.top_k(x, 2)), (X,), (0,), [0, 0]),
    "top_k over rows": (lambda x: lax.top_k(x.T, 2)[0], (X,), (0,), [MET]),
    "argmax": (lambda x: jnp.argmax(x, 0), (X.T,), (1,), [0]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (X,), (0,), [0]),
    "cumsum over rows": (lambda x: jnp.cumsum(x, 0), (X,), (0,), [MET]),
    "any": (lambda x: (x > 0).any(0), (X.T,), (1,), [0]),
    "clip": (lambda x: jnp.clip(x, 0.0, 1.0), (X,), (0,), [0]),
    # bodies
    "checkpoint": (jax.checkpoint(_mlp), (X, W, V), (0, None, None), [0]),
    "gradient of checkpoint": (jax.vmap(jax.grad(jax.checkpoint(lambda x: jnp.sin(x).sum()))), (X,), (0,), [0]),
    "custom_vjp": (_clipped, (X,), (0,), [0]),
    "barrier": (lambda x, y: lax.optimization_barrier((x * 2.0, y.sum(0), y)), (X, X), (0, 0), [0, MET, 0]),
    "map over rows": (lambda x, w: lax.map(lambda row: jnp.sum(row @ w), x), (X, W), (0, None), [0]),
    "scan over rows, counting": (_numbered, (X, W), (0, None), [None, 0]),
    "scan over rows, running sum": (_running, (X,), (0,), [MET, MET]),
    "scan over features": (lambda x: lax.scan(lambda c, a: (c + a, c), jnp.zeros(len(x)), x.T), (X,), (0,), [0, 1]),
    "fori_loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c) + i, x), (X,), (0,), [0]),
    "while decided by rows": (_until_small, (X,), (0,), [MET]),
    "cond": (_either, (X, True), (0, None), [0]),
    "cond decided by rows": (lambda x: _either(x, x.sum() > X.sum()), (X,), (0,), [MET]),
    "vmapped cond": (jax.vmap(lambda x: _either(x, x.sum() > 0)), (X,), (0,), [0]),
    # no rows, or no rule
    "no rows": (lambda x, w: (w.sum(0), x), (X, W), (0, None), [None, 0]),
    "cholesky": (_choleskys, (WORDS,), (0,), [CAUTIOUS]),
    "fft": (lambda x: jnp.fft.fft(x).real, (X,), (0,), [CAUTIOUS]),
    "fft over rows": (lambda x: jnp.fft.fft(x, axis=0).real, (X,), (0,), [MET]),
}


def _refused(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rows: Sequence[int | None],
    take: Callable[[list[Any]], Any],
    reduce: str = "concat",
) -> str | None:
    """Why rows may not be added to those of a call, by what is taken of its results; ``None``: they may."""
    num_rows = next(np.shape(x)[dim] for x, dim in zip(args, rows, strict=True) if dim is not None)
    mesh = mesh_of(3 if num_rows % 3 else 4)
    body = lambda *args: take(jax.tree.leaves(fn(*args)))  # noqa: E731
    try:
        jax.eval_shape(px.Parallel(body, batch_axis=tuple(rows), reduce=reduce, mesh=mesh), *args)
    except px.ShapeError as error:
        message = str(error)
    else:
        return None
    found = re.search(r"would change the answer: (.*)\. Give a multiple of", message)
    assert found is not None, message
    return found[1]


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("device",))


def _require(answer: int | str | None, fn: Callable[..., Any], args: Any, rows: Any, number: int = 0) -> None:
    """One of a function's results is said to have its rows there, to have none, or is refused."""

    def first(dim: int) -> str | None:
        return _refused(fn, args, rows, lambda results: jnp.moveaxis(results[number], dim, 0))

    if answer is None:
        assert _refused(fn, args, rows, lambda results: results[number], "same") is None
    elif isinstance(answer, int):
        assert first(answer) is None
        for dim in range(jax.tree.leaves(jax.eval_shape(fn, *args))[number].ndim):
            assert dim == answer or first(dim) == "result does not have the rows along its first axis"
    else:
        why = _refused(fn, args, rows, lambda results: results[number])
        assert why is not None
        assert ("uses the number of rows" if answer == COUNTED else "result is not one value per row: ") in why


def _changed(args: Sequence[Any], rows: Sequence[int | None], row: int) -> list[Any]:
    """The arguments with other values in one row."""
    rng, changed = np.random.default_rng(row), list(args)
    for k, dim in enumerate(rows):
        if dim is not None:
            x = np.moveaxis(np.array(args[k]), dim, 0)
            x[row] = (x[row] + 1) % K if x.dtype.kind == "i" else 3.0 * rng.normal(size=x[row].shape)
            changed[k] = np.moveaxis(x, 0, dim)
    return changed


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("fn", "args", "rows", "expected"), [pytest.param(*case, id=name) for name, case in CASES.items()]
)
def test_said_as_it_is(
    fn: Callable[..., Any], args: Sequence[Any], rows: Sequence[int | None], expected: Sequence[int | str | None]
) -> None:
    assert len(jax.tree.leaves(jax.eval_shape(fn, *args))) == len(expected)
    for k, answer in enumerate(expected):
        _require(answer, fn, args, rows, k)

    run = jax.jit(fn)
    before = [np.asarray(x) for x in jax.tree.leaves(run(*args))]
    num_rows = next(np.shape(x)[dim] for x, dim in zip(args, rows, strict=True) if dim is not None)
    after = [[np.asarray(x) for x in jax.tree.leaves(run(*_changed(args, rows, j)))] for j in range(num_rows)]
    for k, answer in enumerate(expected):
        changes = [before[k] != after[j][k] for j in range(num_rows)]
        if isinstance(answer, int):
            assert before[k].shape[answer] == num_rows
            others = [np.delete(change, j, answer) for j, change in enumerate(changes)]
            assert not any(other.any() for other in others)
            assert any(change.any() for change in changes)
        elif answer is None:
            assert not any(change.any() for change in changes)
        elif answer is MET:
            assert not _by_row(changes)


def _by_row(changes: Sequence[np.ndarray]) -> bool:
    """Whether along some dimension a change of row ``j`` shows at ``j`` only."""
    return any(
        size == len(changes) and not any(np.delete(change, j, dim).any() for j, change in enumerate(changes))
        for dim, size in enumerate(changes[0].shape)
    )


def test_a_mixed_argument_of_a_call_stays_mixed_and_alone() -> None:
    def fn(x: jax.Array) -> Any:
        return jax.jit(lambda x, y: (x + y, y * 2.0))(x[::-1], x)

    _require(MET, fn, (X,), (0,), 0)
    _require(0, fn, (X,), (0,), 1)
    why = _refused(fn, (X,), (0,), lambda results: results[0])
    assert why == "result is not one value per row: rev over the rows"


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.ones(len(x)).sum(), MET),
        (lambda x: jax.jit(lambda: jnp.ones(len(x)).sum())(), MET),
        (lambda x: jnp.arange(len(x)), 0),
        (lambda x: jax.random.bernoulli(KEY, 0.5, x.shape) * x, 0),
        (lambda x: jnp.zeros((M, len(x))), 1),
        (lambda x: jnp.zeros(2 * len(x)), MET),
        (lambda x: jnp.zeros(M), None),
    ],
)
def test_a_value_shaped_by_the_number_of_rows_has_rows(fn: Callable[..., Any], expected: Any) -> None:
    _require(expected, fn, (X,), (0,))


def test_the_sizes_of_other_things_are_not_taken_for_the_number_of_rows() -> None:
    """Whatever numbers of rows it is looked at with, none of these is one of them."""
    sizes = [n for n in range(1, 150) if all(n % k for k in range(2, n))]

    def fn(x: jax.Array, others: list[Any]) -> jax.Array:
        return x * sum(jnp.ones(size).sum() + other.sum() for size, other in zip(sizes, others, strict=True))

    assert _refused(fn, (X, [np.ones(size, np.float32) for size in sizes]), (0, None), tuple) is None
