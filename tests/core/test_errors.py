"""Bad input is refused with what was received, what was expected, and the line to write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

ROWS = px.Axis("rows", 8)
X = jnp.ones((8, 3))

AXES = {
    "empty name": (lambda: px.Axis("", 3), r"name must be a non-empty string, got ''; write px.Axis\('clients', 8\)"),
    "name of another type": (lambda: px.Axis(3, 3), "name must be a non-empty string, got 3"),  # pyright: ignore
    "size zero": (lambda: px.Axis("a", 0), "size must be an integer of at least 1, got 0"),
    "size negative": (lambda: px.Axis("a", -2), "size must be an integer of at least 1, got -2"),
    "size a float": (lambda: px.Axis("a", 2.0), "size must be an integer of at least 1, got 2.0"),  # pyright: ignore
    "size a boolean": (lambda: px.Axis("a", True), "size must be an integer of at least 1, got True"),
    "at_once zero": (lambda: px.Axis("a", 8, at_once=0), r"at_once must be .* write px.Axis\('a', 8, at_once=8\)"),
    "mesh of another type": (lambda: px.Axis("a", 8, mesh=4), "mesh must be a jax.sharding.Mesh, got int"),  # pyright: ignore
    "over nothing": (
        lambda: px.Axis("a", 8, over=()),
        r"over must be a mesh axis or a tuple of different ones, got \(\)",
    ),
    "over twice": (lambda: px.Axis("a", 8, over=("d", "d")), r"tuple of different ones, got \('d', 'd'\)"),
}


@pytest.mark.parametrize("case", AXES)
def test_axes(case):
    make, message = AXES[case]
    with pytest.raises(px.AxisError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)


LEAVES = {
    "wrong size": (lambda: px.map_fn(jnp.sin, jnp.ones(5), ROWS), r"map_fn: args has shape \(5,\).*\(8, \.\.\.\)"),
    "its path is named": (
        lambda: px.map_fn(lambda t, y: y, ({"w": [jnp.ones(8), 2.0]}, X), ROWS),
        r"args\[0\]\['w'\]\[1\] has shape \(\).*write px.broadcast\(…, 'rows'\)",
    ),
    "not an array": (lambda: px.map_fn(lambda x: x, ("text",), ROWS), r"args\[0\] is a str, not an array"),
    "a reduction's": (lambda: px.reduce_mean({"a": jnp.ones(3)}, ROWS), r"reduce_mean: x\['a'\] has shape \(3,\)"),
    "a mask of numbers": (
        lambda: px.reduce_sum(X, ROWS, where=jnp.ones(8)),
        r"where must be one boolean per element, bool\[8\], got float32\[8\]; write where=mask > 0",
    ),
    "a mask of rows": (lambda: px.reduce_sum(X, ROWS, where=jnp.ones((8, 3), bool)), r"got bool\[8, 3\]"),
    "a mask too short": (lambda: px.reduce_sum(X, ROWS, where=jnp.ones(3, bool)), r"where has shape \(3,\)"),
    "weights of rows": (
        lambda: px.reduce_weighted_mean(X, jnp.ones((8, 3)), ROWS),
        r"w has shape \(8, 3\), but there is one weight per element: \(8,\)",
    ),
    "weights of another tree": (
        lambda: px.reduce_weighted_mean({"a": X}, {"b": jnp.ones(8)}, ROWS),
        "w must be one array .* or a tree of them like x",
    ),
    "scattered": (lambda: px.scatter(np.ones(3), ROWS), r"scatter: x has shape \(3,\)"),
    "gathered": (lambda: px.gather(np.ones(3), ROWS), r"gather: x has shape \(3,\)"),
}


@pytest.mark.parametrize("case", LEAVES)
def test_leaves(case):
    call, message = LEAVES[case]
    with pytest.raises(px.ShapeError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)


VERBS = ["broadcast", "map_fn", "scatter", "gather", "reduce_sum", "reduce_any"]


@pytest.mark.parametrize("verb", VERBS)
def test_outside_a_program_an_axis_is_needed(verb):
    call = getattr(px, verb)
    args = (jnp.sin, X) if verb == "map_fn" else (X,)
    both = rf"{verb}: .*px.{verb}\(…, px.Axis\('clients', 8\)\), or .*@px.program\(clients=8\)"
    with pytest.raises(px.ScopeError, match=both):
        call(*args)
    with pytest.raises(px.ScopeError, match=f"{verb}: axis 'rows' is only a name"):
        call(*args, "rows")
    with pytest.raises(px.ScopeError, match=f"{verb}: axis must be a px.Axis or the name .* got int"):
        call(*args, 8)


@pytest.mark.parametrize("collective", ["psum", "pmean", "pmax", "pmin", "all_gather"])
def test_collectives_belong_in_a_body(collective):
    with pytest.raises(px.CollectiveError, match=f"{collective}: axis 'rows' is not being mapped here \\(nothing is"):
        getattr(px, collective)(X, ROWS)
    with pytest.raises(px.CollectiveError, match="the axes being mapped are 'rows'"):
        px.map_fn(lambda x: getattr(px, collective)(x, "other"), X, ROWS)


def test_lowerings():
    with pytest.raises(
        px.LoweringError, match="lowering must be one of 'auto', 'vmap', 'unroll', 'dispatch', got 'loop'"
    ):
        px.map_fn(jnp.sin, X, ROWS, lowering="loop")  # pyright: ignore
    with pytest.raises(px.LoweringError, match=r"needs concrete values .* write lowering='unroll'"):
        jax.jit(lambda x: px.map_fn(jnp.sin, x, ROWS, lowering="dispatch"))(X)
    for lowering in ("unroll", "dispatch"):
        with pytest.raises(px.LoweringError, match=f"lowering='{lowering}' runs the elements .* apart"):
            px.map_fn(lambda x: px.psum(x, ROWS), X, ROWS, lowering=lowering)


def test_an_error_in_the_body_is_the_users_own_and_leaves_no_trace():
    with pytest.raises(ZeroDivisionError, match="mine"):
        px.map_fn(_fails, X, ROWS)
    assert px.map_fn(lambda x: px.axis_index(ROWS), X, ROWS).tolist() == list(range(8))
    with pytest.raises(px.CollectiveError, match="nothing is being mapped"):
        px.axis_index(ROWS)


def _fails(x):
    raise ZeroDivisionError("mine")
