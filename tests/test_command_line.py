"""The command line: help, the demo's chapters, what of a launch is the script's, reports, a line for a mistake."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paraxis.cli import main
from tests.processes._support import COMMAND

DILOCO = Path(__file__).parents[1] / "examples" / "diloco_sharded.py"


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
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=ours, timeout=300, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["demo", "nope"], "the demo has no chapter 'nope'; its chapters are: fedavg, ensemble, logreg, train, stream"),
        (["launch", "train.py"], "-n"),
        (["launch", "-n", "0", __file__], "num_processes must be"),
        (["explain", "model.py:step", "--shapes", "f32[]", "--arguments", "split"], "--arguments: not allowed with"),
    ],
)
def test_command_line_names_a_mistake(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, _, err = said(capsys, *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("is_module", [False, True])
def test_command_line_leaves_words_after_a_launched_script_to_it(
    monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    launched: list[dict[str, object]] = []
    monkeypatch.setitem(main.__globals__, "launch", lambda **options: launched.append(options) or 7)
    words = ["-n", "8", "--grace", "1", "--help", "-m", "x"]
    options = ["-n", "2", "--devices", "3", "--restarts", "3", "--rejoin", "4", "--grace", "5", *["-m"] * is_module]
    assert main(["launch", *options, "train.py", *words]) == 7
    told = {"num_processes": 2, "devices": 3, "restarts": 3, "rejoins": 4, "grace": 5.0, "module": is_module}
    assert launched == [{**told, "script": "train.py", "arguments": words}]


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


MODEL = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import paraxis as px

def average(w, x):
    rows = px.Axis("rows", 1024)
    return px.reduce_mean(px.map_fn(lambda w, x: x @ w, (px.broadcast(w, rows), x), rows), rows)

def total(x):
    return x.sum()

def split():
    mesh = Mesh(np.array(jax.devices()), ("all",))
    return jax.ShapeDtypeStruct((2048, 4), jnp.float32, sharding=NamedSharding(mesh, P("all")))

class Model:
    @staticmethod
    def twice(x):
        return x @ x
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    path = tmp_path / "explained_model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.floor
def test_command_line_explains_a_function_on_512_devices_in_a_process_of_its_own(model: Path) -> None:
    shapes = "float32[8,4], float32[1024,16,8]"
    done = run("explain", f"{model}:average", "--shapes", shapes, "--devices", "512", "--html", "report.html")
    assert done.returncode == 0, done.stderr
    # A mean of 16 x 4 numbers over all devices, as on 8; two products of 16 x 8 and 8 x 4 on each device.
    sent = r"\n  256 bytes  all_reduce f32\[16,4\]  along rows  px\.reduce_mean  explained_model\.py:8 "
    assert re.search(sent, done.stdout)
    assert f"{2 * 2 * 16 * 8 * 4 / 1000:.3g} kFLOP per device" in done.stdout
    assert (model.parent / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_command_line_explains_each_collective_as_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{model}:average", "--shapes", "float32[8,4], float32[1024,16,8]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (collective,) = found["collectives"]
    told = {"kind": "all_reduce", "bytes": 256, "times": 1, "axes": ["rows"], "verb": "px.reduce_mean"}
    assert collective.items() >= {**told, "line": {"file": str(model), "number": 8}}.items()
    assert found["total_bytes"] == found["summary"]["all_reduce along rows, bytes"] == 256


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_command_line_explains_a_file_with_a_mesh_on_a_topology(model: Path) -> None:
    done = run("explain", f"{model}:total", "--arguments", "split", "--on", "v5e:4x4", "--json")
    found = json.loads(done.stdout)
    assert (found["num_devices"], found["summary"]["all_reduce along all, bytes"]) == (16, 4)


@pytest.mark.slow  # each number is a process
def test_command_line_compares_numbers_of_devices_in_a_table(model: Path) -> None:
    devices = ["--devices", "1", "--devices", "4"]
    done = run("explain", f"{model}:average", "--shapes", "float32[8,4] float32[1024,16,8]", *devices)
    rows = [re.split(r"  +", line.strip())[:4] for line in done.stdout.splitlines()]
    assert rows == [
        ["devices", "computes", "an equal share", "sends"],
        ["1", "1.05 MFLOP", "1.05 MFLOP", "0 bytes"],  # 1024 products of 2 * 16 * 8 * 4
        ["4", "262 kFLOP", "262 kFLOP", "256 bytes"],
    ]
    failed = run("explain", f"{model}:none", *devices)
    assert (failed.returncode, "has no attribute 'none'" in failed.stderr) == (2, True)
    done = run(
        "explain", f"{DILOCO}:round_of", "--arguments", "pod", "--devices", "8", "--json"
    )  # a quarter of a model
    assert json.loads(done.stdout)["summary"]["all_reduce along replica, bytes"] == 4 * 2048 * (3 * 8192 + 10)


def test_command_line_takes_methods_and_makers_of_arguments(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "explained_model:total", "--arguments", "split"]) == 0
    assert re.search(r"(?s)^total on 8 devices.*x +float32 +2048/8 × 4", capsys.readouterr().out)
    assert main(["explain", f"{model}:Model.twice", "--shapes", "float32[4,4]"]) == 0
    assert "128 FLOP per device" in capsys.readouterr().out


WRONG = {
    "average": "average names no function; write: paraxis explain model.py:step, or package.model:step",
    "{}:total --shapes 3x4": "--shapes: 3x4 is no array; write '--shapes float32[64,10] int32[]'",
    "{}:total --devices 1 --devices 2 --json": "--html, --json and --on are of one report; write --devices once",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_command_line_tells_mistakes_in_a_line(model: Path, capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    assert main(["explain", *arguments.format(model).split(" ")]) == 2
    assert capsys.readouterr().err == f"paraxis: {WRONG[arguments].format(model)}\n"
