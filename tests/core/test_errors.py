"""Every error of the core says what was received, what was expected, and the line to write instead."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import axis_on, values

ROWS = px.Axis("rows", 4)
X = np.arange(4.0)

CASES: dict[str, tuple[Callable[[], Any], type[px.ParaxisError], str]] = {
    # what an axis is
    "no name": (lambda: px.Axis("", 4), px.AxisError, r"name must be a non-empty string, got ''; write px\.Axis\("),
    "name of another type": (lambda: px.Axis(4, 4), px.AxisError, r"non-empty string, got 4; write"),  # pyright: ignore
    "size zero": (lambda: px.Axis("a", 0), px.AxisError, r"Axis 'a': size must be an integer of at least 1, got 0"),
    "size half": (lambda: px.Axis("a", 2.5), px.AxisError, r"got 2\.5; write px\.Axis\('a', 8\)"),  # pyright: ignore
    "size true": (lambda: px.Axis("a", True), px.AxisError, r"size must be an integer of at least 1, got True"),
    "at_once zero": (lambda: px.Axis("a", 4, at_once=0), px.AxisError, r"at_once must be .*'a', 4, at_once=8\)"),
    "mesh of another type": (
        lambda: px.Axis("a", 4, mesh=jax.devices()),  # pyright: ignore
        px.AxisError,
        r"mesh must be a jax\.sharding\.Mesh, got list; write px\.Axis\('a', 4, mesh=jax\.sharding\.Mesh",
    ),
    "over nothing": (lambda: px.Axis("a", 4, over=()), px.AxisError, r"over must be a mesh axis or a tuple"),
    "over one twice": (lambda: px.Axis("a", 4, over=("b", "b")), px.AxisError, r"of different ones, got \('b', 'b'\)"),
    # which axis is meant
    "no axis": (lambda: px.reduce_sum(X), px.ScopeError, r"reduce_sum: no axis was given, .*@px\.program\(clients=8\)"),
    "only a name": (
        lambda: px.broadcast(X, "b"),
        px.ScopeError,
        r"broadcast: axis 'b' is only a name, .*px\.Axis\('b'",
    ),
    "no such axis": (
        lambda: px.program(a=4)(lambda x: px.reduce_sum(x, "b"))(X),
        px.ScopeError,
        r"no axis 'b' in this program, which has 'a'; write px\.reduce_sum\(…, 'a'\)",
    ),
    "several axes": (
        lambda: px.program(a=4, b=2)(lambda x: px.reduce_max(x))(X),
        px.ScopeError,
        r"this program has several axes, 'a', 'b'; say which: px\.reduce_max\(…, 'b'\)",
    ),
    "axis of another type": (
        lambda: px.reduce_sum(X, 4),  # pyright: ignore
        px.ScopeError,
        r"axis must be a px\.Axis or the name of one of the program's axes, got int",
    ),
    # which leaf does not carry it
    "leaf too long": (
        lambda: px.map_fn(lambda p, x: x, ({"w": [np.zeros((5, 2))]}, X), ROWS),
        px.ShapeError,
        r"map_fn: args\[0\]\['w'\]\[0\] has shape \(5, 2\), .*'rows' starts with its size, \(4, \.\.\.\).*broadcast",
    ),
    "numbers in a list": (
        lambda: px.map_fn(lambda x: x, ({"x": [[1.0, 2.0]] * 4},), ROWS),
        px.ShapeError,
        r"map_fn: args\[0\]\['x'\] is a list of \d+ lists, not an array.*; write np\.asarray\(args\[0\]\['x'\]\)",
    ),
    "list of lists": (
        lambda: px.map_fn(jnp.sin, [[1.0, 2.0]] * 4, ROWS),
        px.ShapeError,
        r"args is a list of 4 lists, not an array \[4, 2\]; write np\.asarray\(args\)",
    ),
    "lists of different lengths": (
        lambda: px.map_fn(jnp.sin, [[1.0, 2.0], [3.0]], ROWS),
        px.ShapeError,
        r"args is a list of 2 lists of different lengths, which no array holds; fill the shorter ones up",
    ),
    "tuple of numbers": (
        lambda: px.reduce_sum((1.0, 2.0, 3.0, 4.0), ROWS),
        px.ShapeError,
        r"x is a tuple of 4 numbers, not an array; write np\.asarray\(x\)",
    ),
    "list of an array for each element": (
        lambda: px.scatter([jnp.ones(2)] * 4, ROWS),
        px.ShapeError,
        r"x is a list of 4 arrays float32\[2\], not one array; write jnp\.stack\(x\)",
    ),
    "list of two arrays of another size": (
        lambda: px.scatter([jnp.ones(2)] * 2, ROWS),
        px.ShapeError,
        r"x\[0\] has shape \(2,\), but .*px\.Axis",
    ),
    "mask in a list": (
        lambda: px.reduce_sum(X, ROWS, where=[True] * 4),
        px.ShapeError,
        r"where is a list of 4 numbers",
    ),
    "a seed for a key": (
        lambda: px.keys(0, ROWS),  # pyright: ignore
        px.ShapeError,
        r"keys: key must be one random key, got int; write jax\.random\.key\(0\)",
    ),
    "several keys": (lambda: px.keys(jax.random.split(jax.random.key(0)), ROWS), px.ShapeError, r"got key<fry>\[2\]"),
    "scalar leaf": (lambda: px.reduce_mean({"a": 2.0}, ROWS), px.ShapeError, r"reduce_mean: x\['a'\] has shape \(\)"),
    "leaf too long in scatter": (lambda: px.scatter(X[:3], ROWS), px.ShapeError, r"scatter: x has shape \(3,\)"),
    "leaf too long in gather": (lambda: px.gather(X[:3], ROWS), px.ShapeError, r"gather: x has shape \(3,\)"),
    "leaf of text": (
        lambda: px.map_fn(lambda x, mode: x, (X, {"mode": "fast"}), ROWS),
        px.ShapeError,
        r"args\[1\]\['mode'\] is a str, not an array\. .*closure: px\.map_fn\(lambda x: fn\(x, option\)",
    ),
    "leaf of text in broadcast": (lambda: px.broadcast("fast", ROWS), px.ShapeError, r"broadcast: x is a str"),
    # masks and weights
    "mask of numbers": (
        lambda: px.reduce_sum(X, ROWS, where=np.ones(4)),
        px.ShapeError,
        r"reduce_sum: where must be one boolean per element, bool\[4\], got float32\[4\]; write where=mask > 0",
    ),
    "mask too wide": (
        lambda: px.reduce_sum(np.ones((4, 2)), ROWS, where=np.ones((4, 2), bool)),
        px.ShapeError,
        r"where must be one boolean per element, bool\[4\], got bool\[4, 2\]",
    ),
    "mask too long": (
        lambda: px.reduce_any(X, ROWS, where=np.ones(5, bool)),
        px.ShapeError,
        r"reduce_any: where has shape \(5,\)",
    ),
    "mask of a tree": (
        lambda: px.reduce_sum(X, ROWS, where={"a": X > 0}),
        px.ShapeError,
        r"where must be one boolean per element, bool\[4\], got dict",
    ),
    "weights too wide": (
        lambda: px.reduce_weighted_mean(X, np.ones((4, 2)), ROWS),
        px.ShapeError,
        r"reduce_weighted_mean: w has shape \(4, 2\), but there is one weight per element: \(4,\)",
    ),
    "weights of another structure": (
        lambda: px.reduce_weighted_mean({"a": X}, {"b": X}, ROWS),
        px.ShapeError,
        r"w must be one array \(4,\) of weights, or a tree of them like x; got .*Write px\.reduce_weighted_mean\(x, ",
    ),
    "weights too few": (lambda: px.reduce_weighted_mean(X, X[:2], ROWS), px.ShapeError, r"w has shape \(2,\)"),
    # ways to run
    "no such lowering": (
        lambda: px.map_fn(jnp.sin, X, ROWS, lowering="fast"),  # pyright: ignore
        px.LoweringError,
        r"map_fn: lowering must be one of 'auto', 'vmap', 'unroll', 'dispatch', got 'fast'; write lowering='auto'",
    ),
    "dispatch under jit": (
        lambda: jax.jit(lambda x: px.map_fn(jnp.sin, x, ROWS, lowering="dispatch"))(X),
        px.LoweringError,
        r"needs concrete values and cannot be used under jit, grad or vmap.* write lowering='unroll'",
    ),
    "dispatch in a mapped function": (
        lambda: px.map_fn(lambda x: px.map_fn(jnp.sin, np.ones(4), ROWS, lowering="dispatch"), X, px.Axis("b", 4)),
        px.LoweringError,
        r"or in a mapped function; there, write lowering='unroll'",
    ),
    "dispatch on part of a mesh": (
        lambda: px.map_fn(
            jnp.sin,
            X,
            px.Axis("rows", 4, mesh=jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "model"))),
            lowering="dispatch",
        ),
        px.LoweringError,
        r"gives each element one device, but axis 'rows' lies over \('rows',\) of a mesh with axes \('rows', 'model'\)",
    ),
    # programs
    "program without axes": (
        lambda: px.program()(jnp.sin),
        px.AxisError,
        r"no axis was given; write @px\.program\(clie",
    ),
    "program with another name": (
        lambda: px.program(a=px.Axis("b", 4))(jnp.sin),
        px.AxisError,
        r"axis 'a' was given as Axis\('b', 4\), which has another name; write @px\.program\(\{'b': …\}\)",
    ),
    # pmap
    "pmap without arrays": (lambda: px.pmap(lambda: 1)(), px.ShapeError, r"no argument is mapped, .*axis_size=8"),
    "pmap of different sizes": (
        lambda: px.pmap(lambda x, y: x)(np.ones(3), {"a": np.ones(4)}),
        px.ShapeError,
        r"sizes of the mapped axes disagree \(args\[0\]: 3, args\[1\]\['a'\]: 4\)",
    ),
    "pmap with another axis_size": (
        lambda: px.pmap(lambda x: x, axis_size=3)(X),
        px.ShapeError,
        r"disagree \(axis_size: 3, args\[0\]: 4\)",
    ),
    "pmap of a scalar": (lambda: px.pmap(lambda x: x)(2.0), px.ShapeError, r"args\[0\] has shape \(\) and no axis 0"),
    "pmap along no axis": (
        lambda: px.pmap(lambda x: x, in_axes=2)(np.ones((3, 3))),
        px.ShapeError,
        r"has shape \(3, 3\) and no axis 2 to map over; write None for it in in_axes",
    ),
    "pmap of too few in_axes": (
        lambda: px.pmap(lambda x, y: x, in_axes=(0,))(X, X),
        px.ShapeError,
        r"in_axes=\(0,\) does not fit the 2 non-static arguments it was given; write one entry per positional",
    ),
    "pmap of other in_axes": (
        lambda: px.pmap(lambda x: x, in_axes=({"a": 0},))({"b": X}),
        px.ShapeError,
        r"in_axes=\(\{'a': 0\},\) does not fit",
    ),
    "pmap of other out_axes": (
        lambda: px.pmap(lambda x: (x, x), out_axes=(0, 0, 0))(X),
        px.ShapeError,
        r"out_axes=\(0, 0, 0\) does not fit the result, .*write one entry per output",
    ),
    "pmap with a negative position": (
        lambda: px.pmap(lambda x: x, donate_argnums=-1),
        px.AxisError,
        r"donate_argnums must be positions from 0, got -1; write donate_argnums=\(0,\)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (px.AxisError, ValueError),
        (px.ScopeError, RuntimeError),
        (px.ShapeError, ValueError),
        (px.LoweringError, ValueError),
        (px.CollectiveError, ValueError),
        (px.DeviceError, RuntimeError),
        (px.CommunicationError, AssertionError),
    ],
)
def test_the_tree(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, px.ParaxisError)
    assert issubclass(kind, builtin)


def test_forward_mode_names_the_leaf_before_anything_runs() -> None:
    """A wrong size raises where it was made, not in the derivative."""
    with pytest.raises(px.ShapeError, match=r"map_fn: args\[1\] has shape \(3,\)"):
        jax.grad(lambda w: px.map_fn(lambda w, x: w * x, (px.broadcast(w, ROWS), values(3)), ROWS).sum())(1.0)


def test_axes_are_values() -> None:
    assert px.Axis("a", 4) == px.Axis("a", np.int64(4))  # pyright: ignore[reportArgumentType]
    assert len({px.Axis("a", 4), px.Axis("a", 4), px.Axis("a", 4, at_once=2)}) == 2
    assert px.Axis("a", 4, over=["b", "c"]) == px.Axis("a", 4, over=("b", "c"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match="size"):
        ROWS.size = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_how_axes_are_shown() -> None:
    assert repr(axis_on(2, 4, name="a", at_once=3)) == "Axis('a', 4, mesh={'a': 2}, at_once=3)"
    assert repr(px.Axis("a", 4, over=("b", "c"))) == "Axis('a', 4, over=('b', 'c'))"


OTHER_ORDER = X.astype(X.dtype.newbyteorder())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: px.map_fn(jnp.sin, x, ROWS),
        lambda x: px.reduce_sum(x, ROWS),
        lambda x: px.pmap(jnp.sin)(x),
        lambda x: px.program(rows=4)(lambda x: px.map_fn(jnp.sin, x))(x),
        lambda x: px.solve.rows(x[:, None], x),
        lambda x: px.ensemble(lambda key: key, 2, 0, apply=lambda w, x: x).predict(x),
    ],
)
def test_another_byte_order_is_named_with_what_to_write(call: Callable[[Any], Any]) -> None:
    with pytest.raises(
        TypeError, match=r"is an array .f8\[.*byte order .*write x\.astype\(x\.dtype\.newbyteorder\('='\)\)"
    ):
        call(OTHER_ORDER)
    call(OTHER_ORDER.astype(OTHER_ORDER.dtype.newbyteorder("=")))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (lambda x: np.sum(np.sin(x)), "write jnp.sin(x) for np.sin(x)"),
        (lambda x: x if x.sum() > 0 else -x, "write jnp.where(x > 0, a, b) for a if x > 0 else b"),
        (lambda x: x * float(x[0]), "write float(…) around the call, not within"),
        (lambda x: jnp.ones(3)[: int(x[0])], "write float(…) around the call, not within"),
        (lambda x: x @ jnp.ones(2), "args = an array float32[4, 3]"),
    ],
    ids=["numpy", "a branch", "float", "int", "a wrong shape"],
)
def test_an_error_of_jax_in_a_mapped_function_says_what_was_given_and_what_to_write(
    body: Callable[[Any], Any], told: str
) -> None:
    axis, x = px.Axis("clients", 4), np.ones((4, 3), np.float32)
    program = px.program(clients=4)(lambda x: px.map_fn(body, x))
    for call in (lambda: px.map_fn(body, x, axis), lambda: program(x), lambda: jax.jit(program)(x)):
        with pytest.raises((TypeError, jax.errors.JAXTypeError)) as caught:
            call()
        (note,) = [note for note in caught.value.__notes__ if note.startswith("raised in a call of ")]
        assert told in note or told.replace("args", "args[0]") in note
        assert "with fn = the function <lambda>, " in note


def test_a_number_that_is_not_finite_is_not_said_to_need_other_arguments() -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        px.map_fn(jnp.log, -jnp.ones(4), px.Axis("clients", 4))
    assert not [note for note in getattr(caught.value, "__notes__", ()) if "raised in a call of" in note]


def test_an_error_of_jax_in_a_program_says_what_to_write_for_a_number_that_python_uses() -> None:
    @px.program(clients=4)
    def doubled(x, times):
        for _ in range(times):
            x = 2 * x
        return px.reduce_mean(x)

    with pytest.raises(jax.errors.TracerIntegerConversionError) as caught:
        doubled(jnp.ones(4), 3)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("raised in a call of doubled with x = ")]
    assert note.endswith("write jax.jit(fn, static_argnums=1)(x, n)")
    assert float(jax.jit(doubled, static_argnums=1)(jnp.ones(4), 3)) == 8
