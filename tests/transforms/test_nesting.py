"""Transforms inside transforms compute what the module computes, and write each variable once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Counter, Noisy, Normed, arrays_in, assert_untouched

WRAPPERS = {"Jit": px.Jit, "Parallel": px.Parallel, "Vectorize": px.Vectorize}
STYLES: dict[str, Callable[[Any, Any, Any], Callable[..., Any]]] = {
    "wrapped twice": lambda outer, inner, net: outer(inner(net)),
    "given as a module": lambda outer, inner, net: outer(lambda f, x: f(x), inner(net)),
    "reached from outside": lambda outer, inner, net: _reached(outer, inner(net), net),
    "made inside": lambda outer, inner, net: outer(lambda net, x: inner(net)(x), net),
    "given beside the module": lambda outer, inner, net: outer(lambda net, f, x: f(x), net, inner(net)),
}


def _reached(outer: Any, fn: Callable[..., Any], net: Any) -> Callable[..., Any]:
    return outer(lambda net, x: fn(x), net)


def _linear(net: Counter, x: jax.Array) -> jax.Array:
    return x @ net.layer.kernel.get_value() + net.layer.bias.get_value()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_two_transforms_in_any_order_write_once(outer: str, inner: str, style: str) -> None:
    net = Counter(nnx.Rngs(0))
    x = values(3, 8, 3) if outer == "Vectorize" else values(8, 3)
    fn = STYLES[style](WRAPPERS[outer], WRAPPERS[inner], net)
    kernel = net.layer.kernel.get_value()
    for n in (1, 2, 3):
        assert_close(_placed(fn(x)), _linear(net, x))
        assert net.calls.get_value() == n
        net.layer.bias[...] = values(4, seed=n)
    assert "Parallel" in (outer, inner) or net.layer.kernel.get_value() is kernel


def _placed(x: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), x)


def test_deeper_nestings() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 2, 3)
    rows = px.Vectorize(net)
    for n, fn in enumerate(
        (
            px.Jit(px.Parallel(px.Vectorize(px.Jit(net)))),
            px.Parallel(px.Jit(px.Vectorize(rows))),
            px.Jit(px.Jit(px.Jit(net))),
            px.Jit(lambda net, x: px.Parallel(lambda net, x: rows(x), net)(x), net),
        ),
        start=1,
    ):
        assert_close(_placed(fn(x)), _linear(net, x))
        assert net.calls.get_value() == n


def test_an_inner_function_called_several_times_counts_each_time() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    for outer in (px.Jit, px.Parallel):
        for inner in (px.Jit(net), px.Vectorize(net)):
            before = int(net.calls.get_value())
            fn = _thrice(outer, inner, net)
            assert_close(_placed(fn(x)), 3 * _linear(net, x), rtol=1e-4)
            assert net.calls.get_value() == before + 4


def _thrice(outer: Any, inner: Callable[..., Any], net: Counter) -> Callable[..., Any]:
    def fn(net: Counter, x: jax.Array) -> jax.Array:
        total = inner(x) + inner(x)
        net(x)
        return total + inner(x)

    return outer(fn, net)


def _loss(net: Counter, x: jax.Array) -> jax.Array:
    return (net(x) ** 2).mean()


def _by_hand(net: Counter, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Gradients (bias, kernel) and value, by plain JAX."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        return ((x @ weights[1] + weights[0]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)([net.layer.bias.get_value(), net.layer.kernel.get_value()])
    return gradients, value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inner", WRAPPERS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["", "in Jit"])
def test_gradients_through_another_transform(inner: str, is_compiled: bool) -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    net.layer.bias[...] = values(4)
    fn = WRAPPERS[inner](net)
    bodies = [
        px.GradValues(lambda net, x: (fn(x) ** 2).mean(), net),
        px.GradValues(lambda fn, x: (fn(x) ** 2).mean(), fn),
        px.GradValues(lambda net, x: (WRAPPERS[inner](net)(x) ** 2).mean(), net),
    ]
    for n, body in enumerate(bodies, start=1):
        gradients, value = _placed((px.Jit(body) if is_compiled else body)(x))
        assert_close((list(gradients), value), _by_hand(net, x))
        assert net.calls.get_value() == n
    shorter = px.GradValues(px.Jit(_loss, net))
    assert_close([*shorter(x)[0]], _by_hand(net, x)[0])
    assert net.calls.get_value() == 4


def test_gradients_inside_another_transform() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    gv = px.GradValues(_loss, net)
    expected, value = _by_hand(net, x)
    for n, fn in enumerate(
        (px.Jit(gv), px.Jit(lambda net, x: gv(x), net), px.Jit(lambda net, x: px.GradValues(_loss, net)(x), net)), 1
    ):
        gradients, got = fn(x)
        assert_close((list(gradients), got), (expected, value))
        assert gradients.names() == ["(Counter).layer(Linear).bias", "(Counter).layer(Linear).kernel"]
        assert net.calls.get_value() == n
    average = px.Parallel(lambda net, x: px.pmean(gv(x), "device"), net, reduce="same")
    gradients, got = _placed(average(x))
    assert_close((list(gradients), got), (expected, value))
    assert net.calls.get_value() == 4


def test_gradients_of_each_row() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    gv = px.GradValues(_loss, net)
    expected = jax.vmap(lambda x: tuple(_by_hand(net, x)[0]))(x)
    for n, fn in enumerate(
        (
            px.Vectorize(gv),
            px.Vectorize(lambda net, x: gv(x), net),
            px.Jit(px.Vectorize(gv)),
            px.Parallel(px.Vectorize(gv)),
            px.Vectorize(px.Jit(gv)),
        ),
        start=1,
    ):
        assert_close(_placed(tuple(fn(x)[0])), expected)
        assert net.calls.get_value() == n


@pytest.mark.slow
def test_second_derivatives() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)

    def penalty(net: Counter, x: jax.Array) -> jax.Array:
        gradients, _ = px.GradValues(_loss, net)(x)
        return sum((g**2).sum() for g in gradients)  # pyright: ignore[reportReturnType]

    def by_hand(weights: list[jax.Array]) -> jax.Array:
        inner = jax.grad(lambda w: ((x @ w[1] + w[0]) ** 2).mean())(weights)
        return sum((g**2).sum() for g in inner)  # pyright: ignore[reportReturnType]

    expected = jax.grad(by_hand)([net.layer.bias.get_value(), net.layer.kernel.get_value()])
    assert_close(list(px.Jit(px.GradValues(penalty, net))(x)[0]), expected)
    assert_close(list(px.GradValues(penalty, net)(x)[0]), expected)
    assert net.calls.get_value() == 2


@pytest.mark.parametrize("make", [Normed, Noisy, MLP])
def test_layers_with_state_are_nested_as_they_are_plain(make: Any) -> None:
    here, there, x = make(nnx.Rngs(0)), make(nnx.Rngs(0)), values(6, 3)
    inner = px.Jit(here)
    fn = px.Jit(lambda net, x: px.GradValues(lambda net, x: inner(x).sum(), net)(x)[1], here)
    for _ in range(2):
        assert_close(fn(x), there(x).sum(), rtol=1e-4, atol=1e-4)
    assert_close(arrays_in(here), arrays_in(there))


def test_edits_made_outside_reach_the_inner_function_without_compiling() -> None:
    net, x, traces = MLP(nnx.Rngs(0)), values(2, 3), list[int]()

    def call(net: MLP, x: jax.Array) -> jax.Array:
        traces.append(0)
        return net(x)

    inner = px.Jit(call, net)
    outer = px.Jit(lambda net, x: inner(x) * 2, net)
    for seed in range(3):
        net.last.bias[...] = values(4, seed=seed)
        assert_close(outer(x), 2 * net(x))
    assert len(traces) == 1
    net.last.kernel = nnx.Param(values(8, 4))
    net.first = nnx.Linear(3, 8, rngs=nnx.Rngs(9))
    assert_close(outer(x), 2 * net(x))
    assert_close(inner(x), net(x))


def test_a_replaced_variable_is_found_by_the_inner_function_when_shapes_change() -> None:
    net = Counter(nnx.Rngs(0))
    inner = px.Jit(net)
    outer = px.Jit(lambda net, x: inner(x) * 2, net)
    outer(values(2, 3))
    net.layer.kernel, net.calls = nnx.Param(values(3, 4)), nnx.Variable(jnp.asarray(7, "int32"))
    assert_close(outer(values(5, 3)), 2 * _linear(net, values(5, 3)))
    assert net.calls.get_value() == 8


@pytest.mark.slow
def test_a_failure_after_an_inner_write_undoes_it() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    for outer in (px.Jit, px.Parallel, px.Vectorize, px.GradValues):
        for inner in (px.Jit(net), px.Vectorize(net), px.GradValues(_loss, net)):
            before = arrays_in(net)
            fn = _fails(outer, inner, net)
            with pytest.raises(ValueError, match="after an inner write"):
                fn(values(3, 8, 3) if outer is px.Vectorize else x)
            assert_untouched(before, net)
            assert_close(px.Jit(net)(x), _linear(net, x))


def _fails(outer: Any, inner: Callable[..., Any], net: Counter) -> Callable[..., Any]:
    def fn(net: Counter, x: jax.Array) -> jax.Array:
        inner(x)
        raise ValueError("after an inner write")

    return outer(fn, net)


def test_an_inner_function_of_a_module_that_was_not_given_is_refused_and_leaks_nothing() -> None:
    net, other, x = Counter(nnx.Rngs(0)), Counter(nnx.Rngs(1)), values(2, 3)
    hidden = [px.Jit(lambda other, x: other.layer.bias.set_value(x.sum() * jnp.ones(4)) or other(x), other)]
    before = arrays_in(other)
    with pytest.raises(
        px.StateError, match=r"Jit: variable \(Counter\)\S+ is used inside .*compiled by Jit.*px\.Jit\(f, net"
    ):
        px.Jit(lambda net, x: hidden[0](x), net)(x)
    message = r"Jit: variable \(Counter\)\S+ would be written inside.*px\.Jit\(f, net\)"
    for fn in (
        px.Vectorize(lambda net, x: hidden[0](x), net),
        px.GradValues(lambda net, x: hidden[0](x).sum(), net, argnums=0),
    ):
        with pytest.raises(px.StateError, match=message):
            fn(x)
        assert_untouched(before, other)


FRAMES: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "Jit": lambda loss, net: px.Jit(lambda net, x: _gradients(loss, net, x), net),
    "Jit of Jit": lambda loss, net: px.Jit(lambda net, x: px.Jit(lambda n, x: _gradients(loss, n, x), net)(x), net),
    "Vectorize": lambda loss, net: (
        lambda x: jax.tree.map(lambda g: g[0], px.Vectorize(lambda net, x: _gradients(loss, net, x), net)(x[None]))
    ),
    "Parallel": lambda loss, net: px.Parallel(
        lambda net, x: px.pmean(_gradients(loss, net, x), "device"), net, reduce="same"
    ),
    "GradValues": lambda loss, net: (
        lambda x: px.GradValues(lambda net, x: (net(x).sum(), _gradients(loss, net, x)), net)(x)[1][1]
    ),
}


def _gradients(loss: Callable[..., Any], net: Counter, x: jax.Array) -> list[jax.Array]:
    return list(px.GradValues(loss, net)(x)[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_a_function_wrapped_outside_is_differentiated_where_it_is_called(frame: str, inner: str) -> None:
    # It is bound to the outermost module, two transforms away from the one that takes the gradient.
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    net.layer.bias[...] = values(4)
    wrapped = WRAPPERS[inner](net)
    got = FRAMES[frame](lambda net, x: (wrapped(x) ** 2).mean(), net)(x)
    assert_close(_placed(got), _by_hand(net, x)[0])
    assert net.calls.get_value() == (2 if frame == "GradValues" else 1)


def test_a_module_of_the_run_around_is_not_given_by_itself() -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    for wrap in (px.Jit, px.Vectorize, px.GradValues):
        options = {"argnums": 0} if wrap is px.GradValues else {}

        def body(net: Counter, x: jax.Array, wrap: Any = wrap, options: Any = options) -> Any:
            return wrap(lambda x: net.layer(x).sum(), **options)(x)

        with pytest.raises(px.StateError, match=rf"{wrap.__name__}: '<lambda>' uses 'net', a Counter, from outside"):
            px.Jit(body, net)(x)
    assert px.Jit(lambda net, x: jax.grad(lambda s: net.layer(s * x).sum())(1.0), net)(x).shape == ()
    assert jnp.shape(px.Jit(lambda net, x: px.grad(lambda s: net.layer(s * x).sum())(1.0), net)(x)) == ()
