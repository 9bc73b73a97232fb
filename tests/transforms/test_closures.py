"""A module that a function uses without being given it is refused; a constant is one if it is said aloud."""

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

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
ELSEWHERE: Any = types.ModuleType("another_package.models")
exec(
    """
from flax import nnx
NET = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

class Trainer:
    def __init__(self, net):
        self.net = net

    def predict(self, x):
        return self.step(x)

    def step(self, x):
        return self.net(x)

def predict(x):
    return NET(x)

def caught(net, x):
    try:
        return net(x)
    except Exception:
        return x
""",
    vars(ELSEWHERE),
)
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
    trainer, runner, held = Trainer(net), Runner(), ELSEWHERE.Trainer(net)
    space, weak, deep = types.SimpleNamespace(net=net), weakref.ref(net), [lambda: held]
    other = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

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
        "an optimiser": (lambda x: opt(0.1, [x] * 4), "'opt', a Optimizer"),
        "random streams": (lambda x: x + rngs.normal(), "'rngs', a Rngs"),
        "a list": (lambda x: nets[0](x), r"'nets\[0\]', a MLP"),
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
        "a name in a namespace": (lambda x: space.net(x), r"'space\.net', a MLP"),
        "a name that is made": (lambda x: getattr(space, "".join(["n", "et"]))(x), r"'space\.net', a MLP"),
        "a weak reference": (lambda x: cast(Any, weak())(x), r"'weak\(\)', a MLP"),
        "another file": (ELSEWHERE.predict, "'NET', a Linear"),
        "an object of another file": (lambda x: held.predict(x), r"'held\.net', a MLP"),
        "an object of another file, deep inside": (lambda x: deep[0]().step(x), r"net', a MLP"),
        "a flattened module": (lambda x: x * len(jax.tree.leaves(space)) * jax.tree.leaves(net)[0].sum(), "a MLP"),
        "a value that Python looks at": (lambda x: x if float(variable[0]) > 0 else -x, "'variable', a Param"),
        "a shape": (lambda x: x * variable.shape[0], "'variable', a Param"),
        "a write": (lambda x: variable.set_value(x), "'variable', a Param"),
        "a wrapped optimiser of Flax": (lambda x: other.update(net, [x]), "a (ModelAndOptimizer|Optimizer|MLP)"),
        "an error that is caught": (lambda x: ELSEWHERE.caught(net, x), "'net', a MLP"),
    }


def _calls(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(x)


def _sgd(lr: Any) -> Any:
    return optax.sgd(lr)


CASES = _cases()


def use(wrap: Any, fn: Callable[..., Any]) -> Any:
    return wrap(fn, **({"argnums": 0} if wrap is px.GradValues else {}))(values(8, 3))


@pytest.mark.parametrize("case", CASES)
def test_a_module_from_outside_is_refused_by_name_when_it_is_used(case: str) -> None:
    fn, culprit = CASES[case]
    for wrap in WRAPPERS:
        message = rf"{wrap.__name__}: .*uses {culprit if culprit[0] == chr(39) else '.*' + culprit}, from outside; "
        with pytest.raises(px.StateError, match=rf"{message}.*px\.{wrap.__name__}\(lambda net, ….*px\.freeze\("):
            use(wrap, fn)


def test_a_module_from_outside_is_refused_beside_one_that_is_given() -> None:
    given, other = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(1))
    with pytest.raises(px.StateError, match=r"Jit: .*uses 'other', a MLP, from outside.*px\.freeze\(other\)"):
        px.Jit(lambda net, x: net(x) + other(x), given)(values(2, 3))
    with pytest.raises(px.StateError, match=r"Jit: .*uses 'given', a MLP, from outside; its variables would be frozen"):
        px.Jit(lambda net, x: given(x), given)(values(2, 3))


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


def test_a_module_that_is_at_hand_and_not_used_does_no_harm() -> None:
    net, x = MLP(nnx.Rngs(0)), values(2, 3)
    assert_close(px.Jit(lambda x, use=False: net(x) if use else x * 2)(x), x * 2)
    assert px.Jit(lambda x: len(px.variables(net)) * x)(1.0) == 4.0


def test_modules_that_are_made_inside_are_read_in_any_transformation() -> None:
    def body(x: jax.Array) -> jax.Array:
        net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        _, rows = jax.lax.scan(lambda c, row: (c, net(row)), 0.0, x)
        return rows + jax.vmap(net)(x) + jax.grad(lambda s: net(s * x).sum())(1.0) + nnx.jit(net)(x)

    net, x = MLP(nnx.Rngs(0)), values(8, 3)
    assert_close(px.Jit(body)(x), body(x))
    assert_close(px.Jit(lambda net, x: jax.vmap(lambda row: net(row))(x) + nnx.jit(net)(x), net)(x), 2 * net(x))


def test_another_thread_may_read_what_it_likes_meanwhile() -> None:
    net, x, inside, done = MLP(nnx.Rngs(0)), values(2, 3), threading.Event(), threading.Event()
    found: list[Any] = []

    def read() -> None:
        inside.wait(20)
        try:
            found.append(net(x))
        except Exception as error:
            found.append(error)
        done.set()

    def body(x: jax.Array) -> jax.Array:
        inside.set()
        done.wait(20)
        return x + 1

    thread = threading.Thread(target=read)
    thread.start()
    assert_close(px.Jit(body)(x), x + 1)
    thread.join()
    assert_close(found, [net(x)])


def test_reads_are_watched_while_tracing_only() -> None:
    before = {name: vars(nnx.Variable)[name] for name in ("_raw_value", "_trace_state")}
    net, x = MLP(nnx.Rngs(0)), values(2, 3)
    with pytest.raises(px.StateError, match="'net', a MLP"):
        px.Jit(lambda x: net(x))(x)
    px.Jit(lambda net, x: net(x), net)(x)
    assert {name: vars(nnx.Variable)[name] for name in before} == before
    assert net(x).shape == (2, 4)


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
    message = (
        rf"Jit: variable \S*\(Counter\)\S+ is used inside .*compiled by {wrap.__name__}.*px\.{wrap.__name__}\(f, net"
    )
    for fn, given in [
        (lambda x: inner(x), ()),
        (lambda net, x: inner(x), (other,)),
        (lambda net, x: both(x), (net,)),
    ]:
        with pytest.raises(px.StateError, match=message):
            wrap(fn, *given)(x)
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
        px.StateError, match=r"Jit: variable \S*\(Counter\)\S+ is used inside .*compiled by Jit.*px\.Jit\("
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


def test_what_an_overriding_method_uses_is_noticed() -> None:
    derived = Derived()
    with pytest.raises(px.StateError, match="'NET', a Linear"):
        px.Jit(lambda x: derived(x))(values(2, 3))
