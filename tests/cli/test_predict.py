"""``paraxis predict``: the predictions of the model that was fitted, for columns found by name, or one line why not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from paraxis.cli import main
from tests.cli._files import CITIES, NUMBERS, columns, complaints, everything, read, said, settled_by, write
from tests.cli._models import saved

DATA = columns()
KEPT = (*NUMBERS, "city", "bought")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


ROWS = {"city": ["Bern", "Chur", "Bern"], "v": [1.5, 0, -2], "u": [3, 0.5, 1]}


def by_hand(path: Path) -> np.ndarray:
    """The linear model's predictions of ``ROWS``, ``(3, k)``."""
    with np.load(path) as file:
        coef, intercept, means, scales = (file[name] for name in ("coef", "intercept", "means", "scales"))
    indicators = [[float(city == level) for level in ("Bern", "Chur")] for city in ROWS["city"]]
    X = np.column_stack([ROWS["u"], ROWS["v"], np.array(indicators)])[:, : len(means)]
    return (X - means) / scales @ coef.T + intercept


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


@pytest.mark.slow
def test_what_was_fitted_is_predicted_as_scikit_learn_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "data.csv", {name: DATA[name] for name in KEPT})
    fit = ["fit", file, "--target", "bought", "--text", "one-hot", "--test-fraction", 0, "--devices", 1]
    assert main([str(argument) for argument in (*fit, "--out", tmp_path / "out")]) == 0
    capsys.readouterr()
    out = tmp_path / "predictions.csv"
    status, text, err = said(capsys, "predict", tmp_path / "out", file, "--probabilities", "--out", out)
    assert (status, err) == (0, "")
    cities = OneHotEncoder(categories=[CITIES], sparse_output=False).fit_transform(DATA["city"][:, None])  # pyright: ignore[reportArgumentType]
    X = StandardScaler().fit_transform(np.column_stack([*(DATA[name] for name in NUMBERS), cities]))
    y = DATA["bought"]
    oracle = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-12).fit(X, y)
    found = read(out)
    assert [row["prediction"] for row in found] == oracle.predict(X).tolist()
    shares = [[float(row["probability_no"]), float(row["probability_yes"])] for row in found]
    np.testing.assert_allclose(shares, oracle.predict_proba(X), rtol=1e-6, atol=1e-9)
    for score in (accuracy_score(y, oracle.predict(X)), log_loss(y, oracle.predict_proba(X))):
        assert f"{score:.4g}" in text
    assert f"Written to {out}: 60 predictions" in text


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_are_found_by_name_in_any_order(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = saved(tmp_path / "m" / "model.npz"), tmp_path / "new" / f"predictions{suffix}"
    file = write(tmp_path / "data.csv", {"id": [7, 8, 9], **ROWS})
    status, text, err = said(capsys, "predict", model, file, "--probabilities", "--out", out)
    assert (status, err) == (0, "")
    assert "note the model does not use 'id'" in text
    found = arrow_parquet.read_table(out).to_pylist() if suffix == ".parquet" else read(out)
    expected = softmax(by_hand(model))
    assert [row["prediction"] for row in found] == [("a", "b", "c")[i] for i in expected.argmax(1)]
    names = ("probability_a", "probability_b", "probability_c")
    np.testing.assert_allclose([[float(row[name]) for name in names] for row in found], expected, rtol=1e-12)
    assert out.stat().st_mode & 0o777 == 0o644
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("objective", "inverse_link"),
    [pytest.param("squared", lambda z: z, marks=pytest.mark.slow), ("poisson", np.exp)],
)
def test_values_and_counts_are_printed_with_metrics(
    objective: str, inverse_link: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "model.npz", objective)
    y = [4, None, 2]
    file = write(tmp_path / "data.csv", {"y": y, "u": ROWS["u"], "v": ROWS["v"]})
    status, text, err = said(capsys, "predict", tmp_path, file)
    assert (status, err) == (0, "")
    expected = inverse_link(by_hand(model)[:, 0])
    rows = [line.split("│")[1:3] for line in text.splitlines() if line.count("│") == 3]
    found = {int(row): cell.strip() for row, cell in rows if row.strip().isdigit()}
    assert found == {row: f"{value:.5g}" for row, value in enumerate(expected)}
    assert "1 row has no target that the model could have predicted" in text
    assert "On 2 rows, beside 'y'" in text
    both = np.array([4.0, 2.0]), expected[[0, 2]]
    if objective == "squared":
        assert f"{np.sqrt(np.mean((both[0] - both[1]) ** 2)):.4g}" in text
    else:
        deviance = 2 * np.mean(both[0] * np.log(both[0] / both[1]) - both[0] + both[1])
        assert f"{deviance:.4g}" in text


def test_the_first_rows_are_printed_and_the_way_to_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "model.npz", "squared")
    file = write(tmp_path / "data.csv", {"u": range(13), "v": range(13)})
    status, text, err = said(capsys, "predict", tmp_path, file)
    assert (status, err) == (0, "")
    assert sum(line.count("│") == 3 for line in text.splitlines()) == 10
    assert "3 more; for all of them, write --out predictions.csv" in text


def test_text_not_seen_before_is_none_of_the_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = saved(tmp_path / "model.npz"), tmp_path / "out.csv"
    file = write(tmp_path / "data.csv", {**ROWS, "city": ["Bern", "Genf", "12"], "y": ["a", "z", "b"]})
    status, text, err = said(capsys, "predict", model, file, "--probabilities", "--out", out)
    assert (status, err) == (0, "")
    assert "column 'city' holds text that the model has not seen, '12', 'Genf'; it counts as none of the levels" in text
    assert "1 row has no target that the model could have predicted" in text
    with np.load(model) as stored:
        own = stored["coef"] / stored["scales"]
    z = by_hand(model)
    z[1] -= own[:, 3]  # it was Chur
    z[2] -= own[:, 2]  # it was Bern
    found = [[float(row[f"probability_{label}"]) for label in "abc"] for row in read(out)]
    np.testing.assert_allclose(found, softmax(z), rtol=1e-9)


def test_levels_of_digits_are_text_where_the_model_has_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "model.npz", "integer")
    with np.load(model) as stored:
        _, *own = (stored["coef"] / stored["scales"])[0]
        none = stored["intercept"][0] - own @ stored["means"][1:]
        u = stored["means"][0].item()
    file = write(tmp_path / "data.csv", {"u": [u] * 3, "city": ["007", "12", "7"]})
    assert said(capsys, "predict", model, file, "--probabilities", "--out", tmp_path / "out.csv")[0] == 0
    found = [float(row["probability_5"]) for row in read(tmp_path / "out.csv")]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array([none + own[0], none + own[1], none]))), rtol=1e-9)
    assert found[0] < found[2] < found[1]
    file = write(tmp_path / "plain.csv", {"u": [u] * 2, "city": ["12", "12.0"]})  # as numbers they are the same
    assert said(capsys, "predict", model, file, "--probabilities", "--out", tmp_path / "more.csv")[0] == 0
    assert [float(row["probability_5"]) for row in read(tmp_path / "more.csv")] == found[1:]


@pytest.mark.parametrize(
    ("kind", "arguments", "inverse_link"),
    [("squared", [], lambda z: z), ("poisson", ["--missing", "mean"], np.exp)],
    ids=["as in the fit", "asked for"],
)
def test_missing_values_are_at_the_mean(
    kind: str,
    arguments: list[str],
    inverse_link: Callable[[Any], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = saved(tmp_path / "model.npz", kind), tmp_path / "out.csv"
    with np.load(model) as stored:
        expected, (u, v) = inverse_link(stored["intercept"][0]), stored["means"].tolist()
    file = write(tmp_path / "data.csv", {"u": [None, u], "v": [None, v]})
    if arguments:
        assert "write --missing mean" in said(capsys, "predict", model, file)[2]
    assert said(capsys, "predict", model, file, *arguments, "--out", out)[0] == 0
    np.testing.assert_allclose([float(row["prediction"]) for row in read(out)], [expected, expected], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "classes", "dtype"), [("boolean", (False, True), "bool"), ("integer", (3, 5), "int64")]
)
def test_classes_are_of_the_type_that_they_had(
    kind: str, classes: tuple[Any, ...], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "model.npz", kind)
    given = {"u": [-9, 9], "city": ["12", "12"], "y": [str(label).lower() for label in classes]}
    file = write(tmp_path / "data.csv", given)
    status, text, _ = said(capsys, "predict", model, file, "--out", tmp_path / "out.parquet")
    assert status == 0
    prediction = arrow_parquet.read_table(tmp_path / "out.parquet").column("prediction").to_numpy()
    assert (str(prediction.dtype), prediction.tolist()) == (dtype, list(classes))
    assert "accuracy" in text


@pytest.mark.slow
def test_log_probabilities_do_not_overflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = saved(tmp_path / "model.npz", "boolean"), tmp_path / "out.csv"
    file = write(tmp_path / "data.csv", {"u": [1e6, -1e6], "y": ["false", "true"]})
    with np.load(model) as stored:
        z = (np.array([1e6, -1e6]) - stored["means"]) / stored["scales"] * stored["coef"][0] + stored["intercept"]
    assert np.abs(z).min() > 1e5
    status, text, err = said(capsys, "predict", model, file, "--probabilities", "--out", out)
    assert (status, err) == (0, "")
    shares = [[float(row[f"probability_{label}"]) for label in (False, True)] for row in read(out)]
    assert shares == [[0, 1], [1, 0]]
    assert f"{np.abs(z).mean():.4g}" in text


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"u": [1], "V": [1], "city": ["Bern"]}, "", "data.csv has no column 'v'; its columns are 'u', 'V', 'city'"),
    ({"u": [1]}, "", "data.csv has no columns 'v', 'city'; its columns are 'u'\n"),
    ({**ROWS, "u": ["x", "1", "y"]}, "", "column 'u' of {} holds text, but the model was fitted to numbers"),
    ({**ROWS, "u": ["x", "1", "2"]}, "", "'u' holds text, such as 'x' in line 2 among numbers; write --na-values=x\n"),
    (
        {**ROWS, "u": [None, 1, None]},
        "",
        "2 missing values, in column 'u' (2), the first in line 2; write --missing mean",
    ),
    ({**ROWS, "v": ["inf", 1, 2]}, "", "1 infinite value, in column 'v' (1), in line 2; make them missing, or"),
    (ROWS, "--out predictions.txt", "--out predictions.txt must end in .csv or .parquet"),
    (ROWS, "--out {}", "--out {} is a file that is read; give another one"),
    (ROWS, "--out {}/x.csv", "--out {}/x.csv cannot be written to: "),
    (ROWS, "--out /proc/x.csv", "--out /proc/x.csv cannot be written to: No such file or directory"),
    (ROWS, "--keep id", "data.csv has no column to keep 'id'; its columns are 'city', 'v', 'u'"),
    (
        {**ROWS, "row": [1, 2, 3]},
        "--keep row",
        "--keep row: another column that is written has this name; rename it in {}",
    ),
    (ROWS, "--decimal ,", "'1.5' is no number with the decimal point ','; write --decimal ."),
]


@pytest.mark.parametrize(("data", "arguments", "message"), CASES, ids=[m[-24:] for _, _, m in CASES])
def test_a_mistake_gets_one_line(
    data: dict[str, Any], arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "model.npz")
    file = write(tmp_path / "data.csv", data)
    before = everything(tmp_path)
    status, _, err = said(capsys, "predict", tmp_path, file, *arguments.format(file).split())
    assert status == 2
    assert message.format(file) in complaints(err)[0] + "\n"
    assert everything(tmp_path) == before


@pytest.mark.parametrize("streamed", [[], ["--stream"]], ids=["in memory", "streamed"])
def test_columns_that_the_model_does_not_use_need_no_reading(
    streamed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "model.npz")
    others = {"share": ["1,5", "2,25", "3"], "price": ["1,234.5", "7", "8"], "note": ["12%", "3", "1.234.567"]}
    predicted = {}
    for name, columns_of in (("plain", ROWS), ("more", {**others, **ROWS})):
        out = tmp_path / f"{name}.csv"
        file = write(tmp_path / f"{name}-rows.csv", columns_of)
        status, _, err = said(capsys, "predict", model, file, "--out", out, *streamed)
        assert status == 0, err
        predicted[name] = out.read_bytes()
    assert predicted["more"] == predicted["plain"]
    bad = write(tmp_path / "bad.csv", {**ROWS, "u": ["1,5", "2,25", "3"]})
    status, _, err = said(capsys, "predict", model, bad, *streamed)
    assert status == 2
    assert "column 'u': '1,5' is no number" in complaints(err)[0]


@pytest.mark.parametrize("streamed", [[], ["--stream"]], ids=["in memory", "streamed"])
def test_what_is_wrong_beside_a_column_that_is_missing_is_told_too(
    streamed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "model.npz")
    # Of u, v and city, one is not there and one is dates; u has a gap and a mark.
    rows = "".join(f"{cell};2026-01-0{row}\n" for row, cell in enumerate(["1.5", "", "?", "2.5", "3.5"], 1))
    (tmp_path / "data.csv").write_text("u;v\n" + rows)
    file = tmp_path / "data.csv"
    _, _, err = said(capsys, "predict", tmp_path, file, "--keep", "uu", *streamed)
    assert [line.replace(str(file), "data.csv").partition("; ")[0] for line in complaints(err)] == [
        "data.csv cannot be read as CSV: its columns are separated by ';'",
        "data.csv has no column to keep 'uu'",
        "column 'u' holds text, such as '?' in line 4 among numbers",
        f"data.csv holds {'at least ' * bool(streamed)}2 missing values, in column 'u' (2), the first in line 3",
        "data.csv has no column 'city'",
        "column 'v' of data.csv holds date32[day], but the model was fitted to numbers",
    ]
    *_, words, line = err.splitlines()
    assert words == "the last 2 of these are beyond any option; once they are mended, this settles the others:"
    assert line.split()[4:] == [
        "--missing",
        "mean",
        "--keep",
        "u",
        *streamed,
        "--delimiter",
        "';'",
        "--na-values",
        "'?'",
    ]


def test_probabilities_are_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "model.npz", "squared")
    file = write(tmp_path / "data.csv", {"u": [1], "v": [2]})
    _, _, err = said(capsys, "predict", tmp_path, file, "--probabilities")
    assert complaints(err) == ["--probabilities needs classes, but the model predicts values of 'y'"]
    assert settled_by(err) == ["predict", str(tmp_path), str(file)]


def test_a_model_that_is_not_there_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advice = "a model is made by: paraxis fit DATA --target COLUMN --out DIR"
    for place in (tmp_path, tmp_path / "model.npz"):
        expected = f"paraxis: {tmp_path / 'model.npz'} cannot be read: No such file or directory; {advice}\n"
        assert said(capsys, "predict", place, "data.csv") == (2, "", expected)


def test_a_model_and_a_file_the_other_way_round_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = saved(tmp_path / "fit" / "model.npz"), write(tmp_path / "new.csv", ROWS)
    for place in (model, model.parent):
        _, _, err = said(capsys, "predict", file, place, "--out", tmp_path / "p.csv")
        assert err.splitlines() == [
            f"paraxis: {place} is a model of paraxis fit, which comes first: paraxis predict MODEL DATA",
            "this is that order:",
            f"paraxis predict {place} {file} --out {tmp_path / 'p.csv'}",
        ]


def other_arrays(path: Path) -> None:
    np.savez(path, X=np.zeros(3))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def changed(path: Path) -> None:
    """Other coefficients, in an archive that is whole."""
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    arrays["coef"] += 1
    np.savez(path, **arrays)


def other_header(path: Path) -> None:
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    header = json.loads(arrays["header"].tobytes().decode()) | {"fills": True}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_arrays, ""),
        (cut, ""),
        (lambda path: path.write_bytes(b""), ""),
        (lambda path: path.write_text("u,v\n1,2\n"), ""),
        (changed, "its coef are not what was written"),
        (other_header, "its header is not what was written"),
    ],
    ids=["other arrays", "cut", "empty", "text", "coef", "header"],
)
def test_a_damaged_model_gets_one_line(
    damage: Callable[[Path], Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "model.npz")
    damage(path)
    status, out, err = said(capsys, "predict", tmp_path, "data.csv")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"paraxis: {path} is damaged, or no model of paraxis fit ({reason}")
    assert err.endswith("); fit it again\n")


def test_any_bit_that_changes_what_is_read_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "model.npz")
    whole, file = path.read_bytes(), write(tmp_path / "data.csv", ROWS)
    expected = said(capsys, "predict", path, file, "--probabilities")
    assert expected[0] == 0
    noticed = 0
    for position in range(0, len(whole), 37):
        flipped = bytearray(whole)
        flipped[position] ^= 0x10
        path.write_bytes(flipped)
        found = said(capsys, "predict", path, file, "--probabilities")
        if found[0] == 0:
            assert found == expected
        else:
            assert (found[0], found[1], found[2].count("\n")) == (2, "", 1)
            noticed += 1
    assert noticed > len(whole) / 37 / 2


def test_a_failure_while_writing_leaves_the_old_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "model.npz")
    file = write(tmp_path / "data.csv", ROWS)
    (tmp_path / "out.csv").write_text("old")
    before = everything(tmp_path)

    def failing(table: Any, target: Any, *_: Any) -> None:
        target.write(b"half")
        raise OSError(28, "no space left")

    monkeypatch.setattr(arrow_csv, "write_csv", failing)
    _, _, err = said(capsys, "predict", tmp_path, file, "--out", tmp_path / "out.csv", "--force")
    assert err == f"paraxis: --out {tmp_path / 'out.csv'} cannot be written to: no space left\n"
    assert everything(tmp_path) == before


@pytest.mark.slow
def test_no_devices_are_started_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path / "m" / "model.npz")
    file = write(tmp_path / "data.csv", ROWS)
    code = (
        "import sys, jax\n"
        "def started(*_): raise AssertionError('JAX was started')\n"
        "jax.devices = started\n"
        "from paraxis.cli import main\n"
        f"status = main(['predict', {str(tmp_path / 'm')!r}, {str(file)!r}])\n"
        "print([name for name in ('sklearn', 'scipy', 'matplotlib') if name in sys.modules], status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_rows_without_a_target_are_left_out_of_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"x": range(41), "z": [x % 3 for x in range(41)], "y": [None if x == 7 else 2.5 * x + 1 for x in range(41)]}
    file = write(tmp_path / "data.csv", rows)
    given = ["--target", "y", "--missing", "drop-rows", "--test-fraction", 0, "--strength", 0, "--devices", 1]
    status, out, err = said(capsys, "fit", file, *given, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    assert "1 of 41 rows have missing values and are left out" in out
    assert "40 fitted to" in out


@pytest.mark.parametrize(
    ("weights", "counts", "told"),
    [
        ([1, 0, 3], [1, 0, 3], ""),
        ([1, None, 3], [1, 0, 3], "1 row has no weight that is finite and not negative, and no part in the metrics"),
        ([-1, 2, 0.5], [0, 2, 0.5], "1 row has no weight that is finite and not negative, and no part"),
        ([0, 0, 0], [1, 1, 1], "'w', has none above 0: all rows count the same"),
        (["a", "b", "c"], [1, 1, 1], "'w', holds text here: all rows count the same"),
        (None, [1, 1, 1], "'w', is not there: all rows count the same"),
    ],
    ids=str,
)
def test_metrics_are_weighted_as_those_of_the_fit(
    weights: list[Any] | None, counts: list[float], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path / "model.npz", "weighted")
    y = np.array([4.0, 1.0, 2.0])
    given = {"y": y, "u": ROWS["u"], "v": ROWS["v"]} | ({} if weights is None else {"w": weights})
    status, text, err = said(capsys, "predict", model, write(tmp_path / "data.csv", given))
    assert (status, err) == (0, "")
    rmse = np.sqrt(np.average((y - by_hand(model)[:, 0]) ** 2, weights=counts))
    assert f"{rmse:.4g}" in text
    assert told in text
    assert ("weighted by 'w'" in text) == (counts != [1, 1, 1])
    assert "does not use 'w'" not in text


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_written_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = [
        "00123",
        "123",
        str(2**60),
        str(2**60 + 1),
        str(2**70),
        "1e5",
        "1E5",
        "2.50",
        "+7",
        " 12 ",
        "",
        "nan",
        "-0",
    ]
    words += ['a "b"', "x,y", "two\nlines"] if seed % 2 else ["Bern", "x;y"]
    ids = {name: [*map(str, rng.choice(words, 12))] for name in ("one", "two")}
    u = rng.normal(size=12).round(2).tolist()
    file = write(tmp_path / "data.csv", {**ids, "u": u, "y": (2 * np.array(u)).tolist()})
    out = tmp_path / "out"
    fit = ["fit", file, "--target", "y", "--id", "one", "--id", "two", "--test-fraction", 0, "--devices", 1]
    assert said(capsys, *fit, "--out", out)[0] == 0
    for more in ((), ("--stream",)):
        predictions = tmp_path / f"predictions{len(more)}.csv"
        assert said(capsys, "predict", out, file, "--out", predictions, *more)[0] == 0
        found = read(predictions)
        assert {name: [row[name] for row in found] for name in ids} == ids
        if not seed % 2:
            first = predictions.read_text().splitlines()[1]
            assert first.startswith(f"0,{ids['one'][0]},{ids['two'][0]},")


def a_form(rng: np.random.Generator) -> dict[str, Any]:
    """How a file may be written: its delimiter, decimal point, separator of thousands, unit and mark of nothing."""
    delimiter, decimal = rng.choice([";", "\t", "|"]), str(rng.choice([".", ","]))
    apart = rng.choice(["", "'", {".": ",", ",": "."}[decimal]])
    return {"delimiter": str(delimiter), "decimal": decimal, "apart": str(apart), "unit": str(rng.choice(["", "%"]))}


def as_csv(rows: dict[str, list[float | None]], form: dict[str, Any]) -> str:
    def cell(x: float | None) -> str:
        if x is None:
            return "?"
        whole, fraction = f"{x:,.2f}".split(".")
        return whole.replace(",", form["apart"]) + form["decimal"] + fraction + form["unit"]

    lines = [rows.keys(), *zip(*([cell(x) for x in column] for column in rows.values()), strict=True)]
    return "".join(form["delimiter"].join(line) + "\n" for line in lines)


def of_form(form: dict[str, Any]) -> list[str]:
    words = [word for word in (form["apart"], form["unit"]) if word]
    strip = [argument for word in words for argument in ("--strip", word)]
    return [*strip, "--delimiter", form["delimiter"], "--decimal", form["decimal"], "--na-values=?"]


@pytest.mark.parametrize("seed", range(6))
def test_files_are_read_as_the_one_that_was_fitted_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    u = (rng.normal(size=30) * 5000).round(2).tolist()
    data: dict[str, Any] = {"u": [None, *u[1:]], "v": rng.normal(size=30).round(2).tolist(), "y": u}
    plain, fitted, other = {"delimiter": ",", "decimal": ".", "apart": "", "unit": ""}, a_form(rng), a_form(rng)
    for name, form in (("plain", plain), ("fitted", fitted), ("other", other)):
        (tmp_path / f"{name}.csv").write_text(as_csv(data, form))
    fit = ["fit", tmp_path / "fitted.csv", "--target", "y", "--missing", "mean", "--test-fraction", 0, "--devices", 1]
    out = tmp_path / "out"
    status, _, err = said(capsys, *fit, *of_form(fitted), "--out", out)
    assert (status, err) == (0, "")
    predicted = []
    for name, form in (("fitted", None), ("fitted", fitted), ("plain", plain), ("other", other)):
        more = [] if form is None else of_form(form)
        status, text, err = said(
            capsys, "predict", out, tmp_path / f"{name}.csv", *more, "--out", tmp_path / "p.csv", "--force"
        )
        assert (status, err) == (0, ""), (name, fitted, other)
        assert ("is read as the model's file was: --delimiter" in text) == (name == "fitted")
        predicted.append((tmp_path / "p.csv").read_text())
    assert len(set(predicted)) == 1
    model = dict(np.load(out / "model.npz"))
    x = np.array([[np.nan if value is None else value for value in data[name]] for name in ("u", "v")]).T
    expected = np.nan_to_num((x - model["means"]) / model["scales"]) @ model["coef"].T + model["intercept"]
    np.testing.assert_allclose(
        [float(row["prediction"]) for row in read(tmp_path / "p.csv")], expected[:, 0], rtol=1e-12
    )


COMMAS: dict[str, Any] = {"u": [1234.5, 2.5, 3.25, 4.75], "y": [1.5, 2.5, 3.5, 4.5]}


def _fitted_to_commas(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A model of a file with decimal commas, and points between thousands."""
    form = {"delimiter": ";", "decimal": ",", "apart": ".", "unit": ""}
    (folder / "fitted.csv").write_text(as_csv(COMMAS, form))
    out = folder / "out"
    fit = ["fit", folder / "fitted.csv", "--target", "y", "--test-fraction", 0, "--devices", 1, "--out", out]
    assert said(capsys, *fit, *of_form(form))[0] == 0
    return out


def test_a_file_that_is_written_otherwise_than_the_one_that_was_fitted_to_is_settled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _fitted_to_commas(tmp_path, capsys)
    file = tmp_path / "point.csv"
    file.write_text(as_csv(COMMAS, {"delimiter": ",", "decimal": ".", "apart": "", "unit": ""}))
    status, _, err = said(capsys, "predict", out, file)
    assert status == 2
    assert "--delimiter , --decimal ." in err.splitlines()[-1]
    assert said(capsys, *settled_by(err))[0] == 0
    np.savez(tmp_path / "rows.npz", **COMMAS)
    assert said(capsys, "predict", out, tmp_path / "rows.npz")[0] == 0


def test_a_note_tells_what_is_as_in_the_fit_where_options_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else numbers with points could be read as thousands unseen: 1.234 as 1234."""
    out = _fitted_to_commas(tmp_path, capsys)
    file = tmp_path / "other.csv"
    file.write_text("u\n1.234\n2.345\n")
    told = "is read as the model's file was where no option says otherwise: --decimal , --na-values '?' --strip ."
    status, text, _ = said(capsys, "predict", out, file, "--delimiter", ",")
    assert (status, told in " ".join(text.split())) == (0, True), text
    status, text, _ = said(capsys, "predict", out, file, "--delimiter", ",", "--decimal", ".", "--na-values=?")
    assert (status, "is read as" in text) == (0, False), text
