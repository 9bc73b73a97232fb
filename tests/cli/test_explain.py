"""``paraxis explain``: a report on any number of devices, in a process of its own; one line for each mistake."""

import json
import re
from pathlib import Path

import pytest

from paraxis.cli import main
from tests.cli.test_command_line import run

MODEL = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import paraxis as px

NUMBER = 3

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
    path = tmp_path / "explained_model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.newest
def test_a_function_is_explained_on_512_devices_in_a_process_of_its_own(model: Path) -> None:
    shapes = "float32[8,4], float32[1024,16,8]"
    done = run("explain", f"{model}:average", "--shapes", shapes, "--devices", "512", "--html", "report.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("average on 512 devices; traced in ")
    # A mean of 16 x 4 numbers over all devices, as on 8; two products of 16 x 8 and 8 x 4 on each device.
    assert re.search(
        r"\n  256 bytes  all_reduce f32\[16,4\]  along rows  px\.reduce_mean  explained_model\.py:10 ", done.stdout
    )
    assert f"{2 * 2 * 16 * 8 * 4 / 1000:.3g} kFLOP per device" in done.stdout
    assert (model.parent / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_other_programs_are_told_of_each_collective(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{model}:average", "--shapes", "float32[8,4], float32[1024,16,8]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["collectives"] == {"all_reduce": 1}
    assert found["sends"] == [
        {
            "kind": "all_reduce",
            "shape": "f32[16,4]",
            "bytes": 256,
            "times": 1,
            "times_are_exact": True,
            "in_branch": False,
            "axes": ["rows"],
            "devices": 8,
            "file": str(model),
            "line": 10,
            "verb": "px.reduce_mean",
            "others": [],
            "written": False,
            "backward": False,
            "widened_from": None,
        }
    ]
    assert sum(one["bytes"] * one["times"] for one in found["sends"]) == found["sent_bytes"]
    assert main(["explain", f"{model}:Model.twice", "--shapes", "float32[8,8]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sends"] == []


@pytest.mark.slow  # each number is a process
def test_numbers_of_devices_are_compared_in_a_table(model: Path) -> None:
    devices = [word for number in (1, 4) for word in ("--devices", str(number))]
    done = run("explain", f"{model}:average", "--shapes", "float32[8,4] float32[1024,16,8]", *devices)
    assert done.returncode == 0, done.stderr
    header, *rows = [re.split(r"  +", line.strip()) for line in done.stdout.splitlines()]
    assert header[:4] == ["devices", "computes", "an equal share", "sends"]
    assert [row[:4] for row in rows] == [
        ["1", "1.05 MFLOP", "1.05 MFLOP", "0 bytes"],  # 1024 products of 2 * 16 * 8 * 4
        ["4", "262 kFLOP", "262 kFLOP", "256 bytes"],
    ]
    idle = run("explain", f"{model}:total", "--shapes", "float32[8]", *devices)
    assert [re.split(r"  +", line.strip())[::5] for line in idle.stdout.splitlines()] == [
        ["devices", "findings"],
        ["1", "0"],
        ["4", "1"],  # three devices have nothing to do
    ]
    failed = run("explain", f"{model}:none", *devices)
    assert failed.returncode == 2
    assert failed.stderr.splitlines() == [
        f"paraxis: {model}:none: there is no none in explained_model.py",
        "paraxis: on 1 devices, the function could not be explained; see above",
    ]


def test_arguments_may_be_made_by_a_function_and_a_function_named_by_its_module(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert main(["explain", "explained_model:total", "--arguments", "split"]) == 0
    out = capsys.readouterr().out
    assert "total on 8 devices" in out
    assert re.search(r"x +float32 +2048/8 × 4", out)
    assert main(["explain", f"{model}:Model.twice", "--shapes", "float32[4,4]"]) == 0
    assert "128 FLOP per device" in capsys.readouterr().out


BOTH = "--shapes and --arguments both say what the function is given; write one of them"
WRONG = {
    "average": "average names no function; write: paraxis explain model.py:step, or package.model:step",
    "none.py:f": "there is no file none.py",
    "no.such.module:f": "there is no module no.such.module here; write a file: paraxis explain model.py:f",
    "{}:agerage": "{}:agerage: there is no agerage in explained_model.py",
    "{}:NUMBER": "{}:NUMBER: NUMBER is a int, and must be a function",
    "{}:total --shapes float31[3]": "--shapes: float31 is no dtype; write float32[64,10]",
    "{}:total --shapes 3x4": "--shapes: 3x4 is no array; write '--shapes float32[64,10] int32[]'",
    "{}:total --shapes float32[3] --arguments split": BOTH,
    "{}:total --devices 1 --devices 2 --json": "--html and --json are of one report; write --devices once",
    "{}:average --shapes float32[3]": "average takes (w, x), and is given 1 by --shapes",
    "{}:total": "total takes (x), and is given 0 by --shapes or --arguments",
    "{}:total --arguments none": "--arguments none: there is no none in explained_model.py",
    "{}:total --shapes float32[3] --html /dev/null/x": "--html /dev/null/x: Not a directory",
}  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG)
def test_each_mistake_is_told_in_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert main(["explain", *arguments.format(model).split(" ")]) == 2
    assert capsys.readouterr().err == f"paraxis: {WRONG[arguments].format(model)}\n"


def test_more_devices_than_there_are_once_jax_has_started_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{model}:total", "--shapes", "float32[3]", "--devices", "64"]) == 2
    assert "--devices 64: simulate_devices: 64 devices were asked for" in capsys.readouterr().err


SCRIPT = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("batch",))
x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("batch")))

@jax.jit
def total(x):
    return x.sum(0)

@functools.partial(jax.jit, static_argnames="times")
def spread(x, times):
    return (x @ x.T).sum() * times

@functools.partial(jax.jit, static_argnames="cubed")
def power(x, cubed):
    return x @ x @ x if cubed else x @ x

@jax.jit
def drawn(key, weights):
    return weights @ jax.random.normal(key, (4, 4))

class Scaled:
    @functools.partial(jax.jit, static_argnums=0)
    def twice(self, x):
        return total(x) * 2

for _ in range(3):
    total(x)
spread(x, times=2)
Scaled().twice(x)
power(jnp.eye(4), False), power(jnp.eye(4), True), power(jnp.eye(4), True)
drawn(jax.random.key(0), jnp.eye(4)), drawn(jax.random.key(1), jnp.eye(4))
jax.jit(jnp.sin)(1.0)
print("given", sys.argv[1:])
sys.exit(3)
"""


def test_all_that_a_script_calls_is_told_in_the_order_of_what_it_sends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run("explain", str(script), "--devices", "4", "--", "--epochs", "2")
    assert done.returncode == 3, done.stderr  # as the script
    output, _, told = done.stdout.partition("\nscript.py called 7 compiled functions\n")
    assert output == "given ['--epochs', '2']\n"
    assert re.findall(r"^\d\. (.*)$", told, re.MULTILINE)[:3] == [
        f"spread, called 1 time, sent {(64 * 8 + 1) * 4 / 1024:.3g} KiB per device",  # all rows, and the sum
        "total, called 3 times, sent 96 bytes per device",  # 8 numbers each time
        "Scaled.twice, called 1 time, sent 32 bytes per device",  # what it calls is part of it
    ]
    rest = re.findall(r"^\d\. (\w+), called (\d)", told, re.MULTILINE)[2:]  # after spread and total
    assert sorted(rest) == [("drawn", "2"), ("power", "1"), ("power", "2")]
    assert told.endswith("\nand 1 function without matrix products, of which nothing is sent or found\n")


INDIRECT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("batch",))
x = jax.device_put(np.ones((64, 8), np.float32), NamedSharding(mesh, P("batch")))
loss = jax.jit(lambda x: (x**2).sum())
by = {"axis_name": "i"}
cut = {"mesh": mesh, "in_specs": P("batch"), "out_specs": P()}

jnp.ones(3) + 1  # nothing is sent
jax.shard_map(lambda x: jax.lax.psum(x, "batch"), **cut)(x)
jax.vmap(loss, in_axes=1)(x)
for _ in range(5): jax.grad(loss)(x)
jax.pmap(lambda x: jax.lax.psum(x, "i"), **by)(np.ones((4, 3), np.float32))
compiled = loss.lower(x).compile()
compiled(x), compiled(x), loss(x)
jnp.max(x)
jax.export.export(loss)(jax.ShapeDtypeStruct((8,), "float32"))  # is not run
"""


@pytest.mark.newest
def test_what_a_script_runs_without_calling_a_jitted_function_is_told_with_its_line(tmp_path: Path) -> None:
    script = tmp_path / "indirect.py"
    script.write_text(INDIRECT)
    done = run("explain", str(script), "--devices", "4", JAX_ENABLE_COMPILATION_CACHE="false")
    assert done.returncode == 0, done.stderr
    assert re.findall(
        r"^\d\. (\S+), called (.*?) times?, sent (.*) per device(?:; (\S+))?", done.stdout, re.MULTILINE
    ) == [
        ("shard_map", "1", "512 bytes", "indirect.py:12"),  # a block of 16 rows of 8
        ("<lambda>", "1", "32 bytes", "indirect.py:13"),  # 8 sums
        ("<lambda>", "5", "20 bytes", "indirect.py:14"),  # a sum each time; the way back sends nothing
        ("shard_map", "1", "12 bytes", "indirect.py:15"),  # a row of 3
        ("<lambda>", "3", "12 bytes", ""),  # one program, whether called as compiled or by jit
        ("reduce_max", "1", "4 bytes", "indirect.py:18"),
    ]
    compiling = re.findall(r"compiled in (\S+) s", done.stdout)
    assert len(compiling) == 6
    assert max(map(float, compiling)) > 0  # as JAX took, and not what finding it again takes


OURS = """
import jax, jax.numpy as jnp, numpy as np, optax
import paraxis as px

def loss(params, batch):
    return (batch["x"] @ params["w"]) ** 2

def pull(params, x):
    return jax.tree.map(lambda p: p - x.sum(0), params), x @ params["w"]

state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
step = px.train_step(loss)
for _ in range(2):
    state, _ = step(state, {"x": np.ones((8, 3), np.float32)})
px.ensemble(lambda key: {"w": jax.random.normal(key, (3,))}, 4, 0).train(pull, jnp.ones((4, 3)))
px.reduce_sum(np.ones((8, 25), np.float32), px.Axis("rows", 8))
"""


@pytest.mark.newest
def test_what_paraxis_compiles_for_a_script_has_the_names_that_the_script_uses(tmp_path: Path) -> None:
    script = tmp_path / "ours.py"
    script.write_text(OURS)
    done = run("explain", str(script), "--devices", "4")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\d\. (\S+), called (\d)", done.stdout, re.MULTILINE) == [
        ("px.reduce_sum", "1"),  # 25 numbers are sent, and of a step
        ("train_step(loss)", "2"),  # twice a gradient of 3, and the loss
        ("ensemble.train(pull)", "1"),  # nothing
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["none.py"], "there is no file none.py"),
        (["none.py", "--shapes", "float32[2]"], "--shapes is of one function; write: paraxis explain none.py:function"),
        (["none.py", "--json"], "--json is of one function; write: paraxis explain none.py:function --json"),
        (["none.py", "--devices", "2", "--devices", "4"], "a script is run once; write --devices 4 alone"),
        (["model:fn", "--", "--epochs"], "--epochs: what the function is given is said by --shapes or --arguments"),
        (["explained_model.py:total", "--shapes", "float32[2]", "--on", "h101"], "explain: on must be a machine"),
    ],
)
def test_what_is_not_of_a_script_or_not_of_a_function_is_refused(
    words: list[str], complaint: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_time_is_estimated_for_a_machine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{model}:total", "--shapes", "float32[1024]", "--on", "h100"]) == 0
    found = re.search(r"Takes about (\S+) ns on h100 at its peaks: products 0 ", capsys.readouterr().out)
    assert found
    assert 1 <= float(found[1]) * 1e-9 / (4096 / 3.35e12) < 2  # the numbers are read once, and partial sums again
