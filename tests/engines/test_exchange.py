"""Values that elements exchange in a body: each collective and keyword, in loops, branches and calls, by each engine.

Sums, means and extremes are reductions, and give what ``jax.vmap`` gives. All others need every element at once; the
error names the collective and the line, wherever it stands.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import paraxis as px
from tests._support import assert_close, values

N = 4
NAME = "clients"
AXIS = px.Axis(NAME, N)
X = np.asarray(values(N, N))
PAIRS = [[0, 1], [2, 3]]
HERE = re.escape(__file__)

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: lax.psum(x, NAME),
    "pmean": lambda x: lax.pmean(x, NAME),
    "pmax": lambda x: lax.pmax(x, NAME),
    "pmin": lambda x: lax.pmin(x, NAME),
    "several at once": lambda x: lax.psum((x, {"b": 2 * x}), NAME)[1]["b"],
}
ALL_AT_ONCE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all_gather": ("all_gather", lambda x: lax.all_gather(x, NAME).sum(0)),
    "all_gather, axis": ("all_gather", lambda x: lax.all_gather(x, NAME, axis=1).sum(1)),
    "all_gather, tiled": ("all_gather", lambda x: lax.all_gather(x, NAME, tiled=True)[:N]),
    "px.all_gather": ("all_gather", lambda x: px.all_gather(x, AXIS).sum(0)),
    "ppermute": ("ppermute", lambda x: lax.ppermute(x, NAME, [(0, 1), (1, 0)])),
    "psum_scatter": ("reduce_scatter", lambda x: x + lax.psum_scatter(x, NAME)),
    "psum_scatter, tiled": ("reduce_scatter", lambda x: x + lax.psum_scatter(x, NAME, tiled=True)),
    "psum_scatter, dimension": (
        "reduce_scatter",
        lambda x: x + lax.psum_scatter(x[None], NAME, scatter_dimension=1)[0],
    ),
    "all_to_all": ("all_(gather|to_all)", lambda x: lax.all_to_all(x, NAME, 0, 0)),
    "all_to_all, tiled": ("all_(gather|to_all)", lambda x: lax.all_to_all(x, NAME, 0, 0, tiled=True)),
}
IN_GROUPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "psum": ("psum", lambda x: lax.psum(x, NAME, axis_index_groups=PAIRS)),
    "pmean": ("psum", lambda x: lax.pmean(x, NAME, axis_index_groups=PAIRS)),
    "pmax": ("pmax", lambda x: lax.pmax(x, NAME, axis_index_groups=PAIRS)),
    "pmin": ("pmin", lambda x: lax.pmin(x, NAME, axis_index_groups=PAIRS)),
    "all_gather": ("all_gather", lambda x: lax.all_gather(x, NAME, axis_index_groups=PAIRS).sum(0)),
    "psum_scatter": (
        "reduce_scatter",
        lambda x: x + lax.psum_scatter(x[:2], NAME, axis_index_groups=PAIRS),
    ),
    "all_to_all": (
        "all_to_all",
        lambda x: x + lax.all_to_all(x[:2], NAME, 0, 0, axis_index_groups=PAIRS).sum(),
    ),
}
PLACES: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "the body": lambda f: f,
    "a call": lambda f: jax.jit(f),
    "a loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: 0.1 * f(x), x),
    "a loop of its own": lambda f: (
        lambda x: lax.while_loop(lambda c: c[0] < 1 + x[0], lambda c: (c[0] + 1, 0.1 * f(c[1])), (0.0, x))[1]
    ),
    "a branch": lambda f: lambda x: lax.cond(x[0] > 1, f, lambda x: 2 * x, x),
    "a branch in a loop": lambda f: (
        lambda x: lax.fori_loop(0, 2, lambda i, x: lax.cond(i > 0, lambda x: 0.1 * f(x), lambda x: x, x), x)
    ),
    "a call in a loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: 0.1 * jax.jit(f)(x), x),
}
ENGINES: dict[str, Callable[[], Any]] = {
    "Stream": lambda: px.Stream(at_once=1),
    "Pool": lambda: px.Pool(at_once=1, workers=1),
}


def in_place(place: str, f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: px.map_fn(PLACES[place](f), (x,), AXIS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_those_of_all_elements_wherever_they_stand(name: str, place: str) -> None:
    f = REDUCTIONS[name]
    expected = np.asarray(jax.vmap(PLACES[place](f), axis_name=NAME)(X))
    assert_close(px.Stream(at_once=1).run(in_place(place, f), px.Groups.of_arrays(X)), expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ALL_AT_ONCE)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_needs_all_elements_at_once_is_refused_wherever_it_stands(engine: str, name: str, place: str) -> None:
    called, f = ALL_AT_ONCE[name]
    text = rf"'clients' exchange values by {called}, at {HERE}:\d+ .*which needs all of them at once.*write px\.psum"
    with pytest.raises(px.CollectiveError, match=text):
        ENGINES[engine]().run(in_place(place, f), px.Groups.of_arrays(X))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("engine", [*ENGINES, "the mesh"])
def test_groups_of_elements_are_refused_with_two_axes_to_write(engine: str, name: str, place: str) -> None:
    called, f = IN_GROUPS[name]
    text = rf"{called} with axis_index_groups is not defined on axis 'clients', at {HERE}:\d+ .*px\.Axis\('groups', 2\)"
    fn = in_place(place, f)
    with pytest.raises(px.CollectiveError, match=text):
        _ = fn(X) if engine == "the mesh" else ENGINES[engine]().run(fn, px.Groups.of_arrays(X))


def test_groups_of_another_axis_around_the_streamed_one_are_refused_likewise() -> None:
    models = px.Axis("models", 4)

    def model(scale: Any, x: Any) -> Any:
        total = px.reduce_sum(px.map_fn(lambda s, x: s * x, (px.broadcast(scale, AXIS), x), AXIS), AXIS)
        return lax.psum(total, "models", axis_index_groups=PAIRS)

    def program(x: Any) -> Any:
        return px.map_fn(model, (jnp.arange(4.0), px.broadcast(x, models)), models)

    with pytest.raises(px.CollectiveError, match=rf"psum with axis_index_groups .* axis 'models', at {HERE}"):
        px.Stream(at_once=1).run(program, px.Groups.of_arrays(X))


def test_what_the_error_says_to_write_for_groups_does_what_they_do() -> None:
    groups, members = px.Axis("groups", 2), px.Axis(NAME, 2)

    def program(x: Any) -> Any:
        return px.map_fn(lambda x: px.map_fn(lambda x: x - px.pmean(x, members), x, members), x, groups)

    pairs = X.reshape(2, 2, N)
    expected = pairs - pairs.mean(1, keepdims=True)
    assert_close(np.asarray(program(pairs)), expected)
    assert_close(px.Stream(at_once=1).run(program, px.Groups.of_arrays(pairs)), expected)
