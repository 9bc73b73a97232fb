"""Programs over clients, and the clients; the mesh, where all elements are together, is their oracle."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

N = 12
AXIS = px.Axis("clients", N)
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 5, 3)).astype("float32")
Y = rng.normal(size=(N, 5)).astype("float32")
W = jnp.array([0.9, -0.4, 0.3])


def one(w: Any, x: Any, y: Any) -> Any:
    """The loss of a client."""
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def losses_of(w: Any, x: Any, y: Any) -> Any:
    return px.map_fn(one, (px.broadcast(w), x, y))


def mean(w: Any, x: Any, y: Any) -> Any:
    return px.reduce_mean(losses_of(w, x, y))


def weighted(w: Any, x: Any, y: Any) -> Any:
    losses = losses_of(w, x, y)
    masked = px.reduce_mean(losses, where=jnp.asarray(np.arange(N) % 3 > 0))
    return px.reduce_weighted_mean(losses, np.linspace(0.1, 1, N, dtype="float32")) + masked


def extremes(w: Any, x: Any, y: Any) -> Any:
    losses = losses_of(w, x, y)
    return px.reduce_max(losses) + 3 * px.reduce_min(losses)


def tied(w: Any, x: Any, y: Any) -> Any:
    """Elements attain the maximum in several chunks."""
    return px.reduce_max(px.map_fn(lambda w, i: jnp.tanh(w * (i % 4)).sum(), (px.broadcast(w), jnp.arange(N))))


def largest_inside(w: Any, x: Any, y: Any) -> Any:
    """A maximum that the mapped function itself compares with."""
    losses = losses_of(w, x, y)
    top = px.broadcast(jax.lax.stop_gradient(px.reduce_max(losses)))
    return px.reduce_sum(
        px.map_fn(lambda loss, top, w: jnp.where(loss == top, w.sum() * loss, 0.0), (losses, top, px.broadcast(w)))
    )


def normalised(w: Any, x: Any, y: Any) -> Any:
    mu = px.broadcast(px.reduce_mean(x))
    var = px.broadcast(px.reduce_mean(px.map_fn(lambda m, x: (x - m) ** 2, (mu, x))))
    scaled = px.map_fn(lambda w, m, s, x, y: one(w, (x - m) / jnp.sqrt(s + 1e-3), y), (px.broadcast(w), mu, var, x, y))
    return px.reduce_mean(scaled)


def between(w: Any, x: Any, y: Any) -> Any:
    """Operations on rows outside of maps, and numbers of elements that are taken from an argument."""
    count = x.shape[0]
    x = jnp.moveaxis((x - px.reduce_mean(x))[:, ::-1, :2], 1, 2).reshape(count, -1)
    scale = jnp.concatenate([jnp.ones((count, 5)), jnp.full((count, 5), 2.0)], 1)
    losses = jnp.sum((x * scale) ** 2, 1) * w.sum() + y[:, 0]
    return jnp.sum(losses * jnp.arange(1.0, count + 1)) / count + jnp.max(losses)


def picked(w: Any, x: Any, y: Any) -> Any:
    """Rows' own entries read and written outside of maps, by indices of each row and by the same of all."""
    z = jnp.einsum("nij,j->ni", x, w)
    z = jnp.sort(z.at[:, 2].multiply(2.0).at[:, jnp.array([1, 3])].set(0.5), axis=1)
    at = jnp.argmax(jnp.abs(z - y), 1)
    z = jax.vmap(lambda z, at, y: z.at[at].set(y[0] * w[0]))(z, at, y)
    return px.reduce_mean(jnp.take_along_axis(z, at[:, None], 1)[:, 0]) + px.reduce_sum((z * y).sum(1))


def rounds(w: Any, x: Any, y: Any) -> Any:
    """Two rounds of local training, a loop of gradients in each client."""

    def local(w: Any, x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda w, _: (w - 0.1 * jax.grad(one)(w, x, y), None), w, None, length=2)[0]

    for _ in range(2):
        w = px.reduce_mean(px.map_fn(local, (px.broadcast(w), x, y)))
    return mean(w, x, y)


def noisy(w: Any, x: Any, y: Any) -> Any:
    keys = px.keys(jax.random.key(3))
    noise = px.map_fn(lambda key, x: jax.random.uniform(key, x.shape), (keys, x))
    return mean(w, px.map_fn(jnp.add, (x, noise)), y)


def counted(w: Any, x: Any, y: Any) -> Any:
    """The number of all elements inside a body, and in a loop there."""

    def of(w: Any, x: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, z: z / count, one(w, x, y)) / count

    count = y.shape[0]
    own = px.map_fn(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: 1 / count, lambda: jnp.float32(2 / count)), (x,))
    return 1000 * px.reduce_sum(px.map_fn(of, (px.broadcast(w), x, y))) + px.reduce_sum(own)


def far(w: Any, x: Any, y: Any) -> Any:
    """A map that gives a sum, and what its derivative needs; a later pass needs the sum of all."""
    total = px.reduce_sum(px.map_fn(lambda w, x: jnp.tanh(x @ w).sum(), (px.broadcast(w), x)))
    return px.reduce_sum(px.map_fn(lambda x: jnp.sin(x.sum() * total), (x,)))


def within(w: Any, x: Any, y: Any) -> Any:
    """A vmap of models over clients; the values kept for maxima have their elements in a later dimension."""
    each = jax.vmap(lambda scale: mean(scale * w, x, y) + extremes(scale * w, x, y))
    return jnp.sum(jax.vmap(each)(jnp.array([[1.0, 2.0, -1.0], [0.5, 3.0, -2.0]])))


def nested(w: Any, x: Any, y: Any) -> Any:
    """An axis in another, which is not streamed."""

    def client(w: Any, x: Any, y: Any) -> Any:
        squares = px.map_fn(lambda w, x, y: (jnp.tanh(x @ w) - y) ** 2, (px.broadcast(w, "rows"), x, y), "rows")
        return px.reduce_mean(squares, "rows") + px.reduce_max(squares, "rows")

    return px.reduce_mean(px.map_fn(client, (px.broadcast(w, "clients"), x, y), "clients"), "clients")


_ALL = (
    *(mean, weighted, extremes, tied, largest_inside, normalised, between, picked, rounds, noisy, counted),
    *(far, within),
)
PROGRAMS: dict[str, Callable[..., Any]] = {fn.__name__: px.program(clients=N)(fn) for fn in _ALL}
PROGRAMS["nested"] = px.program(clients=N, rows=5)(nested)
