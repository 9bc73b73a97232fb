"""A program streamed gives what it gives with plain ``jnp`` and ``jax.vmap`` on all rows: values and derivatives.

Each program is written once, for some verbs; the oracle runs it with verbs of a few lines that know neither axes nor
devices. With eight devices and twelve elements, ``at_once=1`` makes a chunk of eight and a last one of four, shorter
than one element per device.
"""

import contextlib
import functools
import io
import itertools
import os
import re
import resource
import subprocess
import sys
import tempfile
import tracemalloc
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close
from tests.engines._programs import AXIS, PROGRAMS, N, Ours, Plain, W, X, Y, extremes, mean, one, rng

# One each of what is kept, cut inside a body, and run by the host; what others cover is of the night.
MARKS: dict[str, pytest.MarkDecorator] = dict.fromkeys(("extremes", "exchanging", "scanned"), pytest.mark.newest)
MARKS |= dict.fromkeys(("rounds", "weighted", "rounds_within"), pytest.mark.slow)


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


def every_reduction(v: Any, x: Any, y: Any) -> Any:
    losses = v.map_fn(one, (v.broadcast(W), x, y))
    return {
        "prod": v.reduce_prod(losses),
        "any": v.reduce_any(losses > 2.0),
        "all": v.reduce_all(losses > 0.0),
        "integers": v.reduce_sum((losses * 10).astype("int32")),
        "half": v.reduce_sum(losses.astype("bfloat16")).astype("float32"),
        "rows": losses / v.reduce_sum(losses),
        "given": x,
    }


def test_other_reductions_and_results_with_a_row_for_each_element():
    expected = jax.jit(lambda x, y: every_reduction(Plain, x, y))(X, Y)
    actual = streamed(lambda x, y: every_reduction(Ours(), x, y), 1)
    np.testing.assert_allclose(actual.pop("half"), expected.pop("half"), rtol=1e-2)
    assert isinstance(actual["rows"], np.ndarray)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("keep", "times"), [("recompute", 2), ("disk", 1)])
def test_results_with_a_row_for_each_element_are_held_once_beside_what_was_computed(keep, times):
    axis = px.Axis("clients", 64)

    def rows(x):
        found = px.map_fn(lambda x: jnp.sin(x * jnp.arange(20_000.0)), x, axis)
        return found, found, px.keys(jax.random.key(3), axis)

    engine, x = px.Stream(at_once=1, keep=keep), px.Groups.of_arrays(np.arange(64, dtype="float32"))
    step = engine.jit(rows)
    step(x)
    tracemalloc.start()
    first, second, keys = step(x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first is second
    assert peak < (times + 0.3) * first.nbytes
    np.testing.assert_allclose(first[7], np.sin(7 * np.arange(20_000, dtype="float32")), atol=1e-2)
    plain = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(jnp.arange(64))
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(plain))


def square_operations(x: Any) -> dict[str, Any]:
    """Operations whose other operand has as many entries as there are elements, which are none of theirs."""
    table, order, own = jnp.asarray(SQUARE), jnp.asarray(ORDER), jnp.argmax(x, 1)[:, None]
    kernel = jnp.reshape(table, (N, 4, 3))
    return {
        "columns": x[:, order],
        "a column for each": jnp.take_along_axis(x, order[:, None], 1),
        "a column of one's own": jnp.take_along_axis(x, own, 1),
        "of a table": jnp.take_along_axis(table, own, 1),
        "kernel": jax.lax.conv_general_dilated(x.reshape(N, 4, 3), kernel, (1,), "SAME"),
    }


SQUARE = rng.normal(size=(N, N)).astype("float32")
ORDER = rng.integers(0, N, N)


@pytest.mark.parametrize("at_once", [1, N])
def test_what_is_as_long_as_there_are_elements_is_not_taken_for_theirs(at_once):
    """Elements of different length are not in order, so that a chunk of all of them is not, either."""
    lengths = [1 + i % 3 for i in range(N)]
    elements = [{"row": row, "x": np.zeros(n, "float32")} for row, n in zip(SQUARE, lengths, strict=True)]
    groups = px.Groups(elements, lengths=lengths, num_shapes=1)
    count, found = px.Stream(at_once=at_once).run(
        lambda d: (px.reduce_sum(d.count, AXIS), square_operations(d["row"])), groups
    )
    assert count == sum(lengths)
    assert_close(found, jax.jit(square_operations)(SQUARE))


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


def test_a_program_in_a_map_of_another_axis_may_be_batched():
    def gradients(v, x, y):
        models = jnp.stack([W, -W, 2 * W])
        each = lambda w: v.map_models(jax.value_and_grad(lambda w: extremes(v, w, x, y)), (w,))  # noqa: E731
        return jax.vmap(each)(jnp.stack([models, models + 1]))

    expected = jax.jit(lambda x, y: gradients(Plain, x, y))(X, Y)
    assert_close(streamed(lambda x, y: gradients(Ours(), x, y), 1), expected)


def test_values_kept_for_a_maximum_may_have_their_elements_in_a_later_dimension():
    def gradients(v, x, y):
        return jax.vmap(jax.grad(lambda w: extremes(v, w, x, y)))(jnp.stack([W, -W, 2 * W]))

    expected = jax.jit(lambda x, y: gradients(Plain, x, y))(X, Y)
    assert_close(streamed(lambda x, y: gradients(Ours(), x, y), 1), expected)


def test_what_is_compared_with_a_maximum_is_the_value_of_which_it_was_taken():
    """As if each pass rounded otherwise: a loss that is computed again is another, and would attain no maximum."""
    computed = itertools.count()
    noise = functools.partial(
        jax.pure_callback, lambda _: np.float32(1e-6 * next(computed)), jax.ShapeDtypeStruct((), jnp.float32)
    )

    def noisy(w: Any, x: Any, y: Any) -> Any:
        return one(w, x, y) + jax.lax.stop_gradient(noise(x[0, 0], vmap_method="sequential"))

    def once(w: Any, x: Any, y: Any) -> Any:
        return px.reduce_max(px.map_fn(noisy, (px.broadcast(w, AXIS), x, y), AXIS), AXIS)

    def in_a_loop(w: Any, x: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, top: jnp.maximum(top, once(w, x, y)), -jnp.inf)

    def compared_with_a_loop(w: Any, x: Any, y: Any) -> Any:
        losses = px.map_fn(noisy, (px.broadcast(w, AXIS), x, y), AXIS)
        top = jax.lax.fori_loop(0, 1, lambda _, top: jnp.maximum(top, px.reduce_max(losses, AXIS)), -jnp.inf)
        return px.reduce_sum(jnp.where(losses == top, 1.0, 0.0), AXIS)

    engine, groups = px.Stream(at_once=1), [px.Groups.of_arrays(x) for x in (X, Y)]
    largest = jax.value_and_grad(lambda w: jax.vmap(one, (None, 0, 0))(w, X, Y).max())(W)
    assert_close(engine.run(jax.value_and_grad(once), W, *groups), largest, rtol=1e-4)
    assert_close(engine.run(in_a_loop, W, *groups), largest[0], rtol=1e-4)
    assert float(engine.run(compared_with_a_loop, W, *groups)) == 1.0


STEEP: dict[str, Callable[[Any, Any, Any], Any]] = {  # of NumPy's functions, a value and the largest
    "a truth value": lambda m, x, top: m.where((x - top).astype(bool), 1.0, 0.0),
    "a whole number": lambda m, x, top: ((x - top) * 1e9).clip(-9, 0).astype(np.int32),
    "a square root": lambda m, x, top: m.sqrt(top - x),
    "a logarithm": lambda m, x, top: m.log(top - x + 1e-30),
    "a reciprocal": lambda m, x, top: 1 / (top - x + 1e-6),
    "a power": lambda m, x, top: (top - x + 1e-6) ** -2,
    "an angle": lambda m, x, top: m.arccos(x / top),
    "a floor": lambda m, x, top: m.floor(1 + x - top),
}
SMOOTH: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a quotient": lambda m, x, top: x / top,
    "an exponential": lambda m, x, top: m.exp(x - top),
    "the larger one": lambda m, x, top: m.maximum(x, top - 1) ** 2,
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", [*STEEP, *SMOOTH])
def test_what_meets_a_maximum_is_kept_where_its_last_bits_matter(name: str, within: bool) -> None:
    after, axis = (STEEP | SMOOTH)[name], px.Axis("clients", 37)

    def value(w: Any, x: Any, m: Any = jnp) -> Any:
        return m.sum(m.exp(m.tanh(x @ w)) * m.sin(x @ w), -1) / 3.1

    def f(w: Any, x: Any) -> Any:
        rows = px.map_fn(value, (px.broadcast(w, axis), x), axis)
        top, at_top = px.reduce_max(rows, axis), functools.partial(after, jnp)
        return px.reduce_sum(
            px.map_fn(at_top, (rows, px.broadcast(top, axis)), axis) if within else at_top(rows, top), axis
        )

    engine = px.Stream(at_once=1)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x, w = rng.normal(size=(37, 6, 5)).astype(np.float32), rng.normal(size=5).astype(np.float32)
        groups = px.Groups.of_arrays(x)
        rows = value(w.astype(np.float64), x.astype(np.float64), np)
        expected = after(np, rows, rows.max()).sum()
        np.testing.assert_allclose(engine.run(f, w, groups), expected, rtol=1e-2)
        assert [tuple(shape) for shape in engine.passes(f, w, groups).kept] == ([()] if name in STEEP else [])


def test_a_zero_factor_is_the_same_zero_in_each_pass():
    """As if the pass that multiplies the others found none where one was counted."""
    computed = itertools.count()
    noise = functools.partial(
        jax.pure_callback, lambda _: np.float32(next(computed) >= N), jax.ShapeDtypeStruct((), jnp.float32)
    )

    def factor(w: Any, i: Any, x: Any) -> Any:
        zero = (
            w.sum() - jax.lax.stop_gradient(w.sum()) + jax.lax.stop_gradient(noise(x[0, 0], vmap_method="sequential"))
        )
        return jnp.where(i == 3, zero, x[0, 0] * w[0])

    def product(w: Any, x: Any) -> Any:
        return px.reduce_prod(px.map_fn(factor, (px.broadcast(w, AXIS), jnp.arange(N), x), AXIS), AXIS)

    found = px.Stream(at_once=1).run(jax.grad(product), W, px.Groups.of_arrays(X))
    assert_close(found, np.full(3, np.prod(np.delete(X[:, 0, 0] * float(W[0]), 3))), rtol=1e-4)


def test_a_sum_of_all_is_not_that_of_a_chunk_where_its_map_is_run_again():
    """A map gives a sum, and what its derivative needs; a later pass needs the sum of all, and runs the map again."""

    def far(w: Any, x: Any) -> Any:
        total = px.reduce_sum(px.map_fn(lambda w, x: jnp.tanh(x @ w).sum(), (px.broadcast(w, AXIS), x), AXIS), AXIS)
        return px.reduce_sum(px.map_fn(lambda x: jnp.sin(x.sum() * total), (x,), AXIS), AXIS)

    def plain(w: Any, x: Any) -> Any:
        total = jnp.tanh(x @ w).sum()
        return jnp.sin(x.sum((1, 2)) * total).sum()

    got = px.Stream(at_once=1).run(jax.value_and_grad(jax.jit(far)), W, px.Groups.of_arrays(X))
    assert_close(got, jax.value_and_grad(plain)(W, X), rtol=1e-4)


@pytest.mark.parametrize("keep", ["recompute", "memory", "disk"])
def test_values_are_kept_between_the_passes_of_a_loop_as_asked(keep):
    computed = itertools.count()

    def noted(x: Any) -> Any:
        return jax.pure_callback(
            lambda x: (next(computed), x)[1], jax.ShapeDtypeStruct((), x.dtype), x, vmap_method="sequential"
        )

    def spread(_: Any, total: Any, x: Any) -> Any:
        rows = px.map_fn(lambda x: noted(x.sum()), (x,), AXIS)
        return total + px.reduce_sum(
            px.map_fn(lambda r, m: (r - m) ** 2, (rows, px.broadcast(px.reduce_mean(rows, AXIS), AXIS)), AXIS), AXIS
        )

    found = px.Stream(at_once=1, keep=keep).run(
        lambda x: jax.lax.fori_loop(0, 2, functools.partial(spread, x=x), 0.0), px.Groups.of_arrays(X)
    )
    assert_close(found, 2 * N * X.sum((1, 2)).var(), rtol=1e-5)
    assert next(computed) == (4 * N if keep == "recompute" else 2 * N)


def test_values_that_are_kept_on_disk_are_in_a_folder_that_goes_and_a_full_disk_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files: list[int] = []

    def largest(w: Any, x: Any, y: Any) -> Any:
        return PROGRAMS["extremes"](Ours(), w, x, y)

    def look(_: Any) -> None:
        files.append(len(list(tmp_path.glob("*/*"))))

    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    engine = px.Stream(at_once=1, keep="disk", verbose=look)
    expected = jax.jit(jax.value_and_grad(lambda w: PROGRAMS["extremes"](Plain, w, X, Y)))(W)
    assert_close(engine.run(jax.value_and_grad(largest), W, *groups), expected)
    assert max(files) >= 2
    assert not list(tmp_path.iterdir())

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))  # bytes of a file, instead of a disk that is full
    try:
        with pytest.raises(px.DataError, match=r"kept between passes .*File too large.*keep='recompute'"):
            engine.run(jax.value_and_grad(largest), W, *groups)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "place",
    [
        lambda devices: {"mesh": Mesh(devices[:2], ("clients",))},
        lambda devices: {"mesh": Mesh(devices[5:], ("clients",))},
        lambda devices: {"mesh": Mesh(devices.reshape(4, 2), ("data", "model")), "over": "data"},
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
    assert engine.passes(loss, W, *groups).chunks[0] == (devices, None)


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
        assert_close(np.asarray(mean(px.Groups.of_arrays(exact))), (exact**2).sum(1).mean(), rtol=1e-15)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:3]), ("clients",))):
        assert_close(mean(groups), np.float32((exact**2).sum(1).mean()))
    assert mean(groups).dtype == np.float32


def halved(rows: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, rows))


SHARED: dict[str, Callable[[Any], Any]] = {
    "a counter": lambda rows: halved(rows)[0] + rows.sum(),
    "both": lambda rows: halved(rows)[1].sum() * halved(rows)[0],
    "a carry": lambda rows: (
        jax.lax.scan(lambda c, _: ((c[0] * 2, c[1] + 1), None), (1, rows), None, 3)[0][0] * rows.sum()
    ),
    "one a step": lambda rows: jax.lax.scan(lambda c, i: (c * 0.9, i**2), rows, jnp.arange(3))[1] + rows.sum(),
    "of a branch": lambda rows: (
        jax.lax.cond(rows.sum() > 0, lambda r: (1.0, r), lambda r: (2.0, -r), rows)[0] + rows.max()
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "both" else pytest.mark.slow) for n in SHARED])
def test_a_loop_in_which_elements_do_not_meet_may_give_what_they_share(name):
    def ours(x: Any) -> Any:
        return SHARED[name](px.map_fn(lambda x: x.sum(), (x,), AXIS))

    found = px.Stream(at_once=1).run(ours, px.Groups.of_arrays(X))
    assert_close(jnp.asarray(found), SHARED[name](jnp.asarray(X.sum((1, 2)))), rtol=1e-4)


def test_one_branch_may_give_the_elements_what_differs_and_another_what_is_the_same_for_all():
    """As in the second derivative of a branch that is linear."""
    same = jnp.arange(N, dtype="float32")

    def ours(w: Any, x: Any) -> Any:
        rows = px.map_fn(lambda w, x: jnp.tanh(x @ w).sum(), (px.broadcast(w, AXIS), x), AXIS)
        chosen = jax.lax.cond(w[0] > 0, lambda r: 2 * r, lambda r: same, rows)
        return px.reduce_sum(chosen * jnp.arange(N), AXIS)

    def plain(w: Any, x: Any) -> Any:
        return ((2 * jnp.tanh(x @ w).sum(1) if w[0] > 0 else same) * jnp.arange(N)).sum()

    for w in (W, -W):
        found = px.Stream(at_once=1).run(ours, w, px.Groups.of_arrays(X))
        np.testing.assert_allclose(found, plain(w, X), rtol=1e-5)


def test_a_mesh_whose_axes_are_part_of_types_is_refused_whatever_the_program_does():
    mesh = jax.make_mesh((8,), ("clients",), axis_types=(jax.sharding.AxisType.Explicit,))
    typed = px.Axis("clients", N, mesh=mesh)
    with pytest.raises(px.LoweringError, match=r"'clients' lies on a mesh with Explicit axes.*AxisType\.Auto"):
        px.Stream(at_once=1).run(
            lambda x: px.reduce_max(px.map_fn(lambda x: x.sum(), (x,), typed), typed), px.Groups.of_arrays(X)
        )


@pytest.mark.parametrize("length", [0, 2])
def test_a_loop_carries_random_keys_and_may_take_no_step(length):
    def program(v, x, y):
        def step(carry, _):
            keys, total = carry
            draws = v.map_fn(lambda key, x: jnp.sum(x * jax.random.normal(key, x.shape)), (keys, x))
            keys = v.map_fn(lambda key: jax.random.fold_in(key, 1), (keys,))
            return (keys, total + v.reduce_mean(draws)), (draws, x)

        (_, total), draws = jax.lax.scan(step, (v.keys(jax.random.key(3)), 0.0), None, length=length)
        return total, draws, v.reduce_sum(x)

    assert_close(streamed(lambda x, y: program(Ours(), x, y), 1), jax.jit(lambda x, y: program(Plain, x, y))(X, Y))


def test_nested_axes_and_a_program_under_its_own_names():
    @px.program(clients=N, rows=5)
    def loss(w, x, y):
        def client(w, x, y):
            squares = px.map_fn(lambda w, x, y: (jnp.tanh(x @ w) - y) ** 2, (px.broadcast(w, "rows"), x, y), "rows")
            return px.reduce_mean(squares, "rows")

        return px.reduce_mean(px.map_fn(client, (px.broadcast(w, "clients"), x, y), "clients"), "clients")

    expected = jax.jit(jax.value_and_grad(lambda w, x, y: mean(Plain, w, x, y)))(W, X, Y)
    assert_close(streamed(jax.value_and_grad(loss), 1, W), expected)


@pytest.mark.parametrize("threshold", [0.0, 9.0])
def test_a_branch_and_a_loop_are_decided_by_what_passes_give(threshold):
    def program(v, w, x, y):
        loss = mean(v, w, x, y)
        w = jax.lax.cond(loss > threshold, lambda w: v.reduce_max(x)[0] * w, lambda w: v.reduce_mean(x)[0] + w, w)

        def step(state):
            w, _, count = state
            return w * 0.7, mean(v, w, x, y), count + 1

        return jax.lax.while_loop(lambda s: (s[1] > 1.2) & (s[2] < 4), step, (w, jnp.inf, 0))

    expected = jax.jit(lambda x, y: program(Plain, W, x, y))(X, Y)
    assert_close(streamed(lambda x, y: program(Ours(), W, x, y), 1), expected)


def test_loops_under_vmap_end_each_when_its_own_condition_says():
    """Around reductions, with rows in what they carry: from the second start it is one step, from the others six."""

    def descent(v: Any, w: Any, x: Any, y: Any) -> Any:
        def step(carry: Any) -> Any:
            number, w, rows = carry
            g = v.map_fn(jax.grad(one), (v.broadcast(w), x, y))
            return number + 1, w - 0.4 * v.reduce_mean(g), 0.5 * rows + g

        def goes_on(carry: Any) -> Any:
            return (carry[0] < 6) & (mean(v, carry[1], x, y) > jnp.abs(w[0]) * 1.05)

        return jax.lax.while_loop(goes_on, step, (0, w, jnp.zeros((N, 3))))

    def from_each(v: Any) -> Any:
        return lambda starts, x, y: jax.vmap(lambda w: descent(v, w, x, y))(starts)

    starts = jnp.stack([W, 2 * W, -W])
    expected = jax.jit(from_each(Plain))(starts, X, Y)
    assert expected[0].tolist() == [6, 1, 6]
    assert_close(streamed(from_each(Ours()), 1, starts), expected)


@pytest.mark.parametrize("at_once", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_elements_that_exchange_values_end_their_loops_each_when_it_says(at_once):
    """All take part until the last one is done, and keep what they had when they were."""

    def halved(v: Any, x: Any, y: Any) -> Any:
        def of(x: Any, y: Any) -> Any:
            return jax.lax.while_loop(
                lambda carry: carry[0] < 1 + 9 * jnp.abs(y[0]),
                lambda carry: (carry[0] + 1, 0.5 * carry[1] + 0.1 * v.pmean(carry[1])),
                (0, x),
            )

        return v.map_fn(of, (x, y))

    expected = jax.jit(lambda x, y: halved(Plain, x, y))(X, Y)
    assert len(set(expected[0].tolist())) > 3
    assert_close(streamed(lambda x, y: halved(Ours(), x, y), at_once), expected)


def test_effects_happen_once_per_element_however_many_passes_there_are():
    seen: list[int] = []

    def noted(i, x):
        io_callback(lambda i: seen.append(int(i)), None, i)
        return x.sum()

    def spread(x, y):
        sums = px.map_fn(noted, (jnp.arange(N), x), AXIS)
        return px.reduce_mean((sums - px.reduce_mean(sums, AXIS)) ** 2, AXIS)

    np.testing.assert_allclose(streamed(spread, 1), X.sum((1, 2)).var(), rtol=1e-4)
    assert sorted(seen) == list(range(N))


def test_effects_on_shared_values_happen_once():
    seen: list[tuple[str, float]] = []

    def program(x, y):
        total = px.reduce_sum(y[:, 0], AXIS)
        jax.debug.callback(lambda v: seen.append(("sum", float(v))), total)

        def step(c, _):
            c = c + px.reduce_max(y[:, 0] * c, AXIS)
            io_callback(lambda v: seen.append(("step", float(v))), None, c)
            return c, None

        return jax.lax.scan(step, 1.0, None, length=2)[0]

    last = streamed(program, 1)
    jax.effects_barrier()
    assert sorted(name for name, _ in seen) == ["step", "step", "sum"]
    np.testing.assert_allclose(dict(seen)["sum"], Y[:, 0].sum(), rtol=1e-5)
    assert dict(seen)["step"] == float(last)


def test_bits_of_integers_are_put_together_bit_by_bit():
    """On one device: XLA has no such reduction of integers across several."""
    bits = np.arange(1, N + 1, dtype="int32") << 1
    one_device = px.Axis("clients", N, mesh=jax.sharding.Mesh(jax.devices()[:1], "clients"))

    def program(x):
        return jax.lax.reduce_or(x, (0,)), jax.lax.reduce_and(x | 5, (0,)), px.reduce_sum(x, one_device)

    found = px.Stream(at_once=5).run(program, px.Groups.of_arrays(bits))
    assert [int(y) for y in found] == [np.bitwise_or.reduce(bits), np.bitwise_and.reduce(bits | 5), bits.sum()]


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.grad, lambda f: lambda w: jax.vmap(f)(w[None]), lambda f: jax.jit(lambda w: f(np.asarray(W)))],
    ids=["jit", "grad", "vmap", "jit of constants"],
)
def test_an_engine_cannot_be_traced(transform):
    def run(w):
        return streamed(lambda w, x, y: mean(Ours(), w, x, y), 1, w)

    with pytest.raises(px.LoweringError, match=r"called inside jax\.jit, jax\.grad or the like; write px\.Stream"):
        transform(run)(W)


def test_arrays_used_as_rows_are_cut_and_what_is_closed_over_as_well():
    def closed(w):
        return mean(Ours(), w, X, Y)

    expected = jax.jit(jax.grad(lambda w: mean(Plain, w, X, Y)))(W)
    assert_close(px.Stream(at_once=1).run(jax.grad(closed), W), expected)
    given = px.Stream(at_once=1).run(jax.grad(lambda w, x, y: mean(Ours(), w, x, y)), W, X, px.Groups.of_arrays(Y))
    assert_close(given, expected)


@pytest.mark.parametrize(
    ("name", "passes", "kept"),
    [
        ("mean", 1, 0),
        ("weighted", 2, 0),
        ("normalised", 3, 0),
        ("rounds", 5, 0),
        ("extremes", 3, 1),
        ("scanned", 6, None),
    ],
)
def test_passes_are_known_before_and_as_many_as_reductions_depend_on_each_other(name, passes, kept):
    fn = jax.value_and_grad(lambda w, x, y: PROGRAMS[name](Ours(), w, x, y))
    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    said = px.Stream(at_once=1).passes(fn, W, *groups)
    assert said.num_passes == passes
    assert kept is None or len(said.kept) == kept
    assert [count for count, _ in said.chunks] == [8, 4]


def test_each_element_is_read_once_in_each_pass():
    class Source:
        def __init__(self):
            self.read: list[int] = []

        def __len__(self):
            return N

        def __getitem__(self, number):
            self.read.append(number)
            return X[number]

    def spread(x):
        return px.reduce_mean((x - px.reduce_mean(x, AXIS)) ** 2, AXIS)

    source = Source()
    result = px.Stream(at_once=1).run(spread, px.Groups(source))
    np.testing.assert_allclose(result, X.var(0), rtol=1e-5)
    counts = np.bincount(source.read, minlength=N)
    assert counts[1:].tolist() == [2] * (N - 1)  # the first one also says what all look like


def test_a_jitted_run_traces_once_and_takes_other_numbers():
    traces = []

    def loss(w, x, y):
        traces.append(1)
        return mean(Ours(), w, x, y)

    run = px.Stream(at_once=1).jit(jax.grad(loss))
    groups = [px.Groups.of_arrays(x) for x in (X, Y)]
    first, second = run(W, *groups), run(2 * W, *groups)
    assert len(traces) == 1
    assert_close(first, jax.grad(lambda w: mean(Plain, w, X, Y))(W))
    assert_close(second, jax.grad(lambda w: mean(Plain, w, X, Y))(2 * W))
    with pytest.raises(
        TypeError, match=r"must be given by position, got w by name; write px\.Stream.*\.jit\(fn\)\(w\)"
    ):
        run(w=W)


CALLS_IN_60_MB = """
import pathlib, re, threading, time
import jax, jax.numpy as jnp, numpy as np, paraxis as px

class Elements:
    def __len__(self):
        return 6000
    def __getitem__(self, i):
        return np.full((250, 100), i % 7, np.float32)

def megabytes():
    return int(re.findall(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[0]) / 1024

def watch():
    while True:
        seen.append(megabytes())
        time.sleep(0.005)

axis = px.Axis("clients", 6000)
one = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
loss = lambda w, x: px.reduce_mean(px.map_fn(one, (px.broadcast(w, axis), x), axis), axis)
step = px.Stream(memory="60MB").jit(jax.value_and_grad(loss))
begin, seen = megabytes(), []
threading.Thread(target=watch, daemon=True).start()
for _ in range(6):
    step(jnp.ones((100, 20)), px.Groups(Elements()))
print(max(seen) - begin)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's memory")
def test_the_process_stays_near_the_memory_that_is_allowed_call_after_call() -> None:
    """600 MB are read six times. The program itself, and the threads' heaps, take as much again and more."""
    run = subprocess.run([sys.executable, "-c", CALLS_IN_60_MB], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 250


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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's memory")
def test_the_peak_of_memory_does_not_depend_on_the_number_of_elements() -> None:
    """Of 8 chunks, as many as are ever in flight, and of 100.

    What is freed goes back to the system at once. Otherwise the heaps of XLA's threads keep a part of it, which grows
    for some dozens of chunks and is another one in each run.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    peaks = []
    for size in (8 * 512, 100 * 512):
        command = [sys.executable, "-c", PEAK_OF, str(size)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        peaks.append(float(run.stdout))
    assert peaks[1] < 1.05 * peaks[0]


def test_memory_decides_how_many_are_run_at_once():
    size = 4000
    axis = px.Axis("clients", size)

    def loss(w, x):
        return px.reduce_mean(
            px.map_fn(lambda w, x: jnp.sum(jnp.tanh(x * w) ** 2), (px.broadcast(w, axis), x), axis), axis
        )

    x = np.random.default_rng(0).normal(size=(size, 100, 3)).astype("float32")
    groups = px.Groups.of_arrays(x)
    chunks = {}
    for megabytes in (1, 2, 1000):
        stream = px.Stream(memory=f"{megabytes} MB")
        ((chunks[megabytes], _), *_) = stream.passes(jax.grad(loss), W, groups).chunks
    assert chunks[1000] == size
    assert 1.7 < chunks[2] / chunks[1] < 2.4
    assert chunks[2] * x[0].nbytes < 2e6
    assert_close(stream.run(loss, W, groups), jnp.mean(jnp.sum(jnp.tanh(x * W) ** 2, (1, 2))))
    with pytest.raises(ValueError, match=r"memory must be at least [\d,]+ bytes.*got 1,000; write px\.Stream\(memory="):
        px.Stream(memory="1kB").run(loss, W, groups)
    with pytest.raises(ValueError, match="at_once or memory must be given, and not both"):
        px.Stream()
    with pytest.raises(ValueError, match=r"text such as '2GB', got 'much'"):
        px.Stream(memory="much")


def test_progress_is_told():
    told = []
    streamed(lambda x, y: mean(Ours(), W, x, y), 1, verbose=told.append)
    assert [(p.done, p.elements, p.pass_number, p.passes) for p in told] == [(8, N, 1, 1), (12, N, 1, 1)]
    assert str(told[-1]) == "pass 1 of 1: 12 of 12 clients, 0 s left"


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("number", [0, 7, 11])
def test_elements_whose_value_is_not_finite_are_named_where_jax_looks(number, at_once):
    """By their chunk: one after the other on one device, the element itself."""
    x = np.ones(N, "float32")
    x[number] = -1
    axis = px.Axis("clients", N, mesh=Mesh(jax.devices()[:1], ("clients",)))
    loss = jax.value_and_grad(lambda w, x: px.reduce_mean(px.map_fn(lambda x: jnp.log(x * w), (x,), axis), axis))
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        px.Stream(at_once=at_once).run(loss, jnp.float32(1), px.Groups.of_arrays(x))
    first = number // at_once * at_once
    which = f"of element {number}" if at_once == 1 else f"of 2 elements, {first} to {first + 1},"
    assert f"Stream.run: a value {which} is not finite" in caught.value.__notes__


@pytest.mark.parametrize("at_once", [1, 3, 5])
@pytest.mark.parametrize("workers", [None, 2])
def test_the_time_left_does_not_count_what_compiling_takes(monkeypatch, at_once, workers):
    """By a clock on which an element takes a second, and a program that is new to a process 100 more."""
    axis, told = px.Axis("clients", 53), []
    processes = workers or 1

    def rounds(x):
        w, _ = jax.lax.scan(lambda w, _: (px.reduce_mean(jnp.sin(w * x), axis), None), jnp.float32(1), length=3)
        return px.reduce_max(jnp.cos(x * w), axis)

    stream = px.Stream(at_once=at_once, verbose=told.append)
    engine = stream if workers is None else px.Pool(at_once=at_once, workers=workers, verbose=told.append)
    groups = px.Groups.of_arrays(np.linspace(0, 1, axis.size, dtype="float32"))
    kinds = [(number == 3, count) for number in range(4) for count, _ in engine.passes(rounds, groups).chunks]
    is_new = [kinds[:at].count(kind) < processes for at, kind in enumerate(kinds)]
    times = np.cumsum([0, *(count + 100 * new for (_, count), new in zip(kinds, is_new, strict=True))])
    monkeypatch.setattr(
        sys.modules[px.Stream.run.__module__], "time", types.SimpleNamespace(monotonic=iter(times).__next__)
    )
    with contextlib.ExitStack() as stack:
        if isinstance(engine, px.Pool):
            stack.enter_context(engine)
        engine.run(rounds, groups)
    assert len(told) == len(kinds)
    for at, progress in enumerate(told, 1):
        left = 4 * axis.size - sum(count for _, count in kinds[:at])
        expected = None if all(is_new[:at]) and left else left
        assert progress.seconds_left == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("on_terminal", [True, False])
def test_progress_is_shown_on_a_line_or_in_lines(monkeypatch, on_terminal):
    """The last is shown in any case, and a terminal's line is left, also by an error."""
    shown = io.StringIO()
    shown.isatty = lambda: on_terminal  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr("sys.stderr", shown)
    total = px.Stream(at_once=1, verbose=True).jit(lambda x: px.reduce_sum(x, AXIS))
    total(px.Groups.of_arrays(X))
    lines = shown.getvalue().splitlines()
    assert lines[0 if not on_terminal else 1].startswith("pass 1 of 1: 8 of 12 clients")
    assert lines[-1].rstrip() == "pass 1 of 1: 12 of 12 clients, 0 s left"
    assert shown.getvalue().endswith("\n")
    with pytest.raises(px.DataError, match=r"element 11 .* holds text"):
        total(px.Groups([*[X[0]] * 11, "a"]))
    assert shown.getvalue().endswith("\n")
    shown.close()
    total(px.Groups.of_arrays(X))


@pytest.mark.parametrize("turns", [3, 9])
def test_files_of_a_loops_earlier_turns_are_removed(tmp_path, monkeypatch, turns):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counts = []

    def watch(_: Any) -> None:
        counts.append(sum(path.is_file() for path in tmp_path.rglob("*")))

    def of(a: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda i, a: jnp.tanh(0.5 * a + jax.lax.pmean(a, "clients")), a)

    found = px.Stream(at_once=1, keep="disk", verbose=watch).run(
        lambda x: px.map_fn(of, x, AXIS), px.Groups.of_arrays(X)
    )
    assert_close(found, jax.vmap(of, axis_name="clients")(X), rtol=1e-4)
    assert max(counts) <= 16
    assert not any(tmp_path.iterdir())


# --- what is refused ---------------------------------------------------------------------------------------------

HERE = r"test_stream\.py:\d+"


def loudly(a: Any) -> Any:
    jax.debug.print("{}", a)
    return jax.lax.fori_loop(0, 2, lambda i, a: a + px.psum(a, "clients"), a)


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda x, y: jnp.sort(y[:, 0])[3], px.LoweringError, rf"meet in sort over the rows, at .*{HERE}"),
        (lambda x, y: y[::-1] @ y[0], px.LoweringError, rf"meet in .* over the rows, at .*{HERE}"),
        (
            lambda x, y: px.reduce_sum(px.map_fn(lambda a: px.all_gather(a, "clients").sum(), y, AXIS), AXIS),
            px.CollectiveError,
            rf"exchange values by all_gather, at .*{HERE}.*px\.psum",
        ),
        (
            lambda x, y: px.reduce_sum(px.map_fn(lambda a: (a - y).sum(), y, AXIS), AXIS),
            px.LoweringError,
            rf"see all elements' values: a mapped function closes over them, at .*{HERE}",
        ),
        (
            lambda x, y: px.reduce_sum(px.map_fn(loudly, y, AXIS), AXIS).sum(),
            px.LoweringError,
            rf"a body that calls back to Python, at .*{HERE} \(loudly\).* leave the",
        ),
    ],
)
def test_elements_that_meet_elsewhere_than_in_a_reduction_are_refused_with_the_line(fn, error, text):
    with pytest.raises(error, match=text):
        streamed(lambda x, y: px.reduce_sum(x, AXIS).sum() + fn(x, y), 1)


def test_the_second_derivative_of_a_product_of_what_is_mapped():
    def product(v: Any) -> Any:
        return lambda w, x, y: v.reduce_prod(v.map_fn(one, (v.broadcast(w), x, y)))

    expected = jax.jit(jax.hessian(product(Plain)))(W, X, Y)
    assert_close(streamed(jax.hessian(product(Ours())), 1, W), expected, rtol=1e-4)


def test_groups_and_axes_that_do_not_fit():
    groups = px.Groups.of_arrays
    other = px.Axis("clients", 5)
    with pytest.raises(px.AxisError, match=r"'clients' must have one size .*got 12 and 5, at .*test_stream\.py"):
        px.Stream(at_once=1).run(
            lambda x: (px.reduce_sum(x, AXIS), px.map_fn(lambda a: 2 * a, jnp.arange(5.0), other)), groups(X)
        )
    with pytest.raises(px.AxisError, match=r"groups has 5 elements.*its axes: 'clients' of 12.*clients=5"):
        px.Stream(at_once=1).run(lambda x: px.reduce_sum(jnp.zeros(N), AXIS) + x.sum(), groups(np.zeros(5)))
    with pytest.raises(px.ShapeError, match="groups must have equally many elements, got 5 and 12"):
        px.Stream(at_once=1).run(lambda x, y: px.reduce_sum(x, AXIS), groups(X), groups(np.zeros(5)))
    with pytest.raises(ValueError, match=r"Stream: at_once must be .*got 0"):
        px.Stream(at_once=0)
    with pytest.raises(ValueError, match="Stream: keep must be"):
        px.Stream(at_once=1, keep="nothing")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Stream\.run: fn must be"):
        px.Stream(at_once=1).run(3, groups(X))  # pyright: ignore[reportArgumentType]


@px.program(clients=5)
def five(w, x):
    return px.reduce_mean(px.map_fn(lambda w, x: jnp.where(x.mask, x.x, 0).sum() * w, (px.broadcast(w), x)))


RAGGED = [{"x": np.ones(n, np.float32)} for n in (1, 3, 2)]
EQUAL = px.Groups([{"x": np.ones(2, np.float32)}] * 5)


def grad_of_a_run(w: Any) -> Any:
    return jax.grad(lambda w: px.Stream(at_once=1).run(lambda w, x: five(w, x), w, EQUAL))(w)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda run: run(five, 1.0, px.Groups(RAGGED, lengths=[1, 3, 2])),
            px.ShapeError,
            r"(?s)as 3 elements, \['x'\] float32\[3, 3\], filled up, with mask and count\. .*clients=3",
        ),
        (lambda run: run(five, 1.0, EQUAL), AttributeError, r"(?s)no lengths are given, so there is no mask or count"),
        (
            lambda run: run(five, 1.0, x=EQUAL),
            TypeError,
            r"no argument 'x'; .*by position; write Stream\.run\(fn, …, x\)",
        ),
        (
            lambda run: run(lambda x: px.reduce_sum(x["mask"], AXIS), px.Groups(RAGGED, lengths=[1, 3, 2])),
            KeyError,
            r"'mask' is not among the element's own arrays; write data\.mask",
        ),
        (lambda run: run(five, 1.0, RAGGED), px.ShapeError, r"(?s)none of args is px\.Groups; .*px\.Groups\(clients\)"),
        (lambda run: five(1.0, EQUAL), px.DataError, r"px\.Stream\(at_once=64\)\.run.*groups\.arrays\(\)"),
        (
            lambda run: px.Groups(RAGGED, length=[1, 3, 2]),  # pyright: ignore[reportCallIssue]
            TypeError,
            "no argument 'length'; write lengths=",
        ),
        (
            lambda run: grad_of_a_run(1.0),
            px.LoweringError,
            r"cannot be traced.*run\(jax\.grad\(fn\), w, groups",
        ),
    ],
)
def test_an_error_tells_what_the_function_got_and_what_to_write(call, error, text):
    with pytest.raises(error) as caught:
        call(px.Stream(at_once=1).run)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(text, told), told


@pytest.mark.parametrize(
    ("engine", "options", "text"),
    [
        (px.Pool, {"memory": "2GB"}, r"Pool: there is no argument 'memory'; write at_once="),
        (px.Pool, {"at_once": 1, "readers": 2}, r"Pool: there is no argument 'readers'; write workers="),
        (px.Pool, {"at_once": 1, "address": "auto"}, r"Pool: .*'address'; there are at_once, workers, keep, folder"),
        (px.Ray, {"memory": "2GB"}, r"Ray: there is no argument 'memory'; write at_once="),
        (px.Ray, {"at_once": 1, "workers": 2}, r"Ray: .*'workers'; there are at_once, address, ahead"),
        (px.Stream, {"at_once": 1, "workers": 2}, r"Stream: there is no argument 'workers'; write readers="),
        (px.Stream, {"atonce": 1}, r"Stream: there is no argument 'atonce'; write at_once="),
    ],
)
def test_an_option_of_another_engine_is_told_by_what_it_is_called_here(engine, options, text):
    with pytest.raises(TypeError, match=text):
        engine(**options)


TRANSFORMED: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda w, x: jax.jit(five)(w, x),
    "jit by name": lambda w, x: jax.jit(five)(w, x=x),
    "grad": lambda w, x: jax.grad(five)(w, x),
    "grad of them": lambda w, x: jax.grad(five, 1)(w, x),
    "vmap": lambda w, x: jax.vmap(five)(w, x),
    "make_jaxpr": lambda w, x: jax.make_jaxpr(five)(w, x),
    "eval_shape": lambda w, x: jax.eval_shape(five, w, x),
    "device_put": lambda w, x: jax.device_put(x),
    "explain": lambda w, x: px.explain(five)(w, x),
    "assert_communication": lambda w, x: px.testing.assert_communication(five, w, x, all_reduce=1),
    "pmap": lambda w, x: px.pmap(jnp.sum)(x),
    "broadcast": lambda w, x: px.broadcast(x, AXIS),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_groups_given_to_something_else_than_an_engine_say_what_to_write(how):
    table = px.Table.of_arrays(X[:, 0], X[:, 0, 0])
    for given, text in (
        (EQUAL, r"px\.Stream\(at_once=64\)\.run\(loss, w, groups\)"),
        (table, r"px\.solve\.rows\(table"),
    ):
        with pytest.raises(px.DataError, match=rf"it is no array; write .*{text}"):
            TRANSFORMED[how](W, given)
