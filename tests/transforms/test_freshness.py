"""A wrapped function sees its modules as they are at each call, and leaves them as they were if it fails."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP, Counter, Noisy, arrays_in, assert_untouched

MODES: dict[str, Callable[[], Any]] = {
    "as flax has it": contextlib.nullcontext,
    "graph": lambda: nnx.set_graph_mode(True),
    "no graph updates": lambda: nnx.set_graph_updates(False),
    "tree": lambda: nnx.set_graph_mode(False),
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with MODES[request.param]():
        yield request.param


def counted(*modules: Any) -> tuple[Callable[..., Any], list[int]]:
    """``px.Jit`` of the first module's call, and a list with one entry per trace."""
    traces: list[int] = []

    def call(net: Any, *args: Any) -> Any:
        traces.append(len(traces))
        return net(*args)

    return px.Jit(call, *modules), traces


@pytest.mark.usefixtures("mode")
def test_edits_made_outside_are_seen_without_compiling() -> None:
    net, x = MLP(nnx.Rngs(0)), values(2, 3)
    fast, traces = counted(net)
    other = nnx.state(MLP(nnx.Rngs(7)))

    def assign() -> None:
        net.first.bias[...] = net.first.bias[...] + 1.0

    for edit in (
        lambda: None,
        assign,
        lambda: net.last.kernel.set_value(values(8, 4)),
        lambda: nnx.update(net, other),
        lambda: px.Jit(lambda net: net.last.bias.set_value(values(4)), net)(),
    ):
        edit()
        assert_close(fast(x), net(x))
    assert len(traces) == 1




@pytest.mark.usefixtures("mode")
def test_train_and_eval_take_effect_and_are_traced_once_each() -> None:
    here, there, x = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0)), values(4, 3)
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


@jax.tree_util.register_pytree_node_class
class Slotted:
    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Slotted":
        return cls(*children)


class Holder(nnx.Module):
    """A bit of everything that can be replaced; calling it counts and adds up all there is."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.ones(1))
        self.layer = nnx.Linear(1, 1, rngs=rngs)
        self.listed: Any = nnx.List([nnx.Param(jnp.ones(1)), nnx.Linear(1, 1, rngs=rngs)])
        self.plain = nnx.data([nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))])
        self.pair = nnx.data((nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))))
        self.named = nnx.data({"a": nnx.Param(jnp.ones(1))})
        self.record = nnx.data(Layer(nnx.Param(jnp.ones(1))))
        self.nested = nnx.data([Layer({"a": Slotted(nnx.Param(jnp.ones(1)))})])
        self.raw = nnx.data(jnp.ones(1))
        self.power = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        total = self.w[...] + self.listed[0][...] + 10 * self.plain[0][...] + self.plain[1][...] + self.pair[0][...]
        extra = getattr(self, "extra", 0.0) + self.record.w[...] * self.record.factor + self.nested[0].w["a"].w[...]
        return self.layer(x) + self.listed[1](x) * total**self.power + self.named["a"][...] + self.raw.sum() + extra


def _reverse(net: Holder) -> None:
    net.plain[0].set_value(jnp.full(1, 5.0))
    net.plain.reverse()


REPLACED: dict[str, Callable[[Holder], Any]] = {
    "a variable": lambda net: setattr(net, "w", nnx.Param(jnp.full(1, 2.0))),
    "a submodule": lambda net: setattr(net, "layer", nnx.Linear(1, 1, rngs=nnx.Rngs(9))),
    "a submodule by one of another kind": lambda net: setattr(net, "layer", nnx.RMSNorm(1, rngs=nnx.Rngs(9))),
    "a variable in an nnx.List": lambda net: net.listed.__setitem__(0, nnx.Param(jnp.full(1, 3.0))),
    "a submodule in an nnx.List": lambda net: net.listed.__setitem__(1, nnx.Linear(1, 1, rngs=nnx.Rngs(9))),
    "an nnx.List": lambda net: setattr(net, "listed", nnx.List([net.w, net.layer])),
    "a variable in a list": lambda net: net.plain.__setitem__(0, nnx.Param(jnp.full(1, 3.0))),
    "a list": lambda net: setattr(net, "plain", nnx.data([nnx.Param(jnp.full(1, 3.0)), net.w])),
    "the order of a list": _reverse,
    "a tuple": lambda net: setattr(net, "pair", nnx.data((net.w, net.w))),
    "a variable in a dict": lambda net: net.named.__setitem__("a", nnx.Param(jnp.full(1, 3.0))),
    "a variable in a dataclass": lambda net: setattr(net.record, "w", nnx.Param(jnp.full(1, 3.0))),
    "a number in a dataclass": lambda net: setattr(net.record, "factor", 3.0),
    "a variable in a class with slots": lambda net: setattr(net.nested[0].w["a"], "w", nnx.Param(jnp.full(1, 3.0))),
    "what a dataclass holds": lambda net: setattr(net.nested[0], "w", {"a": Slotted(nnx.Param(jnp.full(1, 3.0)))}),
    "an array": lambda net: setattr(net, "raw", nnx.data(jnp.full(1, 4.0))),
    "an array by one of another shape": lambda net: setattr(net, "raw", nnx.data(jnp.ones((2, 3)))),
    "a number": lambda net: setattr(net, "power", 2),
    "an attribute that was not there": lambda net: setattr(net, "extra", 7.0),
    "a variable that was shared now": lambda net: setattr(net, "w", net.plain[1]),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_is_seen(what: str) -> None:
    net, x = Holder(nnx.Rngs(0)), values(2, 1)
    fast, traces = counted(net)
    before = fast(x)
    REPLACED[what](net)
    assert_close(fast(x), net(x))
    assert_close(fast(x), net(x))
    assert len(traces) <= 2
    if not what.endswith(("shared now", "a tuple")):
        assert np.abs(np.asarray(before) - np.asarray(fast(x))).max() > 0.01


def test_an_attribute_that_is_deleted_is_missed() -> None:
    net, x = Holder(nnx.Rngs(0)), values(2, 1)
    setattr(net, "extra", nnx.Param(jnp.ones(1)))  # noqa: B010
    fast, _ = counted(net)
    fast(x)
    delattr(net, "extra")
    assert_close(fast(x), net(x))
    del net.w
    with pytest.raises(AttributeError, match="'w'"):
        fast(x)


@pytest.mark.parametrize(
    ("attribute", "old", "new"),
    [
        ("raw", jnp.asarray(1), jnp.asarray(1.0)),
        ("raw", jnp.asarray(0.0), jnp.asarray(-0.0)),
        ("factor", 2, 2.0),
        ("factor", 1, True),
        ("listed", [2], [2.0]),
    ],
    ids=str,
)
def test_what_is_equal_but_computes_otherwise_is_seen(attribute: str, old: Any, new: Any) -> None:
    class Plain(nnx.Module):
        def __init__(self) -> None:
            self.raw, self.factor, self.pair = nnx.data(jnp.asarray(3)), 1, (1,)
            self.listed = nnx.data([1])

        def __call__(self) -> Any:
            scaled = self.raw * self.factor * self.pair[0] * self.listed[0]
            return scaled, jnp.arctan2(scaled, -1.0), repr(self.factor) == "True"

    net = Plain()
    setattr(net, attribute, nnx.data(old) if attribute == "listed" else old)
    fast = px.Jit(net)
    assert_close(fast(), jax.tree.map(jnp.asarray, net()))
    setattr(net, attribute, nnx.data(new) if attribute == "listed" else new)
    assert_close(fast(), jax.tree.map(jnp.asarray, net()))


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
def test_after_an_exception_all_variables_are_as_they_were(at: str, is_compiled: bool) -> None:
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


@pytest.mark.parametrize("at", POINTS[:3])
@pytest.mark.parametrize("wrap", [px.GradValues, px.Vectorize, px.Parallel, "donate"], ids=str)
def test_the_other_transforms_leave_all_as_it_was_too(wrap: Any, at: str) -> None:
    net, x = Counter(nnx.Rngs(0)), values(8, 3)

    def loss(net: Counter, x: jax.Array) -> jax.Array:
        return _failing(net, x, jnp.asarray(False), at=at).sum()

    fn = px.Jit(loss, net, donate=True) if wrap == "donate" else wrap(loss, net)
    before = arrays_in(net)
    with pytest.raises((ValueError, px.StateError), match=at if "structure" not in at else "set attribute extra"):
        fn(x)
    assert_untouched(before, net)
    assert not hasattr(net, "extra")


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a variable is added": (lambda net: setattr(net, "extra", nnx.Param(jnp.ones(2))), "extra"),
    "a variable is replaced": (lambda net: setattr(net.first, "bias", nnx.Param(jnp.ones(8))), "bias"),
    "a submodule is replaced": (lambda net: setattr(net, "last", net.first), "last"),
    "a static attribute is set": (lambda net: setattr(net, "flag", True), "flag"),
    "a mode is set": (lambda net: net.train(mark=True) or setattr(net.last, "mark", True), "mark"),
    "a variable is deleted": (lambda net: delattr(net.last, "bias"), "bias"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_no_value_of_a_variable_cannot_be_changed_inside(what: str) -> None:
    change, culprit = CHANGES[what]
    net, x = MLP(nnx.Rngs(0)), values(2, 3)
    expected, before, attributes = net(x), arrays_in(net), [dict(vars(n)) for n in (net, net.first, net.last)]

    def body(net: MLP, x: jax.Array, *, change: Callable[[MLP], Any] | None) -> jax.Array:
        y = net(x)
        net.first.kernel[...] += 1.0
        if change is not None:
            change(net)
        return y

    fast = px.Jit(body, net, static_argnames="change")
    with pytest.raises(px.StateError, match=rf"Jit: .*set attribute {culprit}.*self\.count\[\.\.\.\] \+= 1"):
        fast(x, change=change)
    assert_untouched(before, net)
    assert [dict(vars(n)) for n in (net, net.first, net.last)] == attributes
    assert_close(fast(x, change=None), expected)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_writing_under_a_plain_transformation_is_refused_and_leaks_nothing(wrap: Any) -> None:
    net, x = Counter(nnx.Rngs(0)), values(3)
    fast, before = px.Jit(_writes, net), arrays_in(net)
    given = values(2, 3) if wrap is jax.vmap else x
    with pytest.raises(flax.errors.TraceContextError, match="from a different trace level"):
        wrap(lambda x: fast(x))(given)
    assert_untouched(before, net)
    assert_close(fast(x), (x @ net.layer.kernel[...]).sum() + x[0] * 4)


def _writes(net: Counter, x: jax.Array) -> jax.Array:
    net.layer.bias[...] = jnp.full(4, 1.0) * x[0]
    return net(x).sum()
