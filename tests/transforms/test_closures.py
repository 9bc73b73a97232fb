"""A module that a function reaches without being given it is refused at once; a constant is one if it is said aloud."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Counter, Noisy, Normed, arrays_in

GLOBAL_NET = nnx.Linear(3, 4, rngs=nnx.Rngs(5))
GLOBAL_NETS = {"a": [GLOBAL_NET]}
WRAPPERS = [px.Jit, px.Parallel, px.Vectorize, px.GradValues]


def uses_global(x: jax.Array) -> jax.Array:
    return GLOBAL_NET(x)


def uses_helper(x: jax.Array) -> jax.Array:
    return uses_global(x) + 1


def uses_container(x: jax.Array) -> jax.Array:
    return GLOBAL_NETS["a"][0](x)


def uses_it_in_an_inner_function(x: jax.Array) -> jax.Array:
    def inner(x: jax.Array) -> jax.Array:
        return GLOBAL_NET(x)

    return jax.vmap(inner)(x)


def has_a_global_of_an_attributes_name(net: Any, x: jax.Array) -> jax.Array:
    return net.GLOBAL_NET(x) + net.uses_global


class Trainer:
    """An object of the caller's own, not a module, that holds one."""

    def __init__(self, net: nnx.Module) -> None:
        self.net, self.rate = net, 0.1

    def step(self, x: jax.Array) -> jax.Array:
        return self.net(x)  # pyright: ignore[reportCallIssue]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.step(x)


class Runner:
    """An object whose call reaches a global module."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return GLOBAL_NET(x)


def _cases() -> dict[str, tuple[Callable[..., Any], str]]:
    net = MLP(nnx.Rngs(0))
    variable, opt, rngs, nets = net.first.bias, px.Optimizer(net, _sgd), nnx.Rngs(0), [MLP(nnx.Rngs(1))]
    trainer, runner = Trainer(net), Runner()

    def calls_helper(x: jax.Array) -> jax.Array:
        return helper(x)

    def helper(x: jax.Array) -> jax.Array:
        return net(x)

    def with_default(x: jax.Array, model: MLP = net) -> jax.Array:
        return model(x)

    def with_keyword_default(x: jax.Array, *, model: MLP = net) -> jax.Array:
        return model(x)

    def nested(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return net(x)

        return inner(x)

    def decorated(x: jax.Array) -> jax.Array:
        return net(x)

    return {
        "a lambda": (lambda x: net(x), "'net', a MLP"),
        "a variable": (lambda x: x + variable[...], "'variable', a Param"),
        "an optimiser": (lambda x: opt(0.1, x), "'opt', a Optimizer"),
        "random streams": (lambda x: x + rngs.normal(), "'rngs', a Rngs"),
        "a list": (lambda x: nets[0](x), "'nets', a MLP"),
        "a global": (uses_global, "'GLOBAL_NET', a Linear"),
        "a global through a helper": (uses_helper, "'GLOBAL_NET', a Linear"),
        "a global container": (uses_container, r"GLOBAL_NETS.*a Linear"),
        "a global in an inner function": (uses_it_in_an_inner_function, "'GLOBAL_NET', a Linear"),
        "a helper beside it": (calls_helper, "'net', a MLP"),
        "a nested function": (nested, "'net', a MLP"),
        "a default": (with_default, "'model', a MLP"),
        "a default by keyword": (with_keyword_default, "'model', a MLP"),
        "a partial": (functools.partial(lambda net, x: net(x), net), "a MLP"),
        "a partial by keyword": (functools.partial(lambda x, model: model(x), model=net), "'model', a MLP"),
        "a method of an object": (trainer.step, r"\.net', a MLP"),
        "an object": (trainer, r"\.net', a MLP"),
        "an object in a closure": (lambda x: trainer.step(x), r"'trainer\.net', a MLP"),
        "a method of a module in a closure": (lambda x: (lambda f: f(x))(net.__call__), "'net', a MLP"),
        "a bound method in a closure": (_calls(net.__call__), "a MLP"),
        "an object that uses a global": (runner, "'GLOBAL_NET', a Linear"),
        "an object in a closure that uses a global": (lambda x: runner(x), "'GLOBAL_NET', a Linear"),
        "a function that JAX has wrapped": (jax.jit(decorated), "'net', a MLP"),
        "a cached function": (functools.lru_cache(decorated), "'net', a MLP"),
    }


def _calls(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(x)


def _sgd(lr: Any) -> Any:
    return optax.sgd(lr)


CASES = _cases()


@pytest.mark.parametrize("case", CASES)
def test_a_module_from_outside_is_refused_by_name_when_wrapped(case: str) -> None:
    fn, culprit = CASES[case]
    for wrap in WRAPPERS:
        message = rf"{wrap.__name__}: .*uses {culprit if culprit[0] == chr(39) else '.*' + culprit}, from outside; "
        with pytest.raises(px.StateError, match=rf"{message}.*px\.{wrap.__name__}\(lambda net, ….*px\.freeze\("):
            wrap(fn)


def test_a_module_from_outside_is_refused_beside_one_that_is_given() -> None:
    given, other = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(1))
    with pytest.raises(px.StateError, match=r"Jit: .*uses 'other', a MLP, from outside.*px\.freeze\(other\)"):
        px.Jit(lambda net, x: net(x) + other(x), given)
    with pytest.raises(px.StateError, match=r"Jit: .*uses 'given', a MLP, from outside; its variables would be frozen"):
        px.Jit(lambda net, x: given(x), given)


def test_what_only_has_a_modules_name_is_not_one() -> None:
    class Owner(nnx.Module):
        def __init__(self) -> None:
            self.GLOBAL_NET, self.uses_global = nnx.Linear(3, 4, rngs=nnx.Rngs(1)), 2.0

    net, x = Owner(), values(2, 3)
    assert_close(px.Jit(has_a_global_of_an_attributes_name, net)(x), net.GLOBAL_NET(x) + 2.0)
    assert_close(px.Jit(lambda GLOBAL_NET: GLOBAL_NET * 2)(x), x * 2)


def test_plain_values_and_functions_from_outside_are_welcome() -> None:
    x, table, scale = values(2, 3), {"a": values(3)}, 2.0
    helper = lambda x: x * scale + table["a"]  # noqa: E731
    assert_close(px.Jit(lambda x: helper(x))(x), x * 2 + values(3))
    assert_close(px.Jit(functools.partial(lambda a, x: a + x, table["a"]))(x), x + values(3))
    assert_close(px.Jit(lambda x: MLP(nnx.Rngs(0))(x))(x), MLP(nnx.Rngs(0))(x))
    assert_close(px.Jit(jnp.tanh)(x), jnp.tanh(x))


def test_a_name_that_is_bound_later_is_found_when_it_is_called() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return late(x)

    fast = px.Jit(fn)
    late = lambda x: x * 3  # noqa: E731
    assert_close(fast(2.0), jnp.asarray(6.0))


@pytest.mark.parametrize("wrap", [px.Jit, px.Parallel])
def test_a_wrapped_function_may_be_reached_if_its_modules_are_given(wrap: Any) -> None:
    net, other, x = Counter(nnx.Rngs(0)), Counter(nnx.Rngs(1)), values(8, 3)
    inner, both = px.Jit(net), px.Jit(lambda a, b, x: a(x) + b(x), net, other)
    message = rf"{wrap.__name__}: .*uses 'inner', a Jit, from outside.*px\.freeze"
    with pytest.raises(px.StateError, match=message):
        wrap(lambda x: inner(x))
    with pytest.raises(px.StateError, match=message):
        wrap(lambda net, x: inner(x), other)
    with pytest.raises(px.StateError, match=rf"{wrap.__name__}: .*uses 'both', a Jit, from outside"):
        wrap(lambda net, x: both(x), net)
    expected = x @ net.layer.kernel[...] + net.layer.bias[...]
    assert_close(wrap(lambda net, x: inner(x), net)(x), expected)
    assert_close(wrap(lambda inner, x: inner(x), inner)(x), expected)
    assert_close(
        wrap(lambda net, other, x: both(x), net, other)(x),
        expected + x @ other.layer.kernel[...] + other.layer.bias[...],
    )
    assert (net.calls[...], other.calls[...]) == (3, 1)


def test_what_is_given_when_it_is_compiled_must_be_there_when_it_is_called() -> None:
    net, x = Counter(nnx.Rngs(0)), values(2, 3)
    late: list[Any] = []
    fast = px.Jit(lambda x: late[0](x))
    late.append(px.Jit(net))
    before = arrays_in(net)
    with pytest.raises(
        px.StateError, match=r"Jit: variable \(Counter\)\S+ is used inside .*compiled by Jit.*px\.Jit\("
    ):
        fast(x)
    assert arrays_in(net) == before


def test_frozen_modules_do_not_see_edits() -> None:
    net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = values(10, 3)
    net.bias[...] = jnp.zeros(4)
    frozen = px.freeze(net)
    wrapped = [
        px.Jit(frozen),
        px.Jit(lambda x: frozen(x)),
        px.Jit(lambda frozen, x: frozen(x), frozen),
        px.Parallel(frozen),
        px.Vectorize(frozen),
        frozen,
    ]
    for fast in wrapped:
        assert_close(fast(x), net(x))
    net.bias[...] = net.bias[...] + 1
    for fast in wrapped:
        assert_close(((net(x) - fast(x)) ** 2).sum(), jnp.asarray(40.0))


def test_frozen_modules_have_the_modules_attributes_and_methods() -> None:
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.width = 4
            self.layer: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        def encode(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
            return self.layer(x) * scale

    net, x = Both(), values(2, 3)
    frozen, expected = px.freeze(net), net.encode(x, scale=3.0)
    net.layer.bias[...] += 1.0
    assert frozen.width == 4
    assert repr(frozen) == "Frozen(Both)"
    assert_close(frozen.encode(x, scale=3.0), expected)
    assert_close(frozen.layer(x) * 3, expected)
    assert_close(px.Jit(frozen.encode)(x) * 3, expected)
    with pytest.raises(AttributeError, match="decode"):
        frozen.decode(x)


@pytest.mark.parametrize(
    ("make", "name"), [(Counter, r"\.calls"), (Normed, r"\.norm\(BatchNorm\)\.mean"), (Noisy, r"\.dropout.*count")]
)
def test_frozen_modules_cannot_be_written(make: Any, name: str) -> None:
    net, x = make(nnx.Rngs(0)), values(2, 3)
    frozen, before = px.freeze(net), [str(a) for a in arrays_in(net)]
    for call in (frozen, px.Jit(frozen), px.Jit(lambda x: frozen(x))):
        with pytest.raises(px.StateError, match=rf"freeze: variable \({make.__name__}\){name}.*net\.eval\(\).*px\.Jit"):
            call(x)
    assert [str(a) for a in arrays_in(net)] == before
    if make is not Counter:
        net.eval()
        assert_close(px.Jit(px.freeze(net))(x), net(x))


def test_only_modules_can_be_frozen() -> None:
    with pytest.raises(px.StateError, match=r"freeze: module must be an NNX module, got dict; write px\.freeze\(net\)"):
        px.freeze({"w": values(3)})


NET = nnx.Linear(3, 4, rngs=nnx.Rngs(0))


class Base:
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * 2


class Derived(Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return NET(x)


def test_an_overriding_method_is_looked_into() -> None:
    derived = Derived()
    with pytest.raises(px.StateError, match="'NET', a Linear"):
        px.Jit(lambda x: derived(x))
