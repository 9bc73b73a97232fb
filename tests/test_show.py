"""Where arrays lie, by what JAX says of each array's shards, and what is told of leaves that have none."""

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import paraxis as px
from tests._explained import lies, struct
from tests._support import mesh_over

pytestmark = pytest.mark.floor

MESH = mesh_over(a=2, b=2, c=2)


def put(shape: tuple[int, ...], *spec: Any) -> jax.Array:
    return jax.device_put(np.zeros(shape, np.float32), lies(MESH, *spec))


PLACED = {
    "all three": ((4, 6, 8), ("a", "b", "c")),
    "out of order": ((4, 6, 8), ("c", None, "a")),
    "two in one": ((4, 8), (None, ("c", "b"))),
    "whole": ((3,), ()),
    "five dimensions": ((2, 1, 4, 1, 6), ("b", None, "a", None, "c")),
}


@pytest.mark.parametrize("case", PLACED)
def test_show_draws_blocks_where_the_shards_are(case: str) -> None:
    shape, spec = PLACED[case]
    x = put(shape, *spec)
    layout = px.show(x).leaves[0]
    held: dict[Any, set[int]] = collections.defaultdict(set)
    for shard in x.addressable_shards:
        held[tuple(cut.start or 0 for cut in shard.index)].add(shard.device.id)
    assert [set(block) for block in layout.blocks] == [held[start] for start in sorted(held)]
    assert px.show(x).bytes_per_device == {f"cpu {s.device.id}": s.data.nbytes for s in x.addressable_shards}
    assert layout.bytes == px.show(x).bytes == x.nbytes


def test_show_draws_each_block_in_its_place() -> None:
    x = put((4, 6, 8), "a", "c", "b")
    page = px.show(x)._repr_html_()
    assert re.findall(r"dimension 0: (\d:\d)</h2>", page) == ["0:2", "2:4"]
    in_order = sorted(x.addressable_shards, key=lambda s: tuple(cut.start or 0 for cut in s.index))
    assert re.findall(r"<td[^>]*>(\d)</td>", page) == [str(s.device.id) for s in in_order]
    panel = str(px.show(x)).rpartition("\n\n")[2].splitlines()
    assert panel[1].split() == ["0:4", "4:8"]
    assert panel[2].split() == ["0:3", *(str(s.device.id) for s in in_order[4:6])]


def gone() -> jax.Array:
    x = jnp.ones(3) + 1
    x.delete()
    return x


LEAVES = {
    "deleted": (gone, "deleted", "float32 3 12 bytes deleted", 0),
    "numpy": (lambda: np.zeros((3, 2)), "host", "float64 3 × 2 48 bytes on the host", 48),
    "number": (lambda: 3, "host", "int scalar on the host", 0),
    "large": (lambda: struct(1010, 256), "struct", "float32 1010 × 256 1,010 KiB only a shape", 1010 * 1024),
    "key": (lambda: jax.random.key(0), "device", "key<fry> scalar 8 bytes cpu 0", 8),
    "placed": (
        lambda: struct(8, dtype=jnp.int8, lies=lies(MESH, "a")),
        "struct",
        "int8 8/2 8 bytes 4 bytes per device only a shape, for cpu 0–7, 4 copies",
        8,
    ),
    "on an abstract mesh": (
        lambda: struct(8, dtype=jnp.int8, lies=NamedSharding(MESH.abstract_mesh, P("a"))),
        "struct",
        "int8 8 8 bytes only a shape",
        8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEAVES)
def test_show_tells_any_leaf(case: str) -> None:
    make, state, text, size = LEAVES[case]
    shown = px.show(make())
    assert shown.leaves[0].state == state
    assert " ".join(str(shown).split("\n\n")[1].split()) == text
    assert shown.bytes == size


@pytest.mark.parametrize(("dtype", "size"), [("int2", 2), ("int4", 3), ("float8_e4m3fn", 5), ("bool", 5)])
def test_show_counts_numbers_of_less_than_a_byte_as_the_compiler_does(dtype: str, size: int) -> None:
    x = jnp.zeros(5, dtype)
    report = px.explain(lambda x: x)(x)
    assert report.arguments[0].bytes == report.memory.arguments == px.show(x).bytes == size


def test_show_counts_each_variable_of_a_module_once() -> None:
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    shown = px.show({"net": nnx.Sequential(layer, nnx.BatchNorm(4, rngs=nnx.Rngs(0)), layer)})
    assert [leaf.name.removeprefix("['net'].layers") for leaf in shown.leaves] == [
        *("[0].bias.value", "[0].kernel.value"),
        *(f"[1].{name}.value" for name in ("bias", "mean", "scale", "var")),
    ]
    assert (shown.bytes, px.show(layer.kernel).bytes) == (4 * (16 + 4 + 4 * 4), 64)


def test_show_counts_an_array_that_is_there_twice_once_and_leaves_out_what_is_no_array() -> None:
    x = put((16,), "a")
    shown = px.show({"a": x, "b": x, "f": jnp.sin, "t": "text", "none": None})
    assert (len(shown.leaves), shown.bytes, shown.bytes_per_device["cpu 0"]) == (1, 64, 32)
    assert str(px.show(None)) == "0 arrays"
    with pytest.raises(TypeError, match="Ensemble is no tree of arrays"):
        px.show(px.ensemble(jax.random.normal, 3, 0))
