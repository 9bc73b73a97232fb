"""Copies of wrapped functions and frozen modules: shallow, deep, and through pickle."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import Counter


def loss(net: Any, x: jax.Array) -> jax.Array:
    return net(x).sum()


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("device",))


KINDS: dict[str, Callable[[Counter], Any]] = {
    "Jit": px.Jit,
    "Parallel": lambda net: px.Parallel(net, mesh=_mesh(), sync={nnx.BatchStat: "sum"}),
    "Vectorize": lambda net: px.Vectorize(net, batch_axis=0),
    "GradValues": lambda net: px.GradValues(loss, net, wrt=nnx.Param),
    "a method": lambda net: px.Jit(net.__call__),
    "a transform of a transform": lambda net: px.Jit(px.Jit(net)),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
}


def leaves(x: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(x)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_wrapped_function_is_one_of_copies_of_its_modules(kind: str) -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)
    fn = KINDS[kind](net)
    expected = leaves(fn(x))
    for way in WAYS.values() if kind != "Parallel" else [copy.deepcopy]:  # JAX has no pickles of meshes
        other, copied = way((net, fn))
        assert_close(leaves(copied(x)), expected)
        assert (int(net.calls[...]), int(other.calls[...])) == (1, 2)  # what is copied together stays together
        other.layer.bias[...] += 1.0
        assert_close(leaves(copied(x)), leaves(KINDS[kind](other)(x)))
    same = copy.copy(fn)
    same(x)
    assert int(net.calls[...]) == 2
    net.layer.bias[...] += 1.0
    assert_close(leaves(same(x)), leaves(fn(x)))


def test_a_copy_of_a_frozen_module_is_as_frozen() -> None:
    net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = values(8, 3)
    expected, frozen = net(x), px.freeze(net)
    net.bias[...] += 1.0
    for way in (copy.copy, *WAYS.values()):
        for copied in (way(frozen), way(px.Jit(frozen)), way({"net": frozen})["net"]):
            assert_close(copied(x), expected)
        assert repr(way(frozen)) == "Frozen(Linear)"
    given_away = px.Jit(lambda net, x: net(x), net, donate=True)
    net.bias[...] -= 1.0
    kept = copy.deepcopy(px.freeze(net))
    given_away(x)
    assert_close(kept(x), expected)


def test_an_optimiser_is_copied_with_its_state() -> None:
    net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    gradients = [jnp.ones(4), jnp.ones((3, 4))]
    opt(0.1, gradients)
    for way in WAYS.values():
        other, copied = way((net, opt))
        copied(0.1, gradients)
        assert_close(other.bias[...], net.bias[...] - 0.19)
        assert_close(way(opt).module.bias[...], net.bias[...])


def test_modules_that_belong_together_are_copied_together() -> None:
    net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    tied = nnx.Dict(layer=net, bias=net.bias)
    opt = px.Optimizer(net, optax.sgd)
    step = px.Jit(_step, opt, net, tied)
    step()
    copied = copy.deepcopy(step)
    copied()
    opt_copied, net_copied, tied_copied = copied.modules
    assert opt_copied.module is net_copied is tied_copied.layer
    assert tied_copied.bias is net_copied.bias
    assert_close(net_copied.bias[...], net.bias[...] - 0.1)
    assert nnx.Pytree.__deepcopy__ is not None


def _step(opt: px.Optimizer, net: Any, tied: Any) -> None:
    opt(0.1, [jnp.ones(4), jnp.ones((3, 4))])


def test_what_cannot_be_pickled_says_so_when_it_is_pickled() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(px.Jit(lambda x: x))
    assert copy.deepcopy(px.Jit(lambda x: x + 1))(1.0) == 2.0
