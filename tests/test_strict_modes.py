"""No public face: under JAX's strict modes, a front end gives what it gives without them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import STRICT_MODES, assert_close

MESH = Mesh(np.array(jax.devices()), ("device",))
WHOLE = NamedSharding(MESH, P())
RNG = np.random.default_rng(0)
X = RNG.normal(size=(21, 3)).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5] + 0.1 * RNG.normal(size=21)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int32)
PLACED = jax.device_put((X, Y), WHOLE)
STRENGTH, START, KEY = jnp.float32(0.1), jnp.zeros(3), jax.random.key(0)
AXIS = px.Axis("rows", 21, mesh=MESH, over="device")
DATA = px.solve.rows(X, Y, axis=AXIS)
CLASSES = px.solve.rows(X, np.arange(21) % 3, axis=AXIS)
BEGIN, L2 = DATA.shared(((START, jnp.zeros(())), STRENGTH))
BEGIN_CLASSES = DATA.shared(jnp.zeros((3, 3)))
NET, OTHER = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(0))
STATE = px.TrainState.create(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1))
GROUPS = px.Groups.of_arrays(X), px.Groups.of_arrays(Y)


def mean_square(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(x @ w - y))


def of_net(net: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(net(x)[:, 0] - y))


def step(w: Any, x: Any, y: Any) -> Any:
    loss, gradient = jax.value_and_grad(mean_square)(w, x, y)
    return w - STRENGTH * gradient, loss


def ensemble() -> Any:
    ens = px.ensemble(
        lambda key: jax.random.normal(key, (3,)), 3, KEY, apply=lambda w, x: x @ w, mesh=MESH, over="device"
    )
    return ens.train(step, *PLACED), ens.predict(PLACED[0], average="moments"), ens.members(PLACED[0])


@px.program(rows=21)
def streamed(w: Any, x: Any, y: Any) -> Any:
    return px.reduce_mean(px.map_fn(lambda w, x, y: jnp.square(x @ w - y), (px.broadcast(w), x, y)))


def proximal(name: str, strength: Any) -> Any:
    solver = px.solve.ProximalGradient(mean_square, getattr(px.solve.prox, name))
    return solver.run(START, strength, X_HERE, Y_HERE).params


X_HERE, Y_HERE = jnp.asarray(X), jnp.asarray(Y)
GLM = functools.partial(px.solve.objective.glm, l2=True)
CALLS: dict[str, Callable[[], Any]] = {
    "LBFGS": lambda: px.solve.LBFGS(mean_square).run(START, X_HERE, Y_HERE).params,
    "LBFGS, huber": lambda: px.solve.LBFGS(GLM("huber", intercept=True), maxiter=9).run(BEGIN, L2, DATA).params,
    "LBFGS, softmax": lambda: px.solve.LBFGS(GLM("softmax"), maxiter=9).run(BEGIN_CLASSES, L2, CLASSES).params,
    "l1": lambda: proximal("l1", STRENGTH),
    "group": lambda: proximal("group", STRENGTH),
    "box": lambda: proximal("box", (-STRENGTH, STRENGTH)),
    "Ridge": lambda: px.solve.Ridge().fit(X, Y).coef_,
    "LogisticRegression": lambda: px.solve.LogisticRegression(C=0.1, tol=1e-2).fit(X, LABELS).coef_,
    "ensemble": ensemble,
    "Vectorize": lambda: px.Jit(lambda net, x: px.Vectorize(lambda net, x: net(x), net)(x), NET)(X_HERE),
    "Parallel": lambda: px.Parallel(OTHER, mesh=MESH)(PLACED[0]),
    "GradValues": lambda: px.Jit(lambda net, *args: [*px.GradValues(of_net, net)(*args)[0]], NET)(X_HERE, Y_HERE),
    "train_step": lambda: (
        px.train_step(lambda net, b: of_net(net, *b), donate=False)(STATE, (X_HERE, Y_HERE))[0].params
    ),
    "Stream": lambda: px.Stream(at_once=1).run(jax.value_and_grad(streamed), START, *GROUPS),
}


@functools.cache
def expected(call: str) -> Any:
    return CALLS[call]()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=[pytest.mark.slow] * (m == "disable_jit")) for m in STRICT_MODES]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_front_end_gives_the_same_under_a_strict_mode(call: str, mode: str) -> None:
    wanted = expected(call)
    jax.clear_caches()
    with STRICT_MODES[mode]():
        found = jax.block_until_ready(CALLS[call]())
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)
