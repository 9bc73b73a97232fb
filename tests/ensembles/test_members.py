"""Members are picked, dropped and added; a picked one is an ordinary model, with arrays of its own."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.ensembles._kinds import NNX, Regular, X, Y, make_nnx, mesh_of

SIZE = 5
W = values(SIZE, 3, 2, seed=2)


def apply_linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def some(devices: int = 2, weights: Any = W, **options: Any) -> px.Ensemble:
    """Members ``{"w": (3, 2), "n": ()}``; ``n`` is their number."""
    numbers = jnp.arange(len(weights))
    make = lambda key, w, n: {"w": w, "n": n}  # noqa: E731
    return px.ensemble(make, len(weights), 0, weights, numbers, apply=apply_linear, mesh=mesh_of(devices), **options)


def numbers_of(ens: px.Ensemble) -> list[int]:
    return [int(member["n"]) for member in ens]


def double(params: Any) -> Any:
    return {"w": 2 * params["w"], "n": params["n"]}


@pytest.mark.parametrize("lowering", ["auto"])
def test_a_number_picks_a_member(lowering: Any) -> None:
    ens = some(lowering=lowering)
    for _ in range(2):  # as they were made, and as they lie after a step
        for index in (*range(SIZE), *range(-SIZE, 0), np.int64(3), jnp.int32(2)):
            member = ens[index]
            assert_close(member["w"], ens.stacked()["w"][index])
            assert int(member["n"]) == index % SIZE
        assert [int(member["n"]) for member in ens] == list(range(SIZE))
        ens.train(double)
    assert_close(ens.stacked()["w"], 4 * W)


@pytest.mark.parametrize("index", [SIZE, -SIZE - 1, 100])
def test_a_number_that_nobody_has_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        some()[index]
    with pytest.raises(IndexError, match="out of bounds"):
        some()[[0, index]]
    with pytest.raises(IndexError, match="out of bounds"):
        some().drop(index)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", ["auto"])
def test_slices_and_lists_pick_ensembles(lowering: Any) -> None:
    ens = some(lowering=lowering)
    ens.train(double)
    picks: list[Any] = [slice(2), slice(1, 4), slice(None, None, -2), [0, 2], [-1], [3, 3, 1], np.array([4, 0])]
    for pick in picks:
        chosen, expected = ens[pick], np.arange(SIZE)[pick if isinstance(pick, slice) else list(pick)]
        assert isinstance(chosen, px.Ensemble)
        assert len(chosen) == len(expected)
        assert numbers_of(chosen) == expected.tolist()
        np.testing.assert_allclose(chosen.members(X), np.einsum("nd,mdc->mnc", X, 2 * W[expected]), rtol=1e-5)


def test_an_ensemble_of_nobody_is_refused() -> None:
    for use in (lambda: some()[:0], lambda: some()[5:], lambda: some().drop(*range(SIZE)), lambda: some()[[]]):
        with pytest.raises(px.ShapeError, match="no member would be left"):
            use()


def test_others_are_dropped_and_added() -> None:
    ens = some()
    assert numbers_of(ens.drop(1, -1)) == [0, 2, 3]
    assert numbers_of(ens.drop()) == numbers_of(ens) == list(range(SIZE))
    more = ens.add(
        {"w": jnp.ones((3, 2)), "n": jnp.int32(7)}, ens[0], {"w": np.zeros((3, 2), "float32"), "n": ens[1]["n"]}
    )
    assert numbers_of(more) == [0, 1, 2, 3, 4, 7, 0, 1]
    expected = jnp.concatenate([W, jnp.ones((1, 3, 2)), W[:1], jnp.zeros((1, 3, 2))])
    assert_close(more.stacked()["w"], expected)
    more.train(double)
    assert_close(more.stacked()["w"], 2 * expected)
    assert_close(ens.stacked()["w"], W)
    assert numbers_of(ens.add()) == numbers_of(ens)


def test_members_that_do_not_fit_are_not_added() -> None:
    ens = some()
    cases: list[tuple[Any, str]] = [
        ({"w": W[0]}, r"members\[1\] is not like the others; they differ in n"),
        ({"w": W[0], "n": ens[0]["n"], "b": 1.0}, r"members\[1\] is not like the others; they differ in b"),
        ({"w": W[0, :2], "n": ens[0]["n"]}, r"members\[1\] would change w from float32\[3, 2\] to float32\[2, 2\]"),
        ({"w": W[0], "n": 1.5}, r"members\[1\] would change n from int32\[\] to float32\[\]"),
    ]
    for member, message in cases:
        with pytest.raises(px.StateError, match=message):
            ens.add(ens[0], member)


@pytest.mark.parametrize("lowering", ["auto"])
def test_stacked_members_are_for_vmap(lowering: Any) -> None:
    ens = some(lowering=lowering)
    ens.train(double)
    stacked = ens.stacked()
    np.testing.assert_allclose(jax.vmap(apply_linear, (0, None))(stacked, X), np.einsum("nd,mdc->mnc", X, 2 * W), 1e-5)
    np.testing.assert_allclose(px.map_fn(lambda m: m["w"].sum(), stacked, ens.axis), 2 * W.sum((1, 2)), rtol=1e-5)
    ens.train(double)
    assert_close(stacked["w"], 2 * W)  # a copy, not given away


def test_it_says_what_it_is() -> None:
    assert repr(some()) == "Ensemble(5 members of 7 numbers, on 2 devices)"
    named = px.ensemble(lambda key: jax.random.normal(key, (40, 50)), 3, 0, name="models", mesh=mesh_of(2, "models"))
    assert repr(named) == "Ensemble(3 models of 2,000 numbers, on 2 devices)"
    assert len(named) == 3
    assert named.axis == px.Axis("models", 3, mesh=mesh_of(2, "models"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", ["auto"])
def test_a_picked_member_has_arrays_of_its_own(lowering: Any) -> None:
    ens = some(lowering=lowering)
    for _ in range(2):
        picked, part, whole = ens[1], ens[:2], ens.stacked()
        before, numbers = np.asarray(picked["w"]).copy(), np.asarray(whole["w"]).copy()
        jax.jit(lambda m: jax.tree.map(lambda x: 0 * x, m), donate_argnums=0)(ens[1])
        jax.jit(lambda m: jax.tree.map(lambda x: 0 * x, m), donate_argnums=0)(ens.stacked())
        part.train(double)
        assert (np.asarray(ens.stacked()["w"]) == numbers).all()
        ens.train(double)
        assert (np.asarray(picked["w"]) == before).all()
        assert (np.asarray(whole["w"]) == numbers).all()
        assert (np.asarray(part.stacked()["w"]) == 2 * numbers[:2]).all()


def test_a_picked_member_is_free_of_the_mesh() -> None:
    member = some(3)[4]
    assert member["w"].sharding.device_set == {jax.devices()[0]}
    far = jax.device_put(X, jax.devices()[0])
    np.testing.assert_allclose(jax.jit(apply_linear)(member, far), X @ W[4], rtol=1e-5)


@pytest.mark.slow
def test_a_picked_module_is_called_and_trained_as_any_other() -> None:
    ens = px.ensemble(make_nnx, 2, 0, mesh=mesh_of(2))
    ens.train(NNX.step, X, Y)
    first, second = ens[0], ens[0]
    assert isinstance(first[0], Regular)
    assert isinstance(first[1], nnx.Optimizer)
    kernels = [np.asarray(net.first.kernel[...]).copy() for net, _ in ens]
    step = nnx.jit(NNX.step)
    losses = [float(step(*first, X, Y)) for _ in range(2)]
    assert losses == [float(step(*second, X, Y)) for _ in range(2)]  # the keys of its dropout are its own too
    together = [ens.train(NNX.step, X, Y) for _ in range(2)]
    np.testing.assert_allclose([float(out[0]) for out in together], losses, rtol=1e-4)
    np.testing.assert_allclose(first[0].first.kernel[...], ens[0][0].first.kernel[...], rtol=1e-4, atol=1e-6)
    assert not np.allclose(kernels[0], first[0].first.kernel[...])
    added = ens.add(first)
    np.testing.assert_allclose(added[2][0].first.kernel[...], first[0].first.kernel[...])


def make_net(activation: Any, rate: float = 1e-2) -> Any:
    def make(key: jax.Array) -> Any:
        net = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(key)), jax.jit(activation))
        return net, nnx.Optimizer(net, optax.adam(rate), wrt=nnx.Param)

    return make


def make_module(activation: Any, rate: float = 1e-2) -> Any:
    def make(key: jax.Array) -> Any:
        net = eqx.nn.MLP(3, 3, 4, 1, activation=activation, key=key)
        return {"net": net}

    return make


@pytest.mark.parametrize("make", [make_net, make_module])
def test_a_member_with_other_functions_is_not_added(make: Any) -> None:
    """All members share what is fixed: a net with tanh would compute relu."""
    ens, other = px.ensemble(make(jax.nn.relu), 2, 0), jax.random.key(9)
    assert len(ens.add(ens[0], make(jax.nn.relu)(other))) == 4  # made anew, of the same code
    with pytest.raises(px.StateError, match=r"members\[0\] has other functions or settings"):
        ens.add(make(jnp.tanh)(other))


def test_a_member_with_another_rate_in_its_optimizer_is_not_added() -> None:
    with pytest.raises(px.StateError, match="an optimiser's rate"):
        px.ensemble(make_net(nnx.relu), 2, 0).add(make_net(nnx.relu, 1e-3)(jax.random.key(0)))


def test_members_that_would_all_be_the_same_are_refused() -> None:
    with pytest.raises(px.StateError, match="make does not use its key"):
        px.ensemble(lambda key: jnp.zeros(3), 2, 0)
    assert len(px.ensemble(lambda key: jnp.zeros(3), 1, 0)) == 1
    assert len(px.ensemble(lambda key, number: jnp.zeros(3), 2, 0, jnp.arange(2))) == 2


def test_a_class_or_a_model_in_the_place_of_make_is_told() -> None:
    for make in (nnx.Linear, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), eqx.nn.MLP):
        with pytest.raises(px.StateError, match=r"make must be a function that is given a key.*got the (class|model)"):
            px.ensemble(make, 2, 0)


def test_keys_whose_draws_depend_on_the_devices_are_refused() -> None:
    with jax.default_prng_impl("rbg"):
        for key in (jax.random.key(0), jax.random.PRNGKey(0)):
            with pytest.raises(px.ShapeError, match="hardware generator rbg"):
                px.ensemble(lambda key: jax.random.normal(key, (2,)), 3, key)
        seeded = px.ensemble(lambda key: jax.random.normal(key, (2,)), 3, 0).stacked()
    expected = [jax.random.normal(jax.random.fold_in(jax.random.key(0), index), (2,)) for index in range(3)]
    np.testing.assert_array_equal(seeded, jnp.stack(expected))
