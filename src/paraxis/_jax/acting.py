"""Operations with effects, once for each real element of a batch whose elements run together under ``vmap``."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._jax import jax_api

_OPENED = frozenset(name for name in jax_api.CALLS if not name.startswith("custom")) | {"scan"}
"""Operations that run their body equally often in each element: only what acts inside is taken one by one."""


def is_opened(eqn: jax_api.JaxprEqn) -> bool:
    """Return whether an operation with effects is better run with its body changed than once for each element."""
    return eqn.primitive.name in _OPENED


def once(eqn: jax_api.JaxprEqn, operands: Sequence[Any], is_real: jax.Array) -> Sequence[Any]:
    """Run an operation, inside ``vmap`` or not, once for each element that ``is_real``; the others get zeros."""

    def own(is_real: jax.Array, *operands: Any) -> list[Any]:
        def nothing() -> list[Any]:
            results: list[Any] = [v.aval for v in eqn.outvars]
            return [jnp.zeros(y.shape, y.dtype) for y in results]

        return jax.lax.cond(is_real, lambda: list(jax_api.bind(eqn, eqn.params, operands)), nothing)

    each = jax.custom_batching.custom_vmap(own)

    @each.def_vmap
    def one_by_one(size: int, batched: Sequence[bool], *args: Any) -> tuple[list[Any], list[bool]]:
        def with_row(rows: list[Any]) -> list[Any]:
            given = iter(rows)
            return own(*(next(given) if is_row else x for x, is_row in zip(args, batched, strict=True)))

        rows = [x for x, is_row in zip(args, batched, strict=True) if is_row]
        return jax.lax.map(with_row, rows), [True] * len(eqn.outvars)

    return each(is_real, *operands)
