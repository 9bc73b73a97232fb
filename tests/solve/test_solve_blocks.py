"""What reads rows is a map over blocks of them, one for each device, and a sum; nothing else of a program knows X."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.solve import objective
from paraxis.testing import communication
from tests._support import axis_on
from tests.solve._problems import in_float64, labelled

L2 = 1e-2
RIDGE = objective.glm("squared", intercept=True, l2=True)
SOFTMAX = objective.l2_multiclass_logreg_with_intercept

SOLVERS: dict[str, Callable[..., Any]] = {
    "LBFGS": px.solve.LBFGS,
    "NewtonCG": px.solve.NewtonCG,
    "GradientDescent": px.solve.GradientDescent,
}


def _is_map(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "px_map"


def _outside(program: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program that are in no map, those of loops, branches and calls included."""
    for eqn in (program.jaxpr if isinstance(program, ClosedJaxpr) else program).eqns:
        yield eqn
        for value in () if _is_map(eqn) else eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, (Jaxpr, ClosedJaxpr)):
                    yield from _outside(item)


def _softmax_data(devices: int, size: int) -> tuple[Any, Any]:
    x, y = labelled(size, 5, 3)
    data = px.solve.rows(x.astype("float32"), y, axis=axis_on(devices, size))
    return data, data.shared(SOFTMAX.init(5, 3))


def _update(solver: Any, devices: int, size: int = 48) -> tuple[Any, Any, Any]:
    data, params = _softmax_data(devices, size)
    return params, solver.init_state(params, L2, data), data


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_is_made_of_maps_and_sums_on_any_devices(name: str) -> None:
    solver, texts = SOLVERS[name](SOFTMAX), []
    for devices in (1, 8):
        data, params = _softmax_data(devices, 48)
        state = jax.eval_shape(solver.init_state, params, L2, data)
        program = jax.make_jaxpr(solver.update)(params, state, L2, data)
        maps = [eqn.params for eqn in _outside(program) if _is_map(eqn)]
        assert maps
        assert {(m["axis"], m["size"]) for m in maps} == {("blocks", devices)}
        assert any(all(m["summed"]) for m in maps)
        assert any(len(set(m["summed"])) == 2 for m in maps)  # predictions kept, a gradient summed
        for eqn in _outside(program):
            if eqn.primitive.name in ("dot_general", "reduce_sum", "exp", "log"):
                assert not any(48 in getattr(v.aval, "shape", ()) for v in eqn.invars), eqn
        texts.append([(eqn.primitive.name, eqn.params.get("summed")) for eqn in _outside(program)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("devices", [1, 8])
def test_an_objective_and_its_gradient_are_made_of_maps(devices: int) -> None:
    data, params = _softmax_data(devices, 37)
    for fun in (SOFTMAX, jax.grad(SOFTMAX)):
        outside = list(_outside(jax.make_jaxpr(fun)(params, L2, data)))
        assert {eqn.params["size"] for eqn in outside if _is_map(eqn)} == {devices}
        assert not any(eqn.primitive.name == "dot_general" for eqn in outside)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
def test_blocks_cost_and_communicate_what_the_compiler_would_of_the_same_rows(name: str) -> None:
    solver = SOLVERS[name](SOFTMAX)
    params, state, data = _update(solver, 8)
    texts, flops = [], []
    for given in (data, tuple(data)):
        texts.append(str(communication(solver.update, params, state, L2, given)))
        cost: Any = jax.jit(solver.update).lower(params, state, L2, given).compile().cost_analysis()
        flops.append(cost["flops"])
    assert texts[0] == texts[1]
    assert "gather" not in texts[0]
    assert flops[0] <= 1.01 * flops[1]


@pytest.mark.slow
def test_predictions_stay_on_the_devices_of_their_rows() -> None:
    solver = px.solve.LBFGS(SOFTMAX)
    params, state, data = _update(solver, 8)
    _, state = jax.jit(solver.update)(params, state, L2, data)
    kept = [x for x in jax.tree.leaves(state.cache) if 48 in x.shape]
    assert kept
    for x in kept:
        assert {shard.data.size for shard in x.addressable_shards} == {x.size // 8}


def _ridge(x: np.ndarray, y: np.ndarray, weight: np.ndarray, l2: float) -> np.ndarray:
    """Coefficients and intercept, by the normal equations."""
    wide = np.concatenate([x, np.ones_like(x[:, :1])], 1)
    share = (weight / weight.sum())[:, None]
    penalty = np.diag([l2] * x.shape[1] + [0.0])
    return np.linalg.solve(wide.T @ (share * wide) + penalty, wide.T @ (share[:, 0] * y))


def _drawn(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 3))
    return x, x @ rng.normal(size=3) + rng.normal(size=size), rng.uniform(0.5, 2, size)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(("devices", "size"), [(1, 19), (8, 19), (8, 24)])
@in_float64
def test_solutions_are_those_of_the_normal_equations(name: str, devices: int, size: int) -> None:
    x, y, weight = _drawn(size)
    data = px.solve.rows(x, y, weight, axis=axis_on(devices, size))
    (coef, bias), state = SOLVERS[name](RIDGE, tol=1e-9).run(RIDGE.init(3, dtype=float), L2, data)
    assert int(state.status) == px.solve.Status.CONVERGED, state.reason
    np.testing.assert_allclose([*coef, bias], _ridge(x, y, weight, L2), rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@in_float64
def test_solutions_have_the_derivatives_of_the_normal_equations(devices: int) -> None:
    x, y, weight = _drawn(19)
    data = px.solve.rows(x, y, weight, axis=axis_on(devices, 19))
    solver = px.solve.LBFGS(RIDGE, tol=1e-11)

    def size(l2: Any, data: Any) -> jax.Array:
        coef, bias = solver.run(RIDGE.init(3, dtype=float), l2, data).params
        return jnp.sum(coef**2) + bias

    def expected(l2: Any, x: Any, weight: Any) -> float:
        *coef, bias = _ridge(x, y, weight, l2)
        return float(np.sum(np.square(coef)) + bias)

    by_l2, by_data = jax.grad(size, (0, 1))(L2, data)
    step, moved_x, moved_weight = 1e-5, np.zeros_like(x), np.zeros_like(weight)
    moved_x[7, 1], moved_weight[7] = step, step
    for found, change in (
        (by_l2, (step, 0, 0)),
        (by_data.X[7, 1], (0, moved_x, 0)),
        (by_data.weight[7], (0, 0, moved_weight)),
    ):
        up, down = (expected(*(a + s * b for a, b in zip((L2, x, weight), change, strict=True))) for s in (1, -1))
        np.testing.assert_allclose(found, (up - down) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@in_float64
def test_rows_over_one_axis_of_a_mesh_and_over_two() -> None:
    x, y, weight = _drawn(19)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    solver = px.solve.LBFGS(RIDGE, tol=1e-9)
    for over in ("data", ("data", "model")):
        data = px.solve.rows(x, y, weight, axis=px.Axis("rows", 19, mesh=mesh, over=over))
        (coef, bias), _ = solver.run(RIDGE.init(3, dtype=float), L2, data)
        np.testing.assert_allclose([*coef, bias], _ridge(x, y, weight, L2), rtol=0, atol=1e-7)
        with jax.set_mesh(Mesh(np.array(jax.devices()), ("other",))):  # then the compiler divides one block
            found = RIDGE((coef, bias), L2, data)
        np.testing.assert_allclose(found, RIDGE((coef, bias), L2, tuple(data)), rtol=1e-12)


@pytest.mark.slow
def test_a_state_goes_on_with_the_same_rows_however_they_are_given() -> None:
    solver = px.solve.LBFGS(SOFTMAX)
    params, state, data = _update(solver, 8)
    steps = [jax.jit(solver.update)(params, state, L2, given) for given in (data, tuple(data))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *(step.params for step in steps))


def test_a_part_of_the_rows_is_one_block_where_it_does_not_divide() -> None:
    data, params = _softmax_data(8, 48)
    part = jax.tree.map(lambda leaf: leaf[:30], data)
    assert {eqn.params["size"] for eqn in _outside(jax.make_jaxpr(SOFTMAX)(params, L2, part)) if _is_map(eqn)} == {1}
    expected = SOFTMAX(params, L2, jax.tree.map(np.asarray, tuple(part)))
    np.testing.assert_allclose(SOFTMAX(params, L2, part), expected, rtol=1e-6)


def test_rows_that_were_moved_are_said() -> None:
    data, params = _softmax_data(8, 48)
    expected = float(SOFTMAX(params, L2, data))
    moved = jax.device_put(data, jax.devices()[3])
    for call in (SOFTMAX, px.solve.LBFGS(SOFTMAX).run):
        with pytest.raises(px.DeviceError, match=r"laid out over 8 devices, but now lie on 1 others.*tuple\(data\)"):
            call(SOFTMAX.init(5, 3), L2, moved)
    np.testing.assert_allclose(SOFTMAX(SOFTMAX.init(5, 3), L2, tuple(moved)), expected, rtol=1e-6)
    again = pickle.loads(pickle.dumps(data))
    np.testing.assert_allclose(SOFTMAX(SOFTMAX.init(5, 3), L2, again), expected, rtol=1e-6)
    typed = NamedSharding(Mesh(np.array(jax.devices()), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,)), P())
    found = SOFTMAX(jax.device_put(SOFTMAX.init(5, 3), typed), L2, jax.device_put(data, typed))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rows_of_a_device_are_taken_together() -> None:
    with pytest.raises(
        px.AxisError, match=r"axis 'rows' has at_once=2, but .* leave at_once out: px.Axis\('rows', 4\)"
    ):
        px.solve.rows(np.ones((4, 2)), np.ones(4), axis=px.Axis("rows", 4, at_once=2))
