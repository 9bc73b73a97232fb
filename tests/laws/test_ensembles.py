"""Law: members and predictions are those of a plain loop over single members, wherever and however they run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import paraxis as px
from paraxis.testing import communication
from tests._members import DICT, KEY, KINDS, X, Y, alone, arrays_of, batch, make_dict, mesh_of
from tests._problems import softmax
from tests._support import values

# The first and the last of the table, which the fast lane runs, are several members to a device that do not divide, and
# more devices than members.
SIZES, DEVICES, LOWERINGS = (5, 1, 2, 7), (2, 1, 3, 8), ("vmap", "unroll", "auto")
NUM_STEPS = 3

# Each two of size, lowering and number of devices meet once.
PAIRS = [
    (size, lowering, DEVICES[(i + j) % len(DEVICES)])
    for i, size in enumerate(SIZES)
    for j, lowering in enumerate(LOWERINGS)
]


def check(name: str, size: int, devices: int, **options: Any) -> None:
    """Some steps and a prediction, against each member made and trained for itself."""
    kind = KINDS[name]
    ens = px.ensemble(kind.make, size, KEY, apply=kind.apply, mesh=mesh_of(devices), **options)
    losses = [np.asarray(ens.train(kind.step, *batch(number))) for number in range(NUM_STEPS)]
    expected = [alone(name, index, NUM_STEPS) for index in range(size)]
    np.testing.assert_allclose(losses, np.stack([e.losses for e in expected], 1), rtol=1e-4, atol=1e-5)
    for index, member in enumerate(ens):
        for a, e in zip(arrays_of(member), expected[index].arrays, strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
            np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-5)
    logits = np.stack([e.logits for e in expected])
    np.testing.assert_allclose(ens.members(X), logits, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(ens.predict(X), softmax(logits).mean(0), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("size", "lowering", "devices"), PAIRS)
def test_members_are_those_of_a_loop(size: int, lowering: Any, devices: int, name: str) -> None:
    check(name, size, devices, lowering=lowering)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "lowering"), [(5, "vmap"), (7, "unroll")])
def test_at_once_and_donation_change_nothing_of_members(size: int, lowering: Any) -> None:
    check("dict", size, 2, lowering=lowering, at_once=2, donate=True)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", ["auto", "vmap"])
def test_members_are_the_same_on_an_explicit_mesh(lowering: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("members",), axis_types=(AxisType.Explicit,))
    here, there = (
        px.ensemble(make_dict, 5, KEY, apply=DICT.apply, mesh=m, lowering=lowering) for m in (mesh, mesh_of(2))
    )
    for ens in (here, there):
        ens.train(DICT.step, *batch(0))
    np.testing.assert_allclose(here.predict(X), there.predict(X), rtol=1e-5)
    np.testing.assert_allclose(here.members(X), there.members(X), rtol=1e-5)
    for change in (lambda ens: [ens[3]], lambda ens: ens.drop(1), lambda ens: ens[1:], lambda ens: ens.add(there[0])):
        for a, b in zip(change(here), change(there), strict=True):
            jax.tree.map(np.testing.assert_allclose, a, b)


# (members, devices): one each; several each; those that do not divide; a device without a member.
PLACES = [(7, 2), (2, 2), (8, 2), (5, 8), (8, 8), (10, 8)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("size", "devices"), PLACES)
def test_a_step_of_members_sends_nothing_and_an_average_one_all_reduce(size: int, devices: int, lowering: Any) -> None:
    ens = px.ensemble(make_dict, size, KEY, apply=DICT.apply, mesh=mesh_of(devices), lowering=lowering)
    own = values(size, *X.shape), jnp.tile(Y, (size, 1))
    for _ in range(2):  # as they were made, and as they lie after a step
        assert communication(ens.train, DICT.step, X, Y).total_count == 0
        assert communication(ens.train, DICT.step, *own, in_axes=0).total_count == 0
        ens.train(DICT.step, X, Y)
    for count, predict in ((1, ens.predict), (2, lambda x: ens.predict(x, average="moments"))):
        found = communication(predict, X)
        assert (found.total_count, found.count["all_reduce"], found.total_bytes) == (count, count, count * 4 * 6 * 4)
