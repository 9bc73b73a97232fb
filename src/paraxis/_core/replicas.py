"""What the elements of an axis have alike: told apart before anything runs, and kept once instead of once each."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, PartitionSpec as P

from paraxis._core import jax_api, layout, placing
from paraxis._core.axis import Axis


def watched(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """In a function under ``vmap``: ``x`` as it is; ``note`` is told which of its leaves differ between elements.

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


def differing(body: jax_api.ClosedJaxpr, placed: Sequence[bool], axis: Axis) -> list[bool]:
    """Return, for each result of an element's body: whether it may differ between elements. See :func:`watched`.

    ``placed`` says which arguments do. One abstract ``vmap`` tells, before anything runs. If the body asks the
    outside world (``io_callback``), all of them may.
    """
    if jax_api.is_impure(body.jaxpr):
        return [True] * len(body.out_avals)
    found: list[bool] = []

    def one(index: jax.Array, *args: Any) -> list[Any]:
        return watched(list(jax_api.jaxpr_as_fun(body)(*args)), index, found.extend)

    args = [
        jax.ShapeDtypeStruct((axis.size, *aval.shape) if is_placed else aval.shape, aval.dtype)
        for aval, is_placed in zip(body.in_avals, placed, strict=True)
    ]
    in_axes = (0, *(0 if is_placed else None for is_placed in placed))
    over = jax.vmap(one, in_axes=in_axes, axis_name=axis.name, axis_size=axis.size)
    jax.eval_shape(over, jnp.arange(axis.size), *args)
    return found


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


def agreed(x: jax.Array, axis: Axis) -> jax.Array:
    """``(size, ...)`` → ``(...)``: the row that all elements have alike, one element per device. Nothing is sent."""
    placement = placing.place(axis)
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


def gathered(x: jax.Array, axis: Axis) -> jax.Array:
    """``(size, ...)`` as a plain array that any operation takes: on an Explicit mesh its rows are brought together."""
    placement = placing.place(axis)
    return layout.constrain(x, placement, rows=False) if placement.is_explicit else x
