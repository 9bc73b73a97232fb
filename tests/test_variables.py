"""``px.variables`` lists what a module holds: in order, each once, by names that lead there."""

from typing import Any

import jax
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._modules import MLP, Counter, Normed, Tied
from tests._support import assert_close, values


def _net() -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), jax.nn.relu, nnx.Linear(3, 4, rngs=rngs))


TABLE = """\
(Sequential).layers[0](Linear).bias    3 (3,)
(Sequential).layers[0](Linear).kernel  6 (2, 3)
(Sequential).layers[2](Linear).bias    4 (4,)
(Sequential).layers[2](Linear).kernel 12 (3, 4)
+Total(4)                             25"""


def test_variables_prints_names_sizes_shapes_and_a_total() -> None:
    assert str(px.variables(_net())) == repr(px.variables(_net())) == TABLE


@pytest.mark.parametrize("wrap", [px.Jit, px.Parallel, px.Vectorize, px.GradValues])
def test_variables_of_a_wrapped_function_are_those_of_its_modules(wrap: Any) -> None:
    net, name = _net(), wrap.__name__
    lines = TABLE.splitlines()
    total = f"{lines[-1][:9]}{' ' * (len(name) + 2)}{lines[-1][9:]}"
    expected = "\n".join([*(f"({name}){line}" for line in lines[:-1]), total])
    for wrapped in (wrap(net), wrap(lambda net, x: net(x).sum(), net)):
        found = px.variables(wrapped)
        assert str(found) == expected
        assert all(ours is theirs for ours, theirs in zip(found, px.variables(net), strict=True))
    assert px.variables(px.Jit(wrap(net))).names() == [f"(Jit){line.split()[0]}" for line in lines[:-1]]
    px.variables(net)[0].set_value(values(3))
    assert_close(px.variables(wrap(net))[0].get_value(), values(3))


def test_variables_of_modules_side_by_side_never_clash_in_names() -> None:
    a, b = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    mixed = px.variables((a, MLP(nnx.Rngs(0))))
    assert mixed.names()[:3] == ["(Linear).bias", "(Linear).kernel", "(MLP).first(Linear).bias"]
    alike = px.variables((a, b))
    assert alike.names() == [f"[{n}](Linear).{leaf}" for n in (0, 1) for leaf in ("bias", "kernel")]
    for wrapped in (px.Jit(lambda a, b, x: b(a(x)), a, b), px.Jit(lambda nets, x: nets[0](nets[1](x)), (a, b))):
        found = px.variables(wrapped)
        assert len(found) == 4
        assert {id(v) for v in found} == {id(v) for v in (a.bias, a.kernel, b.bias, b.kernel)}


def test_variables_are_chosen_by_type_by_test_and_by_collection() -> None:
    net = Normed(nnx.Rngs(0))
    found = px.variables(net)
    statistics = {id(net.norm.mean), id(net.norm.var)}
    assert {id(v) for v in found.subset(nnx.BatchStat)} == statistics
    assert len(found.subset(nnx.Param)) == 6
    assert found.subset((nnx.Param, nnx.BatchStat)).names() == found.subset(nnx.Variable).names() == found.names()
    assert found.subset(lambda name, v: ".norm" in name and isinstance(v, nnx.Param)).names() == [
        "(Normed).norm(BatchNorm).bias",
        "(Normed).norm(BatchNorm).scale",
    ]
    assert {id(v) for v in found.subset(px.variables(net.last))} == {id(net.last.bias), id(net.last.kernel)}
    assert len(found.subset(nnx.RngKey)) == 0
    assert str(found.subset(nnx.RngKey)).split() == ["+Total(0)", "0"]


def test_variables_are_added_up_once_each() -> None:
    net, other = MLP(nnx.Rngs(0)), Counter(nnx.Rngs(1))
    both = px.variables(net) + px.variables(other)
    assert both.names() == px.variables(net).names() + px.variables(other).names()
    again = both + px.variables(other) + px.variables(px.Jit(net))
    assert again.names() == both.names()
    tied = Tied(nnx.Rngs(0))
    assert len(px.variables((tied, tied.encode))) == len(px.variables(tied) + px.variables(tied)) == 2
    optimizer = px.Optimizer(net, optax.sgd, momentum=0.9)
    assert len(px.variables(net) + px.variables(optimizer)) == len(px.variables(optimizer)) == 8
