"""Members are picked, dropped, added, saved and loaded; a picked one is an ordinary model, with arrays of its own."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px
from tests._members import KINDS, X, Y, arrays_of, mesh_of
from tests._support import assert_close, values

SIZE = 5
W = values(SIZE, 3, 2, seed=2)


def apply_linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def some(devices: int = 2) -> px.Ensemble:
    """Members ``{"w": (3, 2), "n": ()}``; ``n`` is their number."""
    make = lambda key, w, n: {"w": w, "n": n}  # noqa: E731
    return px.ensemble(make, SIZE, 0, W, jnp.arange(SIZE), apply=apply_linear, mesh=mesh_of(devices), donate=True)


def numbers_of(ens: px.Ensemble) -> list[int]:
    return [int(member["n"]) for member in ens]


def double(params: Any) -> Any:
    return {"w": 2 * params["w"], "n": params["n"]}


def test_ensemble_gives_a_member_by_number_and_an_ensemble_by_slice_or_list() -> None:
    ens = some()
    ens.train(double)
    for index in (*range(-SIZE, SIZE), np.int64(3), jnp.int32(2)):
        assert_close(ens[index]["w"], 2 * W[index])
    assert numbers_of(ens) == list(range(SIZE))
    picks: list[Any] = [slice(1, 4), slice(None, None, -2), [-1], [3, 3, 1], np.array([4, 0])]
    for pick in picks:
        assert numbers_of(ens[pick]) == np.arange(SIZE)[pick].tolist()
    some_twice = np.array([3, 3, 1])
    np.testing.assert_allclose(ens[some_twice].members(X), np.einsum("nd,mdc->mnc", X, 2 * W[some_twice]), rtol=1e-5)
    for index in (SIZE, -SIZE - 1, [0, SIZE]):
        with pytest.raises(IndexError, match="out of bounds"):
            ens[index]
    for odd in (True, np.True_, [[0, 1]]):
        for use in (ens.__getitem__, ens.drop):
            with pytest.raises(px.DataError, match=r"is no index; write ens\[1\]"):
                use(odd)


def test_ensemble_drops_and_adds_members() -> None:
    ens = some()
    assert numbers_of(ens.drop(1, -1)) == [0, 2, 3]
    for nothing in ([], (), np.zeros(SIZE, bool), jnp.array([])):
        assert numbers_of(ens.drop(nothing)) == list(range(SIZE))
    assert numbers_of(ens.drop()) == numbers_of(ens.add()) == list(range(SIZE))
    more = ens.add(
        {"w": jnp.ones((3, 2)), "n": jnp.int32(7)}, ens[0], {"w": np.zeros((3, 2), "float32"), "n": ens[1]["n"]}
    )
    assert numbers_of(more) == [0, 1, 2, 3, 4, 7, 0, 1]
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):  # which is not that of the members
        assert numbers_of(ens.add(ens[2])) == [*range(SIZE), 2]
    more.train(double)
    assert_close(more.stacked()["w"], 2 * jnp.concatenate([W, jnp.ones((1, 3, 2)), W[:1], jnp.zeros((1, 3, 2))]))
    assert_close(ens.stacked()["w"], W)


def test_ensemble_adds_no_members_that_do_not_fit() -> None:
    ens = some()
    cases: list[tuple[Any, str]] = [
        ({"w": W[0]}, r"members\[1\] differs from the others in n"),
        ({"w": W[0, :2], "n": ens[0]["n"]}, r"members\[1\] would change w from float32\[3, 2\] to float32\[2, 2\]"),
        ({"w": W[0], "n": 1.5}, r"members\[1\] would change n from int32\[\] to float32\[\]"),
    ]
    for member, message in cases:
        with pytest.raises(px.StateError, match=message):
            ens.add(ens[0], member)


def make_net(activation: Any, rate: float = 1e-2) -> Any:
    def make(key: jax.Array) -> Any:
        net = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(key)), jax.jit(activation))
        return net, nnx.Optimizer(net, optax.adam(rate), wrt=nnx.Param)

    return make


def make_module(activation: Any) -> Any:
    return lambda key: {"net": eqx.nn.MLP(3, 3, 4, 1, activation=activation, key=key)}


@pytest.mark.parametrize("make", [make_net, make_module])
def test_ensemble_adds_no_member_with_other_functions(make: Any) -> None:
    """All members share what is fixed: a net with tanh would compute relu."""
    ens, other = px.ensemble(make(jax.nn.relu), 2, 0), jax.random.key(9)
    assert len(ens.add(ens[0], make(jax.nn.relu)(other))) == 4  # made anew, of the same code
    others = [make(jnp.tanh)(other), *([make_net(jax.nn.relu, 1e-3)(other)] if make is make_net else [])]
    for member in others:
        with pytest.raises(px.StateError, match=r"members\[0\] differs from the others in functions"):
            ens.add(member)


def test_ensemble_gives_picked_and_stacked_members_arrays_of_their_own() -> None:
    ens = some(3)
    for _ in range(2):  # as they were made, and as they lie after a step
        picked, part, whole = ens[1], ens[:2], ens.stacked()
        before, numbers = np.asarray(picked["w"]).copy(), np.asarray(whole["w"]).copy()
        np.testing.assert_allclose(px.map_fn(lambda m: m["w"].sum(), whole, ens.axis), numbers.sum((1, 2)), rtol=1e-5)
        jax.jit(lambda m: jax.tree.map(lambda x: 0 * x, m), donate_argnums=0)(ens[1])
        jax.jit(lambda m: jax.tree.map(lambda x: 0 * x, m), donate_argnums=0)(ens.stacked())
        part.train(double)
        assert (np.asarray(ens.stacked()["w"]) == numbers).all()
        ens.train(double)
        assert (np.asarray(picked["w"]) == before).all()
        assert (np.asarray(whole["w"]) == numbers).all()
        assert (np.asarray(part.stacked()["w"]) == 2 * numbers[:2]).all()
    far = jax.device_put(X, jax.devices()[0])  # a picked one is free of the mesh
    np.testing.assert_allclose(jax.jit(apply_linear)(ens[4], far), X @ (4 * W[4]), rtol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_ensemble_loads_a_saved_state_on_other_devices(name: str, tmp_path: Path) -> None:
    ens, other = (px.ensemble(KINDS[name].make, 5, seed, mesh=mesh_of(2 + seed)) for seed in (0, 1))
    ens.train(KINDS[name].step, X, Y)
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, ens.state)
        other.state = checkpoints.restore(other.state).tree
    for a, b in zip(ens, other, strict=True):
        for x, y in zip(arrays_of(a), arrays_of(b), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_ensemble_saves_a_numpy_archive_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    ens, whole = some(), some().stacked()["w"]
    np.savez(tmp_path / "members.npz", **ens.state)  # pyright: ignore
    ens.train(double)
    with np.load(tmp_path / "members.npz") as file:
        ens.state = file
    assert_close(ens.stacked()["w"], whole)
    cases = [({"w": W}, "differ in n"), ({"w": W[:2], "n": np.arange(5)}, r"would change w from float32\[5, 3, 2\]")]
    for state, message in cases:
        with pytest.raises(px.StateError, match=message):
            ens.state = state


def test_ensemble_refuses_makes_that_would_be_wrong_in_silence() -> None:
    with pytest.raises(px.StateError, match="make does not use its key"):
        px.ensemble(lambda key: jnp.zeros(3), 2, 0)
    for beside in (lambda net: {"net": net}, lambda net: (net, jnp.zeros(3))):  # a dict's modules would share nothing
        with pytest.raises(px.StateError, match=r"come apart; write \(net, opt\)"):
            px.ensemble(lambda key, beside=beside: beside(nnx.Linear(3, 3, rngs=nnx.Rngs(key))), 2, 0)
    assert len(px.ensemble(lambda key: jnp.zeros(3), 1, 0)) == 1
    assert len(px.ensemble(lambda key, number: jnp.zeros(3), 2, 0, jnp.arange(2))) == 2


def test_ensemble_refuses_keys_whose_draws_depend_on_the_devices() -> None:
    with jax.default_prng_impl("rbg"):
        for key in (jax.random.key(0), jax.random.PRNGKey(0)):
            with pytest.raises(px.DataError, match="draws of an rbg key"):
                px.ensemble(lambda key: jax.random.normal(key, (2,)), 3, key)
        seeded = px.ensemble(lambda key: jax.random.normal(key, (2,)), 3, 0).stacked()
    expected = [jax.random.normal(jax.random.fold_in(jax.random.key(0), index), (2,)) for index in range(3)]
    np.testing.assert_array_equal(seeded, jnp.stack(expected))
