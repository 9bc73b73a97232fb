"""A wrapped function sees its modules as they are at each call, and leaves them as they were if it fails."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._modules import MLP, Counter, Noisy, arrays_in, assert_untouched
from tests._support import assert_close, values

MODES: dict[str, Callable[[], Any]] = {
    "as flax has it": contextlib.nullcontext,
    "graph": lambda: nnx.set_graph_mode(True),
    "no graph updates": lambda: nnx.set_graph_updates(False),
    "tree": lambda: nnx.set_graph_mode(False),
}


def counted(*modules: Any) -> tuple[Callable[..., Any], list[int]]:
    """``px.Jit`` of the first module's call, and a list with one entry per trace."""
    traces: list[int] = []

    def call(net: Any, *args: Any) -> Any:
        traces.append(len(traces))
        return net(*args)

    return px.Jit(call, *modules), traces


@pytest.mark.parametrize("mode", MODES)
def test_wrapped_modules_show_edits_made_outside_without_compiling(mode: str) -> None:
    net, x = MLP(nnx.Rngs(0)), values(2, 3)
    fast, traces = counted(net)
    other = nnx.state(MLP(nnx.Rngs(7)))

    def assign() -> None:
        net.first.bias[...] = net.first.bias[...] + 1.0

    edits: list[Callable[[], Any]] = [
        lambda: None,
        assign,
        lambda: net.last.kernel.set_value(values(8, 4)),
        lambda: nnx.update(net, other),
        lambda: px.Jit(lambda net: net.last.bias.set_value(values(4)), net)(),
    ]
    with MODES[mode]():
        for edit in edits:
            edit()
            assert_close(fast(x), net(x))
    assert len(traces) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_wrapped_modules_take_train_and_eval_and_are_traced_once_each(mode: str) -> None:
    here, there, x = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0)), values(4, 3)
    with MODES[mode]():
        fast, traces = counted(here)
        for change in ("train", "eval", "train", "eval", "eval", "train"):
            for net in (here, there):
                getattr(net, change)()
            assert_close(fast(x), there(x))
    assert len(traces) == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A pytree that NNX knows nothing of."""

    w: Any
    factor: Any = 1


class Holder(nnx.Module):
    """A bit of everything that can be replaced; calling it adds up all there is."""

    def __init__(self) -> None:
        self.w, self.layer = nnx.Param(jnp.ones(1)), Counter(nnx.Rngs(0))
        self.plain = nnx.data([nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))])
        self.record = nnx.data(Layer(nnx.Param(jnp.ones(1))))
        self.raw, self.power = nnx.data(jnp.ones(1)), 1

    def __call__(self, x: jax.Array) -> Any:
        found = (self.w, *self.plain, self.record.w)
        total = sum((n + 1) * v[...] for n, v in enumerate(found)) * self.record.factor + getattr(self, "extra", 0.0)
        return self.layer(x), total**self.power + self.raw.sum(), repr(self.power) == "True"


def _new(value: float = 3.0) -> nnx.Param:
    return nnx.Param(jnp.full(1, value))


REPLACED: dict[str, Callable[[Holder], Any]] = {
    "a variable": lambda net: setattr(net, "w", _new()),
    "a submodule": lambda net: setattr(net, "layer", Counter(nnx.Rngs(9))),
    "a variable in a list": lambda net: net.plain.__setitem__(0, _new()),
    "the order of a list": lambda net: (net.plain[0].set_value(jnp.full(1, 5.0)), net.plain.reverse()),
    "a variable in a dataclass": lambda net: setattr(net.record, "w", _new()),
    "1 by 3.0 in a dataclass": lambda net: setattr(net.record, "factor", 3.0),
    "1 by True": lambda net: setattr(net, "power", True),
    "an array": lambda net: setattr(net, "raw", nnx.data(jnp.ones((2, 3)))),
    "an attribute that was not there": lambda net: setattr(net, "extra", 7.0),
}


@pytest.mark.parametrize("what", REPLACED)
def test_wrapped_modules_show_what_is_replaced(what: str) -> None:
    net, there, x = Holder(), Holder(), values(2, 3)
    fast, traces = counted(net)
    fast(x)
    REPLACED[what](net)
    REPLACED[what](there)
    for _ in range(2):
        assert_close(jax.tree.map(np.asarray, fast(x)), jax.tree.map(np.asarray, there(x)))
        for v in (net, there):
            v.w.set_value(v.w[...] * 2)
    assert len(traces) <= 2


def _failing(net: Counter, x: jax.Array, fails: jax.Array, *, at: str = "") -> jax.Array:
    if at == "before any write":
        raise ValueError(at)
    y = net(x)
    net.layer.kernel[...] = net.layer.kernel[...] * 2
    if at == "after a write":
        raise ValueError(at)
    if at == "by a change of structure":
        setattr(net, "extra", nnx.Param(x))  # noqa: B010
    return y + jax.pure_callback(_on_host, jax.ShapeDtypeStruct((), "float32"), fails, vmap_method="sequential")


def _on_host(fails: Any) -> Any:
    if fails:
        raise ValueError("while running")
    return np.float32(0.0)


POINTS = ["before any write", "after a write", "by a change of structure", "while running"]


@pytest.mark.parametrize("at", POINTS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["at the first call", "at the second call"])
def test_wrapped_modules_are_as_they_were_after_an_exception(at: str, is_compiled: bool) -> None:
    net, there, x = Counter(nnx.Rngs(0)), Counter(nnx.Rngs(0)), values(2, 3)
    fast = px.Jit(_failing, net, static_argnames="at")
    for _ in range(is_compiled):
        assert_close(fast(x, False), _failing(there, x, jnp.asarray(False)))
    before = arrays_in(net)
    kwargs = {} if at == "while running" else {"at": at}
    with pytest.raises(Exception, match=at if "structure" not in at else "set attribute extra"):
        fast(x, at == "while running", **kwargs)
    assert_untouched(before, net)
    assert not hasattr(net, "extra")
    assert_close(fast(x, False), _failing(there, x, jnp.asarray(False)))
    assert_close(arrays_in(net), arrays_in(there))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a variable is added": (lambda net: setattr(net, "extra", nnx.Param(jnp.ones(2))), "extra"),
    "a variable is replaced": (lambda net: setattr(net.first, "bias", nnx.Param(jnp.ones(8))), "bias"),
    "a static attribute is set": (lambda net: setattr(net, "flag", True), "flag"),
    "a mode is set": (lambda net: net.train(mark=True) or setattr(net.last, "mark", True), "mark"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_wrapped_modules_cannot_change_inside_what_is_no_value_of_a_variable(what: str) -> None:
    change, culprit = CHANGES[what]
    net, x = MLP(nnx.Rngs(0)), values(2, 3)
    before, attributes = arrays_in(net), [dict(vars(n)) for n in (net, net.first, net.last)]

    def body(net: MLP, x: jax.Array) -> jax.Array:
        net.first.kernel[...] += 1.0
        change(net)
        return net(x)

    with pytest.raises(px.StateError, match=rf"Jit: .*set attribute {culprit}.*self\.count\[\.\.\.\] \+= 1"):
        px.Jit(body, net)(x)
    assert_untouched(before, net)
    assert [dict(vars(n)) for n in (net, net.first, net.last)] == attributes
