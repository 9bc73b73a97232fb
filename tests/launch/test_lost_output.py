"""What the ranks write, where it cannot be written: they go on, and it is said."""

import io
import subprocess
from pathlib import Path

import pytest

from paraxis.launch import Options, launch
from tests.launch._support import COMMAND, plain_environment

SCRIPT = "import pathlib, sys\nfor _ in range(3000): print('a line')\npathlib.Path(sys.argv[1]).touch()\n"
SAID = "standard output cannot be written: {}; the ranks continue, and what they write there is lost"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such device here")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        pytest.param(">/dev/full", 74, SAID.format("No space left on device"), marks=FULL),
        pytest.param(">/dev/full 2>&1", 74, "", marks=FULL),
        (">&-", 0, ""),
        ("| head -1; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_it_is_said_and_the_ranks_go_on(redirection: str, status: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [*COMMAND, "launch", "-n", "1", str(script), str(tmp_path / "ended")]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *words],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "ended").exists()
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said), done.stderr


def test_a_stream_that_was_closed_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    assert launch(Options(1, str(script), [str(tmp_path / "ended")])) == 0
    assert (tmp_path / "ended").exists()
