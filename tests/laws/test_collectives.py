"""Collectives inside a mapped function mean what they mean under ``jax.vmap``, wherever the elements are.

Expected values and derivatives are those of ``jax.vmap(body, axis_name=...)`` on one device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import paraxis as px
from tests._support import ALL_PLACEMENTS, PLACEMENTS, assert_close, at_night, axis_on, mesh_over, values

NAME = "rows"


def _everything(x: jax.Array) -> dict[str, Any]:
    """Every collective of ``x (size, 2)``."""
    size, c = len(x), jnp.arange(2.0)
    return {
        "psum": x / lax.psum(x, NAME),
        "psum of a tree": lax.psum({"a": x, "b": (x[0], 2)}, NAME),
        "pmean": x * lax.pmean(x, NAME),
        "pmax": lax.pmax(lax.stop_gradient(x), NAME),
        "pmin": lax.pmin(lax.stop_gradient(-x), (NAME,)),
        "all_gather": lax.all_gather(x[0], NAME),
        "all_gather axis=1": lax.all_gather(x, NAME, axis=1),
        "all_gather tiled": lax.all_gather(x, NAME, axis=1, tiled=True),
        "ppermute": lax.ppermute(x, NAME, [(i, (i + 1) % size) for i in range(size)]),
        "pshuffle": lax.pshuffle(x, NAME, list(reversed(range(size)))),
        "all_to_all tiled": lax.all_to_all(x, NAME, split_axis=0, concat_axis=1, tiled=True),
        "psum_scatter": lax.psum_scatter(x, NAME),
        "psum_scatter tiled": lax.psum_scatter(x.ravel(), NAME, tiled=True),
        "axis_index": (lax.axis_index(NAME), x * lax.axis_index(NAME)),
        "axis_size": x / lax.axis_size(NAME),
        "constants": (lax.psum(1, NAME), lax.psum(c, NAME), lax.pmean(2.0, NAME), lax.all_gather(c, NAME)),
    }


def _score(y: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(((jnp.sin(leaf) * (1 + i)).sum() for i, leaf in enumerate(floats)), jnp.zeros(()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_collectives_and_their_derivatives_are_those_of_vmap(placement: tuple[int, int]) -> None:
    axis = axis_on(*placement, name=NAME)
    x, plain = values(axis.size, axis.size, 2), jax.vmap(_everything, axis_name=NAME)

    def here(x: jax.Array) -> Any:
        return px.map_fn(_everything, x, axis), jax.grad(lambda x: _score(px.map_fn(_everything, x, axis)))(x)

    def there(x: jax.Array) -> Any:
        return plain(x), jax.grad(lambda x: _score(plain(x)))(x)

    assert_close(jax.jit(here)(x), jax.jit(there)(x), rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("devices", "size"), ALL_PLACEMENTS)
def test_who_is_sent_nothing_has_zero(devices: int, size: int) -> None:
    """As under ``jax.pmap``, with any number of elements on a device; ``vmap`` asks for whole permutations."""
    axis, kind = px.Axis(NAME, size), [AxisType.Auto, AxisType.Explicit][(devices // 2 + size) % 2]
    to_the_right, x = [(i, i + 1) for i in range(size - 1)], np.asarray(9 * values(size, 2))
    expected = np.concatenate([np.zeros((1, 2)), x[:-1]])

    def here(x: jax.Array) -> jax.Array:
        return px.map_fn(lambda x: lax.ppermute(x, NAME, to_the_right), x, axis)

    with jax.set_mesh(mesh_over(kind, rows=devices)):
        for dtype in (float, int, bool, complex):
            assert_close(here(jnp.asarray(x.astype(dtype))), expected.astype(dtype))
        gradient = jax.grad(lambda y: (here(y) * expected).sum())(jnp.asarray(x))
    assert_close(gradient, np.concatenate([expected[1:], np.zeros((1, 2))]))


@pytest.mark.parametrize(("names", "perm"), [(NAME, [(0, 1), (2, 1), (1, 0)]), (("sets", NAME), [(0, 1)])])
def test_a_permutation_of_two_axes_or_of_an_element_twice_raises(names: Any, perm: Any) -> None:
    """Rules of ``jax.vmap`` would drop one of the axes."""
    of_set = partial(px.map_fn, lambda x: lax.ppermute(x, names, perm), axis=px.Axis(NAME, 3))
    with pytest.raises(px.AxisError, match=r"ppermute over \(.*give one axis, and send from and to each element"):
        px.map_fn(of_set, values(3, 3), px.Axis("sets", 3))


def _in_loops(x: jax.Array) -> Any:
    """Exchange inside every kind of body that JAX has."""

    def step(c: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = jnp.tanh(c + lax.pmean(c, NAME) * t)
        return c, lax.axis_index(NAME) * c

    scanned = lax.scan(step, x, jnp.arange(3.0))
    looped = lax.fori_loop(0, 3, lambda i, c: step(c, i * 1.0)[0], x)
    called = jax.jit(lambda x: lax.psum(x, NAME))(x)
    saved = jax.checkpoint(lambda x: jnp.sin(lax.psum(x, NAME)))(x)
    taken = lax.cond(lax.psum(1, NAME) > 2, lambda x: lax.pmean(x, NAME), lambda x: x, x)
    chosen = lax.switch(1, [lambda x: x, lambda x: lax.all_gather(x, NAME).sum(0)], x)
    inner = jax.vmap(lambda x: lax.psum(x, NAME) * x)(jnp.stack([x, 2 * x]))
    return scanned, looped, called, saved, taken, chosen, inner


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_collectives_work_inside_loops_branches_and_calls(placement: tuple[int, int]) -> None:
    axis, x = axis_on(*placement), values(placement[1], 2)

    def both(mapped: Callable[[jax.Array], Any]) -> Any:
        return jax.jit(lambda x: (mapped(x), jax.grad(lambda x: _score(mapped(x)))(x)))(x)

    here, there = both(partial(px.map_fn, _in_loops, axis=axis)), both(jax.vmap(_in_loops, axis_name=NAME))
    assert_close(here, there, rtol=2e-4, atol=1e-3)


def _own_ways(x: jax.Array) -> Any:
    """Loops that each element leaves by itself, and branches that it takes by itself, with exchange in them.

    Derivatives of some of the branches are refused.
    """
    index = lax.axis_index(NAME)

    def halved(limit: Any, x: jax.Array) -> jax.Array:
        def turn(s: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return s[0] + 1, 0.5 * s[1] + lax.pmean(s[1], NAME)

        return lax.while_loop(lambda s: s[0] < limit, turn, (jnp.zeros((), jnp.int32), x))[1]

    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(x, NAME)

    def outer(s: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return s[0] - 1, halved(s[0] % 3, s[1])

    def step(c: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.switch((c[0] * t > 0.5).astype(jnp.int32), [jnp.sin, mean], c), c

    left = halved(index % 4, x)
    nested = lax.while_loop(lambda s: s[0] > 0, outer, (index % 3, x))[1]
    asked = lax.while_loop(lambda s: s < lax.pmax(s, NAME), lambda s: s + 1.0, jnp.floor(4 * x[0]))
    scanned = lax.scan(lambda c, t: (lax.cond(t < index, mean, jnp.sin, c), halved(t + 1, c)), x, jnp.arange(2))
    taken = lax.switch((x[0] > 0.6).astype(jnp.int32), [jnp.sin, mean], x)
    chosen = jax.jit(lambda x: lax.switch(index % 3, [mean, lambda x: lax.psum(2 * x, NAME), lambda x: -x], x))(x)
    coupled = jax.scipy.sparse.linalg.cg(lambda q: 3 * q + 0.1 * lax.psum(q, NAME), x, maxiter=8)[0]
    return left, nested, asked, scanned, taken, chosen, lax.scan(step, x, jnp.arange(3.0)), coupled


@pytest.mark.parametrize("placement", [(8, 5), *at_night([(1, 5), (2, 5), (5, 5)], 3)], ids=str)
def test_collectives_may_stand_between_branches_that_elements_take_apart(placement: tuple[int, int]) -> None:
    """As under ``vmap``. Devices that took different branches, or turns, would wait for each other forever."""
    axis, x = axis_on(*placement), values(placement[1], 2)
    here = jax.jit(partial(px.map_fn, _own_ways, axis=axis))(x)
    assert_close(here, jax.jit(jax.vmap(_own_ways, axis_name=NAME))(x), rtol=2e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", [(1, 3), (2, 7), (8, 3), (8, 10)], ids=str)
def test_collectives_may_be_differentiated_inside_the_body(placement: tuple[int, int]) -> None:
    """Each element differentiates its own loss, which hears of the others: scaled as under ``vmap``."""
    axis, x = axis_on(*placement), values(placement[1], 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return ((w * x - lax.pmean(w * x, NAME)) ** 2).sum() + lax.psum(w.sum(), NAME) ** 2

        value, gradient = jax.value_and_grad(loss)(w)
        return value, gradient, lax.pmean(gradient, NAME)

    here = jax.jit(lambda w, x: px.map_fn(step, (px.broadcast(w, axis), x), axis))(x[0], x)
    assert_close(here, jax.vmap(step, in_axes=(None, 0), axis_name=NAME)(x[0], x), rtol=1e-4, atol=1e-4)


UNDER = {"data": (2, ("data",)), "b": (4, ("a", "b"))}


@pytest.mark.parametrize("name", UNDER)
def test_collectives_over_the_mesh_axis_under_the_elements_raise(name: str) -> None:
    devices, names = UNDER[name]
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape((2,) * len(names)), names)
    axis = px.Axis("clients", 8, mesh=mesh, over=names)
    with pytest.raises(px.AxisError, match=rf"names the mesh axis '{name}'.*px\.psum\(x, 'clients'\)"):
        px.map_fn(lambda x: lax.psum(x, name), values(8), axis)


def test_collectives_between_elements_that_run_apart_raise() -> None:
    with pytest.raises(px.AxisError, match=r"at_once=2, so elements do not run together and cannot exchange values"):
        px.map_fn(lambda x: px.psum(x, NAME), values(8), axis_on(2, 8, at_once=2))
    with pytest.raises(px.AxisError, match="lowering='unroll', so elements do not run together"):
        px.map_fn(lambda x: px.psum(x, NAME), values(8), axis_on(2, 8), lowering="unroll")


def test_collectives_may_stand_in_a_function_with_a_derivative_of_its_own() -> None:
    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        return lax.psum(x, NAME)

    total.defvjp(lambda x: (total(x), None), lambda _, ct: (3 * ct,))
    axis, x = axis_on(2, 5), values(5)
    assert_close(px.map_fn(total, x, axis), np.full(5, x.sum()))
    assert_close(jax.grad(lambda x: px.map_fn(total, x, axis).sum())(x), np.full(5, 3.0))

    @jax.custom_jvp
    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(x, NAME)

    mean.defjvps(lambda t, _, x: 2 * t)
    assert_close(px.map_fn(mean, x, axis), np.full(5, x.mean()))
    assert_close(jax.grad(lambda x: px.map_fn(mean, x, axis).sum())(x), np.full(5, 2.0))


def test_collectives_outside_a_mapped_function_raise() -> None:
    for collective in (px.psum, px.pmean, px.pmax, px.pmin, px.all_gather):
        with pytest.raises(px.AxisError, match=rf"{collective.__name__}: axis 'rows' of 4 elements is not being"):
            collective(1.0, axis_on(2, 4))
    for query in (px.axis_index, px.axis_size):
        with pytest.raises(px.AxisError, match=r"\(nothing is\)"):
            query(NAME)
    with pytest.raises(px.AxisError, match=r"\('rows' of 4 elements is\)"):
        px.map_fn(lambda x: px.psum(x, "clients"), values(4), axis_on(2, 4))
