"""Where the rows lie never changes the optimum, and a step communicates as little as it promises."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import sklearn.linear_model
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.solve import Status, objective
from tests._support import axis_on, table
from tests.solve._problems import in_float64, labelled, softmax

L2 = 1e-2
FUNCTIONS = {
    "softmax": objective.l2_multiclass_logreg,
    "softmax with intercept": objective.l2_multiclass_logreg_with_intercept,
    "logistic with intercept": objective.glm("logistic", intercept=True, l2=True),
    "poisson": objective.glm("poisson", l2=True),
}


def _data(name: str, size: int, dtype: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Where to start, rows and targets."""
    x, y = labelled(size, 5, 3)
    many = name.startswith("softmax")
    y = y if many else y.clip(0, 1)
    return FUNCTIONS[name].init(5, 3 if many else None, dtype=dtype), x.astype(dtype), y


def _mesh(devices: int, kind: AxisType = AxisType.Auto, name: str = "data") -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (name,), axis_types=(kind,))


def _optimum(name: str, size: int) -> tuple[Any, float]:
    """By SciPy, of the objective and its gradient written with NumPy, in float64."""
    start, _, y = _data(name, size, "float32")
    x, _ = labelled(size, 5, 3)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(start)]
    first = int(np.prod(shapes[0]))

    def parts(flat: np.ndarray) -> tuple[np.ndarray, Any]:
        return flat[:first].reshape(shapes[0]), flat[first:].reshape(shapes[1]) if len(shapes) > 1 else 0.0

    def value_and_grad(flat: np.ndarray) -> tuple[float, np.ndarray]:
        coef, bias = parts(flat)
        z = x @ coef + bias
        if name.startswith("softmax"):
            p, own = softmax(z), np.eye(3)[y]
            rows, slopes = -np.log((p * own).sum(1)), p - own
        elif name.startswith("logistic"):
            rows, slopes = np.logaddexp(0, z) - y * z, 1 / (1 + np.exp(-z)) - y
        else:
            rows, slopes = np.exp(z) - y * z, np.exp(z) - y
        grads = [(x.T @ slopes / size + L2 * coef).ravel(), slopes.mean(0).ravel()]
        return float(rows.mean() + L2 / 2 * (coef**2).sum()), np.concatenate(grads[: len(shapes)])

    zeros = np.zeros(sum(int(np.prod(shape)) for shape in shapes))
    options = {"maxiter": 10_000, "gtol": 1e-11, "ftol": 0.0}
    found = scipy.optimize.minimize(value_and_grad, zeros, jac=True, method="L-BFGS-B", options=options)
    assert np.linalg.norm(found.jac) < 1e-8, found.message
    coef, bias = parts(found.x)
    return (coef, bias) if len(shapes) > 1 else coef, float(found.fun)


# A run takes seconds to compile for each function, number of devices and kind of mesh. Among the rows of every day is
# each function, kind and rule, but not each with all others.
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "size", "devices"),
    table(
        [("softmax with intercept", 5, (8,)), ("poisson", 64, (8,))],
        itertools.product(FUNCTIONS, (5, 64), [(1, 2, 3, 8)]),
    ),
)
def test_any_number_of_devices_finds_the_same_in_float32(name: str, size: int, devices: tuple[int, ...]) -> None:
    start, x, y = _data(name, size, "float32")
    _, expected = _optimum(name, size)
    solver = px.solve.LBFGS(FUNCTIONS[name], tol=1e-6)
    for number in devices:
        data = px.solve.rows(x, y, axis=axis_on(number, size))
        params, state = solver.run(start, L2, data)
        where = f"{number} devices: {state.reason}"
        assert int(state.status) in (Status.CONVERGED, Status.PRECISION), where
        assert float(state.error) <= 5e-6, where
        np.testing.assert_allclose(float(state.value), expected, rtol=1e-6, err_msg=where)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, start)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    table([("logistic with intercept", (8,))], itertools.product(FUNCTIONS, [(1, 2, 3, 8)])),
)
@in_float64
def test_any_number_of_devices_finds_the_same_in_float64(name: str, devices: tuple[int, ...]) -> None:
    size = 37
    start, x, y = _data(name, size, "float64")
    params, expected = _optimum(name, size)
    solver = px.solve.LBFGS(FUNCTIONS[name], tol=1e-10)
    for number in devices:
        found, state = solver.run(start, L2, px.solve.rows(x, y, axis=axis_on(number, size)))
        assert int(state.status) == Status.CONVERGED, state.reason
        np.testing.assert_allclose(float(state.value), expected, rtol=1e-12, err_msg=f"{number} devices")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-7), found, params)


KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    table(
        [("poisson", AxisType.Explicit)],
        itertools.product(("softmax with intercept", "poisson"), KINDS),
    ),
)
def test_rows_that_the_user_put_on_a_mesh(name: str, kind: AxisType) -> None:
    start, x, y = _data(name, 48, "float32")
    _, expected = _optimum(name, 48)
    solver = px.solve.LBFGS(FUNCTIONS[name], tol=1e-6)
    mesh = _mesh(8, kind)
    spread = jax.device_put((x, y), NamedSharding(mesh, P("data")))
    for weight in ((), (jax.device_put(np.full(48, 2.0, "float32"), NamedSharding(mesh, P("data"))),)):
        _, state = solver.run(start, L2, (*spread, *weight))
        np.testing.assert_allclose(float(state.value), expected, rtol=1e-6)
        assert float(state.error) <= 5e-6
    with jax.set_mesh(mesh):
        _, state = solver.run(start, L2, spread)
        np.testing.assert_allclose(float(state.value), expected, rtol=1e-6)
    params, state = start, solver.init_state(start, L2, spread)
    update = jax.jit(solver.update)
    for _ in range(30):
        params, state = update(params, state, L2, spread)
    np.testing.assert_allclose(float(state.value), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_any_function_of_rows_on_a_mesh(kind: AxisType) -> None:
    x, y = labelled(48, 5, 2)

    def fun(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        z = (x * params["w"]).sum(1) + params["b"]
        return (jnp.logaddexp(0, z) - y * z).mean() + 0.01 * (params["w"] ** 2).sum()

    start = {"w": jnp.zeros(5), "b": jnp.zeros(())}
    solver = px.solve.LBFGS(fun, tol=1e-5)
    args = x.astype("float32"), y.astype("float32")
    expected = float(solver.run(start, *args).state.value)
    mesh = _mesh(8, kind)
    with jax.set_mesh(mesh):
        start = jax.device_put(start, NamedSharding(mesh, P()))
        _, state = solver.run(start, *jax.device_put(args, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(float(state.value), expected, rtol=1e-6)


def _instructions(text: str, operation: str) -> int:
    """How many there are in a compiled program; results may be arrays, or tuples ``(f32[], f32[5,3]{1,0})``."""
    return len(re.findall(rf"= (?:\(.*?\)|\S+) {operation}(?:-start)?\(", text))


def test_all_reduces_of_tuples_are_counted() -> None:
    text = """
      %all-reduce.1 = f32[5,3]{1,0} all-reduce(%a), channel_id=1, to_apply=%add
      %all-reduce.2 = (f32[], f32[5,3]{1,0}, /*index=2*/f32[3]{0}) all-reduce(%a, %b, %c), to_apply=%add
      %start = (f32[2]{0}, f32[2]{0}) all-reduce-start(%a), to_apply=%add
      %done = f32[2]{0} all-reduce-done(%start)
      %gte = f32[] get-tuple-element(%all-reduce.2), index=0
      ROOT %g = f32[8]{0} all-gather(%d), dimensions={0}
    """
    assert (_instructions(text, "all-reduce"), _instructions(text, "all-gather")) == (3, 1)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "weighted", "kind"),
    table(
        [(name, bool(k % 2), KINDS[k // 2]) for k, name in enumerate(FUNCTIONS)],
        itertools.product(FUNCTIONS, (True, False), KINDS),
    ),
)
def test_a_step_has_two_all_reduces_and_gathers_nothing(name: str, weighted: bool, kind: AxisType) -> None:
    start, x, y = _data(name, 48, "float32")
    given = (x, y, np.ones(48, "float32")) if weighted else (x, y)
    data = jax.device_put(given, NamedSharding(_mesh(8, kind), P("data")))
    solver = px.solve.LBFGS(FUNCTIONS[name])
    state = solver.init_state(start, L2, data)
    text = jax.jit(solver.update).lower(start, state, L2, data).compile().as_text() or ""
    assert 1 <= _instructions(text, "all-reduce") <= 2
    for operation in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert _instructions(text, operation) == 0, operation


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "precondition"), [*itertools.product(("softmax with intercept", "poisson"), ("auto", None))]
)
def test_the_rows_are_read_twice_per_iteration(name: str, precondition: Any) -> None:
    start, x, y = _data(name, 37, "float32")
    solver = px.solve.LBFGS(FUNCTIONS[name], precondition=precondition, tol=1e-5)
    state = solver.run(start, L2, px.solve.rows(x, y)).state
    assert int(state.iter_num) > 2
    assert int(state.status) == Status.CONVERGED
    assert int(state.data_passes) == 2 + 2 * int(state.iter_num) + 2  # the last two confirm the solution
    assert int(state.num_grad_eval) == 1 + int(state.iter_num)
    assert int(state.num_fun_eval) == 1 + int(state.num_linesearch_iter)


def _products_with(shape: tuple[int, ...], text: str) -> int:
    """Matrix products in an unoptimised program that read an array of this shape."""
    return len(re.findall(rf"dot_general.*tensor<{'x'.join(map(str, shape))}xf32>", text))


@pytest.mark.slow
def test_a_program_reads_the_rows_in_two_products() -> None:
    x, y = labelled(37, 5, 3)
    data, start = (jnp.asarray(x, "float32"), jnp.asarray(y)), jnp.zeros((5, 3))
    solver = px.solve.LBFGS(objective.multiclass_logreg)
    text = jax.jit(solver.update).lower(start, solver.init_state(start, data), data).as_text()
    # The third is the prediction computed anew every so many iterations.
    assert _products_with((37, 5), text) == 3


@pytest.mark.slow
def test_one_trace_per_shape() -> None:
    start, x, y = _data("softmax with intercept", 37, "float32")
    solver = px.solve.LBFGS(objective.l2_multiclass_logreg_with_intercept)
    traces = [0]

    @jax.jit
    def update(params: Any, state: Any, data: Any) -> Any:
        traces[0] += 1
        return solver.update(params, state, L2, data)

    data = px.solve.rows(x, y, axis=axis_on(3, 37))
    params = data.shared(start)
    state = solver.init_state(params, L2, data)
    for _ in range(4):
        params, state = update(params, state, data)
    assert traces[0] == 1
    state = solver.init_state(params, L2, data)
    update(params, state, data)
    assert traces[0] == 1
    other = px.solve.rows(x[:20], y[:20], axis=axis_on(3, 20))
    update(params, solver.init_state(params, L2, other), other)
    assert traces[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["balanced", {0: 3.0, 2: 0.5}], ids=["balanced", "given"])
@in_float64
def test_class_and_sample_weights_are_scikit_learns(choice: Any) -> None:
    x, y = labelled(90, 5, 3)
    given = np.random.default_rng(3).uniform(0.2, 2, 90)
    for weight in (None, given):
        model = sklearn.linear_model.LogisticRegression(
            solver="newton-cholesky", tol=1e-12, class_weight=choice, max_iter=1000
        )
        if choice == "balanced" and weight is not None:
            # How scikit-learn counts classes with weights has changed between versions; by hand it has not.
            totals = np.bincount(y, weight)
            model.set_params(class_weight={c: weight.sum() / (3 * totals[c]) for c in range(3)})
        model.fit(x, y, sample_weight=weight)
        data = px.solve.rows(x, y, weight, class_weight=choice, axis=axis_on(8, 90))
        fun = objective.l2_multiclass_logreg_with_intercept
        params, state = px.solve.LBFGS(fun, tol=1e-11).run(fun.init(5, 3, dtype=float), 1 / data.weight.sum(), data)
        assert int(state.status) == Status.CONVERGED, state.reason
        np.testing.assert_allclose(params[0].T, model.coef_, rtol=0, atol=1e-8)
