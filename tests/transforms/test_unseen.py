"""What a check could overlook: the outside world, the number of rows, hidden modules, parts of frozen ones."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Noisy, arrays_in, assert_untouched

FLOAT = jax.ShapeDtypeStruct((), "float32")
OWN_MODELS: Any = types.ModuleType("own_models")
INNER_MODELS: Any = types.ModuleType("own_models.inner")
INNER_MODELS.net = nnx.Linear(3, 4, rngs=nnx.Rngs(6))
OWN_MODELS.inner = INNER_MODELS
OWN_MODELS.net = nnx.Linear(3, 4, rngs=nnx.Rngs(5))
OWN_MODELS.scale = 2.0
WRAPPERS = [px.Jit, px.Parallel, px.Vectorize, px.GradValues]


class Total(nnx.Variable[Any]):
    pass


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


# --- the outside world -----------------------------------------------------------------------------------------------


def counting() -> tuple[Callable[[], jax.Array], list[float]]:
    """A function that asks the host for the next number, and the numbers that it was given."""
    numbers, given = itertools.count(), []

    def answer() -> np.float32:
        given.append(float(next(numbers)))
        return np.float32(given[-1])

    return lambda: io_callback(answer, FLOAT), given


ASKS: dict[str, Callable[[Callable[[], jax.Array]], jax.Array]] = {
    "plainly": lambda ask: ask(),
    "in a compiled function": lambda ask: jax.jit(lambda: ask() * 1)(),
    "in a branch": lambda ask: jax.lax.cond(jnp.asarray(True), ask, lambda: jnp.asarray(0.0)),
    "in a loop": lambda ask: jax.lax.scan(lambda c, _: (c + ask(), None), jnp.asarray(0.0), length=1)[0],
}


@pytest.mark.parametrize("how", ASKS)
def test_what_the_host_answers_may_differ_between_devices(how: str) -> None:
    ask, given = counting()
    net = nnx.Dict(total=Total(jnp.asarray(0.0)))

    def body(net: Any, x: jax.Array) -> jax.Array:
        net.total[...] = ASKS[how](ask)
        return x

    before, x = arrays_in(net), values(8, 3)
    message = r"variable \(Dict\)\.total could be left with different values.*sync=\{Total: 'mean'\}.*check=False"
    with pytest.raises(px.StateError, match=message):
        px.Parallel(body, net)(x)
    assert_untouched(before, net)
    assert given == []
    with pytest.raises(px.StateError, match=r"result is to be the same.*depends on the device's share.*reduce='mean'"):
        px.Parallel(lambda x: ASKS[how](ask), reduce="same")(x)
    assert given == []


def test_the_mean_of_what_the_host_answers_is_that_of_all_answers() -> None:
    ask, given = counting()
    mean = px.Parallel(lambda x: ask(), reduce="mean")(values(8, 3))
    assert len(set(given)) == 8
    assert float(mean) == np.mean(given)
    ask, given = counting()
    net = nnx.Dict(total=Total(jnp.asarray(0.0)))
    px.Parallel(lambda net, x: net.total.set_value(ask()), net, sync={Total: "sum"})(values(8, 3))
    assert len(set(given)) == 8
    assert float(net.total[...]) == sum(given)


def test_without_the_check_one_of_the_answers_is_kept() -> None:
    ask, given = counting()
    net = nnx.Dict(total=Total(jnp.asarray(-1.0)))
    px.Parallel(lambda net, x: net.total.set_value(ask()), net, check=False)(values(8, 3))
    assert float(net.total[...]) in given


def test_what_is_only_told_to_the_host_makes_nothing_differ(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []

    def body(net: Any, x: jax.Array) -> jax.Array:
        jax.debug.print("share {}", x.shape[0])
        jax.debug.callback(told.append, x.sum())
        io_callback(told.append, None, x.sum())
        net.total[...] = net.total[...] + px.pmean(x.sum(), "device")
        return net.total[...] * 2

    net, x = nnx.Dict(total=Total(jnp.asarray(0.0))), values(8, 3)
    got = px.Parallel(body, net, reduce="same")(x)
    jax.effects_barrier()
    mean = x.sum() / 8
    assert_close((host(got), host(net.total[...])), (mean * 2, mean))
    assert capfd.readouterr().out.count("share 1") == 8
    assert len(told) == 16


def test_a_callback_that_the_check_cannot_see_through_says_how_to_go_without_it() -> None:
    net, x = MLP(nnx.Rngs(0)), values(16, 3)

    def body(net: MLP, x: jax.Array) -> jax.Array:
        doubled = jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return net(doubled)

    with pytest.raises(px.StateError, match=r"Parallel: the check .*cannot see through the function.*check=False"):
        px.Parallel(body, net)(x)
    assert_close(host(px.Parallel(body, net, check=False)(x)), net(2 * x))


# --- the number of rows ----------------------------------------------------------------------------------------------


def _counts(net: Any, x: jax.Array) -> jax.Array:
    net.total[...] = jnp.asarray(len(x))
    return x


def total() -> Any:
    return nnx.Dict(total=Total(jnp.asarray(0)))


def mlp() -> MLP:
    return MLP(nnx.Rngs(0))


USES_OF_THE_COUNT: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any], Callable[..., Any]]] = {
    "summed": (mlp, lambda net, x: len(x), {"reduce": "sum"}, lambda net, x: len(x)),
    "from the shape": (mlp, lambda net, x: jnp.asarray(x.shape[0]), {"reduce": "sum"}, lambda net, x: len(x)),
    "summed inside": (
        mlp,
        lambda net, x: jax.lax.psum(len(x), "device"),
        {"reduce": "same"},
        lambda net, x: len(x),
    ),
    "beside rows": (
        mlp,
        lambda net, x: (net(x), len(x)),
        {"reduce": ("concat", "sum")},
        lambda net, x: (net(x), len(x)),
    ),
    "in state": (total, _counts, {"sync": {Total: "sum"}}, lambda net, x: x),
    "dividing": (mlp, lambda net, x: net(x) / len(x), {}, lambda net, x: net(x) / 2),
    "multiplying an argument": (mlp, lambda net, x: x * (len(x) + 1), {}, lambda net, x: x * 3),
    "in a sum of ones": (mlp, lambda net, x: jnp.ones(len(x)).sum(), {"reduce": "sum"}, lambda net, x: len(x)),
    "in a sum of numbers": (mlp, lambda net, x: x * jnp.arange(len(x)).sum(), {}, lambda net, x: x),
    "deciding what is done": (
        mlp,
        lambda net, x: x - x.mean(0) if len(x) < 5 else x,
        {},
        lambda net, x: x - x.reshape(8, 2, 3).mean(1).repeat(2, axis=0),
    ),
    "as steps of a loop": (
        mlp,
        lambda net, x: jax.lax.fori_loop(0, len(x), lambda _, y: y * 2, x),
        {},
        lambda net, x: x * 4,
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", USES_OF_THE_COUNT)
def test_padding_is_refused_where_the_number_of_rows_is_used(case: str) -> None:
    make, body, options, expected = USES_OF_THE_COUNT[case]
    net = make()
    before = arrays_in(net)
    with pytest.raises(px.ShapeError, match=r"9 rows do not divide over 8 devices.*Give a multiple of 8 rows"):
        px.Parallel(body, net, **options)(values(9, 3))
    assert_untouched(before, net)
    x = values(16, 3)
    got = px.Parallel(body, net, **options)(x)
    for leaf, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected(make(), x)), strict=True):
        np.testing.assert_allclose(leaf, e, rtol=2e-5, atol=1e-5)
    if isinstance(net, nnx.Dict):
        assert int(net.total[...]) == 16


class Attention(nnx.Module):
    """Attention within each row, of two heads, between normalisations."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.before, self.after = nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.after(x + self.attend(self.before(x)))


def _masked(net: Any, x: jax.Array) -> jax.Array:
    return jnp.where(jnp.ones((len(x), 1), bool), net(x), jnp.zeros((len(x), 4)))


ROW_WISE: dict[str, tuple[Callable[[], Any], Callable[..., Any], tuple[int, ...]]] = {
    "MLP": (mlp, lambda net, x: net(x), (3,)),
    "softmax": (mlp, lambda net, x: jax.nn.softmax(net(x)), (3,)),
    "LayerNorm": (lambda: nnx.LayerNorm(3, rngs=nnx.Rngs(0)), lambda net, x: net(x), (3,)),
    "RMSNorm": (lambda: nnx.RMSNorm(3, rngs=nnx.Rngs(0)), lambda net, x: net(x), (3,)),
    "one feature": (lambda: nnx.LayerNorm(1, rngs=nnx.Rngs(0)), lambda net, x: net(x), (1,)),
    "MultiHeadAttention": (Attention, lambda net, x: net(x), (5, 8)),
    "one token": (Attention, lambda net, x: net(x), (1, 8)),
    "a mask made for the rows": (mlp, _masked, (3,)),
    "flattened rows": (mlp, lambda net, x: x.reshape(len(x), -1), (2, 3)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("name", ROW_WISE)
def test_layers_of_separate_rows_take_any_number_of_them(name: str, rows: int) -> None:
    make, body, shape = ROW_WISE[name]
    net, x = make(), values(rows, *shape)
    assert_close(host(px.Parallel(body, net)(x)), body(net, x))


def test_dropout_takes_any_number_of_rows() -> None:
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    y = np.asarray(px.Parallel(drop)(jnp.ones((7, 64))))
    assert y.shape == (7, 64)
    assert set(np.unique(y)) == {0.0, 2.0}
    assert len({row.tobytes() for row in y}) == 7


# --- hidden modules --------------------------------------------------------------------------------------------------


def uses_a_python_module(x: jax.Array) -> jax.Array:
    return OWN_MODELS.net(x)


def scales_by_a_helper(scale: float, x: jax.Array) -> jax.Array:
    return scale * uses_a_python_module(x)


def uses_a_part_of_a_package(x: jax.Array) -> jax.Array:
    return OWN_MODELS.inner.net(x)


def uses_a_python_module_in_an_inner_function(x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: OWN_MODELS.net(row))(x)


def _hidden() -> dict[str, tuple[Callable[..., Any], str]]:
    @dataclasses.dataclass(slots=True)
    class Slotted:
        net: Any

    class OneSlot:
        __slots__ = "net"

    class OneSlotMore(OneSlot):
        __slots__ = ("other",)

    class OfTheClass:
        net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.net(x)

    class Derived(OfTheClass):
        pass

    net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    slotted, inherited, instance, derived = Slotted(net), OneSlotMore(), OfTheClass(), Derived()
    inherited.net = net
    definition, state = nnx.split(net)
    pure = {"state": state}
    return {
        "a slot": (lambda x: slotted.net(x), r"'slotted\.net', a Linear"),
        "a slot of a base class": (lambda x: inherited.net(x), r"'inherited\.net', a Linear"),
        "a class": (lambda x: OfTheClass.net(x), r"'OfTheClass\.net', a Linear"),
        "an instance of it": (lambda x: instance(x), r"'instance\.net', a Linear"),
        "an instance of a class derived from it": (lambda x: derived.net(x), r"'derived\.net', a Linear"),
        "a Python module": (uses_a_python_module, r"'OWN_MODELS\.net', a Linear"),
        "a Python module inside": (uses_a_python_module_in_an_inner_function, r"'OWN_MODELS\.net', a Linear"),
        "a part of a package": (uses_a_part_of_a_package, r"OWN_MODELS\.inner\.net', a Linear"),
        "a state": (lambda x: nnx.merge(definition, state)(x), "'state', a State"),
        "a state in a dict": (lambda x: nnx.merge(definition, pure["state"])(x), "a State"),
        "a partial of an object": (functools.partial(lambda held, x: held.net(x), slotted), r"net', a Linear"),
        "a helper of a partial": (functools.partial(scales_by_a_helper, 2.0), r"'OWN_MODELS\.net', a Linear"),
    }


HIDDEN = _hidden()


@pytest.mark.parametrize("case", HIDDEN)
def test_a_hidden_module_is_refused_by_name_when_it_is_used(case: str) -> None:
    fn, culprit = HIDDEN[case]
    for wrap in WRAPPERS:
        message = (
            rf"{wrap.__name__}: .* uses .*{culprit}, from outside; .*px\.{wrap.__name__}\(lambda net, .*px\.freeze"
        )
        with pytest.raises(px.StateError, match=message):
            wrap(fn, **({"argnums": 0} if wrap is px.GradValues else {}))(values(8, 3))


def test_functions_and_numbers_of_python_modules_are_welcome() -> None:
    x = values(2, 3)
    got = px.Jit(lambda x: nnx.relu(jnp.sin(x)) + optax.l2_loss(x) + np.pi * jax.nn.sigmoid(x) * OWN_MODELS.scale)(x)
    a = np.asarray(x, "float64")
    expected = np.maximum(np.sin(a), 0) + a**2 / 2 + 2 * np.pi / (1 + np.exp(-a))
    assert_close(got, jnp.asarray(expected, "float32"))
    loss = px.GradValues(lambda net, x: optax.l2_loss(net(x)).mean(), MLP(nnx.Rngs(0)))
    assert_close(loss(x)[1], (MLP(nnx.Rngs(0))(x) ** 2).mean() / 2)


# --- parts of frozen modules -----------------------------------------------------------------------------------------


class Nested(nnx.Module):
    def __init__(self) -> None:
        self.inner = Noisy(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def test_a_part_of_a_frozen_module_is_frozen_too() -> None:
    net, x = Nested(), values(2, 3)
    frozen, before = px.freeze(net), [str(a) for a in arrays_in(net)]
    message = r"freeze: variable \(Dropout\).*count of a frozen module was written.*net\.eval\(\).*px\.Jit\(f, net\)"
    for call in (lambda y: frozen.inner.dropout(y), px.Jit(lambda y: frozen.inner.dropout(y))):
        with pytest.raises(px.StateError, match=message):
            call(jnp.ones((2, 4)))
    with pytest.raises(px.StateError, match=r"freeze: variable \(Noisy\)\.dropout.*count of a frozen module"):
        frozen.inner(x)
    assert [str(a) for a in arrays_in(net)] == before


def test_a_part_of_a_frozen_module_does_not_see_edits() -> None:
    net, x = Nested(), values(2, 3)
    net.eval()
    frozen, expected = px.freeze(net), net(x)
    layer, fast = frozen.inner.layer, px.Jit(lambda x: frozen.inner.layer(x))
    net.inner.layer.bias[...] += 1.0
    for call in (layer, fast, frozen.inner, px.Jit(frozen.inner), px.Parallel(frozen.inner)):
        assert_close(host(call(x)), expected)
    assert_close(net(x), expected + 1.0)


def test_the_parts_in_a_frozen_list_are_frozen_too() -> None:
    rngs = nnx.Rngs(0)
    net: Any = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    frozen, x = px.freeze(net), values(2, 3)
    expected = net.layers[0](x)
    net.layers[0].bias[...] += 1.0
    assert_close(frozen.layers[0](x), expected)
    with pytest.raises(px.StateError, match=r"freeze: variable .*count of a frozen module was written.*net\.eval\(\)"):
        frozen.layers[1](expected)
