"""Findings: what could be better in a compiled program, each with the line to change. None is guessed at.

Each function looks for one thing, and yields nothing if it is not there, or too small to matter.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from paraxis._axes import placing
from paraxis._jax import jax_api
from paraxis.reports import _lines, _text, _work, units
from paraxis.reports._values import Contents, Finding, Layout

_SENT = 64 * 1024
"""The least bytes of a collective that is worth a word."""
_HELD = 16 * 1024**2
"""The least bytes of an array that is worth a word for being on each device."""
_STATE = 1024**2
"""The least bytes of a state, or of a constant."""
_TWICE = 1.25
"""More work than this, of a line's share, is done more than once."""
_PADDED = 1.1


@dataclasses.dataclass(frozen=True)
class Seen:
    """The material to look at. ``jaxpr`` has no dead code; it and ``closed`` are ``None`` for what JAX cannot trace.

    ``jitted_by`` is the library that jits the function, which adds arguments and results of its own; empty: JAX.
    ``asked`` is how many devices there are to be; 0: those that are here.
    """

    report: Contents
    program: _text.Program
    jaxpr: jax_api.Jaxpr | None
    closed: jax_api.ClosedJaxpr | None
    args_info: Any
    jitted_by: str = ""
    asked: int = 0

    @property
    def devices(self) -> int:
        return self.report.num_devices

    def equations(self) -> Iterator[Any]:
        return (eqn for eqn, _, _ in _work.equations(self.jaxpr)) if self.jaxpr is not None else iter(())

    def of_memory(self, size: float) -> float:
        """Return which part of a device's memory some bytes are."""
        return min(1.0, size / max(self.report.memory.peak, 1))


def of(seen: Seen) -> tuple[Finding, ...]:
    """Return all findings, worst first."""
    looked_for = (
        _gathers,
        _redundant,
        _padding,
        _idle,
        _replicated,
        _constants,
        _undonated,
        _donated,
        _unjoined,
        _uneven,
    )
    found = itertools.chain.from_iterable(look(seen) for look in looked_for)
    return tuple(sorted(found, key=lambda finding: -finding.weight))


def not_looked_for(seen: Seen) -> Iterator[str]:
    """Yield what nobody can look for in a program, and why."""
    work = seen.report.work
    if seen.jaxpr is None:
        yield "padding, constants, uneven rows, calls of Python and work done twice: JAX cannot trace this function"
    elif seen.devices > 1 and work.flops and work.share is None:
        yield "work done twice: a loop has no known end"
    if seen.devices > 1 and work.uncounted:
        yield f"work done twice by {', '.join(work.uncounted)}: nobody says how much it is"
    given = seen.report.arguments
    if seen.jitted_by and sum(x.bytes_per_device for x in given) >= _STATE and not any(x.is_donated for x in given):
        yield f"states that are returned changed: {seen.jitted_by} adds arguments and results of its own"


# --- sent ------------------------------------------------------------------------------------------------------------


def _gathers(seen: Seen) -> Iterator[Finding]:
    total = max(seen.report.total_bytes, 1)
    for c in seen.report.collectives:
        if c.kind != "all_gather" or c.is_written or c.total_bytes < _SENT:
            continue
        along = f" along {', '.join(map(repr, c.axes))}" if c.axes else ""
        often = f", {units.of(c.times, 'time')}" if c.times > 1 else ""
        what = f"{c.operand}, which lies in blocks, is" if c.operand else "rows that lie in blocks are"
        write = (
            "use its blocks where they lie, by px.map_fn over its rows or jax.shard_map; or, if it is small, keep it "
            "whole on each device"
            if c.operand
            else "run what this line does on each device's own rows, by px.map_fn over them or jax.shard_map"
        )
        text = f"{what} gathered on each device{along}: {c.shape}, {units.size(c.bytes)}{often}"
        yield Finding("gather", text, c.line, write, c.total_bytes / total)


def _unjoined(seen: Seen) -> Iterator[Finding]:
    program = seen.program
    alike: dict[Any, list[_text.Operation]] = {}
    for operation in program.collectives:
        if operation.kind == "all_reduce" and operation.times:
            key = (operation.computation, program.groups(operation), program.reduces_by(operation))
            alike.setdefault(key, []).append(operation)
    for operations in alike.values():
        apart: list[_text.Operation] = []
        for operation in operations:
            if not any(program.depends(operation, other) or program.depends(other, operation) for other in apart):
                apart.append(operation)
        if len(apart) < 2:
            continue
        shapes = " and of ".join(_text.plain(operation.shape) for operation in apart)
        text = f"{len(apart)} all-reduces, of {shapes}, need nothing of each other"
        line, _ = _lines.nearest(program.frames_near(apart[-1]))
        write = "make them one dtype and reduce them together: jax.lax.psum((a, b), axis), px.reduce_sum((a, b))"
        weight = 0.1 * (len(apart) - 1) / len(program.collectives)
        yield Finding("unjoined", text, line, write, weight)


# --- computed --------------------------------------------------------------------------------------------------------


def _redundant(seen: Seen) -> Iterator[Finding]:
    work, padded = seen.report.work, _worst_padding(seen)
    if seen.devices == 1 or not work.share or work.flops < _TWICE * padded * work.share:
        return
    found = False
    for line in work.lines:
        share = line.share or 0.0
        excess = line.flops - padded * share
        if line.line is None or line.flops < _TWICE * padded * share or excess < 0.05 * work.flops:
            continue
        found = True
        yield _repeated(seen, line.line, line.flops, share, excess / work.flops)
    if not found:
        yield _repeated(seen, None, work.flops, work.share, 1 - padded * work.share / work.flops)


def _repeated(seen: Seen, line: _lines.Line | None, flops: float, share: float, weight: float) -> Finding:
    factor = f"{flops / share:.1f} times" if share else "more than once"
    text = f"the same work is done {factor}: each device computes {units.amount(flops)}"
    text += f", an equal share is {units.amount(share)}" if share else ""
    write = (
        f"let each of the {seen.devices} devices compute its own rows: px.map_fn over them, or jax.shard_map; under "
        f"jax.vmap, convolutions with a kernel per row are gathered"
    )
    return Finding("redundant", text, line, write, weight)


def _placements(seen: Seen) -> Iterator[tuple[str, int, int, int, _lines.Line | None]]:
    """Yield the name, size, padded size and number of devices of each axis, and a line that uses it."""
    for eqn in seen.equations():
        if eqn.primitive.name == "px_map":
            place: placing.Placement = eqn.params["how"].placement
            line, _ = _lines.behind(jax_api.frames_of(eqn))
            yield place.axis.name, place.size, place.num_padded, place.num_devices, line
    for batch in jax.tree.leaves(seen.args_info, is_leaf=_is_batch):
        if _is_batch(batch):
            padded = max((leaf.shape[0] for leaf in jax.tree.leaves(batch.tree) if leaf.shape), default=batch.num_rows)
            yield "batch", batch.num_rows, padded, seen.devices, None


def _is_batch(x: Any) -> bool:
    return hasattr(x, "num_rows") and hasattr(x, "tree")


def _worst_padding(seen: Seen) -> float:
    return max((padded / size for _, size, padded, _, _ in _placements(seen)), default=1.0)


def _padding(seen: Seen) -> Iterator[Finding]:
    told: set[Any] = set()
    for name, size, padded, devices, line in _placements(seen):
        if padded <= _PADDED * size or (name, size, padded) in told:
            continue
        told.add((name, size, padded))
        part = 1 - size / padded
        text = (
            f"the {units.of(size, 'element')} of {name!r} on {units.of(devices, 'device')} are padded to {padded:,}: "
            f"{part:.0%} of the places are empty"
        )
        write = f"take a multiple of {devices}, such as {padded:,}, which takes as long"
        yield Finding("padding", text, line, write, part)


def _idle(seen: Seen) -> Iterator[Finding]:
    if seen.devices < seen.asked:
        text = f"{seen.devices:,} of the {seen.asked:,} devices that were asked for run it: nothing lies on the others"
        write = (
            "let rows lie over them: by px.Axis, by a mesh in force, or by an argument's sharding, "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P('rows')))"
        )
        yield Finding("idle", text, None, write, 1 - seen.devices / seen.asked)


def _uneven(seen: Seen) -> Iterator[Finding]:
    for eqn in seen.equations():
        if eqn.primitive.name != "sharding_constraint":
            continue
        sharding, shape = eqn.params["sharding"], eqn.outvars[0].aval.shape
        mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", ())
        for size, entry in zip(shape, spec, strict=False):
            names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
            parts = math.prod(mesh.shape[name] for name in names) if mesh is not None else 1
            if size % parts:
                text = f"{size:,} rows do not divide by {parts}: the compiler may lay them otherwise than asked for"
                write = "let px.Axis pad them, or pad them yourself to a multiple"
                line, _ = _lines.behind(jax_api.frames_of(eqn))
                yield Finding("uneven", text, line, f"{write} of {parts}", 1 - size / (-(-size // parts) * parts))


# --- held ------------------------------------------------------------------------------------------------------------


def _replicated(seen: Seen) -> Iterator[Finding]:
    for given, arrays in ((True, seen.report.arguments), (False, seen.report.results)):
        for array in arrays:
            if seen.devices > 1 and array.copies == seen.devices and array.bytes >= _HELD:
                write = "split it: give it, or jit's " + ("in_shardings" if given else "out_shardings")
                write += ", a NamedSharding over a mesh axis; parameters by px.train_step(…, shard=…)"
                text = f"{array.name} ({units.size(array.bytes)}) is whole on each of {seen.devices} devices"
                yield Finding("replicated", text, None, write, seen.of_memory(array.bytes * (1 - 1 / seen.devices)))


def _constants(seen: Seen) -> Iterator[Finding]:
    if seen.closed is None:
        return
    inside = [v.val for eqn in seen.equations() for v in eqn.invars if isinstance(v, jax_api.Literal)]
    told: set[int] = set()
    for value in (*seen.closed.consts, *inside):
        held = getattr(value, "nbytes", 0) if isinstance(value, (np.ndarray, jax.Array)) else 0
        if held >= _STATE and id(value) not in told:
            told.add(id(value))
            text = f"an array {value.dtype}{list(value.shape)} ({units.size(held)}) is closed over, and so a constant"
            yield Finding("constant", text, None, "make it an argument of the function", seen.of_memory(held))


def _undonated(seen: Seen) -> Iterator[Finding]:
    if seen.jitted_by:
        return
    results = _grouped(seen.report.results)
    made = {tuple((array.shape, array.dtype) for array in group) for group in results.values()}
    made.add(tuple((array.shape, array.dtype) for array in seen.report.results))
    for number, (name, group) in enumerate(_grouped(seen.report.arguments).items()):
        held = sum(array.bytes_per_device for array in group)
        is_state = len(group) > 1 and tuple((array.shape, array.dtype) for array in group) in made
        if is_state and held >= _STATE and not any(array.is_donated for array in group):
            text = f"{name} ({units.size(held)} on each device) is returned changed, and the old one kept beside it"
            write = f"if nobody needs the old one, write jax.jit(…, donate_argnums={number})"
            yield Finding("undonated", text, None, write, seen.of_memory(held))


def _grouped(arrays: tuple[Layout, ...]) -> dict[str, list[Layout]]:
    """Return arrays by the argument that they are of, or by the part of a result."""
    found: dict[str, list[Layout]] = {}
    for array in arrays:
        part = re.match(r"(?:result|args)(?:\[[^\]]*\])?|[^\[.]*", array.name)
        found.setdefault(part[0] if part else array.name, []).append(array)
    return found


def _donated(seen: Seen) -> Iterator[Finding]:
    given = [array for array in seen.report.arguments if array.is_donated]
    unused = sum(array.bytes_per_device for array in given) - seen.report.memory.donated
    if unused >= _STATE:
        text = f"{units.size(unused)} are donated, but no result has the shape, dtype and layout to lie there"
        yield Finding("unused_donation", text, None, "donate only what is returned changed", seen.of_memory(unused))
