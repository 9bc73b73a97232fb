"""The command line: help, version, the demo's chapters, what of a launch is the script's, and a line for a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paraxis.cli import main

RUN = "import sys; from paraxis.cli import main; sys.exit(main())"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where JAX has not started; what the tests' own JAX was told is left out."""
    ours = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ours, timeout=300, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["demo", "nope"], "the demo has no chapter 'nope'; its chapters are: fedavg, ensemble, logreg, train, stream"),
        (["launch", "train.py"], "-n"),
        (["launch", "-n", "0", __file__], "num_processes must be"),
        (["launch", "-n", "2", "nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_command_line_names_a_mistake(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, _, err = said(capsys, *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


SHOWS = """
import json, os, sys
print(json.dumps([sys.argv, os.environ["PARAXIS_NUM_PROCESSES"], os.environ.get("JAX_NUM_CPU_DEVICES")]))
sys.exit(7 if os.environ["PARAXIS_ATTEMPT"] == "0" else 0)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_command_line_leaves_words_after_a_launched_script_to_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHOWS)
    monkeypatch.chdir(tmp_path)
    arguments = ["-n", "8", "--grace", "1", "--help", "-m", "x"]
    options = ["-n", "2", "--devices", "3", "--restarts", "3", "--grace", "5"]
    status, out, err = said(capsys, "launch", *options, *(["-m", "train"] if is_module else [str(script)]), *arguments)
    assert status == 0
    assert "restart 1 of 3" in err
    lines = [line.removeprefix("[1] ") for line in out.splitlines() if line.startswith("[1] ")]
    assert json.loads(lines[-1]) == [[str(script), *arguments], "2", "3"]


# Each chapter of the demo, and the example that it is.
EXAMPLES = {
    "fedavg": "fedavg_cnn",
    "ensemble": "ensemble_uncertainty",
    "logreg": "sharded_logreg",
    "train": "stop_and_resume",
    "stream": "streamed_logreg",
}


def test_command_line_lists_each_chapter_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    for names in ([*EXAMPLES], ["train", "stream"]):
        status, out, err = said(capsys, "demo", *(names if len(names) < 3 else ()), "--list")
        assert (status, err) == (0, "")
        assert [line.split()[0] for line in out.splitlines()[:-1]] == names


@pytest.mark.slow
@pytest.mark.parametrize(("chapter", "example"), EXAMPLES.items())
def test_command_line_runs_an_example_as_a_chapter_of_the_demo(chapter: str, example: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    done = run("demo", chapter, "--quick", "--devices", "3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert f"examples/{example}.py" in done.stdout
    assert "on 3 devices" in done.stdout
    assert [path.name for path in out.iterdir()] == [f"{chapter}.png"]
