"""Where arrays lie, by what JAX says of each array's shards, and what is told of leaves that have none."""

import collections
import functools
import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px

pytestmark = pytest.mark.newest


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))


def put(shape: tuple[int, ...], *spec: Any) -> jax.Array:
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh(), P(*spec)))


PLACED = {
    "all three": ((4, 6, 8), ("a", "b", "c")),
    "out of order": ((4, 6, 8), ("c", None, "a")),
    "two in one": ((4, 8), (None, ("c", "b"))),
    "whole": ((3,), ()),
    "a number": ((), ()),
    "five dimensions": ((2, 1, 4, 1, 6), ("b", None, "a", None, "c")),
}


@pytest.mark.parametrize("case", PLACED)
def test_blocks_are_where_the_shards_are(case: str) -> None:
    shape, spec = PLACED[case]
    x = put(shape, *spec)
    layout = px.show(x).leaves[0]
    held: dict[Any, set[int]] = collections.defaultdict(set)
    for shard in x.addressable_shards:
        held[tuple(cut.start or 0 for cut in shard.index)].add(shard.device.id)
    assert [set(block) for block in layout.blocks] == [held[start] for start in sorted(held)]
    assert px.show(x).bytes_per_device == {f"cpu {s.device.id}": s.data.nbytes for s in x.addressable_shards}
    assert layout.bytes == px.show(x).bytes == x.nbytes


def drawn(text: str) -> set[tuple[tuple[str, ...], str]]:
    """Read a drawing: for each block, its places (panel, down, right) and its devices."""
    found: set[tuple[tuple[str, ...], str]] = set()
    panel, right = "", [""]
    for line in filter(str.strip, text.splitlines()[1:]):
        cells = line.strip().split("  ")
        cells = [cell.strip() for cell in cells if cell.strip()]
        if line.strip().startswith("dimension"):
            panel = line.rpartition(" ")[2]
        elif re.fullmatch(r"\d+:\d+", cells[-1]):
            right = cells
        else:
            found |= {((panel, cells[0], at), devices) for at, devices in zip(right, cells[1:], strict=True)}
    return found


def test_a_picture_has_each_block_in_its_place() -> None:
    x = put((4, 6, 8), "a", "c", "b")

    def places(shard: Any) -> tuple[str, ...]:
        return tuple(f"{cut.start}:{cut.stop}" for cut in shard.index)

    expected = {(places(shard), str(shard.device.id)) for shard in x.addressable_shards}
    assert drawn(str(px.show(x)).split("\n\n", 2)[2]) == expected
    page = px.show(x)._repr_html_()
    assert re.findall(r"dimension 0: (\d:\d)</h2>", page) == ["0:2", "2:4"]
    in_order = sorted(x.addressable_shards, key=lambda s: tuple(cut.start or 0 for cut in s.index))
    assert re.findall(r"<td[^>]*>(\d)</td>", page) == [str(s.device.id) for s in in_order]


def gone() -> jax.Array:
    x = jnp.ones(3) + 1
    x.delete()
    return x


LEAVES = {
    "deleted": (gone, "deleted", "float32 3 12 bytes deleted", 0),
    "numpy": (lambda: np.zeros((3, 2)), "host", "float64 3 × 2 48 bytes on the host", 48),
    "number": (lambda: 3, "host", "int scalar on the host", 0),
    "flag": (lambda: True, "host", "bool scalar on the host", 0),
    "NumPy's number": (lambda: np.float32(1), "host", "float32 scalar 4 bytes on the host", 4),
    "key": (lambda: jax.random.key(0), "device", "key<fry> scalar 8 bytes cpu 0", 8),
    "keys of 16 bytes": (lambda: jax.random.key(0, impl="rbg"), "device", "key<rbg> scalar 16 bytes cpu 0", 16),
    "shape": (lambda: jax.ShapeDtypeStruct((8, 2), jnp.bfloat16), "struct", "bfloat16 8 × 2 32 bytes only a shape", 32),
    "shape that is placed": (
        lambda: jax.ShapeDtypeStruct((8,), jnp.int8, sharding=NamedSharding(mesh(), P("a"))),
        "struct",
        "int8 8/2 8 bytes 4 bytes per device only a shape, for cpu 0–7, 4 copies",
        8,
    ),
    "shape on an abstract mesh": (
        lambda: jax.ShapeDtypeStruct((8,), jnp.int8, sharding=NamedSharding(mesh().abstract_mesh, P("a"))),
        "struct",
        "int8 8 8 bytes only a shape",
        8,
    ),
    "nothing in it": (lambda: jnp.zeros((0, 3)), "device", "float32 0 × 3 0 bytes cpu 0", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", LEAVES)
def test_any_leaf_is_told(case: str) -> None:
    make, state, text, size = LEAVES[case]
    shown = px.show(make())
    assert shown.leaves[0].state == state
    assert " ".join(str(shown).split("\n\n")[1].split()) == text
    assert shown.bytes == size


def test_a_shape_that_its_sharding_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="the dimension size is 9"):
        px.show(jax.ShapeDtypeStruct((9,), jnp.float32, sharding=NamedSharding(mesh(), P("a"))))


@pytest.mark.parametrize(("dtype", "size"), [("int2", 2), ("int4", 3), ("float8_e4m3fn", 5), ("bool", 5)])
def test_numbers_of_less_than_a_byte_take_what_the_compiler_says(dtype: str, size: int) -> None:
    x = jnp.zeros(5, dtype)
    report = px.explain(lambda x: x)(x)
    assert report.arguments[0].bytes == report.memory.arguments == px.show(x).bytes == size


def test_what_is_no_array_is_told() -> None:
    shown = px.show({"f": jnp.sin, "t": "text", "none": None})
    assert (len(shown.leaves), len(shown.others)) == (0, 2)
    assert "['t'] is 'text'" in str(shown)
    assert str(px.show(None)) == "0 arrays"


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.a = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.b = self.a
        self.layers = nnx.List([nnx.BatchNorm(3, rngs=nnx.Rngs(0))])


def test_each_variable_of_a_module_counts_once() -> None:
    net = Tied()
    shown = px.show({"net": net})
    assert shown.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(net))) == 4 * (12 + 3 + 4 * 3)
    names = [leaf.name.removeprefix("['net'].") for leaf in shown.leaves if not leaf.is_shared]
    layer = [f"layers[0].{name}.value" for name in ("bias", "mean", "scale", "var")]
    assert names == ["a.bias.value", "a.kernel.value", *layer]
    assert px.show(net.a.kernel).bytes == 48
    assert px.show(nnx.eval_shape(Tied)).bytes == shown.bytes


def test_an_array_that_is_there_twice_counts_once() -> None:
    x = put((16,), "a")
    shown = px.show({"a": x, "b": x})
    assert (shown.bytes, shown.bytes_per_device["cpu 0"]) == (64, 32)
    assert "the same array as one above" in str(shown)


def test_states_and_models_are_taken_by_their_paths() -> None:
    sample = {"inputs": jnp.ones((1, 3))}
    state = px.TrainState.create(nn.Dense(4), optax.adam(1e-3), key=jax.random.key(0), sample=sample)
    assert px.show(state).bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert "params['kernel']" in str(px.show(state))
    mlp = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))
    assert px.show(mlp).bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(mlp, eqx.is_array)))
    assert "layers[0].weight" in str(px.show(mlp))


def test_nothing_is_compiled_or_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    x, keys = put((4, 8), "a"), jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh(), P("a")))
    px.show(keys)
    with jax.transfer_guard("disallow"), jax.log_compiles(False):
        monkeypatch.setattr(type(x), "__array__", None)
        str(px.show({"x": x, "keys": keys}))
