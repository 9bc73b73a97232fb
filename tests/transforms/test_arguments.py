"""What a wrapped function may be given: modules when it is made, keys per row, and only names that there are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Counter, arrays_in, assert_untouched

WRAPPERS = [px.Jit, px.Parallel, px.Vectorize, px.GradValues]


def train(net: Counter, opt: px.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = px.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
    opt(0.1, gradients)
    return loss


def call(net: Counter, x: jax.Array) -> jax.Array:
    return net(x)


def call_last(x: jax.Array, net: Counter) -> jax.Array:
    return net(x)


def call_held(held: dict[str, Any], x: jax.Array) -> jax.Array:
    return held["net"][0](x)


def add_one(v: Any, x: jax.Array) -> jax.Array:
    v[...] = v[...] + 1.0
    return x


# --- modules ---------------------------------------------------------------------------------------------------------

X = values(16, 3)
GIVEN_LATE: dict[str, tuple[Callable[[Counter], Any], str]] = {
    "a step": (lambda net: px.Jit(train)(net, px.Optimizer(net, optax.sgd), X), r"Jit: args\[0\]"),
    "beside one that is bound": (lambda net: px.Jit(call_last, nnx.Param(X))(net), r"Jit: args\[0\]"),
    "last": (lambda net: px.Jit(call_last)(X, net), r"Jit: args\[1\]"),
    "by keyword": (lambda net: px.Jit(call_last)(X, net=net), "Jit: net"),
    "in a container": (lambda net: px.Jit(call_held)({"net": [net]}, X), r"Jit: args\[0\]"),
    "a variable": (lambda net: px.Jit(add_one)(net.layer.bias, X), r"Jit: args\[0\]"),
    "a variable by keyword": (lambda net: px.Jit(add_one)(x=X, v=net.layer.bias), "Jit: v"),
    "on all devices": (lambda net: px.Parallel(call, batch_axis=(None, 0))(net, X), r"Parallel: args\[0\]"),
    "on all devices, by keyword": (lambda net: px.Parallel(call_last)(X, net=net), "Parallel: net"),
    "split over devices": (lambda net: px.Parallel(call)(net, X), r"Parallel: args\[0\]"),
    "for each row": (lambda net: px.Vectorize(call)(net, X), r"Vectorize: args\[0\]"),
    "for each row, whole": (lambda net: px.Vectorize(call, batch_axis=(None, 0))(net, X), r"Vectorize: args\[0\]"),
    "for each row, by keyword": (lambda net: px.Vectorize(call_last)(X, net=net), "Vectorize: net"),
    "in a loss": (lambda net: px.GradValues(lambda n, x: n(x).sum(), argnums=1)(net, X), r"GradValues: args\[0\]"),
}


@pytest.mark.parametrize("case", GIVEN_LATE)
def test_a_module_given_when_calling_is_refused_and_is_left_as_it_was(case: str) -> None:
    give, culprit = GIVEN_LATE[case]
    net = Counter(nnx.Rngs(0))
    before = arrays_in(net)
    wrapper = culprit.partition(":")[0]
    with pytest.raises(px.StateError, match=rf"{culprit} is or holds a module.*would be lost.*px\.{wrapper}\(f, net\)"):
        give(net)
    assert_untouched(before, net)


def test_the_line_that_the_message_shows_keeps_what_is_written() -> None:
    net, alone = Counter(nnx.Rngs(0)), Counter(nnx.Rngs(0))
    losses = [px.Jit(train, net, px.Optimizer(net, optax.sgd))(X) for _ in range(2)]
    kernel, bias = alone.layer.kernel[...], alone.layer.bias[...]
    loss = jax.value_and_grad(lambda p: ((X @ p[0] + p[1]) ** 2).mean())
    expected = []
    for _ in range(2):
        value, (of_kernel, of_bias) = loss((kernel, bias))
        kernel, bias, expected = kernel - 0.1 * of_kernel, bias - 0.1 * of_bias, [*expected, value]
    assert_close(losses, expected)
    assert_close((net.layer.kernel[...], net.layer.bias[...]), (kernel, bias))
    assert int(net.calls[...]) == 2


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_function_that_jax_has_compiled_is_refused_if_it_is_to_have_modules(wrap: Any) -> None:
    compiled = jax.jit(call)
    message = rf"{wrap.__name__}: f is compiled by jax\.jit already.*px\.{wrap.__name__}\(call\.__wrapped__, net\)"
    with pytest.raises(px.StateError, match=message):
        wrap(compiled, Counter(nnx.Rngs(0)))


def test_what_a_compiled_function_wraps_may_be_given_and_one_without_modules_too() -> None:
    net, by_hand = Counter(nnx.Rngs(0)), Counter(nnx.Rngs(0))
    compiled: Any = jax.jit(call)
    assert_close(px.Jit(compiled.__wrapped__, net)(X), by_hand(X))
    assert int(net.calls[...]) == 1
    assert_close(px.Jit(jax.jit(lambda x: x * 2))(X), X * 2)


# --- keys ------------------------------------------------------------------------------------------------------------


def draw(store: Any, x: jax.Array) -> jax.Array:
    return x + jax.random.normal(store.key[...])


def draw_and_split(store: Any, x: jax.Array) -> jax.Array:
    kept, used = jax.random.split(store.key[...])
    store.key[...] = kept
    return x + jax.random.normal(used)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
@pytest.mark.parametrize("kind", [nnx.Variable, nnx.RngKey], ids=["a variable", "a key variable"])
def test_a_key_in_a_variable_is_another_for_each_and_steps_on_only_if_it_is_written(wrap: Any, kind: Any) -> None:
    store, zeros = nnx.Dict(key=kind(jax.random.key(3))), jnp.zeros(8)
    start = jax.random.key_data(store.key[...])
    noise, again = (np.asarray(wrap(draw, store)(zeros)) for _ in range(2))
    assert len(set(noise.tolist())) == 8
    assert noise.tolist() == again.tolist()
    assert (jax.random.key_data(store.key[...]) == start).all()
    split = wrap(draw_and_split, store)
    calls = [np.asarray(split(zeros)) for _ in range(3)]
    assert len(set(np.concatenate(calls).tolist())) == 24
    assert store.key[...].shape == ()
    assert not (jax.random.key_data(store.key[...]) == start).all()


def noisy(net: Any, x: jax.Array, key: Any) -> jax.Array:
    return x + jax.random.normal(jnp.ravel(key)[0])


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
def test_one_key_for_all_is_refused_unless_batch_axis_says_so(wrap: Any) -> None:
    net, key, zeros = MLP(nnx.Rngs(0)), jax.random.key(5), jnp.zeros(8)
    one_for_all = r"is one random key, which would be the same noise everywhere.*jax\.random\.split\(key, rows\)"
    for culprit, give in {
        r"args\[1\]": lambda f: f(zeros, key),
        "key": lambda f: f(zeros, key=key),
        r"args\[1\]\['k'\]": lambda f: f(zeros, {"k": key}),
    }.items():
        with pytest.raises(px.ShapeError, match=rf"{wrap.__name__}: {culprit} {one_for_all}.*batch_axis=\(0, None\)"):
            give(wrap(noisy, net))
    meant = np.asarray(wrap(noisy, net, batch_axis=(0, None))(zeros, key))
    assert_close(meant, np.full(8, jax.random.normal(key)))


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
def test_a_batch_of_keys_gives_each_row_its_own(wrap: Any) -> None:
    keys = jax.random.split(jax.random.key(5), 8)
    got = wrap(noisy, MLP(nnx.Rngs(0)))(jnp.zeros(8), keys)
    assert_close(np.asarray(got), np.asarray(jax.vmap(jax.random.normal)(keys)))


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
def test_a_key_of_the_old_kind_says_which_one_to_write(wrap: Any) -> None:
    store = nnx.Dict(key=nnx.RngKey(jax.random.PRNGKey(0)))
    with pytest.raises(px.StateError, match=r"key in a variable must be of the new kind.*jax\.random\.key\(0\)"):
        wrap(draw, store)(jnp.zeros(8))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
def test_a_misspelt_variable_in_sync_lists_those_that_there_are(wrap: Any) -> None:
    norm = nnx.BatchNorm(3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
    names = r"the variables are \(BatchNorm\)\.mean, \(BatchNorm\)\.var"
    with pytest.raises(px.StateError, match=rf"{wrap.__name__}: sync names '\(BatchNorm\)\.maen', but {names}"):
        wrap(norm, sync={"(BatchNorm).maen": "first"})
    with pytest.raises(px.StateError, match=rf"{wrap.__name__}: sync names 'mean', but the variables are none"):
        wrap(lambda x: x, sync={"mean": "first"})
    wrap(norm, sync={"(BatchNorm).mean": "first"})


def options(net: Any, x: jax.Array, kind: str = "a", *, train: bool = True) -> jax.Array:
    return net(x) if train and kind == "a" else x


@pytest.mark.parametrize("wrap", [px.Jit, px.Parallel], ids=["Jit", "Parallel"])
def test_a_misspelt_static_name_lists_those_that_the_function_takes(wrap: Any) -> None:
    net = MLP(nnx.Rngs(0))
    for names in ("trian", ("kind", "trian")):
        message = rf"{wrap.__name__}: static_argnames has 'trian', but the function takes .*kind, train"
        with pytest.raises(px.StateError, match=message):
            wrap(options, net, static_argnames=names)
    with pytest.raises(px.StateError, match=rf"{wrap.__name__}: static_argnames has 'y', but the function takes x"):
        wrap(net, static_argnames="y")
    fast = wrap(options, net, static_argnames=("kind", "train"))
    assert_close(np.asarray(fast(X, "a", train=False)), np.asarray(X))
    assert_close(np.asarray(fast(X)), np.asarray(net(X)))


@pytest.mark.parametrize("wrap", [px.Jit, px.Parallel], ids=["Jit", "Parallel"])
def test_a_function_of_any_keywords_may_have_any_of_them_static(wrap: Any) -> None:
    def body(net: MLP, x: jax.Array, **rest: Any) -> jax.Array:
        return x if rest["kind"] == "as is" else net(x)

    net = MLP(nnx.Rngs(0))
    fast = wrap(body, net, static_argnames="kind")
    assert_close(np.asarray(fast(X, kind="as is")), np.asarray(X))
    assert_close(np.asarray(fast(X, kind="net")), np.asarray(net(X)))


@pytest.mark.parametrize("reduce", [None, {"a": None, "b": "mean"}], ids=["alone", "in a tree"])
def test_no_reduction_is_not_one_of_the_kinds(reduce: Any) -> None:
    kinds = "'concat', 'stack', 'first', 'mean', 'sum', 'max', 'min', 'same', a function, or a tree of these"
    message = rf"Parallel: reduce must be one of {kinds}, got None; write reduce='mean'"
    with pytest.raises(px.StateError, match=message):
        px.Parallel(MLP(nnx.Rngs(0)), reduce=reduce)


@pytest.mark.parametrize("wrap", [px.Jit, px.Parallel])
def test_an_argument_that_is_no_array_is_named_with_the_line_to_write(wrap: Any) -> None:
    def power(x: jax.Array, how: str = "", *, options: Any = 0) -> jax.Array:
        return x**2 if how == "square" else x

    x = jnp.arange(8.0)
    with pytest.raises(px.StateError, match=r"args\[1\] is or holds a str, .*write static_argnums=\(1,\)"):
        wrap(power)(x, "square")
    with pytest.raises(px.StateError, match=r"options is or holds a str, .*write static_argnames='options'"):
        wrap(power)(x, options={"a": "b"})
    np.testing.assert_array_equal(wrap(power, static_argnums=1)(x, "square"), np.arange(8.0) ** 2)
    with pytest.raises(TypeError, match="in the body"):
        wrap(_fails)(x)


def _fails(x: jax.Array) -> jax.Array:
    raise TypeError("in the body")
