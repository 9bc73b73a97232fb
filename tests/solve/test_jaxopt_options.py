"""Options and arguments of JAXopt's solvers: those that ask for what ours do are taken, the others refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.solve import Status, objective

SOLVERS: tuple[Any, ...] = (px.solve.LBFGS, px.solve.GradientDescent, px.solve.ProximalGradient, px.solve.NewtonCG)
TAKEN: dict[str, Any] = {"implicit_diff": True, "implicit_diff_solve": None, "jit": True, "unroll": "auto",
                         "use_gamma": True, "stop_if_linesearch_fails": False, "condition": None}  # fmt: skip
REFUSED: dict[str, tuple[Any, str]] = {
    "implicit_diff": (False, "loop of update"),
    "implicit_diff_solve": (lambda matvec, b: b, "conjugate gradients"),
    "jit": (False, "loop of update"),
    "unroll": (True, "loop of update"),
    "use_gamma": (False, "scale of the last step"),
    "linesearch_init": ("increase", "begins with the step 1, or near the last one"),
    "min_stepsize": (1e-6, "any size"),
    "increase_factor": (2.0, "how much further"),
    "stop_if_linesearch_fails": (True, "state.status"),
    "condition": ("wolfe", "linesearch='zoom'"),
}


def _bowl(p: Any) -> Any:
    return jnp.sum((p - 1) ** 2)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_ours_do_anyway_is_taken(solver: Any) -> None:
    assert solver(_bowl, **TAKEN) == solver(_bowl)


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name(name: str) -> None:
    value, words = REFUSED[name]
    for solver in SOLVERS:
        with pytest.raises(ValueError, match=rf"^{solver.__name__}: {name} cannot be .*{words}.* Leave {name} out$"):
            solver(_bowl, **{name: value})
    with pytest.raises(TypeError, match="LBFGS: there is no argument 'implict'"):
        SOLVERS[0](_bowl, implict=True)


def test_a_run_may_begin_with_what_another_one_returned() -> None:
    solver = px.solve.LBFGS(_bowl, tol=1e-4)
    found = solver.run(jnp.zeros(3))
    assert isinstance(found, px.solve.OptStep)
    params, state = solver.run(found)
    assert (int(state.status), int(state.iter_num)) == (Status.CONVERGED, 0)
    np.testing.assert_array_equal(params, found.params)


@pytest.mark.slow
def test_wider_data_than_parameters_leave_the_parameters_dtype() -> None:
    x, y = np.eye(3), np.array([1.0, 2.0, 3.0])

    def fun(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ p - y) ** 2)

    with jax.enable_x64(True):
        start = jnp.zeros(3, "float32")
        params, state = px.solve.LBFGS(fun, tol=1e-4).run(start, x, y)
        assert (params.dtype, state.value.dtype, int(state.status)) == ("float32", "float32", Status.CONVERGED)
        np.testing.assert_allclose(params, y, rtol=1e-3)
        narrow = jnp.asarray(x, "float32"), y, np.ones(3)  # targets, weights and penalty may be wider
        params, state = px.solve.LBFGS(objective.ridge, tol=1e-4).run(start, np.float64(1e-6), narrow)
        assert (params.dtype, int(state.status)) == ("float32", Status.CONVERGED)
        with pytest.raises(px.ShapeError, match=r"init_params are float32, and X is float64.*dtype=X\.dtype"):
            px.solve.LBFGS(objective.ridge).run(jnp.zeros(3, "float32"), 1e-6, (x, y))
