"""How a program's axes are declared, left out, named, and laid over the devices."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import paraxis as px


def summed(x):
    return px.reduce_sum(x)


@pytest.mark.parametrize(
    "decorator",
    [
        px.program(clients=3),
        px.program({"clients": 3}),
        px.program(placements={"clients": 3}),
        px.program(clients=px.Axis("clients", 3, at_once=1)),
        px.program(clients=np.int64(3)),
    ],
    ids=["keyword", "mapping", "placements", "axis", "numpy"],
)
def test_every_spelling_declares_the_axis(decorator):
    assert decorator(summed)(jnp.arange(3.0)) == 3.0
    assert [(axis.name, axis.size) for axis in decorator(summed).axes] == [("clients", 3)]


def test_the_only_axis_may_be_left_out_named_or_passed():
    @px.program(clients=3)
    def thrice(x):
        return px.reduce_sum(x), px.reduce_sum(x, "clients"), px.reduce_sum(x, px.Axis("clients", 3))

    assert [float(y) for y in thrice(jnp.arange(3.0))] == [3.0, 3.0, 3.0]


def test_several_axes_must_be_named():
    @px.program(pods=2, clients=3)
    def unnamed(x):
        return px.reduce_sum(x)

    with pytest.raises(px.AxisError, match=r"the program has 'pods', 'clients'; write px\.reduce_sum\(…, 'clients'\)"):
        unnamed(jnp.zeros((2, 3)))


def test_a_name_that_is_not_declared():
    @px.program(clients=3)
    def misspelt(x):
        return px.reduce_sum(x, "client")

    with pytest.raises(px.AxisError, match=r"there is no axis 'client', and the program has 'clients'"):
        misspelt(jnp.zeros(3))


# --- the devices are shared out --------------------------------------------------------------------------------------


def factorisations(number, parts):
    """All tuples of so many positive integers whose product is ``number``, by trying every tuple."""
    return [t for t in itertools.product(range(1, number + 1), repeat=parts) if np.prod(t) == number]


def best_split(sizes, number):
    """Simulate every split: put each element on its device, count, take the least loaded; the larger first factor."""

    def busiest(split):
        blocks = [-(-size // part) for size, part in zip(sizes, split, strict=True)]
        owners = [
            tuple(index // block for index, block in zip(element, blocks, strict=True))
            for element in itertools.product(*map(range, sizes))
        ]
        return max(map(owners.count, set(owners)))

    splits = sorted(factorisations(number, len(sizes)), reverse=True)
    return min(splits, key=busiest)


def devices_by_axis(text):
    return tuple(int(n) for n in re.findall(r"=\d+ on (\d+) device", text))


@pytest.mark.parametrize(
    "sizes", [(4, 6), (2, 3), (1, 9), (9, 1), (8, 8), (3, 5), (5, 2), (7, 7), (2, 2, 2), (2, 3, 4), (1, 5, 3), (2, 16)]
)
def test_the_devices_are_shared_out_as_brute_force_says(sizes):
    declared = px.program(dict(zip(["a", "b", "c"], sizes, strict=False)))(summed)
    assert devices_by_axis(repr(declared)) == best_split(sizes, jax.device_count())


@pytest.mark.skipif("len(__import__('jax').devices()) != 8")
def test_repr_says_where_the_axes_lie():
    def loss(x):
        return x

    assert repr(px.program(clients=1000)(loss)) == "<program loss: clients=1000 on 8 devices (125 each)>"
    assert repr(px.program(pods=4, clients=250)(loss)) == (
        "<program loss: pods=4 on 4 devices (1 each), clients=250 on 2 devices (125 each)>"
    )
    chunked = px.program(clients=px.Axis("clients", 1000, at_once=25))(loss)
    assert repr(chunked) == "<program loss: clients=1000 on 8 devices (125 each, 25 at once)>"


@pytest.mark.skipif("len(__import__('jax').devices()) != 8")
def test_a_mesh_in_force_decides_instead():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("pods", "clients"))
    with jax.set_mesh(mesh):
        assert devices_by_axis(repr(px.program(pods=4, clients=250)(summed))) == (2, 4)


def test_an_axis_with_a_wish_keeps_it():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    axis = px.Axis("clients", 3, mesh=mesh, over="data")
    declared = px.program(clients=axis)(summed)
    assert repr(declared) == "<program summed: clients=3 on 1 device (3 each)>"
    assert declared(jnp.arange(3.0)) == 3.0
