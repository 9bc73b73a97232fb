"""No public face: the initial Hessian of a linear problem, beside what NumPy inverts and what JAX differentiates.

What it saves is seen from outside, by iterations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import _gram, _losses


def _draw(num_rows: int, num_columns: int, num_classes: int, intercept: bool) -> tuple[Any, np.ndarray, Any]:
    rng = np.random.default_rng(num_rows + num_columns)
    X, y = rng.standard_normal((num_rows, num_columns)), rng.integers(0, num_classes, num_rows)
    coef = rng.standard_normal((num_columns, num_classes))
    params = (jnp.asarray(coef), jnp.asarray(rng.standard_normal(num_classes))) if intercept else jnp.asarray(coef)
    return X, y, params


@pytest.mark.parametrize("size", [1, 3, 100, 101, 203])
def test_the_inverse_of_a_cholesky_factor_is_numpys(size: int) -> None:
    rows = np.random.default_rng(size).standard_normal((3 * size, size))
    matrix = rows.T @ rows / len(rows) + 1e-3 * np.eye(size)
    with jax.enable_x64(True):
        found = _gram._of_factor(jnp.asarray(np.linalg.cholesky(matrix)))
    np.testing.assert_allclose(found, np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_classes", [2, 25])
def test_slopes_and_the_coupling_of_classes_are_jaxs_derivatives(num_classes: int) -> None:
    rng = np.random.default_rng(num_classes)
    with jax.enable_x64(True):
        z = jnp.asarray(rng.standard_normal((num_classes, 7)) * 3)
        labels, weight = jnp.asarray(rng.integers(0, num_classes, 7)), jnp.asarray(rng.random(7))

        def cost(z: jax.Array, labels: jax.Array) -> jax.Array:
            return jax.nn.logsumexp(z) - z[labels]

        slopes = jax.vmap(jax.grad(cost), (1, 0), 1)(z, labels)
        bends = jnp.einsum("n,nij->ij", weight, jax.vmap(jax.hessian(cost), (1, 0))(z, labels))
        slope, coupling = _losses.SOFTMAX.slope, _losses.SOFTMAX.coupling
        assert slope is not None
        assert coupling is not None
        np.testing.assert_allclose(slope(z, labels), slopes, atol=1e-14)
        np.testing.assert_allclose(coupling(z, weight), bends, atol=1e-14)


def test_slopes_of_great_predictions_keep_their_digits() -> None:
    """The difference of two classes is all that counts, however great both are."""
    apart = np.float32(2.0**-6)
    z = jnp.asarray([[1e5 + apart], [1e5]], jnp.float32)
    assert _losses.SOFTMAX.slope is not None
    np.testing.assert_allclose(
        _losses.SOFTMAX.slope(z, jnp.zeros(1, int))[0, 0], -1 / (1 + np.exp(np.float64(apart))), rtol=1e-6
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_the_inverse_is_that_of_the_kronecker_product(intercept: bool) -> None:
    with jax.enable_x64(True):
        X, y, params = _draw(60, 5, 4, intercept)  # few enough that all are used
        fun = px.solve.objective.multiclass_logreg_with_intercept if intercept else px.solve.objective.multiclass_logreg
        state = px.solve.LBFGS(fun, precondition="gram").init_state(params, (X, y))
        design = np.column_stack([X, np.ones(len(X))]) if intercept else X
        whole = np.vstack([params[0], params[1]]) if intercept else np.asarray(params)
        z = design @ whole
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        coupling = np.diag(p.mean(0)) - p.T @ p / len(p)
        mean = np.trace(coupling) / 3
        curvatures = (1 - (p**2).sum(1)) / 3
        gram = (design * curvatures[:, None]).T @ design / len(p)
        # On top, a thousandth of what each column would weigh, were all its rows as large as the largest.
        gram += 1e-3 * curvatures.mean() * np.diag((design**2).max(0))
        hessian = np.kron(gram, coupling / mean + 1 / 4 + 0.1 * np.eye(4))
        vector = np.random.default_rng(1).standard_normal(whole.shape)
        given = (jnp.asarray(vector[:-1]), jnp.asarray(vector[-1])) if intercept else jnp.asarray(vector)
        assert state.preconditioner is not None
        found = _gram.apply(state.preconditioner, given)
        found = np.vstack([found[0], found[1]]) if intercept else found
        np.testing.assert_allclose(found.ravel(), np.linalg.solve(hessian, vector.ravel()), rtol=1e-8)


@pytest.mark.parametrize("num_classes", [1, 3])
def test_a_class_that_nothing_tells_makes_no_nan(num_classes: int) -> None:
    """Where one class is certain for all rows, nothing bends."""
    sure = jnp.zeros((num_classes, num_classes))
    np.testing.assert_array_equal(_gram._of_outputs(sure), np.eye(num_classes))
    nan = jnp.full((num_classes, num_classes), jnp.nan)
    np.testing.assert_array_equal(_gram._of_outputs(nan), np.eye(num_classes))


def test_what_tells_classes_apart_saves_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty classes, some much rarer than others."""
    rng = np.random.default_rng(0)
    X, coef = rng.standard_normal((3000, 30)), rng.standard_normal((30, 50))
    y = np.argmax(X @ coef + 2 * rng.gumbel(size=(3000, 50)) - 3 * np.log1p(np.arange(50)), 1)
    data = X.astype(np.float32), y.astype(np.int32)
    solver = px.solve.LBFGS(px.solve.objective.l2_multiclass_logreg, tol=1e-4, precondition="gram")

    def state() -> Any:
        jax.clear_caches()
        return solver.run(jnp.zeros((30, 50)), 1e-2 / 3000, data).state

    found = state()
    monkeypatch.setattr(_gram, "_of_outputs", lambda coupling: jnp.eye(len(coupling), dtype=coupling.dtype))
    alike = state()
    jax.clear_caches()
    assert found.status == alike.status == px.solve.Status.CONVERGED
    assert found.iter_num < 0.9 * alike.iter_num


def test_a_direction_reads_the_inverse_once() -> None:
    """The gradient and its last change are multiplied with it together, as reading it is what takes long."""
    X, y, params = _draw(400, 150, 3, False)
    X, params = X.astype(np.float32), params.astype(jnp.float32)
    solver = px.solve.LBFGS(px.solve.objective.multiclass_logreg, precondition="gram")
    state = solver.init_state(params, (X, y))
    text = jax.jit(solver.update).lower(params, state, (X, y)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line and "tensor<150x150xf32>" in line]
    assert len(products) == 1
