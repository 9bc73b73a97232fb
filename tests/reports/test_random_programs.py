"""Random programs: all that the compiler puts in is read, and what was written is found as it was written."""

import collections
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests.reports.test_explain import counted

pytestmark = pytest.mark.newest

N = 16
SIZES = {"a": 2, "b": 4}
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
SPECS = [P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P("b", "a"), P(None, ("a", "b"))]
Fn = Callable[[Any], Any]


def lies(spec: P) -> NamedSharding:
    return NamedSharding(MESH, spec)


def divided(draw: random.Random, depth: int) -> Fn:
    """A function of a matrix that the compiler divides."""
    spec, turns, axis = draw.choice(SPECS), draw.choice([1, 3, 5]), draw.choice([0, 1])
    weights = jnp.asarray(np.random.default_rng(draw.randrange(99)).normal(size=(N, N)) / 9, jnp.float32)
    flat: list[Fn] = [
        lambda x: x @ jax.lax.with_sharding_constraint(weights, lies(spec)),
        lambda x: x @ x.T / N,
        lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), lies(spec)),
        lambda x: x - jnp.max(x, axis, keepdims=True) + x.mean(),
        lambda x: jnp.cumsum(jnp.sort(x, axis), axis),
        lambda x: jnp.concatenate([x[turns:], x[:turns]]) + jnp.outer(x.sum(0), x.sum(1)) / N,
        lambda x: jnp.einsum("ij,kj,kl->il", x, x, x) / N,
        lambda x: jax.lax.conv_general_dilated(x[None, None], weights[None, None, :3, :3], (1, 1), "SAME")[0, 0],
    ]
    if not depth:
        return draw.choice(flat)
    fn, other = divided(draw, depth - 1), divided(draw, 0)
    backward = jax.custom_vjp(fn)
    backward.defvjp(lambda x: (fn(x), x), lambda x, ct: (ct @ x.T,))
    nested: list[Fn] = [
        lambda x: jax.lax.scan(lambda x, _: (fn(x), None), x, length=turns)[0],
        lambda x: jax.lax.fori_loop(0, turns, lambda _, x: fn(x), x),
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 0, fn, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, fn, other, x),
        lambda x: jax.vmap(fn)(jnp.stack([x, 2 * x, x + 1])).sum(0),
        jax.jit(fn),
        jax.checkpoint(fn),
        backward,
    ]
    return draw.choice([*flat, *nested, *nested])


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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(60))
def test_programs_that_the_compiler_divides_are_read(seed: int) -> None:
    draw = random.Random(seed)
    fns = [divided(draw, 2) for _ in range(2)]
    fn = jax.jit(lambda x: fns[1](fns[0](x)))
    x = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=lies(draw.choice(SPECS)))
    report = px.explain(fn)(x)
    assert collections.Counter(c.kind for c in report.collectives) == counted(fn, x)
    assert all(c.axes for c in report.collectives)
    if report.work.share is not None:
        assert sum(line.share or 0 for line in report.work.lines) == pytest.approx(report.work.share)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_is_found_with_its_axes_and_times(seed: int) -> None:
    fn, sent = by_hand(random.Random(seed), 2)
    run = jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False))
    report = px.explain(run)(jax.ShapeDtypeStruct((N, N), jnp.float32))
    assert collections.Counter((c.kind, c.bytes, c.times, c.axes) for c in report.collectives) == sent
    assert all(c.is_written and c.line is not None and c.line.file == __file__ for c in report.collectives)
