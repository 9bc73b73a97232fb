"""Programs written once, for some verbs: those of Paraxis, and those of an oracle that knows no axes and devices."""

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
WEIGHTS = rng.uniform(0.1, 1, N).astype("float32")
MASK = np.arange(N) % 3 > 0
W = jnp.array([0.9, -0.4, 0.3])


class Plain:
    """The verbs as they read: all rows at once, on one device."""

    keys = staticmethod(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(N)))
    broadcast = staticmethod(lambda x: jax.tree.map(lambda a: jnp.broadcast_to(a, (N, *jnp.shape(a))), x))
    map_fn = staticmethod(lambda fn, args: jax.vmap(fn, axis_name="clients")(*args))
    reduce_sum = staticmethod(lambda x: x.sum(0))
    reduce_max = staticmethod(lambda x: x.max(0))
    reduce_min = staticmethod(lambda x: x.min(0))
    reduce_any = staticmethod(lambda x: x.any(0))
    reduce_all = staticmethod(lambda x: x.all(0))
    reduce_weighted_mean = staticmethod(lambda x, w: (x * w).sum(0) / w.sum())

    @staticmethod
    def reduce_mean(x: Any, where: Any = None) -> Any:
        return x.mean(0) if where is None else jnp.where(where, x, 0).sum(0) / where.sum()


class Ours:
    """Those of Paraxis."""

    keys = staticmethod(lambda key: px.keys(key, AXIS))
    broadcast = staticmethod(lambda x: px.broadcast(x, AXIS))
    map_fn = staticmethod(lambda fn, args: px.map_fn(fn, args, AXIS))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: getattr(px, name)(*args, AXIS, **options)


def one(w: Any, x: Any, y: Any) -> Any:
    """The loss of a client."""
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def mean(v: Any, w: Any, x: Any, y: Any) -> Any:
    return v.reduce_mean(v.map_fn(one, (v.broadcast(w), x, y)))


def weighted(v: Any, w: Any, x: Any, y: Any) -> Any:
    return v.reduce_weighted_mean(v.map_fn(one, (v.broadcast(w), x, y)), jnp.asarray(WEIGHTS))


def masked(v: Any, w: Any, x: Any, y: Any) -> Any:
    return v.reduce_mean(v.map_fn(one, (v.broadcast(w), x, y)), where=jnp.asarray(MASK))


def extremes(v: Any, w: Any, x: Any, y: Any) -> Any:
    losses = v.map_fn(one, (v.broadcast(w), x, y))
    return v.reduce_max(losses) + 3 * v.reduce_min(losses)


def tied(v: Any, w: Any, x: Any, y: Any) -> Any:
    """Elements attain the maximum in several chunks."""
    return v.reduce_max(
        v.map_fn(lambda w, i, x: jnp.tanh(w * (i % 4)).sum() + 0 * x[0, 0], (v.broadcast(w), jnp.arange(N), x))
    )


def largest_inside(v: Any, w: Any, x: Any, y: Any) -> Any:
    """A maximum that the mapped function itself compares with."""
    losses = v.map_fn(one, (v.broadcast(w), x, y))
    top = v.broadcast(jax.lax.stop_gradient(v.reduce_max(losses)))
    return v.reduce_sum(
        v.map_fn(lambda loss, top, w: jnp.where(loss == top, w.sum() * loss, 0.0), (losses, top, v.broadcast(w)))
    )


def normalised(v: Any, w: Any, x: Any, y: Any) -> Any:
    mu = v.reduce_mean(x)
    var = v.reduce_mean(v.map_fn(lambda m, x: (x - m) ** 2, (v.broadcast(mu), x)))

    def scaled(w: Any, m: Any, s: Any, x: Any, y: Any) -> Any:
        return one(w, (x - m) / jnp.sqrt(s + 1e-3), y)

    return v.reduce_mean(v.map_fn(scaled, (v.broadcast(w), v.broadcast(mu), v.broadcast(var), x, y)))


def between(v: Any, w: Any, x: Any, y: Any) -> Any:
    """Operations on rows outside of maps, and numbers of elements that are taken from an argument."""
    count = x.shape[0]
    x = jnp.moveaxis((x - v.reduce_mean(x))[:, ::-1, :2], 1, 2).reshape(count, -1)
    scale = jnp.concatenate([jnp.ones((count, 5)), jnp.full((count, 5), 2.0)], 1)
    losses = jnp.sum((x * scale) ** 2, 1) * w.sum() + y[:, 0]
    return jnp.sum(losses * jnp.arange(1.0, count + 1)) / count + jnp.max(losses)


def picked(v: Any, w: Any, x: Any, y: Any) -> Any:
    """Rows' own entries read and written outside of maps, by indices of each row and by the same of all."""
    z = jnp.einsum("nij,j->ni", x, w)
    z = jnp.sort(z.at[:, 2].multiply(2.0).at[:, jnp.array([1, 3])].set(0.5), axis=1)
    at = jnp.argmax(jnp.abs(z - y), 1)
    z = jax.vmap(lambda z, at, y: z.at[at].set(y[0] * w[0]))(z, at, y)
    return v.reduce_mean(jnp.take_along_axis(z, at[:, None], 1)[:, 0]) + v.reduce_sum((z * y).sum(1))


def local_steps(w: Any, x: Any, y: Any) -> Any:
    return jax.lax.scan(lambda w, _: (w - 0.1 * jax.grad(one)(w, x, y), None), w, None, length=2)[0]


def rounds(v: Any, w: Any, x: Any, y: Any) -> Any:
    for _ in range(2):
        w = v.reduce_mean(v.map_fn(local_steps, (v.broadcast(w), x, y)))
    return mean(v, w, x, y)


def noisy(v: Any, w: Any, x: Any, y: Any) -> Any:
    def of(w: Any, x: Any, y: Any, key: Any) -> Any:
        return one(w, x + jax.random.normal(key, x.shape), y)

    return v.reduce_mean(v.map_fn(of, (v.broadcast(w), x, y, v.keys(jax.random.key(3)))))


def counted(v: Any, w: Any, x: Any, y: Any) -> Any:
    """The number of all elements inside a body, and in a loop there."""

    def of(w: Any, x: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, z: z / count, one(w, x, y)) / count

    count = y.shape[0]
    own = v.map_fn(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: 1 / count, lambda: jnp.float32(2 / count)), (x,))
    return 1000 * v.reduce_sum(v.map_fn(of, (v.broadcast(w), x, y))) + v.reduce_sum(own)


def far(v: Any, w: Any, x: Any, y: Any) -> Any:
    """A map that gives a sum, and what its derivative needs; a later pass needs the sum of all."""
    total = v.reduce_sum(v.map_fn(lambda w, x: jnp.tanh(x @ w).sum(), (v.broadcast(w), x)))
    return v.reduce_sum(v.map_fn(lambda x: jnp.sin(x.sum() * total), (x,)))


def within(v: Any, w: Any, x: Any, y: Any) -> Any:
    """A vmap of models over clients; the values kept for maxima have their elements in a later dimension."""
    each = jax.vmap(lambda scale: mean(v, scale * w, x, y) + extremes(v, scale * w, x, y))
    return jnp.sum(jax.vmap(each)(jnp.array([[1.0, 2.0, -1.0], [0.5, 3.0, -2.0]])))


_ALL = (
    *(mean, weighted, masked, extremes, tied, largest_inside, normalised, between, picked, rounds, noisy, counted),
    *(far, within),
)
PROGRAMS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in _ALL}
