"""What lies around a map and in it: exceptions, interpreters and modes of JAX, meshes and references of a body's own.

Each law is a table; a new border is a line in one. Expected values are those of plain ``jax.vmap``, or of NumPy. An
element that raises is in a process of its own; until that is mended, and a ``shard_map`` over all axes, XLA ends it.
"""

import contextlib
import itertools
import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, jet, sparse
from jax.sharding import Mesh, PartitionSpec as P

import paraxis as px
from paraxis.testing import communication
from tests._support import assert_close, axis_on, table, values
from tests.processes._support import started

Fn = Callable[..., Any]
AXIS, ALONE, X = px.Axis("i", 11), px.Axis("i", 11, at_once=1), values(11)
MAPS: dict[str, Callable[[Fn], Fn]] = {
    "map_fn": lambda f: lambda x: px.map_fn(f, x, AXIS),
    "at_once": lambda f: lambda x: px.map_fn(f, x, ALONE),
    "pmap": px.pmap,
    "program": lambda f: px.program(i=11)(lambda x: px.map_fn(f, x)),
}
SITES: dict[str, Callable[[Fn], Fn]] = {"eager": lambda f: f, "jit": jax.jit}


# --- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "calls"), table([("error_if", "")], [("callback", ""), ("sleep", "map_fn of 3"), ("sleep", "sum of 16")])
)
def test_an_element_that_raises_is_an_exception_and_one_that_takes_long_takes_long(body: str, calls: str) -> None:
    process = started(Path(__file__).with_name("_raising.py"), body, *filter(None, [calls]))
    try:
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
    found = dict(map(json.loads, out.splitlines()))
    assert process.returncode == 0, f"after {list(found)}: {error[-2000:]}"
    slept = {"map_fn of 3": [0.0, 1.0, 2.0], "sum of 16": 120.0}
    assert found == {name: slept[name] if body == "sleep" else "no twos" for name in found}


# --- other interpreters -----------------------------------------------------------------------------------------------


def positive(v: jax.Array) -> jax.Array:
    checkify.check(v > 0, "not positive: {v}", v=v)
    return v


# The body, what is looked for, and the seventh element's value that has it.
CHECKS: dict[str, tuple[Fn, Any, float]] = {
    "nan": (jnp.log, checkify.float_checks, -1.0),
    "division": (lambda v: 1 / v, checkify.div_checks, 0.0),
    "index": (lambda v: jnp.arange(3.0)[v.astype(int)], checkify.index_checks, 9.0),
    "user": (positive, checkify.user_checks, -1.0),
}


@pytest.mark.parametrize(
    ("check", "mapped", "site"),
    table([("nan", "program", "eager"), ("division", "at_once", "jit"), ("user", "pmap", "jit")],
          itertools.product(CHECKS, MAPS, SITES)),
)  # fmt: skip
def test_checkify_finds_what_is_in_maps_and_nothing_in_their_padding(check: str, mapped: str, site: str) -> None:
    body, errors, wrong = CHECKS[check]
    ours, plain, bad = MAPS[mapped](body), jax.vmap(body), X.at[7].set(wrong)
    checked = lambda run: checkify.checkify(SITES[site](run), errors=errors)  # noqa: E731
    expected = checked(plain)(bad)[0].get().splitlines()[0]
    for run, value in (ours, plain), (lambda x: px.reduce_sum(ours(x), AXIS), lambda x: plain(x).sum()):
        assert expected in str(checked(run)(bad)[0].get())
        error, found = checked(run)(X)
        assert error.get() is None
        assert_close(found, checked(value)(X)[1])


def cubed(v: jax.Array) -> jax.Array:
    total = jax.new_ref(jnp.zeros(()))

    def add(carry: int, _: Any) -> tuple[int, None]:
        total[...] += v**3
        return carry, None

    lax.scan(add, 0, None, length=3)
    return total[...]


@pytest.mark.parametrize(
    ("mapped", "site"), table([("map_fn", "jit"), ("pmap", "eager")], itertools.product(MAPS, SITES))
)
def test_references_that_live_in_a_body_work(mapped: str, site: str) -> None:
    run = MAPS[mapped](cubed)
    assert_close(SITES[site](run)(X), 3 * X**3)
    assert_close(SITES[site](jax.grad(lambda x: run(x).sum()))(X), 9 * X**2)


@pytest.mark.parametrize("mapped", MAPS)
def test_references_from_outside_are_refused_by_name(mapped: str) -> None:
    ref, total = jax.new_ref(jnp.zeros(11)), jax.new_ref(jnp.zeros(()))
    for run in (lambda: MAPS[mapped](lambda r: r[...])(ref), lambda: MAPS[mapped](lambda v: v + total[...])(X)):
        with pytest.raises(px.ParaxisError, match="new_ref"):
            run()


MATRIX, ROWS = sparse.BCOO.fromdense(values(5, 11)), values(11, 5)
SPARSE: Fn = lambda v: sparse.BCOO.fromdense(v, nse=5)  # noqa: E731
INTERPRETED: dict[str, Fn] = {
    "jet": lambda mapped: jet.jet(mapped(jnp.sin), (X,), ((jnp.ones(11), jnp.ones(11)),)),
    "sparsify": lambda mapped: sparse.sparsify(lambda m, x: m @ mapped(jnp.sin)(x))(MATRIX, X),
    "sparsify in it": lambda mapped: sparse.sparsify(lambda m, x: mapped(lambda v: m @ (v * X))(x))(MATRIX, X),
    "BCOO": lambda mapped: mapped(lambda v: (MATRIX @ (v * X)).sum())(X),
    "BCOO result": lambda mapped: mapped(SPARSE)(ROWS).todense(),
    "BCOO argument": lambda mapped: mapped(lambda m: m.todense())(jax.vmap(SPARSE)(ROWS)),
}


@pytest.mark.parametrize(
    ("name", "mapped"), table([(name, "map_fn") for name in INTERPRETED], itertools.product(INTERPRETED, MAPS))
)
def test_other_interpreters_and_sparse_matrices_are_right_or_refused(name: str, mapped: str) -> None:
    with contextlib.suppress(*[px.ParaxisError] if name != "BCOO" else []):
        assert_close(INTERPRETED[name](MAPS[mapped]), INTERPRETED[name](jax.vmap))


def logarithm(v: jax.Array) -> jax.Array:
    return jnp.log(v)


@pytest.mark.parametrize("mapped", MAPS)
def test_debug_nans_names_the_primitive_the_element_and_the_line(mapped: str) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\blog\b") as caught:
        MAPS[mapped](logarithm)(X.at[7].set(-1.0))
    assert re.search(r"\b7\b", str(caught.value))
    line = logarithm.__code__.co_firstlineno + 1
    assert re.search(rf"{line}\b.*\blogarithm\b", "".join(traceback.format_exception(caught.value)))


# --- keys, gathered values, narrow numbers ----------------------------------------------------------------------------

DRAWS: dict[str, Fn] = {
    "map": lambda k: px.reduce_mean(px.map_fn(jax.random.normal, px.keys(k))),
    "scan": lambda k: lax.scan(lambda c, k: (c + DRAWS["map"](k), None), 0.0, jax.random.split(k, 3))[0],
    "split": lambda k: px.reduce_mean(px.map_fn(lambda k: jax.random.normal(jax.random.split(k)[0]), px.keys(k))),
}


@pytest.mark.parametrize(("name", "size"), table([("scan", 257)], itertools.product(DRAWS, (257, 256, 3))))
def test_typed_keys_send_what_old_keys_send(name: str, size: int) -> None:
    draw, typed, old = px.program(rows=size)(DRAWS[name]), jax.random.key(0), jax.random.PRNGKey(0)
    assert str(communication(draw, typed)) == str(communication(draw, old)) == "1 all_reduce (4 bytes)"
    assert_close(draw(typed), draw(old))


@pytest.mark.parametrize("gather", [px.all_gather, lax.all_gather], ids=["ours", "jax's"])
def test_what_is_computed_of_gathered_values_is_not_divided(gather: Fn) -> None:
    """Each device has all of them, so that what it makes of them has the bits of one device."""
    size, w = 1024, values(1024)

    def resampled(axis: px.Axis) -> Any:
        def particle(i: jax.Array, w: jax.Array) -> Any:
            edges = jnp.cumsum(gather(w, "p"))
            return edges[i], jnp.searchsorted(edges, (i + 0.5) / size * edges[-1])

        return jax.jit(lambda w: px.map_fn(particle, (jnp.arange(size), w), axis)).lower(w).compile()

    eight, one = (resampled(axis_on(devices, size, "p")) for devices in (8, 1))
    assert f"window={{size={size}x" not in eight.as_text()  # as long as all values: quadratic
    assert_close(eight(w), one(w), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "at_once"), [*itertools.product(("bfloat16", "float16"), (None, 8, 1))])
def test_sums_of_narrow_numbers_are_wide(dtype: str, at_once: int | None) -> None:
    """To one rounding of the dtype: a narrow sum stands still after a few hundred, or a few thousand."""
    x, one, outer = values(4096).astype(dtype), jnp.ones((), dtype), px.Axis("outer", 2)
    axis, rows = axis_on(2, 4096, at_once=at_once), px.Axis("rows", 2048, at_once=at_once)

    def loss(w: jax.Array, x: jax.Array, axis: Any = axis) -> jax.Array:
        return px.reduce_sum(px.map_fn(lambda w, x: (w * x).astype("float32"), (px.broadcast(w, axis), x), axis), axis)

    def nested(w: jax.Array, x: jax.Array) -> jax.Array:
        parts = px.broadcast(w, outer), x.reshape(2, -1)
        return px.reduce_sum(px.map_fn(lambda w, x: loss(w, x, rows), parts, outer), outer)

    streamed, program = px.Stream(at_once=at_once or 256).run, px.program(rows=4096)(lambda w, x: loss(w, x, "rows"))
    found = {
        "gradient": jax.jit(jax.grad(loss))(one, x),
        "nested": jax.jit(jax.grad(nested))(one, x),
        "sum": jax.jit(lambda x: px.reduce_sum(px.map_fn(jnp.abs, x, axis), axis))(x),
        "stream": streamed(jax.grad(program), one, px.Groups.of_arrays(np.asarray(x))),
    }
    for name, total in found.items():
        assert total.dtype == dtype, name
        exact = np.asarray(x, np.float64).sum()
        assert abs(float(total) / exact - 1) <= float(jnp.finfo(dtype).eps), name


# --- what a body has of its own: a shard_map, 64-bit numbers ----------------------------------------------------------

BOTH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "data"))
FLAT = Mesh(np.array(jax.devices()), ("rows",))
# The axis of the map, or its kind; the mesh of the body's shard_map, what it is over, and which axes it names.
SHARDED: dict[str, tuple[Any, Mesh, str, set[str] | None]] = {
    "other axes, named": (px.Axis("rows", 6, mesh=BOTH), BOTH, "data", {"data"}),
    "other axes": (px.Axis("rows", 6, mesh=BOTH), BOTH, "data", None),
    "the elements' axis": (px.Axis("rows", 6, mesh=BOTH), BOTH, "rows", None),
    "the elements' devices": (px.Axis("rows", 6, mesh=FLAT), FLAT, "rows", None),
    "all devices": (px.Axis("rows", 16), FLAT, "rows", None),
    "pmap": (None, FLAT, "rows", None),
}


@pytest.mark.parametrize(
    ("name", "site"),
    table([("other axes", "jit"), ("the elements' devices", "eager"), ("pmap", "jit")],
          itertools.product(SHARDED, SITES)),
)  # fmt: skip
def test_a_shard_map_in_a_body_is_right_or_refused(name: str, site: str) -> None:
    axis, mesh, over, named = SHARDED[name]
    x, options = values(axis.size if axis else 16, 8), {"axis_names": named} if named else {}
    part = jax.shard_map(lambda x: x**2, mesh=mesh, in_specs=P(over), out_specs=P(over), **options)
    run = px.pmap(part) if axis is None else lambda x: px.map_fn(part, x, axis)
    for f, expected in (run, x**2), (jax.grad(lambda x: run(x).sum()), 2 * x):
        with contextlib.suppress(px.AxisError):
            assert_close(SITES[site](f)(x), expected)


@pytest.mark.parametrize(
    ("size", "mapped"), table([(11, "map_fn"), (11, "pmap")], itertools.product((3, 8, 11, 16), (*MAPS,)))
)
def test_bodies_may_have_results_of_64_bits(size: int, mapped: str) -> None:
    def third(v: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return v.astype("float64") / 3

    x, axis = values(size), px.Axis("i", size, at_once=1 if mapped == "at_once" else None)
    run = px.pmap(third) if mapped == "pmap" else lambda x: px.map_fn(third, x, axis)
    for found in (run(x), jax.jit(run)(x), px.program(i=axis)(run)(x)):
        assert found.dtype == "float64"
        np.testing.assert_allclose(np.asarray(found), np.asarray(x, np.float64) / 3, rtol=1e-15)


# --- JAX's strict modes -----------------------------------------------------------------------------------------------

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "disable_jit": jax.disable_jit,
    "enable_checks": lambda: jax.enable_checks(True),
    "checking_leaks": jax.checking_leaks,
    "debug_nans": lambda: jax.debug_nans(True),
}
NUMBERS, TRUTHS = (px.reduce_sum, px.reduce_mean, px.reduce_max, px.reduce_min), (px.reduce_any, px.reduce_all)
MEAN = px.program(i=11)(lambda w, x: px.reduce_mean(px.map_fn(jnp.multiply, (px.broadcast(w), x))))
# Of a weight, a number and a truth value for each element, and a key.
CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "broadcast": lambda w, x, keep, key: px.broadcast(w, AXIS),
    "map_fn": lambda w, x, keep, key: px.map_fn(jnp.multiply, (px.broadcast(w, AXIS), x), AXIS),
    "at_once": lambda w, x, keep, key: px.map_fn(jnp.multiply, (px.broadcast(w, ALONE), x), ALONE),
    "collectives": lambda w, x, keep, key: px.map_fn(lambda x: x / px.psum(x, "i") - px.pmax(x, "i"), x, AXIS),
    "reductions": lambda w, x, keep, key: [f(x, AXIS) for f in NUMBERS] + [f(keep, AXIS) for f in TRUTHS],
    "where": lambda w, x, keep, key: [f(x, AXIS, where=keep) for f in NUMBERS],
    "where, of truths": lambda w, x, keep, key: [f(keep, AXIS, where=keep) for f in TRUTHS],
    "weighted": lambda w, x, keep, key: px.reduce_weighted_mean(x, x, AXIS),
    "weighted, where": lambda w, x, keep, key: px.reduce_weighted_mean(x, x, AXIS, where=keep),
    "scatter": lambda w, x, keep, key: px.scatter(x, AXIS),
    "gather": lambda w, x, keep, key: px.gather(x, AXIS),
    "keys": lambda w, x, keep, key: px.map_fn(jax.random.uniform, px.keys(key, AXIS), AXIS),
    "pmap": lambda w, x, keep, key: px.pmap(jnp.sin)(x),
    "program": lambda w, x, keep, key: MEAN(w, x),
    "jit": lambda w, x, keep, key: jax.jit(MEAN)(w, x),
    "grad": lambda w, x, keep, key: jax.grad(MEAN)(w, x),
    "jit(grad)": lambda w, x, keep, key: jax.jit(jax.grad(MEAN, argnums=(0, 1)))(w, x),
}


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.slow] * (m == "checking_leaks")) for m in MODES])
def test_calls_are_as_ever_in_a_strict_mode(mode: str) -> None:
    """Of arguments that lie where the axis has them."""
    x, keep = px.scatter((X, np.arange(11) % 3 > 0), AXIS)
    shared = px.reduce_sum(x, AXIS).sharding
    placed = (jax.device_put(2 * X[0], shared), x, keep, jax.device_put(jax.random.key(0), shared))
    calls = {name: call for name, call in CALLS.items() if (mode, name) != ("transfer guard", "grad")}  # JAX's refuses
    expected = {name: call(*placed) for name, call in calls.items()}
    with MODES[mode]():
        found = {name: call(*placed) for name, call in calls.items()}
    assert_close(found, expected)
