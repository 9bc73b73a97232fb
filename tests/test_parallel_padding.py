"""Rows that do not divide over the devices: shares of several sizes, the last of which is shorter, or has none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._modules import MLP, Normed, mesh_of
from tests._support import assert_close, values

LABELS = np.random.default_rng(0).integers(0, 4, 237)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    # what takes each row for itself, whatever it does with it
    "a module": lambda net, x, y: net(x),
    "one number per row": lambda net, x, y: net(x).argmax(-1),
    "several results": lambda net, x, y: {"y": net(x), "norm": [(x**2).sum(-1), net(x) > 0]},
    "entropy by numbers of rows": lambda net, x, y: -jax.nn.log_softmax(net(x))[jnp.arange(len(x)), y],
    "a loop over rows": lambda net, x, y: jax.lax.map(net, x),
    # what sees its share
    "centred": lambda net, x, y: x - x.mean(0),
    "another branch for one row": lambda net, x, y: x * 0 if len(x) == 1 else x,
}


def shares(rows: int, devices: int = 8) -> list[slice]:
    size = -(-rows // devices)
    return [slice(start, start + size) for start in range(0, rows, size)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 3, 13, 20, 237])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parallel_computes_each_share_with_the_rows_that_it_has(name: str, rows: int) -> None:
    net, x, y, fn = MLP(nnx.Rngs(0)), values(rows, 3), LABELS[:rows], FUNCTIONS[name]
    got = jax.tree.map(np.asarray, px.Parallel(fn, net)(x, y))
    each = [fn(net, x[share], y[share]) for share in shares(rows)]
    expected = jax.tree.map(lambda *parts: np.concatenate(parts), *each)
    assert_close(got, expected, rtol=1e-5)


def test_parallel_pads_rows_of_a_net_in_eval_mode_and_one_with_dropout() -> None:
    net, drop, x = Normed(nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)), values(13, 3)
    net.norm.mean[...] = values(8)
    net.eval()
    assert_close(np.asarray(px.Parallel(net)(x)), np.asarray(net(x)), rtol=1e-5)
    fast = px.Parallel(lambda drop, x: (drop(x), drop(x)), drop)
    kept = np.vstack([np.asarray(y) > 0 for _ in range(2) for y in fast(jnp.ones((13, 64)))])
    assert len(np.unique(kept, axis=0)) == 2 * 2 * 13
    assert drop.rngs is not None
    assert (drop.rngs.count[...].shape, int(drop.rngs.count[...])) == ((), 2)


def test_parallel_with_padding_has_the_derivative_of_one_device() -> None:
    net, x = MLP(nnx.Rngs(0)), values(7, 3)
    fast = px.Parallel(lambda net, x: net(x.T), net, mesh=mesh_of(3), batch_axis=1)
    expected = jax.jit(jax.grad(lambda x: (net(x) ** 2).sum()))(x)
    for wrap in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_close(np.asarray(wrap(lambda x: (fast(x.T) ** 2).sum())(x)), np.asarray(expected), rtol=1e-5)


# what is refused, and how its results are combined
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean loss": (lambda net, x: (net(x) ** 2).mean(), "mean"),
    "a collective": (lambda net, x: x - px.pmean(x, "device"), "concat"),
    "a variable": (lambda net, x: net.last.bias.set_value(x[0, 0] + jnp.zeros(4)), "concat"),
    "rows elsewhere": (lambda net, x: net(x).T, "concat"),
    "as many columns as rows": (lambda net, x: x[:, :2].T, "concat"),
    "rows by a mean": (lambda net, x: net(x), "mean"),
    "a constant": (lambda net, x: {"y": x, "ones": jnp.ones(2)}, "concat"),
    "other results": (lambda net, x: (x, x) if len(x) == 2 else x, "concat"),
}


@pytest.mark.parametrize("rows", [10, 13])
@pytest.mark.parametrize("name", REFUSED)
def test_parallel_refuses_padding_where_shares_must_have_one_size(name: str, rows: int) -> None:
    body, reduce = REFUSED[name]
    net = MLP(nnx.Rngs(0))
    before = [v[...] for v in px.variables(net)]
    with pytest.raises(px.DataError, match=f"{rows} rows do not divide over 8 devices.*Give a multiple of 8 rows"):
        px.Parallel(body, net, reduce=reduce)(values(rows, 3))
    assert all(v[...] is old for v, old in zip(px.variables(net), before, strict=True))


def test_parallel_without_the_check_fills_shares_and_cuts_only_rows() -> None:
    x = values(10, 3)
    got = px.Parallel(lambda x: (x, x.mean(0), x.sum()), check=False)(x)
    assert [y.shape for y in got] == [(10, 3), (24,), (8,)]
    assert_close(np.asarray(got[0]), np.asarray(x))
    assert_close(np.asarray(got[1])[:3], np.asarray(x[:2]).mean(0))
