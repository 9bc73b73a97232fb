"""An ensemble is the same whatever is in force around it, and keeps nothing that it was given."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px


def make(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (4, 3))


def apply(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def step(w: jax.Array, x: jax.Array) -> Any:
    return w * 1.5, (x @ w).mean()


X = jnp.arange(20.0).reshape(5, 4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", ["auto", "dispatch"])
@pytest.mark.parametrize("size", [8, 5])
def test_a_mesh_in_force_or_another_one_changes_nothing(size: int, lowering: Any) -> None:
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(size)]
    weights = np.stack([np.asarray(make(key)) for key in keys])
    with jax.set_mesh(jax.make_mesh((8,), ("members",))):
        ens = px.ensemble(make, size, 0, apply=apply, lowering=lowering)
        losses = ens.train(step, X)
        assert (len(ens.drop(1)), len(ens.add(ens[0])), len(ens.stacked())) == (size - 1, size + 1, size)
    np.testing.assert_allclose(losses, (np.asarray(X) @ weights).mean((1, 2)), rtol=1e-5)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        ens.train(step, X)
        mean = ens.predict(X, average="mean")
        assert ens.finite().all()
    np.testing.assert_allclose(mean, np.asarray(X) @ weights.mean(0) * 2.25, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_data_that_was_used_is_let_go() -> None:
    ens = px.ensemble(make, 3, 0, apply=apply)

    def live() -> int:
        gc.collect()
        return sum(array.shape == (333, 4) for array in jax.live_arrays())

    before = live()
    ens.predict(jnp.ones((333, 4)))
    ens.train(step, jnp.ones((333, 4)))
    ens.fit(step, (jnp.ones((333, 4)),), batch_size=111, key=0)
    assert live() == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", ["vmap", "dispatch"])
def test_a_compiled_prediction_keeps_the_members_it_was_traced_with(lowering: Any) -> None:
    ens = px.ensemble(make, 3, 0, apply=apply, lowering=lowering)
    before = np.stack([np.asarray(w) for w in ens])
    kept = jax.jit(lambda x: ens.predict(x, average="mean"))
    given = jax.jit(lambda members, x: jax.vmap(apply, (0, None))(members, x).mean(0))
    np.testing.assert_allclose(kept(X), np.asarray(X) @ before.mean(0), rtol=1e-5, atol=1e-5)
    ens.train(step, X)
    np.testing.assert_allclose(kept(X), np.asarray(X) @ before.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(given(ens.stacked(), X), np.asarray(X) @ before.mean(0) * 1.5, rtol=1e-5, atol=1e-5)
    slope = jax.grad(lambda x: ens.predict(x, average="mean").sum())(X)
    expected = np.broadcast_to(before.mean(0).sum(1) * 1.5, X.shape)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_members_are_the_same_however_many_there_are_with_any_kind_of_key() -> None:
    for kind in ("threefry2x32", "rbg"):
        key = jax.random.key(0, impl=kind)
        few, many = (px.ensemble(make, size, key) for size in (2, 17))
        np.testing.assert_array_equal(few[1], many[1])


def test_a_mask_picks_those_it_says() -> None:
    ens = px.ensemble(make, 4, 0)
    healthy = ens[np.array([False, True, True, False])]
    np.testing.assert_array_equal(np.stack(list(healthy)), np.stack([ens[1], ens[2]]))
    assert len(ens.drop(np.flatnonzero(~ens.finite()))) == 4
    with pytest.raises(px.ShapeError, match=r"one entry per member, \(4,\), got \(3,\); write ens\[ens\.finite\(\)\]"):
        ens[np.array([True, True, False])]
    with pytest.raises(px.ShapeError, match=r"whole numbers or a mask of booleans, got float64; write ens\[\[0, 2\]\]"):
        ens[[0.9, 1.9]]


def test_a_function_that_is_made_anew_with_the_same_name_is_not_mistaken_for_the_old_one() -> None:
    class Model:
        width = 3

        def make(self, key: jax.Array) -> jax.Array:
            return jax.random.normal(key, (self.width,))

    model = Model()
    assert px.ensemble(model.make, 2, 0)[0].shape == (3,)
    model.width = 7
    assert px.ensemble(model.make, 2, 0)[0].shape == (7,)
