"""A program is an ordinary JAX function: what it may be given, and what may be done with it."""

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
