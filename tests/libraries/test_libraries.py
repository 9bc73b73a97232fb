"""Libraries in a mapped function do not know: their solvers, samplers and derivative rules do what they do alone.

Expected values and derivatives are those of one element after the other, by JAX alone.
"""

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import assert_close, axis_on, table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import blackjax
    import diffrax
    import equinox as eqx
    import lineax
    import numpyro
    import optimistix
    from numpyro import distributions as dist
    from numpyro.infer import MCMC, NUTS
    from numpyro.infer.hmc import hmc
    from numpyro.infer.util import log_density

pytestmark = pytest.mark.filterwarnings("ignore")


class Case(NamedTuple):
    """What each element does with a shared ``w (2,)`` and its own ``x (2,)``, and whether that has a derivative."""

    fn: Callable[[jax.Array, jax.Array], Any]
    has_derivative: bool = True


def _ode(solver: Any, **options: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def solve(w: jax.Array, x: jax.Array) -> jax.Array:
        term = diffrax.ODETerm(lambda t, y, args: -args[1] * (y - args[0] * jnp.cos(t)))
        steps = diffrax.PIDController(rtol=1e-2, atol=1e-4)
        found = diffrax.diffeqsolve(
            term, solver, 0.0, 1.0, 0.1, x, args=(w, x), stepsize_controller=steps, max_steps=64, **options
        )
        assert found.ys is not None
        return found.ys[0]

    return solve


def _nuts(w: jax.Array, x: jax.Array) -> jax.Array:
    kernel: Any = blackjax.nuts(lambda q: -jnp.sum(q**2 * w), step_size=0.3, inverse_mass_matrix=jnp.ones(2))
    keys = jax.random.split(jax.random.key(jnp.asarray(100 * x[0], int)), 10)

    def step(state: Any, key: jax.Array) -> Any:
        state = kernel.step(rng_key=key, state=state)[0]
        return state, state.position

    return jax.lax.scan(step, kernel.init(x), keys)[1]


def _model(w: jax.Array, x: jax.Array) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(slope * w, 1.0), obs=x)


def _looped(w: jax.Array, x: jax.Array) -> jax.Array:
    def turn(s: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return s[0] + 1, jnp.sin(s[1] * w)

    loop = eqx.internal.while_loop(
        lambda s: s[0] < 3 + x[0], turn, (jnp.zeros(()), x), max_steps=16, kind="checkpointed", checkpoints=3
    )
    return loop[1]


def _linear(solver: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def solve(w: jax.Array, x: jax.Array) -> jax.Array:
        tag = lineax.positive_semidefinite_tag
        operator = lineax.FunctionLinearOperator(lambda v: 3 * v + w * (w @ v), jax.eval_shape(lambda: x), tag)
        return lineax.linear_solve(operator, x, solver).value

    return solve


def _root(w: jax.Array, x: jax.Array) -> jax.Array:
    newton = optimistix.Newton(rtol=1e-6, atol=1e-6)
    return optimistix.root_find(lambda y, _: y + jnp.tanh(w * y) - x, newton, jnp.zeros(2)).value


def _least(solver: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def solve(w: jax.Array, x: jax.Array) -> jax.Array:
        return optimistix.least_squares(lambda y, _: (y - x, jnp.sin(y * w)), solver, x).value

    return solve


CASES = {
    "diffrax Heun": Case(_ode(diffrax.Heun())),
    "diffrax Tsit5": Case(_ode(diffrax.Tsit5())),
    "diffrax ImplicitEuler": Case(_ode(diffrax.ImplicitEuler())),
    "diffrax Kvaerno3": Case(_ode(diffrax.Kvaerno3())),
    "diffrax backsolve": Case(_ode(diffrax.Tsit5(), adjoint=diffrax.BacksolveAdjoint())),
    "diffrax direct": Case(_ode(diffrax.Tsit5(), adjoint=diffrax.DirectAdjoint())),
    "blackjax NUTS": Case(_nuts, has_derivative=False),
    "numpyro density": Case(lambda w, x: log_density(_model, (w, x), {}, {"slope": x[0]})[0]),
    "equinox closure": Case(lambda w, x: eqx.filter_closure_convert(lambda y: jnp.tanh(y @ jnp.outer(w, x)), x)(2 * x)),
    "equinox loop": Case(_looped),
    "lineax CG": Case(_linear(lineax.CG(rtol=1e-6, atol=1e-6))),
    "lineax Cholesky": Case(_linear(lineax.Cholesky())),
    "optimistix root": Case(_root),
    "optimistix Levenberg-Marquardt": Case(_least(optimistix.LevenbergMarquardt(rtol=1e-6, atol=1e-6))),
    "optimistix BFGS": Case(_least(optimistix.BFGS(rtol=1e-6, atol=1e-6))),
}


_EVERY_DAY = ("blackjax NUTS", "density", "closure", "lineax CG")
DAILY = [(name, 10, None, True, "auto") for name in CASES if name.endswith(_EVERY_DAY)]


def _inputs(size: int) -> tuple[jax.Array, jax.Array]:
    return jnp.array([0.7, 1.3]), jnp.asarray(np.random.default_rng(0).uniform(0.5, 3.0, (size, 2)), "float32")


def _score(y: Any) -> jax.Array:
    return sum((jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), jnp.zeros(()))


def _slope(fn: Callable[..., Any], w: jax.Array, x: jax.Array) -> Any:
    """The gradient of a score of what a function returns, and that."""
    return jax.grad(lambda w, x: (lambda y: (_score(y), y))(fn(w, x)), argnums=(0, 1), has_aux=True)(w, x)


def _in_turn(case: Case, inside: bool, w: jax.Array, x: jax.Array) -> Any:
    if not case.has_derivative:
        return jax.lax.map(partial(case.fn, w), x)
    slopes, value = jax.lax.map(partial(_slope, case.fn, w), x)
    through = (slopes[0].sum(0), slopes[1]), value
    return (through, (slopes, value)) if inside else through


def _mapped(case: Case, inside: bool, axis: px.Axis, lowering: Any, w: jax.Array, x: jax.Array) -> Any:
    def on(fn: Any) -> Any:
        return lambda w, x: px.map_fn(fn, (px.broadcast(w, axis), x), axis, lowering=lowering)

    if not case.has_derivative:
        return on(case.fn)(w, x)
    through = _slope(on(case.fn), w, x)
    return (through, on(partial(_slope, case.fn))(w, x)) if inside else through


EVERY = [
    *itertools.product(CASES, (8, 10, 20), (None, 1, 2), (True, False), ("auto",)),
    *itertools.product(CASES, (10, 20), (None, 2), (True,), ("lanes",)),
]


@pytest.mark.parametrize(("name", "size", "at_once", "compiled", "lowering"), table(DAILY, EVERY))
def test_a_library_in_a_map_does_what_it_does_alone(
    name: str, size: int, at_once: int | None, compiled: bool, lowering: str
) -> None:
    """Values and the gradient through the map; at night also each element's own gradient, inside."""
    case, axis, (w, x) = CASES[name], axis_on(8, size, at_once=at_once), _inputs(size)
    inside = (name, size, at_once, compiled, lowering) not in DAILY
    run = partial(_mapped, case, inside, axis, lowering)
    found = (jax.jit(run) if compiled else run)(w, x)
    assert_close(found, jax.jit(partial(_in_turn, case, inside))(w, x), rtol=2e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("chains", [8, 10])
def test_numpyro_runs_its_chains_in_a_map(chains: int) -> None:
    def run(method: Any) -> Any:
        mcmc = MCMC(
            NUTS(_model), num_warmup=20, num_samples=20, num_chains=chains, chain_method=method, progress_bar=False
        )
        mcmc.run(jax.random.key(0), jnp.array([0.7, 1.3]), jnp.array([0.5, 2.0]))
        return mcmc.get_samples(group_by_chain=True)

    assert_close(run(px.pmap), run("vectorized"), rtol=1e-3, atol=1e-3)


def test_what_equinox_asks_of_a_batch_is_known_by_its_name() -> None:
    """Elements that are out of step are no batch; what is renamed would be asked of those that are together."""
    for name in ("unvmap_any", "unvmap_all", "unvmap_max", "nonbatchable", "select_if_vmap"):
        assert getattr(eqx.internal, f"{name}_p").name == name


def _falling(rate: jax.Array, max_steps: int) -> Any:
    """Steps and end of a solve, of which some take many more than others."""
    term, steps = diffrax.ODETerm(lambda t, y, rate: -rate * (y - jnp.cos(t))), diffrax.PIDController(1e-4, 1e-6)
    event = diffrax.Event(lambda t, y, args, **_: y < 0.2)
    options: Any = {"stepsize_controller": steps, "event": event, "max_steps": max_steps}
    found = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 5.0, 0.01, jnp.ones(()), rate, **options)
    assert found.ys is not None
    return found.ys[0], found.stats["num_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [None, 3])
def test_only_an_element_that_runs_raises_in_lanes(at_once: int | None) -> None:
    """Steps are those of each solve alone, and too few of them are its own error."""
    axis = axis_on(2, 11, at_once=at_once)
    with jax.enable_x64(True):
        rates = jnp.geomspace(0.5, 300.0, 11)
        run = lambda max_steps, rates: px.map_fn(partial(_falling, max_steps=max_steps), rates, axis, lowering="lanes")  # noqa: E731
        alone = jax.lax.map(partial(_falling, max_steps=4096), rates)
        most = int(alone[1].max())
        assert_close(run(most, rates), alone, rtol=1e-9)
        with pytest.raises(Exception, match="maximum number of solver steps"):
            jax.block_until_ready(run(most - 1, rates))


def _gaussian_chain(key: jax.Array) -> jax.Array:
    density = lambda x: -jnp.sum((x / jnp.geomspace(0.05, 1.0, 32)) ** 2) / 2  # noqa: E731
    kernel: Any = blackjax.nuts(density, 0.06, jnp.ones(32))
    draw = lambda state, key: (lambda new, info: (new, info.num_integration_steps))(*kernel.step(key, state))  # noqa: E731
    return jax.lax.scan(draw, kernel.init(jnp.full(32, 0.1)), jax.random.split(key, 200))[1].sum()


def _funnel_chain(key: jax.Array) -> jax.Array:
    options: Any = {"step_size": 0.3, "adapt_step_size": False, "adapt_mass_matrix": False, "rng_key": key}
    funnel = lambda x: (x[0] / 3) ** 2 / 2 + jnp.sum(x[1:] ** 2 * jnp.exp(-x[0])) / 2 + x[0] * (len(x) - 1) / 2  # noqa: E731
    start, sample = hmc(funnel, algo="NUTS")
    draw = lambda state, _: (lambda new: (new, new.num_steps))(sample(state))  # noqa: E731
    return jax.lax.scan(draw, start(jnp.full(10, 0.1), num_warmup=0, **options), None, 100)[1].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "by_vmap", "by_lanes"), [(_gaussian_chain, 13_336, 8_584), (_funnel_chain, 27_164, 15_924)]
)
def test_leapfrogs_are_as_many_as_the_longest_chain_takes(chain: Any, by_vmap: int, by_lanes: int) -> None:
    """By vmap and in lanes, as a prototype counted; BlackJAX and NumPyro say how many each of 64 chains takes."""
    keys = jax.random.split(jax.random.key(0), 64)
    balance = px.balance(chain, keys, axis_on(1, 64), widths=[64])
    assert (balance.most["vmap"], balance.most["lanes"]) == (by_vmap, by_lanes)
    assert balance.turns.max() == max(jax.lax.map(chain, keys))  # a funnel's other chains change with rounding
