"""Law: members are trained without a collective; an average over them is one all-reduce and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import paraxis as px
from paraxis.testing import Communication, communication
from tests._support import values
from tests.ensembles._kinds import DICT, X, Y, mesh_of

# (members, devices): one each; several each; those that do not divide; a device without a member.
PLACES = [(7, 2), (2, 2), (8, 2), (5, 8), (8, 8), (10, 8)]
LOWERINGS = ("vmap", "unroll", "auto")
CLASSES, ROWS = 4, 6


def some(size: int, devices: int, **options: Any) -> px.Ensemble:
    """Members like those of ``make_dict``, but quicker to make."""
    first, last = values(size, 3, 8), values(size, 8, 4)
    make = lambda key, first, last: {"first": first, "last": last}  # noqa: E731
    return px.ensemble(make, size, 0, first, last, apply=DICT.apply, mesh=mesh_of(devices), **options)


def of_step(ens: px.Ensemble, step: Any, *args: Any, in_axes: Any = None) -> Communication:
    return communication(ens.train, step, *args, in_axes=in_axes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("size", "devices"), PLACES)
def test_a_train_step_communicates_nothing(size: int, devices: int, lowering: Any) -> None:
    ens = some(size, devices, lowering=lowering)
    assert of_step(ens, DICT.step, X, Y).total_count == 0
    ens.train(DICT.step, X, Y)
    assert of_step(ens, DICT.step, X, Y).total_count == 0  # the members lie otherwise now
    own = values(size, *X.shape), jnp.tile(Y, (size, 1))
    assert of_step(ens, DICT.step, *own, in_axes=0).total_count == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("size", "devices"), PLACES)
def test_an_average_is_one_all_reduce_of_its_own_size_and_moments_are_two(
    size: int, devices: int, lowering: Any
) -> None:
    ens = some(size, devices, lowering=lowering)
    for count, average in ((1, "softmax"), (2, "moments")):
        found = communication(
            lambda x, average=average: ens.predict(x, average=average),  # pyright: ignore
            X,
        )
        assert (found.total_count, found.count["all_reduce"]) == (count, count)
        assert found.total_bytes == count * 4 * ROWS * CLASSES


@pytest.mark.parametrize(("size", "devices"), [(7, 2), (8, 8)])
def test_members_that_speak_to_each_other_are_found_to(size: int, devices: int) -> None:
    """The check can fail."""

    def pulled(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p: 0.5 * (p + px.pmean(p, "members")), params)

    found = of_step(some(size, devices), pulled, X)
    assert found.count["all_reduce"] > 0
    assert found.total_bytes >= 4 * (3 * 8 + 8 * 4)
