"""A program streamed gives what it gives on the mesh, or is refused.

With eight devices and twelve elements, ``at_once=1`` makes a chunk of eight and a last one of four, shorter than one
element per device.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._streams import AXIS, PROGRAMS, N, W, X, Y, losses_of, one
from tests._support import assert_close

MARKS: dict[str, Any] = dict.fromkeys(("weighted", "normalised", "noisy", "picked", "within"), pytest.mark.slow)
MARKS |= dict.fromkeys(("extremes", "between"), pytest.mark.floor)


def streamed(fn: Callable[..., Any], *args: Any, at_once: int = 1, **options: Any) -> Any:
    groups = px.Groups.of_arrays
    return px.Stream(at_once=at_once, **options).run(fn, *args, groups(X), groups(Y))


@pytest.mark.parametrize("at_once", [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 12))])
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in PROGRAMS])
def test_stream_gives_value_and_gradient_of_the_mesh(name, at_once):
    fn = jax.value_and_grad(PROGRAMS[name])
    expected = jax.jit(fn)(W, X, Y)
    assert_close(streamed(fn, W, at_once=at_once), expected)
    assert np.abs(np.asarray(expected[1])).max() > 1e-3  # a gradient of zeros would agree with a forgotten one


DERIVED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "hessian": jax.hessian,
    "Hessian-vector product": lambda f: lambda w, x, y: jax.jvp(lambda w: jax.grad(f)(w, x, y), (w,), (w,)),
    "vmap": lambda f: lambda w, x, y: jax.vmap(jax.grad(f), (0, None, None))(jnp.stack([w, 2 * w]), x, y),
    "of the data": lambda f: jax.grad(f, argnums=1),
    "jit": lambda f: jax.grad(jax.jit(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("how", [pytest.param(h, marks=pytest.mark.slow) if h == "hessian" else h for h in DERIVED])
def test_stream_takes_whatever_jax_makes_of_a_program(how):
    fn = DERIVED[how](PROGRAMS["mean"])
    expected = jax.jit(fn)(W, X, Y)  # what JAX keeps of it is not for chunks
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), streamed(fn, W), expected)


def other_results(x: Any, y: Any) -> Any:
    """Other reductions, and results with a row for each element."""
    losses = losses_of(W, x, y)
    return {
        "any": px.reduce_any(losses > 2.0),
        "all": px.reduce_all(losses > 0.0),
        "integers": px.reduce_sum((losses * 10).astype("int32")),
        "half": px.reduce_sum(losses.astype("bfloat16")).astype("float32"),
        "rows": losses / px.reduce_sum(losses),
        "again": x,
        "constant": px.broadcast(2.0),
        "draws": jax.random.uniform(jax.random.key(1), (x.shape[0],)) * losses,
    }


def of_each_row(x: Any, y: Any) -> Any:
    """Operations on rows outside of maps, none of which knows other rows."""
    n, at = x.shape[0], jnp.argsort(y, 1)
    m = jnp.einsum("nij,nkj->nik", x, x) + jnp.eye(5)
    return {
        "total": px.reduce_sum(x),
        "embed": jnp.arange(5.0)[at],
        "solve": jnp.linalg.solve(m, y[:, :, None]),
        "window": jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "VALID"),
        "scan": jax.lax.scan(lambda h, t: (jnp.tanh(h + t @ W), h), jnp.zeros(n), jnp.moveaxis(x, 1, 0))[1].T,
        "key": jax.vmap(lambda key: jax.random.uniform(key, (3,)))(jax.random.split(jax.random.key(0), n)),
    }


@pytest.mark.parametrize("fn", [other_results, pytest.param(of_each_row, marks=pytest.mark.slow)])
def test_stream_gives_each_of_many_results_of_the_mesh(fn):
    fn = px.program(clients=N)(fn)
    actual = streamed(fn)
    for name, value in jax.jit(fn)(X, Y).items():
        rtol = 1e-2 if name == "half" else 1e-4
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=1e-5, err_msg=name)
        assert isinstance(actual[name], np.ndarray) == (value.shape[:1] == (N,))


def test_stream_compares_with_a_maximum_the_value_of_which_it_was_taken():
    """As if each pass rounded otherwise: a loss that is computed again is another, and would attain no maximum."""
    computed = itertools.count()

    def noisy(w: Any, x: Any, y: Any) -> Any:
        struct = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.pure_callback(lambda _: np.float32(1e-6 * next(computed)), struct, x, vmap_method="sequential")
        return one(w, x, y) + jax.lax.stop_gradient(noise)

    @px.program(clients=N)
    def largest(w: Any, x: Any, y: Any) -> Any:
        losses = px.map_fn(noisy, (px.broadcast(w), x, y))
        top, masked = px.reduce_max(losses), px.reduce_max(losses, where=jnp.arange(x.shape[0]) >= 0)
        return top, px.reduce_sum(jnp.where((losses == top) & (losses == masked), 1.0, 0.0))

    expected = jax.value_and_grad(lambda w: jax.vmap(one, (None, 0, 0))(w, X, Y).max())(W)
    (top, count), gradient = streamed(jax.value_and_grad(largest, has_aux=True), W)
    assert_close((top, gradient), expected, rtol=1e-4)
    assert float(count) == 1.0


def test_stream_does_in_a_chunk_what_all_elements_do_however_few_it_has():
    """Of few elements, a device runs convolutions one after the other, and sums what they give afterwards."""
    axis, x = px.Axis("clients", 100), np.random.default_rng(1).normal(size=(100, 2, 1, 6, 6)).astype("float32")

    def loss(kernel: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jax.lax.conv(x, kernel, (1, 1), "SAME")) ** 2)

    def mean_gradient(kernel: Any, x: Any) -> Any:
        return px.reduce_mean(px.map_fn(jax.grad(loss), (px.broadcast(kernel, axis), x), axis), axis)

    kernel = jnp.ones((2, 1, 3, 3))
    expected = jax.vmap(jax.grad(loss), (None, 0))(kernel, x).mean(0)
    assert_close(px.Stream(at_once=1).run(mean_gradient, kernel, px.Groups.of_arrays(x)), expected, rtol=1e-4)


def test_stream_cuts_arrays_used_as_rows_and_what_is_closed_over():
    gradient = jax.grad(PROGRAMS["mean"])
    expected = gradient(W, X, Y)
    assert_close(px.Stream(at_once=1).run(lambda w: gradient(w, X, Y), W), expected)
    assert_close(px.Stream(at_once=1).run(gradient, W, X, px.Groups.of_arrays(Y)), expected)


@pytest.mark.parametrize("at_once", [1, N])
def test_stream_cuts_nothing_that_is_only_as_long_as_the_elements(at_once):
    """The chunks of elements of different length are not in order, not even one of all of them."""
    rng, lengths = np.random.default_rng(1), [1 + i % 3 for i in range(N)]
    square, order = rng.normal(size=(N, N)).astype("f"), rng.integers(0, N, N)

    def of(x: Any) -> Any:
        own = jnp.argmax(x, 1)[:, None]
        return {"columns": x[:, order], "own": jnp.take_along_axis(x, own, 1), "x": x @ square}

    elements = [{"row": row, "x": np.zeros(n, "float32")} for row, n in zip(square, lengths, strict=True)]
    run = px.Stream(at_once=at_once).run
    count, found = run(lambda d: (px.reduce_sum(d.count, AXIS), of(d["row"])), px.Groups(elements, lengths=lengths))
    assert count == sum(lengths)
    assert_close(found, jax.jit(of)(square), rtol=1e-4)


@pytest.mark.parametrize(
    ("place", "count"),
    [
        (lambda devices: {"mesh": Mesh(devices[:2], ("clients",))}, 2),
        (lambda devices: {"mesh": Mesh(devices[5:], ("clients",)), "at_once": 2}, 3),  # more than the chunk has
        (lambda devices: {"mesh": Mesh(devices.reshape(4, 2), ("data", "model")), "over": "data", "at_once": 1}, 4),
    ],
)
def test_stream_lays_chunks_where_the_axis_says(place, count):
    placed = px.Axis("clients", N, **place(np.array(jax.devices())))
    fn = jax.value_and_grad(px.program(clients=placed)(lambda w, x, y: px.reduce_mean(losses_of(w, x, y))))
    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    assert_close(px.Stream(at_once=1).run(fn, W, *groups), jax.value_and_grad(PROGRAMS["mean"])(W, X, Y))
    assert px.Stream(at_once=1).passes(fn, W, *groups).chunks[0][0] == count


def test_stream_copies_nothing_between_devices_at_each_chunk():
    """Neither what the elements share, nor the numbers of which their keys are made: JAX would, on its own."""
    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    step = px.Stream(at_once=1).jit(jax.value_and_grad(PROGRAMS["noisy"]))
    expected = step(W, *groups)
    with jax.transfer_guard_device_to_device("disallow"):
        assert_close(step(W, *groups), expected)


def test_stream_jit_follows_the_mesh_and_the_width_that_are_in_force():
    mean = px.Stream(at_once=1).jit(lambda x: px.reduce_mean(px.map_fn(lambda x: (x**2).sum(), (x,), AXIS), AXIS))
    exact = np.random.default_rng(0).normal(size=(N, 3))
    groups = px.Groups(list(exact))
    assert mean(groups).dtype == np.float32
    with jax.enable_x64(True):
        assert_close(np.asarray(mean(groups)), (exact**2).sum(1).mean(), rtol=1e-15)
    for devices in (jax.devices()[:3], jax.devices()[3:6]):
        with jax.set_mesh(Mesh(np.array(devices), ("clients",))):
            found = mean(groups)
        assert_close(found, np.float32((exact**2).sum(1).mean()))
        assert found.devices() <= {*devices}
    assert mean(groups).dtype == np.float32


@pytest.mark.parametrize(
    ("name", "passes", "kept", "reads"),
    [("mean", 1, 0, 1), ("weighted", 2, 0, 2), ("normalised", 3, 0, 3), ("extremes", 3, 1, 2)],
)
def test_stream_reads_each_element_once_a_pass_and_knows_the_passes_before(name, passes, kept, reads):
    """A function that is jitted is traced once, and takes other numbers; the stream may be used in a ``with``."""
    traces, read, other = [], [], px.Groups.of_arrays(Y)

    class Rows(list):
        def __getitem__(self, number):
            read.append(number)
            return super().__getitem__(number)

    def fn(w, x, y):
        traces.append(1)
        return jax.value_and_grad(PROGRAMS[name])(w, x, y)

    groups = px.Groups(Rows(X))
    stream = px.Stream(at_once=1)
    schedule, run = stream.passes(fn, W, groups, other), stream.jit(fn)
    assert (schedule.num_passes, schedule.kept) == (passes, [()] * kept)
    assert [count for count, _ in schedule.chunks] == [8, 4]
    run(W, groups, other)
    assert np.bincount(read)[1:].tolist() == [reads] * (N - 1)  # the first one also says what all look like
    count = len(traces)
    assert_close(run(2 * W, groups, other), jax.value_and_grad(PROGRAMS[name])(2 * W, X, Y))
    assert len(traces) == count


def test_stream_runs_an_axis_s_at_once_within_a_chunk():
    turns: list[int] = []

    def count(x):
        def turn(_, k):
            jax.debug.callback(lambda k: turns.append(int(k)), k)
            return k + 1

        return jax.lax.fori_loop(0, x.astype(int), turn, 0) * x

    total = px.program(numbers=px.Axis("numbers", 16, at_once=1))(lambda x: px.reduce_sum(px.map_fn(count, x)))
    numbers = np.arange(16.0, dtype=np.float32)
    found = px.Stream(at_once=6).run(total, px.Groups.of_arrays(numbers))
    jax.effects_barrier()
    assert found == np.square(numbers).sum()
    assert len(turns) == numbers.sum()  # run together, a loop goes on for all


def test_stream_has_effects_once_though_a_later_pass_needs_the_result():
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


def own(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda y: px.reduce_sum(px.map_fn(fn, y))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a sort": (lambda y: jnp.sort(y[:, 0])[3], "meet in sort, at HERE"),
    "a permutation": (lambda y: y[np.arange(N)[::-1]].sum(), "meet in gather, at HERE"),
    "all pairs": (lambda y: (y[:, None] - y).sum(), "meet in .*, at HERE"),
    "a loop over all": (
        lambda y: jax.lax.fori_loop(0, 2, lambda _, c: c + c.mean(0), y).max(),
        "meet in scan, at HERE",
    ),
    "until all are done": (
        lambda y: jax.lax.while_loop(lambda c: jnp.any(c > 1e-9), lambda c: c / 2, y).max(),
        "meet in while, at HERE.*write it in a mapped function",
    ),
    "closed over": (lambda y: own(lambda a: (a - y).sum())(y), "meet in px_map, at HERE.*closes over all elements"),
    "exchanged": (own(lambda a: px.psum(a, "clients")), r"at HERE.*px\.reduce_sum"),
    "an index": (own(lambda a: a * px.axis_index("clients")), r"at HERE.*np\.arange\(n\)"),
    "a range in a body": (
        lambda y: own(lambda a: a.sum() * jnp.arange(y.shape[0]).sum())(y),
        "as many entries as there are elements, at HERE",
    ),
    "a loop": (
        lambda y: jax.lax.fori_loop(0, 3, lambda _, c: c + px.reduce_sum(y * c).sum(), 1.0),
        r"meet inside .*, at HERE.*for _ in range\(10\)",
    ),
    "a map of another axis": (
        lambda y: px.map_fn(lambda a: px.reduce_sum(a * y, AXIS).sum(), jnp.ones(3), px.Axis("models", 3)).sum(),
        r"meet inside px_map, at HERE.*write jax\.vmap",
    ),
    "turns": (
        lambda y: jax.lax.fori_loop(0, y.shape[0], lambda _, c: c * 1.1, px.reduce_sum(y)),
        "written out in scan, at HERE",
    ),
    "a number that is written": (
        lambda y: px.reduce_sum(y[:, 0] * jnp.arange(N)),
        r"traced for its 12 elements, but not for 5.*jnp\.arange\(x\.shape\[0\]\)",
    ),
    "other operations": (
        lambda y: px.reduce_sum(jnp.tanh(y) if y.shape[0] < 11 else y),
        "at HERE.*must not depend on the number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stream_refuses_what_chunks_cannot_do_with_the_line(name):
    fn, text = REFUSED[name]
    with pytest.raises(px.AxisError, match=text.replace("HERE", r".*test_stream\.py:\d+")):
        px.Stream(at_once=1).run(
            px.program(clients=N)(lambda y: (px.reduce_sum(y).sum(), fn(y))), px.Groups.of_arrays(Y)
        )


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: lambda w: jax.vmap(f)(w[None])])
def test_stream_refuses_to_be_traced(transform):
    with pytest.raises(px.AxisError, match=r"called inside jax\.jit, jax\.grad or the like; write px\.Stream"):
        transform(lambda w: streamed(PROGRAMS["mean"], w))(W)


def test_stream_refuses_groups_and_axes_that_do_not_fit():
    groups, run = px.Groups.of_arrays, px.Stream(at_once=1).run
    with pytest.raises(px.AxisError, match=r"of 5 elements, as groups have.*has 'clients' of 12"):
        run(lambda x: px.reduce_sum(jnp.zeros(N), AXIS) + x.sum(), groups(np.zeros(5)))
    with pytest.raises(px.AxisError, match="has none: for x"):
        run(px.program(rows=5)(lambda x: x.T @ x), groups(np.zeros((5, 2))))
    with pytest.raises(px.DataError, match="groups must have equally many elements"):
        run(lambda x, y: px.reduce_sum(x, AXIS), groups(X), groups(np.zeros(5)))
    axis = px.Axis("clients", N, mesh=jax.make_mesh((8,), ("clients",), axis_types=(AxisType.Explicit,)))
    with pytest.raises(px.AxisError, match=r"'clients' lies on a mesh with Explicit axes.*AxisType\.Auto"):
        run(lambda x: px.reduce_max(px.map_fn(jnp.sin, x, axis), axis), groups(X))


@pytest.mark.parametrize("how", [jax.jit, jax.grad, lambda fn: fn, lambda fn: lambda w, x: px.pmap(jnp.sum)(x)])
def test_stream_is_named_where_groups_are_given_to_something_else(how):
    program = px.program(clients=N)(lambda w, x: w * px.reduce_sum(x))
    with pytest.raises(px.DataError, match=r"it is no array; write .*px\.Stream\(at_once=64\)\.run\(loss, w, groups\)"):
        how(program)(1.0, px.Groups.of_arrays(Y[:, 0]))
