"""Pods of clients: two axes, one inside the other, against plain ``vmap`` of ``vmap``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._support import assert_close

PODS, CLIENTS, FEATURES = 3, 5, 4


def mesh_of(shape, names, kind=AxisType.Auto):
    count = int(np.prod(shape))
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), names, axis_types=(kind,) * len(names))


MESHES = {
    "no mesh": lambda: None,
    "2x4": lambda: mesh_of((2, 4), ("pods", "clients")),
    "4x2": lambda: mesh_of((4, 2), ("pods", "clients")),
    "1x8": lambda: mesh_of((1, 8), ("pods", "clients")),
    "clients first": lambda: mesh_of((2, 4), ("clients", "pods")),
    "explicit": lambda: mesh_of((2, 4), ("pods", "clients"), AxisType.Explicit),
    "with a model axis": lambda: mesh_of((2, 2, 2), ("pods", "clients", "model")),
}


@pytest.fixture(params=MESHES.values(), ids=list(MESHES))
def mesh(request):
    chosen = request.param()
    if chosen is None:
        yield None
        return
    with jax.set_mesh(chosen):
        yield chosen


def client_loss(w, scale, x):
    return jnp.log1p(jnp.sum(jnp.tanh(w * x) ** 2)) * scale


@px.program(pods=PODS, clients=CLIENTS)
def nested(w, scale, x):
    def pod(w, scale, rows):
        losses = px.map_fn(client_loss, (px.broadcast(w, "clients"), px.broadcast(scale, "clients"), rows), "clients")
        return px.reduce_mean(losses, "clients") ** 2

    return px.reduce_sum(px.map_fn(pod, (px.broadcast(w, "pods"), scale, x), "pods"), "pods")


def oracle(w, scale, x):
    clients = jax.vmap(client_loss, in_axes=(None, None, 0))
    return jax.vmap(lambda scale, rows: clients(w, scale, rows).mean() ** 2)(scale, x).sum()


@pytest.fixture
def arguments():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=FEATURES).astype(np.float32),
        rng.uniform(1, 2, PODS).astype(np.float32),
        rng.normal(size=(PODS, CLIENTS, FEATURES)).astype(np.float32),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda f: f, id="eager", marks=pytest.mark.slow), pytest.param(jax.jit, id="jit")]
)
def test_value_and_every_gradient(mesh, wrap, arguments):
    positions = (0, 1, 2)
    got = wrap(jax.value_and_grad(nested, positions))(*arguments)
    assert_close(got, jax.value_and_grad(oracle, positions)(*arguments))


@pytest.mark.sampled(1)
def test_forward_mode_and_second_derivative(mesh, arguments):
    w, *rest = arguments
    direction = np.linspace(-1, 1, FEATURES, dtype=np.float32)

    def slope(f):
        return lambda w: jnp.vdot(jax.grad(f)(w, *rest), direction)

    def both(f):
        return jax.jit(lambda w: (jax.jvp(lambda w: f(w, *rest), (w,), (direction,)), jax.grad(slope(f))(w)))(w)

    assert_close(both(nested), both(oracle))


@pytest.mark.sampled(3)
def test_reductions_one_after_the_other(mesh, arguments):
    _, _, x = arguments

    @px.program(pods=PODS, clients=CLIENTS)
    def extremes(x):
        per_pod = px.map_fn(lambda rows: px.reduce_max(rows, "clients"), x, "pods")
        return per_pod, px.reduce_min(per_pod, "pods")

    assert_close(extremes(x), (x.max(1), x.max(1).min(0)))


@pytest.mark.sampled(3)
def test_a_collective_over_the_outer_axis_from_the_inner_body(mesh, arguments):
    _, _, x = arguments

    @px.program(pods=PODS, clients=CLIENTS)
    def centred(x):
        def pod(rows):
            centre = px.pmean(rows, "pods")
            return px.map_fn(lambda row, mean: row - px.pmean(mean, "clients"), (rows, centre), "clients")

        return px.map_fn(pod, x, "pods")

    assert_close(centred(x), x - x.mean((0, 1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("pods", "clients"), [(3, 5), (5, 8), (8, 3)])
def test_collectives_in_the_inner_body_are_over_the_logical_axes(pods, clients):
    """Also where the mesh shared out among the axes has the axes' names and other sizes."""
    x = np.arange(pods * clients, dtype=np.float32).reshape(pods, clients)

    @px.program(pods=pods, clients=clients)
    def exchanged(x):
        def client(v):
            number = px.axis_index("pods") * 100 + px.axis_index("clients")
            return v - px.pmean(v, "pods"), px.pmean(v, "clients"), px.axis_size("pods") + 0 * v, number

        return px.map_fn(lambda row: px.map_fn(client, row, "clients"), x, "pods")

    of_pods, of_clients, size, number = exchanged(x)
    assert_close(of_pods, x - x.mean(0))
    assert_close(of_clients, np.broadcast_to(x.mean(1)[:, None], x.shape))
    assert_close(size, np.full_like(x, pods))
    assert_close(number, np.arange(pods)[:, None] * 100 + np.arange(clients))
