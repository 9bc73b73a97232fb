"""A map made ready to run: over the devices, with all results kept, or in turns with only their sum kept."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import jax_api, layout, local, primitives, scope
from paraxis._core.layout import Placement
from paraxis._core.local import Lowering


@dataclasses.dataclass(frozen=True)
class Mapping:
    """What is to be mapped, without the arrays. Hashable: it is what compiled maps are remembered by.

    Operands are ``(...)`` where ``shared`` (one value for all elements), ``(num_padded, ...)`` where ``padded``, else
    ``(size, ...)``.
    """

    fn: Callable[..., Any]
    structure: Any
    placement: Placement
    lowering: Lowering
    shared: tuple[bool, ...]
    padded: tuple[bool, ...]
    scope: scope.Scope

    def element(self, blocks: Sequence[jax.Array]) -> local.Element:
        avals = [jax_api.element_struct(block) for block in blocks]
        return local.element(
            lambda *xs: self.fn(*jax.tree.unflatten(self.structure, xs)), self.placement, self.scope, avals
        )

    def laid_out(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Operands as the devices take them: one copy per device of a shared one, padded rows of the others."""
        over = self.placement.mesh_axes if self.placement.is_explicit else ()
        return [
            copies(x, self.placement, self.placement.num_devices, over)
            if is_shared
            else (x if is_padded else layout.pad(x, self.placement))
            for x, is_shared, is_padded in zip(operands, self.shared, self.padded, strict=True)
        ]

    def local_leaves(self, blocks: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            block[0] if is_shared else layout.fill(block, self.placement)
            for block, is_shared in zip(blocks, self.shared, strict=True)
        ]


# Both run through jit with the mapping as a static argument: repeated calls trace once, eager calls are compiled, and
# differentiation drops what the derivative does not need.


@functools.partial(jax.jit, static_argnums=0)
def run(mapping: Mapping, *operands: jax.Array) -> Any:
    """All results, each ``(num_padded, ...)``."""

    def on_device(*blocks: jax.Array) -> Any:
        one = mapping.element(blocks)
        results = local.run(one, mapping.placement, mapping.lowering, mapping.local_leaves(blocks), mapping.shared)
        return jax.tree.unflatten(one.out_tree, results)

    return layout.run_per_device(on_device, mapping.placement, mapping.laid_out(operands))


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_sum(
    mapping: Mapping, term: Callable[..., jax.Array], operands: Sequence[jax.Array], extras: Sequence[jax.Array]
) -> list[jax.Array]:
    """The sum over all elements of ``term(result, *extras)`` for each result; the results are not kept.

    ``extras`` are ``(size,)``, one number per element for the term to use; ``term`` takes and gives rows.
    """
    placement = mapping.placement
    rows = [layout.pad(x, placement) for x in extras]

    def on_device(blocks: Sequence[jax.Array], extras: Sequence[jax.Array]) -> list[jax.Array]:
        first = layout.device_index(placement) * placement.num_local
        real = first + jnp.arange(placement.num_local) < placement.size

        def terms(results: Sequence[jax.Array], real: jax.Array, *extras: jax.Array) -> list[jax.Array]:
            return [_sum_of(real, term(y, *extras)) if _has_sum(y) else jnp.zeros(()) for y in results]

        leaves = mapping.local_leaves(blocks)
        one = mapping.element(blocks)
        sums = local.sum_in_turns(one, placement, mapping.lowering, leaves, mapping.shared, terms, (real, *extras))
        return [total[None] for total in sums]

    partial = layout.run_per_device(on_device, placement, (mapping.laid_out(operands), rows))
    size = placement.num_devices
    return [primitives.reduce("sum", x, axis=placement.axis.name, size=size) for x in partial]


def _has_sum(x: jax.Array) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _sum_of(real: jax.Array, rows: jax.Array) -> jax.Array:
    keep = real.reshape(real.shape + (1,) * (rows.ndim - 1))
    return jnp.sum(jnp.where(keep, rows, 0), axis=0, dtype=rows.dtype)


def copies(x: jax.Array, placement: Placement, rows: int, over: tuple[str, ...]) -> jax.Array:
    """``(...)`` → ``(rows, ...)``, as a broadcast along the axis."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys: no derivative, and JAX's own rules
        return jnp.broadcast_to(x, (rows, *x.shape))
    x = layout.on_mesh(x, placement)
    return primitives.broadcast(x, axis=placement.axis.name, rows=rows, size=rows, over=over)
