"""Law 1: placement never changes the answer.

One program uses every verb. It and its oracle, plain ``jax.vmap`` and ``jax.numpy`` reductions, are put through the
same transformation, on several placements. The eager values of each verb are also held against NumPy.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import paraxis as px
from tests._support import ALL_PLACEMENTS, PLACEMENTS, REDUCTIONS, assert_close, at_night, axis_on, in_double, values

Program = Callable[[jax.Array, jax.Array], Any]


def body(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    return {"wave": jnp.sin(w * x).sum(), "power": w * x + 1.0}


def program(axis: px.Axis, lowering: Any = "auto") -> Program:
    """``w (2,)``, ``x (size, 2)``: every verb, on mapped values, on the input itself and on a broadcast value."""

    def run(w: jax.Array, x: jax.Array) -> dict[str, Any]:
        copies = px.broadcast(w, axis)
        y = px.map_fn(body, (copies, x), axis, lowering=lowering)
        again = px.map_fn(lambda y, w: y["wave"] * w, (y, copies), axis, lowering=lowering)
        keep = jnp.arange(axis.size) % 3 != 1
        return {
            "sum": px.reduce_sum(y, axis),
            "mean": px.reduce_mean(y, axis),
            "again": px.reduce_mean(again, axis),
            "input": px.reduce_sum(x, axis),
            "copies": px.reduce_sum(copies * x, axis),
            "kept": px.reduce_mean(y, axis, where=keep),
            "kept_sum": px.reduce_sum(x, axis, where=keep),
            "weighted": px.reduce_weighted_mean(y, x[:, 0], axis),
            "weights": px.reduce_weighted_mean(y, {"wave": x[:, 0], "power": x[:, 1]}, axis, where=keep),
            "max": px.reduce_max(y["wave"], axis),
            "min": px.reduce_min(x, axis, where=keep),
            "rows": y["power"],
            "gathered": jnp.asarray(px.gather(y["power"], axis)) if not isinstance(x, Tracer) else y["power"],
            "scattered": px.scatter(x, axis) * 2,
        }

    return run


def oracle(size: int) -> Program:
    def run(w: jax.Array, x: jax.Array) -> dict[str, Any]:
        y = jax.vmap(body, in_axes=(None, 0))(w, x)
        keep = jnp.arange(size) % 3 != 1
        column, both = keep[:, None], {"wave": x[:, 0], "power": x[:, 1]}

        def weighted(leaf: jax.Array, weight: jax.Array) -> jax.Array:
            return (leaf * weight.reshape(-1, *(1,) * (leaf.ndim - 1))).sum(0) / weight.sum()

        return {
            "sum": jax.tree.map(lambda leaf: leaf.sum(0), y),
            "mean": jax.tree.map(lambda leaf: leaf.mean(0), y),
            "again": (y["wave"][:, None] * w).mean(0),
            "input": x.sum(0),
            "copies": (w * x).sum(0),
            "kept": {"wave": y["wave"].mean(where=keep), "power": y["power"].mean(0, where=column)},
            "kept_sum": x.sum(0, where=column),
            "weighted": jax.tree.map(lambda leaf: weighted(leaf, x[:, 0]), y),
            "weights": jax.tree.map(lambda leaf, weight: weighted(leaf, weight * keep), y, both),
            "max": y["wave"].max(0),
            "min": x.min(0, where=column, initial=jnp.inf),
            "rows": y["power"],
            "gathered": y["power"],
            "scattered": x * 2,
        }

    return run


def total(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A scalar in which every result counts, each by another factor."""

    def run(*args: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(f(*args))
        return sum((jnp.sum(leaf) * (1.0 + i / 7) for i, leaf in enumerate(leaves)), jnp.zeros(()))

    return run


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """The results, their total, and its gradient by every argument."""

    def scalar(*args: jax.Array) -> tuple[jax.Array, Any]:
        results = f(*args)
        return total(lambda: results)(), results

    return lambda *args: jax.value_and_grad(scalar, argnums=tuple(range(len(args))), has_aux=True)(*args)


def _in_scan(f: Program) -> Program:
    def step(c: jax.Array, w: jax.Array, *, x: jax.Array) -> tuple[jax.Array, Any]:
        results = f(w + c, x)
        return jnp.tanh(total(lambda *_: results)(w, x) / 100), results["mean"]

    return lambda w, x: jax.lax.scan(functools.partial(step, x=x), jnp.zeros(()), jnp.stack([w, w + 1, w + 2]))


def _in_while(f: Program) -> Program:
    def run(w: jax.Array, x: jax.Array) -> Any:
        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, c = state
            return i + 1, jnp.tanh(total(f)(w + c, x) / 100)

        return jax.lax.while_loop(lambda state: state[0] < 3, step, (jnp.int32(0), jnp.zeros(())))

    return run


def _in_cond(f: Program) -> Program:
    def run(w: jax.Array, x: jax.Array) -> Any:
        def pick(flag: jax.Array) -> Any:
            return jax.lax.cond(flag, lambda: f(w, x)["sum"], lambda: jax.tree.map(jnp.zeros_like, f(w, x)["sum"]))

        return pick(w[0] > 0), pick(w[0] < 0)

    return run


TRANSFORMATIONS: dict[str, Callable[[Program], Program]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "jit(grad)": lambda f: jax.jit(jax.grad(total(f), argnums=(0, 1))),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (jnp.cos(w), jnp.cos(x))),
    "jacfwd": lambda f: jax.jit(jax.jacfwd(lambda w, x: f(w, x)["sum"])),
    "hessian": lambda f: jax.jit(jax.hessian(lambda w, x: jnp.sum(f(w, x)["weighted"]["power"] * f(w, x)["max"]))),
    "vmap": lambda f: lambda w, x: jax.vmap(f)(jnp.stack([w, w + 1]), jnp.stack([x, x + 1])),
    "vmap over w": lambda f: lambda w, x: jax.vmap(f, in_axes=(0, None))(jnp.stack([w, w + 1]), x),
    "jit(vmap(grad))": lambda f: jax.jit(
        lambda w, x: jax.vmap(jax.grad(total(f), argnums=(0, 1)), in_axes=(None, 2))(w, jnp.stack([x, x + 1], axis=2))
    ),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(total(f)), argnums=(0, 1))),
    "scan": _in_scan,
    "grad(scan)": lambda f: jax.jit(jax.grad(lambda w, x: _in_scan(f)(w, x)[0])),
    "jit(while_loop)": lambda f: jax.jit(_in_while(f)),
    "jit(cond)": lambda f: jax.jit(_in_cond(f)),
}
# Eager programs compile verb by verb, twenty times as many programs as under jit: of every day is one of them alone.
CASES_OF_EVERY_DAY = [
    ("eager", (8, 10)),
    *(("jit(grad)", placement) for placement in PLACEMENTS[1:3]),
    *((name, (8, 10)) for name in ("jit(vmap(grad))", "grad(scan)", "jit(cond)")),
]
CASES_OF_THE_NIGHT = at_night(
    (c for c in itertools.product(TRANSFORMATIONS, ALL_PLACEMENTS) if c not in CASES_OF_EVERY_DAY), 80
)


@pytest.mark.parametrize("case", [*CASES_OF_EVERY_DAY, *CASES_OF_THE_NIGHT], ids=str)
def test_every_verb_under_every_transformation_is_that_of_one_device(case: tuple[str, tuple[int, int]]) -> None:
    transformation, (devices, size) = case
    change = TRANSFORMATIONS[transformation]
    w, x = values(2), values(size, 2, seed=1)
    expected = in_double(change(oracle(size)), w, x)
    assert_close(change(program(axis_on(devices, size)))(w, x), expected, rtol=1e-4, atol=1e-4)


WAYS: Any = [((2, 7), 2, "blocks"), ((3, 7), None, "cyclic"), ((2, 7), 2, "cyclic")]


@pytest.mark.parametrize(
    "case",
    [*WAYS, *at_night(itertools.product(ALL_PLACEMENTS, (None, 1, 2, 3), ("blocks", "cyclic")), 24, seed=1)],
    ids=str,
)
def test_at_once_and_layout_never_change_the_answer(case: tuple[tuple[int, int], int | None, Any]) -> None:
    (devices, size), at_once, layout = case
    w, x = values(2), values(size, 2, seed=1)
    here = program(axis_on(devices, size, at_once=at_once, layout=layout))
    assert_close(
        jax.jit(with_gradients(here))(w, x), in_double(with_gradients(oracle(size)), w, x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_are_those_of_numpy(reduction: str, placement: tuple[int, int]) -> None:
    devices, size = placement
    axis, reduce, expected = axis_on(devices, size), REDUCTIONS[reduction], getattr(np, reduction)
    x, keep = np.asarray(values(size, 2)), np.arange(size) % 2 == 0
    x = x > 1 if reduction in ("any", "all") else x
    np.testing.assert_allclose(reduce(x, axis), expected(x, axis=0), rtol=1e-5)
    np.testing.assert_allclose(reduce(x, axis, where=keep), expected(x[keep], axis=0), rtol=1e-5)


def test_reductions_of_nobody_are_those_of_numpy() -> None:
    axis, x, none = axis_on(2, 3), values(3), np.zeros(3, bool)
    expected = {"sum": 0.0, "mean": np.nan, "max": -np.inf, "min": np.inf, "any": False, "all": True}
    for name, reduce in REDUCTIONS.items():
        np.testing.assert_array_equal(reduce(x, axis, where=none), expected[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", [(1, 3), (2, 7), (8, 3)], ids=str)
def test_a_mean_of_nobody_is_nan_and_so_is_its_derivative_where_jax_has_it_so(placement: tuple[int, int]) -> None:
    axis = axis_on(*placement)
    x, nobody, w = values(axis.size, 2), np.zeros(axis.size, bool), jnp.zeros(axis.size)
    here = jax.jit(jax.value_and_grad(lambda x: px.reduce_mean(x, axis, where=nobody).sum()))(x)
    there = jax.jit(jax.value_and_grad(lambda x: jnp.mean(x, 0, where=nobody[:, None]).sum()))(x)
    assert_close(here, there)
    assert np.isnan(here[0])
    here = jax.jit(jax.value_and_grad(lambda x, w: px.reduce_weighted_mean(x, w, axis).sum(), argnums=(0, 1)))(x, w)
    there = jax.jit(jax.value_and_grad(lambda x, w: ((w @ x) / w.sum()).sum(), argnums=(0, 1)))(x, w)
    assert_close(here, there)
    assert np.isnan(here[0])
    cancelling = jnp.array([1.0, -1.0, *[0.0] * (axis.size - 2)])
    assert_close(px.reduce_weighted_mean(x, cancelling, axis), (x[0] - x[1]) / 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_keys_depend_on_the_element_alone(placement: tuple[int, int]) -> None:
    axis, key = axis_on(*placement), jax.random.key(7)
    alone = jax.jit(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (3,)))
    expected = [alone(i) for i in range(axis.size)]
    got = px.map_fn(lambda k: jax.random.uniform(k, (3,)), px.keys(key, axis), axis)
    np.testing.assert_array_equal(got, np.stack(expected))
    old = px.map_fn(lambda k: jax.random.uniform(k, (3,)), px.keys(jax.random.PRNGKey(7), axis), axis)
    np.testing.assert_array_equal(old, np.stack(expected))


@pytest.mark.parametrize(("at_once", "wrap"), [(None, lambda f: f), (1, jax.jit)], ids=["eager", "jit, in turns"])
def test_bodies_may_hold_operations_that_stand_for_others(at_once: int | None, wrap: Callable[..., Any]) -> None:
    """JAX's ``searchsorted`` does since 0.12: it becomes other operations only when a program is compiled."""
    axis, x = axis_on(8, 13, at_once=at_once), values(13, 4) - 0.5
    grid, heights = jnp.linspace(0, 1, 5), jnp.array([0.0, 2.0, 1.0, 4.0, 3.0])

    def body(x: jax.Array) -> jax.Array:
        return jnp.interp(x, grid, heights) * x

    def ours(x: jax.Array) -> jax.Array:
        return jnp.sum(px.reduce_mean(px.map_fn(body, x, axis), axis) ** 2)

    def oracle(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(body)(x).mean(0) ** 2)

    assert_close(px.map_fn(body, x, axis), jax.jit(jax.vmap(body))(x))
    assert_close(wrap(jax.value_and_grad(ours))(x), jax.jit(jax.value_and_grad(oracle))(x))


FUSED = (  # a product and a difference of it, and what is made of them
    (lambda s, a, b, d: (a * b - d) + 0 * s, lambda s, a, b, d: b),
    (lambda s, a, b, d: jnp.where(a * b > d - 0.5, a * b - d, 2 * (a * b - d)) * s, None),
    (lambda s, a, b, d: (a * b - d) * s, lambda s, a, b, d: s * b),
    (lambda s, a, b, d: s * a * b - d, lambda s, a, b, d: s * b),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("run", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("number", range(4))
def test_what_is_compared_is_computed_once(number: int, kind: str, run: Callable[..., Any]) -> None:
    """Compilers may compute rows again for each use, and round products and sums together in one, apart in another."""
    fn, slope = FUSED[number]
    slope = slope or (lambda s, a, b, d: s * b * np.where(a * b > d - 0.5, 1, 2))
    axis, rng = px.Axis("rows", 512), np.random.default_rng(number)
    s, (a, b) = np.float32(1.3), rng.standard_normal((2, 512, 3), np.float32)
    d = rng.standard_normal((512, 3), np.float32)

    def reduced(s: Any, a: Any, b: Any, d: Any) -> Any:
        return getattr(px, f"reduce_{kind}")(px.map_fn(fn, (px.broadcast(s, axis), a, b, d), axis), axis).sum()

    gradient = jax.grad(reduced, 1)
    found = run(gradient)(s, a, b, d)
    wide = [np.asarray(v, np.float64) for v in (s, a, b, d)]
    rows, slopes = np.asarray(fn(*wide)), np.asarray(slope(*wide))
    np.testing.assert_allclose(found, np.where(rows == getattr(rows, kind)(0), slopes, 0), rtol=1e-4, atol=1e-6)
