"""NUTS chains of BlackJAX on all devices: any number of chains, the same samples on any number of devices.

A hierarchical model: eight schools, their mean and their spread. The table has R-hat and the effective sample size for
more and more chains, and the time of a run; a chain's samples do not depend on how many there are.
"""

import time
from collections.abc import Sequence
from typing import Any

import _setting
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], "float32")
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], "float32")


def log_density(q: dict[str, jax.Array]) -> jax.Array:
    schools = q["mean"] + jnp.exp(q["log_spread"]) * q["schools"]
    prior = -0.5 * (jnp.sum(q["schools"] ** 2) + (q["mean"] / 5) ** 2 + (q["log_spread"] - 1) ** 2)
    return prior - 0.5 * jnp.sum(((schools - EFFECTS) / ERRORS) ** 2)


def chain(key: jax.Array, num_steps: int) -> jax.Array:
    """The mean of the schools in each step, after a warm-up of as many steps."""
    import blackjax  # which starts JAX

    start, warm, steps = jax.random.split(key, 3)
    position = {"mean": jax.random.normal(start), "log_spread": jnp.ones(()), "schools": jnp.zeros(8)}
    warmup: Any = blackjax.window_adaptation(blackjax.nuts, log_density)
    (state, found), _ = warmup.run(warm, position, num_steps=num_steps)
    kernel: Any = blackjax.nuts(log_density, **found)

    def step(state: Any, key: jax.Array) -> Any:
        state, _ = kernel.step(key, state)
        return state, state.position["mean"]

    return jax.lax.scan(step, state, jax.random.split(steps, num_steps))[1]


def run(num_chains: int, num_steps: int) -> tuple[jax.Array, float]:
    """Samples ``(chains, steps)``, and the seconds of a run that is compiled."""
    axis = px.Axis("chains", num_chains, at_once=1)
    sample = jax.jit(lambda key: px.map_fn(lambda key: chain(key, num_steps), px.keys(key, axis), axis))
    samples = sample(jax.random.key(0)).block_until_ready()
    start = time.perf_counter()
    sample(jax.random.key(0)).block_until_ready()
    return samples, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, steps=(500, "steps of a chain, and of its warm-up"))
    import blackjax

    sizes, num_steps = ((4, 10), 50) if chosen.quick else ((4, 8, 20, 40), chosen.steps)
    rows, curves = [], {}
    print(f"chains on {jax.device_count()} devices, {num_steps} steps each")
    for size in sizes:
        samples, seconds = run(size, num_steps)
        rhat = float(blackjax.diagnostics.potential_scale_reduction(samples))
        effective = float(blackjax.diagnostics.effective_sample_size(samples))
        rows.append((size, float(samples.mean()), rhat, effective, seconds))
        curves[f"{size} chains"] = dict(enumerate(np.asarray(samples).mean(0).tolist()))
        assert np.array_equal(samples[: sizes[0]], run(sizes[0], num_steps)[0]), "a chain depends on the others"
    _setting.table(["chains", "mean of the schools", "R-hat", "effective samples", "seconds"], rows)
    _setting.plot(chosen.plot, curves, "step", "mean over the chains")


if __name__ == "__main__":
    main()
