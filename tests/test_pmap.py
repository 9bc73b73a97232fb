"""``px.pmap`` computes what ``jax.pmap`` does up to the number of devices, and what ``jax.vmap`` does beyond it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._modules import host
from tests._support import assert_close, values

AXES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], dict[str, Any]]] = {
    "one argument": (lambda x: x * 2, lambda n: (values(n, 3),), {}),
    "the same for all": (lambda w, x: w @ x, lambda n: (values(3, 3), values(n, 3)), {"in_axes": (None, 0)}),
    "integers": (lambda x, y: x * y, lambda n: (values(3, n), values(n, 3)), {"in_axes": (1, 0)}),
    "a prefix": (
        lambda p, x: p["w"]["u"] * x + p["w"]["v"] + p["b"][0],
        lambda n: ({"w": {"u": values(n, 2), "v": values(n)}, "b": [values(2), 3.0]}, values(2, n)),
        {"in_axes": ({"w": 0, "b": None}, 1)},
    ),
    "outputs by an integer": (lambda x: x * 2, lambda n: (values(2, 3, n),), {"in_axes": 2, "out_axes": 1}),
    "outputs by a tree": (
        lambda x: {"a": x, "b": (x, x.sum())},
        lambda n: (values(n, 3),),
        {"out_axes": {"a": 1, "b": 0}},
    ),
    "a None among them": (lambda x, y: x if y is None else y, lambda n: (values(n, 3), None), {}),
    "integers and booleans": (lambda x, y: (x + 1, ~y), lambda n: (np.arange(n), np.arange(n) > 1), {}),
    "keys": (lambda k: jax.random.normal(k, (2,)), lambda n: (jax.random.split(jax.random.key(0), n),), {}),
    "old keys": (lambda k: jax.random.normal(k, (2,)), lambda n: (jax.random.split(jax.random.PRNGKey(0), n),), {}),
    "None in a result": (lambda x: {"a": x, "b": None}, lambda n: (values(n),), {}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [5, 1, 20])
def test_pmap_takes_axes_of_arguments_and_results(size: int) -> None:
    rival: Any = jax.pmap if size <= 8 else lambda fn, **axes: jax.jit(jax.vmap(fn, **axes))
    for name, (fn, make, options) in AXES.items():
        args = make(size)
        here, there = px.pmap(fn, **options)(*args), rival(fn, **options)(*args)
        try:
            assert_close(host(here), host(there))
        except AssertionError as error:
            raise AssertionError(f"{name}, {size} elements: {error}") from error
    assert_close(host(px.pmap(lambda x: x, out_axes=None)(jnp.arange(1.0, size + 1))), 1.0)  # the first, as by jax.pmap


def test_pmap_takes_keyword_arguments() -> None:
    x, y = values(5, 2), values(5, 2, seed=1)
    for fn in (lambda x, *, y: x - y, lambda x, y=None: x * y):
        assert_close(host(px.pmap(fn)(x, y=y)), host(jax.pmap(fn)(x, y=y)))
    assert_close(host(px.pmap(lambda **k: k["a"] + k["b"])(a=x, b=y)), x + y)


def test_pmap_takes_static_arguments() -> None:
    def fn(kind: str, x: jax.Array, power: int) -> jax.Array:
        assert isinstance(power, int)
        return x**power if kind == "power" else x

    for in_axes in (0, (None, 0, None)):
        wrapped = [p(fn, static_broadcasted_argnums=(0, 2), in_axes=in_axes) for p in (px.pmap, jax.pmap)]
        for args in (("power", values(4), 2), ("power", values(4), 3), ("as is", values(4), 2)):
            here, there = (f(*args) for f in wrapped)
            assert_close(host(here), host(there))
    alone = px.pmap(lambda x, double: x * 2 if double else x, static_broadcasted_argnums=1)
    assert_close(host(alone(values(9), True)), values(9) * 2)


def test_pmap_donates_arguments() -> None:
    for size in (8, 16):
        x, y = values(size, 4), values(size, 4, seed=1)
        placed = px.pmap(lambda x: x * 1.0)(x)
        step = px.pmap(lambda x, y: x + y, donate_argnums=0)
        assert_close(host(step(placed, y)), x + y)
        assert placed.is_deleted()
        assert not y.is_deleted()


def test_pmap_takes_axis_size() -> None:
    for size in (3, 10):
        fn = lambda x: x + lax.axis_index("i")  # noqa: E731
        here = px.pmap(fn, axis_name="i", axis_size=size, in_axes=None)(2.0)
        assert_close(host(here), 2.0 + jnp.arange(size))
    assert_close(host(px.pmap(lambda: jnp.ones(2), axis_size=3)()), jnp.ones((3, 2)))
    assert all(jax.typeof(px.pmap(lambda _: 2.0)(values(size))).weak_type for size in (5, 8))


def test_pmap_sends_no_argument_by_the_host() -> None:
    with jax.transfer_guard_device_to_host("disallow"):
        px.pmap(lambda w, x: w * x, in_axes=(None, 0))(values(2), jax.device_put(values(5, 2), jax.devices()[7]))


@pytest.mark.floor
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_pmap_runs_on_a_mesh_that_is_set(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "model"), axis_types=(kind, kind))
    x = values(6, 2)
    for name in ("i", "elsewhere", None):

        def fn(x: jax.Array, name: str | None = name) -> jax.Array:
            return x - lax.pmean(x, name) if name else x - x.mean()

        with jax.set_mesh(mesh):
            got = px.pmap(fn, axis_name=name)(x)
        assert_close(host(got), host(jax.vmap(fn, axis_name=name or "unused")(x)))


def test_pmap_calls_a_function_that_raises_once() -> None:
    count = [0]

    def fn(x: jax.Array) -> jax.Array:
        count[0] += 1
        raise ValueError("the user's own")

    for x in (values(3), jax.device_put(values(3), jax.devices()[1])):
        count[0] = 0
        with pytest.raises(ValueError, match="the user's own"):
            px.pmap(fn)(x)
        assert count[0] == 1
