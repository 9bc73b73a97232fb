"""Loops and branches of a solver: the compiler's, or Python's where rows are read from a table on the way."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from paraxis._axes import arrays


class Control(NamedTuple):
    """What runs a solver's loops and branches, and what compiles the parts of an iteration that read no rows."""

    while_loop: Callable[[Callable[[Any], Any], Callable[[Any], Any], Any], Any]
    cond: Callable[..., Any]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]]


def _while(go_on: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    while bool(go_on(carry)):
        carry = body(carry)
    return carry


def _cond(which: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any) -> Any:
    return if_true(*operands) if bool(which) else if_false(*operands)


@functools.lru_cache(maxsize=64)
def _jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    compiled = jax.jit(fn)
    return lambda *operands: arrays.ready(compiled(*arrays.ready(operands)))


COMPILED = Control(jax.lax.while_loop, jax.lax.cond, lambda fn: fn)
PYTHON = Control(_while, _cond, _jit)
