"""Elements that are split over devices themselves: DiLoCo on a mesh of ``replica × fsdp``, against DrJAX.

A map over one axis of a mesh gathers nothing along the others, and what is split over them stays so.
"""

import functools
from contextlib import nullcontext
from typing import Any

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import values

WORKERS, WIDTH, ROWS = 2, 64, 16
INNER, OUTER = optax.adamw(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True)
NEWER = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
KINDS = [
    # Older JAX gathers all operands of a shard_map of which some axes stay Explicit.
    pytest.param(AxisType.Explicit, marks=pytest.mark.skipif(not NEWER, reason="jax 0.12 or later")),
    AxisType.Auto,
]


def _round(library: Any, explicit: bool) -> Any:
    dot = functools.partial(jnp.dot, out_sharding=P("fsdp", None)) if explicit else jnp.dot

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(dot(x, w)), model, x) ** 2)

    def move(model: Any, moments: Any, x: jax.Array) -> Any:
        updates, moments = INNER.update(jax.grad(loss)(model, x), moments, model)
        return optax.apply_updates(model, updates), moments

    @library.program(placements={"replica": WORKERS})
    def step(model: Any, momentum: Any, own: Any, moments: Any, x: jax.Array) -> Any:
        own, moments = library.map_fn(move, (own, moments, x))
        gradient = jax.tree.map(lambda w, mean: w - mean, model, library.reduce_mean(own))
        updates, momentum = OUTER.update(gradient, momentum, model)
        model = optax.apply_updates(model, updates)
        return model, momentum, library.broadcast(model), moments

    return step


def _start(mesh: Any) -> Any:
    model = [values(WIDTH, WIDTH, seed=i) / WIDTH**0.5 for i in range(2)]
    each = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), (model, INNER.init(model)))
    along = lambda x, *lead: NamedSharding(mesh, P(*lead, "fsdp") if x.ndim > 1 else P(*lead))  # noqa: E731
    shared = jax.tree.map(lambda x: jax.device_put(x, along(x)), (model, OUTER.init(model)))
    each = jax.tree.map(lambda x: jax.device_put(x, along(x, "replica")), each)
    x = jax.device_put(values(WORKERS, ROWS, WIDTH, seed=9), NamedSharding(mesh, P("replica", "fsdp")))
    return *shared, *each, x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_diloco_sends_and_holds_no_more_than_drjax(kind: AxisType) -> None:
    mesh = jax.make_mesh((WORKERS, 4), ("replica", "fsdp"), axis_types=(kind,) * 2)
    results: dict[Any, Any] = {}
    found: dict[Any, Any] = {}
    with jax.set_mesh(mesh):
        args = _start(mesh)
        for library in (px, drjax):
            step = jax.jit(_round(library, kind == AxisType.Explicit))
            results[library], found[library] = step(*args), px.explain(step)(*args)
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(results[library]) for library in (px, drjax)))
    sent = {library: report.communication for library, report in found.items()}
    assert sent[px].total_count <= sent[drjax].total_count
    assert sent[px].total_bytes <= sent[drjax].total_bytes
    assert found[px].memory.temporaries <= found[drjax].memory.temporaries
    for leaf in jax.tree.leaves(results[px]):
        assert leaf.ndim < 2 or "fsdp" in leaf.sharding.spec


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("lowering", "size", "at_once"), [("vmap", 2, None), ("unroll", 4, None), ("auto", 4, 1)])
def test_a_map_over_an_axis_sends_nothing_along_the_others(
    kind: AxisType, lowering: Any, size: int, at_once: int | None
) -> None:
    mesh = jax.make_mesh((WORKERS, 4), ("replica", "fsdp"), axis_types=(kind,) * 2)
    axis = px.Axis("rows", size, over="replica", at_once=at_once)

    def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
        return px.map_fn(lambda w, x: w * jnp.sin(x), (px.broadcast(w, axis), x), axis, lowering=lowering)

    gathers = kind == AxisType.Explicit and not NEWER
    warns = pytest.warns(UserWarning, match="other axes, as these are Explicit") if gathers else nullcontext()
    with jax.set_mesh(mesh), warns:
        w = jax.device_put(values(8, 3, seed=1), NamedSharding(mesh, P("fsdp")))
        x = jax.device_put(values(size, 8, 3), NamedSharding(mesh, P("replica", "fsdp")))
        found = jax.jit(mapped)(w, x)
        if not gathers:
            assert px.testing.communication(mapped, w, x).total_count == 0
            assert found.sharding.is_equivalent_to(x.sharding, 3)
    np.testing.assert_allclose(np.asarray(found), np.asarray(w) * np.sin(np.asarray(x)), rtol=1e-6)
