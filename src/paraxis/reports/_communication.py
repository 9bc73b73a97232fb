"""Count the collectives of a compiled program by reading it: nothing is run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from paraxis._calls import arguments
from paraxis.reports import _jitted, _text

KINDS = _text.KINDS


@dataclasses.dataclass(frozen=True)
class Communication:
    """The collectives in the text of one compiled program: a collective inside a loop counts once.

    Attributes:
        count: number of collectives of each kind, with an entry for every kind in :data:`KINDS`.
        bytes: size of what each device contributes to or receives from them, whichever is larger, in bytes. A
            collective over several arrays at once counts once, with the size of all.
    """

    count: dict[str, int]
    bytes: dict[str, int]

    @property
    def total_count(self) -> int:
        return sum(self.count.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        parts = [f"{self.count[kind]} {kind} ({self.bytes[kind]:,} bytes)" for kind in KINDS if self.count[kind]]
        return ", ".join(parts) or "no communication"


@arguments.named(jax.ShapeDtypeStruct)
def communication(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Communication:
    """Compile a function for the given arguments, without running it, and count its collectives.

    Args:
        fn: a function of arrays, jitted or not.
        *args: arrays, or ``jax.ShapeDtypeStruct`` in their place.
        **kwargs: likewise.

    Returns:
        Counts and bytes per device of each kind of collective.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from paraxis.testing import communication
        >>> rows = px.Axis("rows", 16)
        >>> communication(lambda x: px.map_fn(jnp.sin, x, rows), jnp.ones(16)).total_count
        0
    """
    arguments.function("communication", "fn", fn, "communication(lambda x: …, x)")
    return of_program(program_of(fn, args, kwargs))


def program_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the text of the compiled program of a call."""
    fn, args, kwargs = _jitted.found(fn, args, kwargs)
    # A model that is a pytree of arrays has no hash, which jax.jit asks for.
    jitted: Any = fn if _jitted.is_one(fn) else jax.jit(lambda *args, **kwargs: fn(*args, **kwargs))
    return jitted.lower(*args, **kwargs).compile().as_text() or ""


def of_program(text: str) -> Communication:
    """Count the collectives in the text of a compiled program (XLA's HLO).

    Args:
        text: what ``jax.jit(f).lower(x).compile().as_text()`` returns.

    Returns:
        The same as :func:`paraxis.testing.communication`; :func:`paraxis.explain` tells more.

    Raises:
        TypeError: if it is no text.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from paraxis.reports import of_program
        >>> print(of_program(jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()))
        no communication
    """
    if not isinstance(text, str):
        got = arguments.described(text)
        raise TypeError(f"of_program: text must be a program's text, got {got}; write lowered.compile().as_text()")
    count: dict[str, int] = dict.fromkeys(KINDS, 0)
    size: dict[str, int] = dict.fromkeys(KINDS, 0)
    program = _text.Program(text)
    for operation in program.collectives:
        assert operation.kind is not None
        count[operation.kind] += 1
        size[operation.kind] += _text.sent_bytes(program, operation)
    return Communication(count, size)


def total_bytes(text: str) -> int:
    """Return the bytes of all collectives in a compiled program's text, loops multiplied."""
    program = _text.Program(text)
    return sum(_text.sent_bytes(program, operation) * operation.times for operation in program.collectives)


def num_devices(text: str) -> int:
    """Return the number of devices that a compiled program is for, which its text tells."""
    return _text.Program(text).num_devices
