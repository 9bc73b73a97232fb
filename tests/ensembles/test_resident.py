"""Members lie together or apart on the devices, and are the same members; and what is compiled for them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._support import assert_close, values
from tests.ensembles._kinds import mesh_of

# (number of devices, number of members): one each, several each, more devices than members, sizes that do not divide.
PLACES = [(1, 3), (2, 1), (2, 7), (3, 8), (8, 3), (8, 8), (8, 10)]
LOWERINGS = ("auto", "dispatch", "vmap", "unroll")
WIDTH = 7  # of members whose arrays are looked for among all that there are


def held(tree: Any, devices: int, lowering: Any = "auto", **options: Any) -> px.Ensemble:
    """Members that are the rows of a tree; a model is what it gives."""
    size = jax.tree.leaves(tree)[0].shape[0]
    mesh = options.pop("mesh", None) or mesh_of(devices)
    return px.ensemble(
        lambda key, row: row, size, 0, tree, apply=lambda row: row, mesh=mesh, lowering=lowering, **options
    )


def tree_of(size: int) -> Any:
    keys = jax.vmap(jax.random.key)(jnp.arange(size))
    return {"w": values(size, 2), "n": jnp.arange(size), "key": keys, "half": values(size).astype("bfloat16")}


def same(row: Any) -> Any:
    return row


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "size"), PLACES)
@pytest.mark.parametrize("at_once", [None, 2])
def test_together_and_apart_are_the_same_rows(devices: int, size: int, at_once: int | None) -> None:
    tree = tree_of(size)
    for lowering in ("vmap", "dispatch"):
        ens = held(tree, devices, lowering, at_once=at_once)
        for _ in range(2):
            assert_close(ens.stacked(), tree)
            assert ens[size - 1]["w"].shape == (2,)
            assert ens[0]["key"].dtype == tree["key"].dtype
            assert_close(ens.members(apply=lambda row: row["w"]), tree["w"])
            ens.train(same)  # from here on they lie as they are run


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("devices", "size"), PLACES)
@pytest.mark.parametrize("at_once", [None, 2])
def test_each_member_is_where_its_block_is(devices: int, size: int, at_once: int | None) -> None:
    turns = math.ceil(math.ceil(size / devices) / at_once) if at_once else 1
    block = math.ceil(size / (devices * turns)) * turns
    for lowering in ("dispatch", "vmap"):
        weights = np.asarray(values(size, WIDTH))
        others = jax.live_arrays()  # held: the number of one that is freed may be given to a new one
        known = {id(array) for array in others}
        ens = held(weights, devices, lowering, at_once=at_once)
        ens.train(same)
        found = [x for x in jax.live_arrays() if id(x) not in known and x.shape[-1:] == (WIDTH,)]
        if lowering == "dispatch":
            number = {row.tobytes(): index for index, row in enumerate(weights)}
            where = {number[np.asarray(x).tobytes()]: x.devices() for x in found if x.ndim == 1}
            assert where == {index: {jax.devices()[index // block]} for index in range(size)}
        else:
            assert (block * devices, WIDTH) in {x.shape for x in found}
            assert max(len(x.sharding.device_set) for x in found) == devices


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", ["vmap", "dispatch"])
def test_a_row_is_free_of_the_mesh(lowering: Any) -> None:
    tree = tree_of(7)
    ens = held(tree, 3, lowering)
    ens.train(same)
    for index in range(7):
        row = ens[index]
        assert_close(row, jax.tree.map(lambda leaf, i=index: leaf[i], tree))
        assert {d for leaf in jax.tree.leaves(row) for d in leaf.devices()} == {jax.devices()[0]}
        assert jax.random.bits(row["key"]) == jax.random.bits(jax.random.key(index))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_any_kind_stay_what_they_are(impl: str) -> None:
    key = jax.random.key(3, impl=impl)
    ens = held(key[None], 1)
    assert jax.random.key_impl(ens[0]) == jax.random.key_impl(key)
    assert_close(ens[0], key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("devices", "size"), PLACES)
def test_a_program_is_called_again_and_again(devices: int, size: int, lowering: Any) -> None:
    x, y = values(size, 2), values(size)

    def step(x: jax.Array, y: jax.Array, own: jax.Array, given: Any) -> Any:
        return (x * given["c"] + given["s"], y), own

    ens, expected = held((x, y), devices, lowering), x
    for _ in range(3):
        out = ens.train(step, y, {"c": values(2), "s": 0.5}, in_axes=(0, None))
        expected = expected * values(2) + 0.5
        assert_close(out, y)
    assert_close(ens.stacked(), (expected, y))


@pytest.mark.parametrize("lowering", ["dispatch", "vmap"])
def test_a_result_that_depends_on_no_row_is_each_rows(lowering: Any) -> None:
    ens = held(jnp.zeros((5, 3), int), 2, lowering)
    out = ens.train(lambda row: (jnp.arange(3), jnp.arange(4)))
    assert_close((ens.stacked(), out), (jnp.tile(jnp.arange(3), (5, 1)), jnp.tile(jnp.arange(4), (5, 1))))


MASKS: list[Callable[[int], np.ndarray]] = [lambda n: np.full(n, True), lambda n: np.arange(n) % 3 != 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("devices", "size"), PLACES[::-1])
def test_means_and_moments_are_numpys(devices: int, size: int) -> None:
    tree = {"x": values(size, 3), "n": jnp.arange(size)}
    for lowering in ("vmap", "dispatch"):
        ens = held(tree, devices, lowering)
        for make in MASKS:
            mask = make(size)
            kept = jax.tree.map(lambda leaf, mask=mask: np.asarray(leaf, np.float64)[mask], tree)
            mean, square = (jax.tree.map(lambda x, take=take: take(x, 0), kept) for take in (np.mean, np.var))
            assert_close(jax.tree.map(np.asarray, ens.predict(average="mean", where=mask)), mean)
            assert_close(jax.tree.map(np.asarray, ens.predict(average="moments", where=mask)), (mean, square))


@pytest.mark.parametrize("lowering", ["vmap", "dispatch"])
def test_a_row_of_weight_zero_does_not_count_whatever_it_holds(lowering: Any) -> None:
    x = values(5, 2).at[1].set(jnp.nan).at[4].set(jnp.inf)
    keep = np.array([True, False, True, True, False])
    ens = held(x, 2, lowering)
    assert_close(ens.predict(average="mean", where=keep), x[jnp.array([0, 2, 3])].mean(0))
    assert_close(ens.predict(average="moments", where=keep)[1], x[jnp.array([0, 2, 3])].var(0))


def test_an_average_is_float32_at_least() -> None:
    ens = held({"half": values(3).astype("bfloat16"), "n": jnp.arange(3)}, 2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(ens.predict(average="mean"))} == {"float32"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_explicit_mesh(lowering: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("members",), axis_types=(AxisType.Explicit,))
    ens = held(values(5, 2), 2, lowering, mesh=mesh)
    ens.train(lambda x, c: x * c, 3.0)
    np.testing.assert_allclose(ens.stacked(), 3 * values(5, 2), rtol=1e-6)
    np.testing.assert_allclose(ens[4], 3 * values(5, 2)[4], rtol=1e-6)
    np.testing.assert_allclose(ens.predict(average="mean"), 3 * values(5, 2).mean(0), rtol=1e-6)
    np.testing.assert_allclose(ens.predict(average="moments")[1], 9 * values(5, 2).var(0), rtol=1e-4)


@pytest.mark.slow
def test_a_mesh_with_another_axis() -> None:
    """One row to a device cannot be; the rows together can."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("members", "model"))
    image = lambda x: jax.lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")[0, 0]  # noqa: E731
    x = values(5, 3, 3)
    expected = jax.vmap(image)(x)
    with pytest.raises(px.LoweringError, match=r"axis 'members' lies over \('members',\).*write lowering='unroll'"):
        held(x, 4, "dispatch", mesh=mesh).train(image)
    for lowering in ("auto", "vmap", "unroll"):
        ens = held(x, 4, lowering, mesh=mesh)
        ens.train(image)
        assert_close(jnp.asarray(np.asarray(ens.stacked())), expected)
        assert_close(jnp.asarray(np.asarray(ens.predict(average="mean"))), expected.mean(0))


def test_convolutions_and_large_work_run_apart_and_small_work_together() -> None:
    """What is lowered is the program of all members, or that of one."""
    large = 1 + int(np.sqrt(50_000_000 / 2))  # just more than the operations that are much
    cases: list[tuple[Callable[..., Any], tuple[int, ...], bool]] = [
        (lambda x: x @ x, (4, 4), True),
        (lambda x: x * jnp.sum(jnp.ones((large, 1)) @ (x[:, :1] @ jnp.ones((1, large)))[:1]), (1, 1), False),
        (lambda x: jax.lax.conv(x, jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"), (1, 1, 3, 3), False),
        (lambda x: jax.lax.psum(jax.lax.conv(x, x, (1, 1), "SAME"), "members"), (1, 1, 3, 3), True),
    ]
    for step, shape, together in cases:
        ens = held(values(3, *shape), 2)
        (state,) = jax.tree.leaves(ens.lower(step).args_info)
        assert state.shape == ((4, *shape) if together else shape)


def test_members_over_axes_in_another_order() -> None:
    rows = values(4, 2)
    ens = px.ensemble(
        lambda key, row: row,
        4,
        0,
        rows,
        mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")),
        over=("b", "a"),
        lowering="dispatch",
    )
    ens.train(lambda row: row)
    for index in range(4):
        assert_close(ens[index], rows[index])
