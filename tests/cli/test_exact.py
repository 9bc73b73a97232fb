"""From a file to predictions, labels stay what they are, and nothing of a table is guessed or lost in silence."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as arrow_parquet
import pytest
from sklearn.linear_model import LinearRegression

from paraxis.solve import estimators as est
from tests._support import compilations
from tests.cli._files import complaints, everything, read, said, write
from tests.cli._models import saved
from tests.cli._tables import LABELS, WRITERS, labels, text_of

QUICK = ["--target", "y", "--devices", 1, "--test-fraction", 0]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def table(kind: str, seed: int) -> dict[str, list[Any]]:
    """Labels, and two columns that tell them apart."""
    values = labels(kind, seed).values
    angle = [2 * np.pi * LABELS[kind].index(value) / len(LABELS[kind]) for value in values]
    return {"u": np.cos(angle).tolist(), "v": np.sin(angle).tolist(), "y": values}


CASES = [(kind, suffix) for kind in LABELS for suffix in WRITERS]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "suffix"), CASES)
def test_labels_are_predicted_as_they_were_written(
    kind: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = table(kind, 1)
    file, out = tmp_path / f"data{suffix}", tmp_path / "out"
    form = WRITERS[suffix](file, drawn, np.random.default_rng(1))
    status, text, err = said(capsys, "fit", file, *QUICK, *form, "--strength", 1e-4, "--out", out)
    assert (status, err) == (0, "")
    assert {row["column"] for row in read(out / "coefficients.csv")} == {"(intercept)", "u", "v"}  # no index
    marks = {"NA", "nan", "None", "null"} & set(drawn["y"])
    assert ("counts as text; leave the cell empty where a value is missing" in text) == bool(marks)
    for ending in (".csv", ".parquet"):
        predicted = tmp_path / f"predicted{ending}"
        status, text, err = said(capsys, "predict", out, file, *form, "--keep", "y", "--out", predicted)
        assert (status, err) == (0, "")
        assert re.search("│ accuracy │ +1 │", text)
        if ending == ".csv":
            found = pd.read_csv(predicted, dtype=str, keep_default_na=False)
            assert found["row"].tolist() == [str(row) for row in range(len(found))]
            assert found["prediction"].tolist() == found["y"].tolist()
            assert sorted(found["y"]) == sorted(map(text_of, drawn["y"]))
        else:
            columns = arrow_parquet.read_table(predicted).to_pydict()
            assert columns["prediction"] == columns["y"]
            assert sorted(columns["y"], key=str) == sorted(drawn["y"], key=str)
            assert {type(value) for value in columns["y"]} == {type(value) for value in drawn["y"]}


def test_an_index_is_not_learnt_from_and_a_second_fit_is_not_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"u": rng.normal(size=40), "v": rng.normal(size=40)})
    frame["y"] = np.arange(40) + 0.5  # in order: the index would tell all
    expected = LinearRegression().fit(frame[["u", "v"]], frame["y"]).coef_
    for number, (index, name) in enumerate(
        [(pd.Index(range(40)), "__index_level_0__"), (pd.Index(range(40), name="patient"), "patient")]
    ):
        frame.set_index(index).to_parquet(tmp_path / "data.parquet", index=True)
        arguments = ["fit", tmp_path / "data.parquet", *QUICK, "--penalty", "none", "--out", tmp_path / f"out{number}"]
        with compilations() as compiled:
            status, text, err = said(capsys, *arguments)
        assert (status, err) == (0, "")
        assert not compiled or not number  # the first may find what another test compiled
        assert f"note {name!r} is the index of a data frame, and is left out" in text
        rows = read(tmp_path / f"out{number}" / "coefficients.csv")
        assert [row["column"] for row in rows] == ["(intercept)", "u", "v"]
        np.testing.assert_allclose([float(row["coefficient"]) for row in rows[1:]], expected, rtol=1e-6)
    kept = ["--keep", "patient", "--out", tmp_path / "kept.csv"]
    status, text, _ = said(capsys, "predict", tmp_path / "out1", tmp_path / "data.parquet", *kept)
    assert [row["patient"] for row in read(tmp_path / "kept.csv")] == [str(row) for row in range(40)]
    note = "data.parquet is the file that the model was fitted to, with 40 of its rows: this does not show how well"
    assert note in text
    frame[:20].to_parquet(tmp_path / "part.parquet")
    assert "the file that the model was fitted to" not in said(
        capsys, "predict", tmp_path / "out1", tmp_path / "part.parquet"
    )[1]  # fmt: skip


def test_integers_that_are_one_number_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = [2**60 + row for row in range(30)]
    file = write(tmp_path / "data.csv", {"code": large, "u": range(30), "y": [0.5, 1.5, 4] * 10})
    _, _, err = said(capsys, "fit", file, *QUICK, "--out", tmp_path / "out")
    example = f"{2**60}, {2**60 + 1}"
    assert (
        f"column 'code' holds integers that are one float64, such as {example}; write --ignore code, or subtract" in err
    )
    file = write(tmp_path / "data.csv", {"u": range(30), "y": large})
    _, _, err = said(capsys, "fit", file, *QUICK, "--out", tmp_path / "out")
    assert f"the target 'y' holds integers that are one float64, such as {example}; subtract the least" in err
    np.savez(tmp_path / "data.npz", u=np.arange(4), y=np.array([2.0**53, 2, 1, 1]))
    given = ["--objective", "logistic", "--out", tmp_path / "out"]
    _, _, err = said(capsys, "fit", tmp_path / "data.npz", *QUICK, *given)
    assert "the target 'y' holds labels from 2^53 on as float64, which does not tell all of them apart; store" in err


@pytest.mark.slow
def test_what_was_taken_for_missing_or_for_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    data: dict[str, Any] = {
        "u": ["NA", *rng.normal(size=29)],
        "country": ["NA", "DE", "FR"] * 10,
        "code": ["00", "01", "10"] * 10,
        "mixed": ["?", "1", "2"] + ["3", "2", "1"] * 9,
        "y": rng.normal(size=30),
    }
    file = write(tmp_path / "data.csv", data)
    given = ["--text", "one-hot", "--missing", "mean", "--out", tmp_path / "out"]
    status, text, err = said(capsys, "fit", file, *QUICK, *given)
    assert (status, err) == (0, "")
    for note in (
        "column 'u': 'NA' counts as a missing value",
        "column 'country': 'NA' counts as text; leave the cell empty where a value is missing",
        "column 'mixed' holds text, such as '?' in line 2, among numbers: all of it counts as text",
    ):
        assert f"note {note}\n" in text
    made = [row["column"] for row in read(tmp_path / "out" / "coefficients.csv")]
    assert {"country=NA", "code=00", "code=01", "code=10", "mixed=?"} <= set(made)
    status, text, err = said(capsys, "predict", tmp_path / "out", file)
    assert (status, err) == (0, "")
    assert "note column 'u': 'NA' counts as a missing value\n" in text
    assert "not seen" not in text


@pytest.mark.slow
def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07"
    data = {f"u{evil}": range(30), "t": [evil, "b", "c"] * 10, "y": [0.5, 1, 4] * 10}
    file = write(tmp_path / "data.csv", data)
    assert evil not in str(said(capsys, "fit", file, "--target", evil))
    (tmp_path / f"{evil[1:]}.csv").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    for arguments in (
        ["fit", file, *QUICK, "--out", tmp_path / "no"],
        ["fit", file, *QUICK, "--text", "one-hot", "--out", tmp_path / "out"],
        ["predict", tmp_path / "out", file, "--keep", "t"],
        ["fit", tmp_path / f"{evil[1:]}.csv", *QUICK, "--out", tmp_path / "no"],
        ["fit", tmp_path / evil, *QUICK, "--out", tmp_path / "no"],
    ):
        _, text, err = said(capsys, *arguments)
        assert text + err
        assert [mark for mark in text + err if not mark.isprintable() and mark != "\n"] == []


def test_predictions_do_not_replace_a_file_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "m" / "model.npz", "squared")
    file = write(tmp_path / "data.csv", {"id": ["07", "8", "x"], "u": [1, 2, 3], "v": [1, 2, 3], "y": [1, 2, 3]})
    out = write(tmp_path / "out.csv", {"mine": [1]})
    before = everything(tmp_path)
    _, _, err = said(capsys, "predict", model, file, "--out", out)
    message = f"--out {out} is there; write --force to replace it, or --out {tmp_path / 'out-2.csv'}"
    assert complaints(err) == [message]
    assert everything(tmp_path) == before
    assert said(capsys, "predict", model, file, "--out", out, "--force", "--keep", "id")[0] == 0
    assert [(row["row"], row["id"]) for row in read(out)] == [("0", "07"), ("1", "8"), ("2", "x")]


@contextlib.contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fit(self: Any, *_: Any) -> Any:
        del self
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(est.Ridge, "fit", fit)
        yield


def test_a_fit_that_is_interrupted_says_that_nothing_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "data.csv", {"u": [1.5, 2, 4, 3, 2.5], "y": [0.5, 1, 4, 3, 3]})
    before, out = everything(tmp_path), tmp_path / "out"
    with interrupted(monkeypatch):
        status, _, err = said(capsys, "fit", file, *QUICK, "--out", out)
    assert (status, err) == (130, f"paraxis: interrupted; nothing was saved, --out {out} is as it was\n")
    assert everything(tmp_path) == before
