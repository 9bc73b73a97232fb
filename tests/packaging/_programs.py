"""The extras that ``pyproject.toml`` promises, the packages each of them brings, and a small program for each.

The programs are run with an installed Paraxis, outside of a clone.
"""

import re
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_USERS = ("nnx", "solve", "tables", "train", "demo", "pool", "ray", "tpu")

_IMPORTED_AS = {"jax[tpu]": "libtpu", "orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}


def imports(extra: str) -> set[str]:
    """Return the names under which the packages of an extra are imported."""
    found = set[str]()
    for requirement in EXTRAS[extra]:
        match = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?.*", requirement)
        assert match, requirement
        package, of_it = match.groups()
        if package == PROJECT["name"]:
            found |= set[str]().union(*map(imports, of_it.split(",")))
        else:
            found.add(_IMPORTED_AS.get(requirement, _IMPORTED_AS.get(package, package)))
    return found


OPTIONAL = set[str]().union(*map(imports, FOR_USERS))

BEGIN = """
    import subprocess
    import sys
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    import numpy as np
    import paraxis as px
"""

BARE = """
    x, axis = np.arange(30.0).reshape(10, 3), px.Axis("clients", 10)
    mean = px.reduce_mean(px.map_fn(jnp.square, jnp.asarray(x), axis), axis)
    assert np.allclose(mean, (x**2).mean(0))
    gradient = jax.grad(lambda w: px.reduce_sum(px.map_fn(lambda x: w @ x, jnp.asarray(x), axis), axis))(jnp.ones(3))
    assert np.allclose(gradient, x.sum(0))
    solution = px.solve.LBFGS(lambda w: jnp.sum((w - 1) ** 2)).run(jnp.zeros(3))
    assert np.allclose(solution.params, 1, atol=1e-3)

    Path("job.py").write_text("import paraxis as px\\npx.initialize()\\nimport jax\\nprint(jax.process_count())\\n")
    paraxis = str(Path(sys.executable).with_name("paraxis"))
    launched = subprocess.run([paraxis, "launch", "-n", "2", "job.py"], capture_output=True, text=True)
    assert launched.returncode == 0 and launched.stdout.count("2") == 2, launched
"""

NNX = """
    import optax
    from flax import nnx

    x = jnp.ones((10, 3))
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert np.allclose(px.Jit(net)(x), net(x), atol=1e-6)
    assert np.allclose(px.Parallel(net)(x), net(x), atol=1e-6)
    gradients, _ = px.GradValues(lambda net, x: jnp.sum(net(x)), net)(x)
    px.Optimizer(net, optax.sgd)(0.1, gradients)
    ens = px.ensemble(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)), 3, 0)
    assert ens.predict(x).shape == (10, 2)
"""

POOL = """
    x, axis = np.arange(30.0, dtype="float32").reshape(10, 3), px.Axis("clients", 10)

    def total(w, x):
        return px.reduce_sum(px.map_fn(lambda w, x: w @ x, (px.broadcast(w, axis), x), axis), axis)

    stream = px.Stream(at_once=5, map=MAP)
    gradient = stream.run(jax.grad(total), jnp.ones(3), px.Groups.of_arrays(x))
    assert np.allclose(gradient, x.sum(0))
"""

SOLVE = """
    import sklearn.linear_model

    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(50, 3)), rng.normal(size=50)
    ours, theirs = px.solve.Ridge().fit(X, y), sklearn.linear_model.Ridge().fit(X, y)
    assert np.allclose(ours.coef_, theirs.coef_, atol=1e-4)
"""

TABLES = """
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    Path("data.csv").write_text("\\n".join(["a,b,y", *(f"{a},{b},{a - b}" for a, b in X)]))
    table = px.Table.csv("data.csv", target="y")
    model = px.solve.Ridge(alpha=1e-6).fit(table, engine=px.Stream(at_once=20))
    assert np.allclose(model.coef_, [1, -1], atol=1e-3)
"""

TRAIN = """
    import optax
    from flax import nnx

    def loss(net, batch):
        return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)

    x = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
    data = px.loader({"x": x, "y": x.sum(1, keepdims=True)}, 16, seed=0)
    for epochs in (1, 2):  # the second goes on from the first
        state = px.TrainState.create(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.adam(0.1))
        px.fit(state, px.train_step(loss), data, epochs=epochs, log="log.jsonl", tensorboard="board",
               checkpoint=px.Checkpoints("kept", every=2)).history.plot("curves.png")
    assert all(Path(name).exists() for name in ("curves.png", "log.jsonl", "kept", "board"))
"""

DEMO = """
    command = [str(Path(sys.executable).with_name("paraxis")), "demo", "--quick", "--out", "demo"]
    subprocess.run(command, check=True)
    assert len(list(Path("demo").rglob("*.png"))) == 5
"""

TPU = """
    rows = px.Axis("rows", 32)
    report = px.explain(lambda x: px.reduce_mean(px.map_fn(jnp.sin, x, rows), rows), on="v5e:4x4")(jnp.ones((32, 8)))
    assert report.num_devices == 16
    assert report.communication.count["all_reduce"] == 1
"""

EXAMPLES = "import matplotlib, mlxtend, optax, scipy, sklearn"
BENCH = f"{EXAMPLES}\nimport drjax, jaxopt"
LIBRARIES = "import blackjax, diffrax, equinox, lineax, numpyro, optimistix"
TEST = f"{BENCH}\n{LIBRARIES}\nimport coverage, grain, hypothesis, penzai, pyarrow, pytest, xdist"
DOCS = "import ipykernel, mkdocs, mkdocstrings, nbclient"
LINT = "import grimp, mypy, pyright, ruff"

# By extra; what is not for users is imported only, as the project's tests use it.
PROGRAMS = {
    name: textwrap.dedent(BEGIN) + textwrap.dedent(program)
    for name, program in {
        "bare": BARE,
        "nnx": NNX,
        "pool": POOL.replace("MAP", "map"),
        "ray": POOL.replace("MAP", "px.ray_map()"),
        "solve": SOLVE,
        "tables": TABLES,
        "train": TRAIN,
        "tpu": TPU,
        "demo": DEMO,
        "examples": EXAMPLES,
        "bench": BENCH,
        "libraries": LIBRARIES,
        "test": TEST,
        "docs": DOCS,
        "lint": LINT,
        "dev": f"{TEST}\n{DOCS}\n{LINT}",
    }.items()
}
