"""A map over one axis of a mesh sends nothing over the others: what is split over them stays so."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.testing import assert_communication

GATHERS = jax.__version_info__ < (0, 12)  # what lies over Explicit axes


def _body(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(x) * w


def _map(axis: px.Axis) -> Any:
    return lambda w, x: px.map_fn(_body, (px.broadcast(w, axis), x), axis)


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_map_sends_nothing_over_other_axes(kind: AxisType, at_once: int | None) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    axis = px.Axis("rows", 8, over="data", at_once=at_once)
    w = jax.device_put(np.linspace(1, 2, 16 * 8, dtype=np.float32).reshape(16, 8), NamedSharding(mesh, P("model")))
    x = jax.device_put(np.ones((8, 16, 8), np.float32), NamedSharding(mesh, P("data", "model")))
    gathers = GATHERS and kind == AxisType.Explicit
    warns = (
        pytest.warns(UserWarning, match="other axes, as these are Explicit") if gathers else contextlib.nullcontext()
    )
    with jax.set_mesh(mesh), warns:
        found = jax.jit(_map(axis))(w, x)
        if not gathers:
            assert_communication(_map(axis), w, x, max_bytes=0)
    np.testing.assert_allclose(
        np.asarray(found),
        np.asarray(jax.vmap(_body, (None, 0))(jnp.asarray(np.asarray(w)), jnp.asarray(np.asarray(x)))),
        1e-6,
    )
