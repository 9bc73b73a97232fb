"""The initial Hessian of a linear problem, beside NumPy's inverse and JAX's derivatives; and when it is made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import LBFGS, Status, _gram, objective
from tests._problems import labelled, softmax
from tests._support import axis_on, compilations, table


@pytest.mark.parametrize(("intercept", "where"), table([(True, "in jit")], [(True, "here"), (False, "here")]))
def test_lbfgs_preconditions_with_the_inverse_of_the_kronecker_product(intercept: bool, where: str) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        X, y = rng.standard_normal((600, 100)), rng.integers(0, 4, 600)  # all are used, in a block and a rest
        coef, bias = rng.standard_normal((100, 4)) / 9, rng.standard_normal(4) * intercept
        params = (jnp.asarray(coef), jnp.asarray(bias)) if intercept else jnp.asarray(coef)
        init = LBFGS(objective.glm("softmax", intercept=intercept), precondition="gram").init_state
        state: Any = (init if where == "here" else jax.jit(init))(params, (X, y))
        design = np.column_stack([X, np.ones(600)]) if intercept else X
        p = softmax(X @ coef + bias)
        coupling, curvatures = np.diag(p.mean(0)) - p.T @ p / 600, (1 - (p**2).sum(1)) / 3
        gram = (design * curvatures[:, None]).T @ design / 600
        # On top, a thousandth of what columns would weigh, were all rows as large as the largest.
        gram += 1e-3 * curvatures.mean() * (design**2).max(0).mean() * np.eye(len(gram))
        hessian = np.kron(gram, coupling / (np.trace(coupling) / 3) + 1 / 4 + 0.1 * np.eye(4))
        vector = rng.standard_normal((design.shape[1], 4))
        given = (vector[:-1], vector[-1]) if intercept else vector
        found = _gram.apply(state.preconditioner, given)
        found = np.vstack([found[0], found[1]]) if intercept else found
        np.testing.assert_allclose(found.ravel(), np.linalg.solve(hessian, vector.ravel()), rtol=1e-8)


def _steps(data: Any, precondition: Any) -> Any:
    solver = LBFGS(objective.l2_multiclass_logreg, precondition=precondition, tol=1e-4)
    return solver.run(jnp.zeros((20, 3)), 1e-3, data).state


def test_lbfgs_preconditions_where_it_saves_iterations_and_only_there() -> None:
    x, y = labelled(2000, 20, 3)
    alike = px.solve.rows(x.astype("float32"), y, axis=axis_on(2, 2000))
    apart = alike._replace(X=alike.X * np.logspace(0, 2, 20).astype("float32"))
    with compilations() as compiled:
        assert _steps(alike, "auto").preconditioner is None
    assert "_inverse" not in str(compiled)
    found, without = _steps(apart, "auto"), _steps(apart, None)
    assert found.status == Status.CONVERGED
    assert found.preconditioner is not None
    assert int(found.iter_num) < 0.3 * int(without.iter_num)


def test_lbfgs_preconditions_rows_that_return_in_equal_steps_as_in_any_order() -> None:
    (x, y), order = labelled(600, 20, 3), np.random.default_rng(0).permutation(600)
    x = np.concatenate([x[:, 5:] * np.logspace(0, 1.5, 15), 5 * np.eye(5)[np.arange(600) % 5]], 1).astype("float32")
    found, expected = (int(_steps((x[rows], y[rows]), "gram").iter_num) for rows in (np.arange(600), order))
    assert found <= 1.3 * expected


def test_lbfgs_calls_no_lapack() -> None:
    """Its threads and XLA's would wait for each other: of several problems, or on several devices, for ever."""
    x, y = labelled(90, 70, 3)
    solver = LBFGS(objective.l2_multiclass_logreg, precondition="gram")
    run = jax.jit(jax.vmap(solver.run, (None, 0, None)))
    text = run.lower(jnp.zeros((70, 3)), jnp.array([0.1, 0.2]), (x.astype("float32"), y)).as_text()
    assert "lapack" in jax.jit(jnp.linalg.inv).lower(jnp.eye(3)).as_text()
    assert "lapack" not in text
