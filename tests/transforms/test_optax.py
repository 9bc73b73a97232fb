"""All of optax's optimisers in px.Optimizer, against optax alone."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close

RATES = [0.1, 0.03, 0.2]
START = [jnp.linspace(0.3, 1.2, 6).reshape(3, 2), jnp.asarray([0.5, 0.7])]
FIXED = ("optimistic_adam", "polyak_sgd", "sm3")
"""They take no schedule, which is what steps are held against."""
ONCE_MORE = ("schedule_free_adamw", "schedule_free_sgd")
"""They ask a schedule for the rate of the next step."""
NEEDS_MORE = ("sophia", "dpsgd", "rprop")


def _is_one(name: str, x: Any) -> bool:
    if not inspect.isfunction(x) or name.startswith(("_", "scale_by")) or name in NEEDS_MORE:
        return False
    return next(iter(inspect.signature(x).parameters), "") in ("learning_rate", "max_learning_rate")


def _optimisers() -> dict[str, Any]:
    public = [
        (name, x) for room in (optax, optax.contrib) for name, x in sorted(vars(room).items()) if _is_one(name, x)
    ]
    inject = optax.inject_hyperparams
    return dict(public) | {
        "injected": inject(optax.adam),
        "injected by name": lambda lr: inject(optax.sgd)(learning_rate=lr, momentum=0.9),
        "injected in a chain": lambda lr: optax.chain(optax.clip(1.0), inject(optax.adamw)(lr, weight_decay=0.1)),
        "on a plateau": lambda lr: optax.chain(optax.adam(lr), optax.contrib.reduce_on_plateau(patience=1)),
        "masked": lambda lr: optax.masked(inject(optax.sgd)(lr), lambda tree: jax.tree.map(lambda _: True, tree)),
        "finite only": lambda lr: optax.apply_if_finite(inject(optax.lion)(lr), 2),
    }


OPTIMISERS = _optimisers()


def _gradients(values: Sequence[Any], step: int) -> list[jax.Array]:
    return [jnp.cos(x * (step + 1)) + 0.1 * x for x in values]


def _sum(tree: Any) -> jax.Array:
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))  # pyright: ignore[reportReturnType]


def by_optax(made: Any) -> list[jax.Array]:
    """The steps of optax alone. ``made``: an optimiser whose rates are settled."""
    values, state = START, made.init(START)
    update = optax.with_extra_args_support(made).update
    for step in range(3):
        g = _gradients(values, step)
        updates, state = update(g, state, values, value=1.0 + step, grad=g, value_fn=_sum)
        values: Any = optax.apply_updates(values, updates)
    return values


def by_paraxis(factory: Any, rates: Sequence[float]) -> list[jax.Array]:
    net: Any = nnx.Dict(a=nnx.Param(START[0]), b=nnx.Param(START[1]))
    opt = px.Optimizer(net, factory)
    for step, rate in enumerate(rates):
        g = _gradients([net.a[...], net.b[...]], step)
        named = px.transforms.Gradients(dict(zip(opt.names, g, strict=True)))
        opt(rate, g, value=1.0 + step, grad=named, value_fn=_sum)
    return [net.a[...], net.b[...]]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Specifying a key will be required", "ignore::DeprecationWarning")  # optax's own
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_of_optax_makes_the_steps_that_it_makes_alone(name: str) -> None:
    factory = OPTIMISERS[name]
    assert_close(by_paraxis(factory, [0.1] * 3), by_optax(factory(0.1)))
    if name not in (*FIXED, *ONCE_MORE):
        assert_close(by_paraxis(factory, RATES), by_optax(factory(lambda count: jnp.asarray(RATES)[count])))


@pytest.mark.parametrize("name", ["injected", "injected in a chain"])
def test_a_rate_that_is_kept_in_the_state_is_that_of_the_step(name: str) -> None:
    factory = OPTIMISERS[name]
    expected = by_optax(optax.chain(*([optax.clip(1.0)] if "chain" in name else []), _plain(name)))
    assert_close(by_paraxis(factory, RATES), expected)
    net: Any = nnx.Dict(a=nnx.Param(START[0]), b=nnx.Param(START[1]))
    opt = px.Optimizer(net, factory)
    px.Jit(lambda opt, lr: opt(lr, _gradients(START, 0)), opt)(0.25)
    kept = [v[...] for key, v in opt.state.items() if "learning_rate" in key]
    assert [float(x) for x in kept] == [0.25]


def _plain(name: str) -> Any:
    rate = lambda count: jnp.asarray(RATES)[count]  # noqa: E731
    return optax.adamw(rate, weight_decay=0.1) if "chain" in name else optax.adam(rate)


def test_an_optimiser_that_changes_its_rate_by_itself_is_refused_by_name() -> None:
    net: Any = nnx.Dict(a=nnx.Param(START[0]), b=nnx.Param(START[1]))
    message = r"Optimizer: rprop initialises 0\.step_sizes\S+\.a, in its state, from .*lambda lr: optax\.rprop\(0\.01\)"
    with pytest.raises(px.StateError, match=message):
        px.Optimizer(net, optax.rprop)
    with pytest.raises(px.StateError, match="Optimizer: the optimiser initialises"):
        px.Optimizer(net, lambda lr: optax.inject_hyperparams(optax.rprop)(lr))
    assert_close(by_paraxis(lambda lr: optax.rprop(0.01), RATES), by_optax(optax.rprop(0.01)))


def _keeping(becomes: Callable[[Any], Any]) -> Any:
    """An optimiser that keeps the rate in its state, and then changes it."""

    def factory(lr: Any) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return jax.tree.map(lambda x: -state["lr"] * x, updates), {"lr": becomes(state["lr"])}

        return optax.GradientTransformation(lambda params: {"lr": jnp.asarray(lr, jnp.float32)}, update)

    return factory


CHANGED: dict[str, Callable[[Any], Any]] = {
    "decayed": lambda rate: rate * 0.9,
    "bounded": lambda rate: jnp.minimum(rate, 0.1),
    "another": lambda rate: jnp.full_like(rate, 0.5),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_rate_in_the_state_that_the_optimiser_changes_itself_is_refused(how: str) -> None:
    net: Any = nnx.Dict(a=nnx.Param(START[0]))
    with pytest.raises(px.StateError, match=r"Optimizer: factory initialises lr, in its state, from the first"):
        px.Optimizer(net, _keeping(CHANGED[how]))


def test_a_rate_in_the_state_that_stays_is_that_of_each_step() -> None:
    expected: list[Any] = START
    for step, rate in enumerate(RATES):
        moved = zip(expected, _gradients(expected, step), strict=True)
        expected = [np.asarray(x) - rate * np.asarray(g) for x, g in moved]
    assert_close(by_paraxis(_keeping(lambda rate: rate), RATES), expected)


def test_a_rate_that_is_turned_into_an_array_of_numpy_is_refused() -> None:
    net: Any = nnx.Dict(a=nnx.Param(START[0]))
    with pytest.raises(px.StateError, match=r"Optimizer: factory looks at the learning rate.*lambda lr: optax\.sgd"):
        px.Optimizer(net, lambda lr: optax.sgd(float(np.asarray(lr))))


def test_an_optimiser_that_looks_at_the_rate_is_refused() -> None:
    net: Any = nnx.Dict(a=nnx.Param(START[0]))
    with pytest.raises(
        px.StateError, match=r"Optimizer: factory looks at the learning rate.*lambda lr: optax\.sgd\(lr\)"
    ):
        px.Optimizer(net, lambda lr: optax.sgd(float(lr)))


def test_a_rate_of_float64_beside_another_that_is_made_of_it() -> None:
    with jax.enable_x64(True):
        net: Any = nnx.Dict(a=nnx.Param(jnp.ones(3)))
        made = optax.inject_hyperparams(lambda learning_rate, decay: optax.adamw(learning_rate, weight_decay=decay))
        optimizer = px.Optimizer(net, lambda lr: made(learning_rate=lr, decay=lr * 0.1))
        optimizer(0.1, [jnp.ones(3)])
        np.testing.assert_allclose(net["a"][...], 1 - 0.1 - 0.1 * 0.01, rtol=1e-6)
