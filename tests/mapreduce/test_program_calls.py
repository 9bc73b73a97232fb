"""A program is an ordinary JAX function: what it may be given, and what may be done with it."""

import functools
from typing import Any

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close

CLIENTS, ROWS = 6, 7


# --- arguments -------------------------------------------------------------------------------------------------------


@px.program(clients=3)
def combined(x, how="sum", *, double=False, scale=None):
    reduce = {"sum": px.reduce_sum, "max": px.reduce_max}[how]
    y = reduce(x)
    y = y * 2 if double else y
    return y if scale is None else y * scale


def test_booleans_strings_and_none_are_constants():
    x = np.array([1.0, 2.0, 4.0], np.float32)
    assert combined(x) == 7
    assert combined(x, "max") == 4
    assert combined(x, how="max", double=True) == 8
    assert combined(x, double=True, scale=None) == 14
    assert combined(x, scale=np.float32(0.5)) == 3.5


def test_numbers_are_traced_and_can_be_differentiated():
    x = np.array([1.0, 2.0, 4.0], np.float32)
    assert jax.grad(lambda s: combined(x, scale=s))(3.0) == 7
    seen = []

    @px.program(clients=3)
    def fn(x, n):
        seen.append(n)
        return px.reduce_sum(x) * n

    assert [float(fn(x, n)) for n in (1, 2, 3)] == [7, 14, 21]
    assert not any(isinstance(n, int) for n in seen), "traced, not constants"


def test_functions_are_constants():
    @px.program(clients=3)
    def mapped(fn, x):
        return px.reduce_sum(px.map_fn(fn, x))

    x = np.array([1.0, 2.0, 4.0], np.float32)
    np.testing.assert_allclose(mapped(jnp.square, x), 21)
    np.testing.assert_allclose(mapped(jnp.negative, x), -7)


def test_pytrees_in_and_out():
    @px.program(clients=3)
    def fn(model, data):
        sums = px.reduce_sum({"rows": data["x"], "more": [data["y"]]})
        return sums, (px.broadcast(model), model["name"])

    model = {"w": np.ones(2, np.float32), "name": None}
    sums, (copies, name) = fn(model, {"x": np.ones((3, 2)), "y": np.arange(3)})
    np.testing.assert_array_equal(sums["rows"], [3, 3])
    assert sums["more"][0] == 3
    assert copies["w"].shape == (3, 2)
    assert name is None


def test_no_arguments():
    assert px.program(clients=3)(lambda: px.reduce_sum(px.broadcast(2.0)))() == 6


@pytest.mark.slow
def test_random_keys_new_and_old():
    @px.program(clients=3)
    def fn(key):
        return px.map_fn(lambda k: jax.random.uniform(k), px.keys(key))

    for make in (jax.random.key, jax.random.PRNGKey):
        expected = [jax.random.uniform(jax.random.fold_in(make(1), i)) for i in range(3)]
        np.testing.assert_allclose(fn(make(1)), expected, rtol=1e-6)


def test_methods():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @px.program(clients=3)
        def loss(self, x):
            """Scaled sum."""
            return self.scale * px.reduce_sum(x)

    x = np.arange(3, dtype=np.float32)
    assert [float(Model(s).loss(x)) for s in (1.0, 2.0)] == [3.0, 6.0]
    np.testing.assert_array_equal(jax.grad(Model(2.0).loss)(x), [2, 2, 2])
    assert Model.loss.__doc__ == "Scaled sum."


def test_errors_of_the_body_come_through():
    with pytest.raises(px.ShapeError, match=r"reduce_sum: x has shape \(4,\).*starts with its size, \(3, \.\.\.\)"):
        combined(np.zeros(4))


# --- under JAX's transformations, against DrJAX and plain vmap -------------------------------------------------------


def client_loss(model, data):
    x, y = data
    hidden = jnp.tanh(x @ model["w1"] + model["b1"])
    return jnp.mean((hidden @ model["w2"] - y) ** 2)


def program_of(library):
    @library.program(placements={"clients": CLIENTS})
    def mean_loss(model, data):
        return library.reduce_mean(library.map_fn(client_loss, (library.broadcast(model), data)))

    return mean_loss


ours = program_of(px)


def by_vmap(model, data):
    return jax.vmap(client_loss, in_axes=(None, 0))(model, data).mean()


@pytest.fixture
def model_and_data():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    model = {"w1": normal(4, 8), "b1": normal(8), "w2": normal(8, 3)}
    return model, (normal(CLIENTS, ROWS, 4), normal(CLIENTS, ROWS, 3))


# DrJAX reads a mesh that JAX is about to withdraw.
with_drjax = pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")


@with_drjax
def test_value_and_gradient_agree_with_drjax(model_and_data):
    theirs = program_of(drjax)
    assert_close(jax.value_and_grad(ours)(*model_and_data), jax.value_and_grad(theirs)(*model_and_data))


@with_drjax
def test_weighted_mean_agrees_with_drjax(model_and_data):
    def weighted(library):
        @library.program(placements={"clients": CLIENTS})
        def fn(model, data, w):
            return library.reduce_weighted_mean(library.map_fn(client_loss, (library.broadcast(model), data)), w)

        return fn

    w = np.arange(1, CLIENTS + 1, dtype=np.float32)
    assert_close(*(jax.value_and_grad(weighted(library), (0, 2))(*model_and_data, w) for library in (px, drjax)))


def scanned(f):
    def steps(model, data):
        def step(model, _):
            loss, grad = jax.value_and_grad(f)(model, data)
            return jax.tree.map(lambda p, g: p - 0.1 * g, model, grad), loss

        return jax.lax.scan(step, model, length=3)

    return steps


def vmapped(f):
    return lambda model, data: jax.vmap(lambda s: jax.value_and_grad(f)(jax.tree.map(lambda p: p * s, model), data))(
        jnp.array([0.5, 1.0, 2.0])
    )


TRANSFORMATIONS = {
    "jit": jax.jit,
    "jit grad": lambda f: jax.jit(jax.grad(f)),
    "grad jit": lambda f: jax.grad(jax.jit(f)),
    "grad checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap": vmapped,
    "jit vmap": lambda f: jax.jit(vmapped(f)),
    "scan": scanned,
    "grad of scan": lambda f: jax.grad(lambda model, data: scanned(f)(model, data)[1].sum()),
    "linearize": lambda f: lambda m, d: jax.linearize(lambda m: f(m, d), m)[1](jax.tree.map(jnp.ones_like, m)),
    "hessian row": lambda f: lambda m, d: jax.jvp(lambda m: jax.grad(f)(m, d), (m,), (jax.tree.map(jnp.ones_like, m),)),
    "cond": lambda f: lambda m, d: jax.lax.cond(d[0][0, 0, 0] > -99, lambda: f(m, d), lambda: jnp.float32(0)),
    "while": lambda f: (
        lambda m, d: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(m, d)), (0, jnp.float32(0)))
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
def test_transformations(transformation, model_and_data):
    assert_close(transformation(ours)(*model_and_data), transformation(by_vmap)(*model_and_data))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("transformation", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_partial_participation(transformation, model_and_data):
    """Clients that are masked out never matter, not even with NaN in their data."""
    model, (x, y) = model_and_data
    where = np.array([True, False, True, True, False, True])
    spoilt = np.where(where[:, None, None], x, np.nan).astype(np.float32)

    @px.program(clients=CLIENTS)
    def mean_gradient(model, data, where):
        return px.reduce_mean(px.map_fn(jax.grad(client_loss), (px.broadcast(model), data)), where=where)

    got = transformation(mean_gradient)(model, (spoilt, y), where)
    assert_close(got, jax.grad(by_vmap)(model, (x[where], y[where])))


def test_partial_application(model_and_data):
    model, data = model_and_data
    assert_close(functools.partial(ours, data=data)(model), by_vmap(model, data))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [{"rows": 8}, {"one": 1, "rows": 8}], ids=str)
def test_the_result_is_there_before_its_derivative_is_begun(axes: dict[str, int]) -> None:
    """Two programs with collectives in flight can wait for each other for ever on CPU."""
    x = jnp.full((8, 1000, 1000), 1e-3)
    seen: list[bool] = []

    @px.program(placements=axes)
    def loss(w):
        w = px.broadcast(w, "rows")
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum(x @ x @ x * w), (w, x), "rows"), "rows")

    def watched(w):
        result: Any = loss(w)
        seen.append(result.primal.is_ready())
        return result

    jax.grad(watched)(1.0)
    jax.grad(watched)(2.0)  # compiled by now: the call returns at once
    assert seen == [True, True]
