"""The initial Hessian of a linear problem, beside NumPy's inverse and JAX's derivatives; and when it is made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import LBFGS, Status, _gram, _losses, objective
from tests._support import axis_on
from tests.solve._problems import labelled, softmax


def test_the_coupling_of_classes_is_jaxs_derivative() -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        z, labels, weight = rng.standard_normal((4, 7)) * 3, rng.integers(0, 4, 7), rng.random(7)

        def cost(z: jax.Array, label: jax.Array) -> jax.Array:
            return jax.nn.logsumexp(z) - z[label]

        each = jax.vmap(jax.hessian(cost), (1, 0))(jnp.asarray(z), jnp.asarray(labels))
        assert _losses.SOFTMAX.coupling is not None
        for xp in (np, jnp):
            np.testing.assert_allclose(
                _losses.SOFTMAX.coupling(xp.asarray(z), weight, xp), jnp.einsum("n,nij->ij", weight, each), atol=1e-14
            )


@pytest.mark.parametrize("where", ["here", "in jit"])
@pytest.mark.parametrize("intercept", [False, True])
def test_the_inverse_is_that_of_the_kronecker_product(intercept: bool, where: str) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        X, y = rng.standard_normal((60, 5)), rng.integers(0, 4, 60)  # few enough that all are used
        coef, bias = rng.standard_normal((5, 4)), rng.standard_normal(4) * intercept
        params = (jnp.asarray(coef), jnp.asarray(bias)) if intercept else jnp.asarray(coef)
        init = LBFGS(objective.glm("softmax", intercept=intercept), precondition="gram").init_state
        state: Any = (init if where == "here" else jax.jit(init))(params, (X, y))
        design = np.column_stack([X, np.ones(60)]) if intercept else X
        p = softmax(X @ coef + bias)
        coupling, curvatures = np.diag(p.mean(0)) - p.T @ p / 60, (1 - (p**2).sum(1)) / 3
        gram = (design * curvatures[:, None]).T @ design / 60
        # On top, a thousandth of what each column would weigh, were all its rows as large as the largest.
        gram += 1e-3 * curvatures.mean() * np.diag((design**2).max(0))
        hessian = np.kron(gram, coupling / (np.trace(coupling) / 3) + 1 / 4 + 0.1 * np.eye(4))
        vector = rng.standard_normal((design.shape[1], 4))
        found = _gram.apply(state.preconditioner, (vector[:-1], vector[-1]) if intercept else vector)
        found = np.vstack([found[0], found[1]]) if intercept else found
        np.testing.assert_allclose(found.ravel(), np.linalg.solve(hessian, vector.ravel()), rtol=1e-8)


def _steps(data: Any, precondition: Any, **options: Any) -> Any:
    solver = LBFGS(objective.l2_multiclass_logreg, precondition=precondition, tol=1e-4, **options)
    return solver.run(jnp.zeros((20, 3)), 1e-3, data).state


def test_it_is_made_where_it_saves_iterations_and_only_there() -> None:
    x, y = labelled(2000, 20, 3)
    alike = px.solve.rows(x.astype("float32"), y, axis=axis_on(2, 2000))
    apart = alike._replace(X=alike.X * np.logspace(0, 2, 20).astype("float32"))
    assert _steps(alike, "auto").preconditioner is None
    found, without = _steps(apart, "auto"), _steps(apart, None)
    assert found.status == Status.CONVERGED
    assert found.preconditioner is not None
    assert int(found.iter_num) < 0.3 * int(without.iter_num)


def test_inside_jit_it_is_as_outside() -> None:
    x, y = labelled(500, 20, 3)
    for scales in (np.ones(20), np.logspace(0, 2, 20)):
        data = px.solve.rows((x * scales).astype("float32"), y, axis=axis_on(2, 500))
        outside = _steps(data, "auto", maxiter=9)
        inside = jax.jit(lambda data: _steps(data, "auto", maxiter=9))(data)
        np.testing.assert_allclose(outside.value, inside.value, rtol=1e-3)


def test_what_tells_classes_apart_saves_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty classes, some much rarer than others."""
    rng = np.random.default_rng(0)
    X, coef = rng.standard_normal((3000, 30)), rng.standard_normal((30, 50))
    y = np.argmax(X @ coef + 2 * rng.gumbel(size=(3000, 50)) - 3 * np.log1p(np.arange(50)), 1)
    solver = LBFGS(objective.l2_multiclass_logreg, tol=1e-4, precondition="gram")

    def state() -> Any:
        return solver.run(jnp.zeros((30, 50)), 1e-2 / 3000, (X.astype(np.float32), y.astype(np.int32))).state

    found = state()
    monkeypatch.setattr(_gram, "_outputs", lambda coupling, xp: xp.eye(len(coupling), dtype=coupling.dtype))
    alike = state()
    assert found.status == alike.status == Status.CONVERGED
    assert found.iter_num < 0.9 * alike.iter_num


def test_no_program_calls_lapack() -> None:
    """Its threads and XLA's would wait for each other: of several problems, or on several devices, for ever."""
    x, y = labelled(90, 70, 3)
    solver = LBFGS(objective.l2_multiclass_logreg, precondition="gram")
    run = jax.jit(jax.vmap(solver.run, (None, 0, None)))
    text = run.lower(jnp.zeros((70, 3)), jnp.array([0.1, 0.2]), (x.astype("float32"), y)).as_text()
    assert "lapack" in jax.jit(jnp.linalg.inv).lower(jnp.eye(3)).as_text()
    assert "lapack" not in text


@pytest.mark.parametrize("num_classes", [1, 3])
def test_a_class_that_nothing_tells_makes_no_nan(num_classes: int) -> None:
    for value in (0.0, np.nan):
        found = _gram._outputs(np.full((num_classes, num_classes), value), np)
        np.testing.assert_array_equal(found, np.eye(num_classes))


def test_a_direction_reads_the_inverse_once() -> None:
    """The gradient and its last change are multiplied with it together, as reading it is what takes long."""
    x, y = labelled(400, 150, 3)
    params, data = jnp.zeros((150, 3)), (x.astype("float32"), y)
    solver = LBFGS(objective.multiclass_logreg, precondition="gram")
    state = solver.init_state(params, data)
    text = jax.jit(solver.update).lower(params, state, data).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "tensor<150x150xf32>" in line]
    assert len(products) == 1
