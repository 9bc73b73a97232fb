"""No public face: files would have to be large to be read in parts, whose size is made small here.

``paraxis predict --stream`` writes what the same line without it writes, and all of it or nothing.
"""

import html
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from paraxis._tables import _csv
from paraxis.cli.fit import _parts
from tests.cli._files import complaints, everything, said, settled_by, write
from tests.cli._models import learnt, saved

NUM_ROWS = 300


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in (_csv, _parts):
        monkeypatch.setattr(reader, "_BYTES", 1500)
    monkeypatch.setenv("COLUMNS", "200")


def rows(kind: str = "logistic") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    own = {"u": rng.normal(size=NUM_ROWS).round(3).tolist(), "v": rng.normal(size=NUM_ROWS).round(3).tolist()}
    named = {"name": [f'no. "{number}",\n' for number in range(NUM_ROWS)]}
    if kind == "weighted":
        return {**own, "y": [None, *rng.normal(size=NUM_ROWS - 1)], "w": [number % 4 for number in range(NUM_ROWS)]}
    cities = [("Bern", "Chur", "Basel")[number // 100] for number in range(NUM_ROWS)]
    return {**named, **own, "city": cities, "y": [("a", "b", "c", "d")[number % 4] for number in range(NUM_ROWS)]}


def table_in(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    return arrow_csv.read_csv(path, parse_options=arrow_csv.ParseOptions(newlines_in_values=True))


@pytest.mark.parametrize(("kind", "suffix"), [("logistic", ".csv"), ("logistic", ".parquet"), ("weighted", ".csv")])
def test_predictions_and_what_is_told_are_those_of_all_rows_at_once(tmp_path, capsys, kind, suffix):
    model = saved(tmp_path / "model.npz", kind)
    file = write(tmp_path / "rows.csv", rows(kind))
    folder = tmp_path / "rows"
    folder.mkdir()
    for part, (start, stop) in enumerate([(0, 120), (120, 121), (121, NUM_ROWS)]):
        write(folder / f"{part}.csv", {name: values[start:stop] for name, values in rows(kind).items()})
    options = ["--probabilities", "--keep", "name", "--keep", "v"] if kind == "logistic" else []
    printed, written = [], []
    for data, more in ((file, []), (file, ["--stream"]), (folder, ["--stream"])):
        out = tmp_path / f"out{suffix}"
        status, text, err = said(capsys, "predict", model, data, *options, "--out", out, "--force", *more)
        assert (status, err) == (0, "")
        printed.append(text)
        written.append(table_in(out))
    assert printed[0] == printed[1] == printed[2]
    for streamed in written[1:]:
        assert streamed.schema == written[0].schema
        for name in streamed.column_names:
            found, expected = streamed[name].to_pylist(), written[0][name].to_pylist()
            if name.startswith("pro") or kind == "weighted":  # the last bit depends on how many rows are multiplied
                np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-12)
            else:
                assert found == expected
    shown = [said(capsys, "predict", model, file, *more)[1] for more in ([], ["--stream"])]
    assert shown[0] == shown[1]
    assert "290 more; for all of them" in shown[0]


def test_a_mistake_in_a_late_row_leaves_all_as_it_was(tmp_path, capsys):
    model = saved(tmp_path / "model.npz")
    data = rows()
    data["u"][280] = None
    del data["name"]
    file, out = write(tmp_path / "rows.csv", data), tmp_path / "old.csv"
    out.write_text("old")
    before = everything(tmp_path)
    status, _, err = said(capsys, "predict", model, file, "--out", out, "--force", "--stream")
    assert status == 2
    told = f"{file} holds at least 1 missing value, in column 'u' (1), in line 282; write --missing mean"
    assert told in complaints(err)[0]
    assert everything(tmp_path) == before
    assert said(capsys, *settled_by(err))[0] == 0
    assert out.read_text().count("\n") == 1 + NUM_ROWS


def plain(notes: dict[int, str], end: str) -> str:
    """A file of two numbers and notes as they are."""
    lines = [f"{number},{notes.get(number, 'plain')},{-number}" for number in range(NUM_ROWS)]
    return end.join(['u,12" note,v', *lines, ""])


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_quotes_within_values_do_not_move_rows(tmp_path, capsys, end):
    model, file = saved(tmp_path / "model.npz", "squared"), tmp_path / "rows.csv"
    file.write_bytes(plain({30: '12" pipe', 31: '"two\nlines, and ""more"""', 200: '"a\r\nb"'}, end).encode())
    written = []
    for more in ([], ["--stream"]):
        out = tmp_path / f"out{len(more)}.csv"
        assert said(capsys, "predict", model, file, "--keep", "u", "--out", out, *more)[0] == 0
        written.append(table_in(out))
    assert written[0]["row"].to_pylist() == list(range(NUM_ROWS))
    for name in ("row", "u"):
        assert written[1][name].to_pylist() == written[0][name].to_pylist()


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_quote_that_took_rows_into_a_value_is_told_whatever_other_parts_hold(tmp_path, capsys, end):
    model, file = saved(tmp_path / "model.npz", "squared"), tmp_path / "rows.csv"
    notes = {20: '"open', 31: '"closed"', 32: '8" pipe', 33: '8" pipe', 200: '8" pipe', 280: '"a ""b"""'}
    file.write_bytes(plain(notes, end).encode())
    for more in ([], ["--stream"]):
        status, _, err = said(capsys, "predict", model, file, "--out", tmp_path / "out.csv", *more)
        assert status == 2
        assert "line 22 opens a quote that is not closed" in complaints(err)[0]


def test_a_folder_is_predicted_with_stream_only_which_is_told(tmp_path, capsys):
    model, folder = saved(tmp_path / "model.npz"), tmp_path / "rows"
    folder.mkdir()
    data = rows()
    del data["name"]
    write(folder / "a.csv", data)
    status, _, err = said(capsys, "predict", model, folder)
    assert status == 2
    assert complaints(err) == [f"{folder} is a folder, whose files are read a part at a time; write --stream"]
    assert said(capsys, *settled_by(err))[0] == 0


@pytest.mark.parametrize("late", ["fractions", "whole", "text", "truth"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_column_is_written_as_of_one_type_whatever_a_part_of_it_is(tmp_path, capsys, suffix, late):
    """Parts with whole numbers only, and with nothing, would be of other types by themselves."""
    kind, name = ("squared", "y") if late in ("text", "truth") else ("logistic", "u")
    model = saved(tmp_path / "model.npz", kind)
    values = {"fractions": "0.5", "whole": "7", "text": "many", "truth": "true"}
    data: dict[str, list[str | None]] = {
        "u": ["1"] * NUM_ROWS,
        "v": ["2"] * NUM_ROWS,
        "city": ["Bern"] * NUM_ROWS,
        "y": ["1"] * NUM_ROWS,
    }
    data[name] = [None] * 100 + [str(number) for number in range(100)] + [values[late]] * 100
    file = write(tmp_path / "rows.csv", data)
    found = []
    for more in ([], ["--stream"]):
        out = tmp_path / f"out{suffix}"
        line = ["predict", model, file, "--keep", name, "--missing", "mean", "--out", out, "--force"]
        status, text, err = said(capsys, *line, *more)
        assert (status, err) == (0, "")
        found.append((out.read_bytes() if suffix == ".csv" else table_in(out), text))
    assert found[0] == found[1]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    model = saved(tmp_path / "model.npz", "squared")
    program = (
        "import resource, sys; from paraxis.cli import main; status = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    peaks = []
    for count in (1, 12):
        folder = tmp_path / str(count)
        folder.mkdir()
        rng = np.random.default_rng(0)
        for part in range(count):
            of = {name: rng.normal(size=400_000) for name in "uvy"}
            pq.write_table(pa.table(of), folder / f"{part}.parquet", row_group_size=50_000)
        line = ["predict", model, folder, "--stream", "--out", tmp_path / f"{count}.csv"]
        ran = subprocess.run(
            [sys.executable, "-c", program, *map(str, line)], capture_output=True, text=True, check=True
        )
        peaks.append(int(ran.stdout.split()[-1]) * 1024)
    assert peaks[1] < peaks[0] + 30e6  # the rows that are more are 106 MB


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["held", "streamed"])
def test_it_is_told_for_how_many_values_a_mean_stands(
    streamed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_csv, "_BYTES", 300)  # several parts
    data, _ = learnt("squared")
    gaps = {"u": (3, 17, 39), "v": (17,), "y": ()}
    rows = {name: [None if row in gaps[name] else x for row, x in enumerate(data[name].tolist())] for name in gaps}
    file, out = write(tmp_path / "data.csv", rows), tmp_path / "out"
    asked = ["--target", "y", "--missing", "mean", "--devices", 1, "--out", out, *(["--stream", "1MB"] * streamed)]
    status, text, err = said(capsys, "fit", file, *asked)
    assert (status, err) == (0, "")
    told = "4 missing values, in columns 'u' (3), 'v' (1): the column's mean stands for each"
    assert f"note {told}\n" in text
    assert told in html.unescape((out / "report.html").read_text())
    new = write(tmp_path / "new.csv", {"u": rows["u"], "v": data["v"]})
    _, text, _ = said(capsys, "predict", out, new, "--stream")
    assert (
        "note 3 missing values, in column 'u' (3): the mean of the rows that were fitted to stands for each\n" in text
    )
    whole = write(tmp_path / "whole.csv", {name: data[name] for name in "uv"})
    assert "missing" not in said(capsys, "predict", out, whole)[1]
