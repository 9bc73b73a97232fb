"""A program streamed gives what it gives with plain ``jnp`` and ``jax.vmap`` on all rows, or is refused.

Each program is written once, for some verbs; the oracle runs it with verbs of a few lines that know neither axes nor
devices. With eight devices and twelve elements, ``at_once=1`` makes a chunk of eight and a last one of four, shorter
than one element per device.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close
from tests.streaming._programs import AXIS, PROGRAMS, N, Ours, Plain, W, X, Y, mean, one, rng

MARKS: dict[str, Any] = dict.fromkeys(("extremes", "between"), pytest.mark.newest)
MARKS |= dict.fromkeys(("weighted", "masked"), pytest.mark.slow)


def streamed(fn: Callable[..., Any], at_once: int, *args: Any, **options: Any) -> Any:
    groups = px.Groups.of_arrays
    return px.Stream(at_once=at_once, **options).run(fn, *args, groups(X), groups(Y))


@pytest.mark.parametrize("at_once", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 12))])
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in PROGRAMS])
def test_value_and_gradient_are_those_of_all_rows_at_once(name, at_once):
    program = PROGRAMS[name]
    expected = jax.jit(jax.value_and_grad(lambda w, x, y: program(Plain, w, x, y)))(W, X, Y)
    actual = streamed(jax.value_and_grad(lambda w, x, y: program(Ours(), w, x, y)), at_once, W)
    assert_close(actual, expected)
    assert np.abs(np.asarray(expected[1])).max() > 1e-3  # a gradient of zeros would agree with a forgotten one


def every_result(v: Any, x: Any, y: Any) -> Any:
    losses = v.map_fn(one, (v.broadcast(W), x, y))
    return {
        "any": v.reduce_any(losses > 2.0),
        "all": v.reduce_all(losses > 0.0),
        "integers": v.reduce_sum((losses * 10).astype("int32")),
        "half": v.reduce_sum(losses.astype("bfloat16")).astype("float32"),
        "rows": losses / v.reduce_sum(losses),
        "given": x,
        "again": x,
        "constant": v.broadcast(2.0),
        "draws": jax.random.normal(jax.random.key(1), (x.shape[0],)) * losses,
    }


def test_other_reductions_and_results_with_a_row_for_each_element():
    expected = jax.jit(lambda x, y: every_result(Plain, x, y))(X, Y)
    actual = streamed(lambda x, y: every_result(Ours(), x, y), 1)
    np.testing.assert_allclose(actual.pop("half"), expected.pop("half"), rtol=1e-2)
    assert isinstance(actual["rows"], np.ndarray)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)


def of_each_row(x: Any, y: Any) -> Any:
    """Operations on rows outside of maps, none of which knows other rows."""
    n, at = x.shape[0], jnp.argsort(y, 1)
    m = jnp.einsum("nij,nkj->nik", x, x) + jnp.eye(5)
    keys = jax.random.split(jax.random.key(0), n)
    return {
        "sort": jnp.sort(x, 1),
        "cumsum": jnp.cumsum(x, 2),
        "take": jnp.take_along_axis(y, at, 1),
        "embed": jnp.arange(5.0)[at],
        "set": jax.vmap(lambda y, at: y.at[at[0]].add(1.0))(y, at),
        "cholesky": jnp.linalg.cholesky(m),
        "solve": jnp.linalg.solve(m, y[:, :, None]),
        "fft": jnp.abs(jnp.fft.fft(y)),
        "window": jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "VALID"),
        "scan": jax.lax.scan(lambda h, t: (jnp.tanh(h + t @ W), h), jnp.zeros(n), jnp.moveaxis(x, 1, 0))[1].T,
        "key": jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys),
        "integers": (at * 7) % 5 + (at << 2),
        "booleans": (y > 0) & ~(y > 1),
        "half": (x.astype("bfloat16") @ W.astype("bfloat16")).astype("float32"),
        "constants": jnp.flip(jnp.pad(x, ((0, 0), (1, 2), (0, 0))), 1)[:, 3:],
    }


def test_operations_that_keep_rows_apart_are_done_chunk_by_chunk():
    expected = jax.jit(of_each_row)(X, Y)
    _, actual = streamed(lambda x, y: (px.reduce_sum(x, AXIS), of_each_row(x, y)), 1)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


DERIVED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "hessian": jax.hessian,
    "jvp": lambda f: lambda w, x, y: jax.jvp(lambda w: f(w, x, y), (w,), (w,)),
    "Hessian-vector product": lambda f: lambda w, x, y: jax.jvp(lambda w: jax.grad(f)(w, x, y), (w,), (w,)),
    "vmap": lambda f: lambda w, x, y: jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([w, 2 * w]), x, y),
    "of the data": lambda f: jax.grad(f, argnums=1),
    "jit": lambda f: jax.jit(jax.grad(f)),
}


@pytest.mark.parametrize("how", [pytest.param(h, marks=pytest.mark.slow) if h == "hessian" else h for h in DERIVED])
def test_whatever_jax_makes_of_a_program_can_be_streamed(how):
    derive = DERIVED[how]
    expected = jax.jit(derive(lambda w, x, y: mean(Plain, w, x, y)))(W, X, Y)
    actual = streamed(derive(lambda w, x, y: mean(Ours(), w, x, y)), 1, W)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


def test_nested_axes_and_a_program_under_its_own_names():
    @px.program(clients=N, rows=5)
    def loss(w, x, y):
        def client(w, x, y):
            squares = px.map_fn(lambda w, x, y: (jnp.tanh(x @ w) - y) ** 2, (px.broadcast(w, "rows"), x, y), "rows")
            return px.reduce_mean(squares, "rows")

        return px.reduce_mean(px.map_fn(client, (px.broadcast(w, "clients"), x, y), "clients"), "clients")

    expected = jax.jit(jax.value_and_grad(lambda w, x, y: mean(Plain, w, x, y)))(W, X, Y)
    assert_close(streamed(jax.value_and_grad(loss), 1, W), expected)


def test_what_is_compared_with_a_maximum_is_the_value_of_which_it_was_taken():
    """As if each pass rounded otherwise: a loss that is computed again is another, and would attain no maximum."""
    computed = itertools.count()

    def noise(x):
        return np.float32(1e-6 * next(computed))

    def noisy(w: Any, x: Any, y: Any) -> Any:
        found = jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0], vmap_method="sequential")
        return one(w, x, y) + jax.lax.stop_gradient(found)

    def largest(w: Any, x: Any, y: Any) -> Any:
        losses = px.map_fn(noisy, (px.broadcast(w, AXIS), x, y), AXIS)
        top = px.reduce_max(losses, AXIS)
        masked = px.reduce_max(losses, AXIS, where=jnp.arange(x.shape[0]) >= 0)
        return top, px.reduce_sum(jnp.where((losses == top) & (losses == masked), 1.0, 0.0), AXIS)

    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    expected = jax.value_and_grad(lambda w: jax.vmap(one, (None, 0, 0))(w, X, Y).max())(W)
    (top, count), gradient = px.Stream(at_once=1).run(jax.value_and_grad(largest, has_aux=True), W, *groups)
    assert_close((top, gradient), expected, rtol=1e-4)
    assert float(count) == 1.0


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_stream_of_few_elements_given_as_groups_or_as_an_array(size):
    x = np.arange(1.0, size + 1, dtype="float32")
    total = px.program(rows=size)(lambda x: px.reduce_sum(px.map_fn(lambda x: x * 2, x)))
    for rows in (x, px.Groups.of_arrays(x)):
        assert px.Stream(at_once=2).run(total, rows) == size * (size + 1)


def test_a_chunk_does_what_all_elements_do_however_few_it_has():
    """Of few elements, a device runs convolutions one after the other, and sums what they give afterwards."""
    axis, x = px.Axis("clients", 100), rng.normal(size=(100, 2, 6, 6, 1)).astype("float32")
    params = {"kernel": rng.normal(size=(3, 3, 1, 2)).astype("f"), "w": rng.normal(size=(72, 3)).astype("f")}

    def gradient(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(jnp.tanh(jnp.tanh(h).reshape(2, -1) @ p["w"]) ** 2)

        return jax.grad(loss)(p)

    def mean_gradient(p: Any, x: Any) -> Any:
        return px.reduce_mean(px.map_fn(gradient, (px.broadcast(p, axis), x), axis), axis)

    expected = jax.tree.map(lambda g: g.mean(0), jax.vmap(gradient, (None, 0))(params, x))
    assert_close(px.Stream(at_once=1).run(mean_gradient, params, px.Groups.of_arrays(x)), expected, rtol=1e-4)


def test_arrays_used_as_rows_are_cut_and_what_is_closed_over_as_well():
    expected = jax.jit(jax.grad(lambda w: mean(Plain, w, X, Y)))(W)
    assert_close(px.Stream(at_once=1).run(jax.grad(lambda w: mean(Ours(), w, X, Y)), W), expected)
    given = px.Stream(at_once=1).run(jax.grad(lambda w, x, y: mean(Ours(), w, x, y)), W, X, px.Groups.of_arrays(Y))
    assert_close(given, expected)


@pytest.mark.parametrize("at_once", [1, N])
def test_what_is_as_long_as_there_are_elements_is_not_taken_for_theirs(at_once):
    """The chunks of elements of different length are not in order, not even one of all of them."""
    square, order, lengths = rng.normal(size=(N, N)).astype("f"), rng.integers(0, N, N), [1 + i % 3 for i in range(N)]

    def of(x: Any) -> Any:
        own = jnp.argmax(x, 1)[:, None]
        return {"columns": x[:, order], "own": jnp.take_along_axis(x, own, 1), "x": x @ square}

    elements = [{"row": row, "x": np.zeros(n, "float32")} for row, n in zip(square, lengths, strict=True)]
    run = px.Stream(at_once=at_once).run
    count, found = run(lambda d: (px.reduce_sum(d.count, AXIS), of(d["row"])), px.Groups(elements, lengths=lengths))
    assert count == sum(lengths)
    assert_close(found, jax.jit(of)(square), rtol=1e-4)


@pytest.mark.parametrize(
    "place",
    [
        lambda devices: {"mesh": Mesh(devices[:2], ("clients",))},
        lambda devices: {"mesh": Mesh(devices[5:], ("clients",))},
        lambda devices: {"mesh": Mesh(devices.reshape(4, 2), ("data", "model")), "over": "data", "at_once": 1},
    ],
    ids=["the first two devices", "the last three", "one axis of a mesh of two"],
)
def test_chunks_lie_where_the_axis_says(place):
    placed = px.Axis("clients", N, **place(np.array(jax.devices())))

    def loss(w: Any, x: Any, y: Any) -> Any:
        return px.reduce_mean(px.map_fn(one, (px.broadcast(w, placed), x, y), placed), placed)

    engine, groups = px.Stream(at_once=1), [px.Groups.of_arrays(x) for x in (X, Y)]
    expected = jax.value_and_grad(lambda w: jax.vmap(one, (None, 0, 0))(w, X, Y).mean())(W)
    assert_close(engine.run(jax.value_and_grad(loss), W, *groups), expected)
    devices = placed.mesh.shape[placed.over or "clients"] if placed.mesh is not None else 0
    assert engine.passes(loss, W, *groups).chunks[0][0] == devices


def test_nothing_is_copied_between_devices_at_each_chunk():
    """Neither what the elements share, nor the numbers of which their keys are made: JAX would, on its own."""

    def loss(w: Any, x: Any) -> Any:
        noisy = px.map_fn(
            lambda w, x, key: ((x @ w - jax.random.normal(key)) ** 2).sum(),
            (px.broadcast(w, AXIS), x, px.keys(jax.random.key(1), AXIS)),
            AXIS,
        )
        return px.reduce_mean(noisy, AXIS)

    step = px.Stream(at_once=1).jit(jax.value_and_grad(loss))
    expected = step(W, px.Groups.of_arrays(X))
    with jax.transfer_guard_device_to_device("disallow"):
        assert_close(step(W, px.Groups.of_arrays(X)), expected)


def test_a_jitted_run_follows_the_mesh_and_the_width_that_are_in_force():
    mean = px.Stream(at_once=1).jit(lambda x: px.reduce_mean(px.map_fn(lambda x: (x**2).sum(), (x,), AXIS), AXIS))
    exact = rng.normal(size=(N, 3))
    groups = px.Groups(list(exact))
    assert mean(groups).dtype == np.float32
    with jax.enable_x64(True):
        assert_close(np.asarray(mean(groups)), (exact**2).sum(1).mean(), rtol=1e-15)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:3]), ("clients",))):
        assert_close(mean(groups), np.float32((exact**2).sum(1).mean()))
    assert mean(groups).dtype == np.float32


def test_a_jitted_run_traces_for_a_type_of_arguments_and_takes_other_numbers():
    traces = []

    def loss(w, x, y):
        traces.append(1)
        return mean(Ours(), w, x, y)

    with px.Stream(at_once=1) as stream:
        run = stream.jit(jax.grad(loss))
    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    first, count = run(W, *groups), len(traces)
    assert_close(first, jax.grad(lambda w: mean(Plain, w, X, Y))(W))
    assert_close(run(2 * W, *groups), jax.grad(lambda w: mean(Plain, w, X, Y))(2 * W))
    assert len(traces) == count


@pytest.mark.parametrize(
    ("name", "passes", "kept", "reads"),
    [("mean", 1, 0, 1), ("weighted", 2, 0, 2), ("normalised", 3, 0, 3), ("extremes", 3, 1, 2)],
)
def test_each_element_is_read_once_in_each_pass_and_the_passes_are_known_before(name, passes, kept, reads):
    class Source:
        read: list[int] = []  # noqa: RUF012  of this class, which is made for a test

        def __len__(self):
            return N

        def __getitem__(self, number):
            self.read.append(number)
            return X[number]

    fn = jax.value_and_grad(lambda w, x, y: PROGRAMS[name](Ours(), w, x, y))
    given = W, px.Groups(Source()), px.Groups.of_arrays(Y)
    schedule = px.Stream(at_once=1).passes(fn, *given)
    assert (schedule.num_passes, schedule.kept) == (passes, [()] * kept)
    assert [count for count, _ in schedule.chunks] == [8, 4]
    px.Stream(at_once=1).run(fn, *given)
    assert np.bincount(Source.read)[1:].tolist() == [reads] * (N - 1)  # the first one also says what all look like


def test_a_chunk_with_fewer_elements_than_an_axis_has_at_once_does_the_same():
    axis, numbers = px.Axis("numbers", 40, at_once=2), np.arange(40, dtype=np.float32)

    def total(w, x):
        return px.reduce_sum(px.map_fn(lambda w, x: jnp.sin(w * x), (px.broadcast(w, axis), x), axis), axis)

    found = px.Stream(at_once=1).run(jax.value_and_grad(total), jnp.float32(0.1), px.Groups.of_arrays(numbers))
    expected = np.sin(0.1 * numbers).sum(), (numbers * np.cos(0.1 * numbers)).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_axis_that_says_at_once_runs_so_within_a_chunk():
    turns: list[int] = []

    def count(x):
        def turn(k):
            jax.debug.callback(lambda k: turns.append(int(k)), k)
            return k + 1

        return jax.lax.fori_loop(0, x.astype(int), lambda _, k: turn(k), 0) * x

    axis = px.Axis("numbers", 12, at_once=1)
    total = px.program(numbers=axis)(lambda x: px.reduce_sum(px.map_fn(count, x), axis))
    numbers = np.arange(12.0, dtype=np.float32)
    found = px.Stream(at_once=6).run(total, px.Groups.of_arrays(numbers))
    jax.effects_barrier()
    assert found == np.square(numbers).sum()
    assert len(turns) == numbers.sum()  # run together, a loop goes on for all


def test_what_has_effects_happens_once_though_a_later_pass_needs_its_result():
    seen, axis = [], px.Axis("clients", N, mesh=Mesh(jax.devices()[:1], "clients"))

    def noted(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return x.sum()

    def spread(x):
        sums = px.map_fn(noted, x, axis)
        return px.reduce_mean((sums - px.reduce_mean(sums, axis)) ** 2, axis)

    found = px.Stream(at_once=5).run(spread, px.Groups.of_arrays(X))
    np.testing.assert_allclose(found, X.sum((1, 2)).var(), rtol=1e-4)
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(seen), sorted(X.sum((1, 2))), rtol=1e-4)


# --- memory ------------------------------------------------------------------------------------------------------

PEAK_OF = """
import pathlib, re, sys
import paraxis as px
px.testing.simulate_devices(8)
import jax, jax.numpy as jnp, numpy as np

class Elements:
    def __len__(self):
        return int(sys.argv[1])
    def __getitem__(self, i):
        return np.full((8, 64), i % 7, np.float32)

axis = px.Axis("clients", len(Elements()))
one = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
loss = lambda w, x: px.reduce_mean(px.map_fn(one, (px.broadcast(w, axis), x), axis), axis)
px.Stream(at_once=64).run(jax.value_and_grad(loss), jnp.ones((64, 64)), px.Groups(Elements()))
print(int(re.findall(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[0]) / 1024)
"""
ATTENTION = """
import pathlib, re, sys
import jax, jax.numpy as jnp, numpy as np, paraxis as px

def megabytes(kind):
    return int(re.findall(kind + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[0]) / 1024

@px.program(clients=8)
def loss(w, x):
    one = lambda w, x: jnp.sum(jax.nn.softmax((x * w) @ x.T) @ x)
    return px.reduce_mean(px.map_fn(one, (px.broadcast(w), x)))

clients = px.Groups([np.ones((4096, 64), np.float32)] * 8)
stream = px.Stream(memory=sys.argv[1])
print(stream.passes(loss, 1.0, clients).chunks[0][0])
before = megabytes("VmRSS")
stream.run(loss, 1.0, clients)
print(megabytes("VmHWM") - before)
"""
HAS_PROC = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the memory")


def printed(program: str, *args: str, **environment: str) -> list[float]:
    command, env = [sys.executable, "-c", program, *args], {**os.environ, **environment}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return [float(x) for x in run.stdout.split()]


@HAS_PROC
def test_the_peak_of_memory_does_not_depend_on_the_number_of_elements() -> None:
    """Of 8 chunks, as many as are ever in flight, and of 100. What is freed goes back to the system at once."""
    given = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    (few,), (many,) = (printed(PEAK_OF, str(size), **given) for size in (8 * 512, 100 * 512))
    assert many < 1.05 * few


@HAS_PROC
def test_memory_holds_where_the_compiler_leaves_out_what_a_library_takes() -> None:
    """Attention over 4,096 rows: scores of 64 MiB for each of the elements at once."""
    count, grown = printed(ATTENTION, "400MB", XLA_FLAGS="", JAX_PLATFORMS="cpu")
    assert 1 <= count < 8
    assert grown < 400


def test_memory_decides_how_many_are_run_at_once():
    size = 4000
    axis = px.Axis("clients", size)

    def loss(w, x):
        each = px.map_fn(lambda w, x: jnp.sum(jnp.tanh(x * w) ** 2), (px.broadcast(w, axis), x), axis)
        return px.reduce_mean(each, axis)

    x = np.random.default_rng(0).normal(size=(size, 100, 3)).astype("float32")
    groups = px.Groups.of_arrays(x)
    chunks = {
        megabytes: px.Stream(memory=f"{megabytes} MB").passes(jax.grad(loss), W, groups).chunks[0][0]
        for megabytes in (1, 2, 1000)
    }
    assert chunks[1000] == size
    assert 1.7 < chunks[2] / chunks[1] < 2.4
    assert chunks[2] * x[0].nbytes < 2e6
    assert_close(px.Stream(memory="2 MB").run(loss, W, groups), jnp.mean(jnp.sum(jnp.tanh(x * W) ** 2, (1, 2))))
    with pytest.raises(ValueError, match=r"memory must be at least [\d,]+ bytes.*got 1,000; write px\.Stream\(memory="):
        px.Stream(memory="1kB").run(loss, W, groups)


# --- what is shown -------------------------------------------------------------------------------------------------


def test_progress_is_told():
    told = []
    streamed(lambda x, y: mean(Ours(), W, x, y), 1, verbose=told.append)
    assert [(p.done, p.elements, p.pass_number, p.passes) for p in told] == [(8, N, 1, 1), (12, N, 1, 1)]
    assert str(told[-1]) == "pass 1 of 1: 12 of 12 clients, 0 s left"


# --- what is refused ---------------------------------------------------------------------------------------------

HERE = r"test_stream\.py:\d+"


def own(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda y: px.reduce_sum(px.map_fn(fn, y, AXIS), AXIS)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a sort": (lambda y: jnp.sort(y[:, 0])[3], px.AxisError, rf"meet in sort, at .*{HERE}"),
    "a permutation": (lambda y: y[np.arange(N)[::-1]].sum(), px.AxisError, rf"meet in gather, at .*{HERE}"),
    "the next row": (
        lambda y: y.at[(jnp.arange(y.shape[0]) + 1) % y.shape[0]].add(y).max(),
        px.AxisError,
        rf"meet in scatter-add, at .*{HERE}",
    ),
    "a loop over all": (
        lambda y: jax.lax.fori_loop(0, 2, lambda _, c: c + c.mean(0), y).max(),
        px.AxisError,
        rf"meet in scan, at .*{HERE}",
    ),
    "until all are done": (
        lambda y: jax.lax.while_loop(lambda c: jnp.any(c > 1e-9), lambda c: c / 2, y).max(),
        px.AxisError,
        rf"meet in while, at .*{HERE}.*write it in a mapped function",
    ),
    "all pairs": (lambda y: (y[:, None] - y).sum(), px.AxisError, rf"meet in .*, at .*{HERE}"),
    "closed over": (
        lambda y: own(lambda a: (a - y).sum())(y),
        px.AxisError,
        rf"meet in px_map, at .*{HERE}.*closes over all elements",
    ),
    "exchanged": (own(lambda a: px.psum(a, "clients")), px.AxisError, rf"at .*{HERE}.*px\.reduce_sum"),
    "an index": (own(lambda a: a * px.axis_index("clients")), px.AxisError, rf"at .*{HERE}.*np\.arange\(n\)"),
    "a range in a body": (
        lambda y: own(lambda a: a.sum() * jnp.arange(y.shape[0]).sum())(y),
        px.AxisError,
        rf"as many entries as there are elements, at .*{HERE}",
    ),
    "a loop": (
        lambda y: jax.lax.fori_loop(0, 3, lambda _, c: c + px.reduce_sum(y * c, AXIS).sum(), 1.0),
        px.AxisError,
        rf"meet inside .*, at .*{HERE}.*for _ in range\(10\)",
    ),
    "a map of another axis": (
        lambda y: px.map_fn(lambda a: px.reduce_sum(a * y, AXIS).sum(), jnp.ones(3), px.Axis("models", 3)).sum(),
        px.AxisError,
        rf"meet inside px_map, at .*{HERE}.*write jax\.vmap",
    ),
    "turns": (
        lambda y: jax.lax.fori_loop(0, y.shape[0], lambda _, c: c * 1.1, px.reduce_sum(y, AXIS)),
        px.AxisError,
        rf"written out in scan, at .*{HERE}",
    ),
    "a number that is written": (
        lambda y: px.reduce_sum(y[:, 0] * jnp.arange(N), AXIS),
        px.AxisError,
        r"traced for its 12 elements, but not for 5.*jnp\.arange\(x\.shape\[0\]\)",
    ),
    "other operations": (
        lambda y: px.reduce_sum(jnp.tanh(y) if y.shape[0] < 11 else y, AXIS),
        px.AxisError,
        rf"at .*{HERE}.*must not depend on the number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_chunks_cannot_do_is_refused_with_the_line(name):
    fn, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        px.Stream(at_once=1).run(lambda y: (px.reduce_sum(y, AXIS).sum(), fn(y)), px.Groups.of_arrays(Y))


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.grad, lambda f: lambda w: jax.vmap(f)(w[None])], ids=["jit", "grad", "vmap"]
)
def test_a_stream_cannot_be_traced(transform):
    with pytest.raises(px.AxisError, match=r"called inside jax\.jit, jax\.grad or the like; write px\.Stream"):
        transform(lambda w: streamed(lambda w, x, y: mean(Ours(), w, x, y), 1, w))(W)


def test_groups_axes_and_options_that_do_not_fit():
    groups, run = px.Groups.of_arrays, px.Stream(at_once=1).run
    with pytest.raises(px.AxisError, match=r"of 5 elements, as groups have.*has 'clients' of 12"):
        run(lambda x: px.reduce_sum(jnp.zeros(N), AXIS) + x.sum(), groups(np.zeros(5)))
    with pytest.raises(px.DataError, match="groups must have equally many elements"):
        run(lambda x, y: px.reduce_sum(x, AXIS), groups(X), groups(np.zeros(5)))
    mesh = jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Explicit,))
    typed = px.Axis("clients", N, mesh=mesh)
    with pytest.raises(px.AxisError, match=r"'clients' lies on a mesh with Explicit axes.*AxisType\.Auto"):
        run(lambda x: px.reduce_max(px.map_fn(lambda x: x.sum(), (x,), typed), typed), groups(X))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"at_once": 0}, r"at_once must be .*got 0"),
        ({}, "give at_once or memory, and not both"),
        ({"at_once": 1, "memory": "2GB"}, "give at_once or memory, and not both"),
        ({"memory": "much"}, r"text such as '2GB', got 'much'"),
        ({"memory": "1GB", "map": map}, "with map at_once"),
    )
    for options, text in refused:
        with pytest.raises(ValueError, match=text):
            px.Stream(**options)


@px.program(clients=5)
def five(w, x):
    return px.reduce_mean(px.map_fn(lambda w, x: jnp.where(x.mask, x["x"], 0).sum() * w, (px.broadcast(w), x)))


EQUAL = px.Groups([{"x": np.ones(2, np.float32)}] * 5)


@pytest.mark.parametrize(
    "how", [lambda w, x: jax.jit(five)(w, x), lambda w, x: jax.grad(five)(w, x), five, lambda w, x: px.pmap(jnp.sum)(x)]
)
def test_groups_given_to_something_else_say_what_to_write(how):
    with pytest.raises(px.DataError, match=r"it is no array; write .*px\.Stream\(at_once=64\)\.run\(loss, w, groups\)"):
        how(W, EQUAL)
