"""``paraxis launch``: what it takes as its own and what as the script's, and one line for each mistake."""

import json
import os
from pathlib import Path

import pytest

from paraxis.cli import main


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["launch", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "--help")
    assert (status, err) == (0, "")
    options = ("SCRIPT", "-n", "-m", "--devices", "--restarts", "--grace", "--stuck-after")
    assert [option for option in options if option not in out] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "-n, the number of processes, is missing before the script; write: paraxis launch -n 2"),
        (["train.py", "-n", "2"], "-n, the number of processes, is missing before the script"),
        (["-m", "timeit", "-n", "2"], "-n, the number of processes, is missing before the script"),
        (["-n"], "'-n' requires an argument"),
        (["-n", "2"], "there is no script to launch; write: paraxis launch -n 2 train.py"),
        (["-n", "0", "train.py"], "num_processes must be an integer of at least 1, got 0; write -n 2"),
        (["-n", "many", "train.py"], "Invalid value for '-n': Input should be a valid integer"),
        (
            ["-n", "2", "--devices", "0", "train.py"],
            "devices must be an integer of at least 1, got 0; write --dev",
        ),
        (["-n", "2", "--restarts", "-1", "train.py"], "restarts must be an integer of at least 0, got -1"),
        (
            ["-n", "2", "--restart", "2", __file__],
            "launch has no option --restart; did you mean --restarts? It has -n, ",
        ),
        (["-n2", "--device=2", __file__], "launch has no option --device; did you mean --devices? It has -n, "),
        (["-n", "2", "--epochs", "2", __file__], "launch has no option --epochs. It has -n, "),
        (["-n", "2", "-x", __file__], "launch has no option -x. It has -n, -m, --devices, --restarts, --grace, --stuc"),
        (["-n", "2", "--grace", "0", __file__], "must be a finite number of seconds above 0"),
        (
            ["-n", "2", "--stuck-after", "-1", __file__],
            "stuck_after must be a finite number of seconds of at least 0",
        ),
        (
            ["-n", "2", "--stuck-after", "inf", __file__],
            "stuck_after must be a finite number of seconds of at least 0",
        ),
        (["-n", "2", "nowhere.py"], "there is no file nowhere.py"),
        (["-n", "2", "-m", "no_such_module"], "there is no module no_such_module"),
    ],
)
def test_a_mistake_gets_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, out, err = said(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("paraxis: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("folder", f"folder is a directory without __main__.py; write: paraxis launch -n 2 {Path('folder/train.py')}"),
        ("train", "there is no file train; write: paraxis launch -n 2 train.py"),
        ("python3.11", "there is no file python3.11; each rank runs Python anyway; write: paraxis launch -n 2 train.p"),
        ("train.sh", "train.sh is not a Python file; write: paraxis launch -n 2 train.py"),
        ("shell", "shell is not a Python file"),
        ("binary", "binary is not a Python file"),
        ("pipe", "pipe is not a Python file"),
    ],
)
def test_what_is_no_script_is_not_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, content in (("train.py", b""), ("train.sh", b""), ("shell", b"if true; then"), ("binary", b"\x7f\0\xff")):
        (tmp_path / name).write_bytes(content)
    status, out, err = said(capsys, "-n", "2", target)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"paraxis: {message}")


TELLS = """
import json, os, sys
print(json.dumps([sys.argv, {name: value for name, value in os.environ.items() if name[:5] in ("PARAX", "JAX_N")}]))
sys.exit(7 if os.environ["PARAXIS_ATTEMPT"] == "0" else 0)
"""


def told(out: str, rank: int = 0) -> tuple[list[str], dict[str, str]]:
    """With which arguments and variables a rank was started last."""
    mark = f"[{rank}] "
    arguments, variables = json.loads([line for line in out.splitlines() if line.startswith(mark)][-1][len(mark) :])
    return arguments, variables


def test_a_command_and_a_folder_are_run_as_python_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "command").write_text(TELLS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(TELLS)
    for name in ("command", "folder"):
        status, out, err = said(capsys, "-n", "1", "--", str(tmp_path / name), "--x")
        assert (status, told(out)[0][1:]) == (7, ["--x"])
        assert "rank 0 exited with status 7" in err
        assert "restart" not in err


def test_what_follows_the_script_is_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TELLS)
    arguments = ["-n", "8", "--grace", "1", "--", "-m", "x"]
    status, out, err = said(
        capsys, "-n", "4", "--devices", "2", "--restarts", "3", "--grace", "5", "--stuck-after", "60",
        str(script), *arguments,
    )  # fmt: skip
    assert status == 0
    assert "restart 1 of 3" in err
    for rank in range(4):
        given, variables = told(out, rank)
        assert given == [str(script), *arguments]
        assert (variables["PARAXIS_NUM_PROCESSES"], variables["JAX_NUM_CPU_DEVICES"]) == ("4", "2")
        assert (variables["PARAXIS_GRACE"], variables["PARAXIS_STUCK_AFTER"]) == ("5", "60")


def test_of_a_module_all_is_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    status, out, err = said(capsys, "-n", "2", "-m", "package.train", "--epochs", "3", "--grace", "5")
    given, variables = told(out)
    assert (status, given[1:]) == (7, ["--epochs", "3", "--grace", "5"])
    assert (variables["PARAXIS_NUM_PROCESSES"], variables.get("JAX_NUM_CPU_DEVICES")) == ("2", None)
    assert (variables["PARAXIS_GRACE"], variables["PARAXIS_STUCK_AFTER"]) == ("30", "1800")
    assert "restart" not in err


def test_the_scripts_status_is_the_commands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(5)")
    assert main(["launch", "-n", "1", str(script)]) == 5
