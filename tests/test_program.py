"""A program is an ordinary JAX function whose axes are declared: they are known in it, and nowhere else."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close, compilations, equations

X = np.array([1.0, 2.0, 4.0], np.float32)


def summed(x):
    return px.reduce_sum(x)


SPELLINGS: dict[str, Any] = {
    "keyword": px.program(clients=3),
    "mapping": px.program({"clients": 3}),
    "placements": px.program(placements={"clients": 3}),
    "axis": px.program(clients=px.Axis("clients", 3, at_once=1)),
    "numpy": px.program(clients=np.int64(3)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_program_declares_the_axis_in_every_spelling(spelling):
    declared = SPELLINGS[spelling](summed)
    assert declared(X) == 7
    assert [(axis.name, axis.size) for axis in declared.axes] == [("clients", 3)]


def test_program_lets_the_only_axis_be_left_out_named_or_passed():
    thrice = px.program(clients=3)(lambda x: [px.reduce_sum(x, a) for a in (None, "clients", px.Axis("clients", 3))])
    assert [float(y) for y in thrice(X)] == [7.0] * 3


WHERE = {
    "clients=1000 on 8 devices (125 each)": {"clients": 1000},
    "clients=1000 on 8 devices (125 each, 25 at once)": {"clients": px.Axis("clients", 1000, at_once=25)},
    "clients=10 on 8 devices (at most 2 each)": {"clients": 10},
    "pods=4 on 4 devices (1 each), clients=250 on 2 devices (125 each)": {"pods": 4, "clients": 250},
    "a=3 on 4 devices (at most 1 each), b=5 on 2 devices (at most 3 each)": {"a": 3, "b": 5},
    "a=2 on 2 devices (1 each), b=3 on 1 device (3 each), c=4 on 4 devices (1 each)": {"a": 2, "b": 3, "c": 4},
}


@pytest.mark.parametrize("where", WHERE)
def test_program_shares_devices_out_so_that_the_busiest_has_least(where):
    assert repr(px.program(WHERE[where])(summed)) == f"<program summed: {where}>"


def test_program_follows_a_mesh_in_force_or_of_the_axis():
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(2, 4), ("pods", "clients"))):
        assert "pods=4 on 2 devices (2 each), clients=20 on 4" in repr(px.program(pods=4, clients=20)(summed))
    axis = px.Axis("clients", 3, mesh=Mesh(np.array(jax.devices()[:1]), ("data",)), over="data")
    declared = px.program(clients=axis)(summed)
    assert (repr(declared), declared(X)) == ("<program summed: clients=3 on 1 device (3 each)>", 7)


VERBS: dict[str, Callable[[Any], Any]] = {
    "map_fn": functools.partial(px.map_fn, jnp.sin),
    "reduce_weighted_mean": lambda x: px.reduce_weighted_mean(x, x),
    **{name: getattr(px, name) for name in ("broadcast", "reduce_sum", "reduce_any", "scatter", "gather", "keys")},
}


@pytest.mark.parametrize("verb", VERBS)
def test_program_is_named_in_both_ways_to_write_it_where_a_verb_stands_outside(verb):
    both = rf"^{verb}: no axis was given.*px\.{verb}\(…, px\.Axis\('clients', 8\)\).*@px\.program\(clients=8\)"
    with pytest.raises(px.AxisError, match=both):
        VERBS[verb](X)


def test_program_leaves_no_trace_behind_even_when_it_fails():
    @px.program(clients=3)
    def broken(x):
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        broken(X)
    with pytest.raises(px.AxisError, match="in no program"):
        px.reduce_sum(X)


def test_program_called_in_another_has_its_own_axes():
    inner = px.program(members=2)(lambda x: px.reduce_sum(px.broadcast(x)))

    @px.program(clients=3)
    def outer(x):
        before = px.reduce_sum(px.broadcast(x))
        return before + inner(before) + px.reduce_sum(px.broadcast(x))

    assert (outer(1.0), jax.grad(outer)(1.0)) == (3 + 2 * 3 + 3, 12)


def test_program_does_not_mix_with_those_of_other_threads():
    """All are inside at the same moment, and run at once: each adds up as many products as it has elements."""
    sizes = [2, 3, 5, 8]
    everyone = threading.Barrier(len(sizes), timeout=60)

    def run(size):
        @px.program(clients=size)
        def total(x):
            everyone.wait()
            y = px.reduce_sum(px.map_fn(lambda x: x * px.psum(x, "clients"), px.broadcast(x)))
            everyone.wait()
            return y

        return tuple(map(float, jax.value_and_grad(total)(1.0)))

    with ThreadPoolExecutor(len(sizes)) as pool:
        assert list(pool.map(run, sizes)) == [(size**2, 2 * size**2) for size in sizes]


@px.program(clients=3)
def combined(x, how="sum", *, double=False, scale=None):
    y = {"sum": px.reduce_sum, "max": px.reduce_max}[how](x) * (2 if double else 1)
    return y if scale is None else y * scale


def test_program_traces_numbers_and_takes_all_else_for_constant():
    assert (combined(X), combined(X, "max"), combined(X, how="max", double=True)) == (7, 4, 8)
    assert (combined(X, double=True, scale=None), combined(X, scale=np.float32(0.5))) == (14, 3.5)
    assert jax.grad(lambda s: combined(X, scale=s))(3.0) == 7


def test_program_decorates_methods():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @px.program(clients=3)
        def loss(self, x):
            """Scaled sum."""
            return self.scale * px.reduce_sum(x)

    assert [float(Model(s).loss(X)) for s in (1.0, 2.0)] == [7.0, 14.0]
    assert jax.grad(Model(2.0).loss)(X).tolist() == [2, 2, 2]
    assert Model.loss.__doc__ == "Scaled sum."


def mean_loss(library, w):
    def client_loss(model, data):
        x, y = data
        return jnp.mean((jnp.tanh(x @ model["w1"] + model["b1"]) @ model["w2"] - y) ** 2)

    @library.program(placements={"clients": 6})
    def fn(model, data):
        losses = library.map_fn(client_loss, (library.broadcast(model), data))
        return library.reduce_mean(losses) if w is None else library.reduce_weighted_mean(losses, w)

    return fn


@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")  # DrJAX reads a mesh of old
@pytest.mark.parametrize("weights", [None, np.arange(1, 7, dtype=np.float32)], ids=["mean", "weighted mean"])
def test_program_has_value_and_gradient_of_drjax(weights):
    rng = np.random.default_rng(0)
    model = {name: rng.normal(size=s).astype("f") for name, s in (("w1", (4, 8)), ("b1", (8,)), ("w2", (8, 3)))}
    data = tuple(rng.normal(size=(6, 7, width)).astype("f") for width in (4, 3))
    assert_close(*(jax.jit(jax.value_and_grad(mean_loss(library, weights)))(model, data) for library in (px, drjax)))


@px.program(pods=2, clients=3)
def nested(w, x):
    def pod(w, rows):
        mapped = px.map_fn(lambda w, x: jnp.sin(w * x), (px.broadcast(w, "clients"), rows), "clients")
        return px.reduce_sum(mapped, "clients")

    return px.reduce_mean(px.map_fn(pod, (px.broadcast(w, "pods"), x), "pods"), "pods")


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (jnp.ones_like(w),)),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "third": lambda f: jax.grad(jax.grad(jax.grad(f))),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_program_shows_the_verbs_by_axis_in_derivatives(derivative):
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    found = {
        (eqn.primitive.name, eqn.params["axis"])
        for eqn in equations(jax.make_jaxpr(DERIVATIVES[derivative](nested))(np.float32(1.5), x))
        if eqn.primitive.name.startswith("px_")
    }
    assert found >= {("px_map", "pods"), ("px_map", "clients"), ("px_reduce_sum", "pods")}
    assert {axis for _, axis in found} == {"pods", "clients"}


def test_program_traces_a_body_once_a_differentiation_and_compiles_it_once():
    calls = []

    @px.program(clients=3)
    def fn(w, x):
        return px.reduce_sum(px.map_fn(lambda w, x: calls.append(1) or w * x, (px.broadcast(w), x)))

    for number in range(1, 4):
        with compilations() as compiled:
            jax.grad(fn)(1.5, X)
        assert len(calls) == number
        assert number == 1 or not compiled


def test_program_keeps_copies_of_numpy_arrays():
    """A NumPy array that an inner ``jit`` closes over may be written to, and another one have its old numbers."""
    axis, x = px.Axis("rows", 8), np.ones((8, 3), np.float32)

    def run(x, times):
        inner = jax.jit(lambda x: x * times)
        by_program = px.program(rows=axis)(lambda x: px.reduce_sum(px.map_fn(inner, x)))(x)
        return px.map_fn(inner, x, axis)[0], by_program / 8

    first = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(run(x, first), [[0, 1, 2]] * 2)
    first[:] = 7
    for rows in (px.scatter(x, axis), jax.device_put(x, jax.devices()[1]), jnp.asarray(x)):
        np.testing.assert_array_equal(run(rows, np.arange(3, dtype=np.float32)), [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(run(x, first), [[7, 7, 7]] * 2)
