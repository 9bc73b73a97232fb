"""What estimators and solvers do with what cannot be: they say so, and stay as they were."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax.sharding import AxisType
from sklearn.model_selection import LeaveOneOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import paraxis as px
from paraxis.solve import objective
from tests.solve._problems import in_float64

X = np.random.default_rng(0).normal(size=(30, 3))
Y = (X[:, 0] > 0).astype(int)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: px.solve.LogisticRegression().fit(X, Y, 0.0), ValueError, "sample_weight must not be negative"),
        (lambda: px.solve.Ridge().fit(X, Y, -1.0), ValueError, "sample_weight must not be negative, nor all zero"),
        (lambda: px.solve.LogisticRegression(class_weight={0: 0.0}).fit(X, Y), ValueError, "for two classes"),
        (lambda: px.solve.LogisticRegression(class_weight={0: -1.0}).fit(X, Y), ValueError, "must be finite, not"),
        (
            lambda: px.solve.cross_validate_path(px.solve.Ridge(), X[:4], Y[:4], [1.0], LeaveOneOut()),
            ValueError,
            "no finite",
        ),
        (
            lambda: px.solve.cross_validate_path(make_pipeline(StandardScaler()), X, Y, [1.0]),  # pyright: ignore
            TypeError,
            "estimator must be one of px.solve, got Pipeline",
        ),
    ],
    ids=["no weight", "negative", "one class left", "negative factor", "one row held out", "a pipeline"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_what_cannot_be_fitted_is_said(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.slow
def test_a_fit_that_fails_leaves_the_estimator_as_it_was() -> None:
    model = px.solve.LogisticRegression().fit(X, Y)
    before = {name: np.array(value) for name, value in vars(model).items()}
    letters = np.array(["a", "b"])[Y]
    with pytest.raises(ValueError, match="sample_weight"):
        model.fit(X[:, :2], letters, -np.ones(30))
    model.path(X, letters, [1.0])
    assert vars(model).keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(np.array(vars(model)[name]), value, err_msg=name)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("devices", [None, 2])
def test_a_mesh_that_is_set_may_have_any_names(kind: AxisType, devices: int | None) -> None:
    expected = px.solve.Ridge(devices=1).fit(X, Y).coef_
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))):
        found = px.solve.Ridge(devices=devices).fit(X, Y).coef_
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fun", "targets"),
    [
        (objective.multiclass_logreg, np.arange(30) % 3 + 1),
        (objective.multiclass_logreg, np.arange(30) % 3 - 1),
        (objective.multiclass_logreg, np.arange(30) % 3 + 0.5),
        (objective.binary_logreg, 2 * Y - 1),
        (objective.poisson, -np.ones(30)),
    ],
    ids=["from 1", "-1", "halves", "-1 and 1", "negative counts"],
)
def test_targets_without_an_output_are_said(fun: Any, targets: np.ndarray) -> None:
    params = jnp.zeros((3, 3) if fun is objective.multiclass_logreg else 3)
    for solver in (px.solve.LBFGS(fun), px.solve.NewtonCG(fun), px.solve.GradientDescent(fun)):
        for call in (solver.run, solver.init_state):
            with pytest.raises(ValueError, match="y must be "):
                call(params, (jnp.asarray(X, "float32"), jnp.asarray(targets)))
    weight = jnp.zeros(30).at[0].set(1)
    if targets[0] in (0, 1) or (fun is objective.multiclass_logreg and targets[0] == 1):
        px.solve.LBFGS(fun).init_state(params, (jnp.asarray(X, "float32"), jnp.asarray(targets), weight))


@in_float64
def test_parameters_narrower_than_the_rows_are_said() -> None:
    with pytest.raises(ValueError, match=r"init_params are float32, and X is float64.*dtype=X\.dtype"):
        px.solve.LBFGS(objective.binary_logreg).run(jnp.zeros(3, "float32"), (jnp.asarray(X), jnp.asarray(Y)))


def test_no_rows_are_said() -> None:
    with pytest.raises(ValueError, match=r"X must have at least one row, got \(0, 3\)"):
        px.solve.LBFGS(objective.binary_logreg).run(jnp.zeros(3), (jnp.zeros((0, 3)), jnp.zeros(0)))
    with pytest.raises(ValueError, match="y must be numbers"):
        px.solve.rows(X, np.array(["a", "b", "c"] * 10))


@pytest.mark.parametrize("options", [{"decrease_factor": 2.0}, {"curvature_factor": 1.5}, {"curvature_factor": 0.0}])
def test_factors_of_a_search_in_the_wrong_order_are_said(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="decrease_factor must be below curvature_factor"):
        px.solve.LBFGS(objective.binary_logreg, **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("kind", "name", "value", "text"),
    [
        (px.solve.LBFGS, "tol", "a", "LBFGS: tol must be a number, got 'a'; write tol=1e-05"),
        (px.solve.LBFGS, "tol", None, "LBFGS: tol must be a number, got None; write tol=1e-05"),
        (px.solve.LBFGS, "history_size", 2.5, "LBFGS: history_size must be a whole number, got 2.5; write history"),
        (px.solve.LBFGS, "max_stepsize", "a", "LBFGS: max_stepsize must be a number, got 'a'; leave max_stepsize out"),
        (px.solve.LBFGS, "curvature_factor", "a", "LBFGS: curvature_factor must be a number, got 'a'; leave"),
        (px.solve.NewtonCG, "maxiter", 2.5, "NewtonCG: maxiter must be a whole number, got 2.5; write maxiter=100"),
        (px.solve.NewtonCG, "maxcg", True, "NewtonCG: maxcg must be a whole number, got True; write maxcg=100"),
        (px.solve.GradientDescent, "maxls", "3", "GradientDescent: maxls must be a whole number, got '3'; write"),
        (px.solve.ProximalGradient, "stepsize", "a", "ProximalGradient: stepsize must be a number, got 'a'; write"),
    ],
)
def test_an_option_of_the_wrong_type_is_said(kind: Any, name: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        kind(objective.binary_logreg, **{name: value})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (px.solve.LogisticRegression("1"), "LogisticRegression: C must be a number, got '1'; write C=1.0"),  # pyright: ignore
        (px.solve.LogisticRegression(l1_ratio="a"), "l1_ratio must be a number, got 'a'; write l1_ratio=0.0"),  # pyright: ignore
        (px.solve.Ridge("1"), "Ridge: alpha must be a number, got '1'; write alpha=1.0"),  # pyright: ignore
        (px.solve.Ridge(tol="a"), "Ridge: tol must be a number, got 'a'; write tol=1e-12"),  # pyright: ignore
        (px.solve.Lasso(max_iter=2.5), "Lasso: max_iter must be a whole number, got 2.5; write max_iter=10000"),  # pyright: ignore
        (px.solve.Ridge(devices=1.5), "Ridge: devices must be a whole number, got 1.5; leave devices out"),  # pyright: ignore
    ],
)  # fmt: skip
def test_a_parameter_of_the_wrong_type_is_said(model: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        model.fit(X, Y)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [px.solve.LBFGS, px.solve.NewtonCG, px.solve.GradientDescent])
def test_solvers_can_be_pickled_after_a_run(kind: Any) -> None:
    data = jnp.asarray(X, "float32"), jnp.asarray(Y)
    solver = kind(objective.glm("logistic", l2=True))
    params, _ = solver.run(jnp.zeros(3), 0.1, data)
    again, _ = pickle.loads(pickle.dumps(solver)).run(jnp.zeros(3), 0.1, data)
    np.testing.assert_array_equal(params, again)


@pytest.mark.slow
def test_a_state_is_shown_on_a_line_and_a_batch_has_no_single_reason() -> None:
    data = jnp.asarray(X, "float32"), jnp.asarray(Y)
    solver = px.solve.LBFGS(objective.glm("logistic", l2=True))
    _, state = solver.run(jnp.zeros(3), 0.1, data)
    assert repr(state).startswith("LBFGSState(CONVERGED, iter_num=")
    assert "\n" not in repr(state)
    states = jax.jit(jax.vmap(lambda l2: solver.run(jnp.zeros(3), l2, data)[1]))(jnp.array([0.1, 1.0]))
    assert len(repr(states)) < 200
    with pytest.raises(ValueError, match=r"state of a batch of problems \(2,\)"):
        _ = states.reason


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"X": X * np.nan}, r"Ridge: X must be numbers \(n, d\): Input X contains NaN"),
        ({"y": np.array(["a"] * 30)}, r"Ridge: y must be targets, one per row of X: 'a' is no number .*; write px"),
        ({"y": np.array([1.5] * 29 + ["b"], object)}, r"Ridge: y must be targets, .*: 'b' is no number .*; write px\."),
        ({"y": np.array(["1"] * 30)}, r"Ridge: y must be targets, .*: '1' is no number .*; write np.*astype\(float\)"),
        ({"sample_weight": ["a"] * 30}, r"Ridge: sample_weight must be numbers \(n,\): 'a' is no number .*; write np"),
        ({"sample_weight": "balanced"}, r"Ridge: sample_weight must be .*: 'balanced' is no .*class_weight='balanced'"),
        ({"y": Y[:5]}, "Ridge: y must be targets, one per row of X: .*inconsistent numbers"),
        ({"sample_weight": Y.astype("M8[D]")}, r"Ridge: sample_weight must be numbers \(n,\): datetime\..* is no"),
    ],
)  # fmt: skip
def test_what_scikit_learn_refuses_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        px.solve.Ridge().fit(**{"X": X, "y": Y, **given})


LABELS = np.array([2**60 + 10, 2**60 + 11, 7])[np.arange(30) % 3]


@pytest.mark.parametrize(
    "y",
    [LABELS.astype(float), pd.Series(LABELS, dtype="Int64"), np.array([2**24, 2**24 + 1, 7], "float32")[Y.astype(int)]],
    ids=["floats", "pandas", "float32"],
)
def test_labels_of_which_floats_are_several_are_refused(y: Any) -> None:
    with pytest.raises(px.DataError, match=r"LogisticRegression: y holds labels such as \d{8,} as float.*np\.int64"):
        px.solve.LogisticRegression().fit(X, y)


def test_labels_of_a_csv_file_of_which_floats_are_several_are_refused(tmp_path: Path) -> None:
    rows = [f"{a},{b},{label}" for (a, b, *_), label in zip(X.tolist(), LABELS.tolist(), strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,y", *rows, ""]))
    table = px.Table.csv(tmp_path, target="y")
    with pytest.raises(px.DataError, match="LogisticRegression: y holds labels such as"):
        px.solve.LogisticRegression().fit(table, engine=px.Stream(at_once=8))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integer_labels_of_any_size_are_told_apart(dtype: str) -> None:
    y = LABELS.astype(dtype)
    model = px.solve.LogisticRegression().fit(X, y)
    assert model.classes_.tolist() == sorted({*LABELS.tolist()})
    assert model.classes_.dtype == dtype


@pytest.mark.parametrize("known", ["text", "numbers"])
def test_labels_of_another_kind_than_the_models_are_told_with_both(known: str, tmp_path: Path) -> None:
    texts = {"text": "x,y\n1,007\n2,12\n3,5\n4,007\n", "numbers": "x,y\n1,7\n2,12\n3,5\n4,7\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    engine, tables = px.Stream(at_once=2), {name: px.Table.csv(tmp_path / f"{name}.csv", target="y") for name in texts}
    model = px.solve.LogisticRegression().fit(tables.pop(known), engine=engine)
    ((_, other),) = tables.items()
    with pytest.raises(TypeError, match=r"target 'y' must be .*: the model knows labels such as .*, and these are"):
        model.score(other, engine=engine)
    with pytest.raises(TypeError, match=r"y must be .*: the model knows labels such as .*; write text for both"):
        model.score(np.ones((2, 1)), np.array([5, 12] if known == "text" else ["007", "5"]))
