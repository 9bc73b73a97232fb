"""px.pmap computes what jax.pmap computes where that exists, and what jax.vmap computes beyond."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import paraxis as px


def _values(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def _close(actual, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, jax.tree.map(np.asarray, expected))


def _normalise(x):
    return x / lax.psum(x, "i"), lax.axis_index("i"), lax.pmax(x, "i")


CASES = {
    "one argument": (lambda x: jnp.sin(x), {}, (_values(5, 3),)),
    "two arguments": (lambda x, y: x @ y, {}, (_values(8, 2, 3), _values(8, 3))),
    "in_axes with None": (lambda x, y: (x + y, y * 2), {"in_axes": (0, None)}, (_values(4, 2), _values(2))),
    "in_axes of another axis": (lambda x, y: x + y, {"in_axes": (1, 2)}, (_values(2, 4), _values(3, 2, 4))),
    "in_axes as a prefix": (
        lambda p, x: p["w"] * x + p["b"],
        {"in_axes": ({"w": 0, "b": None}, 0)},
        ({"w": _values(6), "b": np.float32(2.0)}, _values(6)),
    ),
    "out_axes": (lambda x: (x, x.sum()), {"out_axes": (1, 0)}, (_values(4, 3),)),
    "collectives": (_normalise, {"axis_name": "i"}, (_values(7, 2),)),
    "static arguments": (
        lambda n, x, s: x**n if s == "power" else x,
        {"static_broadcasted_argnums": (0, 2)},
        (3, _values(4, 2), "power"),
    ),
    "integers and booleans": (lambda x: (x + 1, x > 2), {}, (np.arange(6),)),
    "all_gather": (lambda x: lax.all_gather(x, "i", tiled=True), {"axis_name": "i"}, (_values(8, 2),)),
    "ppermute": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]), {"axis_name": "i"}, (_values(3, 2),)),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "i"), {"axis_name": "i"}, (_values(4, 4),)),
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 0, 0), {"axis_name": "i"}, (_values(4, 4, 2),)),
}


@pytest.mark.parametrize("name", CASES)
def test_like_jax_pmap(name):
    fn, options, args = CASES[name]
    _close(px.pmap(fn, **options)(*args), jax.pmap(fn, **options)(*args))


def test_keywords_are_mapped_over_their_first_axis():
    fn = lambda x, *, scale: x * scale  # noqa: E731
    args, scale = (_values(5, 2),), _values(5)
    _close(px.pmap(fn)(*args, scale=scale), jax.pmap(fn)(*args, scale=scale))


def test_axis_size_alone():
    numbered = px.pmap(lambda x: x + lax.axis_index("i"), "i", in_axes=None, axis_size=10)
    _close(numbered(1.0), np.arange(10) + 1.0)


def test_out_axes_none_returns_one():
    fn, x = lambda x: (x, lax.psum(x, "i")), _values(6)
    _, total = px.pmap(fn, "i", out_axes=(0, None))(x)
    _close(total, x.sum())


@pytest.mark.parametrize("size", [9, 12, 20])
def test_beyond_the_devices_like_vmap(size):
    def step(w, x):
        gradient = lax.pmean(jax.grad(lambda w: jnp.sum((w * x) ** 2))(w), "i")
        return w - 0.1 * gradient, lax.axis_index("i"), lax.all_gather(x, "i").sum()

    w, x = _values(size, 3), _values(size, 3)
    _close(px.pmap(step, "i")(w, x), jax.vmap(step, axis_name="i")(w, x))


@pytest.mark.parametrize("size", [4, 10])
def test_under_transformations(size):
    fn = lambda x: jnp.sin(x) * lax.pmean(x, "i")  # noqa: E731
    x = jnp.asarray(_values(size, 2))
    ours, theirs = px.pmap(fn, "i"), jax.vmap(fn, axis_name="i")
    _close(jax.jit(ours)(x), theirs(x))
    _close(jax.grad(lambda x: ours(x).sum())(x), jax.grad(lambda x: theirs(x).sum())(x))
    _close(jax.vmap(ours)(jnp.stack([x, 2 * x])), jax.vmap(theirs)(jnp.stack([x, 2 * x])))
    nested = px.pmap(px.pmap(lambda v: v - px.pmean(v, "j"), "j"), "i")(x)
    _close(nested, x - x.mean(1, keepdims=True))


def test_it_is_traced_once():
    calls = []

    def fn(x):
        calls.append(None)
        return x + 1

    mapped = px.pmap(fn)
    mapped(_values(10))
    mapped(_values(10))
    assert len(calls) == 1


def test_arguments_bound_to_a_device_and_donated_ones():
    bound = jax.device_put(_values(8, 2), jax.devices()[5])
    _close(px.pmap(lambda x: x + 1)(bound), np.asarray(bound) + 1)
    donated = px.pmap(lambda x: x + 1)(_values(8, 2))
    expected = np.asarray(donated) * 2
    _close(px.pmap(lambda x: x * 2, donate_argnums=0)(donated), expected)
    assert donated.is_deleted()


def test_under_a_mesh_of_other_axes():
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        x = _values(10)
        _close(px.pmap(lambda x: x / lax.psum(x, "i"), "i")(x), x / x.sum())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: px.pmap(lambda x, y: x)(np.ones(3), np.ones(4)), r"sizes .* disagree \(args\[0\]: 3, args\[1\]: 4\)"),
        (lambda: px.pmap(lambda x: x)(1.0), r"args\[0\] has shape \(\) and no axis 0 to map over; write None"),
        (lambda: px.pmap(lambda: 1)(), "write axis_size=8"),
        (lambda: px.pmap(lambda x: x, in_axes=(0, 0))(np.ones(3)), r"in_axes=\(0, 0\) does not fit the 1"),
        (lambda: px.pmap(lambda x: x, out_axes=(0, 0))(np.ones(3)), r"out_axes=\(0, 0\) does not fit the result"),
        (lambda: px.pmap(lambda x: x, donate_argnums=-1), "donate_argnums must be positions from 0, got -1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(px.ParaxisError, match=message):
        call()
