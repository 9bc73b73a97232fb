"""Independent computations of other libraries on all devices: ms of a call, or what a rival raises."""

import functools
import importlib
import re
import time
import warnings
from typing import Any

import diffrax
import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from numpyro import distributions as dist, sample
from numpyro.infer import MCMC, NUTS

import paraxis as px

TIMES: Any = np.linspace(0.1, 3.0, 20)
closed = lambda p: p[0] * jnp.sin(p[1] * TIMES)  # noqa: E731
solve: Any = diffrax.diffeqsolve
IN_LOOP = re.compile(r"= .*\b(?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(.*/while/")


def stiff(solver, rate):
    """Issue 718 of diffrax: ten relaxations with one rate."""
    term, control = diffrax.ODETerm(lambda t, y, rate: rate * (y - jnp.cos(t))), diffrax.PIDController(1e-3, 1e-6)
    start = jnp.linspace(0.1, 1.0, 10)
    return solve(term, solver, 0.0, 1.0, None, start, args=rate, stepsize_controller=control).ys[0]


def integrated(p):
    term = diffrax.ODETerm(lambda t, y, p: jnp.stack([y[1], -(p[1] ** 2) * y[0]]))
    options: Any = {"saveat": diffrax.SaveAt(ts=TIMES), "stepsize_controller": diffrax.PIDController(1e-4, 1e-6)}
    start = jnp.stack([0.0 * p[0], p[0] * p[1]])
    return solve(term, diffrax.Tsit5(), 0.0, 3.0, 0.05, start, p, max_steps=512, **options).ys[:, 0]


def chain(model, steps, key):
    """Issue 765 of diffrax: NUTS over amplitude and frequency of an oscillation."""
    nuts: Any = importlib.import_module("blackjax").nuts  # here, since it starts JAX
    seen = closed(jnp.array([1.5, 2.0])) + 0.1 * jnp.sin(37 * TIMES)
    kernel = nuts(lambda p: -50 * jnp.sum((model(p) - seen) ** 2), 0.02, jnp.ones(2), max_num_doublings=6)
    start = kernel.init(jnp.array([1.5, 2.0]) + 0.05 * jax.random.normal(key, (2,)))
    step = lambda state, key: (kernel.step(key, state)[0], state.position)  # noqa: E731
    return jax.lax.scan(step, start, jax.random.split(key, steps))[1]


def loop(key):
    """Issue 26586 of JAX: a loop in a loop, whose ends depend on the element."""
    inner: Any = lambda *s: jax.lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] + 0.1, s[1] + 0.1), s)  # noqa: E731
    outer = lambda s: (*inner(s[0], jax.random.uniform(s[2])), jax.random.split(s[2])[0])  # noqa: E731
    return jax.lax.while_loop(lambda s: s[0] < 5 + s[1], outer, (0.0, 0.1, key))[1]


def run(devices: int, repeats: int) -> harness.Tables:
    keys, rates = functools.partial(jax.random.split, jax.random.key(0)), functools.partial(jnp.linspace, -50, -1)
    explicit, implicit = (functools.partial(stiff, solver) for solver in (diffrax.Tsit5(), diffrax.ImplicitEuler()))
    plain, nested = functools.partial(chain, closed, 50), functools.partial(chain, integrated, 5)
    cases: Any = {
        f"diffrax, Tsit5, {8 * devices} solves": (explicit, rates(8 * devices)),
        f"diffrax, ImplicitEuler, {devices} solves": (implicit, rates(devices)),
        f"diffrax, ImplicitEuler, {8 * devices} solves": (implicit, rates(8 * devices)),
        f"NUTS, {devices} chains": (plain, keys(devices)),
        f"NUTS, {4 * devices} chains": (plain, keys(4 * devices)),
        f"NUTS over an ODE, {devices} chains": (nested, keys(devices)),
        f"jax #26586, {8 * devices} loops": (loop, keys(8 * devices)),
    }
    rows = {name: row(fn, x, repeats) for name, (fn, x) in cases.items()}
    return {"independent, ms": rows, "NumPyro": {f"{devices + 2} chains, s of a second run": numpyro(devices + 2)}}


def row(fn: Any, x: jax.Array, repeats: int) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    many, sharded = jax.vmap(fn), jax.device_put(x, NamedSharding(mesh, P("all")))
    shard: Any = functools.partial(jax.shard_map, many, mesh=mesh, in_specs=P("all"), out_specs=P("all"))
    ours = lambda k: jax.jit(lambda x: px.map_fn(fn, x, px.Axis("all", len(x), mesh=mesh, at_once=k)))  # noqa: E731
    rivals: dict[str, Any] = {"ours": ours(None), "at_once=1": ours(1), "jit(vmap), one device": jax.jit(many)}
    rivals |= {"jit(vmap), sharded": jax.jit(many), "jit(shard_map)": jax.jit(shard())}
    rivals |= {"check_vma=False": jax.jit(shard(check_vma=False)), "jax.pmap": jax.pmap(fn)}
    found, calls = dict[str, Any](), dict[str, Any]()
    for name, rival in rivals.items():
        placed = x if name in ("jit(vmap), one device", "jax.pmap") else sharded
        try:
            compiled = rival.lower(placed).compile()
        except Exception as error:
            found[name] = type(error).__name__
            continue
        found[name], calls[name] = "", functools.partial(compiled, placed)
        if name in ("ours", "jit(vmap), sharded"):
            found[f"sent a turn, {name}"] = len(IN_LOOP.findall(compiled.as_text()))
    times = {name: seconds * 1e3 for name, seconds in harness.in_turn(calls, repeats).items()}
    return found | times | {"sharded / ours": times["jit(vmap), sharded"] / times["ours"]}


def numpyro(n):
    def model(x, y):
        sample("y", dist.Bernoulli(logits=x @ sample("w", dist.Normal(0, 1).expand([5]).to_event(1))), obs=y)

    def seconds(method: Any) -> float:
        mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=50, num_chains=n, chain_method=method, progress_bar=False)
        mcmc.run(jax.random.key(0), x, y)
        start = time.perf_counter()
        mcmc.run(jax.random.key(1), x, y)
        jax.block_until_ready(mcmc.get_samples())
        return time.perf_counter() - start

    in_px = lambda fn: lambda starts: px.map_fn(fn, (starts,), px.Axis("chains", n, at_once=1))  # noqa: E731
    x = jax.random.normal(jax.random.key(0), (200, 5))
    y = (x @ jnp.arange(5.0) > 0).astype(int)
    warnings.simplefilter("ignore")  # NumPyro's: there are fewer devices than chains
    ours, parallel, vectorized = map(seconds, (in_px, "parallel", "vectorized"))
    return {"ours": ours, "parallel": parallel, "vectorized": vectorized, "parallel / ours": parallel / ours}


if __name__ == "__main__":
    harness.main(run, __doc__)
