"""Standard errors are those of maximum likelihood, where that is what was fitted; the report is one page by itself."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor

from tests._support import at_night
from tests.cli._files import NUM_ROWS, NUMBERS, columns, read, said, write

DATA = columns()
FREE = ["--penalty", "none", "--test-fraction", 0, "--devices", 1]
PLAIN: dict[str, Any] = {"tol": 1e-12, "max_iter": 10_000}
CASES: dict[str, tuple[str, list[Any], Any]] = {
    "squared": ("price", [], LinearRegression()),
    "logistic": ("bought", [], LogisticRegression(C=np.inf, solver="newton-cholesky", **PLAIN)),
    "poisson": ("visits", ["--objective", "poisson"], PoissonRegressor(alpha=0, solver="newton-cholesky", **PLAIN)),
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def by_formula(objective: str, model: Any, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of intercept and columns, from the triangle of weighted rows: the square roots of ``diag(inv(D' V D))``."""
    D = np.column_stack([np.ones(len(X)), X])
    if objective == "squared":
        residuals = y - model.predict(X)
        precision = np.full(len(y), (len(y) - D.shape[1]) / (residuals @ residuals))
    elif objective == "logistic":
        precision = model.predict_proba(X).prod(1)
    else:
        precision = model.predict(X)
    triangle = np.linalg.qr(np.sqrt(precision)[:, None] * D, mode="r")
    return np.linalg.norm(np.linalg.inv(triangle), axis=1)


@pytest.mark.parametrize("objective", ["logistic", *at_night(["squared", "poisson"], 2)])
def test_standard_errors_are_those_of_the_formula(
    objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, given, oracle = CASES[objective]
    file = write(tmp_path / "data.csv", {**{name: DATA[name] for name in NUMBERS}, "y": DATA[target]})
    status, text, err = said(capsys, "fit", file, "--target", "y", *given, *FREE, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    X = np.column_stack([DATA[name] for name in NUMBERS]).astype(np.float64)
    # The oracle's solvers need columns on one scale; errors of the columns are then those of columns in this unit.
    mean, unit = X.mean(0), X.std(0)
    oracle.fit((X - mean) / unit, DATA[target])
    expected = by_formula(objective, oracle, (X - mean) / unit, DATA[target])[1:] / unit
    rows = read(tmp_path / "out" / "coefficients.csv")
    assert [row["column"] for row in rows] == ["(intercept)", *NUMBERS]
    np.testing.assert_allclose([float(row["standard_error"]) for row in rows[1:]], expected, rtol=1e-4)
    # The intercept's is that of the prediction where all columns are 0.
    oracle.coef_, oracle.intercept_ = oracle.coef_ / unit, oracle.intercept_ - (oracle.coef_ / unit) @ mean
    intercept = by_formula(objective, oracle, X, DATA[target])[0]
    np.testing.assert_allclose(float(rows[0]["standard_error"]), intercept, rtol=1e-4)
    assert "Standard errors hold if " in text
    assert all(f"{error:.3g}" in text for error in expected)


REASONS: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "penalty": ({}, ["--penalty", "l2"], "a penalty shrinks coefficients; write --penalty none"),
    "levels": ({"city": DATA["city"]}, ["--text", "one-hot"], "some columns are determined by the others"),
    "weights": ({"w": np.arange(NUM_ROWS) + 1.5}, ["--weights", "w"], "weights have several meanings"),
    "means": ({"b": [None, *DATA["visits"][1:]]}, ["--missing", "mean"], "means stood for missing values"),
    "early": ({}, ["--max-iterations", 1], "the solver stopped before the test for a solution was passed"),
    "perfect": ({"y": DATA["age"] / 3 + 0.1}, [], "the fit is perfect, so no errors are left"),
    "perfect, float32": (
        {"y": DATA["age"] / 3 + 0.1},
        ["--float32"],
        "the fit is perfect, so no errors are left",
    ),
    "separated": (
        {"y": np.where(DATA["age"] > np.median(DATA["age"]), "many", "few")},
        [],
        "the columns tell the classes apart without an error",
    ),
    "classes": ({"y": DATA["group"]}, [], "those of more than two classes are determined but for a constant"),
}


@pytest.mark.parametrize(
    "why", ["penalty", "perfect", *at_night([why for why in REASONS if why not in ("penalty", "perfect")], 5)]
)
def test_where_there_are_no_standard_errors_it_is_said_why(
    why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, given, reason = REASONS[why]
    file = write(tmp_path / "data.csv", {**{name: DATA[name] for name in NUMBERS}, "y": DATA["bought"], **new})
    free = FREE[2:] if "--penalty" in given else FREE
    status, text, err = said(capsys, "fit", file, "--target", "y", *free, *given, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    assert f"There are no standard errors: {reason}" in text
    assert {row["standard_error"] for row in read(tmp_path / "out" / "coefficients.csv")} == {""}
    assert f"There are no standard errors: {reason}" in (tmp_path / "out" / "report.html").read_text()


class Page(HTMLParser):
    """The tables of a page, its pictures and whatever it would load; each tag must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


@pytest.mark.parametrize("chosen", [[], *at_night([["--strengths", "0.01,1", "--folds", 3]], 1)], ids=str)
def test_a_report_is_one_page_that_tells_all(
    chosen: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "<script>alert(1)</script> & \x1b"
    data = {**{name: DATA[name] for name in NUMBERS[1:]}, odd: DATA["visits"], "y": DATA["price"]}
    file, out = write(tmp_path / "data.csv", data), tmp_path / "out"
    given = [*chosen, "--devices", 1]
    status, text, err = said(capsys, "fit", file, "--target", "y", *given, "--out", out)
    assert (status, err) == (0, "")
    source = (out / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert "<script" not in source
    assert "\x1b" not in source
    [picture] = page.links
    assert base64.b64decode(picture.removeprefix("data:image/png;base64,")) == (out / "fit.png").read_bytes()
    assert not re.search(r"https?:|url\(|@import", source)
    terminal = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    facts = [row for row in terminal if len(row) == 2]
    assert len(facts) > 8
    assert [row for row in facts if row not in page.rows] == []
    metrics = next(row for row in terminal if row[0] == "RMSE")
    assert metrics in page.rows
    assert sum(row[0] in ("0.01", "1") for row in page.rows) == (2 if chosen else 0)
    names = [row["column"] for row in read(out / "coefficients.csv")]
    shown = [row[0] for row in page.rows if row[0] in names or "script" in row[0]]
    assert shown == [name.replace("\x1b", r"\x1b") for name in names]
    asked = " ".join(map(str, ["paraxis fit", file, "--target y", *given, "--out", out]))
    assert f"<pre>{asked}</pre>" in source
