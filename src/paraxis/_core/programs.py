"""A function traced anew at each call, and run by a compiled program that is found by the structure of the trace.

So what it reads is read again each time, and nothing is compiled twice. Users pay for tracing once by ``jax.jit``
around it, as everywhere in JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import jax_api, structure

_compiled: structure.Recent[Callable[..., Any]] = structure.Recent(256)


def by_structure(closed: jax_api.ClosedJaxpr) -> Callable[..., Any]:
    """Return the compiled program of a trace, of flat arguments and results, made once for each structure."""
    closed, consts = jax_api.without_constants(closed)
    compiled = _compiled.get(structure.key(closed), lambda: jax.jit(jax_api.jaxpr_as_fun(jax_api.with_copies(closed))))
    return functools.partial(compiled, *consts)


def run(fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """``fn(*operands)``.

    Where a function is traced to be compiled, its operations are noted there. Else it is traced first: so what it
    places and maps is known before anything is computed. Under ``grad``, ``jvp`` and ``vmap`` its operations are then
    carried out one by one, each map by its own compiled program, as a derivative may be that of a rule of the user's.
    """
    if isinstance(jnp.zeros(()), jax_api.Tracer):
        return fn(*operands)
    operands = [jnp.asarray(x) for x in operands]
    closed, out_tree = jax_api.trace(fn, [jax_api.typed_struct(x) for x in operands], {})
    closed, consts = jax_api.without_constants(closed)
    closed = jax_api.pruned(closed, closed.jaxpr.outvars)
    everything = [*consts, *operands]
    if any(isinstance(x, jax_api.Tracer) for x in everything):
        return jax.tree.unflatten(out_tree, jax_api.jaxpr_as_fun(closed)(*everything))
    return jax.tree.unflatten(out_tree, by_structure(closed)(*everything))
