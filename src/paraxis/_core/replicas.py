"""What the elements of an axis have alike: told apart before anything runs, and kept once instead of once each."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from paraxis._core import jax_api, layout
from paraxis._core.axis import Axis


def differing(body: jax_api.ClosedJaxpr, placed: Sequence[bool], axis: Axis) -> list[bool]:
    """For each result of an element's body: whether it may differ between elements.

    ``placed`` says which arguments do. Found by one abstract ``vmap``, which knows that a sum over all elements is
    the same for each. It errs on one side only: values that differ are always found; some that would turn out equal,
    such as a sum passed round a ring by hand, are taken to differ.
    """
    found: list[bool] = []

    @custom_vmap
    def watch(results: list[Any]) -> list[Any]:
        return results

    @watch.def_vmap
    def _(size: int, batched: Sequence[Any], results: list[Any]) -> Any:
        found.extend(batched[0])
        return results, batched[0]

    def one(*args: Any) -> list[Any]:
        return watch(list(jax_api.jaxpr_as_fun(body)(*args)))

    args = [
        jax.ShapeDtypeStruct((axis.size, *aval.shape) if is_placed else aval.shape, aval.dtype)
        for aval, is_placed in zip(body.in_avals, placed, strict=True)
    ]
    in_axes = tuple(0 if is_placed else None for is_placed in placed)
    over = jax.vmap(one, in_axes=in_axes, axis_name=axis.name, axis_size=axis.size)
    if body.out_avals:
        jax.eval_shape(over, *args)
    return found or [False] * len(body.out_avals)


def agreed(x: jax.Array, axis: Axis) -> jax.Array:
    """``(size, ...)`` → ``(...)``: the row that all elements have alike, one element per device. Nothing is sent."""
    placement = layout.place(axis)
    if not placement.mesh_axes:
        return x[0]
    pick: Callable[[jax.Array], jax.Array] = jax.shard_map(
        lambda row: row[0],
        mesh=placement.mesh if isinstance(placement.mesh, Mesh) else None,
        in_specs=P(placement.mesh_axes),
        out_specs=P(),
        axis_names=set(placement.mesh_axes),
        check_vma=False,  # its derivative: each element gives its share, 1/size of the whole
    )
    return pick(x)
