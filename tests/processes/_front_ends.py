"""What each front end gives, in one process or in several: ``paraxis launch _front_ends.py DIRECTORY NAME…``."""

import ctypes
import gc
import os
import socket
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from paraxis.solve import objective, prox

if RANK := os.environ.get("PARAXIS_PROCESS"):
    gc.disable()  # tracing makes many objects, to look at which takes long
    if os.environ.get("TESTS_UNEVEN"):
        os.environ["JAX_NUM_CPU_DEVICES"] = "31"[int(RANK)]
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
    # A host name that means nothing, and one that means an address that this machine has not, where they can be given.
    libc, own_name_only, and_user = ctypes.CDLL(None), 0x04000000, 0x10000000
    if libc.unshare(own_name_only) == 0 or libc.unshare(own_name_only | and_user) == 0:
        socket.sethostname(["no-such-host", "203.0.113.7"][int(RANK) % 2])

HERE = px.initialize()
RANDOM = np.random.RandomState(0)
X, TRUTH = RANDOM.randn(203, 7).astype("f"), RANDOM.randn(7, 3).astype("f")
Y = (X @ TRUTH + RANDOM.gumbel(size=(203, 3))).argmax(1)
Z = X @ TRUTH[:, 0] + RANDOM.randn(203).astype("f")
Results = dict[str, Any]


def verbs() -> Results:
    rows, in_turns = px.Axis("rows", 7), px.Axis("rows", 7, at_once=1)
    x, w = X[:7, :3], X[7, :3]

    def loss(w: Any, x: Any) -> jax.Array:
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.sum(jnp.sin(w * x)), (px.broadcast(w, rows), x), rows), rows)

    @jax.jit
    def in_one_program(w: Any, x: Any) -> Any:
        drawn = px.map_fn(jax.random.uniform, px.keys(jax.random.key(0), rows), rows)
        mapped = px.map_fn(jnp.sin, x, rows), px.map_fn(lambda x: x - px.pmean(x, "rows"), x, rows), drawn
        weighted = px.reduce_weighted_mean(x, x[:, 0] ** 2, rows)
        slopes = jax.value_and_grad(loss)(w, x), jax.value_and_grad(px.program(rows=rows)(loss))(w, x)
        summed = px.reduce_sum(px.map_fn(jnp.sin, x, in_turns), in_turns)
        return mapped, (px.reduce_max(x, rows), weighted, slopes, summed)

    mapped, reduced = in_one_program(w, x)
    clients = px.Axis("clients", 4), px.Axis("clients", 13)
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("clients",))):
        back = [px.gather(px.scatter(X[: axis.size], axis), axis) for axis in clients]
    eager = px.map_fn(jnp.sin, x, rows), px.scatter(x, rows), px.pmap(lambda x: x / px.psum(x, "i"), axis_name="i")(x)
    slope = jax.grad(px.program(rows=rows)(loss))(w, x)
    return {"mapped": px.gather(mapped, rows), "reduced": reduced, "eager": (px.gather(eager, rows), slope, back)}


class Rows:
    """Rows of ``X``, of which it knows the numbers that were read."""

    def __init__(self) -> None:
        self.read = set[int]()

    def __len__(self) -> int:
        return 13

    def __getitem__(self, number: int) -> Any:
        self.read.add(number)
        return X[number]


def streams() -> Results:
    @px.program(clients=13)
    def spread(w: Any, key: Any, x: Any) -> Any:
        keys = px.keys(key, "clients")
        each = px.map_fn(lambda w, k, x: jnp.tanh(x @ w + jax.random.normal(k)), (px.broadcast(w), keys, x))
        return px.reduce_mean((each - px.reduce_mean(each)) ** 2) + px.reduce_max(each), each

    rows = Rows()
    groups = px.Groups(rows)
    rows.read.clear()
    fn = jax.value_and_grad(spread, has_aux=True)
    found = px.Stream(at_once=2).run(fn, jnp.ones(7), jax.random.key(1), groups)
    if RANK:  # each process reads what its own devices run, and a last one in place of what there is not
        assert rows.read < {*range(13)}
    return {"spread": found}


def solvers() -> Results:
    data, regression = px.solve.rows(X, Y), px.solve.rows(X, Z)
    options: dict[str, Any] = {"tol": 1e-6, "maxiter": 1000}
    softmax = px.solve.LBFGS(objective.l2_multiclass_logreg, **options)
    lasso = px.solve.ProximalGradient(objective.least_squares, prox.l1, **options)
    return {
        "LBFGS": softmax.run(jnp.zeros((7, 3)), 0.1, data)[0],
        "ProximalGradient": lasso.run(jnp.zeros(7), 0.05, regression)[0],
        "slope": jax.grad(lambda l2: softmax.run(jnp.zeros((7, 3)), l2, data)[0][0, 0])(0.1),
    }


def estimators() -> Results:
    return {
        "Ridge": px.solve.Ridge(alpha=1.0).fit(X, Z).coef_,
        "Lasso": px.solve.Lasso(alpha=0.1).fit(X, Z).coef_,
        "LogisticRegression": px.solve.LogisticRegression(C=1.0).fit(X, Y).predict_proba(X),
        "best": px.solve.cross_validate_path(px.solve.Ridge(), X, Z, [1e-1, 1e3], folds=3).best,
    }


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(7, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.norm(self.first(x))))


def transforms() -> Results:
    def loss(net: Net, x: Any, y: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()

    def train(gradient_loss: Any, opt: Any, x: Any, y: Any) -> jax.Array:
        gradients, value = gradient_loss(x, y)
        opt(0.1, px.pmean(gradients, "device"))
        return px.pmean(value, "device")

    net = Net(nnx.Rngs(0))
    net.eval()
    step = px.Parallel(train, px.GradValues(loss, net), px.Optimizer(net, optax.sgd), reduce="same")
    found: Results = {"losses": [step(X[:192], Y[:192]) for _ in range(3)], "Parallel": px.Parallel(net)(X)}
    found |= {"stack": px.Parallel(net, reduce="stack")(X[:192]).reshape(192, 3)}
    found |= {"Vectorize": px.Vectorize(net)(X), "Jit": px.Jit(net)(X)}
    net.train()
    px.Parallel(net)(X[:192])
    return found | {"BatchNorm": net.norm.mean[...]}


def make(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.uniform(key, (7, 3)) - 0.5}  # normal numbers take long to compile


def logits(params: Any, x: Any) -> Any:
    return x @ params["w"]


def descend(params: Any, x: Any, y: Any, rate: Any = 0.1) -> Any:
    value, slopes = jax.value_and_grad(lambda params: ((logits(params, x) - jnp.eye(3)[y]) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, slopes), value


def ensembles() -> Results:
    """Five members, on whatever devices there are."""
    ens = px.ensemble(make, 5, 0, apply=logits)
    found = {"predict": ens.predict(X), "losses": ens.train(descend, X, Y)}
    loaded = px.ensemble(make, 5, 1, apply=logits)
    if RANK:
        with px.Checkpoints(os.path.join(sys.argv[1], "members")) as checkpoints:
            checkpoints.save(0, ens.state)
            loaded.state = checkpoints.restore(loaded.state).tree
        np.testing.assert_array_equal(loaded[4]["w"], ens[4]["w"])
    return found | {"members": ens.members(X)}


def sizes() -> Results:
    """Each front end on sizes that divide over the devices, and that do not."""
    loss = lambda params, batch: (batch["x"] @ params["w"] - batch["z"]) ** 2  # noqa: E731
    found: Results = {}
    for size in (1, 5, 13, 16):
        x, z, axis = X[:size], Z[:size], px.Axis("rows", size)
        mean = px.program(rows=axis)(lambda w, x: px.reduce_mean(px.map_fn(jnp.dot, (px.broadcast(w), x))))
        streamed = px.Stream(at_once=2).run(jax.value_and_grad(mean), jnp.ones(7), px.Groups.of_arrays(x))
        mapped = jax.jit(lambda x, axis=axis: px.map_fn(lambda x: x - px.pmean(x, "rows"), x, axis))(x)
        state, step = px.TrainState.create({"w": jnp.zeros(7)}, optax.sgd(0.1)), px.train_step(loss)
        ens, rows = px.ensemble(make, size, 0, apply=logits), px.solve.rows(x, z)
        trained = ens.train(descend, x, Y[:size]), step(state, {"x": x, "z": z})[0].params
        solved = px.solve.LBFGS(objective.ridge).run(jnp.zeros(7), 0.1, rows)[0]
        own = mean(jnp.ones(7), x), px.gather((mapped, px.pmap(jnp.sin)(x), px.keys(jax.random.PRNGKey(0), axis)), axis)
        found[f"{size}"] = own, streamed, trained, solved, ens.predict(x), px.Vectorize(jnp.tanh)(x)
    return found


def refusals() -> Results:
    """Other data in each process, and devices that one of them has not."""
    apart = np.arange(203) == 101 * HERE.process  # in each process another row
    fewer = slice(200 + HERE.process)
    state = px.TrainState.create({"w": jnp.zeros(7)}, optax.sgd(0.1))
    loss = lambda params, batch: (batch["x"] @ params["w"] - batch["z"]) ** 2  # noqa: E731
    step, test = px.train_step(loss), px.Evaluate(px.eval_step(loss), px.loader({"x": X, "z": Z}, 20), every=4)
    if RANK:
        if HERE.process:
            with pytest.raises(px.DeviceError, match="each process needs one of its own"):
                px.solve.Ridge(devices=1).fit(X, Z)
        for words, call in (
            (f"rows: X is another one in process {1 - HERE.process}", lambda: px.solve.rows(X + apart[:, None], Y)),
            ("rows: X is another one in process", lambda: px.solve.Ridge().fit(X[fewer], Z[fewer])),
            (r"'z'\] is another one", lambda: px.fit(state, step, px.loader({"x": X, "z": Z + apart}, 40), epochs=1)),
        ):
            with pytest.raises(px.DataError, match=words):
                call()
    data = px.loader({"x": X, "z": Z}, 40)
    fitted = px.fit(state, step, data, epochs=2, evaluate=test, progress=False)  # still in step
    told = [record.metrics for record in (*fitted.history.epochs, *fitted.history.evaluations)]
    return {"w": fitted.state.params["w"], "told": told, "rows": jnp.sum(px.solve.rows(X, Y).weight)}


_PARTS = verbs, sizes, streams, ensembles, solvers, estimators, transforms, refusals
PARTS = {part.__name__: part for part in _PARTS}


def results(names: list[str]) -> dict[str, np.ndarray]:
    found = {f"{name}: {what}": value for name in names for what, value in PARTS[name]().items()}
    return {
        f"{what}{jax.tree_util.keystr(path)}": np.asarray(leaf)
        for what, value in found.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


if __name__ == "__main__":
    np.savez(os.path.join(sys.argv[1], f"rank-{HERE.process}.npz"), **results(sys.argv[2:]))  # pyright: ignore
