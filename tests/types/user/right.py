"""A user's code without mistakes: type checkers know what each call gives, and say nothing."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import paraxis as px

x, host = jnp.ones((8, 3)), np.ones((8, 3))
clients = px.Axis("clients", 8)


def of_one(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(w * x)


assert_type(px.broadcast(2.0, clients), jax.Array)
assert_type(px.scatter(host, clients), jax.Array)
assert_type(px.broadcast({"w": x}, clients), dict[str, jax.Array])
assert_type(px.map_fn(of_one, (px.broadcast(x[0], clients), host), clients), jax.Array)
assert_type(px.map_fn(lambda x: jnp.sin(x), x, clients, lowering="unroll"), jax.Array)
assert_type(px.reduce_mean(x, clients, where=x[:, 0] > 0), jax.Array)
assert_type(px.reduce_weighted_mean({"w": x}, x[:, 0], clients), dict[str, jax.Array])
whole: np.ndarray = px.gather(x, clients)  # under jit it is a JAX array
jax.jit(lambda x: px.gather(x, clients).at[0].set(0.0))
assert_type(px.keys(jax.random.key(0), clients), jax.Array)
assert_type(px.pmap(of_one, "clients", in_axes=(None, 0))(x[0], x), jax.Array)


@px.program(clients=8)
def loss(w: jax.Array, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    losses = px.map_fn(of_one, (px.broadcast(w), x))
    return scale * px.reduce_mean(losses)


assert_type(loss(x[0], x), jax.Array)
assert_type(loss(x[0], x=x, scale=2.0), jax.Array)
gradient = jax.grad(loss)(x[0], x)


class Clients:
    @px.program(clients=8)
    def mean(self, x: jax.Array) -> jax.Array:
        return px.reduce_mean(x)


assert_type(Clients().mean(x), jax.Array)


def error(net: nnx.Linear, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((net(x) - y) ** 2)


net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
assert_type(px.Jit(error, net)(x, y=x), jax.Array)
assert_type(px.Parallel(error, net, reduce="mean")(x, x), jax.Array)
assert_type(px.Vectorize(error, net, batch_axis=(0, None))(x, x), jax.Array)
assert_type(px.Jit(net)(host), jax.Array)  # NumPy's arrays are taken too
assert_type(px.GradValues(error, net)(x, x)[1], jax.Array)


def batch_loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> jax.Array:
    return error(model, batch["x"], batch["y"])


state = px.TrainState.create(net, optax.adam(1e-3))
step = px.train_step(batch_loss, clip=1.0)
state, metrics = step(state, {"x": x, "y": x})
assert_type(state, px.TrainState)
assert_type(metrics["loss"], px.Mean)
assert_type(px.fit(state, step, [{"x": x}], epochs=1).state, px.TrainState)
ens = px.ensemble(lambda key: jax.random.normal(key, (3,)), 4, 0, apply=lambda w, x: x @ w)
assert_type(ens, px.Ensemble)
assert_type(len(ens), int)
assert_type(ens.state, dict[str, jax.Array])
fitted = ens.fit(lambda w, x: w - x.mean(), (x,), batch_size=1, epochs=1, callbacks=lambda event: event.metrics)
assert_type(fitted.state, px.Ensemble)
assert_type(fitted.history.curve("loss"), tuple[np.ndarray, np.ndarray])
assert_type(px.train.Mean(1.0, 2.0), px.Mean)
assert_type(px.errors.DataError("x"), px.DataError)
assert_type(px.testing.communication(jnp.sin, x), px.testing.Communication)
assert_type(px.explain(jnp.sin)(x), px.reports.Report)
assert_type(px.show({"x": x}), px.reports.Arrays)
assert_type(px.tabulate(net, x, training=True), px.reports.ModuleTable)
assert_type(px.tabulate(net, x).total.flops, int)
assert_type(px.compare({"sin": jnp.sin, "cos": (jnp.cos, x)}, x, seconds=1), px.reports.Comparison)
assert_type(px.compare({"sin": jnp.sin}, x)["sin"].interval, tuple[float, float] | None)
assert_type(px.show(x).leaves[0].blocks, tuple[tuple[int, ...], ...])
assert_type(px.explain(jnp.sin)(x).summary(), dict[str, int])
assert_type(px.solve.Ridge().score(px.Table.of_arrays([[1.0]], [1.0])), float)
assert_type(px.solve.LBFGS(lambda w: jnp.sum(w**2), maxiter=3).maxiter, int)
