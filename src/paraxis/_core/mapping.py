"""A function of one row, run on rows that are held: over the devices, as they lie."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._core import jax_api, layout, local, scope
from paraxis._core.local import Lowering
from paraxis._core.placing import Placement


@dataclasses.dataclass(frozen=True)
class Mapping:
    """What is to be mapped, without the arrays. Hashable: it is what compiled maps are remembered by.

    Operands are ``(...)`` where ``shared`` (one value for all rows), else ``(num_padded, ...)``. The padding rows have
    been safe to compute on before and are still; so they are left as they are, which saves a pass over them.
    """

    fn: Callable[..., Any]
    structure: Any
    placement: Placement
    lowering: Lowering
    shared: tuple[bool, ...]
    scope: scope.Scope

    def element(self, blocks: Sequence[jax.Array]) -> local.Element:
        avals = [jax_api.element_struct(block) for block in blocks]
        return local.element(
            lambda *xs: self.fn(*jax.tree.unflatten(self.structure, xs)), self.placement, self.scope, avals
        )


# Run through jit with the mapping as a static argument: repeated calls trace once, and differentiation drops what the
# derivative does not need.


@functools.partial(jax.jit, static_argnums=0)
def run(mapping: Mapping, *operands: jax.Array) -> Any:
    """The function's result for each row, with leaves ``(num_padded, ...)``."""
    placement, shared = mapping.placement, mapping.shared
    structures: list[Any] = []

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        one = mapping.element(blocks)
        structures.append(one.out_tree)
        leaves = [block[0] if is_shared else block for block, is_shared in zip(blocks, shared, strict=True)]
        return local.run(one, placement, mapping.lowering, leaves, shared)

    results = layout.run_per_device(
        on_device,
        placement,
        [layout.per_device(x, placement) if is_shared else x for x, is_shared in zip(operands, shared, strict=True)],
    )
    return jax.tree.unflatten(structures[-1], results)
