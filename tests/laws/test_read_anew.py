"""What a function reads besides its arguments is read again when it has changed, whoever calls the function."""

import argparse
import collections
import contextvars
import dataclasses
import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import compilations

Fn = Callable[[Any], Any]
Way = Callable[[], tuple[Fn, Callable[[float], None]]]

FACTOR = 2.0
X = np.arange(1.0, 5.0, dtype=np.float32)

# --- ways to read a factor: a function that multiplies by it, and one that changes it --------------------------------


def a_global() -> Any:
    return lambda x: x * FACTOR, lambda k: globals().update(FACTOR=k)


def a_function_that_is_called() -> Any:
    def inner(x: Any) -> Any:
        return x * FACTOR

    return lambda x: inner(x), lambda k: globals().update(FACTOR=k)


def a_closure() -> Any:
    factor = 2.0

    def change(k: float) -> None:
        nonlocal factor
        factor = k

    return lambda x: x * factor, change


def an_item() -> Any:
    config = {"model": {"factor": 2.0}}
    return lambda x: x * config["model"]["factor"], lambda k: config["model"].update(factor=k)


def an_item_of_a_list() -> Any:
    factors = [2.0]
    return lambda x: x * factors[0], lambda k: factors.__setitem__(0, k)


def the_length_of_a_list() -> Any:
    factors: list[float] = [1.0, 1.0]
    return lambda x: x * sum(factors), lambda k: factors.__setitem__(slice(None), [1.0] * int(k))


def an_array_of_numpy() -> Any:
    factors = np.full(3, 2.0, np.float32)
    return lambda x: x * factors[1], lambda k: factors.fill(k)


def an_array_that_the_program_holds() -> Any:
    factors = np.full(3, 2.0, np.float32)
    return lambda x: x * jnp.max(factors), lambda k: factors.fill(k)


def a_number_that_the_program_holds() -> Any:
    factor = np.full((), 2.0, np.float32)
    return lambda x: x * factor, lambda k: factor.fill(k)


def an_array_of_jax() -> Any:
    held = types.SimpleNamespace(factor=jnp.float32(2))
    return lambda x: x * held.factor, lambda k: setattr(held, "factor", jnp.float32(k))


@dataclasses.dataclass
class Scale:
    factor: float = 2.0

    def times(self, x: Any) -> Any:
        return x * self.inner()

    def inner(self) -> float:
        return self.factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


def an_attribute_of_a_method() -> Any:
    scale = Scale()
    return scale.times, lambda k: setattr(scale, "factor", k)


def an_attribute_of_a_callable() -> Any:
    scale = Scale()
    return scale, lambda k: setattr(scale, "factor", k)


class Guarded:
    """An object that refuses to be looked at, but for its attributes as they lie."""

    __slots__ = ("factor",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")


def an_object_that_refuses_to_be_looked_at() -> Any:
    held = Guarded()
    held.factor = 2.0
    return lambda x: x * held.factor, lambda k: setattr(held, "factor", k)


def a_property() -> Any:
    class Computed:
        def __init__(self) -> None:
            self.half = 1.0

        @property
        def factor(self) -> float:
            return 2 * self.half

    held = Computed()
    return lambda x: x * held.factor, lambda k: setattr(held, "half", k / 2)


def an_attribute_of_a_partial() -> Any:
    return functools.partial(lambda scale, x: x * scale.factor, scale := Scale()), lambda k: setattr(scale, "factor", k)


def an_attribute_of_a_class() -> Any:
    kind = type("Kind", (), {"factor": 2.0, "__module__": __name__})
    held: Any = kind()
    return lambda x: x * held.factor, lambda k: setattr(kind, "factor", k)


def a_slot() -> Any:
    held = Slotted()
    return lambda x: x * held.factor, lambda k: setattr(held, "factor", k)


def an_option_of_a_command() -> Any:
    options = argparse.Namespace(factor=2.0)
    return lambda x: x * options.factor, lambda k: setattr(options, "factor", k)


def a_function_in_its_place() -> Any:
    held = {"times": lambda x: x * 2.0}
    return lambda x: held["times"](x), lambda k: held.update(times=lambda x: x * k)


def factor_of(config: Any) -> Any:
    return config.factor


def an_attribute_that_a_helper_names() -> Any:
    config = types.SimpleNamespace(factor=2.0)
    return lambda x: x * factor_of(config), lambda k: setattr(config, "factor", k)


def what_a_decorated_function_reads() -> Any:
    config = types.SimpleNamespace(factor=2.0)

    def decorated(f: Fn) -> Fn:
        @functools.wraps(f)
        def call(*args: Any) -> Any:
            return f(*args)

        return call

    return decorated(lambda x: x * config.factor), lambda k: setattr(config, "factor", k)


def what_a_base_class_reads() -> Any:
    class Base:
        def __init__(self) -> None:
            self.factor = 2.0

        def times(self, x: Any) -> Any:
            return x * self.factor

    class Derived(Base):
        def times(self, x: Any) -> Any:
            return super().times(x)

    held = Derived()
    return lambda x: held.times(x), lambda k: setattr(held, "factor", k)


def an_item_that_was_not_there() -> Any:
    config: dict[str, float] = {}
    return lambda x: x * config.get("factor", 2.0), lambda k: config.update(factor=k) if k != 2.0 else None


def an_attribute_that_was_not_there() -> Any:
    config = types.SimpleNamespace()
    change = lambda k: setattr(config, "factor", k) if k != 2.0 else None  # noqa: E731
    return lambda x: x * getattr(config, "factor", 2.0), change


def a_special_method() -> Any:
    class Settings:
        def __init__(self) -> None:
            self.values = {"factor": 2.0}

        def __getitem__(self, key: str) -> float:
            return self.values[key]

    settings = Settings()
    return lambda x: x * settings["factor"], lambda k: settings.values.update(factor=k)


def another_class_in_its_place() -> Any:
    held = types.SimpleNamespace(config=type("Small", (), {"factor": 2.0, "__module__": __name__}))
    change = lambda k: setattr(held, "config", type("Big", (), {"factor": k, "__module__": __name__}))  # noqa: E731
    return lambda x: x * held.config.factor, change


def what_a_function_with_a_rule_reads() -> Any:
    config = {"factor": 2.0}
    times = jax.custom_jvp(lambda x: x * config["factor"])
    times.defjvp(lambda primals, tangents: (times(*primals), tangents[0] * config["factor"]))
    return lambda x: times(x), lambda k: config.update(factor=k)


def what_the_rule_of_a_derivative_reads() -> Any:
    config = {"factor": 2.0}
    times = jax.custom_jvp(lambda x: x)
    times.defjvp(lambda primals, tangents: (primals[0], tangents[0] * config["factor"]))
    return lambda x: x * jax.grad(times)(1.0), lambda k: config.update(factor=k)


def what_the_rules_of_a_backward_pass_read() -> Any:
    config = {"factor": 2.0, "one": 1.0}
    times = jax.custom_vjp(lambda x: x)
    times.defvjp(lambda x: (x, config["one"]), lambda one, ct: (ct * one * config["factor"],))
    return lambda x: x * jax.grad(times)(1.0), lambda k: config.update(factor=k)


def an_attribute_of_a_function() -> Any:
    def inner() -> Any:
        return inner.factor  # pyright: ignore[reportFunctionMemberAccess]

    vars(inner)["factor"] = 2.0
    return lambda x: x * inner(), lambda k: setattr(inner, "factor", k)


def a_default() -> Any:
    def f(x: Any, factor: float = 2.0) -> Any:
        return x * factor

    return f, lambda k: setattr(f, "__defaults__", (k,))


def a_default_by_name() -> Any:
    def inner(*, factor: float = 2.0) -> float:
        return factor

    return lambda x: x * inner(), lambda k: (inner.__kwdefaults__ or {}).update(factor=k)


def a_set() -> Any:
    held = {2.0}

    def change(k: float) -> None:
        held.clear()
        held.add(k)

    return lambda x: x * max(held), change


def bytes_that_change() -> Any:
    held = bytearray([2])
    return lambda x: x * held[0], lambda k: held.__setitem__(0, int(k))


def a_mapping_that_others_change() -> Any:
    config = {"factor": 2.0}
    seen = types.MappingProxyType(config)
    return lambda x: x * seen["factor"], lambda k: config.update(factor=k)


def a_dict_of_a_class_of_pythons() -> Any:
    config = collections.ChainMap({}, collections.UserDict(factor=2.0))
    return lambda x: x * config["factor"], lambda k: config.maps[1].update(factor=k)


def a_context_variable() -> Any:
    factor = contextvars.ContextVar("factor", default=2.0)
    return lambda x: x * factor.get(), factor.set


def an_attribute_by_a_computed_name() -> Any:
    scale, name = Scale(), "fac"
    return lambda x: x * getattr(scale, name + "tor"), lambda k: setattr(scale, "factor", k)


def all_attributes() -> Any:
    scale = types.SimpleNamespace(factor=2.0)
    return lambda x: x * sum(vars(scale).values()), lambda k: setattr(scale, "factor", k)


def a_module_that_is_imported_within() -> Any:
    module = types.ModuleType("factors_of_a_test")
    vars(module)["factor"] = 2.0
    sys.modules[module.__name__] = module

    def f(x: Any) -> Any:
        from factors_of_a_test import factor  # pyright: ignore[reportMissingImports]

        return x * factor

    return f, lambda k: setattr(module, "factor", k)


def what_a_program_reads() -> Any:
    config = {"factor": 2.0}
    of_one = px.program(one=1)(lambda x: px.reduce_sum(px.map_fn(lambda one: one * config["factor"] * x, jnp.ones(1))))
    return lambda x: of_one(x), lambda k: config.update(factor=k)


WAYS = [
    *(a_global, a_function_that_is_called, a_closure, an_item, an_item_of_a_list, the_length_of_a_list),
    *(an_array_of_numpy, an_array_that_the_program_holds, a_number_that_the_program_holds, an_array_of_jax),
    *(an_attribute_of_a_method, an_attribute_of_a_callable),
    *(an_attribute_that_a_helper_names, what_a_decorated_function_reads, what_a_base_class_reads),
    *(an_item_that_was_not_there, an_attribute_that_was_not_there, a_special_method, another_class_in_its_place),
    *(what_a_function_with_a_rule_reads, what_the_rule_of_a_derivative_reads, what_the_rules_of_a_backward_pass_read),
    *(
        an_object_that_refuses_to_be_looked_at,
        a_property,
        what_a_program_reads,
        an_attribute_of_a_function,
        a_default,
        a_default_by_name,
        a_set,
        bytes_that_change,
        a_mapping_that_others_change,
        a_dict_of_a_class_of_pythons,
        a_context_variable,
        an_attribute_by_a_computed_name,
        all_attributes,
        a_module_that_is_imported_within,
        an_attribute_of_a_partial,
        an_attribute_of_a_class,
        a_slot,
        an_option_of_a_command,
        a_function_in_its_place,
    ),
]


# --- front ends: what calls the function, and gives the sum of its results over X ------------------------------------


def of_map(f: Fn) -> Callable[[], Any]:
    return lambda: px.map_fn(f, X, px.Axis("rows", 4)).sum()


def of_program(f: Fn) -> Callable[[], Any]:
    program = px.program(rows=4)(lambda x: px.reduce_sum(px.map_fn(f, x)))
    return lambda: program(X)


def of_pmap(f: Fn) -> Callable[[], Any]:
    mapped = px.pmap(f)
    return lambda: mapped(X).sum()


def of_stream(f: Fn) -> Callable[[], Any]:
    program = px.program(rows=4)(lambda x: px.reduce_sum(px.map_fn(f, x)))
    return lambda: px.Stream(at_once=1).run(program, X)


def of_streaming_again(f: Fn) -> Callable[[], Any]:
    program = px.program(rows=4)(lambda x: px.reduce_sum(px.map_fn(f, x)))
    streamed = px.Stream(at_once=1).jit(program)
    return lambda: streamed(X)


class One(nnx.Module):
    """A module of which nothing is wanted but that it is one."""

    def __init__(self) -> None:
        self.one = nnx.Param(jnp.ones(()))


def of_jit(f: Fn) -> Callable[[], Any]:
    jitted = px.Jit(lambda net, x: net.one * f(x), One())
    return lambda: jitted(X).sum()


def of_parallel(f: Fn) -> Callable[[], Any]:
    parallel = px.Parallel(lambda net, x: net.one * f(x), One(), mesh=jax.sharding.Mesh(jax.devices()[:2], ("device",)))
    return lambda: parallel(X).sum()


def of_vectorize(f: Fn) -> Callable[[], Any]:
    each = px.Vectorize(lambda net, x: net.one * f(x), One())
    return lambda: each(X).sum()


class Model(nnx.Module):
    """A module that calls what it does not hold."""

    def __init__(self) -> None:
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return self.one * CALLED(x)


CALLED: Any = None


def of_a_class(f: Fn) -> Callable[[], Any]:
    jitted = px.Jit(Model())

    def run() -> Any:
        globals()["CALLED"] = f
        return jitted(X).sum()

    return run


def of_training_members(f: Fn) -> Callable[[], Any]:
    ens = px.ensemble(lambda key: jnp.zeros(()), 4, 0)
    step = lambda w, x: (w, f(x))  # noqa: E731
    return lambda: ens.train(step, X, in_axes=0).sum()


def of_an_epoch(f: Fn) -> Callable[[], Any]:
    ens = px.ensemble(lambda key: jnp.zeros(()), 2, 0)
    step = lambda w, x: (w, jnp.sum(f(x)))  # noqa: E731
    return lambda: ens.fit(step, (X,), batch_size=4, key=0).outputs[0, 0]


def of_predicting(f: Fn) -> Callable[[], Any]:
    ens = px.ensemble(lambda key: jnp.ones(()), 2, 0, apply=lambda w, x: w * f(x))
    return lambda: ens.predict(X, average="mean").sum()


def _loss(f: Fn) -> Any:
    return lambda params, batch: f(batch) * params


def of_a_step(f: Fn) -> Callable[[], Any]:
    step = px.train_step(_loss(f), donate=False)
    state = px.TrainState.create(jnp.ones(()), optax.sgd(0.0))
    return lambda: 4 * float(step(state, X)[1]["loss"])


def of_evaluating(f: Fn) -> Callable[[], Any]:
    evaluate = px.eval_step(lambda params, batch: {"f": f(batch)})
    state = px.TrainState.create(jnp.ones(()), optax.sgd(0.0))
    return lambda: 4 * float(evaluate(state, X)["f"])


def of_a_solver(kind: str) -> Callable[[Fn], Callable[[], Any]]:
    def made(f: Fn) -> Callable[[], Any]:
        solver = getattr(px.solve, kind)(lambda w: (w - jnp.sum(f(X))) ** 2)
        return lambda: solver.run(jnp.zeros(())).params

    made.__name__ = f"of_{kind}"
    return made


COMPILED = [
    *(of_pmap, of_streaming_again, of_jit, of_parallel, of_a_class, of_training_members, of_an_epoch, of_predicting),
    *(of_a_step, of_evaluating, *map(of_a_solver, ("LBFGS", "NewtonCG", "GradientDescent"))),
]
TRACED = [of_map, of_program, of_stream, of_vectorize]


def named(x: Any) -> str:
    return x.__name__.removeprefix("of_").replace("_", " ")


def require_read_anew(call: Callable[[Fn], Callable[[], Any]], way: Way) -> None:
    f, change = way()
    run = call(f)
    change(2.0)
    for factor in (2.0, 3.0, 3.0, 5.0):
        change(factor)
        np.testing.assert_allclose(float(run()), factor * X.sum(), rtol=1e-5)


@pytest.fixture(autouse=True)
def same_global() -> Any:
    yield
    globals().update(FACTOR=2.0)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_change_is_noticed_wherever_it_was(way: Way) -> None:
    require_read_anew(of_jit, way)


@pytest.mark.parametrize("call", [*COMPILED, *TRACED], ids=named)
def test_a_change_is_noticed_by_whatever_calls_the_function(call: Any) -> None:
    require_read_anew(call, an_item)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("call", [*COMPILED, *TRACED], ids=named)
def test_all_changes_are_noticed_by_all(call: Any, way: Way) -> None:
    require_read_anew(call, way)


# --- modules of NNX from outside: frozen by transforms unless they are given, which is an error; read anew elsewhere --


class Scaling(nnx.Module):
    """A layer of a user's, around one of NNX's."""

    def __init__(self) -> None:
        self.inner = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.inner(x[..., None])[..., 0]


def a_bare_variable() -> Any:
    factor = nnx.Variable(jnp.float32(2))
    return lambda x: x * factor, lambda k: factor.set_value(jnp.float32(k))


def a_layer_of_nnx() -> Any:
    layer = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    return lambda x: layer(x[..., None])[..., 0], lambda k: layer.kernel.set_value(jnp.full((1, 1), k))


def a_layer_of_nnx_in_one_of_a_user() -> Any:
    layer = Scaling()
    return layer, lambda k: nnx.update(layer, {"inner": {"kernel": jnp.full((1, 1), k)}})


def a_layer_in_a_sequence() -> Any:
    layers: Any = nnx.Sequential(Scaling(), lambda x: x)
    return lambda x: layers(x), lambda k: layers.layers[0].inner.kernel.set_value(jnp.full((1, 1), k))


def what_a_function_in_a_sequence_reads() -> Any:
    layers = nnx.Sequential(lambda x: x * FACTOR)
    return lambda x: layers(x), lambda k: globals().update(FACTOR=k)


def an_attribute_of_a_layer_of_nnx() -> Any:
    layer = nnx.Dropout(2.0, deterministic=True)
    return lambda x: layer(x) * layer.rate, lambda k: setattr(layer, "rate", k)


def the_mode_of_a_layer() -> Any:
    layer = nnx.BatchNorm(1, use_running_average=True, use_bias=False, epsilon=0.0, rngs=nnx.Rngs(0))

    def f(x: Any) -> Any:
        return x * (2.0 if layer.use_running_average else layer.momentum)

    def change(k: float) -> None:
        layer.momentum = k
        layer.set_attributes(use_running_average=k == 2.0)

    return f, change


def a_setting_beside_a_large_net() -> Any:
    net, held = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(300)]), {"step": 2.0}
    config: Any = [[[[[[held]]]]]]  # farther than the net's variables
    return lambda x: x * config[0][0][0][0][0][0]["step"] + 0 * len(net), lambda k: held.update(step=k)


class Factor(nnx.Variable[Any]):
    """A variable of a user's, with an attribute of its class."""

    by = 2.0


def what_the_class_of_a_variable_holds() -> Any:
    factor = Factor(jnp.ones(()))
    Factor.by = 2.0
    return lambda x: x * factor * factor.by, lambda k: setattr(Factor, "by", k)


MODULES = [
    *(a_setting_beside_a_large_net, what_the_class_of_a_variable_holds),
    *(a_bare_variable, a_layer_of_nnx, a_layer_of_nnx_in_one_of_a_user, a_layer_in_a_sequence),
    *(what_a_function_in_a_sequence_reads, an_attribute_of_a_layer_of_nnx, the_mode_of_a_layer),
]
WITHOUT_MODULES = [
    *(of_pmap, of_streaming_again, *map(of_a_solver, ("LBFGS", "NewtonCG", "GradientDescent"))),
    *(of_map, of_program, of_stream),
]


@pytest.mark.parametrize("way", MODULES, ids=named)
def test_a_change_of_a_module_is_noticed_wherever_it_was(way: Way) -> None:
    require_read_anew(of_pmap, way)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", WITHOUT_MODULES, ids=named)
def test_a_change_of_a_module_is_noticed_by_what_is_given_none(call: Any) -> None:
    require_read_anew(call, a_layer_of_nnx_in_one_of_a_user)


def test_a_module_that_is_only_looked_at_is_no_error() -> None:
    unused = Scaling()
    mapped = px.pmap(lambda x: (x * 2, unused)[0])
    np.testing.assert_array_equal(px.Jit(lambda net, x: net.one * mapped(x), One())(X), X * 2)


def test_what_a_function_in_a_module_that_is_bound_reads_is_read_anew() -> None:
    jitted = px.Jit(nnx.Sequential(lambda x: x * FACTOR))
    assert jitted(X).sum() == 2 * X.sum()
    globals().update(FACTOR=3.0)
    assert jitted(X).sum() == 3 * X.sum()


def test_an_object_that_a_module_holds_is_looked_into() -> None:
    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.one, self.scale = nnx.Param(jnp.ones(())), Scale()

        def __call__(self, x: Any) -> Any:
            return self.one * x * self.scale.factor

    net = Scaled()
    jitted = px.Jit(net)
    assert jitted(X).sum() == 2 * X.sum()
    net.scale.factor = 3.0
    assert jitted(X).sum() == 3 * X.sum()


@pytest.mark.parametrize("call", COMPILED, ids=named)
def test_where_nothing_changed_nothing_is_traced(call: Any) -> None:
    traces = []

    def f(x: Any) -> Any:
        traces.append(1)
        return x * FACTOR

    run = call(f)
    for _ in range(2):  # the first trace changed the list, too
        run()
    count = len(traces)
    for _ in range(2):
        run()
    assert len(traces) == count


@pytest.mark.parametrize("call", [of_jit, of_training_members, of_a_step], ids=named)
def test_what_callbacks_write_is_not_compiled_for_ever(call: Any) -> None:
    told: list[float] = []
    traces: list[int] = []

    def f(x: Any) -> Any:
        traces.append(1)
        jax.debug.callback(lambda: told.append(1.0))
        return x * FACTOR

    run = call(f)
    for _ in range(6):  # a change without a difference, three times
        run()
        jax.effects_barrier()
    count = len(traces)
    with compilations() as compiled:
        run()
    jax.effects_barrier()
    assert len(told) in (7, 28)
    assert not compiled
    assert len(traces) == count


def test_a_change_without_a_difference_compiles_nothing_and_is_not_forgotten() -> None:
    config = {"epoch": 0}
    run = of_training_members(lambda x: x * (2.0**-9 if config["epoch"] < 6 else 2.0**9))  # in no other test's program
    for epoch in range(9):
        config["epoch"] = epoch
        for step in range(2):  # nobody is told: a change in every other call costs little
            with compilations() as compiled:
                assert run() == 2.0 ** (-9 if epoch < 6 else 9) * X.sum()
            assert bool(compiled) == (step == 0 and epoch in (0, 6))


@pytest.mark.parametrize("of", [of_pmap, of_jit, of_parallel, of_training_members])
@pytest.mark.parametrize("kind", ["a list", "an array", "a dict", "a list that grows"])
def test_what_changed_often_without_a_difference_is_looked_at_still(of: Any, kind: str) -> None:
    held: Any = {"an array": np.zeros(1), "a dict": {0: 0}}.get(kind, [0])

    def epoch() -> Any:
        return len(held) if kind == "a list that grows" else held[0]

    def f(x: Any) -> Any:
        return x * (1.0 if epoch() < 6 else 10.0)

    run = of(f)
    for number in range(9):
        if kind == "a list that grows":
            held[:] = [0] * number
        else:
            held[0] = number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert run() == (X.sum() if number < 6 else 10 * X.sum())


def test_other_shapes_are_those_of_the_last_change() -> None:
    weight = np.ones(1)
    run = px.Jit(lambda x: x * weight[0] if x.shape[-1] > 4 else x)
    for number in range(8):
        weight[0] = number
        run(np.ones(3))
        run(np.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert float(run(np.ones(8))[0]) == number


def test_a_place_that_changes_again_and_again_is_told_of() -> None:
    f, change = an_item()
    run = of_training_members(f)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for factor in range(8):
            change(float(factor))
            run()
    (text,) = [str(w.message) for w in found if issubclass(w.category, RuntimeWarning)]
    assert "config['model']['factor'], which has changed 5 times; each time it is traced and compiled anew" in text
    assert "Give it as an argument" in text


def test_a_list_that_grows_without_a_difference_is_told_of() -> None:
    history = [0.0]
    run = of_training_members(lambda x: x * FACTOR + 0 * history[0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for k in range(8):
            run()
            history.append(float(k))
    (text,) = [str(w.message) for w in found if issubclass(w.category, RuntimeWarning)]
    assert "history" in text
    assert "traced anew, without a difference" in text


def test_counters_of_the_same_name_are_told_apart() -> None:
    def counted() -> Callable[[], None]:
        state = [0]  # written by each trace
        return lambda: state.append(1)

    state, count = [2.0], counted()

    def f(x: Any) -> Any:
        count()
        return x * state[0]

    run = of_jit(f)
    assert run() == 2 * X.sum()
    state[0] = 3.0
    assert run() == 3 * X.sum()


MANY = np.arange(32, dtype=np.float32)


def doubled(f: Fn) -> Fn:
    made = jax.custom_batching.custom_vmap(f)
    made.def_vmap(lambda size, batched, x: (2 * x, batched[0]))
    return made


def test_callbacks_that_are_made_anew_compile_nothing_if_they_do_the_same() -> None:
    told: list[float] = []
    offset = 0.0

    def run() -> list[float]:
        told.clear()
        px.map_fn(lambda x: jax.debug.callback(lambda y: told.append(float(y) + offset), x), X, px.Axis("rows", 4))
        jax.effects_barrier()
        return sorted(told)

    assert run() == [1, 2, 3, 4]
    with compilations() as compiled:
        assert run() == [1, 2, 3, 4]
    assert not compiled
    offset = 1.0
    assert run() == [2, 3, 4, 5]  # the same variable, and another value in it


@pytest.mark.parametrize(
    "made",
    [
        jax.custom_batching.sequential_vmap,
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("y")),
        lambda f: lambda x: jax.lax.custom_root(lambda y: y - f(x), x, lambda _, y: f(x), lambda g, y: y / g(1.0)),
        doubled,
    ],
    ids=["sequential_vmap", "a policy", "custom_root", "custom_vmap"],
)
def test_functions_with_rules_that_are_made_anew_compile_nothing(made: Callable[[Fn], Fn]) -> None:
    def run() -> np.ndarray:
        return np.asarray(px.map_fn(lambda x: made(lambda y: 2 * y)(x), MANY, px.Axis("rows", len(MANY))))

    np.testing.assert_allclose(run(), 2 * MANY)
    with compilations() as compiled:
        np.testing.assert_allclose(run(), 2 * MANY)
    assert not compiled


def test_rules_that_do_other_things_are_told_apart() -> None:
    def run(by: float) -> np.ndarray:
        twice = jax.custom_batching.custom_vmap(lambda x: 2 * x)
        twice.def_vmap(lambda size, batched, x: (by * x, batched[0]))
        return np.asarray(px.map_fn(lambda x: twice(x), MANY, px.Axis("rows", len(MANY))))

    for by in (2.0, 5.0):  # a rule that is not the function shows that it is the one
        np.testing.assert_allclose(run(by), by * MANY)


def test_callbacks_that_count_for_themselves_are_told_apart() -> None:
    def counted() -> int:
        n = 0

        def count(_: Any) -> None:
            nonlocal n
            n += 1

        px.map_fn(lambda x: jax.debug.callback(count, x), X, px.Axis("rows", 4))
        jax.effects_barrier()
        return n

    assert [counted() for _ in range(3)] == [4, 4, 4]


def test_callbacks_into_lists_of_their_own_are_told_apart() -> None:
    def run() -> list[float]:
        told: list[float] = []
        px.map_fn(lambda x: jax.debug.callback(told.append, x), X, px.Axis("rows", 4))
        jax.effects_barrier()
        return sorted(map(float, told))

    assert run() == run() == [1, 2, 3, 4]


def test_a_slot_whose_class_changes_is_noticed() -> None:
    """A class may get a property, a subclass an attribute, in its place."""

    class Config:
        __slots__ = ("rate",)

        def __init__(self) -> None:
            self.rate = 2.0

    class Own(Config):
        __slots__ = ()

    class Shadowed(Config):
        rate = 5.0

        def __init__(self) -> None:
            self.other = 3.0

    first, second, third = Config(), Own(), Shadowed()
    scale = px.pmap(lambda x: x * first.rate * second.rate * third.rate * third.other)
    x = jnp.ones((1, 2))
    for _ in range(3):
        assert float(scale(x)[0, 0]) == 2 * 2 * 5 * 3
    third.other = 7.0
    assert float(scale(x)[0, 0]) == 2 * 2 * 5 * 7
    Own.rate = 9.0  # pyright: ignore[reportAttributeAccessIssue]
    assert float(scale(x)[0, 0]) == 2 * 9 * 5 * 7
    Config.rate = property(lambda self: 10.0)  # pyright: ignore[reportAttributeAccessIssue]
    assert float(scale(x)[0, 0]) == 10 * 9 * 5 * 7
