"""Tables: the same rows in the same order whatever the files, in blocks; what is wrong is named."""

import decimal
import os
import threading
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import paraxis as px

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 3)).astype("float32")
Y = rng.integers(0, 2, 23)
CUTS = [0, 9, 9, 23]  # three files, one of them empty


def columns(start: int, stop: int, **others) -> pa.Table:
    named = {f"x{number}": X[start:stop, number] for number in range(3)} | {"y": Y[start:stop]} | others
    return pa.table(named)


def written(folder, kind: str) -> px.Table:
    """The rows as three files, whose columns stand in another order each; made in another order than read."""
    for part in (2, 0, 1):
        of = columns(CUTS[part], CUTS[part + 1])
        of = of.select([*of.column_names[part:], *of.column_names[:part]])
        if kind == "parquet":
            pq.write_table(of, folder / f"{part}.parquet", row_group_size=4)
        else:
            pyarrow.csv.write_csv(of, folder / f"{part}.csv")
    names = ["x0", "x1", "x2"]
    return getattr(px.Table, kind)(folder, target="y", columns=names, dtype="float32")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_table_gives_rows_in_blocks_in_the_order_of_the_files_names(tmp_path, kind, size):
    table = written(tmp_path, kind)
    assert (len(table), table.shape, table.dtype) == (23, (23, 3), np.float32)
    for _ in range(2):  # as often as one likes
        blocks = list(table.blocks(size))
        assert [len(y) for _, y in blocks] == [size] * (23 // size) + [23 % size] * (23 % size > 0)
        np.testing.assert_array_equal(np.concatenate([y for _, y in blocks]), Y)
        found = np.concatenate([x for x, _ in blocks])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, X, rtol=1e-6)  # a CSV file has nine digits
    assert threading.active_count() < 20


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_table_has_a_column_of_each_folder_that_names_one(tmp_path, kind):
    """As Arrow's own dataset has it; folders of unfinished work are none."""
    frame = pd.DataFrame(X, columns=["x0", "x1", "x2"]).assign(y=Y, year=[2023, 2024] * 11 + [2023], share=0.25)
    parts = pa.Table.from_pandas(frame, preserve_index=False), tmp_path, ["year", "share"]
    pyarrow.dataset.write_dataset(*parts[:2], format=kind, partitioning=parts[2], partitioning_flavor="hive")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / f"half.{kind}").write_text("half")
    read = pyarrow.dataset.dataset(tmp_path, format=kind, partitioning="hive").to_table().to_pandas()
    table = getattr(px.Table, kind)(tmp_path, target="y")
    ((found, y),) = table.blocks(23)
    assert (table.columns, y.tolist()) == (["x0", "x1", "x2", "year", "share"], read["y"].tolist())
    np.testing.assert_allclose(found, read[table.columns].astype(float), rtol=1e-6)
    (tmp_path / "year=all").mkdir()
    next(tmp_path.rglob(f"share=0.25/*.{kind}")).rename(tmp_path / "year=all" / f"0.{kind}")
    with pytest.raises(px.DataError, match=r"'share' once, got it 0 times|'year' \(string\)"):
        getattr(px.Table, kind)(tmp_path, target="y")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_table_takes_an_index_of_pandas_for_no_column_to_predict_from(tmp_path, kind):
    """Of shuffled rows, it would tell the target."""
    frame = pd.DataFrame(X, columns=["x0", "x1", "x2"]).assign(y=Y).sample(frac=1, random_state=0)
    file = tmp_path / f"rows.{kind}"
    for name in ("case", None) if kind == "parquet" else (None,):
        getattr(frame.rename_axis(name), f"to_{kind}")(file)
        table = getattr(px.Table, kind)(tmp_path, target="y")
        assert table.columns == ["x0", "x1", "x2"]
        np.testing.assert_allclose(next(table.blocks(23))[0], frame[["x0", "x1", "x2"]].to_numpy(), rtol=1e-6)
        asked = name or ("__index_level_0__" if kind == "parquet" else "")
        assert getattr(px.Table, kind)(tmp_path, target="y", columns=["x0", asked]).columns == ["x0", asked]


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrays"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_table_names_a_number_that_is_none_by_file_row_and_column(tmp_path, kind, value):
    x = X.copy()
    x[11, 1] = value
    for part, (start, stop) in enumerate([(0, 9), (9, 23)]):
        of = {"x0": x[start:stop, 0], "x1": x[start:stop, 1], "y": Y[start:stop]}
        if kind == "parquet":
            pq.write_table(pa.table(of), tmp_path / f"{part}.parquet")
        else:
            pyarrow.csv.write_csv(pa.table(of), tmp_path / f"{part}.csv")
    if kind == "arrays":
        table, place = px.Table.of_arrays(x, Y), "row 11"
    else:
        table, place = getattr(px.Table, kind)(tmp_path, target="y"), rf"'.*1\.{kind}', row 2"
    with pytest.raises(px.DataError, match=rf"finite numbers, got {value} in {place}, column 'x1'; write"):
        list(table.blocks(5))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_table_names_files_that_change_or_go(tmp_path, kind):
    table = written(tmp_path, kind)
    list(table.blocks(10))
    last = max(tmp_path.iterdir())
    os.utime(last, ns=(1, 1))
    with pytest.raises(px.DataError, match=rf"{last.name}' has changed or is gone since it was looked at first"):
        list(table.blocks(10))
    last.unlink()
    with pytest.raises(px.DataError, match=rf"{last.name}' has changed or is gone since it was looked at first"):
        list(table.blocks(10))


def test_table_of_csv_has_integer_classes_where_all_are(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{number},{number % 2}\n" for number in range(64)))
    table = px.Table.csv(tmp_path, target="y")
    assert px.solve.rows(table, engine=px.Stream(at_once=4)).y.dtype.kind == "i"
    (tmp_path / "b.csv").write_text("x,y\n1,\n")
    with pytest.raises(px.DataError, match=r"got nan in '.*b\.csv', row 0, column 'y'"):
        list(px.Table.csv(tmp_path, target="y").blocks(100))


class Uneven:
    """A source whose blocks have the sizes that it likes."""

    columns, target, dtype = ("x",), "y", "float32"

    def __len__(self) -> int:
        return 10

    def blocks(self, size: int):
        del size
        return ((np.full((own, 1), float(own)), np.full(own, own)) for own in (2, 1, 4, 3))


@pytest.mark.parametrize("size", [1, 2, 3, 10, 11])
def test_table_puts_blocks_together_of_what_a_source_gives(size):
    blocks = list(px.Table(Uneven()).blocks(size))
    assert [len(y) for _, y in blocks] == [size] * (10 // size) + [10 % size] * (10 % size > 0)
    np.testing.assert_array_equal(np.concatenate([y for _, y in blocks]), [2, 2, 1, 4, 4, 4, 4, 3, 3, 3])
    np.testing.assert_array_equal(np.concatenate([x[:, 0] for x, _ in blocks]), [2, 2, 1, 4, 4, 4, 4, 3, 3, 3])


def test_table_refuses_columns_that_do_not_fit(tmp_path):
    cases: tuple[tuple[Any, Any, dict[str, Any], str], ...] = (
        (None, None, {}, r"must have \.parquet files, or be one, got '.*', which has none"),
        (columns(0, 9, city=["a"] * 9), None, {}, r"columns must hold numbers, got 'city' \(string\)"),
        (columns(0, 9), None, {"target": "z"}, "must have 'z' once, got it 0 times"),
        (columns(0, 9, none=pa.nulls(9)), None, {}, "got nan in '.*', row 0, column 'none'"),
        (columns(0, 9), None, {"columns": ["x0", "x0"]}, "each once and not the target 'y'"),
        (columns(0, 9), columns(9, 23).drop_columns("x1"), {}, r"b\.parquet' must have 'x1' once, got it 0 times"),
    )
    for first, second, chosen, text in cases:
        for name, table in (("a", first), ("b", second)):
            (tmp_path / f"{name}.parquet").unlink(missing_ok=True)
            if table is not None:
                pq.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(px.DataError, match=text):
            list(px.Table.parquet(tmp_path, **{"target": "y", **chosen}).blocks(9))


def test_table_of_parquet_has_the_columns_and_targets_of_all_files(tmp_path):
    cents = pa.array([decimal.Decimal(int(y)) / 4 for y in Y[9:]], pa.decimal128(9, 2))
    pq.write_table(columns(0, 9), tmp_path / "0.parquet")
    for second, match in (
        (columns(9, 23, more=Y[9:]), r"1.parquet' has other columns than '.*0.parquet': \['more'\]; .*columns="),
        (columns(9, 23, y=Y[9:].astype(str)), r"target 'y' is string in '.*1.parquet', and int64 in '.*0.parquet'"),
        (columns(9, 23, y=cents), None),
    ):
        pq.write_table(second, tmp_path / "1.parquet")
        if match is None:
            found = np.concatenate([y for _, y in px.Table.parquet(tmp_path, target="y").blocks(9)])
            np.testing.assert_array_equal(found, [*Y[:9], *Y[9:] / 4])
        else:
            with pytest.raises(px.DataError, match=match):
                px.Table.parquet(tmp_path, target="y")
    for pair in ((np.ma.masked_equal(X, X[0, 0]), Y), (X, np.ma.masked_equal(Y, 1))):
        with pytest.raises(px.DataError, match="is a MaskedArray, which leaves entries out"):
            px.Table.of_arrays(*pair)


def test_table_of_parquet_holds_the_rows_that_are_asked_for_and_not_a_row_group(tmp_path):
    values = np.random.default_rng(0).normal(size=(400_000, 8))  # 26 MB in one row group
    pq.write_table(
        pa.table({f"x{at}": x for at, x in enumerate(values.T)} | {"y": values[:, 0]}), tmp_path / "a.parquet"
    )
    before, held = pa.total_allocated_bytes(), []
    for X, _ in px.Table.parquet(tmp_path, target="y").blocks(10_000):
        held.append(pa.total_allocated_bytes() - before)
        assert len(X) <= 10_000
    assert max(held) < 30e6
