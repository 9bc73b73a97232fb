"""``paraxis fit`` replaces what it wrote itself, and nothing else; and it tells what it takes for a column."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis.cli import main
from tests.cli._files import columns, complaints, everything, said, write

DATA = columns()
NUMBERS = {name: DATA[name][:40] for name in ("age", "tiny", "price")}
QUICK = ["--target", "price", "--devices", 1, "--test-fraction", 0]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "data.csv", NUMBERS)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a fit writes."""
    directory = tmp_path_factory.mktemp("fitted")
    arguments = ["fit", write(directory / "data.csv", NUMBERS), *QUICK, "--out", directory / "out"]
    assert main([str(argument) for argument in arguments]) == 0
    return everything(directory / "out")


def filled(directory: Path, contents: dict[str, bytes]) -> Path:
    directory.mkdir()
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return directory


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path, out: Path | str) -> str:
    """The message; what was there still is."""
    before = everything(tmp_path)
    status, text, err = said(capsys, "fit", data, *QUICK, "--out", out)
    assert (status, text) == (2, "")
    assert everything(tmp_path) == before
    return f"paraxis: {complaints(err)[0]}\n"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("linked", [False, True])
def test_the_data_are_not_replaced(
    linked: bool, fitted: dict[str, bytes], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = filled(tmp_path / "out", fitted)
    data = out / "coefficients.csv"
    if linked:
        data.unlink()
        data.symlink_to(file)
        (tmp_path / "link").symlink_to(out)
        data = tmp_path / "link" / "coefficients.csv"
    err = refused(capsys, tmp_path, data, out)
    own = f"give a directory of its own: --out {out / 'fit'}"
    assert err == f"paraxis: --out {out} holds the data, {data}, and is replaced as a whole; {own}\n"


def test_an_archive_of_someone_else_is_not_replaced(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    np.savez(out / "model.npz", weights=np.zeros(3))
    own = f"give a directory of its own: --out {out / 'fit'}\n"
    message = f"paraxis: --out {out} holds 'model.npz', but no model.npz of paraxis fit; {own}"
    assert refused(capsys, tmp_path, file, out) == message
    np.savez(out / "model.npz", header=np.frombuffer(b'{"format": 1}', np.uint8))
    assert refused(capsys, tmp_path, file, out) == message
    (out / "model.npz").write_bytes(b"weights")
    assert refused(capsys, tmp_path, file, out) == message
    (out / "model.npz").rename(out / "coefficients.csv")
    assert "holds 'coefficients.csv', but no model.npz of paraxis fit" in refused(capsys, tmp_path, file, out)


@pytest.mark.slow
def test_a_directory_by_the_name_of_a_file_of_ours_is_not_replaced(
    fitted: dict[str, bytes], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = filled(tmp_path / "out", fitted)
    (out / "fit.png").unlink()
    filled(out / "fit.png", {"holiday.png": b"sun"})
    assert f"--out {out} holds other things, 'fit.png'; give a directory" in refused(capsys, tmp_path, file, out)


@pytest.mark.parametrize(("name", "own"), [(".", "fit"), ("..", "../fit"), ("../../work", "../../work/fit")])
def test_the_working_directory_is_not_replaced(
    name: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "here")
    err = refused(capsys, tmp_path, tmp_path / "none.csv", name)
    message = f"--out {name} is the working directory, or holds it, and is replaced as a whole"
    assert err == f"paraxis: {message}; give a directory of its own: --out {own}\n"
    assert (tmp_path / "work" / "here").is_dir()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", ["absent", "empty", "ours"])
def test_what_came_during_a_fit_stays(
    start: str,
    fitted: dict[str, bytes],
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, save = tmp_path / "out", np.savez
    if start != "absent":
        filled(out, fitted if start == "ours" else {})
    before = everything(tmp_path)

    def slow(file: Any, **arrays: Any) -> None:  # with what is written last
        save(file, **arrays)
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").write_text("years of work")

    monkeypatch.setattr(np, "savez", slow)
    status, _, err = said(capsys, "fit", file, *QUICK, "--force", "--out", out)
    own = f"give a directory of its own: --out {out / 'fit'}"
    assert (status, err) == (2, f"paraxis: --out {out} holds other things, 'thesis.tex'; {own}\n")
    assert everything(tmp_path) == {**before, "out/thesis.tex": b"years of work"}


@pytest.mark.slow
def test_a_column_without_a_name_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "data.csv", {"": range(40), **NUMBERS})
    note = "note column 1 has no name, and is left out: what numbers the rows is not to predict from\n"
    for arguments in ([], ["--ignore", ""]):
        status, text, err = said(capsys, "fit", file, *QUICK, *arguments, "--out", tmp_path / f"out{len(arguments)}")
        assert (status, err) == (0, "")
        assert (note in text) == (not arguments)
        assert "left out             │ ''" in text


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["held", "streamed"])
def test_of_a_comma_that_ends_each_line_it_is_not_said_that_it_numbers_rows(
    streamed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "data.csv", {**NUMBERS, "": [None] * 40})
    asked = ["--stream", "1MB"] if streamed else []
    status, text, err = said(capsys, "fit", file, *QUICK, *asked, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    place = f"column {len(NUMBERS) + 1} has"
    told = (
        "no name, and is left out"
        if streamed
        else "neither a name nor values, and is left out; a comma may end each line"
    )
    assert f"note {place} {told}\n" in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ratio", [0, 0.5])
def test_what_is_reported_is_called_the_smooth_part_if_it_is_no_more(
    ratio: float, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penalty = ["--penalty", "elastic-net", "--l1-ratio", ratio]
    status, text, err = said(capsys, "fit", file, *QUICK, *penalty, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    name = "smooth part of the objective" if ratio else "objective"
    assert f"iteration 1  {name} 0." in text
    assert f"│ {name} reached " in text
