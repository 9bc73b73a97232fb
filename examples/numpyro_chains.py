"""NumPyro's MCMC with its chains on all devices: a ``chain_method`` of four lines, beside NumPyro's own.

A logistic regression. NumPyro's own methods compile again in a second run, as ``px.pmap`` does; the four lines do not.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import _setting
import jax
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

import paraxis as px


def model(x: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def on_devices(chain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Any number of chains on all devices, each of which runs its own one after the other."""
    axis = lambda starts: px.Axis("chains", len(jax.tree.leaves(starts)[0]), at_once=1)  # noqa: E731
    return lambda starts: px.map_fn(chain, (starts,), axis(starts))


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, chains=(10, "number of chains"))
    steps = 20 if chosen.quick else 200
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype("float32")
    y = (x @ [2.0, -1.0, 0.5, 0.0] + rng.logistic(size=200) > 0).astype(int)
    warnings.simplefilter("ignore")  # "parallel" runs one chain after the other, if there are more than devices
    print(f"{chosen.chains} chains on {jax.device_count()} devices, {steps} steps each")
    rows, curves = [], {}
    methods = {"four lines": on_devices, "px.pmap": px.pmap, "parallel": "parallel", "vectorized": "vectorized"}
    for name, method in methods.items():
        sizes: dict[str, Any] = {"num_warmup": steps, "num_samples": steps, "num_chains": chosen.chains}
        mcmc = MCMC(NUTS(model), **sizes, chain_method=method, progress_bar=False)
        samples, seconds = np.empty(()), []
        for seed in range(2):
            start = time.perf_counter()
            mcmc.run(jax.random.key(seed), x, y)
            samples = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
            seconds.append(time.perf_counter() - start)
        curves[name] = dict(enumerate(seconds, 1))
        rows.append((name, float(samples.mean((0, 1))[0]), float(split_gelman_rubin(samples).max()), *seconds))
    _setting.table(["chain_method", "first weight", "R-hat", "seconds, first run", "second run"], rows)
    _setting.plot(chosen.plot, curves, "run", "seconds")


if __name__ == "__main__":
    main()
