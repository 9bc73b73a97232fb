"""CSV files have the rows of Python's own reader; labels stay apart; other delimiters and decimal points."""

import csv
import gzip
import io
import re

import numpy as np
import pyarrow.csv
import pytest

import paraxis as px

NOTES = ["plain", 'a "quoted" word', "two\nlines", "three\r\nor\nmore", "", "a,b", '"\n"']


def text(rng: np.random.Generator, rows: int, end: str) -> str:
    """Rows of two numbers, a target, and between them notes with quotes, separators and line ends in them."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator=end)
    writer.writerow(["a", "note", "b", "y"])
    for _ in range(rows):
        note = "".join(rng.choice(NOTES, rng.integers(1, 4)))
        writer.writerow([round(rng.normal(), 3), note, int(rng.integers(-9, 9)), int(rng.integers(3))])
    written = file.getvalue()
    return ("" if rng.random() < 0.7 else "\ufeff") + (written if rng.random() < 0.5 else written.removesuffix(end))


def expected(texts: list[str]) -> np.ndarray:
    """All rows' columns a, b and y by Python's own reader."""
    read = [row for one in texts for row in list(csv.reader(io.StringIO(one.removeprefix("\ufeff"), newline="")))[1:]]
    return np.array([[float(row[at]) for at in (0, 2, 3)] for row in read]).reshape(-1, 3)


@pytest.mark.parametrize("seed", range(6))
def test_table_of_csv_has_the_rows_of_pythons_reader(tmp_path, seed):
    rng = np.random.default_rng(seed)
    texts = [text(rng, int(rng.integers(0, 60)), str(rng.choice(["\n", "\r\n"]))) for _ in range(4)]
    for number, one in enumerate(texts):
        (tmp_path / f"{number}.csv").write_bytes(one.encode())
    want, size = expected(texts), int(rng.integers(1, 40))
    table = px.Table.csv(tmp_path, target="y", columns=["a", "b"])
    blocks = list(table.blocks(size))
    assert len(table) == len(want)
    assert [len(y) for _, y in blocks] == [len(want[at : at + size]) for at in range(0, len(want), size)]
    np.testing.assert_array_equal(np.concatenate([want[:0, :2], *(X for X, _ in blocks)]), want[:, :2])
    np.testing.assert_array_equal(np.concatenate([want[:0, 2], *(y for _, y in blocks)]), want[:, 2])


@pytest.mark.parametrize("row", ["1,2,3\n", "1\n", '1,"2\n'], ids=["more values", "fewer", "an open quote"])
def test_table_of_csv_refuses_a_row_that_is_not_as_the_others(tmp_path, row):
    (tmp_path / "a.csv").write_text("x,y\n" + "1,2\n" * 9 + row + "1,2\n" * 9)
    with pytest.raises(px.DataError, match=r"a\.csv' (cannot be read|has 1 quotes)"):
        list(px.Table.csv(tmp_path, target="y").blocks(100))


WHOLE = ["0", "1", "+1", "-1", " 1", "1 ", "10"]
WRITTEN = [*WHOLE, "1.0", "1e0", "1e1", "2.50"]
CODES = ["00", "01", "+01", " 007", "-00", "000", "9007199254740993"]  # and more digits than a float64 has


@pytest.mark.parametrize("seed", range(12))
def test_table_of_csv_tells_labels_apart_by_their_numbers_or_their_text(tmp_path, seed):
    rng = np.random.default_rng(seed)
    labels = [str(label) for label in rng.choice(WHOLE if seed % 3 else WRITTEN, 300)]
    if seed % 3:  # one code is enough among whole numbers, wherever it is
        labels[int(rng.integers(300))] = str(rng.choice(CODES))
    rows = [f"{number},{label}\n" for number, label in enumerate(labels)]
    for name, own in (("a", rows[:100]), ("b", rows[100:])):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(own))
    is_code = any(re.fullmatch("[+-]?(0[0-9]+|[0-9]{16,})", label.strip()) for label in labels)
    want = labels if is_code else [float(label) for label in labels]
    blocks = list(px.Table.csv(tmp_path, target="y").blocks(37))
    assert np.concatenate([y for _, y in blocks]).tolist() == want
    assert np.concatenate([X[:, 0] for X, _ in blocks]).tolist() == list(range(300))


@pytest.mark.parametrize("empty", ["", '""'])
def test_table_of_csv_takes_a_missing_label_among_text_for_no_class(tmp_path, empty):
    (tmp_path / "a.csv").write_text(f"x,y\n1,a\n2,NA\n3,{empty}\n")
    with pytest.raises(px.DataError, match=r"got None in '.*a\.csv', row 2, column 'y'"):
        list(px.Table.csv(tmp_path, target="y").blocks(2))
    (tmp_path / "a.csv").write_text("x,y\n1,a\n2,NA\n3, b\n")
    assert next(px.Table.csv(tmp_path, target="y").blocks(9))[1].tolist() == ["a", "NA", " b"]


def test_table_of_csv_has_text_for_labels_that_become_text_after_the_first_block(tmp_path):
    rows = f"0,1,{'a' * (1 << 20)}\n" * 20  # longer than a block
    (tmp_path / "1.csv").write_text(f"y,x,note\n{rows}unknown,3,\n")
    ((_, y),) = px.Table.csv(tmp_path, target="y", columns=["x"]).blocks(21)
    assert y.tolist() == ["0"] * 20 + ["unknown"]


@pytest.mark.parametrize(("kind", "wanted"), [("string", ["007", "8"]), ("double", [7, 8])])
def test_table_of_csv_takes_the_types_that_it_is_told(tmp_path, kind, wanted):
    (tmp_path / "1.csv").write_text("y,x\n007,1\n8,1\n")
    ((_, y),) = px.Table.csv(tmp_path, target="y", types={"y": kind}).blocks(9)
    assert y.tolist() == wanted
    with pytest.raises(ValueError, match="No type alias for text"):
        px.Table.csv(tmp_path, target="y", types={"y": "text"})
    (tmp_path / "2.csv").write_text("y,x\nsome,1\n")
    if kind == "double":
        with pytest.raises(px.DataError, match=r"2.csv' cannot be read: .*invalid value 'some'"):
            px.Table.csv(tmp_path, target="y", types={"y": kind})


@pytest.mark.parametrize("values", ["1e3 +2 .5 -1. 0", "true false", "NA 1", "1 inf"])
def test_table_of_csv_reads_the_numbers_that_arrow_reads(tmp_path, values):
    (tmp_path / "1.csv").write_text("y,x\n" + "".join(f"{value},1\n" for value in values.split()))
    table, read = px.Table.csv(tmp_path, target="y"), pyarrow.csv.read_csv(tmp_path / "1.csv")["y"].to_numpy()
    if np.isfinite(read.astype(float)).all():
        np.testing.assert_array_equal(np.concatenate([y for _, y in table.blocks(9)]), read)
    else:
        with pytest.raises(px.DataError, match=r"finite numbers, got (nan|inf) in '.*1.csv', row [01], column 'y'"):
            list(table.blocks(9))


def test_table_of_csv_reads_other_encodings_and_compressed_files(tmp_path):
    (tmp_path / "1.csv.gz").write_bytes(gzip.compress('größe,y\n"1",ä\n2,ö\n'.encode("latin-1")))
    table = px.Table.csv(tmp_path, target="y", encoding="latin-1")
    ((x, y),) = table.blocks(9)
    assert (table.columns, x.tolist(), y.tolist()) == (["größe"], [[1.0], [2.0]], ["ä", "ö"])
    with pytest.raises(px.DataError, match=r"1.csv.gz' cannot be read: UnicodeDecodeError"):
        px.Table.csv(tmp_path, target="y")
