"""No public face: a fit of each of hundreds of files would take minutes. What is read is what pandas and ``csv`` read.

A cell is a number, a truth value or a text as it stands there, or the file is refused with the line.
"""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as arrow_parquet
import pytest

from paraxis.cli.fit import CsvForm, _tables, _targets
from tests.cli._tables import LABELS, WRITERS, Labels, csv_text, labels, text_of

FORM = CsvForm()
_read: Any = _tables.read_table


def form_of(said: list[str]) -> CsvForm:
    given = dict(zip(said[::2], said[1::2], strict=True))
    return CsvForm(given.get("--encoding"), given.get("--delimiter", ","), given.get("--decimal", "."))


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_kept_exactly(kind: str, suffix: str, tmp_path: Path) -> None:
    for seed in range(6):
        drawn: Labels = labels(kind, seed)
        rng = np.random.default_rng(seed)
        path = tmp_path / f"data{seed}{suffix}"
        order = np.arange(len(drawn.values))
        said = WRITERS[suffix](path, {"row": order.tolist(), "y": drawn.values}, rng)
        table = _read(path, form_of(said))
        expected = [drawn.values[row] for row in table.columns["row"].values.tolist()]
        column = table.columns["y"]
        assert [text_of(value) for value in column.values.tolist()] == [text_of(value) for value in expected]
        assert not column.missing.any()
        target, _ = _targets.choose(column, "auto")
        again = target.labels(target.encoded(column))
        assert again.tolist() == expected
        assert set(target.classes) == set(expected)


def test_labels_in_another_type_are_compared_exactly() -> None:
    of = _tables.of_numpy
    integers = np.array([2**53, 2**53 + 1])
    target, _ = _targets.choose(of("y", integers, np.zeros(2, bool), "int64"), "auto")
    floats = np.array([2.0**53, 2.0**53 + 2])
    assert target.encoded(of("y", floats, np.zeros(2, bool), "float64")).tolist() == [0, _targets.UNKNOWN]
    unsigned = np.array([2**63 + 1, 2**53 + 1], np.uint64)
    assert target.encoded(of("y", unsigned, np.zeros(2, bool), "uint64")).tolist() == [_targets.UNKNOWN, 1]


NUMBERS = ["0", "-0", "12", "+7", "-3", "0.5", ".5", "5.", "1e3", "-2.5E-3", "0.1", "123456.789", " 4 ", "1e-320"]
WHOLE = ["0", "-1", "+7", "12", "9007199254740993", "-9223372036854775808"]
ABSENT = ["", "NA", "nan", "NaN", "null", "NULL", "None", "N/A", "<NA>", "#N/A", "n/a", "-nan"]


@pytest.mark.parametrize("seed", range(12))
def test_numbers_are_those_of_pandas(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    drawn = {
        "number": rng.choice(NUMBERS, 30).tolist(),
        "whole": rng.choice(WHOLE, 30).tolist(),
        "holes": rng.choice(NUMBERS + ABSENT, 30).tolist(),
        "nothing": rng.choice(ABSENT, 30).tolist(),
    }
    text = csv_text(drawn, rng)
    table = _read(write(tmp_path / "data.csv", text), FORM)
    frame: Any = pd.read_csv(io.StringIO(text), skipinitialspace=True)
    for name, column in table.columns.items():
        np.testing.assert_array_equal(column.numbers, frame[name].to_numpy(np.float64, na_value=np.nan))
    assert table.columns["whole"].values.tolist() == [int(cell) for cell in drawn["whole"]]
    there = {cell for name in ("holes", "nothing") for cell in drawn[name] if cell in ABSENT} - {""}
    assert {mark for column in table.columns.values() for mark in column.marks} == there


TEXTS = ["a", "NA", "", "nan", "-", "00", "1", "1.5", "x;y", "a\nb", 'q"q', " b", "true", "None", "0x1F", "1_000", "5%"]


@pytest.mark.parametrize("seed", range(12))
def test_texts_are_those_of_the_csv_module(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    text = csv_text({"a": ["word", *rng.choice(TEXTS, 20)], "b": ["word", *rng.choice(TEXTS, 20)]}, rng)
    table = _read(write(tmp_path / "data.csv", text), FORM)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    for name, column in table.columns.items():
        assert column.kind == "text"
        assert column.values.tolist() == [row[name] for row in rows]
        assert column.missing.tolist() == [row[name] == "" for row in rows]


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["00", "01"], "text", ["00", "01"]),
        (["007", "1.5"], "text", ["007", "1.5"]),
        (["0.5", "00.5"], "number", [0.5, 0.5]),
        (["0x1F", "7"], "text", ["0x1F", "7"]),
        (["nan(1)", "7"], "text", ["nan(1)", "7"]),
        (["True", "false"], "boolean", [True, False]),
        (["true", "1"], "text", ["true", "1"]),
        ([str(2**64), "1"], "text", [str(2**64), "1"]),
        (["-1", str(2**63)], "text", ["-1", str(2**63)]),
        ([str(2**64), "0.5"], "number", [2.0**64, 0.5]),
        (["1_000", "5"], "text", ["1_000", "5"]),
        (["٣", "5"], "text", ["٣", "5"]),
        (["2026-01-01", "2026-01-02"], "other", [0.0, 0.0]),
        (["2026-01-01", "soon"], "text", ["2026-01-01", "soon"]),
        (["1,5,2", "2"], "text", ["1,5,2", "2"]),
    ],
)
def test_a_column_is_of_one_kind_by_all_of_its_cells(
    cells: list[str], kind: str, values: list[Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "data.csv", csv_text({"a": cells, "b": [1, 2]}, np.random.default_rng(0)))
    column = _read(path, FORM).columns["a"]
    assert (column.kind, column.values.tolist()) == (kind, values)


REFUSED: list[tuple[str, str, list[str], str]] = [
    (
        'a,y\n1,2\n"1,5",3\n', "utf-8", [],
        "line 3, column 'a': '1,5' is no number with the decimal point '.'; write --decimal ','",
    ),
    ('a,y\n1,2\n"1,234.5",3\n', "utf-8", [], "line 3, column 'a': '1,234.5' is no number"),
    ("a,y\n1'000,2\n", "utf-8", [], "line 2, column 'a': \"1'000\" is no number"),
    (
        "a;y\n1,5;2\n2.5;3\n", "utf-8", ["--delimiter", ";", "--decimal", ","],
        "line 3, column 'a': '2.5' is no number with the decimal point ','; others are, such as '1,5'",
    ),
    ("a;y\n1,5;2\n", "utf-8", [], "its columns are separated by ';'; write --delimiter ';'"),
    ("a,y\n1,2\n", "utf-8", ["--delimiter", ";"], "its columns are separated by ','; write --delimiter ','"),
    ("a,y\né,1\n", "latin-1", [], "line 2 is not in UTF-8 (invalid continuation byte); write --encoding latin-1"),
    ("é,y\r\n1,2\r\n", "latin-1", [], "line 1 is not in UTF-8 (invalid continuation byte)"),
    ("a,y\n1,2\n", "utf-16-le", [], "line 1 holds a character of number 0, so it is no text, or in another encoding"),
    ("a,y\n1,\0\n", "latin-1", ["--encoding", "latin-1"], "line 2 holds a character of number 0"),
    ('a,y\n1,"2\n3,4\n', "utf-8", [], "line 2 opens a quote that is not closed"),
    ('a,y\n1,2\n3,"4\n5,6\n7,8\n', "utf-8", [], "line 3 opens a quote that is not closed"),
    ('a,y\n5" pipe,1\n3,"4\n5,6\n', "utf-8", [], "line 3 opens a quote that is not closed"),
    (
        'a,y\n"1\n1",2\n3,4,5\n', "utf-8", [],
        "line 4 has 3 values, but there are 2 columns; put quotes around a value with ','",
    ),
    ("a,y\r1,2\r3\r", "utf-8", [], "line 3 has 1 value, but there are 2 columns"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "encoding", "said", "message"), REFUSED)
def test_what_has_no_one_reading_is_refused_with_its_line(
    text: str, encoding: str, said: list[str], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "data.csv", text, encoding)
    with pytest.raises(Exception, match=re.escape(f"{path} cannot be read as CSV: {message}")):
        _read(path, form_of(said))


def test_a_decimal_comma_may_be_the_delimiter_too(tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", 'a,y\n"1,5",2\n3,"-0,25"\n')
    columns = _read(path, form_of(["--decimal", ","])).columns
    assert {name: column.values.tolist() for name, column in columns.items()} == {"a": [1.5, 3], "y": [2, -0.25]}


@pytest.mark.parametrize(
    ("cells", "strip", "values"),
    [
        (["1,234.50", "-12,345,678", "7"], ",", [1234.5, -12345678, 7]),
        (["1,234", "12"], ",", [1234, 12]),
        (["12%", "0.5 %", ""], "%", [12, 0.5, None]),
        (["$3.20", "-$1,000", "$ 5"], "$,", [3.2, -1000, 5]),
        (["1,5", "2.25"], ",", None),  # no thousands: 1,5 is not 15
        (["1,2345", "2"], ",", None),
        (["0,123", "2"], ",", None),  # nor do they begin with a zero
        (["5%", "many"], "%", ["5%", "many"]),
        (["34.4%", "0.344"], "%", ["34.4%", "0.344"]),  # another unit
        (["1,234.5,6", "2"], ",", ["1,234.5,6", "2"]),  # nor do they go on behind the point
    ],
)
def test_words_that_are_no_part_of_numbers_are_left_out_of_numbers(
    cells: list[str], strip: str, values: list[Any] | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "data.csv", "a,y\n" + "".join(f'"{cell}",1\n' for cell in cells))
    form = CsvForm(strip=tuple(strip))
    if values is None:  # refused, as without --strip
        with pytest.raises(Exception, match="is no number with the decimal point"):
            _read(path, form)
        return
    column = _read(path, form).columns["a"]
    found = [None if gone else value for value, gone in zip(column.values.tolist(), column.missing, strict=True)]
    assert found == values


def test_a_decimal_comma_is_read_if_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", "a;b;y\n1,5;-3;00,5\n2;1e-1;,25\n")
    columns = _read(path, form_of(["--delimiter", ";", "--decimal", ","])).columns
    assert {name: column.values.tolist() for name, column in columns.items()} == {
        "a": [1.5, 2], "b": [-3, 0.1], "y": [0.5, 0.25]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("klingon", ",", "."), "--encoding klingon is not known"),
        (("base64", ",", "."), "--encoding base64 is not known"),
        ((None, ";;", "."), "--delimiter ';;' must be one character"),
        ((None, '"', "."), "--delimiter '\"' must be one character"),
        ((None, ";", "'"), "--decimal \"'\" must be '.' or ','"),
        ((None, ";", ".", (), "fail", "fail", (".",)), "--strip '.' is part of numbers; write --strip '%', say"),
        ((None, ";", ".", (), "fail", "fail", ("x1",)), "--strip 'x1' is part of numbers"),
        ((None, ";", ".", (), "fail", "fail", ("(",)), "--strip '(' is part of numbers"),  # of -1, for some
        ((None, ";", ".", (), "fail", "fail", ("",)), "--strip '' is part of numbers"),
    ],
)
def test_how_a_file_is_written_is_checked(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        CsvForm(*given)


ARROW: dict[str, tuple[pa.Array, str, list[Any]]] = {
    "dictionary": (pa.array([2**60 + 1, 5, 5]).dictionary_encode(), "integer", [2**60 + 1, 5, 5]),
    "decimal": (pa.array([2**60 + 1, 5, 5], pa.decimal128(20)), "integer", [2**60 + 1, 5, 5]),
    "fractions": (pa.array([1, 5, 5], pa.decimal128(20, 2)), "number", [1.0, 5.0, 5.0]),
    "half": (pa.array(np.array([1, 0.5, 2], np.float16)), "number", [1, 0.5, 2]),
    "uint8": (pa.array([1, 255, 0], pa.uint8()), "integer", [1, 255, 0]),
    "view": (pa.array(["a", "b", "NA"], pa.string_view()), "text", ["a", "b", "NA"]),
    "large": (pa.array(["a", "b", "00"], pa.large_string()), "text", ["a", "b", "00"]),
    "binary": (pa.array([b"a", b"b", b"c"]), "other", [0, 0, 0]),
}


@pytest.mark.parametrize("name", ARROW)
@pytest.mark.parametrize("hole", [False, True])
def test_types_of_arrow_keep_their_values(name: str, hole: bool, tmp_path: Path) -> None:
    array, kind, values = ARROW[name]
    if hole:
        array = pa.concat_arrays([array, pa.nulls(1, array.type)])
    arrow_parquet.write_table(pa.table({"a": array}), tmp_path / "data.parquet")
    column = _read(tmp_path / "data.parquet", FORM).columns["a"]
    assert (column.kind, column.values[: len(values)].tolist()) == (kind, values)
    assert column.missing.tolist() == [False] * len(values) + [True] * hole


INDEXES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rows": (None, ()),
    "range": (pd.RangeIndex(3), ()),
    "numbers": (pd.Index([5, 6, 7]), ("__index_level_0__",)),
    "named": (pd.Index(["x", "y", "z"], name="patient"), ("patient",)),
    "several": (
        pd.MultiIndex.from_arrays([[1, 2, 3], [4, 5, 6]], names=["a", None]), ("a", "__index_level_1__"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("stripped", [False, True])
@pytest.mark.parametrize("name", INDEXES)
def test_the_index_of_a_data_frame_is_known(name: str, stripped: bool, tmp_path: Path) -> None:
    index, expected = INDEXES[name]
    frame, path = pd.DataFrame({"u": [1, 2, 3]}, index), tmp_path / "data.parquet"
    frame.to_parquet(path)
    if stripped:  # by a program that knows nothing of pandas
        arrow_parquet.write_table(arrow_parquet.read_table(path).replace_schema_metadata(None), path)
        expected = tuple(column for column in expected if column.startswith("__"))
    assert _read(path, FORM).index == expected
    frame.reset_index(drop=True).to_parquet(path, index=True)
    assert _read(path, FORM).index == ("__index_level_0__",)
    frame.to_csv(tmp_path / "data.csv")
    assert set(_read(tmp_path / "data.csv", FORM).index) <= {""}


def test_rows_of_another_length_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    text = 'a;"n;m";y\n1;"x\n;";2\n3;4\n\n5;"";6\n7;8;9;10\n11;"q""";12\n'
    table = _read(write(tmp_path / "data.csv", text), CsvForm(delimiter=";", uneven_rows="drop"))
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=";"))[1:]
    expected = [(number, row) for number, row in enumerate(filter(None, rows)) if len(row) == 3]
    assert table.numbers.tolist() == [number for number, _ in expected] == [0, 2, 4]
    assert table.columns["a"].values.tolist() == [int(row[0]) for _, row in expected]
    assert table.columns["y"].values.tolist() == [int(row[2]) for _, row in expected]
    assert [table.place(row) for row in range(3)] == ["line 2", "line 6", "line 8"]
    (told,) = table.notes
    assert told.startswith(
        "2 rows of another length left out: line 4 has 2 values, but there are 3 columns, and 1 more"
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [("a,a,a.2,y", ["a", "a.3", "a.2", "y"]), ("a,y,a,a", ["a", "y", "a.2", "a.3"]), (",a,,y", ["", "a", ".2", "y"])],
)
def test_columns_of_the_same_name_are_numbered(names: str, expected: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", f"{names}\n1,2,3,4\n")
    table = _read(path, CsvForm(same_names="number"))
    assert [*table.columns] == expected
    assert [column.values.tolist() for column in table.columns.values()] == [[1], [2], [3], [4]]
    assert list(table.index) == [name for name in expected if name in ("", ".2")]
