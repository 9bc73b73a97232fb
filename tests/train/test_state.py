"""What a state is made from, and what is refused."""

import copy
import functools
import gc
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import paraxis as px
from tests.train._models import FEATURES, LinenNet, Net, assert_same_bits, loss, plain_loss, plain_params, rows

SGD = optax.sgd(0.1)


def test_a_module_comes_back_as_it_was() -> None:
    net = Net()
    state = px.TrainState.create(net, SGD)
    back = state.model()
    assert_same_bits(nnx.to_pure_dict(nnx.state(back)), nnx.to_pure_dict(nnx.state(net)))
    back.first.kernel[...] += 1
    assert_same_bits(state.params["first"]["kernel"], net.first.kernel[...])


def test_a_linen_module_comes_back_with_its_variables() -> None:
    net, x = LinenNet(), rows(3)["x"]
    state = px.TrainState.create(net, SGD, key=jax.random.key(1), sample={"x": x, "train": False})
    variables = net.init(jax.random.key(1), x)
    assert_same_bits(state.model()(x), net.apply(variables, x))


class Coder(linen.Module):
    features: int = 3
    activation: Any = jax.nn.relu

    def setup(self) -> None:
        self.inner = linen.Dense(self.features)

    def encode(self, x: Any) -> Any:
        return self.activation(self.inner(x))

    def __call__(self, x: Any) -> Any:
        return self.encode(x).sum(-1)


def coder_state() -> px.TrainState:
    return px.TrainState.create(Coder(), SGD, key=jax.random.key(1), sample=rows(3)["x"])


def test_a_bound_linen_module_has_its_methods_and_hyperparameters() -> None:
    x = rows(3)["x"]
    model = coder_state().model()
    variables = Coder().init(jax.random.key(1), x)
    assert_same_bits(model.encode(x), Coder().apply(variables, x, method="encode"))
    assert (model.features, model.activation) == (3, jax.nn.relu)
    assert [hasattr(model, name) for name in ("features", "encode", "apply", "absent", "inner")] == [1, 1, 0, 0, 0]
    assert_same_bits(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda model, batch: model.apply({"params": model.params}, batch["x"]), "apply"),
        (lambda model, batch: model.absent, "absent"),
        (lambda model, batch: model.inner(batch["x"]), "inner"),
    ],
)
def test_a_bound_linen_module_says_that_it_is_called(use: Any, name: str) -> None:
    words = rf"model.{name}: model is the Coder bound to its variables, and has no '{name}'; call it as model\(x, train"
    with pytest.raises(AttributeError, match=words):
        px.train_step(use)(coder_state(), rows(4))


@pytest.mark.parametrize(
    ("make", "state", "fn", "kind", "note"),
    [
        (
            px.eval_step,
            coder_state,
            lambda model, batch: {"mean": model(batch["x"], train=False)},
            TypeError,
            "eval_step: '<lambda>' calls its model with other arguments than it takes: __call__(self, x)",
        ),
        (
            px.train_step,
            lambda: px.TrainState.create(Net(), SGD),
            lambda model, batch: model(batch["x"], train=True),
            TypeError,
            "takes: __call__(self, x); it is in train() or eval() mode already: write model(x)",
        ),
        (
            px.train_step,
            lambda: px.TrainState.create(plain_params(), SGD),
            lambda params, batch: params["w"] * batch["image"],
            KeyError,
            "was given the batch, a dict with 'x', 'y', and the parameters, a dict with 'b', 'v', 'w'",
        ),
        (
            px.eval_step,
            coder_state,
            lambda model, batch: {"mean": model(batch.x)},
            AttributeError,
            "eval_step: '<lambda>' was given the batch, a dict with 'x', 'y'",
        ),
    ],
)
def test_what_a_function_was_given_is_noted_where_its_error_is_of_that(
    make: Any, state: Any, fn: Any, kind: type[Exception], note: str
) -> None:
    with pytest.raises(kind) as caught:
        make(fn)(state(), rows(4))
    assert any(note in found for found in caught.value.__notes__), caught.value.__notes__


def test_an_error_of_something_else_has_no_note_of_what_was_given() -> None:
    def fails(params: Any, batch: Any) -> Any:
        raise TypeError("of something else")

    with pytest.raises(TypeError, match="of something else") as caught:
        px.train_step(fails)(px.TrainState.create(plain_params(), SGD), rows(4))
    assert not any("fails" in found for found in getattr(caught.value, "__notes__", ()))


def test_of_a_sample_that_does_not_fit_it_is_noted_how_it_was_used() -> None:
    with pytest.raises(TypeError, match="'z'") as caught:
        px.TrainState.create(LinenNet(), SGD, key=jax.random.key(0), sample={"z": rows(3)["x"], "train": False})
    words = "by a call of LinenNet(…)(z=float32 (3, 4), train=False). Give what it is called with: sample=x[:1]"
    assert any(words in found for found in caught.value.__notes__)


def test_states_of_equal_modules_have_one_structure() -> None:
    one, other = (px.TrainState.create(Net(seed=seed), SGD) for seed in (0, 1))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.structure(one) != jax.tree.structure(px.TrainState.create(Net(norm=False), SGD))


def test_a_state_is_a_pytree_of_arrays_with_readable_paths() -> None:
    state = px.TrainState.create(plain_params(), SGD, extra={"best": 0.5}, key=jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[:2] == [".step", ".params['b']"]
    assert ".extra['best']" in paths
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert int(state.replace(step=jnp.asarray(7)).step) == 7
    with pytest.raises(px.StateError, match="there is no 'steps'; there are step, params"):
        state.replace(steps=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.TrainState.create(plain_params()), "optimizer must be an optax optimiser, got none; write"),
        (lambda: px.TrainState.create(plain_params(), optax.sgd), "got the function sgd: call it; write px.TrainState"),
        (
            lambda: px.TrainState.create(Net(), nnx.Optimizer(Net(), SGD, wrt=nnx.Param)),
            r"got an nnx.Optimizer, which holds one: give that one itself; write .*create\(model, optax.adam\(1e-3\)\)",
        ),
        (lambda: px.TrainState.create(plain_params(), 0.1), "must be an optax optimiser, got float; write"),
        (lambda: px.TrainState.create(LinenNet(), SGD, sample=np.ones(3)), "key is needed to initialise a Linen"),
        (lambda: px.TrainState.create(LinenNet(), SGD, key=jax.random.key(0)), "sample is needed to initialise"),
        (lambda: px.TrainState.create(nnx.Dropout(0.5), SGD), "Dropout has no nnx.Param; there is nothing to train"),
        (lambda: px.TrainState.create({}, SGD), "model must be an NNX or Linen module, a pytree that can be called"),
        (lambda: px.TrainState.create(loss, SGD), "got function without arrays"),
        (lambda: px.TrainState.create(plain_params(), SGD, ema=1), "ema must be a decay from 0 to below 1, got 1"),
        (lambda: px.TrainState.create(Net(), SGD, mutable={"a": 1}), "a Net has mutable state of its own"),
        (lambda: px.TrainState.create(plain_params(), SGD).model(ema=True), "there is no average of the parameters"),
        (
            lambda: px.TrainState.create(Net, SGD),
            r"model is the class Net.*create\(Net\(…, rngs=nnx.Rngs\(0\)\), optimizer\)",
        ),
        (
            lambda: px.TrainState.create(LinenNet, SGD),
            r"class LinenNet.*create\(LinenNet\(…\), optimizer, key=jax.random.key",
        ),
        (
            lambda: px.TrainState.create({"n": {"k": 3}}, SGD),
            r"model\['n'\]\['k'\] is int64, but only floating-point arrays are trained",
        ),
        (lambda: px.TrainState.create({"n": np.ones(3, bool)}, SGD), r"model\['n'\] is bool, but .* mutable=…"),
        (lambda: px.TrainState.create({"n": "w"}, SGD), r"model\['n'\] is a str, not an array"),
        (
            lambda: px.TrainState.create(IntegerParam(), SGD),
            r"model\['k'\] is int32.* not an nnx.Param, such as nnx.Variable",
        ),
        (
            lambda: px.TrainState.create(plain_params(), SGD, key=0),
            r"one random key, got 0; write key=jax.random.key\(0\)",
        ),
        (lambda: px.TrainState.create(LinenNet(), SGD, key=np.ones(3, "uint32")), r"key, got uint32 of shape \(3,\)"),
        (
            lambda: px.TrainState.create(plain_params(), SGD, key=jax.random.split(jax.random.key(0))),
            r"one random key, got key<fry> of shape \(2,\)",
        ),
    ],
)
def test_what_makes_no_state_is_refused(make: Any, message: str) -> None:
    with pytest.raises(px.StateError, match=message):
        make()


class IntegerParam(nnx.Module):
    def __init__(self) -> None:
        self.k = nnx.Param(jnp.zeros(3, jnp.int32))


def test_a_key_as_older_code_makes_it_is_that_key() -> None:
    state = px.TrainState.create(plain_params(), SGD, key=jax.random.PRNGKey(3))
    assert state.key == jax.random.key(3)


def test_a_state_is_shown_by_what_there_is_and_not_by_values() -> None:
    state = px.TrainState.create(plain_params(), optax.adam(0.1), key=jax.random.key(0), ema=0.9, extra={"n": 3})
    counts = "params=96 float32, opt_state=1 int32 + 192 float32, key=1 key<fry>, ema=96 float32, extra=1 int32"
    assert repr(state) == f"TrainState(plain, step=0, {counts}, ok=True)"
    shown = []
    jax.jit(lambda state: shown.append(repr(state)))(state)
    assert shown == [f"TrainState(plain, step=1 int32, {counts}, ok=1 bool)"]
    px.train_step(plain_loss)(state, rows(4))
    assert repr(state) == f"TrainState(plain, step=donated, {counts}, ok=donated)"


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state.model(),
        lambda state: state.weights(),
        lambda state: state.weights(ema=True),
        lambda state: px.eval_step(plain_loss)(state, rows(4)),
    ],
)
def test_a_state_that_was_given_away_says_so(use: Any) -> None:
    state = px.TrainState.create(plain_params(), SGD, ema=0.5)
    for x in jax.tree.leaves(state):
        x.delete()
    with pytest.raises(
        px.StateError, match=r"were donated to an earlier step; continue with the state that it returned"
    ):
        use(state)


def test_a_model_may_be_made_inside_jit() -> None:
    net, x = Net(norm=False, dropout=0), jnp.asarray(rows(3)["x"])
    state = px.TrainState.create(net, SGD)
    np.testing.assert_allclose(jax.jit(lambda state, x: state.model()(x))(state, x), net(x), rtol=1e-5)


def in_grad(step: Any, state: px.TrainState) -> Any:
    return jax.grad(lambda params: step(state.replace(params=params), rows(4))[1]["loss"].total)(state.params)


@pytest.mark.parametrize(
    "call",
    [
        lambda step, state: jax.jit(step)(state, rows(4)),
        lambda step, state: jax.jit(lambda: step(state, rows(4)))(),
        lambda step, state: jax.vmap(lambda x: step(state, rows(4) | {"x": x}))(np.ones((2, 4, 4), "float32")),
        in_grad,
    ],
    ids=["jit", "jit of no arguments", "vmap", "grad"],
)
@pytest.mark.parametrize("make", [px.train_step, px.eval_step])
def test_steps_are_not_part_of_a_traced_function(call: Any, make: Any) -> None:
    state = px.TrainState.create(plain_params(), SGD)
    with pytest.raises(px.StateError, match=r"was called inside jax.jit, .*\. Call it as it is: for batch in batches"):
        call(make(plain_loss), state)
    assert_same_bits(state.params, plain_params())


def one_argument(model: Any) -> Any: ...


def with_option(model: Any, batch: Any, rate: float) -> Any: ...


def with_default(model: Any, batch: Any, rate: float = 2.0) -> jax.Array:
    return rate * plain_loss(model, batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.train_step(None), "loss_fn, the first argument, must be a function, got None"),  # pyright: ignore[reportArgumentType]
        (lambda: px.train_step(one_argument), r"'one_argument' must take a model and a batch, but takes \(model\)"),
        (
            lambda: px.train_step(with_option),
            "has an unknown parameter 'rate'; .* key, row_keys, mutable",
        ),
        (lambda: px.train_step(loss, precision="float16"), "its gradients underflow without a scale for the loss"),
        (lambda: px.train_step(loss, precision="tf32"), "there are None .* and 'bfloat16'"),
        (lambda: px.train_step(loss, clip=0), "clip must be a number above 0, got 0"),
        (lambda: px.train_step(loss, clip=cast("Any", "1")), "clip must be a number above 0, got '1'; write clip=1.0"),
        (lambda: px.train_step(loss, microbatches=0), r"at least 1, .*, got 0; write train_step\(fn, microbatches=4\)"),
        (lambda: px.eval_step(loss, microbatches=-1), r"at least 1, .*, got -1; write eval_step\(fn, microbatches=4\)"),
        (lambda: px.train_step(loss, microbatches=True), "microbatches must be an integer of at least 1, .*, got True"),
        (lambda: px.train_step(loss, microbatches=cast("Any", 2.0)), "microbatches must be an integer .*, got 2.0"),
        (lambda: px.train_step(loss, axis=px.Axis("batch", 1, at_once=2)), r"without at_once, .*microbatches=4"),
    ],
)
def test_what_makes_no_step_is_refused(make: Any, message: str) -> None:
    with pytest.raises(px.ParaxisError, match=message):
        make()


def test_options_with_a_value_are_left_alone() -> None:
    state = px.TrainState.create(plain_params(), SGD)
    _, metrics = px.train_step(with_default, donate=False)(state, rows(4))
    _, fixed = px.train_step(functools.partial(with_option_used, rate=2.0), donate=False)(state, rows(4))
    assert float(metrics["loss"]) == float(fixed["loss"])


def with_option_used(model: Any, batch: Any, rate: float) -> jax.Array:
    return rate * plain_loss(model, batch)


def test_a_module_from_outside_is_refused() -> None:
    net = Net()

    def captures(model: Any, batch: Any) -> Any:
        return net(batch["x"])

    with pytest.raises(px.StateError, match=r"'captures' uses 'net', a Net, from outside; .* first argument"):
        px.train_step(captures)(px.TrainState.create(plain_params(), SGD), rows(4))


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (lambda p, b: b["x"][:3, 0] * p["b"][0], px.ShapeError, r"loss has shape \(3,\), but there are 4 rows"),
        (lambda p, b: jnp.asarray(1), px.ShapeError, "a loss of dtype int32, which has no derivative; return"),
        (lambda p, b: (plain_loss(p, b), 3.0), px.ShapeError, "write return loss, or loss, {'accuracy': correct}"),
        (lambda p, b: None, px.ShapeError, "returned NoneType; write return loss"),
        (lambda p, b, mutable: plain_loss(p, b), px.ShapeError, "write return loss, mutable, or"),
        (lambda p, b, mutable: (plain_loss(p, b), {"a": 1}), px.StateError, "the mutable state changed its structure"),
        (lambda p, b, key: plain_loss(p, b), px.StateError, "takes random keys, but the state has none"),
        (lambda p, b: (plain_loss(p, b), {"loss": 1.0}), px.StateError, "metric 'loss' has a name that the step uses"),
        (lambda p, b: px.Mean(plain_loss(p, b), 1.0), px.ShapeError, r"loss is a Mean of shapes \(4,\) and \(\)"),
    ],
)
def test_a_loss_function_that_gives_no_loss_is_refused(fn: Any, kind: type[Exception], message: str) -> None:
    """And the state is as it was."""
    state = px.TrainState.create(plain_params(), SGD)
    with pytest.raises(kind, match=message):
        px.train_step(fn)(state, rows(4))
    assert_same_bits(state.params, plain_params())


def test_a_parameter_that_is_written_is_refused() -> None:
    def writes(model: Any, batch: Any) -> jax.Array:
        model.first.kernel[...] = model.first.kernel[...] / 2
        return loss(model, batch)

    with pytest.raises(px.StateError, match=r"the loss function wrote parameter first\.kernel"):
        px.train_step(writes)(px.TrainState.create(Net(norm=False, dropout=0), SGD), rows(4))


def test_a_state_and_rows_are_asked_for() -> None:
    step = px.train_step(plain_loss)
    with pytest.raises(px.StateError, match=r"must be a px\.TrainState, got dict"):
        step({}, rows(4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(px.DataError, match="train_step: the batch has no rows"):
        step(px.TrainState.create(plain_params(), SGD), rows(0))


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, px.ShapeError, r"step: batch\['y'\] has 4 rows, batch\['x'\] has 3"),
        ({"x": np.ones((0, 2))}, px.DataError, "step: the batch has no rows"),
        ({"rate": 1.0}, px.DataError, "step: the batch has no rows"),
        (
            {"x": [[1.0, 2.0]] * 8},
            px.ShapeError,
            r"batch\['x'\] is a list of \d+ (numbers|lists), not an array.*; write np",
        ),
        ({"x": np.array(["a", "b"])}, px.ShapeError, r"step: batch\['x'\] is <U1, not numbers"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        px.train_step(plain_loss)(px.TrainState.create(plain_params(), SGD), batch)


def test_none_is_no_state_though_the_last_one_is_gone() -> None:
    step: Any = px.train_step(plain_loss)
    batch = {"x": np.ones((8, FEATURES), np.float32), "y": np.ones(8, np.float32)}
    step(px.TrainState.create(plain_params(), SGD), batch)
    gc.collect()
    with pytest.raises(px.StateError, match=r"must be a px\.TrainState, got NoneType"):
        step(None, batch)


def test_means_add_up_and_of_nothing_there_is_none() -> None:
    assert float(px.Mean(6.0, 3.0) + px.Mean(0.0, 1.0)) == 1.5
    assert f"{px.Mean(1.0, 4.0):.3f}" == "0.250"
    assert np.isnan(float(px.Mean(0.0, 0.0)))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("value", [None, 2.0])
def test_a_mean_of_no_weight_that_can_be_is_refused(weight: float, value: float | None) -> None:
    with pytest.raises(ValueError, match=f"px.Mean: weight must be the sum of the weights, at least 0, got {weight}"):
        float(px.Mean(6.0, weight, value))


def test_a_mean_is_shown_as_its_value_and_of_how_much() -> None:
    assert repr(px.Mean(jnp.array(7.0), jnp.array(14.0))) == "Mean(0.5, of 14)"
    assert repr(px.Mean(0.0, 0.0)) == "Mean(nan, of 0)"
    shown = []
    jax.jit(lambda mean: shown.append(repr(mean)))(px.Mean(jnp.array(7.0), jnp.array(14.0)))
    assert shown[0].startswith("Mean(total=")


def _variables() -> Any:
    return LinenNet().init(jax.random.key(0), jnp.zeros((1, 3)), train=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"f": Net(), "g": Net()}, r"model\['f'\] is an NNX module in a dict.*nnx\.Dict\(first=…, second=…\)"),
        (lambda: [nnx.Linear(2, 2, rngs=nnx.Rngs(0))], r"model\[0\] is an NNX module in a list"),
        (lambda: nnx.state(Net()), r"is an nnx\.\w+, which is not trained; give the module itself"),
        (
            _variables,
            r"'batch_stats' beside 'params', .*params=variables\['params'\], mutable=\{'batch_stats': var",
        ),
    ],
)
def test_what_a_module_keeps_besides_parameters_is_not_trained_by_accident(make: Any, message: str) -> None:
    with pytest.raises(px.StateError, match=message):
        px.TrainState.create(make(), optax.sgd(0.1))


@pytest.mark.parametrize(
    "model", [nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param), {"params": {"w": jnp.ones(2)}}]
)
def test_parameters_alone_are_trained_whatever_they_are_in(model: Any) -> None:
    assert px.TrainState.create(model, optax.sgd(0.1)).mutable is None


def test_a_linen_modules_values_are_taken_over_as_the_error_advises() -> None:
    variables = LinenNet().init(jax.random.key(0), rows(3)["x"])
    stats = jax.tree.map(lambda x: x + 3.0, variables["batch_stats"])
    state = px.TrainState.create(LinenNet(), optax.sgd(0.1), key=jax.random.key(1), sample=rows(3)["x"])
    state = state.replace(params=variables["params"], mutable={"batch_stats": stats})
    assert_same_bits(state.model().variables, {"params": variables["params"], "batch_stats": stats})
