"""Tables of models, by hand counts."""

from typing import Any
from xml.etree import ElementTree

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._explained import struct

pytestmark = pytest.mark.floor


def numbers(table: px.reports.ModuleTable) -> dict[str, tuple[int, int, int]]:
    rows = {".".join(row.path): row for row in table.rows}
    return {name: (row.parameters, row.flops, row.backward_flops) for name, row in rows.items()}


class Jitted(nn.Module):
    """Each library's model has a layer, one in a loop of five, and one in ``jit`` under ``remat``, for 4 rows."""

    @nn.compact
    def __call__(self, x, training=False):
        x = nn.Dropout(0.5, deterministic=not training)(nn.Dense(8, name="first")(x))
        x = nn.BatchNorm(use_running_average=not training, name="norm")(x)
        loop = nn.scan(lambda layer, x, _: (layer(x), None), variable_broadcast="params", split_rngs={"params": False})
        x, _ = loop(nn.Dense(8, name="loop"), x, jnp.zeros(5))
        return nn.jit(nn.remat(nn.Dense))(2, name="last")(x)


class OfNNX(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.loop = nnx.Linear(8, 8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.drop(self.first(x)))
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=5)(x, self.loop)
        return nnx.jit(nnx.remat(lambda last, x: last(x)))(self.last, x)


class OfEquinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    parts: dict[str, eqx.nn.Linear]
    act: Any

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.first = eqx.nn.Linear(3, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.parts = {"loop": eqx.nn.Linear(8, 8, key=keys[1]), "last": eqx.nn.Linear(8, 2, key=keys[2])}
        self.act = jax.nn.relu

    def __call__(self, x):
        x = jax.vmap(self.norm)(jax.vmap(self.first)(x))
        x = jax.lax.scan(lambda x, _: (self.act(jax.vmap(self.parts["loop"])(x)), None), x, length=5)[0]
        return eqx.filter_jit(lambda last, x: jax.vmap(last)(x))(self.parts["last"], x)


FIRST, LOOP, LAST = 2 * 4 * 3 * 8, 5 * 2 * 4 * 8 * 8, 2 * 4 * 8 * 2
MODELS = {
    "linen": (lambda: Jitted(), {"training": True}, "{}", True),
    "nnx": (OfNNX, {}, "{}", True),
    "nnx, of shapes": (lambda: nnx.eval_shape(OfNNX), {}, "{}", True),
    "equinox": (OfEquinox, {}, "parts.{}", False),
    "equinox, of shapes": (lambda: eqx.filter_eval_shape(OfEquinox), {}, "parts.{}", False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", MODELS)
def test_tabulate_counts_flops_and_parameters_as_by_hand(case: str) -> None:
    make, options, named, is_again = MODELS[case]
    table = px.tabulate(make(), struct(4, 3), **options)
    found = numbers(table)
    again = LAST if is_again else 0  # under remat, the forward pass is done once more, unless nothing needs it
    assert found["first"] == (3 * 8 + 8, FIRST, FIRST)  # its input has no derivative
    assert found[named.format("loop")] == (8 * 8 + 8, LOOP, 2 * LOOP)
    assert found[named.format("last")][:2] == (8 * 2 + 2, LAST)
    assert found[named.format("last")][2] in (2 * LAST, 2 * LAST + again)
    assert found["norm"] == (16, 0, 0)
    assert found[""][:2] == (32 + 16 + 72 + 18, FIRST + LOOP + LAST)
    assert found[""][2] == FIRST + 2 * LOOP + found[named.format("last")][2]
    assert (table.total.inputs[0], table.total.outputs) == ("float32[4,3]", ("float32[4,2]",))


def test_tabulate_computes_nothing_and_leaves_the_model_as_it_is() -> None:
    net, model = OfNNX(), OfEquinox()
    state = lambda: nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngKey)))  # noqa: E731
    before = jax.tree.map(np.asarray, state())
    assert px.tabulate(net, struct(2**40, 3)).total.flops == (FIRST + LOOP + LAST) // 4 * 2**40
    jax.tree.map(np.testing.assert_array_equal, state(), before)
    px.tabulate(model, struct(4, 3))
    assert (type(net), type(net.first)) == (OfNNX, nnx.Linear)
    assert (type(model), type(model.first)) == (OfEquinox, eqx.nn.Linear)


def test_tabulate_has_one_row_for_a_module_that_is_called_twice() -> None:
    class Twice(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.b = self.a
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)])

        def __call__(self, x):
            for layer in (self.a, self.b, *self.layers):
                x = layer(x)
            return {"x": x, "n": 3}

    table = px.tabulate(Twice(), struct(2, 4))
    assert numbers(table)["a"] == (20, 2 * 64, 3 * 64)
    assert table.total.parameters == 60
    assert [row.path for row in table.rows] == [(), ("a",), ("layers", "0"), ("layers", "1")]


def test_tabulate_has_one_row_for_other_callables() -> None:
    def product(w, x, times=1):
        return x @ w * times

    table = px.tabulate(jax.tree_util.Partial(product, np.ones((4, 8), np.float32)), struct(2, 4), times=3)
    assert numbers(table) == {"": (32, 2 * 2 * 4 * 8, 2 * 2 * 4 * 8)}
    assert (table.total.kind, table.total.inputs, table.total.bytes) == ("product", ("float32[2,4]", "3"), 128)
    assert numbers(px.tabulate(jnp.dot, struct(4, 4), jnp.ones(4))) == {"": (0, 32, 0)}
    assert px.tabulate(lambda n: n.sum(), struct(3, dtype=jnp.int32)).total.backward_flops == 0


def test_tabulate_of_a_method_has_the_modules_that_it_calls() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros(()))

        def encode(self, x):
            self.calls[...] += 1
            return self.layer(x)

    net = Net()
    table = px.tabulate(net.encode, struct(4, 4))
    assert numbers(table) == dict.fromkeys(["", "layer"], (20, 2 * 4**3, 2 * 4**3))
    assert px.explain(net.encode)(struct(4, 4)).work.flops == 2 * 4**3
    assert (table.total.kind, net.calls[...]) == ("encode", 0)


def test_tabulate_is_printed_and_shown() -> None:
    table = px.tabulate(OfNNX(), struct(4, 3))
    lines = str(table).splitlines()
    assert (lines[0], lines[-1].split()[:2]) == ("OfNNX: 138 parameters, 552 bytes", ["total", "OfNNX"])
    words = set(ElementTree.fromstring(table._repr_html_()).itertext())
    assert {"first", "Linear", "float32[4,8]", "192 FLOP", "total"} <= words


@pytest.mark.parametrize("wrap", [jax.vmap, lambda model: lambda x: model(x)], ids=["vmap", "a function"])
def test_tabulate_finds_the_parameters_that_a_function_closes_over(wrap) -> None:
    x = struct(3, 4)
    for model in (nnx.Linear(4, 8, rngs=nnx.Rngs(0)), eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))):
        mapped = wrap(model if isinstance(model, nnx.Module) or wrap is jax.vmap else jax.vmap(model))
        total, alone = px.tabulate(mapped, x).total, px.tabulate(jax.jit(jax.vmap(model)), x).total
        arrays = nnx.state(model) if isinstance(model, nnx.Module) else eqx.filter(model, eqx.is_array)
        count = sum(leaf.size for leaf in jax.tree.leaves(arrays))
        assert (total.parameters, total.bytes) == (count, 4 * count)
        assert total.flops == alone.flops > 0
        assert total.backward_flops >= total.flops
