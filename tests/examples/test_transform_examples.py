"""What the examples of the transforms compute, against NumPy and plain JAX."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._support import assert_close

pytestmark = pytest.mark.slow

Example = Callable[[str], ModuleType]


def weights(module: Any) -> list[jax.Array]:
    """Bias and kernel of the first and the last layer, in the order of the variables' names."""
    return [p[...] for layer in (module.layers[0], module.layers[2]) for p in (layer.bias, layer.kernel)]


def logits(w: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.maximum(x @ w[1] + w[0], 0) @ w[3] + w[2]


def cross_entropy(w: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(w, x)), labels[..., None], -1))


def trained(w: list[jax.Array], x: jax.Array, labels: jax.Array, num_steps: int) -> tuple[list[jax.Array], list[float]]:
    """Gradient descent with momentum by hand; the rate is halved half way."""
    losses, velocity = [], jax.tree.map(jnp.zeros_like, w)
    step = jax.jit(jax.value_and_grad(cross_entropy))
    for i in range(num_steps):
        value, gradients = step(w, x, labels)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        w = jax.tree.map(lambda p, v, rate=0.2 if i < num_steps // 2 else 0.1: p - rate * v, w, velocity)
        losses.append(float(value))
    return w, losses


# --- compilation -----------------------------------------------------------------------------------------------------

TABLE = [("0", "bias", 3, (3,)), ("0", "kernel", 6, (2, 3)), ("2", "bias", 4, (4,)), ("2", "kernel", 12, (3, 4))]


def test_a_compiled_module_gives_what_the_module_gives_and_sees_edits(example: Example) -> None:
    found = example("compilation").sharing()
    assert found["module"] == found["function"] == found["edited"] == 0
    np.testing.assert_allclose(found["moved"], np.ones((100, 4)), rtol=1e-5)


@pytest.mark.parametrize(("number", "prefix"), [(0, ""), (1, "(Jit)"), (2, "(Jit)")])
def test_the_table_of_variables_has_names_sizes_and_shapes(example: Example, number: int, prefix: str) -> None:
    lines = example("compilation").sharing()["tables"][number].splitlines()
    rows = [f"{prefix}(Sequential).layers[{i}](Linear).{name} {size} {shape}" for i, name, size, shape in TABLE]
    assert [" ".join(line.split()) for line in lines] == [*rows, "+Total(4) 25"]
    assert len({line.index("(", len(prefix) + 40) for line in lines[:-1]}) == 1


def test_the_compiled_train_step_is_momentum_by_hand(example: Example) -> None:
    module = example("compilation")
    got = module.train_step(20)
    x, labels = module.quadrants()
    w, losses = trained(weights(module.network(1)), x, labels, 20)
    np.testing.assert_allclose(got["losses"], losses, rtol=1e-4)
    assert_close(got["trained"], [np.asarray(p) for p in w], rtol=1e-4)


def test_quadrants_are_numbered_by_the_signs(example: Example) -> None:
    x, labels = example("compilation").quadrants()
    for point, label in zip(np.asarray(x), np.asarray(labels), strict=True):
        assert label == {(False, False): 0, (False, True): 1, (True, False): 2, (True, True): 3}[tuple(point > 0)]


def test_a_static_argument_chooses_the_program_and_statistics_come_back(example: Example) -> None:
    found = example("compilation").static_arguments()
    assert found["static"] == 0
    assert found["error"] == "TracerBoolConversionError"
    # From zero, a hundredth of the way to the batch's mean: NNX's default momentum.
    np.testing.assert_allclose(found["running mean"], 0.01 * np.asarray(found["hidden"]).mean(0), rtol=1e-4, atol=1e-7)


def test_constants_do_not_see_that_forty_numbers_grew_by_one(example: Example) -> None:
    assert example("compilation").constants() == {"before": 0.0, "after": 40.0}


# --- parallelism -----------------------------------------------------------------------------------------------------


def test_a_split_batch_gives_what_one_device_gives(example: Example) -> None:
    assert example("parallelism").split_batches() == {"module": 0, "function": 0, "devices of y": 8}


def test_the_parallel_train_step_is_the_whole_batch_on_one_device(example: Example) -> None:
    got = example("parallelism").train_step(20)
    module = example("compilation")
    x, labels = module.quadrants()
    w, losses = trained(weights(module.network(1)), x[:96], labels[:96], 20)
    np.testing.assert_allclose(got["losses"], losses, rtol=1e-4)
    assert_close(got["trained"], [np.asarray(p) for p in w], rtol=1e-4)


def test_results_are_put_together_as_the_page_says(example: Example) -> None:
    found = example("parallelism").output_aggregation()
    by_device = np.asarray(found["plain"]).reshape(8, 12, 4)
    expected = {
        "stack": by_device,
        "first": by_device[0],
        "concat": by_device.reshape(96, 4),
        "mean": by_device.mean(0),
    }
    assert found["results"].keys() == expected.keys()
    for kind, y in expected.items():
        assert found["results"][kind].shape == y.shape
        np.testing.assert_allclose(found["results"][kind], y, rtol=1e-5, atol=1e-6)


def test_a_variable_that_all_devices_wrote_follows_its_rule_and_keeps_its_dtype(example: Example) -> None:
    found = example("parallelism").variable_rules()["rules"]
    row = np.arange(5, dtype=np.int32)
    expected = {"mean": row, "first": row, "sum": 8 * row, "stack": np.tile(row, (8, 1))}
    assert found.keys() == expected.keys()
    for rule, x in expected.items():
        assert found[rule].dtype == np.int32
        np.testing.assert_array_equal(found[rule], x)


def test_batch_norm_has_the_statistics_of_shares_or_of_the_batch(example: Example) -> None:
    found = example("parallelism").batch_norm()
    x = np.asarray(found["x"], np.float64)
    for name, variance in (
        ("one device", x.var(0)),
        ("per device", x.reshape(8, 12, 3).var(1).mean(0)),
        ("synchronised", x.var(0)),
    ):
        mean, var = found["statistics"][name]
        np.testing.assert_allclose(mean, 0.1 * x.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(var, 0.9 + 0.1 * variance, rtol=1e-5)


# --- vectorization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "y"), [("y = 1", 1), ("y = (-2, -1, 0, 1)", (-2, -1, 0, 1))])
def test_rows_are_reversed_by_their_own_draws(example: Example, name: str, y: Any) -> None:
    z, r, given = example("vectorization").random_reverse()[name]
    x = np.arange(20).reshape(5, 4)
    assert r.tolist() == [0, 1, 0, 1, 1]  # the page's
    np.testing.assert_array_equal(z, np.where(r[:, None] == 1, x[:, ::-1], x) + np.array(y))
    np.testing.assert_array_equal(given, np.broadcast_to(np.array(y), (5, *np.shape(y))))


def test_the_page_prints_these_rows(example: Example) -> None:
    found = example("vectorization").random_reverse()
    shown = [[1, 2, 3, 4], [8, 7, 6, 5], [9, 10, 11, 12], [16, 15, 14, 13], [20, 19, 18, 17]]
    assert found["y = 1"][0].tolist() == shown
    assert found["y = (-2, -1, 0, 1)"][0].tolist() == [[-2, 0, 2, 4], [5] * 4, [6, 8, 10, 12], [13] * 4, [17] * 4]


def test_a_call_advances_the_stream_once_and_the_next_one_differs(example: Example) -> None:
    found = example("vectorization").random_reverse()
    assert found["draws"] == 1
    assert len(set(map(tuple, found["r"]))) > 4


def test_gradients_of_single_examples_are_those_of_a_loop(example: Example) -> None:
    found = example("vectorization").per_example_gradients()
    assert [g.shape for g in found["whole"]] == [(4,), (3, 4)]
    assert [g.shape for g in found["each"]] == [(10, 4), (10, 3, 4)]
    kernel, bias = np.asarray(found["net"].kernel[...]), np.asarray(found["net"].bias[...])
    x, y = np.asarray(found["x"]), np.asarray(found["y"])
    error = 2 * (x @ kernel + bias - y) / 4  # the derivative of a mean of four squares
    np.testing.assert_allclose(found["each"][0], error, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["each"][1], x[:, :, None] * error[:, None, :], rtol=1e-4, atol=1e-6)
    for whole, each in zip(found["whole"], found["each"], strict=True):
        np.testing.assert_allclose(whole, np.mean(each, axis=0), rtol=1e-4, atol=1e-6)


# --- private gradients -----------------------------------------------------------------------------------------------


def private_step(module: ModuleType, x: Any, labels: Any, noise: float) -> tuple[list[jax.Array], np.ndarray]:
    """The first step of training by plain JAX, and the norms of the examples' gradients."""
    w = weights(module.classifier())
    rows = np.random.default_rng(0).choice(len(x), module.BATCH, replace=False)
    each = jax.vmap(jax.grad(cross_entropy), in_axes=(None, 0, 0))(w, x[rows], labels[rows])
    norms = np.sqrt(sum(np.sum(np.asarray(g).reshape(len(g), -1) ** 2, axis=1) for g in each))
    scale = np.minimum(1, 1 / norms)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), 4)
    total = [jnp.tensordot(scale, g, 1) for g in each]
    total = [g + noise * jax.random.normal(k, g.shape) for k, g in zip(keys, total, strict=True)]
    return [p - 0.5 * g / module.BATCH for p, g in zip(w, total, strict=True)], norms


@pytest.mark.parametrize("parallel", [False, True])
def test_a_private_step_is_a_noisy_mean_of_clipped_gradients(example: Example, parallel: bool) -> None:
    module, data = example("private_gradients"), example("_setting").digits(1, by_label=False)
    expected, norms = private_step(module, data.x[0], data.y[0], 2.0)
    net, before, after = module.train(1, 2.0, data.x[0], data.y[0], parallel=parallel)
    assert_close(weights(net), expected, rtol=1e-4)
    assert before == pytest.approx(norms.max(), rel=1e-4)
    assert after == pytest.approx(1.0, rel=1e-5)


def test_no_clipped_gradient_is_longer_than_the_norm_and_short_ones_stay(example: Example) -> None:
    module = example("private_gradients")
    net, x = module.classifier(), np.random.default_rng(0).normal(size=64).astype("float32")
    for scale in (0.0, 0.01, 1.0, 100.0):
        gradient, before, after = module.clipped_gradient(net, scale * x, jnp.array(3))
        assert float(after) <= 1 + 1e-5
        np.testing.assert_allclose(
            np.linalg.norm(np.concatenate([np.ravel(g) for g in gradient])), min(1.0, float(before)), rtol=1e-5
        )


def test_noise_is_gaussian_of_the_deviation_asked_for(example: Example) -> None:
    noisy = example("private_gradients").with_noise(jax.random.key(0), [jnp.ones(20000), jnp.ones((100, 200))], 3.0)
    for x in noisy:
        assert float(x.mean()) == pytest.approx(1, abs=0.1)
        assert float(x.std()) == pytest.approx(3, rel=0.02)
    assert abs(np.corrcoef(noisy[0], noisy[1].reshape(-1))[0, 1]) < 0.03


def test_one_device_and_eight_train_the_same_private_model(example: Example) -> None:
    data = example("_setting").digits(1, by_label=False)
    assert example("private_gradients").difference(10, data.x[0], data.y[0]) < 1e-5


def test_private_training_learns_and_prints_its_table(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    found = example("private_gradients").main(["--quick"])
    assert [row[0] for row in found["rows"]] == [0, 1, 4]
    assert all(row[3] <= 1 + 1e-5 < row[2] for row in found["rows"])
    assert found["rows"][0][1] > 0.85
    assert found["difference"] < 1e-5
    assert "largest clipped norm" in capsys.readouterr().out
