"""A sweep, bagging, and a regression that says how sure it is: three more things that are ensembles.

**Sweep.** Nine learning rates are nine members that start from the same weights; each has its own rate.
The largest rates diverge, and ``where=ens.finite()`` leaves those members out of the average.
**Bagging** (Breiman 1996): each of 30 members sees ``rows=`` drawn with replacement.
The rows that a member has not seen test it: the out-of-bag error is an estimate without held-out data.
**Mean and variance** (Lakshminarayanan et al. 2017, arXiv 1612.01474, figure 1): five networks give a mean and a
variance of ``y = x³ + noise``; ``average="mixture"`` adds to the mean of their variances the variance of their means,
which grows where there was no data. Not by enough: two units away from the data, the truth is outside three standard
deviations of both, since all five networks go on in straight lines.

Typical output of ``--devices 2`` (a quarter of a minute)::

    on 2 devices
     rate  held-out error
    0.001           0.608
    0.003          0.5423
     0.01          0.4894
     0.03          0.4944
      0.1           0.605
      0.3             nan
        1             nan
        3             nan
       10             nan
    the average of the 5 finite ones: 0.5078
    bagging, error of
             a member  0.5668
          the average  0.4967
           out of bag  0.5122
    negative log likelihood  a member  the mixture
                     inside   -0.3296      -0.4671
                    outside     14.86        1.663

Errors are shares of the variance; guessing the mean has 1. The average over a sweep is no better than its best rate.
"""

from collections.abc import Sequence
from typing import Any

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

RATES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10], np.float32)
ADAM = optax.adam(0.01)

Params = dict[str, jax.Array]


def network(key: jax.Array, inputs: int, hidden: int, outputs: int) -> Params:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (inputs, hidden)) * (2 / inputs) ** 0.5,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, outputs)) * (1 / hidden) ** 0.5,
        "b2": jnp.zeros(outputs),
    }


def output(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def predicted(params: Params, x: jax.Array) -> jax.Array:
    return output(params, x)[:, 0]


def mean_squared_error(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predicted(params, x) - y) ** 2)


def descent(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
    """Gradient descent; the rate is one of the parameters, whose gradient is zero."""
    loss, gradient = jax.value_and_grad(mean_squared_error)(params, x, y)
    return jax.tree.map(lambda p, g: p - params["rate"] * g, params, gradient), loss


def patients() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Scikit-learn's 442 patients with diabetes, 342 to train on and 100 held out; all columns standardised."""
    from sklearn.datasets import load_diabetes

    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order] / x.std(0), (y[order] - y.mean()) / y.std()
    x, y = x.astype(np.float32), y.astype(np.float32)
    return (x[100:], y[100:]), (x[:100], y[:100])


def sweep(num_epochs: int) -> dict[str, Any]:
    """Learning rates side by side; the held-out error of each, and of the average of those that are left."""
    train, test = patients()
    make = lambda _, rate: network(jax.random.key(0), 10, 32, 1) | {"rate": rate}  # noqa: E731
    ens = px.ensemble(make, len(RATES), 0, RATES, apply=predicted)
    ens.fit(descent, train, batch_size=38, epochs=num_epochs, seed=1)
    errors = np.mean((np.asarray(ens.members(test[0])) - test[1]) ** 2, 1)
    average = ens.predict(test[0], average="mean", where=ens.finite())
    found = {
        "errors": errors,
        "finite": ens.finite(),
        "average": float(np.mean((np.asarray(average) - test[1]) ** 2)),
    }
    _setting.table(["rate", "held-out error"], [(float(r), float(e)) for r, e in zip(RATES, errors, strict=True)])
    print(f"the average of the {ens.finite().sum()} finite ones: {found['average']:.4g}")
    return found


def bagging(num_members: int, num_epochs: int) -> dict[str, float]:
    """The held-out error of a member and of the average; the error of averages over those that have not seen a row."""
    train, test = patients()
    make = lambda key: network(key, 10, 32, 1) | {"rate": jnp.float32(0.03)}  # noqa: E731
    ens = px.ensemble(make, num_members, 0, apply=predicted)
    n, keys = len(train[1]), px.keys(jax.random.key(2), ens.axis)
    rows = np.asarray(jax.vmap(lambda key: jax.random.randint(key, (n,), 0, n))(keys))
    ens.fit(descent, px.loader(train, 38, seed=1, rows=rows), epochs=num_epochs)

    unseen = np.stack([~np.isin(np.arange(len(train[1])), own) for own in rows])
    tested = unseen.any(0)
    out_of_bag = (np.asarray(ens.members(train[0])) * unseen).sum(0)[tested] / unseen.sum(0)[tested]
    found = {
        "a member": float(np.mean((np.asarray(ens.members(test[0])) - test[1]) ** 2)),
        "the average": float(np.mean((np.asarray(ens.predict(test[0], average="mean")) - test[1]) ** 2)),
        "out of bag": float(np.mean((out_of_bag - train[1][tested]) ** 2)),
    }
    _setting.table(["bagging, error of", ""], list(found.items()))
    return found


def mean_and_variance(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean, spread = output(params, x[:, None]).T
    return mean, jax.nn.softplus(spread) + 1e-4


def make_regression(key: jax.Array) -> tuple[Params, Any]:
    params = network(key, 1, 50, 2)
    params["b1"] = params["b1"] + jnp.linspace(-4, 4, 50)
    return params, ADAM.init(params)


def likelihood_step(params: Params, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Params) -> jax.Array:
        return normal_nll(*mean_and_variance(params, x), y).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, opt_state = ADAM.update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def normal_nll(mean: Any, variance: Any, y: Any) -> jax.Array:
    return 0.5 * (jnp.log(2 * jnp.pi * variance) + (y - mean) ** 2 / variance)


def cubes(rng: np.random.Generator, low: float, high: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """``y = x³ + noise`` of standard deviation 3, in units of 30."""
    x = rng.uniform(low, high, n)
    return x.astype(np.float32), ((x**3 + rng.normal(0, 3, n)) / 30).astype(np.float32)


def regression(num_epochs: int, path: str | None) -> dict[str, tuple[float, float]]:
    """Negative log likelihood of a member and of the mixture, where there was data and beyond it."""
    rng = np.random.default_rng(0)
    data = cubes(rng, -4, 4, 100)
    ens = px.ensemble(make_regression, 5, 0, apply=mean_and_variance)
    ens.fit(likelihood_step, data, batch_size=20, epochs=num_epochs, seed=1)
    found = {}
    for where, (x, y) in {"inside": cubes(rng, -4, 4, 1000), "outside": cubes(rng, 4, 6, 1000)}.items():
        (mean, variance), (all_mean, all_variance) = ens.members(x), ens.predict(x, average="mixture")
        own, all_own = normal_nll(mean, variance, y), normal_nll(all_mean, all_variance, y)
        found[where] = float(own.mean()), float(all_own.mean())
    _setting.table(["negative log likelihood", "a member", "the mixture"], [(k, *v) for k, v in found.items()])
    if path:
        draw(ens, data, path)
    return found


def draw(ens: px.Ensemble, data: tuple[np.ndarray, np.ndarray], path: str) -> None:
    """One member and the mixture, with bands of three standard deviations, as a PNG."""
    from matplotlib.figure import Figure

    x = np.linspace(-6, 6, 241, dtype=np.float32)
    one, mixture = ens[:1].predict(x, average="mixture"), ens.predict(x, average="mixture")
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (mean, variance), title in zip(
        figure.subplots(1, 2, sharey=True), (one, mixture), ("One member", f"Mixture of {len(ens)}"), strict=True
    ):
        mean, deviation = 30 * np.asarray(mean), 30 * np.sqrt(np.asarray(variance))
        axes.axvspan(-4, 4, color="black", alpha=0.04, lw=0)
        axes.fill_between(x, mean - 3 * deviation, mean + 3 * deviation, alpha=0.25, lw=0, label="± 3 sd")
        axes.plot(x, mean, label="mean")
        axes.plot(x, x**3, "--", color="black", lw=1, label="truth")
        axes.plot(data[0], 30 * data[1], ".", color="tab:red", markersize=4, label="data")
        axes.set(title=title, xlabel="x", ylim=(-230, 230))
    figure.axes[0].legend(loc="upper left")
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = _setting.options(__doc__, argv)
    print(f"on {jax.device_count()} devices")
    quick = chosen.quick
    return {
        "sweep": sweep(3 if quick else 30),
        "bagging": bagging(4 if quick else 30, 3 if quick else 30),
        "regression": regression(3 if quick else 300, chosen.plot),
    }


if __name__ == "__main__":
    main()
