"""Two processes, with three devices and with one: ``paraxis launch -n 2 _uneven.py``. Each result is NumPy's."""

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "3" if os.environ["PARAXIS_PROCESS"] == "0" else "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

px.initialize()
assert jax.device_count() == 4
X = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
W, SLOPE = np.ones(3, np.float32), 2 * (X.sum(1) @ X) / 13


@px.program(clients=13)
def loss(w, x):
    return px.reduce_mean(px.map_fn(lambda w, x: (x @ w) ** 2, (px.broadcast(w), x)))


for found in (
    jax.grad(loss)(W, X),
    jax.jit(jax.grad(loss))(W, X),
    px.Stream(at_once=1).run(jax.grad(loss), W, px.Groups.of_arrays(X)),
):
    np.testing.assert_allclose(found, SLOPE, rtol=1e-5)
state = px.TrainState.create({"w": jnp.asarray(W)}, optax.sgd(0.1))
step = px.train_step(lambda params, batch: (batch["x"] @ params["w"]) ** 2)
fitted = px.fit(state, step, px.loader({"x": X}, 13), epochs=1, progress=False)
np.testing.assert_allclose(fitted.state.params["w"], W - 0.1 * SLOPE, rtol=1e-5)
data = px.solve.rows(X, X @ W)
solver = px.solve.LBFGS(px.solve.objective.least_squares, tol=1e-6)
np.testing.assert_allclose(solver.run(W * 0, data=data).params, W, rtol=1e-3)
for size in (4, 13):
    axis = px.Axis("clients", size)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()), ("clients",))):
        np.testing.assert_array_equal(px.gather(px.scatter(np.arange(size), axis), axis), np.arange(size))
print("right", flush=True)  # noqa: T201
