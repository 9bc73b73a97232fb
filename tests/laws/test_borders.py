"""What lies around a map and in it: exceptions, keys, gathered values, narrow numbers, meshes, modes of JAX.

Each law is a table; a new border is a line in one. Expected values are those of plain ``jax.vmap``, or of NumPy. An
element that raises is in a process of its own, which XLA would end if it were wrong.
"""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import paraxis as px
from paraxis.testing import communication
from tests._support import REDUCTIONS, STRICT_MODES, assert_close, axis_on, table, values
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


# --- keys, gathered values, narrow numbers ----------------------------------------------------------------------------

DRAWS: dict[str, Fn] = {
    "map": lambda k: px.reduce_mean(px.map_fn(jax.random.normal, px.keys(k))),
    "scan": lambda k: lax.scan(lambda c, k: (c + DRAWS["map"](k), None), 0.0, jax.random.split(k, 3))[0],
}


@pytest.mark.parametrize(("name", "size"), table([("scan", 257)], itertools.product(DRAWS, (257, 256, 3))))
def test_typed_keys_send_what_old_keys_send(name: str, size: int) -> None:
    draw, typed, old = px.program(rows=size)(DRAWS[name]), jax.random.key(0), jax.random.PRNGKey(0)
    sent = {"map": "1 all_reduce (4 bytes)", "scan": "1 all_reduce (3 times, 12 bytes)"}
    assert str(communication(draw, typed)) == str(communication(draw, old)) == sent[name]
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


@pytest.mark.parametrize(
    ("dtype", "at_once"),
    table([("float16", None), ("bfloat16", 1)], itertools.product(("bfloat16", "float16"), (None, 8, 1))),
)
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
        "of an array": px.reduce_sum(x, axis),
        "mean": px.reduce_mean(x, axis) * 4096,
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
    "other axes, in force": (px.Axis("rows", 5, mesh=BOTH), BOTH, "data", {"data"}),
    "other axes, named": (px.Axis("rows", 6, mesh=BOTH), BOTH, "data", {"data"}),
    "other axes": (px.Axis("rows", 6, mesh=BOTH), BOTH, "data", None),
    "the elements' axis": (px.Axis("rows", 6, mesh=BOTH), BOTH, "rows", None),
    "the elements' devices": (px.Axis("rows", 6, mesh=FLAT), FLAT, "rows", None),
    "all devices": (px.Axis("rows", 16), FLAT, "rows", None),
    "pmap": (None, FLAT, "rows", None),
}


@pytest.mark.parametrize(
    ("name", "site"),
    table([("other axes, in force", "jit"), ("other axes", "jit"), ("the elements' devices", "eager"), ("pmap", "jit")],
          itertools.product(SHARDED, SITES)),
)  # fmt: skip
def test_a_shard_map_in_a_body_is_right_or_refused(name: str, site: str) -> None:
    axis, mesh, over, named = SHARDED[name]
    x, options = values(axis.size if axis else 16, 8), dict[str, Any](axis_names=named) if named else {}
    in_force = name.endswith("in force")
    options |= {} if in_force else {"mesh": mesh}
    part = jax.shard_map(lambda x: lax.psum((x**2).sum(), over), in_specs=P(over), out_specs=P(), **options)
    run = px.pmap(part) if axis is None else lambda x: px.map_fn(part, x, axis)
    for f, expected in (run, (x**2).sum(1)), (jax.grad(lambda x: run(x).sum()), 2 * x):
        with jax.set_mesh(mesh) if in_force else contextlib.suppress(px.AxisError):
            assert_close(jax.device_get(SITES[site](f)(x)), jax.device_get(expected))


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

DAILY = ("dtype promotion", "transfer guard", "enable_checks")
NUMBERS = [reduce for name, reduce in REDUCTIONS.items() if name not in ("any", "all")]
MOVED = px.program(i=11)(lambda x: px.reduce_mean(px.map_fn(lambda x: jnp.sin(x - px.pmean(x, "i")), x)))
MEAN = px.program(i=11)(lambda w, x: px.reduce_mean(px.map_fn(jnp.multiply, (px.broadcast(w), x))))
# Of a weight, a number and a truth value for each element, and a key.
CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "map_fn": lambda w, x, keep, key: px.map_fn(jnp.multiply, (px.broadcast(w, AXIS), x), AXIS),
    "at_once": lambda w, x, keep, key: px.map_fn(jnp.multiply, (px.broadcast(w, ALONE), x), ALONE),
    "collectives": lambda w, x, keep, key: px.map_fn(lambda x: x / px.psum(x, "i") - px.pmax(x, "i"), x, AXIS),
    "reductions": lambda w, x, keep, key: [f(x, AXIS) for f in [*NUMBERS, px.reduce_any, px.reduce_all]],
    "where": lambda w, x, keep, key: [f(x, AXIS, where=keep) for f in NUMBERS],
    "scatter, gather": lambda w, x, keep, key: px.gather(px.scatter(x, AXIS), AXIS),
    "keys": lambda w, x, keep, key: px.map_fn(jax.random.uniform, px.keys(key, AXIS), AXIS),
    "pmap": lambda w, x, keep, key: px.pmap(jnp.sin)(x),
    "index": lambda w, x, keep, key: px.pmap(jax.checkpoint(lambda x: x + lax.axis_index("i").astype("f")), "i")(x),
    "program": lambda w, x, keep, key: MEAN(w, x),
    "grad": lambda w, x, keep, key: jax.grad(MEAN)(w, x),
    "jit(grad)": lambda w, x, keep, key: (jax.jit(jax.grad(MEAN, argnums=(0, 1)))(w, x), jax.jit(jax.grad(MOVED))(x)),
}


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.slow] * (m not in DAILY)) for m in STRICT_MODES])
def test_calls_are_as_ever_in_a_strict_mode(mode: str) -> None:
    """Of arguments that lie where the axis has them."""
    x, keep = px.scatter((X, np.arange(11) % 3 > 0), AXIS)
    shared = px.reduce_sum(x, AXIS).sharding
    placed = (jax.device_put(2 * X[0], shared), x, keep, jax.device_put(jax.random.key(0), shared))
    calls = {name: call for name, call in CALLS.items() if (mode, name) != ("transfer guard", "grad")}  # JAX's refuses
    expected = {name: call(*placed) for name, call in calls.items()}
    with STRICT_MODES[mode]():
        found = {name: call(*placed) for name, call in calls.items()}
    assert_close(found, expected)


# --- one element's values, and its number -----------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 3, 8, 13])
@pytest.mark.parametrize("index", [0, -1])
def test_pick_gives_one_elements_values_to_all(size: int, index: int) -> None:
    axis, mapped = axis_on(8, size, "i"), lambda x: px.map_fn(lambda x: px.pick(x, index, "i"), x, axis)
    x = {"float": values(size, 2), "int8": jnp.arange(size, dtype=jnp.int8), "half": values(size).astype(jnp.bfloat16)}
    x |= {"bool": jnp.arange(size) % 2 == 0, "key": jax.random.split(jax.random.key(0), size)}
    at = lambda i: jax.jit(lambda x: jax.tree.map(lambda leaf: leaf[i], x))  # noqa: E731
    expected = at(index)(x)
    assert_close(px.pick(x, index, axis), expected)
    assert_close(jax.jit(lambda x, i: px.pick(x, i, axis))(x, index), expected)
    assert_close(at(size // 2)(mapped(x)), expected)
    slope = jax.grad(lambda x: px.pick(x, index, axis).sum())(x["float"])
    assert_close(slope, jnp.zeros((size, 2)).at[index].set(1.0))
    with pytest.raises(px.DataError, match=f"has elements 0 to {size - 1}, and none {size}"):
        px.pick(x, size, axis)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [5, 16])
def test_elements_that_run_apart_know_their_numbers(size: int) -> None:
    axis, outer = px.Axis("i", size), px.Axis("o", 3)
    numbered = lambda v: jax.lax.fori_loop(0, 2, lambda _, c: c + px.axis_index("i"), v)  # noqa: E731
    expected = values(size) + 2 * np.arange(size)
    for run in (
        lambda x: px.map_fn(numbered, x, axis, at_once=1),
        lambda x: px.map_fn(numbered, x, axis, lowering="unroll"),
        px.pmap(numbered, "i", at_once=1),
        lambda x: px.map_fn(lambda _: px.map_fn(numbered, x, axis, at_once=2), jnp.arange(3), outer)[1],
        lambda x: px.map_fn(lambda v: px.map_fn(lambda w: w + v, jnp.zeros(3), outer)[0] + 2 * px.axis_index("i"), x,
                            axis, at_once=1),
    ):  # fmt: skip
        assert_close(run(values(size)), expected)
        assert_close(jax.jit(jax.grad(lambda x, run=run: run(x).sum()))(values(size)), jnp.ones(size))
