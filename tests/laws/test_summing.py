"""Sums in products equal sums of results, by plain vmap in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close, axis_on

SIZE = 10


def _mlp(w, x):
    return jnp.sum(jnp.tanh(jax.nn.relu(x @ w["a"] + w["b"]) @ w["c"]) ** 2)


def _attention(w, x):
    q, k = x @ w["a"], x @ w["a"] * 2.0
    return jnp.sum(jax.nn.softmax(q @ k.T / 2.0) @ x @ w["c"][:3, :2])


def _two_steps(w, x):
    for _ in range(2):
        w = jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(_mlp)(w, x))
    return w


@jax.jit
def _jitted(w, x):
    return jax.jit(jax.value_and_grad(_mlp))(w, x)


FACTORS = {
    "weights": lambda x: (jnp.mean(x) * (x.T @ x), jnp.sum(x) * (x.T @ x) * x[0, 0]),
    "a factor made of the product": lambda x: (x.T @ x) * jnp.minimum(1.0, 3.0 / jnp.linalg.norm(x.T @ x)),
    "a mask": lambda x: jax.lax.select(x[0, 0] > 0, x.T @ x, jnp.zeros((3, 3))),
    "a mask the other way": lambda x: jax.lax.select(x[0, 0] > 0, jnp.zeros((3, 3)), x.T @ x),
    "a mask of a weight of a mask": lambda x: jax.lax.select(
        x[1, 1] > 0, x[0, 0] * jax.lax.select(x[2, 2] > 0, x.T @ x, jnp.zeros((3, 3))), jnp.zeros((3, 3))
    ),
    "two factors of one product": lambda x: [x[0, 0] * y + x[1, 1] * y for y in (x.T @ x, x.T @ jnp.sin(x))],
    "a product along other dimensions": lambda x: jnp.einsum("ni,jn->ij", x, jnp.sin(x).T),
    "a product along two dimensions": lambda x: jnp.einsum(
        "nij,nik->jk", x[:, :, None] + x[:, None], x[:, :, None] * x[:, None]
    ),
    "a product used twice": lambda x: (x.T @ x, jnp.sin(x.T @ x)),
}
"""Functions of an element that scale a product by numbers of the element's own."""

BODIES = {
    "gradient of an MLP": jax.grad(_mlp),
    "value and gradient": jax.value_and_grad(_mlp),
    "inside jit": _jitted,
    "attention": jax.grad(_attention),
    "two local steps": _two_steps,
    "negated, scaled, reshaped": lambda w, x: (-(x.T @ (x @ w["a"])) * 3.0 / 7.0).reshape(-1),
    "product with a shared matrix": lambda w, x: (x @ w["a"]) @ w["c"],
    "sum of products": lambda w, x: x.T @ x + x.T @ jnp.sin(x) - (x.T @ x).T,
    "constant result": lambda w, x: (w["a"] @ w["c"], x.T @ x, jnp.float32(3.0)),
    "argument as result": lambda w, x: (x, x.T @ x),
    "integers beside": lambda w, x: (x.T @ x, jnp.arange(3), x > 0),
    "half precision": lambda w, x: x.astype(jnp.bfloat16).T @ x.astype(jnp.bfloat16),
    # By day: each of these, and a shared value beside a product, which counts for each element.
    "factors": lambda w, x: ({k: f(x) for k, f in FACTORS.items()}, w["a"] - x.T @ (x @ w["a"])),
}


def _weights():
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 4), "b": (4,), "c": (4, 5)}
    w = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return w, jnp.asarray(rng.normal(size=(SIZE, 6, 3)), jnp.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    ("devices", "at_once"), [(3, None), (2, 2), *(pytest.param(d, None, marks=pytest.mark.slow) for d in (1, 8))]
)
def test_reductions_of_a_map_equal_reductions_of_plain_vmap(name, devices, at_once):
    body, axis = BODIES[name], axis_on(devices, SIZE, at_once=at_once)
    w, x = _weights()
    weight = jnp.linspace(-1.0, 2.0, SIZE)
    mask = jnp.arange(SIZE) % 3 != 1

    @jax.jit
    def reduced(w, x):
        y = px.map_fn(body, (px.broadcast(w, axis), x), axis)
        return (
            px.reduce_sum(y, axis),
            px.reduce_mean(y, axis, where=mask),
            px.reduce_weighted_mean(y, weight, axis, where=mask),
        )

    rows = jax.tree.map(lambda a: np.asarray(a, np.float64), jax.jit(jax.vmap(body, (None, 0)))(w, x))
    m, v = np.asarray(mask), np.asarray(weight, np.float64)
    found, tolerance = reduced(w, x), 2e-2 if name == "half precision" else 2e-5
    expected = (
        jax.tree.map(lambda a: a.sum(0), rows),
        jax.tree.map(lambda a: a[m].mean(0), rows),
        jax.tree.map(lambda a: np.tensordot(v[m], a[m], 1) / v[m].sum(), rows),
    )
    assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


def test_no_gradient_per_element_is_held():
    """64 gradients of 2 MB each would not fit below the bound."""
    axis, loss = axis_on(2, 64), lambda w, x: jnp.sum((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    def needed(reduce, w, x, derive=jax.grad):
        fn = lambda w, x: reduce(px.map_fn(derive(loss), (px.broadcast(w, axis), x), axis))  # noqa: E731
        found: Any = jax.jit(fn).lower(w, x).compile().memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    shapes = ((w, w), jax.ShapeDtypeStruct((64, 4, 512), jnp.float32))
    assert needed(lambda y: px.reduce_mean(y, axis), *shapes) < 14e6
    for derive in (jax.grad, jax.value_and_grad):
        assert needed(lambda y: px.reduce_weighted_mean(y, np.arange(64), axis), *shapes, derive) < 14e6
    assert needed(lambda y: y, *shapes) > 60e6


def test_sums_asked_for_in_an_inner_trace_stay_there():
    axis = axis_on(3, SIZE, at_once=1)

    @jax.jit
    def sums(x):
        y = px.map_fn(lambda x: x * 2, x, axis)
        inside, _ = jax.lax.scan(lambda c, _: (c + px.reduce_sum(y, axis), None), 0.0, None, length=3)
        chosen = jax.lax.cond(inside > 0, lambda: px.reduce_mean(y, axis), lambda: 0.0)
        return inside, chosen, px.reduce_sum(y, axis), px.reduce_mean(y, axis)

    assert_close(sums(jnp.arange(10.0)), (270.0, 9.0, 90.0, 9.0))


def test_a_sum_of_gradients_copies_no_more_than_the_gradient_of_one_flat_batch() -> None:
    """Products over elements and rows are made in one dimension: in two, XLA's CPU backend copies an operand first."""
    axis = px.Axis("rows", 16)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])

    def within(w: Any, x: jax.Array) -> Any:
        return px.reduce_mean(px.map_fn(jax.grad(loss), (px.broadcast(w, axis), x), axis), axis)

    def mean(w: Any, x: jax.Array) -> jax.Array:
        return px.reduce_mean(px.map_fn(loss, (px.broadcast(w, axis), x), axis), axis)

    weights = {"a": jax.ShapeDtypeStruct((64, 256), jnp.float32), "b": jax.ShapeDtypeStruct((256, 10), jnp.float32)}
    shapes = weights, jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)
    flat = jax.jit(lambda w, x: jax.grad(loss)(w, x.reshape(-1, 64))).lower(*shapes).compile().as_text()
    for ours in (within, jax.grad(mean)):
        text = str(jax.jit(ours).lower(*shapes).compile().as_text())
        assert all(text.count(copied) <= str(flat).count(copied) for copied in (" transpose(", " copy("))
