"""No public face: what large data choose, small ones show only where the thresholds are lowered, which are private.

The laws of small data hold there as well: the answer does not depend on the devices, on how the user's mesh is typed,
nor on how rows and columns lie over it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.linear_model
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.solve import _linear, _losses, _working_set
from paraxis.solve.estimators import _fitting
from tests.solve._problems import softmax

KINDS = {"A": AxisType.Auto, "E": AxisType.Explicit}


def _mesh(shape: tuple[int, ...], types: str) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("rows", "columns")[: len(shape)], axis_types=tuple(KINDS[kind] for kind in types))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces products took while small rows are large ones."""
    found, count = list[int](), _linear._num_pieces
    monkeypatch.setattr(_linear, "_PIECE", 512)
    monkeypatch.setattr(_linear, "_WIDE", 1)

    def noted(*given: Any) -> int:
        found.append(count(*given))
        return found[-1]

    monkeypatch.setattr(_linear, "_num_pieces", noted)
    return found


ROWS, BOTH, COLUMNS = P("rows"), P("rows", "columns"), P(None, "columns")


@pytest.mark.parametrize("outputs", [0, 3])
@pytest.mark.parametrize(
    ("shape", "types", "spec"),
    [
        *(((2, 4), types, spec) for types in ("EE", "AE", "AA") for spec in (BOTH, COLUMNS)),
        *(((2, 4), "EE", spec) for spec in (P("columns", "rows"), P(("rows", "columns")))),
        *(((3,), types, ROWS) for types in "AE"),
    ],
    ids=str,
)
def test_gradients_in_pieces_wherever_rows_and_columns_lie(
    shape: tuple[int, ...], types: str, spec: P, outputs: int, pieces: list[int]
) -> None:
    n, d = 99 if len(shape) == 1 else 64, 24  # no other number of devices that pieces would have to allow for
    draw = np.random.default_rng(n)
    x, y = draw.normal(size=(n, d)).astype(np.float32), draw.integers(0, outputs or 2, n).astype(np.int32)
    coef = draw.normal(size=(d, outputs) if outputs else d).astype(np.float32) / 5
    mesh = _mesh(shape, types)
    data = jax.device_put(x, NamedSharding(mesh, spec)), jax.device_put(y, NamedSharding(mesh, P(*spec[:1])))
    solver = px.solve.LBFGS(px.solve.objective.glm("softmax" if outputs else "logistic", l2=True), precondition=None)
    state = jax.jit(solver.init_state)(jnp.asarray(coef), 0.1, data)
    z = x.astype(float) @ coef
    r = softmax(z) - np.eye(outputs)[y] if outputs else 1 / (1 + np.exp(-z)) - y
    np.testing.assert_allclose(state.grad, x.T @ r / n + 0.1 * coef, rtol=0, atol=2e-6)
    assert max(pieces) > 1


CLASSES = 24


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("name", ["softmax", "lasso"])
def test_fits_of_what_is_large_are_scikit_learns(
    name: str, devices: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means on the devices, a number of rows that is filled up there only, many classes, gradients in pieces."""
    monkeypatch.setattr(_fitting, "_FEW", 0)
    monkeypatch.setattr(_fitting, "_LARGE", 0)
    draw = np.random.default_rng(5)
    n, d = 6 * CLASSES + 1, 5
    x, weight = draw.normal(size=(n, d)) + 3 * draw.normal(size=d), draw.uniform(0.1, 2, n)
    if name == "softmax":
        assert CLASSES > _losses._FEW
        y = np.arange(n) % CLASSES
        ours = px.solve.LogisticRegression(C=0.1, tol=1e-9, devices=devices)
        theirs = sklearn.linear_model.LogisticRegression(C=0.1, tol=1e-12, solver="newton-cholesky")
    else:
        y = x @ draw.normal(size=d) + draw.normal(size=n)
        ours = px.solve.Lasso(0.1, tol=1e-12, devices=devices)
        theirs = sklearn.linear_model.Lasso(0.1, tol=1e-14)
    found, expected = ours.fit(x, y, sample_weight=weight), theirs.fit(x, y, sample_weight=weight)
    np.testing.assert_allclose(found.coef_, expected.coef_, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.intercept_, expected.intercept_, rtol=0, atol=1e-5)
    assert pieces


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working sets of few columns, which are factored in parts as large ones are."""
    monkeypatch.setattr(_working_set, "_SMALLEST", 16)
    monkeypatch.setattr(_working_set, "_FEWEST", 4)
    monkeypatch.setattr(_working_set, "_sizes_of_factors", lambda size: [size // 2, size])
    _working_set._renewing.cache_clear()


@pytest.mark.usefixtures("small_sets")
@pytest.mark.parametrize("most", [64, 8])
def test_working_sets_that_grow_and_those_that_do_not_hold_all_that_is_not_zero(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_working_set, "_LARGEST", most)
    draw = np.random.default_rng(1)
    x = draw.normal(size=(97, 41))
    y = x[:, :20] @ draw.normal(size=20) + draw.normal(size=97)
    expected = sklearn.linear_model.Lasso(0.1, tol=1e-14, max_iter=10**6).fit(x, y)
    assert (expected.coef_ != 0).sum() > 8
    found = px.solve.Lasso(0.1, tol=1e-10, devices=3).fit(x, y)
    assert found.status_ == px.solve.Status.CONVERGED.words
    np.testing.assert_allclose(found.coef_, expected.coef_, rtol=0, atol=1e-5)
