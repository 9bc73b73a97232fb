"""A function that is mapped sees no mesh: its inputs have the types of what it computes, wherever it runs.

ODE solvers, samplers and closure converters compare these: ``jax.typeof`` and ``jax.eval_shape``.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import assert_close, at_night, mesh_over, values


def _probe(*inputs: Any) -> Any:
    """Sines of all inputs, whose types are those of values computed from constants, with structures compared."""
    for x in jax.tree.leaves(inputs):
        made = jnp.ones(x.shape, x.dtype)
        assert jax.typeof(x) == jax.typeof(made) == jax.typeof(made + x)
        assert jax.eval_shape(lambda x=x: x) == jax.eval_shape(lambda made=made: made)
        eqx.filter_closure_convert(lambda y: y + made, x)(made)  # noqa: B023
    found = jax.tree.map(jnp.sin, inputs)
    return found[0] if len(found) == 1 else found


AXES: dict[str, Callable[[], px.Axis]] = {
    "default": lambda: px.Axis("rows", 10),
    "at_once": lambda: px.Axis("rows", 20, at_once=1),
    "Auto": lambda: px.Axis("rows", 10, mesh=mesh_over(rows=8)),
    "Auto, divides": lambda: px.Axis("rows", 8, mesh=mesh_over(rows=8)),
    "Auto, over": lambda: px.Axis("clients", 8, mesh=mesh_over(rows=4, model=2), over="rows"),
    "Explicit": lambda: px.Axis("rows", 10, mesh=mesh_over(AxisType.Explicit, rows=8)),
    "Explicit, divides": lambda: px.Axis("rows", 8, mesh=mesh_over(AxisType.Explicit, rows=8)),
    "Explicit, over": lambda: px.Axis("clients", 8, mesh=mesh_over(AxisType.Explicit, rows=4, model=2), over="rows"),
}
COMPILED = pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
KINDS = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)


@pytest.mark.sampled(5)
@COMPILED
@pytest.mark.parametrize("name", AXES)
def test_map_fn_gives_its_inputs_the_types_of_one_device(name: str, compiled: bool) -> None:
    axis = AXES[name]()
    w, x = jnp.arange(3.0), values(axis.size, 2)
    run = lambda w, x: px.map_fn(_probe, (px.broadcast(w, axis), x), axis)  # noqa: E731
    found = (jax.jit(run) if compiled else run)(w, x)
    assert_close(jax.device_get(found), jax.device_get((jnp.broadcast_to(jnp.sin(w), (axis.size, 3)), jnp.sin(x))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", [True, False], ids=["its own mesh", "another mesh"])
@KINDS
@COMPILED
def test_map_fn_may_close_over_arrays_on_a_mesh(kind: AxisType, own: bool, compiled: bool) -> None:
    """Explicit is the type of what ``jax.make_mesh`` makes by default."""
    mesh, x = mesh_over(kind, rows=8), values(10, 2)
    w = jax.device_put(values(8, 2, seed=1), NamedSharding(mesh, P()))
    axis = px.Axis("rows", 10, mesh=mesh if own else None)
    run = lambda x: px.map_fn(lambda x: jnp.sin(x * w).sum(0), x, axis)  # noqa: E731
    # JAX itself has no eager gradient of arrays on Explicit meshes.
    found = (jax.jit(run) if compiled else run)(x), jax.jit(jax.grad(lambda x: run(x).sum()))(x)
    w, wide = np.asarray(w), np.asarray(x)[:, None]
    assert_close(jax.device_get(found), (np.sin(wide * w).sum(1), (np.cos(wide * w) * w).sum(1)))


def _by_ensemble(x: jax.Array) -> Any:
    members = px.ensemble(lambda key: {"w": jax.random.normal(key, (2,))}, 5, 0, apply=lambda p, x: x @ p["w"])
    return members.train(lambda p, x: (p, _probe(p["w"], x)[1]), x)[0]


def _by_solver(x: jax.Array) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        _probe(w, x)
        return jnp.mean((w - jnp.sin(x)) ** 2)

    return jax.vmap(lambda x: px.solve.LBFGS(loss, maxiter=30).run(jnp.zeros(2), x).params)(x)


def _by(transform: Any) -> Callable[[jax.Array], Any]:
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return transform(lambda net, x: _probe(x, net.kernel[...])[0], net)


FRONT_ENDS: dict[str, Callable[[jax.Array], Any]] = {
    "pmap": lambda x: px.pmap(_probe)(x),
    "pmap, shared": lambda x: px.pmap(_probe, in_axes=(0, None))(x, x[0])[0],
    "ensemble": _by_ensemble,
    "Parallel": lambda x: _by(px.Parallel)(x),
    "Vectorize": lambda x: _by(px.Vectorize)(x),
    "a solver's vmap": _by_solver,
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_give_inputs_the_types_of_one_device(name: str) -> None:
    x = values(10, 2)
    np.testing.assert_allclose(np.asarray(FRONT_ENDS[name](x)), np.sin(x), rtol=1e-3)


@pytest.mark.parametrize("lowering", ["auto", *at_night(["unroll", "vmap"], 2)])
def test_ensemble_trains_equinox_layers_with_state(lowering: Any) -> None:
    """Layers that keep their state by closures which compare types."""

    def step(layer: Any, state: Any, x: jax.Array) -> Any:
        y, state = jax.vmap(layer[1], in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)
        return (layer, state), y.std()

    make = lambda key: (jax.random.normal(key), eqx.nn.BatchNorm(3, axis_name="batch", mode="ema"))  # noqa: E731
    x, ens = values(24, 3), px.ensemble(eqx.nn.make_with_state(make), 5, 0, lowering=lowering)
    members, alone = [*ens], eqx.filter_jit(step)
    for _ in range(2):
        found, made = ens.train(step, x), [alone(*member, x) for member in members]
        np.testing.assert_allclose(np.asarray(found), [y for _, y in made], rtol=1e-4)
        members = [member for member, _ in made]
