"""Logistic regression on rows that lie on all devices, after JAXopt's notebook on distributed training.

There, ``pjit`` is told which axis of the data to divide, and L-BFGS takes 100 steps on 50,000 rows of 784 columns in
ten classes, with ``pjit`` and without. Here the loop is the same, ``init_state`` and ``update``; what differs is where
``px.solve.rows`` lays the rows out, on all devices or on one. The objective is that of the notebook, without a penalty.

``data.shared(params)`` puts the first parameters where ``update`` leaves the later ones, so that it is compiled once.
A step ends when its results are there; the first, which compiles, is told apart. After some ten steps rounding allows
no more in float32, and the steps that follow search in vain, some of them long: the ratio of times is also given for
the steps before.

A second part fits the digits of scikit-learn, held-out ones left out, with the penalty of its ``LogisticRegression``,
and compares coefficients, objective, accuracy and passes over the data. scikit-learn counts iterations, each of which
reads the data at least twice, and for a Newton step's Hessian much more often. Its default options
stop at coefficients that are off by 0.04.

Typical output of ``--devices 8`` (about a minute on two cores)::

    50,000 × 784 in 10 classes, 100 steps, on 8 devices and on 1
    devices  first step, s  later ones, ms (median)  passes  objective      error  steps to 1e-05
          8          2.254                    97.88     202  1.6414607  3.006e-07              12
          1           1.22                    154.4     202  1.6414607  6.697e-07              12
    average step-time ratio, 1 device to 8: 2.06; up to step 12: 1.45
      these devices share one CPU: of real ones, the ratio tells nothing
    communicated: 2 all_reduce (31,372 bytes); the gradient once per step, 12 bytes per trial of a line search

    1,437 digits × 64, 360 held out; largest coefficient 2.65
                                      solver  iterations  passes  coefficients differ by  objective above  accuracy
    scikit-learn, newton-cholesky, tol=1e-12           7    ≥ 14               reference                     0.9694
              scikit-learn, lbfgs, tol=1e-12         140   ≥ 280                   3e-06            1e-13    0.9694
                    scikit-learn as it comes          47    ≥ 94                   4e-02            3e-05    0.9722
                        Paraxis on 8 devices          89     182                   4e-11            0e+00    0.9694
                         Paraxis on 1 device          89     182                   4e-11            0e+00    0.9694
               Paraxis on 8 devices, float32          41      86                   3e-05            2e-11    0.9694

Simulated devices share one CPU. That eight of them are faster than one tells how XLA uses two cores, and nothing of
eight real devices. What these would have to send is known: the line ``communicated`` counts it in the compiled step.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import _setting
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from scipy.special import logsumexp
from sklearn.datasets import load_digits, make_classification
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

import paraxis as px
from paraxis.testing import Communication, communication

FEATURES, INFORMATIVE, CLASSES = 784, 50, 10
QUICK_ROWS, QUICK_ITERATIONS = 10_000, 10
SOLVED = 1e-5  # the norm of the gradient
HELD_OUT, C = 360, 1.0


class Labelled(NamedTuple):
    """Rows ``(n, d)`` and their classes ``(n,)``, int32."""

    x: np.ndarray
    y: np.ndarray


class Run(NamedTuple):
    """What came of some steps: times, objective and error after each, ``(iterations,)``, and the last state."""

    seconds: np.ndarray
    values: np.ndarray
    errors: np.ndarray
    params: jax.Array
    state: px.solve.LBFGSState
    communicated: Communication
    num_compiled: int

    @property
    def num_down(self) -> int | None:
        """Steps until the error was as small as ``SOLVED``; ``None`` if it never was."""
        return int(np.argmax(self.errors <= SOLVED)) + 1 if np.any(self.errors <= SOLVED) else None


# --- the notebook's job ----------------------------------------------------------------------------------------------


def classification(num_rows: int) -> Labelled:
    """Ten classes of Gaussian clouds; 50 columns tell them apart."""
    made = make_classification(
        n_samples=num_rows, n_features=FEATURES, n_informative=INFORMATIVE, n_classes=CLASSES, random_state=0
    )
    return Labelled(np.asarray(made[0], np.float32), np.asarray(made[1], np.int32))


def on_devices(data: Labelled, num_devices: int) -> px.solve.Rows:
    """The rows in equal parts on the first devices."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("rows",))
    return px.solve.rows(*data, axis=px.Axis("rows", len(data.y), mesh=mesh))


def minimise(data: px.solve.Rows, num_iterations: int) -> Run:
    """The notebook's loop: as many steps as asked for, solved or not."""
    solver = px.solve.LBFGS(px.solve.objective.multiclass_logreg)
    params = data.shared(jnp.zeros((data.X.shape[1], CLASSES)))
    state = solver.init_state(params, data)
    update: Any = jax.jit(solver.update)

    seconds, values, errors = np.zeros((3, num_iterations))
    for i in range(num_iterations):
        start = time.perf_counter()
        params, state = jax.block_until_ready(update(params, state, data))
        seconds[i] = time.perf_counter() - start
        values[i], errors[i] = state.value, state.error
    # The program that has run, read: it is not compiled for this.
    return Run(seconds, values, errors, params, state, communication(update, params, state, data), update._cache_size())


def with_and_without_sharding(num_rows: int, num_iterations: int) -> dict[int, Run]:
    """The same steps on all devices and on one."""
    data, everything = classification(num_rows), jax.device_count()
    print(f"{num_rows:,} × {FEATURES} in {CLASSES} classes, {num_iterations} steps, on {_devices(everything)} and on 1")
    runs = {count: minimise(on_devices(data, count), num_iterations) for count in dict.fromkeys((everything, 1))}
    rows = []
    for count, run in runs.items():
        step = 1000 * float(np.median(run.seconds[1:]))
        passes, found = int(run.state.data_passes), f"{run.values[-1]:.7f}"
        down = run.num_down or "not reached"
        rows.append((count, float(run.seconds[0]), step, passes, found, float(run.errors[-1]), down))
    header = [
        "devices",
        "first step, s",
        "later ones, ms (median)",
        "passes",
        "objective",
        "error",
        f"steps to {SOLVED:.0e}",
    ]
    _setting.table(header, rows)

    ratios = runs[1].seconds / runs[everything].seconds
    steps = min(run.num_down or num_iterations for run in runs.values())
    all_steps, down = (ratios[1:last].mean() for last in (num_iterations, max(2, steps)))
    print(f"average step-time ratio, 1 device to {everything}: {all_steps:.2f}; up to step {steps}: {down:.2f}")
    if jax.devices()[0].platform == "cpu":
        print("  these devices share one CPU: of real ones, the ratio tells nothing")
    sent = runs[everything].communicated
    when = "; the gradient once per step, 12 bytes per trial of a line search" if sent.total_count else ""
    print(f"communicated: {sent}{when}")
    return runs


# --- real digits -----------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Coefficients ``(d, k)``, iterations, and passes over the data, of which a part may be all that is known."""

    coef: np.ndarray
    num_iterations: int
    passes: str


def digits() -> tuple[Labelled, Labelled]:
    """The 1,797 digits of scikit-learn in float64: those to fit, and 360 held out."""
    x, y = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order] / 16, y[order].astype(np.int32)
    return Labelled(x[HELD_OUT:], y[HELD_OUT:]), Labelled(x[:HELD_OUT], y[:HELD_OUT])


def by_paraxis(train: Labelled, num_devices: int, dtype: Any = np.float64) -> Fit:
    """By L-BFGS in one program; the penalty is per row, since the objective is a mean."""
    with jax.enable_x64(dtype == np.float64):
        data = on_devices(Labelled(train.x.astype(dtype), train.y), num_devices)
        solver = px.solve.LBFGS(px.solve.objective.l2_multiclass_logreg, tol=1e-12 if dtype == np.float64 else 1e-6)
        start = data.shared(jnp.zeros((train.x.shape[1], CLASSES), dtype))
        params, state = solver.run(start, 1 / (C * len(train.y)), data)
        return Fit(np.asarray(params, np.float64), int(state.iter_num), f"{int(state.data_passes)}")


def by_sklearn(train: Labelled, **options: Any) -> Fit:
    with threadpool_limits(1):  # on matrices this small, threads wait longer than they work
        model = LogisticRegression(C=C, fit_intercept=False, **options).fit(*train)
    num_iterations = int(model.n_iter_[0])
    return Fit(model.coef_.T, num_iterations, f"≥ {2 * num_iterations}")


def objective(coef: np.ndarray, data: Labelled) -> float:
    """What both minimise, by NumPy."""
    z = data.x @ coef
    losses = logsumexp(z, axis=1) - z[np.arange(len(z)), data.y]
    return float(losses.mean() + np.sum(coef**2) / (2 * C * len(z)))


def compare_on_digits() -> dict[str, Fit]:
    """Both on the same digits; the reference is scikit-learn's Newton solver, to the last digit."""
    (train, test), everything = digits(), jax.device_count()
    reference = "scikit-learn, newton-cholesky, tol=1e-12"
    fits = {
        reference: by_sklearn(train, solver="newton-cholesky", tol=1e-12),
        "scikit-learn, lbfgs, tol=1e-12": by_sklearn(train, tol=1e-12, max_iter=10_000),
        "scikit-learn as it comes": by_sklearn(train),
        **{f"Paraxis on {_devices(n)}": by_paraxis(train, n) for n in (everything, 1)},
        f"Paraxis on {_devices(everything)}, float32": by_paraxis(train, everything, np.float32),
    }
    least, rows = objective(fits[reference].coef, train), []
    for name, fit in fits.items():
        accuracy = float(np.mean((test.x @ fit.coef).argmax(1) == test.y))
        difference = float(np.abs(fit.coef - fits[reference].coef).max())
        above = objective(fit.coef, train) - least
        gaps = ("reference", "") if name == reference else (f"{difference:.0e}", f"{above:.0e}")
        rows.append((name, fit.num_iterations, fit.passes, *gaps, accuracy))
    largest = np.abs(fits[reference].coef).max()
    print(f"\n{len(train.y):,} digits × {train.x.shape[1]}, {len(test.y)} held out; largest coefficient {largest:.2f}")
    header = ["solver", "iterations", "passes", "coefficients differ by", "objective above", "accuracy"]
    _setting.table(header, rows)
    return fits


# --- both plots ------------------------------------------------------------------------------------------------------


def draw(runs: Mapping[int, Run], title: str) -> Figure:
    """The error against the steps, and the time of each, with and without sharding, side by side."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    errors, times = figure.subplots(1, 2)
    for count, run in runs.items():
        steps = np.arange(1, len(run.errors) + 1)
        errors.plot(steps, run.errors, label=_devices(count))
        times.plot(steps[1:], 1000 * run.seconds[1:], label=_devices(count))
    errors.set(xlabel="step", ylabel="norm of the gradient", yscale="log")
    times.set(xlabel="step", ylabel="time, ms (without the first step)", ylim=(0, None))
    errors.legend()
    figure.suptitle(title)
    return figure


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _setting.options(__doc__, argv, rows=(50_000, "rows"), iterations=(100, "steps"))
    num_rows, num_iterations = chosen.rows, chosen.iterations
    if chosen.quick:
        num_rows, num_iterations = min(num_rows, QUICK_ROWS), min(num_iterations, QUICK_ITERATIONS)
    if num_iterations < 2:
        raise SystemExit("--iterations must be at least 2: the first step compiles, and is not averaged")
    runs = with_and_without_sharding(num_rows, num_iterations)
    fits = compare_on_digits()
    if chosen.plot:
        draw(runs, f"{num_rows:,} × {FEATURES}, {CLASSES} classes").savefig(chosen.plot, dpi=120)
        print(f"plot: {chosen.plot}")
    return {"runs": runs, "fits": fits}


if __name__ == "__main__":
    main()
