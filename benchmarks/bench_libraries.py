"""Functions of libraries in each surrounding: "same" as each element alone, to 0.001; "-": no derivative, even alone.

The row of a library that is not installed is left out, and named. `make bench` installs those that tests do not need.
"""

import os
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ |= {"NETKET_ENABLE_X64": "0", "NETKET_SHARDING": "0"}  # or its import sets float64 and a mesh for all

import harness
import jax
import jax.numpy as jnp
import numpy as np
from libraries import LIBRARIES

import paraxis as px

Function = Callable[[Any, Any], Any]

AXIS = px.Axis("elements", 10)


def mapped(fn: Function, **how: Any) -> Function:
    return lambda w, x: px.map_fn(fn, (px.broadcast(w, AXIS), x), AXIS, **how)


def slope(fn: Function) -> Function:
    """The derivative of a score of all floats that a function returns; a ValueError if it returns none."""

    def score(w: Any, x: Any) -> Any:
        floats = (leaf for leaf in jax.tree.leaves(fn(w, x)) if jnp.issubdtype(leaf.dtype, jnp.floating))
        first, *others = (jnp.sum(jnp.sin(leaf)) for leaf in floats)
        return sum(others, first)

    return jax.grad(score, argnums=(0, 1))


SURROUNDINGS: dict[str, Callable[[Function], Function]] = {
    "pmap": lambda fn: px.pmap(fn, in_axes=(None, 0)),
    "map_fn": lambda fn: jax.jit(mapped(fn)),
    "at_once=1": lambda fn: jax.jit(mapped(fn, at_once=1)),
    "lanes": lambda fn: jax.jit(mapped(fn, lowering="lanes")),
    "Stream": lambda fn: lambda w, x: px.Stream(at_once=1).map(partial(fn, w), x),
    "grad": lambda fn: jax.jit(slope(mapped(fn))),
    "vmap": lambda fn: jax.jit(jax.vmap(mapped(fn), in_axes=(0, None))),
}


def stacked(parts: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


def alone(fn: Function, surrounding: str, w: Any, x: Any) -> Any:
    """The same by JAX alone, for one element after the other."""
    if surrounding == "vmap":
        return stacked([alone(fn, "map_fn", row, x) for row in w])
    if surrounding != "grad":
        call = jax.jit(fn)
        return stacked([call(w, row) for row in x])
    call = jax.jit(slope(fn))
    shared, own = stacked([call(w, row) for row in x])
    return shared.sum(0), own


def compared(fn: Function, surrounding: str, w: Any, x: Any) -> str:
    """What a cell of the table says."""
    try:
        expected = alone(fn, surrounding, w, x)
    except Exception as error:  # each library has its own
        return "-" if surrounding == "grad" else f"alone, {said(error)}"
    try:
        found = jax.device_get(SURROUNDINGS[surrounding](fn)(w, x))
    except Exception as error:
        return said(error)
    gaps = [np.abs(a - b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]
    is_same = jax.tree.all(jax.tree.map(partial(np.allclose, rtol=1e-3, atol=1e-3), found, expected))
    return "same" if is_same else f"differs by {max(gap.max() for gap in gaps):.2g}"


def said(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 70, placeholder=" …").replace("|", "/")


def run(devices: int, repeats: int) -> harness.Tables:
    del repeats
    w, x = jnp.array([0.7, 1.3]), np.random.default_rng(0).uniform(0.5, 3.0, (AXIS.size, 2)).astype("float32")
    table: dict[str, dict[str, str]] = {}
    for library, make in LIBRARIES.items():
        try:
            rows = make()
        except ImportError as error:
            print(f"{library} is left out: {error}")
            continue
        for name, fn in rows.items():
            table[name] = {
                surrounding: compared(fn, surrounding, jnp.stack([w, w[::-1]]) if surrounding == "vmap" else w, x)
                for surrounding in SURROUNDINGS
            }
            print(name, table[name], flush=True)
    return {f"10 elements on {devices} devices": table}


if __name__ == "__main__":
    harness.main(run, __doc__, devices=(8,))
