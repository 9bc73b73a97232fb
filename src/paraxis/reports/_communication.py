"""Count the collectives of a compiled program by reading it: nothing is run."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from paraxis._calls import arguments

KINDS: tuple[str, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
)


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


@arguments.named()
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
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    return of_program(jitted.lower(*args, **kwargs).compile().as_text() or "")


def of_program(text: str) -> Communication:
    """Count the collectives in the text of a compiled program (XLA's HLO)."""
    if not isinstance(text, str):
        got = arguments.described(text)
        raise TypeError(f"of_program: text must be a program's text, got {got}; write lowered.compile().as_text()")
    count: dict[str, int] = dict.fromkeys(KINDS, 0)
    size: dict[str, int] = dict.fromkeys(KINDS, 0)
    devices = _PARTITIONS.search(text)
    everyone = int(devices[1]) if devices else 0
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        group = _group_size(line, everyone)
        if match is None or group == 1:  # a group of one exchanges nothing
            continue
        kind = match["kind"].replace("-", "_").removeprefix("ragged_")
        result = _bytes_of(match["shape"])
        if match["start"] and kind in ("all_gather", "collective_permute"):  # (operands, results, …): keep the larger
            result = max(_bytes_each(match["shape"]), default=0)
        count[kind] += 1
        size[kind] += result * group if kind == "reduce_scatter" else result
    return Communication(count, size)


_COLLECTIVE = re.compile(
    r"=\s+(?P<shape>\(.*?\)|\S+)\s+(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute|collective-broadcast)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")

# Who takes part is written in one of three ways: every group in full, {{0,1},{2,3}}; their number and size, [2,2];
# or by axes of a mesh, mesh['d'=4,'m'=2] {'m'}, where 'd':(1)2 is a part of an axis.
_LISTED = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}")
_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_BY_AXES = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\]\s*\{(?P<axes>[^}]*)\}")


def _group_size(line: str, everyone: int) -> int:
    if counted := _COUNTED.search(line):
        return int(counted[2])
    if listed := _LISTED.search(line):
        return max(len(group.split(",")) for group in listed[1].strip("{}").split("},{"))
    if by_axes := _BY_AXES.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", by_axes["sizes"])}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", by_axes["axes"])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return everyone


def _bytes_of(shape: str) -> int:
    return sum(_bytes_each(shape))


def _bytes_each(shape: str) -> list[int]:
    return [_array_bytes(m["dtype"], m["dims"]) for m in _ARRAY.finditer(shape)]


def _array_bytes(dtype: str, dims: str) -> int:
    elements = math.prod(int(dim) for dim in dims.split(",") if dim)
    return elements * _bits(dtype) // 8


@functools.lru_cache
def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0
