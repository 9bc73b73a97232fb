"""What is rarely given to reports: methods that are jitted, arrays that JAX cannot hold, references, small numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import communication

pytestmark = pytest.mark.newest

X = jnp.ones((4, 4))
SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
PRODUCT = 2 * 4**3

# --- jitted methods ---------------------------------------------------------------------------------------------------


class Plain:
    @functools.partial(jax.jit, static_argnums=0)
    def numbered(self, x):
        return x @ x

    @functools.partial(jax.jit, static_argnames=("self", "times"), donate_argnames="x")
    def named(self, x, times=1):
        return times * (x @ x)

    @classmethod
    @functools.partial(jax.jit, static_argnums=0)
    def of_class(cls, x):
        return x @ x


class Tree(NamedTuple):
    w: Any

    @jax.jit
    def product(self, x):
        return self.w @ x


class Equinox(eqx.Module):
    w: jax.Array

    @jax.jit
    def jitted(self, x):
        return self.w @ x

    @eqx.filter_jit
    def filtered(self, x):
        return self.w @ x


METHODS: dict[str, Callable[[], Callable[..., Any]]] = {
    "static by number": lambda: Plain().numbered,
    "static by name": lambda: functools.partial(Plain().named, times=2),
    "of the class": lambda: Plain.of_class,
    "of a tree": lambda: Tree(X).product,
    "of a tree, in a partial": lambda: functools.partial(functools.partial(Tree.product), Tree(X)),
    "Equinox": lambda: Equinox(X).jitted,
    "Equinox, filter_jit": lambda: Equinox(X).filtered,
}


@pytest.mark.parametrize("name", METHODS)
def test_jitted_methods_are_explained_as_they_are_called(name: str) -> None:
    fn = METHODS[name]()
    assert fn(X + 0).shape == (4, 4)
    report = px.explain(fn)(SHAPE)
    assert report.work.flops == px.explain(fn, devices=2)(SHAPE).work.flops == PRODUCT
    assert [array.shape for array in report.arguments] == [(4, 4)] * len(report.arguments)
    assert any(array.is_donated for array in report.arguments) == (name == "static by name")
    assert communication(fn, SHAPE).total_count == 0
    if "Equinox" not in name:
        assert px.compare({"f": fn}, X, seconds=0.01)["f"].memory is not None


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros(()))

    def encode(self, x):
        self.calls[...] += 1
        return self.layer(x)

    @nnx.jit
    def jitted(self, x):
        return self.layer(x)


@pytest.mark.parametrize("name", ["encode", "jitted"])
def test_methods_of_nnx_modules_are_explained_and_tabulated_and_leave_the_module_alone(name: str) -> None:
    net: Any = Net()
    if name == "jitted":
        assert px.explain(getattr(net, name))(X).work.flops == PRODUCT
    table = px.tabulate(getattr(net, name), SHAPE)
    assert [(row.path, row.parameters, row.flops) for row in table.rows] == [
        ((), 20, PRODUCT),
        (("layer",), 20, PRODUCT),
    ]
    assert table.total.kind == name
    assert net.calls[...] == 0
    np.testing.assert_allclose(net.jitted(X), X @ net.layer.kernel[...] + net.layer.bias[...], rtol=1e-6)


# --- arguments --------------------------------------------------------------------------------------------------------

MESH = Mesh(np.array(jax.devices()), ("d",))


def shape(*dims: int, dtype: Any = jnp.float32, mesh: Any = MESH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P("d")))


WRONG: dict[str, tuple[Any, str]] = {
    "byte order": (np.arange(3, dtype=">f4"), r">f4\[3\], of another byte order.*write x\.astype\("),
    "byte order of a shape": (shape(8, dtype=np.dtype(">f4")), "a shape of >f4, of another byte order"),
    "objects": (np.array([None]), r"must be an array of numbers, got object \[1\]"),
    "text": (np.array(["a"]), r"must be an array of numbers, got <U1 \[1\]"),
    "long numbers": (np.zeros(3, np.longdouble), r"must be an array of numbers, got (float128|float96|float64)"),
    "masked": (np.ma.array([1.0, 2.0], mask=[False, True]), r"masked array float64\[2\]; write x\.filled\(0\)"),
    "large integer": (2**40, "is 1099511627776, which int32 does not hold; write it as a float"),
    "uneven": (shape(10), r"a shape \[10\] that cannot lie by its sharding: .* let px\.Axis lay it, which pads"),
    "no devices": (shape(8, mesh=MESH.abstract_mesh), r"an abstract mesh, which has no devices; write jax\.NamedSh"),
    "keys of two types": ({1: X, "a": X}, r"must be a tree that JAX can take apart.* keys of one type"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jitted", [False, True])
def test_what_no_array_can_be_is_named(name: str, jitted: bool) -> None:
    value, words = WRONG[name]
    fn = jax.jit(lambda x: jax.tree.map(jnp.sin, x)) if jitted else lambda x: jax.tree.map(jnp.sin, x)
    with pytest.raises(TypeError, match=rf"^explain: args\[0\] .*{words}"):
        px.explain(fn)(value)
    if jitted:
        with pytest.raises(TypeError, match=rf"^communication: args\[0\] .*{words}"):
            communication(fn, value)


def test_an_error_of_the_function_itself_is_not_blamed_on_its_arguments() -> None:
    def overflows(x, n):
        raise OverflowError("math range error")

    with pytest.raises(OverflowError, match="math range error"):
        px.explain(overflows)(X, 2.0**40)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'z'"):
        px.explain(lambda x: x)(X, z=1)


def test_shapes_that_cannot_lie_so_are_named_when_shown() -> None:
    with pytest.raises(TypeError, match=r"^show: x\['a'\] is a shape \[10\] that cannot lie by its sharding"):
        px.show({"a": shape(10)})


async def later(x):
    return x


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (later, "got a coroutine"),
        (jax.jit(jnp.sin).trace(X), "got a Traced"),
        (jax.jit(jnp.sin).lower(X).compile(), r"got a Compiled; write px\.explain\(jax\.jit\(fn\)\)\(x\)"),
    ],
    ids=["coroutine", "traced", "compiled"],
)
def test_what_cannot_be_traced_is_refused(fn: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"explain: fn must be a function that JAX can trace, {words}"):
        px.explain(fn)


def test_values_that_another_function_traces_must_be_arguments() -> None:
    def outer(x):
        px.explain(lambda y: y @ x)(X)
        return x

    with pytest.raises(TypeError, match=r"reads a value of a function that JAX traces now that is none of its arg"):
        jax.jit(outer)(X)
    assert jax.jit(lambda x: x * px.explain(lambda y: y @ y)(X).work.flops)(1) == PRODUCT


def test_references_are_told_and_stay_as_they_are() -> None:
    held = jax.new_ref(jnp.zeros(3))

    @jax.jit
    def add(ref, x):
        ref[...] += x
        return ref[...] * 2

    report = px.explain(add)(held, 1.0)
    assert [(a.name, a.shape) for a in report.arguments] == [("ref", (3,)), ("x", ())]
    assert [a.shape for a in report.results] == [(3,)]
    assert px.explain(lambda ref: ref[...].sum())(held).results[0].shape == ()
    assert px.compare({"a": add, "b": add}, held, 1.0, seconds=0.02, check=True)["b"].uses_up
    np.testing.assert_array_equal(held[...], 0)
    assert [leaf.state for leaf in px.show(held).leaves] == ["device"]
    with pytest.raises(TypeError, match=r"reads a jax\.Ref that is none of its arguments"):
        px.explain(lambda x: add(held, x))(1.0)


@pytest.mark.parametrize(("dtype", "size"), [("int2", 2), ("int4", 3), ("uint4", 3), ("float8_e4m3fn", 5), ("bool", 5)])
def test_numbers_of_less_than_a_byte_take_what_the_compiler_says(dtype: str, size: int) -> None:
    x = jnp.zeros(5, dtype)
    report = px.explain(lambda x: x)(x)
    assert report.arguments[0].bytes == report.memory.arguments == px.show(x).bytes == size


def test_gradients_of_integers_have_no_bytes_and_are_equal() -> None:
    zeros = np.zeros(3, jax.dtypes.float0)
    assert [(leaf.layout.dtype, leaf.layout.bytes) for leaf in px.show(zeros).leaves] == [("float0", 0)]
    assert px.compare({"f": lambda x: x, "g": lambda x: x}, zeros, seconds=0.01, check=True).baseline == "f"


def test_shapes_of_types_are_shapes() -> None:
    assert px.explain(lambda x: x @ x)(jax.typeof(X)).work.flops == PRODUCT
