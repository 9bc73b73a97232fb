"""No public face: the size of a piece. CSV files in pieces have the rows of Python's own reader, wherever cut."""

import csv
import io
import pickle
import re
import time

import numpy as np
import pytest

import paraxis as px
from paraxis._tables import Blocks, _csv

SMALL = 256  # bytes of a piece
NOTES = ["plain", 'a "quoted" word', "two\nlines", "three\r\nor\nmore", "", "a,b", '"\n"']


def text(rng: np.random.Generator, rows: int, end: str) -> str:
    """Rows of two numbers, a target, and between them notes with quotes, separators and line ends in them."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator=end)
    writer.writerow(["a", "first\nnote" if rng.random() < 0.3 else "note", "b", "y"])
    for _ in range(rows):
        note = "".join(rng.choice(NOTES, rng.integers(1, 4)))
        writer.writerow([round(rng.normal(), 3), note, int(rng.integers(-9, 9)), int(rng.integers(3))])
    written = file.getvalue()
    return ("" if rng.random() < 0.7 else "\ufeff") + (written if rng.random() < 0.5 else written.removesuffix(end))


def expected(texts: list[str]) -> np.ndarray:
    """All rows' columns a, b and y by Python's own reader."""
    read = [row for one in texts for row in list(csv.reader(io.StringIO(one.removeprefix("\ufeff"), newline="")))[1:]]
    return np.array([[float(row[at]) for at in (0, 2, 3)] for row in read]).reshape(-1, 3)


@pytest.mark.parametrize("seed", range(12))
def test_rows_from_any_on_are_those_of_pythons_reader(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    rng = np.random.default_rng(seed)
    texts = [text(rng, int(rng.integers(0, 60)), str(rng.choice(["\n", "\r\n"]))) for _ in range(4)]
    for number, one in enumerate(texts):
        (tmp_path / f"{number}.csv").write_bytes(one.encode())
    want = expected(texts)
    table = px.Table.csv(tmp_path, target="y", columns=["a", "b"])
    assert len(table) == len(want)
    for start in rng.integers(0, len(want) + 1, 6):
        size = int(rng.integers(1, 40))
        other = pickle.loads(pickle.dumps(table)) if seed % 2 else table  # as another process has it
        blocks = list(other.blocks(size, int(start)))
        assert [len(y) for _, y in blocks] == [len(want[at : at + size]) for at in range(start, len(want), size)]
        np.testing.assert_array_equal(np.concatenate([want[:0, :2], *(X for X, _ in blocks)]), want[start:, :2])
        np.testing.assert_array_equal(np.concatenate([want[:0, 2], *(y for _, y in blocks)]), want[start:, 2])


def test_of_a_table_that_begins_late_what_is_before_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    rows = "".join(f"{number},{number % 7}\n" for number in range(1000))
    (tmp_path / "a.csv").write_text("a,y\n" + rows)
    table, read = px.Table.csv(tmp_path, target="y"), []
    assert len(table) == 1000
    parse = _csv.pieces
    monkeypatch.setattr(_csv, "pieces", lambda *given: (read.append(p) or p for p in parse(*given)))
    X, y = next(table.blocks(5, 900))
    assert X[:, 0].tolist() == [900, 901, 902, 903, 904]
    assert y.tolist() == [n % 7 for n in range(900, 905)]
    assert len(read) == 1


def test_a_place_counts_the_rows_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    good = "".join(f"{number},1\n" for number in range(200))
    for name, rows in (("a", good), ("b", ""), ("c", good + ",1\n" + good)):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + rows)
    with pytest.raises(px.DataError, match=r"got nan in '.*c\.csv', row 200, column 'x'"):
        list(px.Table.csv(tmp_path, target="y").blocks(7))


def test_a_quote_that_stays_open_is_an_error_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    (tmp_path / "a.csv").write_text("x,note,y\n" + "1,a,2\n" * 99 + '1,"open,2\n' + "1,a,2\n" * 2000)
    table = px.Table.csv(tmp_path, target="y", columns=["x"])
    with pytest.raises(px.DataError, match=r"a\.csv' cannot be read: ValueError: line 101 opens a quote that is not"):
        len(table)


def test_blocks_of_one_piece_go_to_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    (tmp_path / "a.csv").write_text("x,y\n" + "1.5,2\n" * 500)
    table = px.Table.csv(tmp_path, target="y")
    a_piece = SMALL // len("1.5,2\n")
    assert Blocks(table, 50, 10, table.dtype).together == a_piece // 10
    assert Blocks(table, 5, 100, table.dtype).together == 1


def test_other_delimiters_and_decimal_points_are_read_and_suggested(tmp_path):
    (tmp_path / "a.csv").write_text("x;z;y\n" + "1,5;2;3\n-0,25;4;5\n")
    with pytest.raises(px.DataError, match=r"a\.csv' has a single column if ',' separates them; write delimiter=';'"):
        px.Table.csv(tmp_path, target="y")
    with pytest.raises(px.DataError, match=r"columns must hold numbers, got 'x' .*as in 'x', write decimal=','$"):
        px.Table.csv(tmp_path, target="y", delimiter=";")
    table = px.Table.csv(tmp_path, target="y", delimiter=";", decimal=",")
    X, y = next(table.blocks(10))
    assert X.tolist() == [[1.5, 2], [-0.25, 4]]
    assert y.tolist() == [3, 5]
    for wrong in ("decimal", "delimiter"):
        with pytest.raises(ValueError, match=rf"{wrong} must be a single character, got .*; write px\.Table\.csv"):
            px.Table.csv(tmp_path, target="y", **{wrong: ";;"})


@pytest.mark.parametrize("seed", range(6))
def test_a_file_whose_first_line_is_numbers_is_said_to_lack_a_header(tmp_path, seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 5))
    rows = [[f"{x:.3g}" for x in rng.normal(size=count) * 10.0 ** rng.integers(-9, 9)] for _ in range(5)]
    rows[0][-1] = rows[0][0] if seed % 2 else rows[0][-1]
    text = "\n".join(map(",".join, rows)) + "\n"
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(px.DataError, match=r"first line reads as numbers: .*, write them before it, x1,") as refused:
        px.Table.csv(tmp_path, target="y")
    header = str(refused.value).rpartition(", ")[2]
    (tmp_path / "a.csv").write_text(f"{header}\n{text}")
    assert px.Table.csv(tmp_path, target="y").shape == (5, count - 1)


def test_of_a_file_with_names_it_is_not_said_that_they_are_missing_nor_that_commas_are_points(tmp_path):
    (tmp_path / "a.csv").write_text("2019,price,x,x\n1.5,2,3,4\n")
    for target in ("z", "x"):
        with pytest.raises(px.DataError) as refused:
            px.Table.csv(tmp_path, target=target)
        assert "numbers" not in str(refused.value)
        assert "decimal" not in str(refused.value)


def rows_of(folder, text: str, **columns: str) -> np.ndarray:
    """Columns x and y of a file, as a table has them."""
    (folder / "a.csv").write_bytes(text.encode())
    found = list(px.Table.csv(folder, target="y", columns=["x"], **columns).blocks(1000))
    return np.concatenate([np.stack([X[:, 0], y], 1) for X, y in found])


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("late", [7, 300])
@pytest.mark.parametrize("name", ['12" note', "note"])
def test_a_quote_that_does_not_begin_a_value_is_text(tmp_path, monkeypatch, delimiter, late, name):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    notes = {3: '"two\nlines"', late: '8" pipe', late + 9: '"a ""quoted"" word\r\n"', late + 80: 'a"b'}
    rows = [delimiter.join([str(number), notes.get(number, "plain"), str(number % 3)]) for number in range(500)]
    text = "\n".join([delimiter.join(["x", name, "y"]), *rows, ""])
    want = [[number, number % 3] for number in range(500)]
    np.testing.assert_array_equal(rows_of(tmp_path, text, delimiter=delimiter), want)


@pytest.mark.parametrize(
    "text",
    [
        "x,y\r{}", "x,y\r\n{}", "\ufeff\nx,y\n{}", "\ufeff\r\n\r\nx,y\r\n{}", "\n\n\nx,y\n\n{}", '\ufeff"x","y"\n{}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\n\n"])
def test_a_header_is_the_first_row_wherever_lines_end(tmp_path, monkeypatch, text, end):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    found = rows_of(tmp_path, text.format("".join(f"{number},1{end}" for number in range(400))))
    np.testing.assert_array_equal(found, [[number, 1] for number in range(400)])


def test_a_quote_that_stays_open_at_the_end_of_a_file_takes_no_rows_with_it(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,note\r" + "1,2,a\n" * 9 + '1,2,"open\n' + "1,2,a\n" * 20)
    table = px.Table.csv(tmp_path, target="y", columns=["x"])
    with pytest.raises(
        px.DataError, match=r"line 11 opens a quote that is not closed; write a quote within a value as"
    ):
        len(table)


def test_a_row_that_does_not_end_is_an_error_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x,note,y\n" + "1,a,2\r\n" * 99 + "1," + "a" * 20 * SMALL + ",2\n")
    table = px.Table.csv(tmp_path, target="y", columns=["x"])
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    with pytest.raises(px.DataError, match=r"line 101 does not end within 4,[0-9]+ bytes"):
        len(table)


def test_a_value_of_very_many_lines_is_not_looked_at_once_for_each(tmp_path):
    begun = time.process_time()
    text = "x,note,y\n" + "1,a,2\n" * 5 + '1,"' + "a\n" * 1_000_000 + '",2\n'
    assert len(rows_of(tmp_path, text)) == 6
    assert time.process_time() - begun < 20  # 0.2; it was minutes


def test_truth_values_stay_what_they_are_in_the_beginning_of_a_file(tmp_path):
    for name, first, then in (("a", "true,false\n", "1,0\n"), ("b", "0,1\n", "1,0\n")):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + first * 5 + then * 5)
    X, y = next(px.Table.csv(tmp_path, target="y").blocks(100))
    assert X[:, 0].tolist() == [1] * 10 + [0] * 5 + [1] * 5
    assert y.tolist() == [0] * 10 + [1] * 5 + [0] * 5
    one = px.Table.csv(tmp_path / "a.csv", target="y")
    assert next(one.blocks(100))[1].dtype == bool


@pytest.mark.parametrize("late", ["1,0\n", "TRUE,FALSE\n"])
def test_all_pieces_of_a_file_have_the_same_truth_values(tmp_path, monkeypatch, late):
    (tmp_path / "a.csv").write_text("x,y\n" + "true,false\n" * 99 + late * 99)
    table = px.Table.csv(tmp_path, target="y")
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    blocks = list(table.blocks(150))
    assert [y.dtype for _, y in blocks] == [bool, bool]
    assert np.concatenate([X[:, 0] for X, _ in blocks]).tolist() == [1] * 198


@pytest.mark.parametrize(("late", "column"), [("2,false\n", 0), ("true,maybe\n", 1), ("maybe,true\n", 0)])
def test_what_is_no_truth_value_late_is_an_error_that_names_its_column(tmp_path, monkeypatch, late, column):
    (tmp_path / "a.csv").write_text("x,y\n" + "true,false\n" * 99 + late * 99)
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    table = px.Table.csv(tmp_path, target="y")
    with pytest.raises(
        px.DataError, match=rf"a\.csv' cannot be read: .* column #{column}: CSV conversion error to bool"
    ):
        list(table.blocks(150))


@pytest.mark.parametrize("size", [2_500_000, 9_000_000])
def test_a_row_may_be_as_long_as_several_pieces(tmp_path, size):
    found = rows_of(tmp_path, "x,note,y\n" + "1,a,2\n" * 300_000 + f"3,{'a' * size},4\n5,b,6\n")
    assert found[-2:].tolist() == [[3, 4], [5, 6]]
    assert len(found) == 300_002


def test_of_a_table_whose_rows_were_not_counted_a_place_is_told_without_what_comes_behind(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x,y\n1,1\n1,1\n")
    (tmp_path / "b.csv").write_text("x,y\n1,1\nnan,1\n")
    (tmp_path / "c.csv").write_text("x,y\n" + "1,1\n" * 500 + "1,b\n")
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    table = px.Table.csv(tmp_path, target="y")
    with pytest.raises(px.DataError, match=r"got nan in '.*b\.csv', row 1, column 'x'"):
        list(table.blocks(2))


WHOLE = ["0", "1", "+1", "-1", " 1", "1 ", "10"]
WRITTEN = [*WHOLE, "1.0", "1e0", "1e1", "2.50"]
CODES = ["00", "01", "+01", " 007", "-00", "000"]


@pytest.mark.parametrize("seed", range(24))
def test_labels_are_the_same_where_their_numbers_are_or_among_codes_where_their_text_is(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(_csv, "_BYTES", SMALL)
    rng = np.random.default_rng(seed)
    labels = [str(label) for label in rng.choice(WHOLE if seed % 3 else WRITTEN, 300)]
    if seed % 3:  # one code is enough among whole numbers, wherever it is
        labels[int(rng.integers(300))] = str(rng.choice(CODES))
    rows = [f"{number},{label}\n" for number, label in enumerate(labels)]
    for name, own in (("a", rows[:100]), ("b", rows[100:])):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(own))
    is_code = any(re.fullmatch("[+-]?0[0-9]+", label.strip()) for label in labels)
    want = labels if is_code else [float(label) for label in labels]
    table = px.Table.csv(tmp_path, target="y")
    for size, start in ((1000, 0), (37, int(rng.integers(300)))):
        blocks = list(pickle.loads(pickle.dumps(table)).blocks(size, start))
        assert np.concatenate([y for _, y in blocks]).tolist() == want[start:]
        assert np.concatenate([X[:, 0] for X, _ in blocks]).tolist() == list(range(300))[start:]


def test_columns_to_predict_from_are_numbers_with_zeros_in_front_too(tmp_path):
    assert rows_of(tmp_path, "x,y\n007,1\n08,2\n").tolist() == [[7, 1], [8, 2]]


@pytest.mark.parametrize("empty", ["", '""'])
def test_a_missing_label_among_text_is_no_class(tmp_path, empty):
    (tmp_path / "a.csv").write_text(f"x,y\n1,a\n2,NA\n3,{empty}\n")
    with pytest.raises(px.DataError, match=r"got None in '.*a\.csv', row 2, column 'y'"):
        list(px.Table.csv(tmp_path, target="y").blocks(2))
    (tmp_path / "a.csv").write_text("x,y\n1,a\n2,NA\n3, b\n")
    assert next(px.Table.csv(tmp_path, target="y").blocks(9))[1].tolist() == ["a", "NA", " b"]


def test_zeros_in_front_are_labels_only_where_all_are_whole_numbers(tmp_path):
    """What is measured may be written so, with another decimal point, too."""
    (tmp_path / "a.csv").write_text("x;y\n1;03\n2;0,13\n3;1,5\n")
    table = px.Table.csv(tmp_path, target="y", delimiter=";", decimal=",")
    targets = np.concatenate([y for _, y in table.blocks(2)])
    np.testing.assert_array_equal(targets, [3, 0.13, 1.5])
    (tmp_path / "a.csv").write_text("x,y\n1,03\n2,0.13\n3,1.5\n")
    data = px.solve.rows(px.Table.csv(tmp_path, target="y"), engine=px.Stream(at_once=2))
    np.testing.assert_allclose(np.asarray(data.y)[:3], [3, 0.13, 1.5])
