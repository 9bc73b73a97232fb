"""Rows on disk: the answers are those of the same rows in memory, and the passes over them are few."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import sklearn
from jax.sharding import Mesh

import paraxis as px
from paraxis.solve import Status, objective
from tests.test_estimators import NEWTON, PRECISE, SAGA, pair

rng = np.random.default_rng(0)
N, D = 203, 4
X = rng.normal(size=(N, D)) * [1, 3, 0.2, 1] + [0, 1, 5, 0]
Z = (X - X.mean(0)) / X.std(0) @ [1.0, -2.0, 0.5, 0.0] + rng.normal(size=N)
STREAM = px.Stream(at_once=5)  # on eight devices: 40 rows at a time, and 3 at the end


class Counting:
    """Arrays as a source, which keeps the sizes of the blocks of each pass."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self._X, self._y = X, y
        self.columns = [f"x{number}" for number in range(X.shape[1])]
        self.target, self.dtype = "y", X.dtype
        self.passes: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._X)

    def blocks(self, size: int) -> Iterator[tuple[Any, Any]]:
        sizes: list[int] = []
        self.passes.append(sizes)
        for start in range(0, len(self), size):
            sizes.append(len(self._X[start : start + size]))
            yield self._X[start : start + size], self._y[start : start + size]


def table(y: np.ndarray, x: np.ndarray = X) -> tuple[px.Table, Counting]:
    source = Counting(x, y)
    return px.Table(source), source


CLASSES = np.where(Z > 0, "yes", "no")
ESTIMATORS = {
    "ridge": pair("Ridge", Z, {}, alpha=2.0),
    "two classes": pair("LogisticRegression", CLASSES, NEWTON, C=0.5),
    "counts": pair("PoissonRegressor", rng.poisson(np.exp(Z / 3)), NEWTON, alpha=0.1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_table_is_fitted_as_scikit_learn_fits_it_in_memory_in_few_passes(name):
    ours, theirs, y = ESTIMATORS[name]
    rows, source = table(y)
    ours.fit(rows, engine=STREAM)
    theirs.fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-5)
    np.testing.assert_allclose(ours.score(px.Table.of_arrays(X, y)), theirs.score(X, y), rtol=1e-6)
    assert ours.status_ == Status.CONVERGED.words
    assert ours.data_passes_ == len(source.passes)
    assert len(source.passes) <= 2 * int(np.max(ours.n_iter_)) + 4
    if name == "ridge":  # with the Hessian itself, which one of them gives
        assert ours.n_iter_ <= 5
    assert {sum(sizes) for sizes in source.passes} == {N}
    assert max(max(sizes) for sizes in source.passes) <= 48


SPARSE = {
    "lasso": pair("Lasso", Z, PRECISE, alpha=0.2),
    "elastic net": pair("ElasticNet", Z, PRECISE, alpha=0.3),
    "sparse classes": pair("LogisticRegression", CLASSES, SAGA, C=0.1, l1_ratio=1.0),
}


@pytest.mark.parametrize(("name", "weighted"), [("lasso", True), ("elastic net", False), ("sparse classes", True)])
def test_table_is_fitted_with_the_zero_coefficients_of_scikit_learn(name, weighted):
    ours, theirs, y = SPARSE[name]
    weight = np.random.default_rng(1).integers(0, 3, N).astype(float) if weighted else None
    rows, source = table(y)
    ours.fit(rows, sample_weight=weight, engine=STREAM)
    theirs.fit(X, y, weight)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=0, atol=1e-8)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(ours.coef_ == 0, theirs.coef_ == 0)
    assert 0 < np.sum(ours.coef_ == 0) < D
    assert (ours.status_, ours.data_passes_) == (Status.CONVERGED.words, len(source.passes))
    assert len(source.passes) == 2 + ours.n_iter_ <= 10  # targets, the start, and where each iteration led


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_table_has_the_predictions_of_its_rows_and_is_read_once(name):
    ours, _, y = ESTIMATORS[name]
    model = sklearn.base.clone(ours).fit(X, y)
    methods = ["predict"]
    if name == "two classes":
        methods += ["decision_function", "predict_proba", "predict_log_proba"]
    for method in methods:
        rows, source = table(y)
        found = getattr(model, method)(rows)
        expected = getattr(model, method)(X)
        assert (found.dtype, found.shape, source.passes) == (expected.dtype, expected.shape, [[N]])
        np.testing.assert_allclose(found, expected, rtol=1e-12) if found.dtype.kind == "f" else None
        np.testing.assert_array_equal(found, expected) if found.dtype.kind != "f" else None
    weight = np.random.default_rng(2).integers(0, 3, N)
    rows, source = table(y.astype(object) if name == "two classes" else y)  # as files give text
    np.testing.assert_allclose(model.score(rows, sample_weight=weight), model.score(X, y, weight))
    assert source.passes == [[N]]


def test_table_has_the_columns_of_the_fit_by_name_and_in_order(tmp_path):
    pa, arrow_csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    names, double = ["a", "b", "c", "d"], np.asarray(X)
    for kind, order in (("fitted", names), ("turned", names[::-1]), ("other", ["a", "x", "c", "d"])):
        columns = dict(zip(order, double[:, [3, 2, 1, 0] if kind == "turned" else [0, 1, 2, 3]].T, strict=True))
        arrow_csv.write_csv(pa.table({**columns, "y": double[:, 0]}), tmp_path / f"{kind}.csv")
    tables = {kind: px.Table.csv(tmp_path / f"{kind}.csv", target="y") for kind in ("fitted", "turned", "other")}
    model = px.solve.Ridge().fit(tables["fitted"], engine=STREAM)
    assert list(model.feature_names_in_) == names
    score = model.score(tables["fitted"])
    for kind, what in (("turned", "'d', 'c', 'b', 'a'"), ("other", "'a', 'x', 'c', 'd'")):
        with pytest.raises(px.DataError, match=rf"was fitted to columns .*, got \[{what}\]; .*columns=list\(model"):
            model.score(tables[kind])
    chosen = px.Table.csv(tmp_path / "turned.csv", target="y", columns=list(model.feature_names_in_))
    assert model.score(chosen) == score
    assert model.score(px.Table.of_arrays(double, double[:, 0])) == score


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "at_once"), [(1, 29), (1, 203), (3, 10), (8, 1)])
def test_table_has_value_and_gradient_whatever_chunks_and_devices(devices, at_once):
    rng = np.random.default_rng(2)
    axis = px.Axis("rows", N, mesh=Mesh(np.array(jax.devices()[:devices]), ("rows",)))
    weight = rng.integers(0, 3, N)
    y = np.digitize(Z, [-1, 1])
    fun = objective.glm("softmax", intercept=True, l2=True)
    params = rng.normal(size=(D, 3)).astype("float32"), np.zeros(3, "float32")
    x = X.astype("float32")
    data = px.solve.rows(table(y, X)[0], sample_weight=weight, engine=px.Stream(at_once=at_once), axis=axis)
    assert (data.X.num_rows, data.X.dtype) == (N, np.float32)  # as of a float64 array in memory
    value, expected = jax.jit(jax.value_and_grad(fun))(params, 0.1, (x, y, weight.astype("float32")))
    np.testing.assert_allclose(fun(params, 0.1, data), value, rtol=1e-6)
    gradient = px.solve.LBFGS(fun).init_state(params, 0.1, data).grad
    for ours, theirs in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_table_refuses_what_cannot_be_fitted():
    rows, _ = table(Z)
    ridge, fun = px.solve.Ridge(), objective.least_squares
    for call, error, text in (
        (lambda: ridge.fit(rows), TypeError, r"Ridge: a table is read in parts.*=px\.Stream\(memory='2GB'\)"),
        (lambda: ridge.fit(rows, Z, engine=STREAM), TypeError, "y must be left out, as the table has it"),
        (lambda: ridge.fit(table(Z[:0], X[:0])[0], engine=STREAM), px.DataError, "must have at least one row"),
        (lambda: fun(fun.init(D), rows), TypeError, r"of a table, write px\.solve\.rows\(table, engine="),
    ):
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(ValueError, match=r"memory must be at least [\d,]+ bytes for this table, of .*; write ") as told:
        ridge.fit(rows, engine=px.Stream(memory="1KB"))
    ridge.fit(rows, engine=px.Stream(memory=int(str(told.value).rpartition("memory=")[2][:-1])))
