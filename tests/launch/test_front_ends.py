"""Each front end on two processes with two devices each: the numbers of others on one device, in both."""

from pathlib import Path

import pytest

from tests.launch._support import Launch, launched  # noqa: F401  (a fixture)

BEGINNING = """
import gc, os, sys
gc.disable()  # tracing makes many objects, to look at which takes long
flags = " --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
import jax, jax.numpy as jnp, numpy as np
import paraxis as px

here = px.initialize()
assert jax.device_count() == 4 and jax.local_device_count() == 2
random = np.random.RandomState(0)
X, truth = random.randn(203, 7).astype("f"), random.randn(7, 3).astype("f")
y = (X @ truth + random.gumbel(size=(203, 3))).argmax(1)
z = X @ truth[:, 0] + random.randn(203).astype("f")


def close(got, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=tolerance, atol=tolerance)


def refused(kind, part, fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except kind as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"{part}: not refused")
"""

SOLVERS = """
from paraxis.solve import objective, prox

data, regression = px.solve.rows(X, y), px.solve.rows(X, z)
strict = dict(tol=1e-5, maxiter=500)
penalised = objective.l2_multiclass_logreg
"""

LBFGS = """
def slope(params):
    scores = X @ params
    shares = np.exp(scores - scores.max(1, keepdims=True))
    return X.T @ (shares / shares.sum(1, keepdims=True) - np.eye(3)[y]) / len(X) + 0.1 * params


params, state = px.solve.LBFGS(penalised, **strict).run(jnp.zeros((7, 3)), 0.1, data)
close(slope(np.asarray(params, float)), 0, 2e-5)
"""

OTHER_SOLVERS = """
from sklearn import linear_model

free = linear_model.LogisticRegression(C=1 / (203 * 0.1), fit_intercept=False, tol=1e-8, max_iter=1000).fit(X, y)
close(px.solve.LBFGS(penalised, **strict).run(jnp.zeros((7, 3)), 0.1, data)[0].T, free.coef_, 1e-3)
of_own = lambda w, data: jnp.sum(data.weight * (data.X @ w - data.y) ** 2) / jnp.sum(data.weight)
close(px.solve.LBFGS(of_own, **strict).run(jnp.zeros(7), regression)[0], np.linalg.lstsq(X, z, rcond=None)[0], 1e-3)
lasso = px.solve.ProximalGradient(objective.least_squares, prox.l1, **strict).run(jnp.zeros(7), 0.05, regression)[0]
close(lasso, linear_model.Lasso(alpha=0.05, fit_intercept=False, tol=1e-8).fit(X, z).coef_, 1e-3)
"""

DERIVATIVES = """
solver = px.solve.LBFGS(penalised, tol=1e-6, maxiter=1000)
slope = jax.grad(lambda l2: solver.run(jnp.zeros((7, 3)), l2, data)[0][0, 0])(0.1)
low, high = (solver.run(jnp.zeros((7, 3)), l2, data)[0][0, 0] for l2 in (0.09, 0.11))
close(slope, (high - low) / 0.02, 2e-2)
"""

ESTIMATORS = """
from sklearn import linear_model

close(px.solve.Ridge(alpha=1.0).fit(X, z).coef_, linear_model.Ridge(alpha=1.0).fit(X, z).coef_, 1e-3)
if here.process:
    refused(px.DeviceError, "each process needs one of its own", px.solve.Ridge(devices=1).fit, X, z)
softmax = linear_model.LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(X, y)
close(px.solve.LogisticRegression(C=1.0).fit(X, y).predict_proba(X), softmax.predict_proba(X), 1e-3)
found = px.solve.cross_validate_path(px.solve.Ridge(), X, z, [1e-1, 1e3], folds=3)
assert found.best == 0.1
path = px.solve.Ridge().path(X, z, [1.0, 10.0])
for alpha, coef in zip((1.0, 10.0), path.coef, strict=True):
    close(coef, linear_model.Ridge(alpha=alpha).fit(X, z).coef_, 1e-3)
"""

MODULES = """
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(7, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def loss(net, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()


def train(gradient_loss, opt, x, y):
    gradients, value = gradient_loss(x, y)
    opt(0.1, px.pmean(gradients, "device"))
    return px.pmean(value, "device")


net, alone = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
net.eval(), alone.eval()
gradient_loss = px.GradValues(loss, net)
step = px.Parallel(train, gradient_loss, px.Optimizer(net, optax.sgd), reduce="same")
for _ in range(3):
    value, slopes = nnx.value_and_grad(loss)(alone, X[:200], y[:200])
    close(step(X[:200], y[:200]), value)
    old = nnx.state(alone, nnx.Param)
    nnx.update(alone, jax.tree.map(lambda p, g: p - 0.1 * g, old, slopes))
expected = np.asarray(alone(X))
close(px.Parallel(net)(X), expected)
close(px.Parallel(net, reduce="stack")(X[:200]), expected[:200].reshape(4, 50, 3))
close(px.Parallel(lambda net, x: net(x).mean(), net)(X[:200]), expected[:200].reshape(4, -1).mean(1))
"""

OTHER_TRANSFORMS = """
close(px.Vectorize(net)(X), expected)
close(px.Jit(net)(X), expected)
net.train()
px.Parallel(net)(X[:200])
close(net.norm.mean, 0.01 * np.asarray(net.first(X[:200])).mean(0))
"""

ENSEMBLES = """
def make(key):
    return {"w": jax.random.uniform(key, (7, 3)) - 0.5}  # normal numbers take long to compile


def logits(params, x):
    return x @ params["w"]


def step(params, x, y, rate=0.1):
    cost = lambda params: ((logits(params, x) - jnp.eye(3)[y]) ** 2).mean()
    value, slopes = jax.value_and_grad(cost)(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, slopes), value


size = int(sys.argv[1])
ens = px.ensemble(make, size, 0, apply=logits)
alone = [make(jax.random.fold_in(jax.random.key(0), i)) for i in range(max(size, 4))]
one_on_each_device = px.ensemble(make, 4, 0, apply=logits)
close(one_on_each_device.members(X), np.stack([logits(p, X) for p in alone[:4]]))
alone = alone[:size]
step_alone, softmax_alone = jax.jit(step), jax.jit(lambda params: jax.nn.softmax(logits(params, X)))
softmax = lambda alone: np.mean([softmax_alone(p) for p in alone], 0)
close(ens.predict(X), softmax(alone))
for _ in range(2):
    alone, values = zip(*(step_alone(p, X, y) for p in alone))
    close(ens.train(step, X, y), np.stack(values))
loaded = px.ensemble(make, size, 1, apply=logits)
with px.Checkpoints(sys.argv[2]) as checkpoints:
    checkpoints.save(0, ens.state)
    loaded.state = checkpoints.restore(loaded.state).tree
np.testing.assert_array_equal(loaded[size - 1]["w"], ens[size - 1]["w"])
close(ens[size - 1]["w"], alone[-1]["w"])
"""

MORE_OF_ENSEMBLES = """
close(ens.members(X), np.stack([logits(p, X) for p in alone]))
mean, variance = ens.predict(X, average="moments")
close(variance, np.var([logits(p, X) for p in alone], 0))
doubled = px.gather(px.map_fn(lambda p: 2 * p["w"], ens.stacked(), ens.axis), ens.axis)
close(doubled, np.stack([2 * p["w"] for p in alone]))
close(ens.drop(0).predict(X), softmax(alone[1:]))
close(ens.add(ens[1]).predict(X), softmax([*alone, alone[1]]))
assert ens.finite().all()
np.testing.assert_array_equal(loaded.members(X), ens.members(X))
rates = jnp.linspace(0.1, 1.0, size)
alone, values = zip(*(step_alone(p, X, y, rate) for p, rate in zip(alone, rates)))
close(ens.train(step, X, y, rates, in_axes=(None, None, 0)), np.stack(values))
validated = dict(evaluate=lambda p, x, y: {"loss": step(p, x, y)[1]}, held_out=(X, y))
history = ens.fit(step, (X, y), epochs=2, batch_size=50, key=1, **validated)
close(history.epochs[-1].metrics["test/loss"], [step(p, X, y)[1] for p in ens])
"""

OTHER_DATA = """
import optax

apart = np.arange(203) == 101 * here.process  # in each process another row
refused(px.DataError, f"rows: X is another one in process {1 - here.process}", px.solve.rows, X + apart[:, None], y)
refused(px.DataError, "rows: y is another one in process", px.solve.rows, X, y + apart)
refused(px.DataError, "rows: sample_weight is another one", px.solve.rows, X, y, 1.0 + apart)
fewer = slice(200 + here.process)
refused(px.DataError, "rows: X is another one in process", px.solve.Ridge().fit, X[fewer], z[fewer])
state = px.TrainState.create({"w": jnp.zeros(7)}, optax.sgd(0.1))
train = px.train_step(lambda params, batch: (batch["x"] @ params["w"] - batch["z"]) ** 2)
data = px.loader({"x": X, "z": z + apart}, 40)
refused(px.DataError, "'z'] is another one in process", px.fit, state, train, data, epochs=1, progress=False)
refused(px.DataError, "'z'] is another one in process", px.fit, state, train, [{"x": X, "z": z + apart}], epochs=1)
assert px.fit(state, train, px.loader({"x": X, "z": z}, 40), epochs=1, progress=False).state.step == 6
assert float(jnp.sum(px.solve.rows(X, y).weight)) == 203  # they are in step with each other still
"""

SCRIPTS = {
    "lbfgs": SOLVERS + LBFGS,
    "other solvers": SOLVERS + OTHER_SOLVERS,
    "derivatives": SOLVERS + DERIVATIVES,
    "estimators": ESTIMATORS,
    "parallel": MODULES,
    "other transforms": MODULES + OTHER_TRANSFORMS,
    "ensembles": ENSEMBLES,
    "other data": OTHER_DATA,
    "more of ensembles": ENSEMBLES + MORE_OF_ENSEMBLES,
}
OF_EVERY_DAY = [("ensembles", 5)]
AT_NIGHT = [
    (name, 0)
    for name in ("lbfgs", "parallel", "other solvers", "derivatives", "estimators", "other transforms", "other data")
]
AT_NIGHT += [("more of ensembles", size) for size in (2, 4, 5)]


@pytest.mark.parametrize(
    ("name", "size"), [*OF_EVERY_DAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in AT_NIGHT)]
)
def test_on_two_processes_as_on_one(launched: Launch, tmp_path: Path, name: str, size: int) -> None:  # noqa: F811
    script = tmp_path / "script.py"
    script.write_text(BEGINNING + SCRIPTS[name] + f"\nprint('held: {name}')\n")
    status, out, error = launched(str(script), str(size), str(tmp_path / "members.npz"), devices=2)
    assert status == 0, out + error
    assert out.count(f"held: {name}") == 2
