"""px.Vectorize against plain ``jax.vmap`` and loops over rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(10, 4)).astype("float32")


def test_vectorize_gives_rows_their_own_randomness_and_advances_the_stream_once() -> None:
    rngs = nnx.Rngs(0)
    draw = px.Vectorize(lambda rngs, x: rngs.uniform(), rngs)
    first, second = draw(jnp.zeros(64)), draw(jnp.zeros(64))
    assert len({*first.tolist(), *second.tolist()}) == 128
    assert int(rngs.default.count[...]) == 2
    assert rngs.default.key.shape == ()


def test_vectorize_splits_streams_of_several_keys_and_lone_keys() -> None:
    rngs = nnx.Rngs(0).split(2)

    def draw_both(rngs: nnx.Rngs, x: Any) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in)(rngs.default.key[...], rngs.default.count[...])
        rngs.default.count[...] += 1
        return jax.vmap(jax.random.uniform)(keys)

    out = px.Vectorize(draw_both, rngs)(jnp.zeros(8))
    assert len(set(out.ravel().tolist())) == 16
    assert rngs.default.count[...].tolist() == [1, 1]
    key = nnx.RngKey(jax.random.key(0), tag="noise")

    def draw(key: Any, x: Any) -> jax.Array:
        now, key[...] = jax.random.split(key[...])
        return jax.random.uniform(now)

    noise = px.Vectorize(draw, key)
    assert len({*noise(jnp.zeros(8)).tolist(), *noise(jnp.zeros(8)).tolist()}) == 16


def test_vectorize_takes_batch_axes() -> None:
    tree = {"a": jnp.asarray(X), "b": jnp.ones(3)}
    summed = px.Vectorize(lambda t, y: ((t["a"] * t["b"]).sum(), y * 2), batch_axis=({"a": 0, "b": None}, -1))
    out = summed(tree, Y.T)
    np.testing.assert_allclose(out[0], X.sum(1), rtol=1e-5)
    np.testing.assert_allclose(out[1], 2 * Y, rtol=1e-6)


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
@pytest.mark.parametrize("batch_axis", [(0,), 2, (0, 1), ("a", 0), ((0, 0), None), {"a": 0}, 1.0], ids=str)
def test_vectorize_and_parallel_name_a_batch_axis_that_does_not_fit(wrap: Any, batch_axis: Any) -> None:
    with pytest.raises(px.DataError, match=rf"{wrap.__name__}: batch_axis=.* does not fit args, of shapes .*\(4,\)"):
        wrap(jnp.add, batch_axis=batch_axis)(jnp.ones((8, 4)), jnp.ones(4))


@pytest.mark.parametrize("wrap", [px.Vectorize, px.Parallel], ids=["rows", "devices"])
def test_vectorize_and_parallel_split_keyword_arguments_as_vmap_does(wrap: Any) -> None:
    def loss(x: jax.Array, *, y: jax.Array, scale: float) -> jax.Array:
        return scale * ((x - y) ** 2).sum(-1)

    x, y = jnp.ones((8, 4)), Y[:8]
    expected = jax.vmap(lambda x, y: loss(x, y=y, scale=2.0))(x, y)
    np.testing.assert_allclose(wrap(loss)(x, y=y, scale=2.0), expected, rtol=1e-5)
    if wrap is px.Parallel:
        assert wrap(lambda x, y: y[None], reduce="stack", batch_axis=None)(x, y=y).shape == (8, 1, 8, 4)


def test_vectorize_needs_a_rule_for_what_differs() -> None:
    seen = nnx.Variable(jnp.zeros(3))
    note = lambda seen, x: seen.set_value(x)  # noqa: E731
    with pytest.raises(
        px.StateError, match=r"variable \(Variable\) could be left with different values by different rows.*sync="
    ):
        px.Vectorize(note, seen)(X)
    assert seen[...].tolist() == [0, 0, 0]
    px.Vectorize(note, seen, sync={nnx.Variable: "mean"})(X)
    np.testing.assert_allclose(seen[...], X.mean(0), rtol=1e-5)
    px.Vectorize(note, seen, sync={nnx.Variable: "max"})(X)
    np.testing.assert_allclose(seen[...], X.max(0))


def test_vectorize_within_vectorize_keeps_differences_apart() -> None:
    total = nnx.Variable(jnp.zeros(()))
    inner = px.Vectorize(lambda total, x: total.set_value(total[...] + x), total, sync={nnx.Variable: "sum"})
    px.Vectorize(lambda inner, x: inner(x), inner, sync={nnx.Variable: "sum"})(jnp.ones((3, 4)))
    assert float(total[...]) == 12.0
    same_within = px.Vectorize(lambda total, x, y: total.set_value(x), total, batch_axis=(None, 0))
    outer = px.Vectorize(lambda within, x, y: within(x, y), same_within, sync={nnx.Variable: "max"})
    outer(jnp.array([1.0, 5.0]), jnp.ones((2, 3)))
    assert float(total[...]) == 5.0
