"""No public face: how often a file is read is not seen, nor that long reading is told of a small file.

A file with many faults gets all complaints at once, and one command line that settles them when it is pasted.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis._tables import _csv
from paraxis.cli.fit import _display, _fit, _parts
from tests.cli._files import complaints, everything, pasted, read, said, settled_by

NUM_ROWS = 60
# Refused when all that the file and its options could be blamed for has been looked at, and before anything is fitted.
LAST = ["--devices", "9"]
BEYOND = "--devices 9 is more than the 8 there are"


@dataclasses.dataclass
class Draft:
    """A file to be, and what is asked of the fit."""

    columns: dict[str, list[str]]
    target: str = "y"
    arguments: list[str] = dataclasses.field(default_factory=list)
    delimiter: str = ","
    encoding: str = "utf-8"
    short: int = 0  # rows at the end, of one value
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> Path:
        header = [self.renamed.get(name, name) for name in self.columns]
        rows = [header, *zip(*self.columns.values(), strict=True)]
        rows += [row[:1] for row in rows[1 : 1 + self.short]]
        quoted = [[f'"{cell}"' if set(cell) & set(',;\n"|\t') else cell for cell in row] for row in rows]
        text = "".join(self.delimiter.join(row) + "\r\n" for row in quoted)
        path.write_bytes(text.encode(self.encoding))
        return path

    def mark(self, name: str, words: list[str]) -> None:
        cells = self.columns[name]
        for index, word in enumerate(words):
            cells[3 + 5 * index] = word


def draft() -> Draft:
    rng = np.random.default_rng(0)
    numbers = {name: [f"{value:.2f}" for value in rng.normal(50, 20, NUM_ROWS)] for name in ("größe", "b", "c")}
    return Draft({**numbers, "y": [("no", "yes")[row] for row in rng.integers(0, 2, NUM_ROWS)]})


def decimal_commas(it: Draft) -> None:
    for name in ("größe", "b", "c"):
        it.columns[name] = [cell.replace(".", ",") for cell in it.columns[name]]


def column(name: str, cell: Callable[[int], str]) -> Callable[[Draft], None]:
    """A column put in front of the target."""

    def put(it: Draft) -> None:
        it.columns = {name: [cell(row) for row in range(NUM_ROWS)], **it.columns}

    return put


def twice(it: Draft) -> None:
    column("more", lambda row: f"{row % 9}.5")(it)
    it.renamed["more"] = "größe"


def attribute(**values: Any) -> Callable[[Draft], None]:
    return lambda it: it.__dict__.update(values)


def asked(*arguments: str) -> Callable[[Draft], None]:
    return lambda it: it.arguments.extend(arguments)


FAULTS: dict[str, tuple[Callable[[Draft], None], str]] = {
    "latin-1": (attribute(encoding="latin-1"), "not in UTF-8"),
    "utf-16 without a mark": (attribute(encoding="utf-16-le"), "character of number 0"),
    "semicolons": (attribute(delimiter=";"), "separated by ';'"),
    "tabs": (attribute(delimiter="\t"), "separated by '.t'"),
    "decimal commas": (decimal_commas, "no number with the decimal point '.'"),
    "thousands": (column("rent", lambda row: f"1'{row:03d}"), "'rent': .* is no number"),
    "thousands and fractions": (column("income", lambda row: f"{row * 97.5:,.2f}"), "'income': .* write --strip ,"),
    "percent": (column("share", lambda row: f"{row}.5%"), "'share'.* holds? numbers with .*'%'.* --strip %"),
    "prices": (column("price", lambda row: f"${row * 97.5:,.2f}"), r"'price'.* hold.* numbers with .*--strip '\$'"),
    "misspelt target": (attribute(target="yy"), "no target column 'yy'"),
    "misspelt ignore": (asked("--ignore", "ignored"), "no column to ignore 'ignored'"),
    "ids of text": (column("patient id", lambda row: f"P{row:04d}"), "'patient id'.* names? the rows"),
    "ids of digits": (column("customerID", lambda row: str(7000 + 3 * row)), "'customerID'.* names? the rows"),
    "references": (column("sample", lambda row: f"B-{row:04d}x"), "'sample'.* no two values are the same"),
    "dates": (column("day", lambda row: f"2026-01-{1 + row % 28:02d}"), "'day' holds neither numbers nor text"),
    "other dates": (
        column("seen", lambda row: f"{1 + row % 28}.{1 + row // 28}.2026"),
        f"'seen'.* text of {NUM_ROWS} levels",
    ),
    "remarks": (column("- it's\n$(a)", lambda row: f"remark {row}"), rf"- it's\\n\$\(a\).* text of {NUM_ROWS} levels"),
    "places": (column("city", lambda row: ("Bern", "Chur", "NA")[row % 3]), "'city'.* holds? text"),
    "codes": (column("code", lambda row: ("00", "01")[row * row % 3 % 2]), "'code'.* holds? text"),
    "gaps": (lambda it: it.mark("b", [""] * 4), r"missing values?, .*'b' \(4\)"),
    "a column of gaps": (
        column("empty", lambda row: "" if row else "1"),
        rf"missing values?, .*'empty' \({NUM_ROWS - 1}\)",
    ),
    "marks": (lambda it: it.mark("c", ["?", "-", "?"]), "'c' holds text, such as '.' in line .* among numbers"),
    "infinities": (lambda it: it.mark("c", ["inf", "-Infinity"]), r"infinite values, in column 'c' \(2\)"),
    "no target": (lambda it: it.mark("y", ["", ""]), r"missing values?, in columns? 'y' \(2\)"),
    "large integers": (column("large", lambda row: str(2**60 + row // 2)), "integers that are one float64"),
    "a rare class": (lambda it: it.mark("y", ["NA"]), "class 'NA' has one row only"),
    "an objective": (asked("--objective", "squared"), "--objective squared needs numbers"),
    "weights": (asked("--weights", "bb"), "no column of weights 'bb'"),
    "class weights": (asked("--class-weight", "yess=2"), "names no class"),
    "short rows": (attribute(short=3), "line .* has 1 value, but .* columns, and 2 more rows of another length"),
    "the same name": (twice, "several columns named 'größe'"),
    "folds": (asked("--strengths", "1,2", "--folds", f"{NUM_ROWS - 1}"), f"--folds {NUM_ROWS - 1} is too many"),
}
APART = [
    {"latin-1", "utf-16 without a mark"},
    {"semicolons", "tabs"},
    {"marks", "infinities"},
    {"a rare class", "no target"},
    {"a rare class", "folds"},
    {"a rare class", "gaps"},
]


def drawn(seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    chosen = rng.choice(list(FAULTS), rng.integers(2, 9), replace=False).tolist()
    clashing = [both for both in APART if both <= set(chosen)]
    return [fault for fault in chosen if not any(fault == min(both) for both in clashing)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_settled(faults: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    it = draft()
    for fault in faults:
        FAULTS[fault][0](it)
    it.write(tmp_path / "data file.csv")
    before = everything(tmp_path)
    status, out, err = said(capsys, "fit", "data file.csv", "--target", it.target, *it.arguments)
    assert (status, out) == (2, "")
    lines = complaints(err)
    unheard = [fault for fault in faults if not any(re.search(FAULTS[fault][1], line) for line in lines)]
    assert not unheard, err
    pasted = settled_by(err)
    _, _, after = said(capsys, *pasted, *LAST)
    assert complaints(after)[0].startswith(BEYOND), (err, after)
    assert everything(tmp_path) == before
    return pasted


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_settled(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_settled([fault], tmp_path, capsys)


@pytest.mark.parametrize("seed", range(30))
def test_faults_are_settled_together(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_settled(drawn(seed), tmp_path, capsys)


def test_what_is_settled_is_fitted_and_predicted_with_its_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = ["utf-16 without a mark", "semicolons", "decimal commas", "ids of text", "dates", "marks"]
    pasted = assert_settled(faults, tmp_path, capsys)
    assert said(capsys, *pasted, "--devices", 1, "--test-fraction", 0)[0] == 0
    status, out, err = said(capsys, "predict", "paraxis-fit", "data file.csv", "--out", "pred.csv")
    assert (status, out) == (2, "")
    again = settled_by(err)
    assert again[:3] == ["predict", "paraxis-fit", "data file.csv"]
    assert said(capsys, *again)[0] == 0
    rows = read(tmp_path / "pred.csv")
    assert [*rows[0]] == ["row", "patient id", "prediction"]
    assert [(row["row"], row["patient id"]) for row in rows] == [(str(i), f"P{i:04d}") for i in range(NUM_ROWS)]
    assert {row["prediction"] for row in rows} <= {"no", "yes"}
    before = everything(tmp_path)  # the model among it, which is not lost
    _, _, err = said(capsys, *pasted)
    assert complaints(err) == [
        "--out paraxis-fit holds an earlier fit; write --force to replace it, or --out paraxis-fit-2"
    ]
    place = settled_by(err).index("--out")
    assert settled_by(err)[place + 1] == "paraxis-fit-2"
    assert everything(tmp_path) == before
    # Of another file, without ids; and there is a file of predictions by now.
    new = Draft({name: cells for name, cells in draft().columns.items() if name != "y"}, delimiter=";")
    decimal_commas(new)
    new.write(tmp_path / "new.csv")
    asked = ["predict", "paraxis-fit", "new.csv", "--out", "pred.csv"]
    _, out, err = said(capsys, *asked)
    assert complaints(err) == ["--out pred.csv is there; write --force to replace it, or --out pred-2.csv"]
    status, out, _ = said(capsys, *settled_by(err))
    assert status == 0
    assert "has no id column 'patient id': predictions are told apart by the number of their row" in " ".join(
        out.split()
    )
    assert [*read(tmp_path / "pred-2.csv")[0]] == ["row", "prediction"]


def test_what_no_option_settles_is_told_with_what_the_others_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = draft()
    it.columns["y"] = ["yes"] * NUM_ROWS
    for fault in ("semicolons", "places"):
        FAULTS[fault][0](it)
    it.write(tmp_path / "data.csv")
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    *_, last = complaints(err)
    assert last == "the target 'y' holds one class only, 'yes'; there is nothing to tell apart"
    words = "the last of these is beyond any option; once it is mended, this settles the others:"
    assert err.splitlines()[-2:] == [words, "paraxis fit data.csv --target y --text one-hot --delimiter ';'"]


@pytest.mark.parametrize(
    ("cell", "option"),
    [
        (lambda row: f"B-{row:04d}x", "--id"),
        (lambda row: f"{row:05d}", "--id"),
        (lambda row: f"0f{row:06x}-a4#{row}", "--id"),
        (lambda row: f"u{row}.{chr(97 + row % 26)}@example.com", "--id"),
        (lambda row: f"B-{row // 2:04d}x", "--text"),
        (lambda row: f"B-{row:04d}x" if row != 7 else "", "--id"),
        (lambda row: f"seen on day {row}", "--ignore"),
        (lambda row: chr(65 + row // 26) + chr(97 + row % 26), "--ignore"),
        (lambda row: f"{1 + row // 28}/{1 + row % 28}/2026", "--ignore"),
        (lambda row: str(row) if row % 20 else f"n{row}", "--na-values"),
    ],
    ids=["codes", "leading zeros", "hexadecimal", "e-mail", "pairs", "a gap", "sentences", "words", "dates", "numbers"],
)
@pytest.mark.parametrize("streamed", [[], ["--stream", "1MB"]], ids=["in memory", "streamed"])
def test_text_of_which_no_two_values_are_the_same_is_an_id(
    cell: Callable[[int], str], option: str, streamed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = draft()
    column("sample", cell)(it)
    it.write(tmp_path / "data.csv")
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y", *streamed)
    assert option in settled_by(err)
    assert [word for word in ("--id", "--ignore", "--text", "--na-values") if word in settled_by(err)][:1] == [option]


def test_columns_of_many_texts_are_told_with_an_example_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = draft()
    for name, cell in (("seen", "{0}/{0}/2026"), ("size", "{0} cm"), ("rank", "#{0} b")):
        column(name, lambda row, cell=cell: cell.format(row))(it)
    it.write(tmp_path / "data.csv")
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    expected = "columns 'rank', 'size', 'seen' hold text of 60 levels, such as '#0 b', '0 cm', '0/0/2026', more than"
    assert complaints(err)[0].startswith(expected)


def test_thousands_are_not_taken_for_decimals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f'{row},"{1 + row % 7},{row % 10}00",{row * row % 5}.5\n' for row in range(40))
    (tmp_path / "data.csv").write_text("a,b,y\n" + rows)
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    assert "'1,000' is no number with the decimal point '.'" in complaints(err)[0]
    assert "write --decimal ',' if a comma is the decimal point; or write --strip , if" in complaints(err)[0]
    assert settled_by(err) == ["fit", "data.csv", "--target", "y", "--ignore", "b"]
    # No thousands begin with a zero.
    rows = "".join(f'{row},"0,{row % 10}00",{row * row % 5}.5\n' for row in range(40))
    (tmp_path / "data.csv").write_text("a,b,y\n" + rows.replace(".5", ""))
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    assert settled_by(err) == ["fit", "data.csv", "--target", "y", "--decimal", ","]
    # Another column leaves no doubt.
    rows = "".join(f'"{row},5";"{1 + row % 7},{row % 10}00";{row}\n' for row in range(40))
    (tmp_path / "data.csv").write_text("a;b;y\n" + rows)
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    assert settled_by(err) == ["fit", "data.csv", "--target", "y", "--delimiter", ";", "--decimal", ","]


def test_numbers_with_units_are_fitted_and_predicted_as_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, written = draft(), draft()
    for it, share, price in ((plain, "{}", "{:.2f}"), (written, "{}%", "${:,.2f}")):
        column("share", lambda row, share=share: share.format(row * row % 17))(it)
        it.columns["y"] = [price.format(row * 49.5) for row in range(NUM_ROWS)]
    plain.write(tmp_path / "plain.csv")
    written.write(tmp_path / "written.csv")
    status, _, err = said(capsys, "fit", "written.csv", "--target", "y", "--out", "written", "--devices", "1")
    assert status == 2
    assert said(capsys, *settled_by(err))[0] == 0
    assert said(capsys, "fit", "plain.csv", "--target", "y", "--out", "plain", "--devices", "1")[0] == 0
    assert (tmp_path / "written" / "coefficients.csv").read_text() == (
        tmp_path / "plain" / "coefficients.csv"
    ).read_text()
    assert said(capsys, "predict", "written", "written.csv", "--out", "of written.csv")[0] == 0
    assert said(capsys, "predict", "plain", "plain.csv", "--out", "of plain.csv")[0] == 0
    assert read(tmp_path / "of written.csv") == read(tmp_path / "of plain.csv")


def test_a_comma_in_a_header_does_not_hide_the_delimiter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{row},5;{row * row % 7};{row}\n" for row in range(40))
    (tmp_path / "data.csv").write_text("income, CHF;a;y\n" + rows)
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    assert settled_by(err) == ["fit", "data.csv", "--target", "y", "--delimiter", ";", "--decimal", ","]


def test_infinities_of_a_file_without_words_are_settled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 40))
    np.savez(tmp_path / "data.npz", a=np.where(np.arange(40) < 2, np.inf, a), b=b, y=a)
    _, _, err = said(capsys, "fit", "data.npz", "--target", "y", "--decimal", ",")
    assert [line.partition(";")[0] for line in complaints(err)] == [
        "data.npz is no CSV file", "data.npz holds 2 infinite values, in column 'a' (2), the first in row 0"
    ]  # fmt: skip
    assert settled_by(err) == ["fit", "data.npz", "--target", "y", "--ignore", "a"]


def test_infinities_of_the_target_are_settled_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = draft()
    it.columns["y"] = [f"{row * row % 7}.5" for row in range(NUM_ROWS)]
    it.mark("y", ["inf", "-Infinity"])
    it.mark("b", ["inf"])
    it.write(tmp_path / "data.csv")
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    first, second = complaints(err)
    assert "holds 3 infinite values, in columns 'y' (2), 'b' (1), the first in line 5; make them missing" in first
    assert "holds 3 missing values, in columns 'y' (2), 'b' (1), the first in line 5" in second
    words = ["--na-values=-Infinity", "--na-values", "inf"]
    assert settled_by(err) == ["fit", "data.csv", "--target", "y", "--missing", "drop-rows", *words]
    assert said(capsys, *settled_by(err), *LAST)[2].startswith(f"paraxis: {BEYOND}")


def test_a_word_that_is_a_label_elsewhere_is_not_taken_for_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = draft()
    it.columns["y"] = [("-", "EU")[row * row % 3 % 2] for row in range(NUM_ROWS)]
    it.mark("c", ["-", "-"])
    it.write(tmp_path / "data.csv")
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y")
    assert settled_by(err) == ["fit", "data.csv", "--target", "y", "--ignore", "c"]


def test_words_are_missing_if_that_is_said_be_they_numbers_or_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    it = draft()
    it.mark("b", ["-99", " -99 "])
    it.mark("y", ["NA"])
    it.write(tmp_path / "data.csv")
    words = ["--na-values", "NA", "--na-values=-99"]
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y", *words)
    assert "holds 3 missing values, in columns 'y' (1), 'b' (2), the first in line 5" in complaints(err)[0]
    assert said(capsys, "fit", "data.csv", "--target", "y", *LAST)[2].startswith("paraxis: class 'NA' has one row only")


@pytest.mark.parametrize("seed", range(6))
def test_weights_that_are_not_there_hide_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    it = draft()
    others = set(FAULTS) - {"weights", "class weights", "folds", *set[str]().union(*APART)}
    for fault in np.random.default_rng(seed).choice(sorted(others), 3, replace=False):
        FAULTS[fault][0](it)
    it.write(tmp_path / "data.csv")
    asked = ["fit", "data.csv", "--target", it.target, *it.arguments]
    expected = complaints(said(capsys, *asked)[2])
    _, _, err = said(capsys, *asked, "--weights", "zzzz")
    *found, last = complaints(err)
    assert found == expected
    assert last.startswith("data.csv has no column of weights 'zzzz'")
    words, line = err.splitlines()[-2:]
    assert words.startswith("the last of these is beyond any option; once it is mended, this settles the others:")
    assert "--weights zzzz" in line
    _, _, after = said(capsys, *pasted(line.replace(" --weights zzzz", "")), *LAST)
    assert complaints(after)[0].startswith(BEYOND), after


@pytest.mark.parametrize("seed", range(4))
def test_a_first_line_of_numbers_is_told_and_what_to_write_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [[f"{x:.3f}" for x in row] for row in rng.normal(size=(20, 4))]
    rows[0][3] = rows[0][0] if seed % 2 else rows[0][3]
    text = "".join(",".join(row) + "\n" for row in rows)
    file = tmp_path / "data.csv"
    for more in ([], ["--stream", "1GB"]):
        file.write_text(text)
        _, _, err = said(capsys, "fit", file, "--target", "y", *more)
        (complaint,) = complaints(err)
        assert (
            "its first line reads as numbers: if the names of the columns are missing, write them before" in complaint
        )
        file.write_text(complaint.rpartition(", ")[2] + "\n" + text)
        _, _, err = said(capsys, "fit", file, "--target", "y", *more, *LAST)
        assert complaints(err)[0].startswith(BEYOND)


def test_a_file_is_read_again_only_if_that_may_show_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in (_csv, _parts):
        monkeypatch.setattr(reader, "_BYTES", 500)
    read_parts, read_whole = [], []
    csv_parts, read_table = _parts.Parts._csv_parts, _fit.read_table

    def parts(*given: Any) -> Iterator[Any]:
        for part in csv_parts(*given):
            read_parts.append(part)
            yield part

    monkeypatch.setattr(_parts.Parts, "_csv_parts", parts)
    monkeypatch.setattr(_fit, "read_table", lambda *of, **more: read_whole.append(of) or read_table(*of, **more))
    faults = ["ids of text", "ids of digits", "dates", "places", "gaps"]
    line = assert_settled(faults, tmp_path, capsys)
    assert len(read_whole) == 2  # for all complaints; and for the line that is pasted
    it = draft()
    for fault in faults:
        FAULTS[fault][0](it)
    it.write(tmp_path / "data.csv")
    whole = (tmp_path / "data.csv").stat().st_size // 500 + 1
    _, _, err = said(capsys, "fit", "data.csv", "--target", "y", "--stream", "1GB")
    settling = len(read_parts)
    assert settled_by(err) == [*line[:1], "data.csv", *line[2:], "--stream", "1GB"]
    said(capsys, *settled_by(err), *LAST)
    # One pass for all that is wrong with columns, one for what is missing, and that of the line that is pasted.
    assert settling - (len(read_parts) - settling) <= whole + 2


@pytest.mark.parametrize("stream", [[], ["--stream", "1GB"]])
def test_reading_that_takes_long_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: list[str]
) -> None:
    settled = _fit.settled
    draft().write(tmp_path / "data.csv")
    asked = ["fit", "data.csv", "--target", "y", *stream, *LAST]
    usual = said(capsys, *asked)
    assert "reading" not in usual[2]
    monkeypatch.setattr(_display, "_LONG", 0.01)
    monkeypatch.setattr(_fit, "settled", lambda *given: time.sleep(0.5) or settled(*given))
    status, out, err = said(capsys, *asked)
    assert err.startswith("reading data.csv …\n")
    assert (status, out, err.removeprefix("reading data.csv …\n")) == usual
