"""What users of each library write: a function of one element, of numbers that all share and numbers of its own.

Values are of a size at which an iteration, a step or a chain is short.
"""

# pyright: reportMissingImports=false
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Rows = dict[str, Callable[[Any, Any], Any]]
"""Name → what an element does with a shared ``w (2,)`` and its own ``x (2,)``, from 0.5 to 3."""


def key_of(x: Any) -> Any:
    return jax.random.key(jnp.asarray(1e6 * x[0], int))


def of_diffrax() -> Rows:
    import diffrax

    def solve(solver: Any, w: Any, x: Any, noise: bool = False) -> Any:
        drift: Any = diffrax.ODETerm(lambda t, y, args: -args[1] * (y - args[0] * jnp.cos(t)))
        path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (), key_of(x))
        terms = diffrax.MultiTerm(drift, diffrax.ControlTerm(lambda t, y, args: 0.1 * y, path)) if noise else drift
        steps: Any = diffrax.ConstantStepSize() if noise else diffrax.PIDController(1e-3, 1e-5)
        options: Any = {"args": (w, x), "stepsize_controller": steps, "max_steps": 128}
        return diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.05, x, **options).ys

    return {
        "diffrax, Tsit5": partial(solve, diffrax.Tsit5()),
        "diffrax, Kvaerno3": partial(solve, diffrax.Kvaerno3()),
        "diffrax, an SDE": partial(solve, diffrax.Heun(), noise=True),
    }


def of_optimistix() -> Rows:
    import optimistix as optx

    root, least = optx.Newton(1e-6, 1e-6), optx.LevenbergMarquardt(1e-6, 1e-6)
    return {
        "optimistix, root": lambda w, x: optx.root_find(lambda y, _: y + jnp.tanh(w * y) - x, root, 0 * x).value,
        "optimistix, fit": lambda w, x: optx.least_squares(lambda y, _: (y - x, jnp.sin(y * w)), least, x).value,
    }


def of_lineax() -> Rows:
    import lineax as lx

    def solve(solver: Any, w: Any, x: Any) -> Any:
        matrix = 4 * jnp.eye(2) + jnp.outer(w, x) + jnp.outer(x, w)
        return lx.linear_solve(lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag), x, solver).value

    solvers = {"Cholesky": lx.Cholesky(), "CG": lx.CG(1e-6, 1e-6)}
    return {f"lineax, {name}": partial(solve, solver) for name, solver in solvers.items()}


def of_equinox() -> Rows:
    import equinox as eqx

    net, cell = eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0)), eqx.nn.GRUCell(2, 2, key=jax.random.key(0))
    turns: Any = lambda s: s[0] < 4 * s[1][0]  # noqa: E731
    loop: Any = partial(eqx.internal.while_loop, turns, max_steps=16, kind="checkpointed")
    return {
        "equinox, MLP and GRU": lambda w, x: cell(w * net(x), x),
        "equinox, loop": lambda w, x: loop(lambda s: (s[0] + 1, jnp.stack([s[1][0], w[0] * s[1][1]])), (0.0, x))[1],
    }


def of_blackjax() -> Rows:
    import blackjax

    def chain(w: Any, x: Any) -> Any:
        kernel: Any = blackjax.nuts(lambda q: -jnp.sum(q**2 * w), step_size=0.3, inverse_mass_matrix=jnp.ones(2))
        step = lambda s, key: (lambda new: (new, new.position))(kernel.step(key, s)[0])  # noqa: E731
        return jax.lax.scan(step, kernel.init(x), jax.random.split(key_of(x), 10))[1]

    def adapted(w: Any, x: Any) -> Any:
        warmup: Any = blackjax.window_adaptation(blackjax.hmc, lambda q: -jnp.sum(q**2 * w), num_integration_steps=3)
        return warmup.run(key_of(x), x, 20)[0].state.position

    return {"blackjax, NUTS": chain, "blackjax, warmup of HMC": adapted}


def of_numpyro() -> Rows:
    import numpyro
    from numpyro import distributions as dist, infer
    from numpyro.infer.util import log_density

    def model(w: Any, x: Any) -> None:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(slope * w, 1.0), obs=x)

    def chain(w: Any, x: Any) -> Any:
        mcmc = infer.MCMC(infer.NUTS(model), num_warmup=10, num_samples=10, progress_bar=False)
        mcmc.run(key_of(x), w, x)
        return mcmc.get_samples()["slope"]

    density = lambda w, x: log_density(model, (w, x), {}, {"slope": x[0]})[0]  # noqa: E731
    return {"numpyro, density": density, "numpyro, NUTS": chain}


def of_tinygp() -> Rows:
    import tinygp

    times = jnp.linspace(0.0, 3.0, 12)

    def density(kernel: Any, w: Any, x: Any) -> Any:
        return tinygp.GaussianProcess(x[0] * kernel(x[1]), times, diag=0.1).log_probability(jnp.sin(w[0] * times))

    kernels = {"dense": tinygp.kernels.ExpSquared, "quasisep": tinygp.kernels.quasisep.Matern32}
    return {f"tinygp, {name} density": partial(density, kernel) for name, kernel in kernels.items()}


def of_flowjax() -> Rows:
    from flowjax import distributions, flows

    normal = distributions.Normal(jnp.zeros(2))
    flow: Any = flows.masked_autoregressive_flow(jax.random.key(0), base_dist=normal, flow_layers=2)
    return {
        "flowjax, density": lambda w, x: flow.log_prob(w * x),
        "flowjax, sample": lambda w, x: w * flow.sample(key_of(x), (3,)),
    }


def of_evosax() -> Rows:
    from evosax import algorithms

    def generations(strategy: Any, w: Any, x: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            population, state = strategy.ask(key, state, strategy.default_params)
            fitness = jnp.sum((population - x) ** 2 * w, axis=-1)
            return strategy.tell(key, population, fitness, state, strategy.default_params)[0], fitness.min()

        start = strategy.init(key_of(x), x, strategy.default_params)
        return jax.lax.scan(step, start, jax.random.split(key_of(x), 3))[1]

    strategies = {"CMA-ES": algorithms.CMA_ES(8, jnp.zeros(2)), "OpenAI-ES": algorithms.Open_ES(8, jnp.zeros(2))}
    return {f"evosax, {name}": partial(generations, strategy) for name, strategy in strategies.items()}


def of_brax() -> Rows:
    from brax import envs

    env = envs.get_environment("inverted_pendulum", backend="generalized")
    start = jax.jit(env.reset)(jax.random.key(0))
    return {"brax, a step": lambda w, x: env.step(start, 0.1 * w[:1] * x[:1]).obs}


def of_mjx() -> Rows:
    import mujoco
    from mujoco import mjx

    bar = "<geom type='capsule' size='.1' fromto='0 0 0 0 0 1'/>"
    pendulum = f"<mujoco><worldbody><body><joint axis='0 1 0'/>{bar}</body></worldbody></mujoco>"
    model = mjx.put_model(mujoco.MjModel.from_xml_string(pendulum))
    return {"mjx, a step": lambda w, x: mjx.step(model, mjx.make_data(model).replace(qpos=x[:1], qvel=w[:1])).qpos}


def of_haiku() -> Rows:
    import haiku as hk

    def forward(x: Any) -> Any:
        core = hk.LSTM(2)
        return hk.dynamic_unroll(core, hk.nets.MLP([4, 2])(x), core.initial_state(None))[0]

    net = hk.without_apply_rng(hk.transform(forward))

    def loss(w: Any, x: Any) -> Any:
        params = net.init(key_of(x), jnp.ones((3, 2)))
        return net.apply(params, jnp.outer(jnp.arange(3), w * x))

    return {"haiku, init, MLP and LSTM": loss}


def of_netket() -> Rows:
    import netket as nk

    hilbert, model = nk.hilbert.Spin(0.5, 4), nk.models.RBM(alpha=1, param_dtype=float)
    ising, states = nk.operator.IsingJax(hilbert, nk.graph.Chain(4), h=1.0), jnp.asarray(hilbert.all_states())
    params, sampler = model.init(jax.random.key(0), states), nk.sampler.MetropolisLocal(hilbert, n_chains=4)
    of = lambda w, x: jax.tree.map(lambda leaf: w[0] * leaf + 0.1 * x[0], params)  # noqa: E731

    def energy(w: Any, x: Any) -> Any:
        near, entries = ising.get_conn_padded(states)
        psi, others = (jnp.exp(model.apply(of(w, x), s)) for s in (states, near))
        return jnp.sum(psi[:, None] * entries * others) / jnp.sum(psi**2)

    def samples(w: Any, x: Any) -> Any:
        start = sampler.reset(model, of(w, x), sampler.init_state(model, of(w, x), key_of(x)))
        return sampler.sample(model, of(w, x), state=start, chain_length=3)[0]

    return {"netket, energy": energy, "netket, samples": samples}


LIBRARIES = {name.removeprefix("of_"): make for name, make in globals().copy().items() if name.startswith("of_")}
"""Name → what gives its rows; raises ImportError if it is not installed."""
