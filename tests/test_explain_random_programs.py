"""Random programs: what is written is found, with its bytes, axes and times."""

import collections
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import paraxis as px

pytestmark = pytest.mark.floor

N = 16
SIZES = {"a": 2, "b": 4}
Fn = Callable[[Any], Any]
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


def by_hand(draw: random.Random, depth: int) -> tuple[Fn, collections.Counter[Any]]:
    """A function of a device's 8 x 4 block, and what it sends: kind, bytes, times, axes."""
    name, turns = draw.choice(["a", "b"]), draw.choice([1, 2, 3])
    size, block = SIZES[name], 8 * 4 * 4
    along = draw.choice([("a",), ("b",), ("a", "b")])
    around = [(i, (i + 1) % size) for i in range(size)]
    flat: list[tuple[Fn, tuple[Any, ...]]] = [
        (lambda x: jnp.sin(jax.lax.psum(x, along)), ("all_reduce", block, along)),
        (lambda x: jnp.sin(jax.lax.pmax(x, along)) - x, ("all_reduce", block, along)),
        (lambda x: jnp.sin(jax.lax.all_gather(x, name)).sum(0), ("all_gather", block * size, (name,))),
        (lambda x: jax.lax.psum_scatter(jnp.sin(jnp.stack([x, *[2 * x] * (size - 1)])), name),
         ("reduce_scatter", block * size, (name,))),
        (lambda x: jnp.sin(jax.lax.all_to_all(x, name, 1, 1, tiled=True)), ("all_to_all", block, (name,))),
        (lambda x: jnp.sin(jax.lax.ppermute(x, name, around)), ("collective_permute", block, (name,))),
    ]  # fmt: skip
    if not depth:
        fn, (kind, sent, axes) = draw.choice(flat)
        return fn, collections.Counter({(kind, sent, 1, axes): 1})
    (one, first), (two, second) = by_hand(draw, depth - 1), by_hand(draw, depth - 1)
    ways = [
        (lambda x: two(one(x)), 1),
        (lambda x: jax.lax.scan(lambda x, _: (two(one(x)), x.sum()), x, length=turns + 1)[0], turns + 1),
        (lambda x: jax.jit(two)(jax.checkpoint(one)(x)), 1),
        (lambda x: jax.lax.cond(x[0, 0] > 0, one, two, x), 1),  # both count
    ]
    fn, often = draw.choice(ways)
    sent = collections.Counter[Any]()
    for (kind, size, times, axes), number in [*first.items(), *second.items()]:
        sent[kind, size, times * often, axes] += number
    return fn, sent


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_explain_finds_what_random_programs_write_with_its_axes_and_times(seed: int) -> None:
    fn, sent = by_hand(random.Random(seed), 2)
    run = jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False))
    report = px.explain(run)(jax.ShapeDtypeStruct((N, N), jnp.float32))
    assert collections.Counter((c.kind, c.bytes, c.times, c.axes) for c in report.collectives) == sent
    assert all(c.is_written and c.line is not None and c.line.file == __file__ for c in report.collectives)
