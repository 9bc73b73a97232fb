"""Lanes give what each element gives alone, and no element waits for another: the turns of its loops are counted."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import assert_close, axis_on, table, values

Fn = Callable[..., Any]


def lanes(fn: Fn, args: Any, axis: px.Axis) -> Any:
    return px.map_fn(fn, args, axis, lowering="lanes")


def one_by_one(fn: Fn, *rows: jax.Array) -> Any:
    """Each element alone, by a program of its own."""
    each = [jax.jit(fn)(*row) for row in zip(*rows, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


# --- bodies --------------------------------------------------------------------------------------------------------

WEIGHTS = np.random.default_rng(1).normal(size=(4, 4)).astype("float32") / 4


def count(n: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.cos(s[1] + 0.1 * s[0])), (0, x))[1]


def in_sequence(n: Any, x: Any) -> Any:
    shrinks = jax.lax.while_loop(lambda v: v @ v > 1e-3, lambda v: jnp.tanh(WEIGHTS @ v), jnp.full(4, x))
    return {"both": count(n, x) + shrinks.sum(), "second": shrinks}


def in_one_of_three_branches(n: Any, x: Any) -> Any:
    return jax.lax.switch(n % 3, [lambda: x, lambda: count(n, x), lambda: 2 * count(n // 2, -x)])


def in_a_reversed_scan(n: Any, x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        v, is_odd, total = carry
        return (v * 0.9, ~is_odd, total + row[0]), (count(n + row[0], v + row[1]), is_odd, total)

    rows = jnp.arange(5, dtype=jnp.int8), x * jnp.arange(5.0)
    return jax.lax.scan(step, (x, False, jnp.int8(0)), rows, reverse=True)


def with_keys(n: Any, x: Any) -> Any:
    def turn(s: Any) -> Any:
        return jax.random.fold_in(s[0], 7), s[1] + jax.random.uniform(s[0])

    key, total = jax.lax.while_loop(lambda s: s[1] < n * 0.5, turn, (jax.random.key(n), x * 0))
    return jax.random.key_data(key), jax.random.split(key), total


def that_would_not_end_from_zeros(n: Any, x: Any) -> Any:
    start = jax.lax.while_loop(lambda v: v < 1.0, lambda v: v * 2, jnp.abs(x) + 0.1)
    counted = jax.lax.fori_loop(0, 3, lambda _, v: v + count(1, v), start)  # cheap, so it stays whole
    return jax.lax.while_loop(lambda s: s[0] < n % 4, lambda s: (s[0] + 1, count(n, s[1])), (0, counted))[1]


def with_a_rule_of_its_own(n: Any, x: Any) -> Any:
    @jax.custom_jvp
    def ruled(x: Any) -> Any:
        return count(jnp.int32(jnp.abs(x) * 10), x)

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), 2 * tangents[0]))
    return jax.jvp(lambda x: ruled(x) + jax.checkpoint(count)(n, x), (x,), (jnp.ones(()),))


def of_narrow_numbers(n: Any, x: Any) -> Any:
    halves = jax.lax.while_loop(lambda v: jnp.abs(v) > 0.01, lambda v: v / 2, x.astype(jnp.bfloat16))
    return halves, jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] ^ 3), (0, n.astype(jnp.uint8)))[1]


def without_a_loop(n: Any, x: Any) -> Any:
    return n + 1, jnp.full(3, 2.0), x * 2


BODIES: list[Fn] = [
    in_sequence, in_one_of_three_branches, in_a_reversed_scan, with_keys, that_would_not_end_from_zeros,
    with_a_rule_of_its_own, of_narrow_numbers, without_a_loop,
]  # fmt: skip


def inputs(size: int) -> tuple[jax.Array, jax.Array]:
    """How often each element turns, now and then never, and a number."""
    rng = np.random.default_rng(size)
    return jnp.asarray(rng.geometric(0.15, size) - 1, "int32"), jnp.asarray(rng.normal(size=size), "float32")


PLACES = [(1, 7, None), (1, 7, 3), (3, 7, 2), (8, 5, None), (2, 40, 4)]  # devices, elements, lanes
EVERY_DAY = [*((body, (3, 7, 2)) for body in BODIES), (in_a_reversed_scan, (1, 7, None))]


@pytest.mark.parametrize(("body", "place"), table(EVERY_DAY, [(body, place) for body in BODIES for place in PLACES]))
def test_lanes_give_what_each_element_gives_alone(body: Fn, place: tuple[int, int, int | None]) -> None:
    devices, size, at_once = place
    assert_close(lanes(body, inputs(size), axis_on(devices, size, at_once=at_once)), one_by_one(body, *inputs(size)))


# --- random nests of loops -----------------------------------------------------------------------------------------
#
# A nest is ("add", k), ("seq", nests), ("while", k, nest), ("scan", length, nest) or ("cond", nest, nest), of a state
# of two integers, so that its answer is exact. Python and NumPy carry it out for the oracle.

LEAF = st.tuples(st.just("add"), st.integers(1, 9))


def _deeper(nest: Any) -> Any:
    return st.one_of(
        st.tuples(st.just("seq"), st.lists(nest, min_size=2, max_size=3)),
        st.tuples(st.just("while"), st.integers(2, 5), nest),
        st.tuples(st.just("scan"), st.integers(0, 3), nest),
        st.tuples(st.just("cond"), nest, nest),
    )


NESTS: Any = _deeper(st.one_of(LEAF, _deeper(st.one_of(LEAF, _deeper(LEAF)))))


def traced(nest: Any, a: Any, b: Any) -> Any:
    kind, *parts = nest
    if kind == "add":
        return (a * 5 + b + parts[0]) % 97, (b * 3 + a) % 89
    if kind == "seq":
        return functools.reduce(lambda state, inner: traced(inner, *state), parts[0], (a, b))
    if kind == "cond":
        return jax.lax.cond(a % 2 == 0, *(functools.partial(traced, inner) for inner in parts), a, b)
    if kind == "scan":
        step = lambda state, row: (lambda new: (new, new[0]))(traced(parts[1], state[0] + row, state[1]))  # noqa: E731
        (a, b), rows = jax.lax.scan(step, (a, b), jnp.arange(parts[0], dtype=jnp.int32))
        return (a + rows.sum(dtype=jnp.int32)) % 97, b
    turn = lambda s: (s[0] - 1, *traced(parts[1], *s[1:]))  # noqa: E731
    return jax.lax.while_loop(lambda s: s[0] > 0, turn, ((a + b) % parts[0], a, b))[1:]


def computed(nest: Any, a: int, b: int) -> tuple[int, int]:
    kind, *parts = nest
    if kind == "add":
        return (a * 5 + b + parts[0]) % 97, (b * 3 + a) % 89
    if kind == "seq":
        return functools.reduce(lambda state, inner: computed(inner, *state), parts[0], (a, b))
    if kind == "cond":
        return computed(parts[a % 2], a, b)
    total = 0
    for row in range(parts[0] if kind == "scan" else (a + b) % parts[0]):
        a, b = computed(parts[1], a + row if kind == "scan" else a, b)
        total += a
    return ((a + total) % 97, b) if kind == "scan" else (a, b)


def _check(nest: Any, at_once: int | None) -> None:
    pairs = np.random.default_rng(0).integers(0, 80, (6, 2)).astype("int32")
    found = lanes(functools.partial(traced, nest), tuple(jnp.asarray(pairs.T)), axis_on(1, 6, at_once=at_once))
    np.testing.assert_array_equal(np.transpose(found), [computed(nest, *map(int, pair)) for pair in pairs])


@pytest.mark.parametrize("num_nests", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_nests_of_loops_give_what_python_gives(num_nests: int) -> None:
    options: Any = {"derandomize": True, "phases": [Phase.generate], "suppress_health_check": [*HealthCheck]}
    run = settings(max_examples=num_nests, deadline=None, database=None, **options)
    run(given(NESTS, st.sampled_from([None, 1, 2, 4]))(_check))()


# --- turns ---------------------------------------------------------------------------------------------------------

TURNS = collections.Counter[str]()


@pytest.fixture(autouse=True)
def _no_turns() -> None:
    TURNS.clear()


def noted(name: str, x: jax.Array) -> jax.Array:
    """``x``, noting that a loop has turned, for however many elements together."""

    def note(x: np.ndarray) -> np.ndarray:
        TURNS[name] += 1
        return x

    return jax.pure_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def nest(lengths: jax.Array) -> jax.Array:
    """Of each length in turn, an inner loop so long."""

    def outer(total: jax.Array, length: jax.Array) -> tuple[jax.Array, None]:
        inner = lambda s: (s[0] + 1, noted("inner", s[1] + 1.0))  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < length, inner, (0, total))[1], None

    return jax.lax.scan(outer, jnp.zeros(()), lengths)[0]


LENGTHS = np.random.default_rng(3).geometric(0.2, (12, 5)).astype("int32")


@pytest.mark.parametrize("num_lanes", [None, 4, 1])
def test_no_element_waits_for_another(num_lanes: int | None) -> None:
    """By vmap, it is the sum of what the slowest takes of each inner loop."""
    per_element = LENGTHS.sum(1)
    found = jax.block_until_ready(lanes(nest, jnp.asarray(LENGTHS), axis_on(1, 12, at_once=num_lanes)))
    np.testing.assert_array_equal(found, per_element)
    if num_lanes is None:
        assert TURNS["inner"] == per_element.max() < LENGTHS.max(0).sum()
    else:  # while there are elements to take, an eighth of the lanes may wait
        busy = num_lanes - num_lanes // 8
        assert per_element.sum() / num_lanes <= TURNS["inner"] <= per_element.sum() / busy + per_element.max()


def test_loops_that_count_to_a_shared_bound_stay_whole() -> None:
    """Some elements start at the second stage: cut there, they would be out of step, and each step would come twice."""

    def fn(n: jax.Array, x: jax.Array) -> jax.Array:
        def step(s: Any) -> Any:
            stage = lambda c: (c[0] + 1, functools.reduce(lambda v, _: jnp.sin(v), range(20), c[1]))  # noqa: E731
            _, x = jax.lax.while_loop(lambda c: c[0] < 7, stage, ((s[0] + n) % 2, s[1]))
            return s[0] + 1, noted("step", x)

        return jax.lax.while_loop(lambda s: s[0] < n, step, (0, x))[1]

    n, x = inputs(12)
    found = jax.block_until_ready(lanes(fn, (n, x), axis_on(1, 12)))
    assert TURNS["step"] == n.max()
    assert_close(found, one_by_one(fn, n, x))


# --- transformations, other maps, refusals ---------------------------------------------------------------------------


def smooth(w: Any, x: Any) -> Any:
    """Has derivatives of both kinds: its loops' ends are held fixed, and a scan holds them."""
    n = jnp.int32(3 + jnp.abs(jax.lax.stop_gradient(x)) * 3)
    step = lambda c, t: (jnp.sin(c * w) + t * jax.lax.stop_gradient(count(n, c)), c)  # noqa: E731
    return jax.lax.scan(step, x, jnp.arange(3.0))


def loss(axis: px.Axis, w: Any, x: Any, **how: Any) -> Any:
    last, rows = px.map_fn(smooth, (px.broadcast(w, axis), x), axis, **how)
    return px.reduce_sum(last, axis) + jnp.sum(rows**2)


TRANSFORMED: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "hessian": lambda f: jax.hessian(f),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "vmap": lambda f: jax.vmap(f, (None, 1)),
}


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("name", [*TRANSFORMED])
def test_derivatives_and_batches_are_those_of_vmap(name: str, at_once: int | None) -> None:
    axis = axis_on(2, 5, at_once=at_once)
    w, x = jnp.float32(0.7), values(5, 3) if name == "vmap" else values(5)
    expected = lambda w, x: jax.vmap(smooth, (None, 0))(w, x)  # noqa: E731
    plain = TRANSFORMED[name](lambda w, x: (lambda y: y[0].sum() + jnp.sum(y[1] ** 2))(expected(w, x)))(w, x)
    assert_close(jax.jit(TRANSFORMED[name](functools.partial(loss, axis, lowering="lanes")))(w, x), plain)


def test_lanes_are_there_wherever_maps_are() -> None:
    n, x = inputs(7)
    expected = one_by_one(count, n, x)
    outer, axis = px.Axis("outer", 2), axis_on(2, 7, at_once=2)
    numbered = lambda n, x: (px.axis_index("rows"), count(n, x))  # noqa: E731
    for dealt in (axis_on(3, 7, layout="cyclic"), axis_on(2, 7, layout="cyclic", at_once=2)):
        assert_close(lanes(numbered, (n, x), dealt), (jnp.arange(7), expected))
        assert_close(px.map_fn(numbered, (n, x), dealt), (jnp.arange(7), expected))
        summed = jax.jit(lambda n, x, axis=dealt: px.reduce_sum(lanes(count, (n, x), axis), axis, where=n > 2))
        assert_close(summed(n, x), expected.sum(where=n > 2))
    assert_close(px.pmap(count, lowering="lanes", at_once=2)(n, x), expected)
    assert_close(lanes(numbered, (n, x), axis), (jnp.arange(7), expected))
    within = lambda n, x: lanes(count, (n, x), axis_on(1, 7, at_once=2))  # noqa: E731
    twice = (jnp.stack([n, n + 1]), jnp.stack([x, x]))
    assert_close(px.map_fn(within, twice, outer), jnp.stack([expected, one_by_one(count, n + 1, x)]))
    program = px.program(rows=axis)(lambda n, x: px.reduce_sum(lanes(count, (n, x), axis), axis))
    assert_close(program(n, x), expected.sum())
    alike = jnp.full(7, 3)  # lanes are done together, and there is not an element for each
    assert_close(program(alike, x), one_by_one(count, alike, x).sum())
    with jax.enable_x64(True):
        wide = x.astype("float64")
        assert_close(lanes(count, (n, wide), axis), one_by_one(count, n, wide), rtol=1e-14)


def test_lanes_are_strict_and_checked() -> None:
    """The first element that fails a check is named, whatever the lanes do in between."""

    def turn(s: Any) -> Any:
        checkify.check(s[0] < 6, "too often")
        return s[0] + 1, jnp.sin(s[1])

    rows, axis = (jnp.array([3, 0, 7, 9, 5], "int32"), values(5)), axis_on(1, 5, at_once=2)
    fn = lambda n, x: jax.lax.while_loop(lambda s: s[0] < n, turn, (jnp.int32(0), x))[1]  # noqa: E731
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        error, _ = checkify.checkify(functools.partial(lanes, fn, axis=axis))(rows)
    assert str(error.get()).startswith("at mapped index 2: too often")


@pytest.mark.filterwarnings("ignore:jax .* gathers:UserWarning")
def test_elements_that_lie_over_devices_are_in_step() -> None:
    mesh = jax.make_mesh((2, 2), ("rows", "model"), axis_types=(AxisType.Explicit,) * 2)
    n, x = inputs(4)
    halves = jnp.stack([x, x], 1)
    with jax.set_mesh(mesh):
        laid = jax.device_put((n, halves), (NamedSharding(mesh, P("rows")), NamedSharding(mesh, P("rows", "model"))))
        found = jax.jit(functools.partial(lanes, count, axis=px.Axis("rows", 4)))(laid)
    assert_close(np.asarray(found), np.asarray(one_by_one(count, n, halves)))


REFUSED: dict[str, tuple[str, Fn]] = {
    "elements that exchange values": ("do not run together", lambda x: px.psum(x, "rows")),
    "effects": ("DebugEffect", lambda x: jax.debug.print("{}", x) or x),
    "exchange over an axis around": ("out of step", lambda x: jax.lax.psum(x, "outer")),
}


@pytest.mark.parametrize(("match", "fn"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_out_of_step_is_refused(match: str, fn: Fn) -> None:
    axis, outer = px.Axis("rows", 4), px.Axis("outer", 2)
    with pytest.raises(px.AxisError, match=f"lowering='lanes'.*{match}"):
        px.map_fn(lambda x: lanes(fn, x, axis), values(2, 4), outer)
