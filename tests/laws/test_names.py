"""No public face: names of JAX's primitives and parameters that are compared as text are those that JAX has today."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from paraxis._core import jax_api
from tests._support import axis_on, equations

X, KEY = jnp.ones((2, 2)), jax.random.key(0)
Fn = Callable[[Any], Any]


def ruled(kind: str) -> Fn:
    fn: Any = jax.custom_vjp(jnp.sin) if kind == "vjp" else jax.custom_jvp(jnp.sin)
    if kind == "vjp":
        fn.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * x,))
    else:
        fn.defjvp(lambda primals, tangents: (jnp.sin(*primals), tangents[0] * primals[0]))
    return fn


FUNCTIONS: dict[str, Fn] = {
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: jax.lax.while_loop(lambda x: x.sum() < 0, jnp.sin, x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c, None), x, None, length=2)[0],
    "jit": jax.jit(jnp.sin),
    "remat2": jax.checkpoint(jnp.sin),
    "custom_jvp_call": ruled("jvp"),
    "custom_vjp_call": ruled("vjp"),
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x),
    "debug_callback": lambda x: jax.debug.callback(print, x),
    "io_callback": lambda x: io_callback(np.sin, x, x),
    "dot_general": lambda x: x @ x,
    "conv_general_dilated": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "select_n": lambda x: jnp.where(x > 0, x, 0.0),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 2, 2)),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "reduce_sum": lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
    "shard_map": lambda x: jax.shard_map(jnp.sin, mesh=axis_on(2, 2).mesh, in_specs=P("rows"), out_specs=P("rows"))(x),
    "axis_index": lambda x: jax.lax.axis_index("i"),
    "all_gather": lambda x: jax.lax.all_gather(x, "i"),
    "psum": lambda x: jax.lax.psum(x, "i"),
    "pmax": lambda x: jax.lax.pmax(x, "i"),
    "ppermute": lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "i", 0, 0),
    "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "i"),
}


def found(name: str) -> list[JaxprEqn]:
    closed, _ = jax_api.trace(FUNCTIONS[name], [X], {"i": 2})
    return [eqn for eqn in equations(closed) if eqn.primitive.name == name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_calls_its_primitives_so_and_collectives_name_their_axis(name: str) -> None:
    eqns = found(name)
    assert eqns
    if name in [*FUNCTIONS][-7:]:
        [eqn] = eqns
        assert "i" in jax_api.named_axes(eqn)
        assert jax_api.renamed_axes(eqn, {"i": ("a", "b")})
        closed, _ = jax_api.trace(FUNCTIONS[name], [X], {"i": 2})
        assert jax_api.free_axes(closed.jaxpr) == {"i"}


def test_parameters_that_are_read_are_there() -> None:
    assert {"in_specs", "out_specs", "mesh", "newly_manual_axes", "jaxpr"} <= {*found("shard_map")[0].params}
    assert {"call_jaxpr"} <= {*found("custom_jvp_call")[0].params} & {*found("custom_vjp_call")[0].params}
    assert {"dimension_numbers"} <= {*found("dot_general")[0].params}
