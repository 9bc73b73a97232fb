"""Rows that are held: together or apart they are the same rows; and what is compiled for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from paraxis._core import averages, held, layout
from paraxis._core.layout import Placement
from tests._support import PLACEMENTS, assert_close, axis_on, values

LOWERINGS = ("auto", "dispatch", "vmap", "unroll")


def placed(devices: int, size: int, **wishes: Any) -> Placement:
    return layout.place(axis_on(devices, size, **wishes))


def tree_of(size: int) -> Any:
    keys = jax.vmap(jax.random.key)(jnp.arange(size))
    return {"w": values(size, 2), "n": jnp.arange(size), "key": keys, "half": values(size).astype("bfloat16")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("devices", "size"), PLACEMENTS)
@pytest.mark.parametrize("at_once", [None, 2])
def test_together_and_apart_are_the_same_rows(devices: int, size: int, at_once: int | None) -> None:
    placement, tree = placed(devices, size, at_once=at_once), tree_of(size)
    rows = held.hold(tree, placement)
    for form in (rows, rows.apart(), rows.apart().together(), rows.together(), rows.apart().together().apart()):
        assert_close(form.stacked(), tree)
        assert form.struct()["w"].shape == (2,)
        assert form.struct()["key"].dtype == tree["key"].dtype
        assert_close(form.part(lambda row: row["w"]).stacked(), tree["w"])
    parts = rows.apart().rows
    assert len(parts) == size
    blocks = rows.together().tree["w"]
    assert blocks.shape == (placement.num_padded, 2)
    assert len(blocks.sharding.device_set) == devices
    for index, part in enumerate(parts):  # where its block is
        assert part["w"].devices() == {jax.devices()[index // placement.num_local]}


def test_a_row_is_free_of_the_mesh() -> None:
    tree = tree_of(7)
    rows = held.hold(tree, placed(3, 7))
    for form in (rows, rows.apart()):
        for index in range(7):
            row = form.row(index)
            assert_close(row, jax.tree.map(lambda leaf, i=index: leaf[i], tree))
            assert {d for leaf in jax.tree.leaves(row) for d in leaf.devices()} == {jax.devices()[0]}
            assert jax.random.bits(row["key"]) == jax.random.bits(jax.random.key(index))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_any_kind_stay_what_they_are(impl: str) -> None:
    key = jax.random.key(3, impl=impl)
    assert jax.random.key_impl(held.free(key)) == jax.random.key_impl(key)
    assert_close(held.free(key), key)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("devices", "size"), PLACEMENTS)
def test_a_program_is_called_again_and_again(devices: int, size: int, lowering: Any) -> None:
    placement, x, y = placed(devices, size), values(size, 2), values(size)
    shared = held.Everywhere({"c": values(2), "s": 0.5}, placement)

    def fn(state: Any, y: jax.Array, given: Any) -> Any:
        return state[0] * given["c"] + given["s"], y

    program = held.Program(fn, placement, lowering)
    state: held.Held = held.hold((x, y), placement)
    own, expected = held.hold(y, placement), x
    for _ in range(3):
        state = program([state, own], [shared])
        expected = expected * values(2) + 0.5
    assert_close(state.stacked(), (expected, y))


@pytest.mark.parametrize("lowering", ["dispatch", "vmap"])
def test_a_result_that_depends_on_no_row_is_each_rows(lowering: Any) -> None:
    placement = placed(2, 5)
    rows = held.Program(lambda x: jnp.arange(3), placement, lowering)([held.hold(values(5), placement)], [])
    assert_close(rows.stacked(), jnp.tile(jnp.arange(3), (5, 1)))
    assert_close(rows.apart().together().stacked(), jnp.tile(jnp.arange(3), (5, 1)))


MASKS: list[Callable[[int], np.ndarray]] = [np.ones, lambda n: np.arange(n) % 3 != 1, lambda n: 0.5 + np.arange(n)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("devices", "size"), PLACEMENTS[::-1])
def test_means_and_moments_are_numpys(devices: int, size: int) -> None:
    placement = placed(devices, size)
    tree = {"x": values(size, 3), "n": jnp.arange(size)}
    for make in MASKS:
        weights = np.asarray(make(size), np.float32)
        mean = jax.tree.map(lambda leaf, w=weights: np.average(np.asarray(leaf, np.float64), 0, w), tree)
        square = jax.tree.map(lambda x, m, w=weights: np.average((np.asarray(x) - m) ** 2, 0, w), tree, mean)
        for rows in (held.hold(tree, placement), held.hold(tree, placement).apart()):
            assert_close(jax.tree.map(np.asarray, averages.mean(rows, weights)), mean)
            assert_close(jax.tree.map(np.asarray, averages.moments(rows, weights)), (mean, square))


def test_a_row_of_weight_zero_does_not_count_whatever_it_holds() -> None:
    placement = placed(2, 5)
    x = values(5, 2).at[1].set(jnp.nan).at[4].set(jnp.inf)
    keep = np.array([1, 0, 1, 1, 0], np.float32)
    for rows in (held.hold(x, placement), held.hold(x, placement).apart()):
        assert_close(averages.mean(rows, keep), x[jnp.array([0, 2, 3])].mean(0))
        assert_close(averages.moments(rows, keep)[1], x[jnp.array([0, 2, 3])].var(0))


def test_an_average_is_float32_at_least() -> None:
    rows = held.hold({"half": values(3).astype("bfloat16"), "n": jnp.arange(3)}, placed(2, 3))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(averages.mean(rows, np.ones(3)))} == {"float32"}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_explicit_mesh(lowering: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",), axis_types=(AxisType.Explicit,))
    placement = layout.place(px.Axis("rows", 5, mesh=mesh))
    rows = held.hold(values(5, 2), placement)
    program = held.Program(lambda x, c: x * c, placement, lowering)
    out = program([rows], [held.Everywhere(3.0, placement)])
    np.testing.assert_allclose(out.stacked(), 3 * values(5, 2), rtol=1e-6)
    np.testing.assert_allclose(out.row(4), 3 * values(5, 2)[4], rtol=1e-6)
    np.testing.assert_allclose(averages.mean(out, np.ones(5, np.float32)), 3 * values(5, 2).mean(0), rtol=1e-6)
    np.testing.assert_allclose(averages.moments(out, np.ones(5, np.float32))[1], 9 * values(5, 2).var(0), rtol=1e-4)


def test_a_mesh_with_another_axis() -> None:
    """One row to a device cannot be; the rows together can."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "model"))
    placement = layout.place(px.Axis("rows", 5, mesh=mesh))
    image = lambda x: jax.lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")[0, 0]  # noqa: E731
    x = values(5, 3, 3)
    rows, expected = held.hold(x, placement), jax.vmap(image)(x)
    with pytest.raises(px.LoweringError, match=r"axis 'rows' lies over \('rows',\).*write lowering='unroll'"):
        held.Program(image, placement, "dispatch")([rows], [])
    for lowering in ("auto", "vmap", "unroll"):
        out = held.Program(image, placement, lowering)([rows], [])
        assert_close(jnp.asarray(np.asarray(out.stacked())), expected)
        assert_close(jnp.asarray(np.asarray(averages.mean(out, np.ones(5, np.float32)))), expected.mean(0))


def test_convolutions_and_large_work_run_apart_and_small_work_together() -> None:
    placement = placed(2, 3)
    large = 1 + int(np.sqrt(held.SMALL / 2))
    cases: list[tuple[Callable[..., Any], tuple[int, ...], type[held.Held]]] = [
        (lambda x: x @ x, (4, 4), held.Together),
        (lambda x: jnp.sum(jnp.ones((large, 1)) @ (x[:, :1] @ jnp.ones((1, large)))[:1]), (1, 1), held.Apart),
        (lambda x: jax.lax.conv(x, jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"), (1, 1, 3, 3), held.Apart),
        (lambda x: jax.lax.psum(jax.lax.conv(x, x, (1, 1), "SAME"), "rows"), (1, 1, 3, 3), held.Together),
    ]
    for fn, shape, form in cases:
        rows = held.hold(values(3, *shape), placement)
        assert isinstance(held.Program(fn, placement)([rows], []), form)
