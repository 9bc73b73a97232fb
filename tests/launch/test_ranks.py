"""What ranks find: their place, their environment, a port of their own; and what comes of their output."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paraxis.launch import Options, launch
from tests.launch._support import COMMAND, Launch, plain_environment


def num_threads() -> str:
    """Of XLA in each rank, as long as it has no more devices."""
    return str(max(16, len(os.sched_getaffinity(0))))


PLACE = """
import json, os, sys
known = ("PARAXIS_COORDINATOR", "PARAXIS_NUM_PROCESSES", "PARAXIS_PROCESS", "PARAXIS_ATTEMPT", "NPROC", "PJRT_NPROC",
         "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "MINE")
print(json.dumps([sys.argv[1:], sys.path[0], __name__, {k: os.environ[k] for k in known if k in os.environ}]))
print(sys.stdin.read() == "", os.getpgid(0) == os.getpid(), "jax" in sys.modules, "paraxis" in sys.modules)
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_rank_runs_the_script_as_python_would(
    launched: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "script.py").write_text(PLACE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "kept")
    target = "package.script" if module else str(tmp_path / "package" / "script.py")
    status, out, error = launched(target, "-n", "--grace", "a b", n=2, module=module, devices=3)
    assert (status, error) == (0, "")
    for rank in (0, 1):
        first, second = (line[4:] for line in out.splitlines() if line.startswith(f"[{rank}] "))
        arguments, directory, name, variables = json.loads(first)
        assert arguments == ["-n", "--grace", "a b"]
        assert directory == str(tmp_path if module else tmp_path / "package")
        assert name == "__main__"
        assert second == "True True False False"
        host, _, port = variables.pop("PARAXIS_COORDINATOR").rpartition(":")
        assert host == "127.0.0.1"
        assert 0 < int(port) < 65536
        assert variables == {
            "PARAXIS_NUM_PROCESSES": "2",
            "PARAXIS_PROCESS": str(rank),
            "PARAXIS_ATTEMPT": "0",
            "JAX_NUM_CPU_DEVICES": "3",
            "PJRT_NPROC": num_threads(),
            "XLA_FLAGS": "",
            "MINE": "kept",
        }


ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def environment(
    launched: Launch, monkeypatch: pytest.MonkeyPatch, script: Path, given: dict[str, str], devices: int | None
) -> dict[str, str]:
    """That of a rank, in these surroundings."""
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    script.write_text(ENVIRONMENT)
    status, out, error = launched(str(script), n=1, devices=devices)
    assert (status, error) == (0, "")
    return json.loads(out.removeprefix("[0] "))


@pytest.mark.parametrize(
    ("given", "devices", "threads"),
    [
        ({}, 64, "128"),
        ({}, 1, num_threads()),
        ({}, None, num_threads()),
        ({"PJRT_NPROC": "7"}, 64, "7"),
        ({"NPROC": "5"}, 64, None),
    ],
)
def test_xla_has_two_threads_for_each_device_unless_it_was_told(
    launched: Launch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: dict[str, str],
    devices: int | None,
    threads: str | None,
) -> None:
    found = environment(launched, monkeypatch, tmp_path / "script.py", given, devices)
    assert found.get("PJRT_NPROC") == threads
    assert found.get("NPROC") == given.get("NPROC")


def test_simulated_devices_of_the_surroundings_give_way_to_those_asked_for(
    launched: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2", "JAX_NUM_CPU_DEVICES": "4"}
    asked = environment(launched, monkeypatch, tmp_path / "script.py", given, 3)
    assert (asked["XLA_FLAGS"], asked["JAX_NUM_CPU_DEVICES"]) == ("--xla_a=1 --xla_b=2", "3")
    not_asked = environment(launched, monkeypatch, tmp_path / "script.py", given, None)
    assert {name: not_asked[name] for name in given} == given


TRIES_ITS_PORT = """
import os, pathlib, socket, sys, time
host, _, port = os.environ["PARAXIS_COORDINATOR"].rpartition(":")
def meet(name):
    place = pathlib.Path(sys.argv[1], name)
    place.mkdir(exist_ok=True)
    (place / port).touch()
    for _ in range(3000):
        if len(found := list(place.iterdir())) == 2:
            return [int(path.name) for path in found]
        time.sleep(0.01)
    sys.exit("the other is not there, or has this port, too")
assert host == "127.0.0.1"
for number in meet("here"):
    with socket.socket() as foreign:
        try:
            foreign.bind((host, number))
        except OSError as error:
            assert "in use" in str(error)
        else:
            sys.exit("the port is free")
meet("done")
"""


def test_a_launch_has_its_port_to_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRIES_ITS_PORT)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(launch, [Options(1, str(script), [str(tmp_path)])] * 2)) == [0, 0]


OUTPUT = r"""
import os, sys
if os.environ["PARAXIS_PROCESS"] == "0":
    print("a line")
    print("half ", end=""); print("and half")
    print("x" * 200_000)
    for percent in (10, 20): print(f"\r{percent} %", end="")
    print()
    os.write(1, b"\xff\x00\xfe garbage\r\n\n")
    print("to stderr", file=sys.stderr)
    print("no end of line", end="")
"""


def test_output_comes_line_by_line_marked_by_rank(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OUTPUT)
    status, out, error = launched(str(script), n=11)
    assert (status, error) == (0, "[ 0] to stderr\n")
    lines = out.split("\n")
    assert lines.pop() == ""
    assert {line[:5] for line in lines} == {"[ 0] "}
    texts = [line[5:] for line in lines]
    assert texts[:2] == ["a line", "half and half"]
    long = [text for text in texts if text.startswith("x")]
    assert "".join(long) == "x" * 200_000
    assert texts[2 + len(long) :] == ["", "10 %", "20 %", "\ufffd\0\ufffd garbage", "", "no end of line"]


class Terminal(io.TextIOWrapper):
    """A stream of bytes that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def test_ranks_have_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nif os.environ['PARAXIS_PROCESS'] == '1': print('a line')\n")

    def written(stream: io.TextIOWrapper) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert launch(Options(2, str(script))) == 0
        return stream.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert written(Terminal(io.BytesIO())) == b"\x1b[33m[1] \x1b[0ma line\n"
    assert written(io.TextIOWrapper(io.BytesIO())) == b"[1] a line\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Terminal(io.BytesIO())) == b"[1] a line\n"


def test_a_stream_of_text_alone_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, stream = tmp_path / "script.py", io.StringIO()
    script.write_text("import sys\nprint('a line')\nsys.exit(3)\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        assert launch(Options(1, str(script))) == 3
    said = ("rank 0 exited with status 3", "the last lines of rank 0:", "    a line")
    assert stream.getvalue() == "[0] a line\n" + "".join(f"paraxis launch: {line}\n" for line in said)


@pytest.mark.slow
def test_training_goes_on_when_nobody_reads_any_more(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\nfor k in range(5000): print('x' * 100)\npathlib.Path(sys.argv[1]).write_text('done')\n"
    )
    command = [*COMMAND, "launch", "-n", "1", str(script), str(tmp_path / "end.txt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=plain_environment()) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == b"[0] " + b"x" * 100 + b"\n"
        run.stdout.close()
        assert (run.stderr.read(), run.wait(timeout=150)) == (b"", 0)
    assert (tmp_path / "end.txt").read_text() == "done"


LINES = b"one\ntwo\r\nthree\rfour\n\nfive"
IN_PIECES = f"""
import os, time
for size in range(1, {len(LINES) + 1}):
    for k in range(0, {len(LINES)}, size):
        os.write(1, {LINES!r}[k : k + size])
        time.sleep(0.005)  # in which it is read
    os.write(1, b"\\n")
"""


def test_lines_are_cut_alike_however_their_bytes_come(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_PIECES)
    status, out, error = launched(str(script), n=1)
    assert (status, error) == (0, "")
    assert out == "[0] one\n[0] two\n[0] three\n[0] four\n[0] \n[0] five\n" * len(LINES)


LOGGED = """\
[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
[Gloo] Rank [Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
W1122 00:49:07.883026   23065 preemption_sync_manager.cc:147] Failed to retrieve preemption notice: UNAVAILABLE
Additional GRPC error information from remote target coordination_service while calling /xla.coordination.Coordination
:UNAVAILABLE:Stream removed (Socket closed)
=== Source Location Trace: ===
external/xla+/xla/tsl/distributed_runtime/rpc/grpc_util.h:89
. This is only expected if one of the tasks is unhealthy. Check the logs for the actual root cause.
E1122 00:49:07.883114   23065 preemption_sync_manager.cc:159] Failed to cancel preemption barrier: FAILED_PRECONDITION
F1122 00:49:07.883156   23065 client.h:86] Terminating process because the JAX distributed service detected fatal errors

RPC: /xla.coordination.CoordinationService/RegisterTask
*** Check failure stack trace: ***
    @     0x7fca708f8174  absl::lts_20260526::log_internal::LogMessage::SendToLog()
2026-11-22 00:49:07.883026: E external/xla/xla/service/slow_operation_alarm.cc:73] Very slow compile
""".splitlines()
OWN = """\
I1122 00:49:07.883026 140203 train.py:12] a line that the script has logged
Traceback (most recent call last):
  File "train.py", line 5, in <module>
jax.errors.JaxRuntimeError: UNAVAILABLE: failed to connect to all addresses
RPC: /xla.coordination.CoordinationService/RegisterTask

ValueError: row 4711 has no label
""".splitlines()


NUM_KEPT = 30
WRITES = """
import faulthandler, os, pathlib, signal, sys
faulthandler.disable()  # else it has last lines of its own
os.write(2, pathlib.Path(sys.argv[1]).read_bytes())
{end}
"""


@pytest.mark.parametrize(
    ("lines", "end", "shown"),
    [
        ([*OWN, *LOGGED * NUM_KEPT], "sys.exit(5)", OWN),
        ([*OWN, *LOGGED * NUM_KEPT], "os.kill(os.getpid(), signal.SIGABRT)", [*OWN, *(LOGGED * NUM_KEPT)[-NUM_KEPT:]]),
        ([*OWN, *LOGGED * NUM_KEPT, *OWN], "sys.exit(5)", OWN * 2),
    ],
    ids=["own", "with those of XLA", "own after those of XLA"],
)
def test_the_log_of_xla_leaves_the_last_lines_to_the_script(
    launched: Launch, tmp_path: Path, lines: list[str], end: str, shown: list[str]
) -> None:
    script, text = tmp_path / "script.py", tmp_path / "lines.txt"
    script.write_text(WRITES.format(end=end))
    text.write_text("".join(f"{line}\n" for line in lines))
    _, _, error = launched(str(script), str(text), n=1)
    mark = "paraxis launch:     "
    assert [line.removeprefix(mark) for line in error.splitlines() if line.startswith(mark)] == shown


SPAWNS = """
import multiprocessing, os
import paraxis as px

def square(x):
    return x * x, px.initialize()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [int(os.environ["PARAXIS_PROCESS"]) + 3]))
"""


@pytest.mark.slow
def test_a_ranks_own_workers_find_its_functions_and_are_no_ranks(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    status, out, error = launched(str(script))
    alone = "Processes(process=0, num_processes=1, attempt=0)"
    assert status == 0, error
    assert sorted(out.splitlines()) == [f"[0] [(9, {alone})]", f"[1] [(16, {alone})]"]


def test_many_ranks_that_say_nothing_leave_no_trace(launched: Launch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    before = len(os.listdir("/proc/self/fd"))
    assert launched(str(script), n=3) == (0, "", "")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not re.search("rank", " ".join(thread.name for thread in threading.enumerate()))
