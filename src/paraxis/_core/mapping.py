"""A map made ready to run: over the devices, with all results kept, or in turns with only their sum kept."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import jax_api, layout, local, primitives, scope, summing
from paraxis._core.layout import Placement
from paraxis._core.local import Lowering


@dataclasses.dataclass(frozen=True)
class Mapping:
    """What is to be mapped, without the arrays. Hashable: it is what compiled maps are remembered by.

    Operands are ``(...)`` where ``shared`` (one value for all elements), ``(num_padded, ...)`` where ``padded``, else
    ``(size, ...)``. ``held``: the padding rows of padded operands have been safe to compute on before and are still,
    and no derivative is taken; so they are left as they are, which saves a pass over them.
    """

    fn: Callable[..., Any]
    structure: Any
    placement: Placement
    lowering: Lowering
    shared: tuple[bool, ...]
    padded: tuple[bool, ...]
    scope: scope.Scope
    held: bool = False

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
            block[0] if is_shared else (block if self.held and is_padded else layout.fill(block, self.placement))
            for block, is_shared, is_padded in zip(blocks, self.shared, self.padded, strict=True)
        ]


# Both run through jit with the mapping as a static argument: repeated calls trace once, eager calls are compiled, and
# differentiation drops what the derivative does not need.


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Outcome:
    """A map's results, their structure, and whether their sum is better taken by :func:`run_sum`."""

    results: Sequence[jax.Array]
    structure: Any
    sums_preferred: bool

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.results, (self.structure, self.sums_preferred)

    @classmethod
    def tree_unflatten(cls, fixed: Any, results: Any) -> "Outcome":
        return cls(results, *fixed)


@functools.partial(jax.jit, static_argnums=0)
def run(mapping: Mapping, *operands: jax.Array) -> Outcome:
    """All results, each ``(num_padded, ...)``."""
    placement, lowering, shared = mapping.placement, mapping.lowering, mapping.shared

    def on_device(*blocks: jax.Array) -> Outcome:
        one = mapping.element(blocks)
        results = local.run(one, placement, lowering, mapping.local_leaves(blocks), shared)
        return Outcome(results, one.out_tree, local.sums_preferred(one, placement, lowering, shared))

    return layout.run_per_device(on_device, placement, mapping.laid_out(operands))


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_sum(
    mapping: Mapping, term: summing.Term, operands: Sequence[jax.Array], extras: Sequence[jax.Array]
) -> list[jax.Array]:
    """The sum over all elements of ``term(result, *extras)`` for each result; the results are not kept.

    ``extras`` are ``(size,)``, one number per element for the term to use.
    """
    placement = mapping.placement
    padded = [layout.pad(x, placement) for x in extras]

    def on_device(blocks: Sequence[jax.Array], extras: Sequence[jax.Array]) -> list[jax.Array]:
        real = layout.real_rows(placement)
        one, leaves = mapping.element(blocks), mapping.local_leaves(blocks)
        sums = local.run_sum(one, placement, mapping.lowering, leaves, mapping.shared, term, real, extras)
        return [total[None] for total in sums]

    partial = layout.run_per_device(on_device, placement, (mapping.laid_out(operands), padded))
    size = placement.num_devices
    return [primitives.reduce("sum", x, axis=placement.axis.name, size=size) for x in partial]


def copies(x: jax.Array, placement: Placement, rows: int, over: tuple[str, ...]) -> jax.Array:
    """``(...)`` → ``(rows, ...)``, as a broadcast along the axis."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys: no derivative, and JAX's own rules
        return jnp.broadcast_to(x, (rows, *x.shape))
    x = layout.on_mesh(x, placement)
    return primitives.broadcast(x, axis=placement.axis.name, rows=rows, size=rows, over=over)
