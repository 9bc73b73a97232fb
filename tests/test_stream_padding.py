"""A mask that is forgotten is an error, whoever runs the chunks, and nothing else is.

What each body gives for rows without padding, by plain ``jnp``, is the oracle.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close

LENGTHS = [9, 3, 5, 1, 9, 5, 1, 3, 3, 9, 5, 1]
N = len(LENGTHS)
AXIS = px.Axis("clients", N)
rng = np.random.default_rng(0)
CLIENTS = [
    {
        "x": rng.normal(size=(n, 3)).astype("float32"),
        "y": rng.integers(0, 9, n),
        "weights": rng.uniform(0.1, 1, n).astype("float32"),
        "rate": np.float32(i + 1),
    }
    for i, n in enumerate(LENGTHS)
]
W = jnp.array([0.9, -0.4, 0.3])

GROUPS = px.Groups(CLIENTS, lengths=LENGTHS)

INNOCENT: dict[str, Callable[[Any, Any], Any]] = {
    "a mean where": lambda w, d: jnp.mean(d["x"] @ w, where=d.mask),
    "a sum of zeros": lambda w, d: jnp.sum(jnp.where(d.mask, jnp.tanh(d["x"] @ w), 0.0)) / d.count,
    "weights": lambda w, d: jnp.where(d.mask, d["weights"] * (d["x"] @ w), 0).sum() / (d["weights"] * d.mask).sum(),
    "a maximum": lambda w, d: (d["x"] @ w).max(),
    "the last row": lambda w, d: d["x"][-1] @ w,
    "integers": lambda w, d: w[0] * jnp.where(d.mask, d["y"], 0).sum(),
    "noise": lambda w, d: jnp.where(d.mask, (d["x"] + jax.random.normal(jax.random.key(1), d["x"].shape)) @ w, 0).sum(),
    "a loop over what is real": lambda w, d: (
        w.sum() * jax.lax.fori_loop(0, d.count, lambda i, s: s + d["x"][i] @ jax.lax.stop_gradient(w), 0.0)
    ),
    "batches": lambda w, d: jax.lax.scan(
        lambda w, i: (w - 0.1 * jnp.where(d.mask[i], d["x"][i] @ w, 0) * d["x"][i], None), w, jnp.arange(len(d["x"]))
    )[0].sum(),
    "a check by the host": lambda w, d: (
        w.sum()
        * eqx.error_if(d["rate"], jnp.any(d["x"] != d["x"][jnp.arange(9).clip(0, d.count - 1)][: len(d["x"])]), "")
    ),
    "a softmax": lambda w, d: d["y"] @ jax.nn.softmax(jnp.where(d.mask, d["x"] @ w, -jnp.inf)),
    "a shift that cancels": lambda w, d: (
        jnp.log(jnp.sum(jnp.where(d.mask, jnp.exp(d["x"] @ w - (m := (d["x"] @ w).mean())), 0)) + 1e-3 * jnp.exp(-m))
        + m
    ),
}
GUILTY: dict[str, Callable[[Any, Any], Any]] = {
    "a mean": lambda w, d: jnp.mean(d["x"] @ w),
    "a sum": lambda w, d: jnp.sum(d["x"] @ w) / d.count,
    "a variance": lambda w, d: jnp.var(jnp.where(d.mask, d["x"] @ w, (d["x"] @ w).mean())),
    "a median": lambda w, d: jnp.median(d["x"] @ w),
    "a product of matrices": lambda w, d: (d["x"].T @ d["x"] @ w).sum(),
    "integers": lambda w, d: w[0] * d["y"].sum(),
    "a scan": lambda w, d: jax.lax.scan(lambda h, x: (jnp.tanh(0.5 * h + x @ w), None), jnp.float32(0), d["x"])[0],
    "normalised by all rows": lambda w, d: jnp.where(d.mask, (d["x"] - d["x"].mean(0)) @ w, 0).sum() * w[0],
    "weights": lambda w, d: jnp.where(d.mask, d["weights"] * (d["x"] @ w), 0).sum() / d["weights"].sum(),
}
# What a body's value goes through before, and what it is reduced by.
AROUND: dict[str, Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]] = {
    "as it is": lambda body: body,
    "in steps": lambda body: lambda w, d: body(w - 0.1 * jax.grad(body)(w, d), d),
    "of many": lambda body: lambda w, d: jax.vmap(body, (0, None))(jnp.stack([w, 2 * w]), d).sum(),
    "chosen": lambda body: lambda w, d: jax.lax.cond(d.count > 1, body, lambda w, d: w.sum(), w, d),
}
REDUCED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "mean": (lambda values, d: px.reduce_mean(values, AXIS), lambda values, n: values.mean()),
    "weighted": (
        lambda values, d: px.reduce_weighted_mean(values, d.count.astype("float32"), AXIS),
        lambda values, n: (values * n).sum() / n.sum(),
    ),
    "spread": (
        lambda values, d: px.reduce_mean((values - px.reduce_mean(values, AXIS)) ** 2, AXIS),
        lambda values, n: values.var(),
    ),
    "largest": (lambda values, d: px.reduce_max(values, AXIS), lambda values, n: values.max()),
    "each": (lambda values, d: values, lambda values, n: values),
}
PLAIN = [
    jax.tree.map(jnp.asarray, px.streaming.Padded(c, np.ones(n, bool), np.int32(n)))
    for c, n in zip(CLIENTS, LENGTHS, strict=True)
]


def program(body: Callable[[Any, Any], Any], reduced: str) -> Callable[[Any, Any], Any]:
    return lambda w, d: REDUCED[reduced][0](px.map_fn(body, (px.broadcast(w, AXIS), d), AXIS), d)


def plain(body: Callable[[Any, Any], Any], reduced: str) -> Callable[[Any], Any]:
    """The same for elements that are not filled up."""
    return lambda w: REDUCED[reduced][1](jnp.stack([body(w, d) for d in PLAIN]), jnp.asarray(LENGTHS, "float32"))


def cases(of: dict[str, Any]) -> list[Any]:
    """Each body in one combination of every day, and in three of the night."""
    return [
        pytest.param(name, around, reduced, marks=pytest.mark.slow if turn else ())
        for turn in range(4)
        for name, around, reduced in zip(of, [*AROUND][turn:] + [*AROUND] * 3, [*REDUCED] * 3, strict=False)
    ]


DERIVED: tuple[Callable[..., Any], ...] = (lambda fn: fn, jax.value_and_grad)
ACCUSED = r"test_stream_padding\.py:\d+.*the result depends on rows that only pad the elements of d\..*d\.mask"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "around", "reduced"), cases(INNOCENT))
def test_stream_never_accuses_what_uses_the_mask(name, around, reduced):
    body, derive = AROUND[around](INNOCENT[name]), DERIVED[reduced != "each"]
    actual = px.Stream(at_once=1).run(derive(program(body, reduced)), W, GROUPS)
    assert_close(actual, jax.jit(derive(plain(body, reduced)))(W), rtol=1e-4)


@pytest.mark.parametrize(("name", "around", "reduced"), cases(GUILTY))
def test_stream_refuses_what_counts_padding(name, around, reduced):
    body, derive = AROUND[around](GUILTY[name]), DERIVED[reduced != "each"]
    with pytest.raises(px.AxisError, match=ACCUSED):
        px.Stream(at_once=1).run(derive(program(body, reduced)), W, GROUPS)


@pytest.mark.parametrize("derive", DERIVED, ids=["value", "gradient"])
def test_stream_finds_padding_at_values_where_all_rows_give_the_same(derive):
    """A softmax loss with weights of zero, the usual start, is log(4) whatever the rows are."""

    def loss(w, d):
        logits = d["x"] @ w[:, None] * jnp.arange(4.0)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 1])

    step = px.Stream(at_once=1).jit(derive(program(loss, "mean")))
    with pytest.raises(px.AxisError, match=ACCUSED):
        step(jnp.zeros(3), GROUPS)


def test_stream_forgets_a_call_that_needed_no_padding():
    long = px.Groups(CLIENTS[:1] * 3, lengths=[9] * 3)
    others = px.Groups([*CLIENTS[1:3], CLIENTS[0]], lengths=[3, 5, 9])
    axis = px.Axis("clients", 3)
    step = px.Stream(at_once=1).jit(lambda d: px.reduce_mean(px.map_fn(lambda d: d["x"].mean(), d, axis), axis))
    assert_close(step(long), CLIENTS[0]["x"].mean(), rtol=1e-4)
    with pytest.raises(px.AxisError, match="only pad the elements of d"):
        step(others)


def test_stream_takes_groups_of_different_lengths_in_one_program():
    """As a training and a validation part of each client."""
    held_out = px.Groups([{"z": np.arange(2.0 * n).reshape(n, 2)} for n in LENGTHS[::-1]], lengths=LENGTHS[::-1])

    @px.program(clients=N)
    def loss(w, d, e):
        def one(w, d, e):
            return jnp.mean(d["x"] @ w, where=d.mask) * jnp.mean(e["z"][:, 0], where=e.mask)

        return px.reduce_mean(px.map_fn(one, (px.broadcast(w), d, e)))

    forgotten = px.program(clients=N)(lambda d, e: px.reduce_mean(px.map_fn(lambda d, e: e["z"].sum(), (d, e))))

    means = [(c["x"] @ np.asarray(W)).mean() * (n - 1) for c, n in zip(CLIENTS, LENGTHS[::-1], strict=True)]
    assert_close(px.Stream(at_once=1).run(loss, W, GROUPS, held_out), np.mean(means), rtol=1e-4)
    with pytest.raises(px.AxisError, match="only pad the elements of e"):
        px.Stream(at_once=5, map=map).run(forgotten, GROUPS, held_out)


def test_stream_finds_padding_in_a_later_pass_though_elements_were_lost():
    class Disk(list):
        def __getitem__(self, number):
            if number in (2, 6):
                raise OSError("unreadable")
            return super().__getitem__(number)

    @px.program(clients=N)
    def spread(w, d):
        center = px.reduce_mean(px.map_fn(INNOCENT["a mean where"], (px.broadcast(w), d)))
        each = px.map_fn(lambda w, c, d: GUILTY["a mean"](w, d) - c, (px.broadcast(w), px.broadcast(center), d))
        return px.reduce_mean(each**2)

    with pytest.raises(px.AxisError, match=ACCUSED):
        px.Stream(at_once=2, lost="mask").run(spread, W, px.Groups(Disk(CLIENTS), lengths=LENGTHS))
