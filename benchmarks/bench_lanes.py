"""Elements of one device that end at different times, by vmap, one after the other and in lanes: ms of a call.

Widths of lanes are shares of the number of elements.
"""

import functools
import time
from typing import Any

import diffrax
import harness
import jax
import jax.numpy as jnp
import numpy as np
import samplers

import paraxis as px


def van_der_pol(mu):
    term: Any = diffrax.ODETerm(lambda t, y, mu: jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]]))
    options: Any = {"stepsize_controller": diffrax.PIDController(1e-5, 1e-7), "max_steps": 8192, "throw": False}
    found: Any = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 10.0, None, jnp.array([2.0, 0.0]), mu, **options)
    return found.ys[0]


def fit(y):
    """A Levenberg-Marquardt fit of amplitude, rate and offset to 24 points: a pixel."""
    times, start = jnp.linspace(0.0, 1.0, 24), jnp.array([1.0, 1.0, 0.0])

    def residual(p):
        return p[0] * jnp.exp(-p[1] * times) + p[2] - y

    def step(s):
        p, damping, cost, k, _ = s
        slope, rest = jax.jacfwd(residual)(p), residual(p)
        curvature = slope.T @ slope
        new = p - jnp.linalg.solve(curvature + damping * jnp.diag(jnp.diag(curvature) + 1e-6), slope.T @ rest)
        better = (found := jnp.sum(residual(new) ** 2)) < cost
        ends = jnp.where(better, (cost - found) / cost < 1e-6, damping > 1e8)
        p, damping = jnp.where(better, new, p), damping * jnp.where(better, 0.3, 4.0)
        return p, damping, jnp.where(better, found, cost), k + 1, ends

    first = (start, jnp.ones(()), jnp.sum(residual(start) ** 2), 0, jnp.array(False))
    return jax.lax.while_loop(lambda s: ~s[4] & (s[3] < 300), step, first)[0]


def product(weights, n):
    """A loop of products of a shared matrix with a vector."""
    turn = lambda s: (s[0] + 1, jnp.tanh(weights @ s[1]))  # noqa: E731
    return jax.lax.while_loop(lambda s: s[0] < n, turn, (0, jnp.full(64, 0.1)))[1]


def run(devices: int, repeats: int) -> harness.Tables:
    del devices
    rng, chains = np.random.default_rng(0), jax.random.split(jax.random.key(0), 64)
    rates, times = rng.lognormal(0.5, 1.2, 2000)[:, None], np.linspace(0.0, 1.0, 24)
    pixels = rng.lognormal(0, 1, (2000, 1)) * np.exp(-rates * times) + 0.02 * rng.normal(size=(2000, 24))
    weights = jnp.asarray(rng.normal(size=(64, 64)) / 8, "float32")
    cases: Any = {
        "fits of 2,000 pixels": (fit, jnp.asarray(pixels, "float32")),
        "NUTS, funnel of 10, 64 chains": (functools.partial(samplers.nuts, samplers.funnel, 10, 0.3), chains),
        "NUTS, Gaussian of 32, 64 chains": (functools.partial(samplers.nuts, samplers.gaussian, 32, 0.06), chains),
        "elliptical slices, 256 chains": (samplers.slices, jax.random.split(jax.random.key(1), 256)),
        "Van der Pol, 256 solves": (van_der_pol, jnp.asarray(rng.permutation(np.geomspace(0.1, 60, 256)), "float32")),
        "1,024 loops of a product": (functools.partial(product, weights), jnp.asarray(rng.geometric(0.01, 1024))),
    }
    tables: harness.Tables = {"lanes, ms": {}, "lanes, s to trace and compile": {}}
    for name, (fn, x) in cases.items():
        for row, table in zip(measured(fn, x, repeats), tables.values(), strict=True):
            table[name] = row
    return tables


def measured(fn: Any, x: jax.Array, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    def mapped(lowering: Any, at_once: int | None) -> Any:
        return jax.jit(lambda x: px.map_fn(fn, x, px.Axis("all", len(x), at_once=at_once), lowering=lowering))

    widths = {"all": None, "a quarter": len(x) // 4, "an eighth": len(x) // 8}
    rivals = {"vmap": mapped("vmap", None), "at_once=1": mapped("vmap", 1)}
    rivals |= {f"lanes, {name}": mapped("lanes", width) for name, width in widths.items()}
    if fn is samplers.slices:
        rivals["vmap of a state machine by hand"] = jax.jit(jax.vmap(samplers.slices_in_one_loop))
    calls, setup = dict[str, Any](), dict[str, float]()
    for name, rival in rivals.items():
        start = time.perf_counter()
        calls[name] = functools.partial(rival.lower(x).compile(), x)
        setup[name] = time.perf_counter() - start
    seconds = harness.in_turn(calls, repeats)
    return {name: 1e3 * s for name, s in seconds.items()}, setup


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(1,))
