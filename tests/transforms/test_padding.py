"""Whether rows may be added to a batch, held against what changes when one row is changed.

``Parallel`` says it when the rows of a batch do not divide over the devices; it is traced for that, and not compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Normed, mesh_of

N, M, K = 5, 6, 3  # rows, features, classes
MET, CAUTIOUS = "rows meet", "rows do not meet, but it is refused"
RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


X, W, V = _normal(N, M), _normal(M, M), _normal(M, K)
IMAGES, WORDS = _normal(N, 8, 8, 2), _normal(N, 4, M)
KERNEL, TABLE, LABELS = _normal(3, 3, 2, 4), _normal(K, M), RNG.integers(0, K, N)
ORDER = np.array([3, 0, 4, 1, 2])


def _mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w + 1.0) @ v


def _convolved(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _conv_net(x: jax.Array, kernel: jax.Array) -> jax.Array:
    x = jax.nn.relu(_convolved(x, kernel))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").reshape(len(x), -1)


def _attention(x: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)


def _rnn(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(h: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ w + word)
        return h, h.sum(-1)

    return lax.scan(step, jnp.zeros((len(x), M)), jnp.moveaxis(x, 1, 0))[0]


def _entropy_along(x: jax.Array, v: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ v), labels[:, None], 1)[:, 0]


def _either(x: jax.Array, flag: jax.Array) -> jax.Array:
    return lax.cond(flag, lambda x: x * 2.0, lambda x: jnp.zeros_like(x), x)


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.minimum(x, 1.0)


_clipped.defvjp(lambda x: (_clipped(x), None), lambda _, g: (g,))

Case = tuple[Callable[..., Any], Sequence[Any], Sequence[int | None], int | str]

# function, arguments, where each has rows, where the result has them
CASES: dict[str, Case] = {
    # models
    "jitted mlp": (jax.jit(_mlp), (X, W, V), (0, None, None), 0),
    "conv net": (_conv_net, (IMAGES, KERNEL), (0, None), 0),
    "pool over rows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1, 1, 1), (1, 1, 1, 1), "SAME"),
        (IMAGES,),
        (0,),
        MET,
    ),
    "attention": (_attention, (WORDS, W), (0, None), 0),
    "rnn": (_rnn, (WORDS, W), (0, None), 0),
    "batch norm in training": (lambda x: (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5), (X,), (0,), MET),
    "dropout": (lambda x, key: jax.random.bernoulli(key, 0.5, x.shape) * x, (X, KEY), (0, None), 0),
    "embedding": (lambda table, i: table[i], (TABLE, LABELS), (None, 0), 0),
    # losses
    "mean loss": (lambda x, v: jnp.mean((x @ v) ** 2), (X, V), (0, None), MET),
    "loss per row beside a sum that is not used": (lambda x: (x.sum(1), x.sum())[0], (X,), (0,), 0),
    "entropy, take_along_axis": (_entropy_along, (X, V, LABELS), (0, None, 0), 0),
    "softmax": (jax.nn.softmax, (X,), (0,), 0),
    "gradient per row": (jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2))), (X,), (0,), 0),
    "gradient of weights": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), (W, X), (None, 0), MET),
    # products
    "batched matmul": (lambda x, y: x @ y.mT, (WORDS, WORDS), (0, 0), 0),
    # moves
    "x[:, idx]": (lambda x: x[:, jnp.array([2, 0])], (X,), (0,), 0),
    "columns by a number of each row": (lambda x, i: x[:, i].sum(1), (X, LABELS), (0, 0), MET),
    "x[idx]": (lambda x: x[ORDER], (X,), (0,), MET),
    "x[1:]": (lambda x: x[1:], (X,), (0,), MET),
    "flatten features": (lambda x: x.reshape(len(x), -1), (WORDS,), (0,), 0),
    "merge rows and features": (lambda x: x.reshape(-1), (X,), (0,), MET),
    "part what is before": (lambda x: x.reshape(2, 3, -1), (X.T,), (1,), 2),
    "pad rows": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), (X,), (0,), MET),
    "roll rows": (lambda x: jnp.roll(x, 1, 0), (X,), (0,), MET),
    "rows written as columns": (
        lambda x: lax.dynamic_update_slice(x, x[:, :1].T, (0, 0)),
        (_normal(N, 200),),
        (0,),
        MET,
    ),
    "plus row number": (lambda x: x + jnp.arange(len(x))[:, None], (X,), (0,), 0),
    # along a dimension
    "sort rows": (lambda x: jnp.sort(x, 0), (X,), (0,), MET),
    "cumsum over rows": (lambda x: jnp.cumsum(x, 0), (X,), (0,), MET),
    "fft": (lambda x: jnp.fft.fft(x).real, (X,), (0,), CAUTIOUS),
    # bodies
    "custom_vjp": (_clipped, (X,), (0,), 0),
    "map over rows": (lambda x, w: lax.map(lambda row: jnp.sum(row @ w), x), (X, W), (0, None), CAUTIOUS),
    "scan over features": (lambda x: lax.scan(lambda c, a: (c + a, c), x[:, 0], x.T)[0], (X,), (0,), 0),
    "while decided by rows": (
        lambda x: lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.1, lambda x: x / 2.0, x),
        (X,),
        (0,),
        MET,
    ),
    "cond": (_either, (X, True), (0, None), 0),
}


def _is_refused(fn: Callable[..., Any], args: Sequence[Any], rows: Sequence[int | None]) -> bool:
    num_rows = next(np.shape(x)[dim] for x, dim in zip(args, rows, strict=True) if dim is not None)
    mesh = mesh_of(3 if num_rows % 3 else 4)
    try:
        jax.eval_shape(px.Parallel(fn, batch_axis=tuple(rows), mesh=mesh), *args)
    except px.ShapeError as error:
        return "could change the answer: " in str(error)
    return False


def _changed(args: Sequence[Any], rows: Sequence[int | None], row: int) -> list[Any]:
    """The arguments with other values in one row."""
    rng, changed = np.random.default_rng(row), list(args)
    for k, dim in enumerate(rows):
        if dim is not None:
            x = np.moveaxis(np.array(args[k]), dim, 0)
            x[row] = (x[row] + 1) % K if x.dtype.kind == "i" else 3.0 * rng.normal(size=x[row].shape)
            changed[k] = np.moveaxis(x, 0, dim)
    return changed


@pytest.mark.parametrize(
    ("fn", "args", "rows", "expected"), [pytest.param(*case, id=name) for name, case in CASES.items()]
)
def test_said_as_it_is(
    fn: Callable[..., Any], args: Sequence[Any], rows: Sequence[int | None], expected: int | str
) -> None:
    if isinstance(expected, int):
        for dim in range(jax.eval_shape(fn, *args).ndim):
            assert _is_refused(lambda *args, dim=dim: jnp.moveaxis(fn(*args), dim, 0), args, rows) == (dim != expected)
    else:
        assert _is_refused(fn, args, rows)
    run = jax.jit(fn)
    before = np.asarray(run(*args))
    num_rows = next(np.shape(x)[dim] for x, dim in zip(args, rows, strict=True) if dim is not None)
    changes = [before != np.asarray(run(*_changed(args, rows, j))) for j in range(num_rows)]
    if isinstance(expected, int):
        assert before.shape[expected] == num_rows
        assert not any(np.delete(change, j, expected).any() for j, change in enumerate(changes))
        assert any(change.any() for change in changes)
    elif expected == MET:
        by_row = [
            size == num_rows and not any(np.delete(change, j, dim).any() for j, change in enumerate(changes))
            for dim, size in enumerate(before.shape)
        ]
        assert not any(by_row)


def test_the_sizes_of_other_things_are_not_taken_for_the_number_of_rows() -> None:
    sizes = [n for n in range(1, 350) if all(n % k for k in range(2, n))]

    def fn(x: jax.Array, others: list[Any]) -> jax.Array:
        return x * sum(jnp.ones(size).sum() + other.sum() for size, other in zip(sizes, others, strict=True))

    assert not _is_refused(fn, (X, [np.ones(size, np.float32) for size in sizes]), (0, None))


ROW_WISE: dict[str, Callable[..., Any]] = {
    "a module": lambda net, x: net(x),
    "one number per row": lambda net, x: net(x).argmax(-1),
    "several results": lambda net, x: {"y": net(x), "norm": [(x**2).sum(-1), net(x) > 0], "rate": jnp.asarray(0.1)},
    "masked softmax": lambda net, x: jax.nn.softmax(jnp.where(net(x) > 0, net(x), -jnp.inf), -1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 3, 13, 237])
@pytest.mark.parametrize("name", ROW_WISE)
def test_any_number_of_rows(name: str, rows: int) -> None:
    net, x = MLP(nnx.Rngs(0)), values(rows, 3)
    reduce = {"y": "concat", "norm": "concat", "rate": "same"} if name == "several results" else "concat"
    got = jax.tree.map(np.asarray, px.Parallel(ROW_WISE[name], net, reduce=reduce)(x))
    assert_close(got, jax.tree.map(np.asarray, ROW_WISE[name](net, x)), rtol=1e-5)


def test_fixed_batch_statistics_and_keys_of_rows_may_be_padded() -> None:
    net, x = Normed(nnx.Rngs(0)), values(13, 3)
    net.norm.mean[...] = values(8)
    net.eval()
    assert_close(np.asarray(px.Parallel(net)(x)), np.asarray(net(x)), rtol=1e-5)
    keys = jax.random.split(jax.random.key(0), 13)
    noisy = jax.vmap(lambda row, key: row + jax.random.normal(key, row.shape))
    assert_close(np.asarray(px.Parallel(noisy)(x, keys)), np.asarray(noisy(x, keys)))


def test_padding_has_the_derivative_of_one_device() -> None:
    net, x = MLP(nnx.Rngs(0)), values(7, 3)
    fast = px.Parallel(net, mesh=mesh_of(3))
    for wrap in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        expected = jax.grad(lambda x: (net(x) ** 2).sum())(x)
        assert_close(np.asarray(wrap(lambda x: (fast(x) ** 2).sum())(x)), np.asarray(expected), rtol=1e-5)


def _step(net: MLP, x: jax.Array) -> None:
    gradients, _ = px.GradValues(lambda net: (net(x) ** 2).mean(), net)()
    for v, g in zip(px.variables(net), px.pmean(list(gradients), "device"), strict=True):
        v[...] -= g


# what is refused, how its results are combined, and why
REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a mean loss": (lambda net, x: (net(x) ** 2).mean(), "mean", "rows may meet in reduce_sum"),
    "a step": (_step, "concat", "rows may meet in"),
    "a collective": (lambda net, x: x - px.pmean(x, "device"), "concat", "rows may meet in psum"),
    "a variable": (
        lambda net, x: net.last.bias.set_value(x[:, 0]),
        "concat",
        "a variable is written with what depends",
    ),
    "rows elsewhere": (lambda net, x: net(x).T, "concat", "result does not have the rows along its first axis"),
    "rows by a mean": (lambda net, x: net(x), "mean", "result is reduced by 'mean', and the devices have shares of"),
    "a constant": (lambda net, x: jnp.ones(4), "concat", "result does not have the rows along its first axis"),
    "one row": (
        lambda net, x: net(x).sum() if len(x) == 2 else net(x),
        "concat",
        "with 2 rows per device the function",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_would_change_the_answer_is_refused(name: str) -> None:
    body, reduce, reason = REFUSED[name]
    net = MLP(nnx.Rngs(0))
    before = [v[...] for v in px.variables(net)]
    message = rf"10 rows do not divide over 8 devices.*{reason}.*Give a multiple of 8 rows.*px\.train_step"
    with pytest.raises(px.ShapeError, match=message):
        px.Parallel(body, net, reduce=reduce)(values(10, 3))
    assert all(v[...] is old for v, old in zip(px.variables(net), before, strict=True))


def test_results_that_are_not_rows_are_not_cut() -> None:
    x = values(10, 3)
    got = px.Parallel(lambda x: (x, x.mean(0), x.sum()), check=False)(x)
    assert [y.shape for y in got] == [(10, 3), (24,), (8,)]
    assert_close(np.asarray(got[0]), np.asarray(x))
    assert_close(np.asarray(got[1])[:3], np.asarray(x[:2]).mean(0))
