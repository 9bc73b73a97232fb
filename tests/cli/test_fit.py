"""``paraxis fit`` finds what scikit-learn finds, and its files are there whole or not at all."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as arrow_parquet
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, LogisticRegression, PoissonRegressor, Ridge
from sklearn.metrics import accuracy_score, log_loss, mean_poisson_deviance, r2_score, root_mean_squared_error
from sklearn.model_selection import GridSearchCV, KFold, train_test_split
from sklearn.preprocessing import StandardScaler

import paraxis as px
from paraxis.cli import main
from tests._support import at_night
from tests.cli._files import NUM_ROWS, NUMBERS, columns, complaints, everything, read, said, settled_by, write

STRENGTH = 0.02
DATA = columns()
WIDE = 200  # columns of the terminal: no table is cut


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDE))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "data.csv", DATA)


def ignoring(*kept: str) -> list[str]:
    return [part for name in DATA if name not in (*NUMBERS, *kept) for part in ("--ignore", name)]


QUICK = ["--target", "price", *ignoring("price"), "--penalty", "none", "--devices", 1]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fitted")
    file = write(directory / "data.csv", DATA)
    assert main([str(argument) for argument in ("fit", file, *QUICK, "--out", directory / "out")]) == 0
    return directory / "out"


def dealt(y: Any, classes: bool) -> tuple[Any, Any]:
    """Rows to fit to and rows held out, as scikit-learn deals them."""
    num_test = math.ceil(NUM_ROWS / 4)
    train, test = train_test_split(
        np.arange(NUM_ROWS), test_size=num_test, random_state=3, stratify=y if classes else None
    )
    return train, test


def design(rows: Any) -> tuple[np.ndarray, Any]:
    X = np.column_stack([DATA[name] for name in NUMBERS]).astype(np.float64)
    return X, StandardScaler().fit(X[rows])


def coefficients(out: Path) -> np.ndarray:
    """In the file's order, and with the intercepts first: ``(classes, 1 + columns)``."""
    found = read(out / "coefficients.csv")
    labels = list(dict.fromkeys(row.get("class", "") for row in found))
    values = [[float(row["coefficient"]) for row in found if row.get("class", "") == label] for label in labels]
    return np.array(values)


def in_own_units(model: Any, scaler: Any) -> np.ndarray:
    coef = np.atleast_2d(model.coef_) / scaler.scale_
    return np.concatenate([np.reshape(model.intercept_, (-1, 1)) - (coef @ scaler.mean_)[:, None], coef], 1)


N = NUM_ROWS - math.ceil(NUM_ROWS / 4)
EXACT: dict[str, Any] = {"tol": 1e-12, "max_iter": 100_000}
CASES: dict[str, tuple[str, list[str], Any]] = {
    "text": ("bought", [], LogisticRegression(C=1 / (STRENGTH * N), solver="newton-cholesky", **EXACT)),
    "integers": ("group", [], LogisticRegression(C=1 / (STRENGTH * N), solver="newton-cholesky", **EXACT)),
    "logistic, l1": (
        "bought", ["--penalty", "l1"], LogisticRegression(C=1 / (STRENGTH * N), l1_ratio=1.0, solver="saga", **EXACT),
    ),
    "squared, l2": ("price", [], Ridge(STRENGTH * N)),
    "squared, l1": ("price", ["--penalty", "l1"], Lasso(STRENGTH, **EXACT)),
    "squared, elastic net": (
        "price", ["--penalty", "elastic-net", "--l1-ratio", "0.3"], ElasticNet(STRENGTH, l1_ratio=0.3, **EXACT),
    ),
    "squared, elastic net without L1": (
        "price", ["--penalty", "elastic-net", "--l1-ratio", "0"], Ridge(STRENGTH * N),
    ),
    "squared, none": ("price", ["--penalty", "none"], LinearRegression()),
    "poisson": (
        "visits",
        ["--objective", "poisson"],
        PoissonRegressor(alpha=STRENGTH, solver="newton-cholesky", **EXACT),
    ),
}  # fmt: skip
OF_EVERY_DAY = ("text", "squared, l2")


@pytest.mark.parametrize(
    "case", [*OF_EVERY_DAY, *at_night((c for c in CASES if c not in OF_EVERY_DAY), len(CASES) - 2)]
)
def test_coefficients_and_metrics_are_those_of_scikit_learn(
    case: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, arguments, oracle = CASES[case]
    given = arguments if "none" in arguments else ["--strength", STRENGTH, *arguments]
    out = tmp_path / "out"
    held_out = ["--test-fraction", 0.25, "--seed", 3, "--devices", 2]
    status, text, err = said(capsys, "fit", file, "--target", name, *ignoring(name), *given, *held_out, "--out", out)
    assert (status, err) == (0, "")

    y = DATA[name]
    classes, counts = isinstance(oracle, LogisticRegression), isinstance(oracle, PoissonRegressor)
    train, test = dealt(y, classes)
    X, scaler = design(train)
    # A strength means the same whatever the targets' unit is: for scikit-learn, they are brought to one scale.
    origin, unit = (0.0, 1.0) if classes or counts else (y[train].mean(), y[train].std())
    oracle.fit(scaler.transform(X[train]), y[train] if classes else (y[train] - origin) / unit)
    if not classes:
        oracle.coef_, oracle.intercept_ = oracle.coef_ * unit, oracle.intercept_ * unit + origin
    expected = in_own_units(oracle, scaler)
    tolerance = 1e-4 if "l1" in case else 1e-6
    np.testing.assert_allclose(coefficients(out), expected, rtol=tolerance, atol=tolerance * np.abs(expected).min())

    dummy: Any = (DummyClassifier(strategy="prior") if classes else DummyRegressor()).fit(X[train], y[train])
    for model in (oracle, dummy):
        Z = scaler.transform(X[test])
        if classes:
            scores = [accuracy_score(y[test], model.predict(Z)), log_loss(y[test], model.predict_proba(Z))]
        elif counts:
            scores = [mean_poisson_deviance(y[test], model.predict(Z))]
        else:
            scores = [r2_score(y[test], model.predict(Z)), root_mean_squared_error(y[test], model.predict(Z))]
        assert [f"{score:.4g}" for score in scores if f"{score:.4g}" not in text] == []


WEIGHTED: dict[str, tuple[str, list[Any], Any]] = {
    "classes": ("bought", ["--class-weight", "balanced"], "balanced"),
    "two factors": ("group", ["--class-weight", "0=3", "--class-weight", "2=0.5"], {0: 3, 1: 1, 2: 0.5}),
    "values": ("price", [], None),
    "L1": ("price", ["--penalty", "l1"], None),
}


@pytest.mark.parametrize("case", ["classes", *at_night([case for case in WEIGHTED if case != "classes"], 3)])
def test_weights_are_those_of_scikit_learn(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments, class_weight = WEIGHTED[case]
    weight: Any = np.random.default_rng(2).integers(0, 4, NUM_ROWS) * 0.7
    file, out = write(tmp_path / "data.csv", {**DATA, "counts": weight}), tmp_path / "out"
    given = ["--target", name, *ignoring(name), "--weights", "counts", *arguments, "--strength", STRENGTH]
    held_out = ["--test-fraction", 0.25, "--seed", 3, "--devices", 2]
    status, text, err = said(capsys, "fit", file, *given, *held_out, "--out", out)
    assert (status, err) == (0, "")
    y, classes = DATA[name], name != "price"
    train, test = dealt(y, classes)
    X, scaler = design(train)
    w, origin, unit = weight[train], 0.0, 1.0
    if classes:
        totals = {label: w[y[train] == label].sum() for label in np.unique(y)}
        of_class: Any = class_weight
        if class_weight == "balanced":
            of_class = {label: sum(totals.values()) / len(totals) / total for label, total in totals.items()}
        both = w * [of_class[label] for label in y[train]]
        oracle: Any = LogisticRegression(C=1 / (STRENGTH * both.sum()), solver="newton-cholesky", **EXACT)
        oracle.fit(scaler.transform(X[train]), y[train], both)
    else:
        origin = np.average(y[train], weights=w)
        unit = np.sqrt(np.average((y[train] - origin) ** 2, weights=w))
        oracle = Lasso(STRENGTH, **EXACT) if case == "L1" else Ridge(STRENGTH * w.sum())
        oracle.fit(scaler.transform(X[train]), (y[train] - origin) / unit, sample_weight=w)
        oracle.coef_, oracle.intercept_ = oracle.coef_ * unit, oracle.intercept_ * unit + origin
    expected = in_own_units(oracle, scaler)
    np.testing.assert_allclose(coefficients(out), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).min())
    Z, counts = scaler.transform(X[test]), weight[test]
    if classes:
        scores = [accuracy_score(y[test], oracle.predict(Z), sample_weight=counts)]
        scores += [log_loss(y[test], oracle.predict_proba(Z), sample_weight=counts)]
    else:
        scores = [r2_score(y[test], oracle.predict(Z), sample_weight=counts)]
    assert [f"{score:.4g}" for score in scores if f"{score:.4g}" not in text] == []


def passes(file: Path) -> int:
    """Over the data of the report, with the test at the end, as the state of the solver tells."""
    frame = read(file)
    train, _ = train_test_split(
        np.arange(NUM_ROWS), test_size=12, random_state=0, stratify=[row["bought"] for row in frame]
    )
    X = np.column_stack(
        [*(DATA[name] for name in NUMBERS), *(DATA["city"] == city for city in np.unique(DATA["city"]))]
    )
    X = StandardScaler().fit_transform(X[train].astype(np.float64))
    model = px.solve.LogisticRegression(48.0 / 48, tol=1e-9, max_iter=10_000, devices=3)
    return model.fit(X, DATA["bought"][train]).data_passes_


@pytest.mark.slow
def test_a_report_tells_what_was_done(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(file, {**DATA, "constant": [1] * NUM_ROWS})
    out = tmp_path / "new" / "out"
    arguments = ["--text", "one-hot", *ignoring("city", "bought"), "--devices", 3, "--out", out]
    status, text, err = said(capsys, "fit", file, "--target", "bought", *arguments)
    assert (status, err) == (0, "")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["coefficients.csv", "fit.png", "model.npz", "report.html"]
    assert (out / "fit.png").read_bytes().startswith(b"\x89PNG")
    table = dict([cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines() if line.count("│") == 3)
    assert table["data"] == "data.csv: 60 rows, 48 fitted to"
    assert table["columns"] == "4, as 6 of the model"
    assert table["left out"] == "'group', 'price', 'visits', 'constant'"
    assert table["target"] == "bought: 'yes', not 'no'"
    assert table["objective"] == "logistic: 'bought' holds text"
    assert table["penalty"] == "l2, strength 0.02083"
    assert table["devices"] == "3 × cpu (simulated), float64"
    assert table["status"] == "the error is as small as tol asks"
    assert int(table["passes over the data"]) > int(table["iterations"]) > 1
    assert int(table["passes over the data"]) == passes(file)
    assert "On 12 rows held out" in text
    assert "column 'constant' is the same in every row that is fitted to, and left out" in text
    assert "iteration 1  objective 0." in text
    assert table["objective reached"].startswith("0.")
    assert [row["column"] for row in read(out / "coefficients.csv")] == [
        "(intercept)", *NUMBERS, "city=Basel", "city=Bern", "city=Chur",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_any_number_of_devices_finds_the_same(
    devices: int, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", file, "--target", "price", *ignoring("price"), "--test-fraction", 0, "--devices", devices]
    assert said(capsys, *arguments, "--out", tmp_path / "out")[0] == 0
    X, scaler = design(np.arange(NUM_ROWS))
    expected = in_own_units(Ridge(1.0).fit(scaler.transform(X), DATA["price"]), scaler)
    np.testing.assert_allclose(coefficients(tmp_path / "out"), expected, rtol=1e-6)


@pytest.mark.slow
def test_float32_finds_nearly_the_same(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "fit",
        file,
        "--target",
        "price",
        *ignoring("price"),
        "--test-fraction",
        0,
        "--devices",
        1,
        "--float32",
    ]
    status, text, _ = said(capsys, *arguments, "--out", tmp_path / "out")
    assert status == 0
    assert "1 × cpu, float32" in text
    X, scaler = design(np.arange(NUM_ROWS))
    expected = in_own_units(Ridge(1.0).fit(scaler.transform(X), DATA["price"]), scaler)
    np.testing.assert_allclose(coefficients(tmp_path / "out"), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_files_of_each_kind_say_the_same(
    suffix: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / f"data{suffix}"
    if suffix == ".npz":
        np.savez(other, **DATA)
    else:
        city = pa.array(DATA["city"]).dictionary_encode()
        arrow_parquet.write_table(pa.table({name: pa.array(DATA[name]) for name in DATA} | {"city": city}), other)
    for path in (file, other):
        arguments = [
            "--text",
            "one-hot",
            *ignoring("city", "bought"),
            "--devices",
            1,
            "--out",
            tmp_path / path.suffix[1:],
        ]
        assert said(capsys, "fit", path, "--target", "bought", *arguments)[0] == 0
    assert read(tmp_path / "csv" / "coefficients.csv") == read(tmp_path / suffix[1:] / "coefficients.csv")


@pytest.mark.slow
def test_an_array_of_two_dimensions_is_a_column_per_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    np.savez(tmp_path / "data.npz", X=X, y=X @ [1.0, -2.0] + 3)
    arguments = ["--target", "y", "--penalty", "none", "--devices", 1, "--out", tmp_path / "out"]
    assert said(capsys, "fit", tmp_path / "data.npz", *arguments)[0] == 0
    assert [row["column"] for row in read(tmp_path / "out" / "coefficients.csv")] == ["(intercept)", "X0", "X1"]
    np.testing.assert_allclose(coefficients(tmp_path / "out"), [[3, 1, -2]], rtol=1e-6)


@pytest.mark.slow
def test_cross_validation_chooses_as_scikit_learn_does(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = [0.001, 0.1, 10.0]
    arguments = ["--strengths", ",".join(map(str, grid)), "--folds", 3, "--test-fraction", 0.25, "--seed", 3]
    out = ["--devices", 2, "--out", tmp_path / "out"]
    status, text, err = said(capsys, "fit", file, "--target", "price", *ignoring("price"), *arguments, *out)
    assert (status, err) == (0, "")
    train, _ = dealt(DATA["price"], classes=False)
    X, scaler = design(train)
    y = DATA["price"][train]
    search = GridSearchCV(Ridge(), {"alpha": [strength * N for strength in grid]}, cv=KFold(3))
    search.fit(scaler.transform(X[train]), y)
    assert f"l2, strength {search.best_params_['alpha'] / N:.4g}" in text
    means = search.cv_results_["mean_test_score"]
    assert [f"{score:.4g}" for score in means if f"{score:.4g}" not in text] == []
    best = search.best_estimator_  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_allclose(coefficients(tmp_path / "out"), in_own_units(best, scaler), rtol=1e-5)


def with_missing() -> dict[str, Any]:
    age = [None if row % 9 == 4 else value for row, value in enumerate(DATA["age"])]
    return {**DATA, "age": age}


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["drop-rows", "mean"])
def test_missing_values_are_dealt_with_as_asked(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write(tmp_path / "data.csv", with_missing()), tmp_path / "out"
    arguments = ["--missing", missing, *ignoring("price"), "--test-fraction", 0, "--devices", 1, "--out", out]
    status, text, err = said(capsys, "fit", file, "--target", "price", *arguments)
    assert (status, err) == (0, "")
    there = np.array([value is not None for value in with_missing()["age"]])
    rows = there if missing == "drop-rows" else np.full(NUM_ROWS, True)
    X, _ = design(rows)
    X[~there, 0] = X[there, 0].mean()
    scaler = StandardScaler().fit(X[rows])
    expected = in_own_units(Ridge(1.0).fit(scaler.transform(X[rows]), DATA["price"][rows]), scaler)
    np.testing.assert_allclose(coefficients(out), expected, rtol=1e-6)
    assert ("7 of 60 rows have missing values and are left out" in text) == (missing == "drop-rows")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("none", "instead"),
    [(["--penalty", "none"], "--penalty l2"), (["--strength", 0], "--strength 0.1")],
    ids=["none", "strength 0"],
)
def test_classes_that_can_be_told_apart_need_a_penalty(
    none: list[Any], instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", X=np.arange(20.0), y=np.arange(20) >= 10)
    arguments = ["--target", "y", *none, "--devices", 1, "--out", tmp_path / "out"]
    status, text, err = said(capsys, "fit", tmp_path / "data.npz", *arguments)
    assert (status, err) == (0, "")
    assert "y: True, not False" in text
    assert "status               │ there is no finite solution" in text
    assert (
        f"note there is no finite solution: some coefficients grow for as long as the solver runs; write {instead}\n"
        in text
    )


@pytest.mark.parametrize("target", ["y", "z"])
def test_a_column_that_says_the_target_is_named(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    u, v = rng.normal(size=(2, 400)).round(2)
    y = u + rng.normal(size=400) > 0
    data = {"u": u, "v": v, "label": np.where(y, "late", "in time"), "y": y.astype(int), "w": 3 * v + 1, "z": 3 * v + 1}
    other = "z" if target == "y" else "y"
    left_out = {other, "w" if target == "y" else "v"}
    file = write(tmp_path / "data.csv", {name: x for name, x in data.items() if name not in left_out})
    options = ["--text", "one-hot", "--devices", 1, "--strength", 1e-9, "--out"]
    _, out, _ = said(capsys, "fit", file, "--target", target, *options, tmp_path / "out")
    says = "label" if target == "y" else "w"
    assert f"80 rows that were scored are predicted exactly: if '{says}', which counts most, says the target" in out
    _, out, _ = said(capsys, "fit", file, "--target", target, "--ignore", says, *options, tmp_path / "2")
    assert "predicted exactly" not in out


@pytest.mark.slow
def test_a_solver_that_stops_early_says_so(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*ignoring("bought"), "--max-iterations", 1, "--devices", 1, "--out", tmp_path / "out"]
    status, text, err = said(capsys, "fit", file, "--target", "bought", *arguments)
    assert (status, err) == (0, "")
    assert "the solver stopped early: the limit of iterations was reached" in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(28, "no space left"), KeyboardInterrupt()], ids=["disk", "interrupt"])
@pytest.mark.parametrize("name", ["old", "new/out"])
def test_a_failure_at_the_last_file_leaves_what_was_there(
    name: str,
    error: BaseException,
    file: Path,
    fitted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(fitted, tmp_path / "old")
    before, written = everything(tmp_path), []

    def failing(file: Any, **arrays: Any) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        written.extend(sorted(other.name for other in path.parent.iterdir() if other != path))
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", failing)
    out = tmp_path / name
    status, _, err = said(capsys, "fit", file, *QUICK, "--force", "--out", out)
    if isinstance(error, OSError):
        assert (status, err) == (2, f"paraxis: --out {out} cannot be written to: no space left\n")
    else:
        assert (status, err) == (130, f"paraxis: interrupted; nothing was saved, --out {out} is as it was\n")
    assert written == ["coefficients.csv", "fit.png", "report.html"]
    assert everything(tmp_path) == before


@pytest.mark.slow
def test_an_old_output_is_replaced_if_that_is_asked_for(
    file: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(fitted, out)
    before = everything(out)
    again = ["fit", file, *QUICK, "--test-fraction", 0.5, "--out", out]
    _, _, err = said(capsys, *again)
    assert complaints(err) == [f"--out {out} holds an earlier fit; write --force to replace it, or --out {out}-2"]
    assert settled_by(err)[-2:] == ["--out", f"{out}-2"]
    assert everything(out) == before
    assert said(capsys, *again, "--force")[0] == 0
    after = everything(out)
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] == after[name]] == []
