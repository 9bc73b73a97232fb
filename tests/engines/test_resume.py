"""A run that saves what it has done goes on after it was killed, to the same bits, and touches nothing but its own."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.engines import Progress

N = 24
AXIS = px.Axis("clients", N)
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
W = jnp.array([0.9, -0.4, 0.3])


def loss(w, x):
    """Two rounds in a loop on the host, rows that are kept, a maximum."""

    def step(w, _):
        g = px.map_fn(lambda w, x: jnp.tanh(x * w), (px.broadcast(w, AXIS), x), AXIS)
        return w - 0.1 * px.reduce_mean(g, AXIS), None

    w, _ = jax.lax.scan(step, w, None, length=2)
    losses = px.map_fn(lambda w, x: jnp.sum(jnp.tanh(w * x) ** 2), (px.broadcast(w, AXIS), x), AXIS)
    return px.reduce_max(losses, AXIS) + px.reduce_mean(losses, AXIS)


FN = jax.value_and_grad(loss)


class Stopped(Exception):  # noqa: N818  it is no error
    pass


def stopped_after(chunks: int, seen: list[Progress] | None = None):
    seen = [] if seen is None else seen
    before = len(seen)

    def watch(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) > before + chunks:
            raise Stopped

    return watch


def run(folder: Path | None, x=X, w=W, at_once=1, **options):
    options |= {} if folder is None else {"save_every": 0}
    return px.Stream(at_once=at_once, folder=folder, **options).run(FN, w, px.Groups.of_arrays(x))


def bits(result) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)]


def test_a_run_goes_on_from_where_it_was_stopped(tmp_path):
    whole: list[Progress] = []
    expected = run(None, verbose=whole.append)
    stops = 0
    seen: list[Progress] = []
    while True:
        try:
            result = run(tmp_path / "run", verbose=stopped_after(4, seen))
            break
        except Stopped:
            stops += 1
    assert bits(result) == bits(expected)
    assert stops > 2
    assert len(seen) <= len(whole) + stops  # only the chunk at which it was stopped is computed again
    assert not (tmp_path / "run").exists()


def test_an_interrupt_loses_nothing_and_leaves_no_thread(tmp_path):
    """Also where it is not yet time to save."""
    whole: list[Progress] = []
    expected = run(None, verbose=whole.append)
    seen: list[Progress] = []

    def interrupted(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) in (2, 5):
            signal.raise_signal(signal.SIGINT)

    engine = px.Stream(at_once=1, folder=tmp_path / "run", save_every=1000, verbose=interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.run(FN, W, px.Groups.of_arrays(X))
        told = f"Stream.run: saved in {str(tmp_path / 'run')!r}; the same call resumes there"
        assert caught.value.__notes__ == [told]
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paraxis")]
    assert bits(engine.run(FN, W, px.Groups.of_arrays(X))) == bits(expected)
    assert [(p.pass_number, p.done) for p in seen] == [(p.pass_number, p.done) for p in whole]


def test_the_time_left_does_not_count_what_an_earlier_run_has_done(tmp_path, monkeypatch):
    """By a clock on which each chunk takes a second."""
    with pytest.raises(Stopped):
        run(tmp_path / "run", verbose=stopped_after(4))
    seen: list[Progress] = []
    clock = types.SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(sys.modules[px.Stream.run.__module__], "time", clock)
    run(tmp_path / "run", verbose=seen.append)
    told = [(p.seconds_left, left) for p, left in zip(seen, reversed(range(len(seen))), strict=True)]
    assert told[0][0] is None
    assert all(seconds == left for seconds, left in told[1:])


def test_files_without_a_record_are_nobodys(tmp_path):
    """As they are left where the record went first; a run with other arguments would take them for its own."""
    with pytest.raises(Stopped):
        run(tmp_path / "run", verbose=stopped_after(8))
    (tmp_path / "run" / "paraxis-run.json").unlink()
    assert bits(run(tmp_path / "run", w=2 * W)) == bits(run(None, w=2 * W))
    assert not (tmp_path / "run").exists()


def test_a_folder_is_for_one_run_at_a_time(tmp_path):
    errors: list[Exception] = []
    expected = bits(run(None))

    def meanwhile(progress: Progress) -> None:
        if not errors:
            with pytest.raises(px.CheckpointError, match=r"in use by another run; wait .*folder='.*run-2'") as caught:
                run(tmp_path / "run")
            errors.append(caught.value)

    assert bits(run(tmp_path / "run", verbose=meanwhile)) == expected
    assert errors
    assert not (tmp_path / "run").exists()


def test_another_run_is_not_gone_on_with(tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path / "run", verbose=stopped_after(2))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(px.CheckpointError, match="another run: w had other values; write what it was"):
        run(tmp_path / "run", w=2 * W)
    with pytest.raises(px.CheckpointError, match="another run: at_once was 1, and is 2 here; write what it was"):
        run(tmp_path / "run", at_once=2)
    with pytest.raises(px.CheckpointError, match="another run: keep was 'recompute', and is 'memory' here;"):
        run(tmp_path / "run", keep="memory")
    with pytest.raises(px.CheckpointError, match="another run: its program was another;"):
        px.Stream(at_once=1, folder=tmp_path / "run").run(loss, W, px.Groups.of_arrays(X))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


BEFORE: dict[str, Any] = {
    "size": N,
    "at_once": 1,
    "devices": 8,
    "keep": "recompute",
    "engine": "Stream",
    "memory": None,
    "ids": None,
    "w": np.ones(3, "float32"),
    "x": np.ones(3, "float32"),
    "scale": 1.0,
    "add": False,
    "number": 0.5,
    "lengths": 0,
    "num_shapes": 12,
    "readers": 2,
    "wide": False,
}
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "at_once": ({"at_once": 2}, "at_once was 1, and is 2 here"),
    "memory": ({"memory": "1MB"}, r"at_once was 1, and is 3 by memory=1000000 here"),
    "devices": ({"devices": 4}, "the number of devices was 8, and is 4 here"),
    "the engine": ({"engine": "Pool"}, r"the engine was px\.Stream, and is px\.Pool here"),
    "keep": ({"keep": "memory"}, "keep was 'recompute', and is 'memory' here"),
    "the size": ({"size": 12}, r"x was 24 elements, the first float32\[3\], and is 12 elements, the first .* here"),
    "elements": ({"x": np.full(3, 2, "float32")}, "x had other values"),
    "their shape": ({"x": np.ones(4, "float32")}, r"x was .* float32\[3\], and is .* float32\[4\] here"),
    "their dtype": ({"x": np.ones(3, "float16")}, r"x was .* float32\[3\], and is .* float16\[3\] here"),
    "their names": ({"ids": [f"c{i}" for i in range(N)]}, r"x\.ids had other values"),
    "an argument": ({"w": np.full(3, 2, "float32")}, "w had other values"),
    "its shape": ({"w": np.ones(4, "float32")}, r"w was float32\[3\], and is float32\[4\] here"),
    "its dtype": ({"w": np.ones(3, "float16")}, r"w was float32\[3\], and is float16\[3\] here"),
    "what is closed over": ({"scale": 2.0}, "what fn closes over had other values"),
    "a number": ({"number": -0.25}, r"number \d in fn was 0\.5, and is -0\.25 here"),
    "no number": ({"number": np.inf}, r"number \d in fn was 0\.5, and is inf here"),
    "the function": ({"add": True}, "its program was another"),
    "the width": ({"wide": True, "add": None}, "jax_enable_x64 was False, and is True here"),
    "lengths": ({"lengths": 3}, r"x\.lengths had other values"),
    "num_shapes": ({"num_shapes": 1}, "num_shapes was 12, and is 1 here"),
}


def depending(folder: Path, watch: Any = False, **options: Any) -> None:
    """A run that depends on each of the options."""
    o = BEFORE | options
    axis = px.Axis("clients", o["size"], mesh=jax.sharding.Mesh(np.array(jax.devices()[: o["devices"]]), "clients"))
    scale = np.full(np.shape(o["x"])[-1:], o["scale"], "float32")
    lengths = [1 + i * o["lengths"] % 7 for i in range(o["size"])] if o["lengths"] else None

    def one(w: Any, x: Any) -> Any:
        x = jnp.where(x.mask, x["x"], 0).sum() if lengths else (x * scale).sum()
        x = x + np.float64(0.1) * jnp.arange(3.0).sum() if o["add"] is None else x
        return x + w[0] if o["add"] else x * w[0]

    def total(w: Any, x: Any) -> Any:
        return o["number"] * px.reduce_sum(px.map_fn(one, (px.broadcast(w, axis), x), axis), axis)

    elements: list[Any] = [o["x"]] * o["size"]
    if lengths:
        elements = [{"x": np.ones(n, "float32")} for n in lengths]
    groups = px.Groups(elements, lengths=lengths, ids=o["ids"], num_shapes=o["num_shapes"])
    given: dict[str, Any] = {"folder": folder, "save_every": 0, "keep": o["keep"], "verbose": watch}
    engine: Any = px.Pool(o["at_once"], workers=1, **given)
    if o["engine"] == "Stream":
        size = {"memory": o["memory"]} if o["memory"] else {"at_once": o["at_once"]}
        engine = px.Stream(**size, readers=o["readers"], **given)
    with jax.enable_x64(o["wide"]):
        engine.run(total, o["w"], groups)


@pytest.mark.parametrize("what", OTHER)
def test_a_run_that_differs_in_one_thing_is_told_so_by_this_thing_alone(tmp_path, what):
    other, text = OTHER[what]
    before = {"lengths": 2} if what in ("lengths", "num_shapes") else {"add": other.get("add") and False}
    before |= {"add": None} if what == "the width" else {}
    with pytest.raises(Stopped):
        depending(tmp_path / "run", stopped_after(0), **before)
    with pytest.raises(px.CheckpointError) as caught:
        depending(tmp_path / "run", **(before | other))
    told = re.search(r" holds another run: (.*); write what it was to go on with it, give", str(caught.value))
    assert told is not None
    assert re.fullmatch(text, told[1]), told[1]


def test_a_length_among_many_is_another_run(tmp_path):
    """Of more than a thousand numbers, NumPy's text shows the first and the last."""
    axis = px.Axis("clients", 1200)

    def go(shorter: int, watch: Any = False) -> None:
        lengths = [shorter if i == 600 else 5 for i in range(1200)]
        groups = px.Groups([{"x": np.ones(n, "float32")} for n in lengths], lengths=lengths, num_shapes=1)
        engine = px.Stream(at_once=20, folder=tmp_path / "run", save_every=0, verbose=watch)
        engine.run(lambda x: px.reduce_sum(x.count, axis), groups)

    with pytest.raises(Stopped):
        go(4, stopped_after(0))
    with pytest.raises(px.CheckpointError, match=r"another run: x\.lengths had other values;"):
        go(3)


@pytest.mark.parametrize("other", [{"readers": 1}, {"at_once": 40}, {"memory": "2MB"}], ids=str)
def test_what_makes_no_difference_to_the_numbers_is_no_other_run(tmp_path, other):
    before = {"at_once": 30} if "at_once" in other else {"memory": "1MB"} if "memory" in other else {}
    with pytest.raises(Stopped):
        depending(tmp_path / "run", stopped_after(0), **before)
    depending(tmp_path / "run", **(before | other))
    assert not (tmp_path / "run").exists()


def test_arrays_that_a_mapped_function_closes_over_and_other_data_are_another_run(tmp_path):
    def go(factor, x, **options):
        scale = np.full(3, factor, "float32")

        def total(x):
            return px.reduce_sum(px.map_fn(jax.jit(lambda x: x @ scale), x, AXIS), AXIS)

        options = {"folder": tmp_path / "run", "save_every": 0, **options}
        return px.Stream(at_once=1, **options).run(total, px.Groups.of_arrays(x))

    with pytest.raises(Stopped):
        go(1, X, verbose=stopped_after(1))
    with pytest.raises(px.CheckpointError, match="another run: what fn closes over had other values"):
        go(2, X)
    with pytest.raises(px.CheckpointError, match="another run: x had other values;"):
        go(1, 2 * X)
    np.testing.assert_allclose(go(1, X), X.sum(), rtol=1e-4)


def test_a_file_in_place_of_a_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        px.CheckpointError, match=r"notes\.txt' cannot be used: .*; write folder='runs/one', or another"
    ):
        run(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        px.CheckpointError, match=r"must be one of its own, but .* holds 'thesis\.tex'; write px\.Stream"
    ):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "pattern", ["paraxis-run.json", "paraxis-pass-*.npz", "paraxis-part-*.npz", "paraxis-rows-*.npz"]
)
def test_damage_is_an_error_that_names_the_file(tmp_path, pattern):
    with pytest.raises(Stopped):
        run(tmp_path / "run", verbose=stopped_after(8))
    path = sorted((tmp_path / "run").glob(pattern))[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(px.CheckpointError, match=r"cannot be used: .*; remove it to begin anew"):
        run(tmp_path / "run")


@pytest.mark.slow
def test_a_flipped_bit_is_an_error_or_makes_no_difference(tmp_path):
    expected = bits(run(None))
    with pytest.raises(Stopped):
        run(tmp_path / "run", verbose=stopped_after(8))
    saved = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    errors = 0
    for path, data in saved.items():
        for at in np.random.default_rng(0).integers(0, len(data), 6):
            for other, whole in saved.items():
                other.parent.mkdir(exist_ok=True)
                other.write_bytes(whole)
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            try:
                assert bits(run(tmp_path / "run")) == expected
            except px.CheckpointError:
                errors += 1
                shutil.rmtree(tmp_path / "run")
    assert errors > len(saved)


def test_a_full_disk_is_named_and_what_was_saved_is_there(tmp_path, monkeypatch):
    expected = run(None)
    with pytest.raises(Stopped):
        run(tmp_path / "run", verbose=stopped_after(3))
    real = os.fsync

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        px.CheckpointError, match=r"cannot be written: .*No space left on device.*run it again to go on"
    ):
        run(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", real)
    assert bits(run(tmp_path / "run")) == bits(expected)


CHILD = """
import sys, time
import numpy as np
import paraxis as px
sys.path.insert(0, {root!r})
from tests.engines import test_resume as t

def slow(progress):
    print(progress.done, flush=True)
    time.sleep(0.02)

np.savez({out!r}, *t.jax.tree.leaves(t.run(t.Path({folder!r}), verbose=slow)))
"""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_time_it_goes_on_to_the_same_bits(tmp_path, kills):
    expected = bits(run(None))
    root = str(Path(__file__).parents[2])
    code = CHILD.format(root=root, out=str(tmp_path / "out.npz"), folder=str(tmp_path / "run"))
    random = np.random.default_rng(kills)
    code_of_last = None
    for number in range(kills + 1):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if number < kills:
            for _ in range(int(random.integers(1, 4))):
                process.stdout.readline()
            time.sleep(random.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        process.communicate()
        code_of_last = process.returncode
        if code_of_last == 0:
            with np.load(tmp_path / "out.npz") as saved:
                assert [saved[name].tobytes() for name in saved.files] == expected
            (tmp_path / "out.npz").unlink()
    assert code_of_last == 0
