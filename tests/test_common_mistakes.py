"""Mistakes that users make, and the errors that they get before a wrong number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px

pytestmark = pytest.mark.floor

ROWS = px.Axis("rows", 4)
X = np.arange(4.0, dtype=np.float32)
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an axis without elements": (lambda: px.Axis("rows", 0), r"size must be an integer of at least 1"),
    "a layout that there is not": (lambda: px.Axis("rows", 4, layout="round"), "layout must be one of 'blocks', 'cy"),  # pyright: ignore
    "an axis that is only a name": (lambda: px.broadcast(X, "b"), "there is no axis 'b', and this is in no"),
    "a missing axis": (lambda: px.program(a=4)(lambda x: px.reduce_sum(x, "b"))(X), "'b', and the program has 'a'"),
    "one of several axes": (lambda: px.program(a=4, b=2)(px.reduce_max)(X), "the program has 'a', 'b'"),
    "a program without axes": (lambda: px.program()(jnp.sin), "no axis was given"),
    "a decorator without parentheses": (lambda: px.program(lambda x: x), "write @px.program"),  # pyright: ignore
    "a leaf of another size": (
        lambda: px.map_fn(lambda p, x: x, ({"w": [np.zeros((5, 2))]}, X), ROWS),
        r"map_fn: args\[0\]\['w'\]\[0\] has shape \(5, 2\).*\(4, \.\.\.\)",
    ),
    "a leaf of another size under a derivative": (
        lambda: jax.grad(lambda w: px.map_fn(lambda w, x: w * x, (px.broadcast(w, ROWS), X[:3]), ROWS).sum())(1.0),
        r"map_fn: args\[1\] has shape \(3,\)",
    ),
    "a mask of numbers": (lambda: px.reduce_sum(X, ROWS, where=X), r"bool\[4\], got an array float32\[4\]"),
    "a seed for a key": (lambda: px.keys(0, ROWS), "invalid PRNG key data|unexpected PRNG key type"),  # pyright: ignore
    "a lowering that there is not": (lambda: px.map_fn(jnp.sin, X, ROWS, lowering="fast"), "'unroll'"),  # pyright: ignore
    "a collective along an axis of another size": (
        lambda: px.map_fn(lambda x: px.psum(x, px.Axis("rows", 99)), X, ROWS),
        "not being mapped here .'rows' of 4 elements is",
    ),
    "a collective in jax.vmap": (
        lambda: jax.vmap(lambda x: px.psum(x, "i"), axis_name="i")(X),
        r"jax.lax.psum\(…, 'i'",
    ),
    "an axis, and parts of one": (lambda: members(px.Axis("a", 2), mesh=MESH), "which has mesh, over and at_once"),
    "pmap of nothing": (lambda: px.pmap(lambda: 1)(), "no argument is mapped"),
    "pmap of two sizes": (
        lambda: px.pmap(lambda x, y, b: x)(np.ones(3), {"a": np.ones(3)}, b=np.ones(4)),
        r"\(args\[0\]: 3, kwargs\['b'\]: 4\)",
    ),
    "pmap of a scalar": (lambda: px.pmap(lambda x: x)(2.0), r"args\[0\]: no axis 0 in \(\)"),
    "pmap of too few in_axes": (lambda: px.pmap(jnp.add, in_axes=(0,))(X, X), r"in_axes=\(0,\) does not fit"),
    "pmap of other out_axes": (lambda: px.pmap(lambda x: (x, x), out_axes=(0,) * 3)(X), "does not fit"),
}


WHOLE = "whole batch, which the compiler divides; leave lax.pmean out, and axis_name= too"
OUTSIDE = "names no axis; combine its results outs"
MEMBERS, ALL_ROWS = r"the axis of the members, px.psum\(x, 'members'\)", "a function of all rows; leave the axis out"
NET, X2 = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), np.ones((8, 2), np.float32)


def members(size: Any = 3, **options: Any) -> px.Ensemble:
    return px.ensemble(lambda key: jax.random.normal(key, (2,)), size, 0, **options)


def state() -> px.TrainState:
    return px.TrainState.create({"w": jnp.zeros(2)}, optax.sgd(0.1))


# Front ends, and what each says where its function names an axis that it does not have.
NAMERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ensemble": (lambda f: px.ensemble(lambda key: f(jax.random.normal(key)), 3, 0), MEMBERS),
    "ens.train": (lambda f: members().train(lambda w, x: w + f(w), X2), MEMBERS),
    "ens.members": (lambda f: members(apply=lambda w, x: f(x @ w)).members(X2), MEMBERS),
    "px.train_step": (lambda f: px.train_step(lambda p, x: jnp.mean(f(x @ p["w"])))(state(), X2), WHOLE),
    "px.eval_step": (lambda f: px.eval_step(lambda p, x: {"a": f(x @ p["w"])})(state(), X2), WHOLE),
    "Parallel": (lambda f: px.Parallel(lambda net, x: f(net(x)), NET)(X2), r"devices, px.pmean\(x, 'device'\)"),
    "Vectorize": (lambda f: px.Vectorize(lambda net, x: f(net(x)), NET)(X2), OUTSIDE),
    "GradValues": (lambda f: px.GradValues(lambda net, x: f(net(x).sum()), NET)(X2), OUTSIDE),
    "Jit": (lambda f: px.Jit(lambda net, x: f(net(x)), NET)(X2), OUTSIDE),
    "LBFGS": (lambda f: px.solve.LBFGS(lambda w: f(jnp.sum(w**2))).run(X), ALL_ROWS),
    "ProximalGradient": (lambda f: px.solve.ProximalGradient(lambda w: f(jnp.sum(w**2))).run(X), ALL_ROWS),
    "Stream": (
        lambda f: px.Stream(at_once=1).run(px.program(rows=8)(f), px.Groups.of_arrays(X2)),
        r"a program names its axes, @px.program\(rows=8\)",
    ),
}


@pytest.mark.parametrize("collective", [px.psum, jax.lax.psum], ids=["px", "lax"])
@pytest.mark.parametrize("name", NAMERS)
def test_an_axis_name_that_a_front_end_does_not_know_is_answered_by_it(name: str, collective: Any) -> None:
    run, answer = NAMERS[name]
    with pytest.raises(px.AxisError, match=rf"nope(.|\n)*: .*{answer}"):
        run(lambda x: collective(x, "nope"))
    with pytest.raises(NameError, match="name 'nope' is not defined"):  # one of Python's is left alone
        run(lambda x: nope)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


MESH = Mesh(np.array(jax.devices()[:1]), ("data",))
PLACES: dict[str, tuple[Callable[[], Any], str]] = {
    "ensemble": (lambda: members(mesh=MESH), r"px.ensemble\(…, mesh=mesh, over='data'\)"),
    "Parallel": (lambda: px.Parallel(NET, mesh=MESH)(X2), r"px.Parallel\(…, mesh=mesh, over='data'\)"),
    "train_step": (
        lambda: px.train_step(jnp.mean, axis=px.Axis("a", 1, mesh=MESH))(state(), X2),
        "axis='data', a name",
    ),
    "rows": (lambda: px.solve.rows(X2, X2[:, 0], axis="nope"), r"write axis=px.Axis\('rows', 8\)"),  # pyright: ignore
    "a table's rows": (
        lambda: px.solve.rows(px.Table.of_arrays(X2, X2[:, 0]), axis="nope", engine=px.Stream(at_once=2)),  # pyright: ignore
        r"write axis=px.Axis\('rows', 8\)",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_an_axis_that_a_front_end_cannot_place_is_answered_by_it(name: str) -> None:
    call, answer = PLACES[name]
    with pytest.raises(px.AxisError, match=answer):
        call()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_common_mistake_is_an_error_that_names_it(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises((px.ParaxisError, TypeError), match=message):
        call()


OLD_WORDS: dict[str, Callable[[], Any]] = {  # each for one release
    "ensemble: name= is now called axis_name=": lambda: members(name="a"),
    "reduce_weighted_mean: w= is now called weights=": lambda: px.reduce_weighted_mean(X, w=X, axis=ROWS),  # pyright: ignore
    "Stream: folder= is now called checkpoint=": lambda: px.Stream(1, folder="a"),  # pyright: ignore
    "Stream: verbose= is now called progress=": lambda: px.Stream(1, verbose=True),  # pyright: ignore
}


@pytest.mark.parametrize("warning", OLD_WORDS)
def test_an_old_word_works_and_warns_where_it_was_written(warning: str) -> None:
    with pytest.warns(DeprecationWarning, match=warning) as caught:
        OLD_WORDS[warning]()
    assert caught[0].filename == __file__
