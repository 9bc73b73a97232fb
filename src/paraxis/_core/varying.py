"""The values that vary along a batch, before anything runs: a function's results, and the ways that elements take."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from paraxis._core import jax_api


def watched(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """Return ``x`` as it is, in a function under ``vmap``; ``note`` is told which leaves differ between elements.

    ``index`` is the element's number, or anything else that does differ: this vmap, and not one around it, then
    answers. It errs on one side only: leaves that differ are always found; some that would turn out equal, such as a
    sum passed round a ring by hand, are taken to differ.
    """

    @custom_vmap
    def watch(index: jax.Array, leaves: list[Any]) -> list[Any]:
        return leaves

    @watch.def_vmap
    def _(size: int, batched: Sequence[Any], index: jax.Array, leaves: list[Any]) -> Any:
        note(list(batched[1]))
        return leaves, batched[1]

    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(structure, watch(index, leaves))


def batched(
    body: jax_api.ClosedJaxpr, in_axes: Sequence[int | None], size: int, name: str | None, names: dict[str, int]
) -> list[bool]:
    """Return, for each result of a body: whether it may differ along the batch in which these arguments do."""
    found: list[bool] = []

    def one(index: jax.Array, *args: Any) -> list[Any]:
        return watched(list(jax_api.jaxpr_as_fun(body)(*args)), index, found.extend)

    avals = [
        jax.ShapeDtypeStruct(a.shape if at is None else (size, *a.shape), a.dtype, weak_type=a.weak_type)
        for a, at in zip(body.in_avals, in_axes, strict=True)
    ]
    over = jax.vmap(one, in_axes=(0, *in_axes), axis_size=size, axis_name=name)
    jax_api.trace(over, [jax.ShapeDtypeStruct((size,), jnp.int32), *avals], names)
    return found
