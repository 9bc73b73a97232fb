"""What ranks find: each other, their place, their environment, a port of their own; and what comes of their output."""

import io
import json
import os
import re
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from paraxis._core.threads import num_cores
from paraxis.launch import Options
from paraxis.launch._output import NUM_KEPT, Kept, Lines, Screen
from paraxis.launch._ranks import _held_port, environment
from paraxis.launch._variables import Place
from tests.launch._support import COMMAND, Launch, plain_environment

COLLECTIVES = """
import jax, numpy as np
import paraxis as px
from paraxis._core import processes
me = px.initialize()
assert px.initialize() is me
ranks, devices = me.num_processes, jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
spec = jax.sharding.PartitionSpec
over = jax.sharding.NamedSharding(mesh, spec("d"))

def collectives(row):
    return jax.lax.psum(row, "d"), jax.lax.all_gather(row[0], "d"), jax.lax.psum_scatter(row[0], "d", tiled=True)

out = (spec(), spec(), spec("d"))
run = jax.jit(jax.shard_map(collectives, mesh=mesh, in_specs=spec("d"), out_specs=out, check_vma=False))
for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20):
    # Row d is what device d has: whole numbers that float32 adds exactly.
    x = (np.arange(devices * size, dtype=np.float32) % 1013).reshape(devices, size)
    x = x + np.arange(devices, dtype=np.float32)[:, None]
    total = x.sum(0, dtype=np.float64).astype(np.float32)
    summed, gathered, scattered = run(jax.make_array_from_callback(x.shape, over, lambda part: x[part]))
    for shard in summed.addressable_shards:
        assert np.array_equal(np.asarray(shard.data)[0], total)
    for shard in gathered.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), x)
    for shard in scattered.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), total[shard.index])
assert processes.reports(f"of {me.process}" * (me.process != 0)) == {1: "of 1"}
assert processes.reports("") == {} and processes.reports("é" * 300) == {0: "é" * 200, 1: "é" * 200}
processes.barrier("all are here")
if me.process == 0:
    try:
        processes.barrier("nobody comes", timeout=0.2)
    except px.ProcessError as error:
        print(error)
port = int(__import__("os").environ["PARAXIS_COORDINATOR"].rpartition(":")[2])
listening = [
    line.split()[1].rpartition(":")[0]
    for name in ("tcp", "tcp6")
    for line in open("/proc/net/" + name)
    if line.split()[3] == "0A" and line.split()[1].endswith(":%04X" % port)
]
print("exact on", devices, "of", ranks, "listening at", *listening)
"""


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_add_up_exactly_agree_and_wait_and_the_coordinator_is_on_loopback(
    launched: Launch, tmp_path: Path, devices: int
) -> None:
    """Whole numbers, from 4 KiB to 4 MiB per device: sums over processes have been wrong in versions of jaxlib."""
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVES)
    status, out, error = launched(str(script), devices=devices)
    assert status == 0, error
    assert "[0] process 0 waited 0.2 s for the other processes at 'nobody comes'; one is gone, slow" in out
    (listening,) = re.findall(r"\[0\] exact .* listening at (.*)", out)
    # 127.0.0.1 and ::ffff:127.0.0.1, as Linux writes them.
    assert set(listening.split()) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert out.count(f"exact on {2 * devices} of 2 ") == 2


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
            "PJRT_NPROC": str(max(8, num_cores())),
            "XLA_FLAGS": "",
            "MINE": "kept",
        }


PLACE_0 = Place("127.0.0.1:5000", 2, 0)


@pytest.mark.parametrize(
    ("given", "devices", "threads"),
    [
        ({}, 64, "64"),
        ({}, 1, str(max(8, num_cores()))),
        ({}, None, str(max(8, num_cores()))),
        ({"PJRT_NPROC": "7"}, 64, "7"),
        ({"NPROC": "5"}, 64, None),
    ],
)
def test_xla_has_as_many_threads_as_cores_or_devices_unless_it_was_told(
    given: dict[str, str], devices: int | None, threads: str | None
) -> None:
    found = environment(PLACE_0, Options(2, __file__, devices=devices), given)
    assert found.get("PJRT_NPROC") == threads
    assert found.get("NPROC") == given.get("NPROC")


def test_simulated_devices_of_the_surroundings_give_way_to_those_asked_for() -> None:
    given = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2", "JAX_NUM_CPU_DEVICES": "4"}
    asked = environment(PLACE_0, Options(2, __file__, devices=3), given)
    assert (asked["XLA_FLAGS"], asked["JAX_NUM_CPU_DEVICES"]) == ("--xla_a=1 --xla_b=2", "3")
    not_asked = environment(PLACE_0, Options(2, __file__), given)
    assert {name: not_asked[name] for name in given} == given


def test_a_launch_has_its_port_to_itself() -> None:
    with _held_port() as one, _held_port() as other, socket.socket() as foreign:
        assert one.getsockname()[0] == "127.0.0.1"
        assert one.getsockname() != other.getsockname()
        with pytest.raises(OSError, match="in use"):
            foreign.bind(one.getsockname())


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


def test_ranks_have_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(stream: io.TextIOWrapper) -> bytes:
        Screen(stream, stream).write("out", "[1] ", b"a line", 1)
        return stream.buffer.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert written(Terminal(io.BytesIO())) == b"\x1b[33m[1] \x1b[0ma line\n"
    assert written(io.TextIOWrapper(io.BytesIO())) == b"[1] a line\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Terminal(io.BytesIO())) == b"[1] a line\n"


def test_a_stream_of_text_alone_will_do() -> None:
    stream = io.StringIO()
    Screen(stream, stream).say("one\ntwo")
    assert stream.getvalue() == "paraxis launch: one\nparaxis launch: two\n"


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


def test_lines_are_cut_alike_however_their_bytes_come() -> None:
    data = b"one\ntwo\r\nthree\rfour\n\nfive"
    for size in range(1, len(data) + 1):
        lines = Lines()
        found = [line for k in range(0, len(data), size) for line in lines.cut(data[k : k + size])]
        assert [*found, *lines.rest()] == [b"one", b"two", b"three", b"four", b"", b"five"]


LOGGED = """\
[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
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


def test_the_log_of_xla_leaves_the_last_lines_to_the_script() -> None:
    kept = Kept()
    for line in [*OWN, *LOGGED * NUM_KEPT]:
        kept.add(line.encode())
    assert kept.lines() == tuple(OWN)
    assert kept.lines(logged=True) == (*OWN, *(LOGGED * NUM_KEPT)[-NUM_KEPT:])
    for line in OWN:
        kept.add(line.encode())
    assert kept.lines() == tuple(OWN * 2)


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
