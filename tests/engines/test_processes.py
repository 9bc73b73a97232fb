"""A program that other processes run gives what it gives with plain ``jnp``, whatever becomes of the processes."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import paraxis as px
from tests._support import assert_close
from tests.engines import _sources
from tests.engines._programs import AXIS, PROGRAMS, N, Ours, Plain, W, X, Y

AT_ONCE = 5  # of the fixtures `pool` and `ray`
# A loop on the host, what is kept, elements that exchange values; what others cover is of the night.
DAILY = ("scanned", "extremes", "exchanging")
NAMES = [pytest.param(n, marks=() if n in DAILY else pytest.mark.slow) for n in PROGRAMS]


def groups(*arrays: Any) -> list[px.Groups]:
    return [px.Groups.of_arrays(x) for x in arrays]


def agrees(engine: Any, name: str) -> None:
    program = PROGRAMS[name]
    expected = jax.jit(jax.value_and_grad(lambda w, x, y: program(Plain, w, x, y)))(W, X, Y)
    actual = engine.run(jax.value_and_grad(lambda w, x, y: program(Ours(), w, x, y)), W, *groups(X, Y))
    assert_close(actual, expected)


@pytest.mark.newest
@pytest.mark.parametrize("name", NAMES)
def test_a_pool_gives_what_all_rows_at_once_give(pool, name):
    agrees(pool, name)


@pytest.mark.newest
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "extremes" else pytest.mark.slow) for n in PROGRAMS])
def test_a_cluster_gives_what_all_rows_at_once_give(ray, name):
    agrees(ray, name)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3, 7, N])
def test_chunks_of_any_size(at_once):
    with px.Pool(at_once=at_once, workers=2) as engine:
        agrees(engine, "normalised")


# --- elements, and who reads them --------------------------------------------------------------------------------

COUNT = 40
MEMBERS = px.Axis("members", COUNT)


def total(element: Any) -> Any:
    """The sum of squares, and the processes that have read the elements."""
    found = px.map_fn(lambda e: jnp.sum(e["x"] ** 2), (element,), MEMBERS)
    return px.reduce_sum(found, MEMBERS), px.map_fn(lambda e: e["process"] + 0, (element,), MEMBERS)


SQUARES = (np.arange(1, COUNT + 1) ** 2).sum() * 5 / COUNT**2


def test_elements_are_read_where_they_are_used_unless_their_source_is_of_this_program(pool):
    found, readers = pool.run(total, px.Groups(_sources.Rows(COUNT)))
    np.testing.assert_allclose(found, SQUARES, rtol=1e-5)
    assert os.getpid() not in readers

    class Own(_sources.Rows):
        pass

    found, readers = pool.run(total, px.Groups(Own(COUNT)))
    np.testing.assert_allclose(found, SQUARES, rtol=1e-5)
    assert set(readers.tolist()) == {os.getpid()}


def test_arrays_in_files_are_sent_by_their_names(pool, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((N, 1_000_000), "float32"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert len(pickle.dumps(px.Groups.of_arrays(mapped))) < 10_000
    np.save(tmp_path / "square.npy", np.arange(40_000.0).reshape(200, 200))
    square = np.load(tmp_path / "square.npy", mmap_mode="r")
    changed = np.load(tmp_path / "square.npy", mmap_mode="c")
    changed[1, 1] = -1.0
    written = np.load(tmp_path / "square.npy", mmap_mode="r+")
    alike = np.repeat(np.arange(200.0) % 50, 200).reshape(
        200, 200
    )  # its rows from 50 on begin and end as the whole does
    alike[60] = -1
    np.save(tmp_path / "alike.npy", alike)
    views = (
        np.load(tmp_path / "alike.npy", mmap_mode="r")[50:],
        mapped[1:, :9],
        square.T,
        square[::-1],
        np.broadcast_to(square[:1], (200, 200)),
        square.view("int64"),
    )
    for view in (*views, changed, written):
        again = pickle.loads(pickle.dumps(px.Groups.of_arrays(view)))
        np.testing.assert_array_equal(again.arrays(), view)  # what no file has as it is, is sent
    found = pool.run(lambda x: px.reduce_sum(px.map_fn(jnp.sum, (x,), AXIS), AXIS), px.Groups.of_arrays(mapped))
    assert float(found) == N * 1e6


def test_an_array_of_which_the_file_was_replaced_is_sent_as_it_is(tmp_path):
    """A quarter of all labels begin and end alike."""
    before, after = np.zeros((2, 100))
    after[10:90] = 1.0
    np.save(tmp_path / "y.npy", before)
    mapped = np.load(tmp_path / "y.npy", mmap_mode="r")
    np.save(tmp_path / "new.npy", after)
    (tmp_path / "new.npy").replace(tmp_path / "y.npy")
    again = pickle.loads(pickle.dumps(px.Groups.of_arrays(mapped)))
    np.testing.assert_array_equal(again.arrays(), before)


def test_numbers_may_be_shared_and_a_mesh_be_in_force(pool):
    def scaled(w: Any, x: Any) -> Any:
        return px.reduce_sum(px.map_fn(lambda w, x: w * x.sum(), (px.broadcast(w, AXIS), x), AXIS), AXIS)

    for number in (2.0, 3, np.float32(0.5), True):
        found, plain = pool.run(scaled, number, *groups(X)), jnp.asarray(number) * X.sum()
        assert found.dtype == plain.dtype
        np.testing.assert_allclose(found, plain, rtol=1e-5)
    with jax.set_mesh(jax.make_mesh((4,), ("clients",))):
        np.testing.assert_allclose(pool.run(scaled, 2.0, *groups(X)), 2 * X.sum(), rtol=1e-5)


def test_random_keys_may_be_shared(pool):
    def noise(key: Any, x: Any) -> Any:
        def of(key: Any, x: Any) -> Any:
            return jax.random.normal(jax.random.fold_in(key, px.axis_index("clients")), x.shape).sum()

        return px.reduce_sum(px.map_fn(of, (px.broadcast(key, AXIS), x), AXIS), AXIS)

    key = jax.random.key(5)
    plain = sum(float(jax.random.normal(jax.random.fold_in(key, i), X.shape[1:]).sum()) for i in range(N))
    np.testing.assert_allclose(pool.run(noise, key, *groups(X)), plain, rtol=1e-4)


def test_a_source_may_read_what_is_typed_and_gets_nothing(pool):
    found, _ = pool.run(total, px.Groups(_sources.Typed(COUNT)))
    np.testing.assert_allclose(found, SQUARES, rtol=1e-5)


def test_elements_of_different_length_from_files(pool, tmp_path):
    lengths = [1 + i % 4 for i in range(N)]
    for i, n in enumerate(lengths):
        np.savez(tmp_path / f"{i:02}.npz", x=X[i, :n])
    ragged = px.Groups.npz(tmp_path)

    def loss(w: Any, data: Any) -> Any:
        def of(w: Any, data: Any) -> Any:
            return jnp.sum(jnp.where(data.mask, jnp.tanh(data.x @ w), 0)) / data.count

        return px.reduce_mean(px.map_fn(of, (px.broadcast(w, AXIS), data), AXIS), AXIS)

    plain = jax.value_and_grad(lambda w: sum(jnp.tanh(X[i, :n] @ w).mean() for i, n in enumerate(lengths)) / N)
    assert_close(pool.run(jax.value_and_grad(loss), W, ragged), plain(W))


def test_results_with_rows_and_of_any_dtype(pool):
    def every(w: Any, x: Any) -> Any:
        losses = px.map_fn(lambda w, x: jnp.tanh(x @ w).sum(), (px.broadcast(w, AXIS), x), AXIS)
        share = losses / px.reduce_sum(jnp.abs(losses), AXIS)
        return {"share": share, "half": share.astype("bfloat16"), "x": x, "empty": x[:, :0], "w": w, "weak": 2.0 * w}

    found = pool.run(every, W, *groups(X))
    losses = np.tanh(X @ np.asarray(W)).sum(1)
    np.testing.assert_allclose(found["share"], losses / np.abs(losses).sum(), rtol=1e-5)
    assert found["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["x"], X)
    assert found["empty"].shape == (N, 0, 3)
    with jax.enable_x64(True):
        exact = pool.run(lambda x: px.reduce_sum(px.map_fn(jnp.sum, (x,), AXIS), AXIS), *groups(X.astype("float64")))
    assert exact.dtype == np.float64
    np.testing.assert_allclose(exact, X.astype("float64").sum(), rtol=1e-14)


def test_bits_do_not_depend_on_the_number_of_processes(pool):
    fn = jax.value_and_grad(lambda w, x, y: PROGRAMS["normalised"](Ours(), w, x, y))
    bits = set()
    with px.Pool(at_once=5, workers=1) as alone:
        for run in (pool.jit(fn), alone.jit(fn)):
            for _ in range(2):
                bits.add(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run(W, *groups(X, Y)))))
    assert len(bits) == 1


# --- processes that end ------------------------------------------------------------------------------------------


def children() -> list[psutil.Process]:
    """The processes that were started for engines, and have not ended."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if "serve()" in " ".join(process.cmdline()) else []
    return found


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_processes_are_replaced_and_the_bits_are_the_same(kills):
    source, before = px.Groups(_sources.Slow(COUNT)), children()
    random, left = np.random.default_rng(0), [kills]

    def kill(_: Any) -> None:
        found = [p for p in children() if p not in before]
        if left[0] and found and random.random() < 0.3:  # none is left where both have just been killed
            left[0] -= 1
            found[random.integers(len(found))].send_signal(signal.SIGKILL)

    with px.Pool(at_once=1, workers=2, verbose=kill) as engine:
        found = set()
        while left[0]:
            found.add(np.asarray(engine.run(lambda e: total(e)[0], source)).tobytes())
        found.add(np.asarray(engine.run(lambda e: total(e)[0], source)).tobytes())
        assert len(found) == 1
    assert children() == before


def _at_work() -> list[psutil.Process]:
    """Return the workers of a cluster that compute."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == ["ray::perform"]:
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
@pytest.mark.usefixtures("ray")
def test_killed_workers_of_a_cluster_are_replaced_and_the_bits_are_the_same(kills):
    source, random = px.Groups(_sources.Slow(COUNT)), np.random.default_rng(0)
    left, in_run = [kills], [0]

    def kill(_: Any) -> None:
        found = _at_work()
        if left[0] and in_run[0] and found:  # of one task, three would be the end
            left[0], in_run[0] = left[0] - 1, in_run[0] - 1
            found[random.integers(len(found))].send_signal(signal.SIGKILL)

    engine, bits = px.Ray(at_once=1, verbose=kill), set()
    for _ in range(20 * kills):
        in_run[0] = 2 * bool(left[0])
        bits.add(np.asarray(engine.run(lambda e: total(e)[0], source)).tobytes())
        if not left[0] and not in_run[0]:
            break
    assert left == [0]
    assert len(bits) == 1


@pytest.mark.parametrize("where", ["small", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pool", "ray"))])
def test_an_element_that_ends_its_process_is_named(where, request):
    engine = px.Pool(at_once=2, workers=1) if where == "small" else request.getfixturevalue(where)
    with pytest.raises(px.DataError, match=r"element 23 ended each process that ran it, 3 of them: .*groups\[23\]"):
        engine.run(total, px.Groups(_sources.Deadly(COUNT, 23)))
    found, _ = engine.run(total, px.Groups(_sources.Rows(COUNT)))  # it goes on with others
    np.testing.assert_allclose(found, SQUARES, rtol=1e-5)


def test_a_mapped_file_that_was_cut_off_is_named(pool, tmp_path):
    """To read what is no longer there would end this process."""
    np.save(tmp_path / "x.npy", np.ones((COUNT, 4096), "float32"))
    groups = px.Groups.of_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"))
    os.truncate(tmp_path / "x.npy", 50_000)
    with pytest.raises(px.DataError, match=r"x\.npy' has become shorter than when it was mapped; map it anew"):
        pool.run(lambda x: px.reduce_sum(x, MEMBERS), groups)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["pool", "ray"])
def test_a_process_that_ended_once_is_replaced(where, request, tmp_path):
    source = _sources.Deadly(COUNT, 23, once=tmp_path / "mark")
    found, _ = request.getfixturevalue(where).run(total, px.Groups(source))
    np.testing.assert_allclose(found, SQUARES, rtol=1e-5)
    assert source.once is not None
    assert source.once.exists()


# A head that computes nothing, and nodes with a process each, which the head misses after a few seconds.
_ON_NODES = """
import sys
from pathlib import Path
import numpy as np
from ray.cluster_utils import Cluster
import paraxis as px
from tests.engines import _sources
from tests.engines.test_processes import COUNT, twice
how = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
head = {"num_cpus": 0, "include_dashboard": False, "_system_config": how}
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(4):
    cluster.add_node(num_cpus=1)
engine = px.Ray(at_once=2, address=cluster.address, keep="memory")
mark = Path(sys.argv[1]) / "mark"
undisturbed = engine.run(twice, px.Groups(_sources.Rows(COUNT)))
disturbed = engine.run(twice, px.Groups(_sources.DeadlyToNodes(COUNT, 33, once=mark)))
print("lost a node:", mark.exists(), *(np.array_equal(a, b) for a, b in zip(undisturbed, disturbed)))
try:
    engine.run(twice, px.Groups(_sources.DeadlyToNodes(COUNT, 23)))
except px.ProcessError as error:
    print(error)
cluster.shutdown()
"""


def twice(element: Any) -> Any:
    """Values that a second pass needs, and a row for each element."""
    squares = px.map_fn(lambda e: e["x"] ** 2, (element,), MEMBERS)
    mean = px.broadcast(px.reduce_mean(squares, MEMBERS), MEMBERS)
    apart = px.map_fn(lambda square, mean: jnp.sum(jnp.abs(square - mean)), (squares, mean), MEMBERS)
    return px.reduce_sum(apart, MEMBERS), apart


@pytest.mark.slow
def test_nodes_of_a_cluster_are_lost_with_what_they_keep(tmp_path):
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory() as own:  # a short name, and the address is not left where others look for it
        variables = os.environ | {"RAY_TMPDIR": own}
        run = subprocess.run(
            [sys.executable, "-c", _ON_NODES, tmp_path], capture_output=True, text=True, env=variables, timeout=400
        )
    assert "lost a node: True True True" in run.stdout, run.stderr[-2000:]
    assert re.search(r"elements 22 to 23, after up to 3 tries, are lost: Task failed.* node .*folder=", run.stdout)


_ALONE = """
import paraxis as px
from tests.engines import _sources
from tests.engines.test_processes import COUNT, total
print(px.Ray(at_once=20).run(total, px.Groups(_sources.Rows(COUNT)))[0])
"""


@pytest.mark.slow
def test_a_cluster_of_which_ray_remembers_only_the_address_is_not_waited_for():
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory() as own:
        Path(own, "ray").mkdir()
        Path(own, "ray", "ray_current_cluster").write_text("127.0.0.1:9")  # where nobody listens
        variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": own}
        run = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, env=variables, timeout=100)
    np.testing.assert_allclose(float(run.stdout), SQUARES, rtol=1e-5, err_msg=run.stderr[-2000:])


@pytest.mark.parametrize("where", ["pool", pytest.param("ray", marks=pytest.mark.slow)])
def test_an_element_that_cannot_be_read_is_named(where, request):
    with pytest.raises(px.DataError, match=r"element 7 \(number 7\) cannot be read: OSError: the disk is gone"):
        request.getfixturevalue(where).run(total, px.Groups(_sources.Bad(COUNT)))


@pytest.mark.slow
def test_an_interrupt_ends_what_is_under_way(tmp_path):
    def interrupt(progress: Any) -> None:
        if progress.done == 4:
            signal.raise_signal(signal.SIGINT)

    before = children()
    with px.Pool(at_once=1, workers=2, verbose=interrupt, folder=tmp_path / "run", save_every=1000) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.run(total, px.Groups(_sources.Slow(COUNT)))
        seen = []
        again = px.Pool(at_once=1, workers=1, verbose=seen.append, folder=tmp_path / "run")
        with again:  # another number of processes goes on with it
            found, _ = again.run(total, px.Groups(_sources.Slow(COUNT)))
    np.testing.assert_allclose(found, SQUARES, rtol=1e-5)
    assert seen[0].done == 5
    assert children() == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Pool", "Ray"])
@pytest.mark.usefixtures("pool", "ray")
def test_an_interrupted_run_goes_on_in_other_processes_to_the_same_bits(kind, tmp_path):
    def interrupt(progress: Any) -> None:
        if progress.done == 17:
            signal.raise_signal(signal.SIGINT)

    def run(**options: Any) -> bytes:
        if kind == "Ray":
            return np.asarray(px.Ray(at_once=1, **options).run(total, source)[0]).tobytes()
        with px.Pool(at_once=1, workers=2, **options) as engine:
            return np.asarray(engine.run(total, source)[0]).tobytes()

    source, seen = px.Groups(_sources.Slow(COUNT)), []
    expected = run()
    with pytest.raises(KeyboardInterrupt):
        run(verbose=interrupt, folder=tmp_path / "run", save_every=1000)
    assert run(verbose=seen.append, folder=tmp_path / "run") == expected
    assert seen[0].done >= 17


_LEFT_ALONE = """
import os, threading
import paraxis as px
from tests.engines import _sources
from tests.engines.test_processes import COUNT, total

def end(progress):  # while both are at their next tasks
    print(progress.done, flush=True)
    threading.Timer(0.01, os.kill, (os.getpid(), {number})).start()

px.Pool(at_once=1, workers=2, verbose=end).run(total, px.Groups(_sources.Slow(COUNT)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them_and_say_nothing(number):
    script = _LEFT_ALONE.format(number=int(number))
    started = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path.cwd()
    )
    workers = []
    assert started.stdout is not None
    with started:
        while len(workers) < 2 and started.poll() is None:
            workers = psutil.Process(started.pid).children()
        said = started.communicate(timeout=60)[1]
    assert not said
    assert started.returncode == -number
    assert not psutil.wait_procs(workers, timeout=60)[1]


def test_what_another_engine_has_begun_is_another_run(pool, tmp_path):
    """Its chunks would be put together in another order."""

    def interrupt(_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    axis = px.Axis("members", COUNT, mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("members",)))

    def alone(x: Any) -> Any:
        return px.reduce_sum(px.map_fn(jnp.sum, (x,), axis), axis)

    x = px.Groups.of_arrays(np.ones((COUNT, 3), "float32"))
    with pytest.raises(KeyboardInterrupt):
        px.Stream(at_once=5, folder=tmp_path / "run", verbose=interrupt).run(alone, x)
    with pytest.raises(px.CheckpointError, match=r"Pool: folder .* holds another run: the engine was px\.Stream"):
        px.Pool(at_once=5, folder=tmp_path / "run").run(alone, x)


def test_one_run_at_a_time(pool):
    def meanwhile(_: Any) -> None:
        with pytest.raises(px.errors.StateError, match=r"give each thread a px\.Pool of its own"):
            pool.run(total, px.Groups(_sources.Rows(COUNT)))
        told.append(True)

    told: list[bool] = []
    slow = threading.Thread(target=lambda: pool.run(total, px.Groups(_sources.Slow(COUNT))))
    slow.start()
    while not pool._processes._lock.locked():
        time.sleep(0.01)
    meanwhile(None)
    slow.join()
    assert told


# --- what is refused ---------------------------------------------------------------------------------------------


def shows(w: Any, x: Any) -> Any:
    def of(w: Any, x: Any) -> Any:
        jax.debug.print("{}", w[0])
        return x @ w

    return px.reduce_sum(px.map_fn(of, (px.broadcast(w, AXIS), x), AXIS), AXIS)


def keys(w: Any, x: Any) -> Any:
    return px.map_fn(lambda key, x: key, (px.keys(jax.random.key(0), AXIS), x), AXIS)


@pytest.mark.parametrize(
    ("fn", "text"),
    [(shows, r"calls back .*test_processes\.py:\d+.*px\.Stream"), (keys, r"random keys are .*test_processes\.py:\d+")],
)
def test_what_other_processes_cannot_do_is_refused(pool, fn, text):
    with pytest.raises(px.LoweringError, match=text):
        pool.run(fn, W, *groups(X))


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    for engine, extra in ((px.Pool(at_once=1), "pool"), (px.Ray(at_once=1), "ray")):
        told = rf"needs flatbuffers, which is not installed; write pip .*\[{extra}\]"
        with pytest.raises(ModuleNotFoundError, match=told):
            engine.run(lambda x: px.reduce_sum(x, AXIS), *groups(X))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"px\.Ray needs ray, .*or write px\.Pool"):
        px.Ray(at_once=1).run(lambda x: px.reduce_sum(x, AXIS), *groups(X))
