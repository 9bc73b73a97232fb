"""``paraxis fit``: each mistake gets one line that names the culprit and what to write instead; nothing is written."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as arrow_parquet
import pytest

from paraxis.cli.fit import FitOptions
from tests.cli._files import NUM_ROWS, columns, complaints, everything, said, write

DATA = columns()
NUMBERS = {name: DATA[name] for name in ("age", "income", "tiny")}


def changed(**new: Any) -> dict[str, Any]:
    """The columns of numbers and a target ``y``, some of them changed."""
    return {**NUMBERS, "y": DATA["bought"], **new}


def with_one(value: Any, rows: int = 1) -> list[Any]:
    return [value] * rows + list(DATA["age"][rows:])


def some(first: Any, number: int, rest: Any) -> list[Any]:
    return [first] * number + [rest] * (NUM_ROWS - number)


def constants() -> dict[str, Any]:
    return {"a": [1] * 9, "b": ["x"] * 9, "y": [0.5, 1.5, 2] * 3}


LETTERS = [f"level {row}" for row in range(NUM_ROWS)]
CASES: list[tuple[dict[str, Any], str, str]] = [
    (
        changed(),
        "--target yy",
        "data.csv has no target column 'yy'; its columns are 'age', 'income', 'tiny', 'y'; did you mean 'y'?",
    ),
    (changed(), "--target bought", "no target column 'bought'; its columns are 'age', 'income', 'tiny', 'y'\n"),
    (
        changed(),
        "--target y --ignore agee",
        "no column to ignore 'agee'; its columns are 'age', 'income', 'tiny', 'y'; did you mean 'age'?",
    ),
    (changed(), "--target y --ignore y", "--ignore y is the target itself"),
    (
        changed(age=with_one(None, 3), tiny=with_one("NA")),
        "--target y",
        (
            "data.csv holds 4 missing values, in columns 'age' (3), 'tiny' (1), the first in line 2; write "
            "--missing drop-rows, or --missing mean"
        ),
    ),
    (
        changed(y=some(None, 2, "yes")),
        "--target y",
        "2 missing values, in column 'y' (2), the first in line 2; write --missing drop-rows\n",
    ),
    (
        changed(age=with_one(None), y=some(None, 2, "yes")),
        "--target y",
        "3 missing values, in columns 'y' (2), 'age' (1), the first in line 2; write --missing drop-rows\n",
    ),
    (
        changed(y=some(None, 2, "yes")),
        "--target y --missing mean",
        "no mean can stand for the target; write --missing drop-rows",
    ),
    (
        changed(age=[None] * NUM_ROWS),
        "--target y --missing drop-rows",
        "has a missing value in each row; write --missing mean, or --ignore COLUMN",
    ),
    (
        changed(age=with_one("inf"), tiny=with_one("-inf", 2)),
        "--target y",
        (
            "3 infinite values, in columns 'age' (1), 'tiny' (2), the first in line 2; make them missing, or leave "
            "those rows out"
        ),
    ),
    (
        changed(y=with_one("inf")),
        "--target y",
        "1 infinite value, in column 'y' (1), in line 2; make them missing, or leave those rows out",
    ),
    (
        changed(city=DATA["city"]),
        "--target y",
        "column 'city' holds text, such as 'Basel'; write --text one-hot for a column per level, or --text drop",
    ),
    (
        changed(age=with_one("?")),
        "--target y",
        (
            "column 'age' holds text, such as '?' in line 2 among numbers; write --na-values='?', or --text one-hot to "
            "take the numbers for text, too"
        ),
    ),
    (
        {"": LETTERS, "two words": LETTERS, **changed()},
        "--target y --text one-hot",
        "write --ignore 'two words'\n",
    ),
    (changed(a=LETTERS, b=LETTERS), "--target y", "columns 'a', 'b' hold text of 60 levels, such as 'level 0', more"),
    (
        changed(a=LETTERS),
        "--target y --text one-hot",
        (
            "column 'a' holds text of 60 levels, such as 'level 0', more than the 50 that --text one-hot takes; write "
            "--ignore a"
        ),
    ),
    (
        changed(day=["2026-01-01"] * NUM_ROWS),
        "--target y",
        "column 'day' holds neither numbers nor text but date32[day]; write --ignore day",
    ),
    (
        changed(y=["2026-01-01"] * NUM_ROWS),
        "--target y",
        "the target 'y' holds neither numbers nor text but date32[day]",
    ),
    (
        constants(),
        "--target y --text one-hot",
        "has no column to predict from: all are the target, left out or constant",
    ),
    (
        changed(y=["yes"] * NUM_ROWS),
        "--target y",
        "the target 'y' holds one class only, 'yes'; there is nothing to tell apart",
    ),
    (
        changed(y=[3] * NUM_ROWS),
        "--target y",
        "the target 'y' holds one class only, 3; there is nothing to tell apart",
    ),
    (
        changed(y=some("yes", 1, "no")),
        "--target y",
        "class 'yes' has one row only, too few to fit to and to hold out; write --test-fraction 0",
    ),
    (
        changed(y=some("yes", 30, "no")),
        "--target y --test-fraction 0.01",
        (
            "--test-fraction 0.01 of 60 rows is 1, which leaves fewer than one for each of 2 classes; write "
            "--test-fraction 0"
        ),
    ),
    (
        changed(y=some("yes", 4, "no")),
        "--target y --strengths 1,2 --test-fraction 0",
        "--folds 5 is too many: the rarest class has 4 to fit to; write --folds 4",
    ),
    (
        changed(y=some("yes", 1, "no")),
        "--target y --strengths 1,2 --test-fraction 0",
        "60 rows are too few for cross-validation; write --strength 1",
    ),
    (
        changed(y=DATA["price"]),
        "--target y --strengths 1,2 --folds 40",
        "--folds 40 is too many: in pairs, there are 24 to fit to; write --folds 24",
    ),
    (
        changed(y=DATA["price"]),
        "--target y --objective logistic",
        (
            "--objective logistic needs classes, but the target 'y' holds fractions, such as "
            f"{DATA['price'][0]:g}; write --objective squared"
        ),
    ),
    (
        changed(),
        "--target y --objective squared",
        "--objective squared needs numbers, but the target 'y' holds text, such as 'yes'; write --objective logistic",
    ),
    (
        changed(),
        "--target y --objective poisson",
        "--objective poisson needs numbers, but the target 'y' holds text, such as 'yes'; write --objective logistic",
    ),
    (
        changed(y=some(-2, 3, 1)),
        "--target y --objective poisson",
        "--objective poisson needs counts, but the target 'y' holds -2; write --objective squared",
    ),
    (
        changed(y=[0] * NUM_ROWS),
        "--target y --objective poisson",
        "--objective poisson needs a count above 0, but all of the target 'y' are 0",
    ),
    (
        changed(y=DATA["visits"]),
        "--target y --objective poisson --penalty l1",
        "--penalty l1 is not there for counts; write --penalty l2",
    ),
    (changed(y=[0.5] * NUM_ROWS), "--target y", "the target 'y' is 0.5 in every row; there is nothing to predict"),
    ({"a": [1, 2], "y": [0.5, 1]}, "--target y", "2 rows are too few to hold 1 out; write --test-fraction 0"),
    (
        {"a": [1, 2, 3], "b": [1, 4, 9], "y": [0.5, 1, 2]},
        "--target y --penalty none --test-fraction 0.3",
        "2 rows do not determine 2 coefficients and an intercept; write --penalty l2",
    ),
    (
        {"a": [1, 2, 3], "b": [1, 4, 9], "y": [0.5, 1, 2]},
        "--target y --strength 0 --test-fraction 0.3",
        "2 rows do not determine 2 coefficients and an intercept; write --strength 0.1\n",
    ),
    (
        {"a": [1, 2, 3], "b": [1, 4, 9], "y": [0.5, 1, 2]},
        "--target y --strengths 1,0 --test-fraction 0.3",
        "2 rows do not determine 2 coefficients and an intercept; write --strengths 0.01,0.1,1\n",
    ),
    (
        changed(),
        "--target y --strength 1 --strengths 1,2",
        "--strength is one number and --strengths a grid to choose from; give one of them",
    ),
    (changed(), "--target y --penalty none --strength 1", "--penalty none has no strength; write --penalty l2"),
    (
        changed(),
        "--target y --strengths 1,many",
        "--strengths '1,many' is no list of numbers; write --strengths 0.01,0.1,1",
    ),
    (
        changed(),
        "--target y --strengths 1,-1",
        "--strengths '1,-1' must be finite and not negative; write --strengths 0.01,0.1,1",
    ),
    (
        changed(),
        "--target y --strength inf",
        "--strength inf must be finite and not negative; write --strength 0.1, or leave it out\n",
    ),
    (changed(), "--target y --strength nan", "--strength nan must be finite and not negative; write --strength 0.1"),
    (changed(), "--target y --tol 0", "--tol 0 must be finite and above 0; write --tol 1e-6, or leave it out\n"),
    (changed(), "--target y --tol nan", "--tol nan must be finite and above 0; write --tol 1e-6"),
    (changed(), "--target y --strength=-1", "--strength -1 must be finite and not negative; write --strength 0.1"),
    (changed(), "--target y --tol=-1", "--tol -1 must be finite and above 0; write --tol 1e-6"),
    (changed(), "--target y --weights aga", "has no column of weights 'aga'; its columns are"),
    (changed(), "--target y --weights y", "--weights y is the target itself"),
    (changed(age=with_one(-1)), "--target y --weights age", "--weights age holds -1; weights must be finite and not"),
    (changed(w=DATA["city"]), "--target y --weights w", "--weights w holds text; weights must be numbers"),
    (changed(w=with_one("?")), "--target y --weights w", "'w' holds text, such as '?' in line 2 among numbers; write"),
    (
        changed(w=with_one("")),
        "--target y --weights w",
        "1 missing value, in column 'w' (1), in line 2; write --missing",
    ),
    (
        changed(w=with_one("")),
        "--target y --weights w --missing mean",
        "1 missing value, in column 'w' (1), in line 2; no mean can stand for a weight; write --missing drop-rows",
    ),
    (changed(w=[0] * NUM_ROWS), "--target y --weights w", "class 'no' has no row that counts among those fitted to"),
    (
        changed(y=DATA["price"]),
        "--target y --class-weight balanced",
        "--class-weight needs classes, but the target 'y' holds values; leave it out",
    ),
    (
        changed(),
        "--target y --class-weight yess=2",
        "--class-weight 'yess=2' names no class; they are 'no', 'yes'; did you mean 'yes'?",
    ),
    (changed(), "--target y --class-weight yes=-1", "--class-weight 'yes=-1' must be LABEL=NUMBER, with a finite"),
    (changed(), "--target y --class-weight 2", "--class-weight '2' must be LABEL=NUMBER"),
    (
        changed(),
        "--target y --class-weight balanced --class-weight yes=2",
        "--class-weight balanced says it for all classes; leave the others out",
    ),
    (changed(), "--target y --devices 9", "--devices 9 is more than the 8 there are"),
]


@pytest.mark.parametrize(("data", "arguments", "message"), CASES, ids=[f"{a} {m[-20:]}" for _, a, m in CASES])
def test_a_mistake_gets_one_line(
    data: dict[str, Any], arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "data.csv", data)
    before = everything(tmp_path)
    status, _, err = said(capsys, "fit", file, *arguments.split(), "--out", tmp_path / "new" / "out")
    assert status == 2
    assert message in complaints(err)[0] + "\n"
    assert everything(tmp_path) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("l1_ratio", "--l1-ratio nan must be from 0 to 1; write --l1-ratio 0.5"),
        ("test_fraction", "--test-fraction nan must be from 0 to 0.9; write --test-fraction 0.2"),
    ],
)
def test_what_is_no_number_is_no_option(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = f"--{name.replace('_', '-')}"
    status, out, err = said(capsys, "fit", "data.csv", "--target", "y", option, "nan")
    assert (status, out, err.count("\n"), err[:9]) == (2, "", 1, "paraxis: ")
    assert option in err
    # By versions of the parser that let it pass; others have words of their own.
    options: dict[str, Any] = {name: math.nan}
    with pytest.raises(Exception, match=f"^{message}$") as refused:
        FitOptions(Path("data.csv"), "y", **options)
    assert type(refused.value).__name__ == "CommandError"


def pickled(path: Path) -> None:
    np.savez(path, a=np.array([{}, None], object), allow_pickle=True)


def saved(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


def twice(path: Path) -> None:
    arrow_parquet.write_table(pa.table([[1], [2], [3]], ["a", "a", "y"]), path)


FILES: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    (
        "data.xls",
        b"",
        "data.xls: cannot tell what it is from its suffix '.xls'; it must be one of .csv, .parquet, .npz",
    ),
    ("data", b"", "cannot tell what it is from its suffix ''"),
    ("data.csv", b"", "data.csv cannot be read as CSV: "),
    ("data.csv", b"a,y\n1\n", "data.csv cannot be read as CSV: "),
    ("data.csv", b"a,y\n", "data.csv is empty: it holds no rows"),
    ("data.csv", b"a;y\n1;2\n", "its columns are separated by ';'; write --delimiter ';'\n"),
    ("data.csv", b"a\ty\n1\t2\n", "its columns are separated by '\\t'; write --delimiter tab\n"),
    ("data.csv", b"a,b,a,y\n1,2,3,4\n", "data.csv has several columns named 'a'; give each a name of its own"),
    ("data.csv", b"a,y\n\xff\xfe,1\n", "line 2 is not in UTF-8 (invalid start byte); write --encoding latin-1"),
    ("data.parquet", b"a,y\n1,2\n", "data.parquet cannot be read as PARQUET: "),
    ("data.parquet", twice, "has several columns named 'a'"),
    ("data.npz", b"a,y\n1,2\n", "data.npz cannot be read as NPZ: "),
    ("data.npz", b"", "data.npz cannot be read as NPZ: "),
    ("data.npz", pickled, "data.npz cannot be read as NPZ: "),
    (
        "data.npz",
        saved(a=np.zeros((2, 2, 2))),
        "its array 'a' has shape (2, 2, 2); an array must be (rows,) or (rows, columns)",
    ),
    ("data.npz", saved(a=np.zeros(2), y=np.zeros(3)), "its arrays have different numbers of rows, {'a': 2, 'y': 3}"),
    ("data.npz", saved(X=np.zeros((2, 2)), X1=np.zeros(2)), "has several columns named 'X1'"),
    (
        "data.npz",
        saved(a=np.zeros(2, complex), y=np.zeros(2)),
        "column 'a' holds neither numbers nor text but complex128",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_a_file_that_cannot_be_used_gets_one_line(
    name: str,
    content: bytes | Callable[[Path], None],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    status, out, err = said(capsys, "fit", file, "--target", "y", "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert message in complaints(err)[0] + "\n"
    assert not (tmp_path / "out").exists()


def test_a_single_array_is_no_file_of_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "data.npy", np.zeros(3))
    file = (tmp_path / "data.npy").rename(tmp_path / "data.npz")
    _, _, err = said(capsys, "fit", file, "--target", "y", "--out", tmp_path / "out")
    assert "it is one array, not an archive; write np.savez(path, X=X, y=y)" in err


def test_a_file_that_is_not_there_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.csv"
    expected = f"paraxis: {file} cannot be read: No such file or directory\n"
    assert said(capsys, "fit", file, "--target", "y", "--out", tmp_path / "out") == (2, "", expected)
    (tmp_path / "data.npz").mkdir()
    status, _, err = said(capsys, "fit", tmp_path / "data.npz", "--target", "y", "--out", tmp_path / "out")
    assert (status, err) == (2, f"paraxis: {tmp_path / 'data.npz'} cannot be read: Is a directory\n")


def test_a_directory_with_other_things_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.npz").write_bytes(b"ours")
    (out / "thesis.tex").write_text("years of work")
    before = everything(tmp_path)
    _, _, err = said(capsys, "fit", tmp_path / "none.csv", "--target", "y", "--out", out)
    message = f"--out {out} holds other things, 'thesis.tex'; give a directory of its own: --out {out / 'fit'}"
    assert complaints(err) == [message, f"{tmp_path / 'none.csv'} cannot be read: No such file or directory"]
    assert everything(tmp_path) == before


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    for out, message in (
        (occupied, f"--out {occupied} is a file; give a directory"),
        (occupied / "a" / "b", f"--out {occupied / 'a' / 'b'} cannot be written to: {occupied} is a file"),
    ):
        assert said(capsys, "fit", "none.csv", "--target", "y", "--out", out) == (2, "", f"paraxis: {message}\n")
    # Rights are no use: the one who runs this may be allowed everything.
    for out, reason in (
        (Path("/proc/fit"), "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        _, _, err = said(capsys, "fit", "none.csv", "--target", "y", "--out", out)
        assert err == f"paraxis: --out {out} cannot be written to: {reason}; give another place\n"
