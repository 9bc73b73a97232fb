"""No public face: to be killed at each step of an exchange, a process must do nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paraxis._host import files

WRITER = """
import ctypes, os, shutil, signal, sys
from pathlib import Path
from paraxis._host import files

target, at_once = Path(sys.argv[1]), sys.argv[2] == "at once"
if not at_once:
    del ctypes.CDLL

def content(directory):
    return {file.name: file.read_text() for file in directory.iterdir()} if directory.is_dir() else None

OLD, NEW = {"a": "old", "b": "old"}, {"a": "new", "c": "new"}
step, left, armed = 0, 1, False

def count(event, arguments):
    global left
    if armed and event.split(".")[0] in ("os", "shutil", "open"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
swapped = files._swapped

def swap_and_count(*places):
    done = swapped(*places)
    count("os.swap", ())
    return done

files._swapped = swap_and_count
while True:
    shutil.rmtree(target.parent)
    target.mkdir(parents=True)
    for name, text in OLD.items():
        (target / name).write_text(text)
    step += 1
    child = os.fork()
    if not child:
        left, armed = step, True
        with files.replaced_directory(target) as directory:
            for name, text in NEW.items():
                (directory / name).write_text(text)
        armed = False
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    there = target.exists()
    files._MOMENT = 0
    files.put_back(target, lambda left: content(left) == OLD)
    found = content(target)
    what = "old" if found == OLD else "new" if found == NEW else found
    print("killed" if killed else "done", "there" if there else "away", what)
    if not killed:
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("how", ["at once", "one after the other"])
def test_whoever_is_killed_at_any_step_leaves_the_old_directory_or_the_new_one(how: str, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    command = [sys.executable, "-c", WRITER, str(tmp_path / "place" / "directory"), how]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) > 12
    assert {line.split()[2] for line in lines} == {"old", "new"}
    assert lines[-1] == "done there new"
    assert [line for line in lines[:-1] if not line.startswith("killed")] == []
    if how == "at once" and files._swapped(*two_names(tmp_path)):
        assert all(line.split()[1] == "there" for line in lines)
    elif how != "at once":
        assert any(line.split()[1] == "away" for line in lines)


def two_names(place: Path) -> Iterator[Path]:
    for name in ("one", "other"):
        (place / name).mkdir()
        yield place / name
