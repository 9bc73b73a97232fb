"""A function traced anew at each call, and run by a compiled program that is found by the structure of the trace.

So what it reads is read again each time, and nothing is compiled twice. Users pay for tracing once by ``jax.jit``
around it, as everywhere in JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import arrays
from paraxis._jax import jax_api, structure

_compiled: structure.Recent[Callable[..., Any]] = structure.Recent(256)


class Traced:
    """A function traced once for each type of arguments, and compiled once for each structure.

    Many functions that compute the same share what is compiled; a function of which nobody knows is let go, with its
    traces. It must not be called to communicate while what it needs is on its way: its arguments are waited for.

    ``compiled`` makes a function of a trace.
    """

    def __init__(self, fn: Callable[..., Any], compiled: Callable[..., Callable[..., Any]] | None = None) -> None:
        self._jitted = jax.jit(fn)
        self._made = by_structure if compiled is None else compiled
        self._programs: dict[int, tuple[Any, Callable[..., Any], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves = jax.tree.leaves(arrays.ready(args))
        if jax_api.is_tracing() or any(isinstance(x, jax_api.Tracer) for x in leaves):
            return self._jitted(*args)
        traced = self._jitted.trace(*args)
        program = self._programs.get(id(traced.jaxpr))
        if program is None:  # with the jaxpr, so that no other takes its place in memory
            made = traced.jaxpr, self._made(traced.jaxpr), jax.tree.structure(traced.out_info)
            program = self._programs[id(traced.jaxpr)] = made
        return jax.tree.unflatten(program[2], program[1](*leaves))


def by_structure(closed: jax_api.ClosedJaxpr) -> Callable[..., Any]:
    """Return the compiled program of a trace, of flat arguments and results, made once for each structure."""
    closed, consts = jax_api.without_constants(closed)
    compiled = _compiled.get(structure.key(closed), lambda: jax.jit(jax_api.jaxpr_as_fun(jax_api.with_copies(closed))))
    return functools.partial(compiled, *consts)


def shared(jitted: Any, *args: Any, donate: bool) -> Any:
    """Return what to call, with such arguments, in place of a jitted function: one for all of the same structure.

    The first argument is given away if ``donate``. A function that closes over arrays is compiled for itself.
    """
    traced = jitted.trace(*args)
    closed, trees = traced.jaxpr, (jax.tree.structure(args), jax.tree.structure(traced.out_info))
    if closed.consts:
        return jitted

    def make() -> Callable[..., Any]:
        flat = jax_api.jaxpr_as_fun(jax_api.with_copies(closed))

        def run(*args: Any) -> Any:
            return jax.tree.unflatten(trees[1], flat(*jax.tree.leaves(args)))

        return jax.jit(run, donate_argnums=0 if donate else ())

    return _compiled.get((structure.key(closed), trees, donate), make)


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
        return jax.tree.unflatten(out_tree, arrays.ready(jax_api.jaxpr_as_fun(closed)(*arrays.ready(everything))))
    return jax.tree.unflatten(out_tree, arrays.ready(by_structure(closed)(*arrays.ready(everything))))
