"""No public face: files would have to be large to be read in parts, whose size is made small here.

``paraxis fit --stream`` finds what the same line without it finds, of files that are read a part at a time.
"""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paraxis._tables import _csv
from paraxis.cli.fit import _display, _parts
from tests.cli._files import columns, complaints, everything, read, said, settled_by, write

DATA = {name: np.tile(values, 4) for name, values in columns().items()}  # 240 rows
TARGETS = ("bought", "group", "price", "visits")
SMALL = 3000  # bytes of a part, of about 50 rows


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in (_csv, _parts):
        monkeypatch.setattr(reader, "_BYTES", SMALL)
    monkeypatch.setenv("COLUMNS", "200")


def some(target: str, start: int = 0, stop: int = 240) -> dict[str, Any]:
    return {name: DATA[name][start:stop].tolist() for name in DATA if name not in TARGETS or name == target}


def arguments(out: Path, target: str, *more: object) -> list[object]:
    return ["--target", target, "--text", "one-hot", "--devices", 1, "--seed", 3, "--out", out, *more]


def table_of(out: Path) -> np.ndarray:
    values = [[row["per_standard_deviation"], row["standard_error"] or "nan"] for row in read(out / "coefficients.csv")]
    return np.array(values, float)


def told(printed: str) -> list[str]:
    """The lines about scores, and the notes."""
    names = ("accuracy", "log loss", "R²", "RMSE", "mean deviance", "There are", "Standard errors", "note")
    return [line for line in printed.splitlines() if any(name in line for name in names)]


CASES = {
    "logistic": (
        "bought",
        ["--weights", "weight", "--class-weight", "yes=2", "--penalty", "none", "--missing", "drop-rows"],
    ),
    "softmax": ("group", ["--test-fraction", "0"]),
    "squared": ("price", ["--penalty", "none", "--missing", "drop-rows", "--ignore", "city"]),
    "elastic net": ("price", ["--penalty", "elastic-net", "--strength", "0.1"]),
    "sparse classes": ("bought", ["--penalty", "l1", "--strength", "0.05"]),
    "poisson": ("visits", ["--objective", "poisson", "--penalty", "none", "--missing", "mean"]),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("logistic", "elastic net") else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_streamed_fit_is_that_of_all_rows_in_memory(tmp_path, capsys, name):
    """The same rows are held out, so coefficients, standard errors, scores and notes are the same."""
    target, options = CASES[name]
    data = some(target)
    if name == "logistic":
        data["weight"] = [number % 3 for number in range(240)]
    if "--missing" in options:
        data["age"] = [None if number in (3, 200) else age for number, age in enumerate(data["age"])]
    file = write(tmp_path / "data.csv", data)
    folder = tmp_path / "folder"
    folder.mkdir()
    for part, (start, stop) in enumerate([(0, 100), (100, 101), (101, 240)]):
        of = {column: values[start:stop] for column, values in data.items()}
        pq.write_table(pa.table(of), folder / f"{part}.parquet")
    status, printed, _ = said(capsys, "fit", file, *arguments(tmp_path / "held", target, *options))
    assert status == 0
    out, source = tmp_path / "streamed", file if name == "softmax" else folder
    status, streamed, err = said(capsys, "fit", source, *arguments(out, target, *options), "--stream", "1MB")
    assert (status, err) == (0, "")
    np.testing.assert_allclose(table_of(out), table_of(tmp_path / "held"), rtol=2e-6, atol=1e-8)
    np.testing.assert_array_equal(table_of(out)[:, 0] == 0, table_of(tmp_path / "held")[:, 0] == 0)
    assert told(streamed) == told(printed)
    assert (len(everything(out)), "--stream 1MB" in (out / "report.html").read_text()) == (4, True)
    said(capsys, "predict", out, file, "--missing", "mean", "--out", tmp_path / "p.csv")
    said(capsys, "predict", tmp_path / "held", file, "--missing", "mean", "--out", tmp_path / "q.csv")
    found, expected = ([row["prediction"] for row in read(tmp_path / name)] for name in ("p.csv", "q.csv"))
    if target in ("price", "visits"):
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-5)
    else:
        assert found == expected


def test_columns_of_any_kind_are_read_and_scaled_as_in_memory(tmp_path, capsys):
    """Far from zero, large, different late, with line ends, and of numbers that turn out to be text."""
    rng = np.random.default_rng(0)
    far = {"far": 1e9 + rng.normal(size=300), "large": 1e200 * rng.normal(size=300), "late": np.arange(300) // 200}
    words = ["a\nb", "7.50", "07"]
    code = np.array(["7.50"] * 200 + [words[number % 3] for number in range(100)], object)
    data = {"code": code, **far, "y": rng.normal(size=300) + far["late"]}
    file = write(tmp_path / "data.csv", {name: values.tolist() for name, values in data.items()})
    for out, more in (("held", []), ("streamed", ["--stream", "1MB"])):
        assert said(capsys, "fit", file, *arguments(tmp_path / out, "y", "--strength", "0.1", *more))[0] == 0
    held, streamed = (read(tmp_path / out / "coefficients.csv") for out in ("held", "streamed"))
    columns_of = [[row["column"] for row in rows] for rows in (held, streamed)]
    assert columns_of[0] == columns_of[1]
    assert columns_of[0][1:] == ["code=07", "code=7.50", "code=a\nb", "far", "large", "late"]
    with np.load(tmp_path / "held" / "model.npz") as held, np.load(tmp_path / "streamed" / "model.npz") as streamed:
        np.testing.assert_allclose(streamed["means"], held["means"], rtol=1e-14)
        np.testing.assert_allclose(streamed["scales"], held["scales"], rtol=1e-7)


KILLED = """
import functools, os, signal, sys
import paraxis.engines
from paraxis.cli import main
from paraxis._tables import _csv
from paraxis.cli.fit import _display
_csv._BYTES = 3000
paraxis.engines.Stream = functools.partial(paraxis.engines.Stream, save_every=0)
def stop(live, one):
    if one.iter_num == 3:
        os.kill(os.getpid(), signal.SIGKILL)
_display.Live.__call__ = stop
sys.exit(main(sys.argv[1:]))
"""


def test_a_fit_that_was_killed_or_interrupted_goes_on_to_the_same_bits(tmp_path, capsys, monkeypatch):
    file, folder, out = write(tmp_path / "data.csv", some("bought")), tmp_path / "run", tmp_path / "out"
    line = ["fit", file, *arguments(out, "bought", "--stream", "1MB", "--strength", "1e-4")]
    saved = [*line, "--stream-folder", folder]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, saved)], capture_output=True, check=False)
    assert (killed.returncode, out.exists()) == (-signal.SIGKILL, False)
    assert (folder / "paraxis-state.npz").exists()
    with monkeypatch.context() as patched:
        patched.setattr(_display.Live, "__call__", lambda live, one: os.kill(os.getpid(), signal.SIGINT))
        status, _, err = said(capsys, *saved)
    assert (status, out.exists()) == (130, False)
    assert f"interrupted; the run so far is saved in --stream-folder {folder}, and the same command goes on" in err
    status, _, err = said(capsys, *saved, "--strength", "1e-3")
    assert (status, out.exists()) == (2, False)
    expected = f"--stream-folder: folder '{folder}' holds another run: arguments had other values"
    assert expected in complaints(err)[0]
    status, printed, _ = said(capsys, *saved)
    assert (status, folder.exists()) == (0, False)
    assert re.search(r"the run went on after iteration [345], which was saved in", printed)
    went_on = everything(out)
    assert said(capsys, *line, "--force")[0] == 0
    whole = everything(out)
    assert went_on["coefficients.csv"] == whole["coefficients.csv"]
    with np.load(out / "model.npz") as model:
        found = {name: model[name].tobytes() for name in ("coef", "intercept")}
    with np.load(io.BytesIO(went_on["model.npz"])) as model:
        assert found == {name: model[name].tobytes() for name in ("coef", "intercept")}


def test_a_folder_that_is_no_place_for_a_run_is_refused(tmp_path, capsys):
    file, out = write(tmp_path / "data.csv", some("bought")), tmp_path / "out"
    other = tmp_path / "other"
    other.mkdir()
    write(other / "x.csv", {"x": [1]})
    for options, expected in {
        ("--stream-folder", other): "holds 'x.csv'; write --stream-folder ",
        ("--stream-folder", out / "run"): f"must not be in --out {out}, which holds the model alone; write --stream-f",
    }.items():
        status, _, err = said(capsys, "fit", file, *arguments(out, "bought", "--stream", "1MB", *options))
        assert (status, out.exists()) == (2, False)
        assert expected in complaints(err)[0]
    status, _, err = said(capsys, "fit", file, *arguments(out, "bought", "--stream-folder", tmp_path / "run"))
    assert (status, complaints(err)) == (2, ["--stream-folder is for --stream; write --stream 2GB, or leave it out"])


def refused(capsys: pytest.CaptureFixture[str], out: Path, data: Path, *more: object) -> tuple[str, str]:
    line = ["fit", data, "--target", "y", "--out", out, "--stream", "1MB", *more]
    status, _, err = said(capsys, *line)
    assert status == 2
    assert not out.exists()
    return complaints(err)[0], err


def test_what_cannot_be_streamed_is_refused_with_what_to_write(tmp_path, capsys):
    out = tmp_path / "out"
    rows = {"x": list(range(300)), "city": ["Bern"] * 299 + ["Chur"], "y": [number % 7 / 3 for number in range(300)]}
    file = write(tmp_path / "data.csv", rows)
    for options, expected in {
        ("--strengths", "0.1,1"): "needs all rows in memory, for cross-validation; write --strength 0.1 for one of",
        ("--stream", "1kB", "--text", "drop"): "bytes for this table; write --stream ",
        ("--stream", "much"): "--stream much must be a number of bytes, such as 2GB; write --stream 2GB",
        (): "column 'city' holds text, such as 'Bern'; write --text one-hot for a column per level, or --text drop",
    }.items():
        message, _ = refused(capsys, out, file, *options)
        assert expected in message
    np.savez(tmp_path / "data.npz", **{name: np.array(values) for name, values in rows.items()})  # pyright: ignore[reportArgumentType]
    message, err = refused(capsys, out, tmp_path / "data.npz", "--ignore", "city")
    assert "data.npz is not read in parts: --stream takes .csv and .parquet files, or a folder of" in message
    assert "--stream" not in settled_by(err)
    many = write(tmp_path / "many.csv", {**rows, "city": [f"town {number % 60}" for number in range(300)]})
    message, _ = refused(capsys, out, many, "--text", "one-hot")
    assert "column 'city' holds text of" in message
    assert "more than the 50 that --text one-hot takes; write --ignore city" in message
    named = write(tmp_path / "named.csv", {**rows, "user_id": list(range(300))})
    message, _ = refused(capsys, out, named, "--ignore", "city")
    assert "column 'user_id' names the rows: no two values are the same; write --id user_id" in message


COUNT = 600
PLAIN = [number * 37 % 101 / 10 for number in range(COUNT)]
LATE: dict[str, dict[str, list[Any]]] = {
    "dates": {"day": [f"2024-01-{number % 28 + 1:02}" for number in range(COUNT - 3)] + ["n.a."] * 3},
    "words": {"z": [*PLAIN[:-2], "?", "?"], "w": ["-", *PLAIN[1:-1], ""]},
    "large": {"b": [2**60 + (number == COUNT - 1) for number in range(COUNT)]},
    "names": {"user_id": [*range(COUNT)], "k_id": [f"u{number}" for number in range(COUNT)]},
}
LATE["all"] = {name: values for own in LATE.values() for name, values in own.items()}


@pytest.mark.parametrize("what", LATE)
def test_what_late_rows_show_is_told_as_of_all_rows_at_once(tmp_path, capsys, what):
    rows = {**LATE[what], "x": PLAIN, "y": [number % 7 / 3 for number in range(COUNT)]}
    file, out = write(tmp_path / "data.csv", rows), tmp_path / "out"
    told_of = []
    for more in ([], ["--stream", "1MB"]):
        status, _, err = said(capsys, "fit", file, "--target", "y", "--out", out, *more)
        assert status == 2
        line = settled_by(err)
        told_of.append((complaints(err), [word for word in line if word not in ("--stream", "1MB")]))
    if what in ("all", "words"):  # how many values are missing is told of the first rows that have some
        told_of = [([one for one in found if "missing value" not in one], line) for found, line in told_of]
        assert len(told_of[0][0]) == (4 if what == "all" else 1)
    assert told_of[0] == told_of[1]


def test_what_is_wrong_with_a_row_is_told_with_its_file_and_line(tmp_path, capsys):
    out, folder = tmp_path / "out", tmp_path / "rows"
    folder.mkdir()
    rows: dict[str, Any] = {"x": list(range(900)), "y": [number % 7 / 3 for number in range(900)]}
    write(folder / "a.csv", rows)
    file = write(folder / "b.csv", {**rows, "x": [None if number == 700 else number for number in range(900)]})
    message, err = refused(capsys, out, folder)
    assert f"{file} holds at least 1 missing value, in column 'x' (1), in line 702; write --missing" in message
    assert settled_by(err)[-2:] == ["--stream", "1MB"]
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:800], "1,2,3", *lines[800:]]) + "\n")
    message, _ = refused(capsys, out, folder, "--missing", "drop-rows")
    assert "b.csv cannot be read as CSV: line 801 has 3 values, but there are 2 columns" in message
    (folder / "b.csv").write_text("x,z\n1,2\n")
    message, _ = refused(capsys, out, folder)
    assert "b.csv lacks 'y' and has 'z' besides, compared with" in message
    (folder / "b.csv").write_text('x,y\n1,"2\n' + "3,4\n" * 30_000)
    message, _ = refused(capsys, out, folder)
    assert "b.csv cannot be read as CSV: line 2 opens a quote that is not closed" in message
    (folder / "c.parquet").touch()
    message, _ = refused(capsys, out, folder)
    assert f"{folder} must hold files of one kind, .csv, .parquet, .npy, and holds files .csv and .parquet" in message
    status, _, err = said(capsys, "fit", folder, "--target", "y", "--out", out)
    assert status == 2
    assert f"{folder} is a folder, whose files are read a part at a time; write --stream" in err


@pytest.mark.slow
def test_numpy_files_are_read_in_parts(tmp_path, capsys):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 3)).astype("float32")
    y = X @ [1.0, -2.0, 0.5] + rng.normal(size=500)
    folder = tmp_path / "rows"
    folder.mkdir()
    for part, rows in enumerate((slice(0, 123), slice(123, 500))):
        np.save(folder / f"X-{part}.npy", X[rows])
        np.save(folder / f"y-{part}.npy", y[rows])
    line = ["--target", "y", "--penalty", "none", "--devices", 1, "--test-fraction", 0]
    assert said(capsys, "fit", folder, *line, "--stream", "1MB", "--out", tmp_path / "out")[0] == 0
    found = [float(row["coefficient"]) for row in read(tmp_path / "out" / "coefficients.csv")]
    expected = np.linalg.lstsq(np.column_stack([np.ones(500), X]), y)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Ten times the rows, of 20 columns, take no more than a few numbers for each row."""
    program = (
        "import resource, sys; from paraxis.cli import main; status = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    peaks = []
    for count in (100_000, 1_000_000):
        rng = np.random.default_rng(0)
        folder = tmp_path / str(count)
        folder.mkdir()
        for part in range(count // 100_000):
            X = rng.normal(size=(100_000, 20))
            of = {f"x{number}": X[:, number] for number in range(20)} | {"y": X.sum(1) + rng.normal(size=100_000)}
            pq.write_table(pa.table(of), folder / f"{part}.parquet", row_group_size=10_000)
        line = ["fit", folder, "--target", "y", "--penalty", "none", "--stream", "100MB", "--out", tmp_path / "out"]
        ran = subprocess.run(
            [sys.executable, "-c", program, *map(str, line), "--force"], capture_output=True, text=True, check=True
        )
        peaks.append(int(ran.stdout.split()[-1]) * 1024)
    grown = peaks[1] - peaks[0]
    assert grown < 20 * 8 * 900_000  # the rows themselves are 144 MB
