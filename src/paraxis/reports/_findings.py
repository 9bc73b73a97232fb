"""Findings: what could be better in a compiled program, each with the line to change. None is guessed at.

Each function looks for one thing, and yields nothing if it is not there, or too small to matter.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._core import jax_api
from paraxis.reports import _flops, _lines, _meshes, units
from paraxis.reports._layout import Layout
from paraxis.reports._report import Report
from paraxis.reports._values import Collective, Finding

_SENT = 64 * 1024
"""The least bytes of a collective that is worth a word."""
_HELD = 16 * 1024**2
"""The least bytes of an array that is worth a word for being on each device."""
_STATE = 1024**2
"""The least bytes of a state, or of a constant."""
_TWICE = 1.25
"""More work than this, of a line's share, is done more than once."""
_PADDED = 1.1


def findings(report: Report, jaxpr: jax_api.Jaxpr | None, consts: Sequence[Any]) -> tuple[Finding, ...]:
    """Return all findings, worst first.

    Args:
        report: on a program.
        jaxpr: of it, without dead code; ``None``: nobody has it.
        consts: arrays that the program closes over.
    """
    found = [*_too_large(report), *_gathers(report), *_conditions(report), *_replicated(report), *_undonated(report)]
    if jaxpr is not None:
        found += [*_redundant(report, jaxpr), *_padding(jaxpr), *_constants(report, jaxpr, consts)]
    return tuple(sorted(found, key=lambda finding: -finding.weight))


def unchecked(report: Report, jaxpr: jax_api.Jaxpr | None) -> Iterator[str]:
    """Yield what nobody can look for in a program, and why."""
    work = report.work
    if jaxpr is None:
        yield "padding, constants, calls of Python and work done twice: JAX cannot trace this function"
    elif report.num_devices > 1 and work.flops and work.share is None:
        yield "work done twice: a loop has no known end"
    if report.num_devices > 1 and work.uncounted:
        yield f"work done twice by {', '.join(work.uncounted)}: nobody says how much it is"


# --- sent ------------------------------------------------------------------------------------------------------------


def _gathers(report: Report) -> Iterator[Finding]:
    by_line: dict[Any, list[Collective]] = {}
    for c in report.collectives:
        if c.kind == "all_gather" and not c.is_written:
            by_line.setdefault((c.line, c.axes), []).append(c)
    for (line, axes), group in by_line.items():
        first, sent = group[0], sum(c.total_bytes for c in group)
        if sent < _SENT:
            continue
        along = f" along {', '.join(map(repr, axes))}" if axes else ""
        often = f", {units.of(first.times, 'time')}" if first.times > 1 else ""
        shown = f"{first.shape}, {units.size(first.bytes)}{often}" if len(group) == 1 else f"{units.size(sent)} in all"
        what = f"{first.operand}, which lies in blocks, is" if first.operand else "rows that lie in blocks are"
        write = (
            "compute on each device's own rows, by px.map_fn over them or jax.shard_map; or, if the array is small, "
            "keep it whole on each device"
        )
        yield Finding(
            "gather", f"{what} gathered on each device{along}: {shown}", line, write, sent / report.total_bytes
        )


def _conditions(report: Report) -> Iterator[Finding]:
    for c in report.collectives:
        if c.is_in_loop and c.is_predicate:
            text = "the devices exchange a loop's condition in each turn, and all wait for the last one"
            write = "if the rows are independent, let each device loop over its own: px.map_fn over the rows"
            yield Finding("condition", text, c.line, write, 0.5)


# --- computed --------------------------------------------------------------------------------------------------------


def _redundant(report: Report, jaxpr: jax_api.Jaxpr) -> Iterator[Finding]:
    work = report.work
    if report.num_devices == 1 or not work.share:
        return
    padded, _ = _flops.of_jaxpr(jaxpr, padded=True)
    fair = {line: flops / report.num_devices for line, flops in padded.items()}
    if work.flops < _TWICE * sum(fair.values()):
        return
    excess = {one: one.flops - fair.get(one.line, 0.0) for one in work.lines if one.line and fair.get(one.line)}
    lines = [
        one
        for one, more in excess.items()
        if one.flops >= _TWICE * fair[one.line] and more >= 0.05 * work.flops  # the line is in excess
    ]
    for one in lines:
        yield _repeated(report, one.line, one.flops, one.share or 0.0, excess[one] / work.flops)
    if not lines:
        yield _repeated(report, None, work.flops, work.share, 1 - sum(fair.values()) / work.flops)


def _repeated(report: Report, line: _lines.Line | None, flops: float, share: float, weight: float) -> Finding:
    text = (
        f"the same work is done {flops / share:.1f} times: each device computes {units.amount(flops)}, an equal share "
        f"is {units.amount(share)}"
    )
    write = (
        f"let each of the {report.num_devices} devices compute its own rows: px.map_fn over them, or jax.shard_map; "
        "under jax.vmap, convolutions with a kernel per row are gathered"
    )
    return Finding("redundant", text, line, write, weight)


def _padding(jaxpr: jax_api.Jaxpr) -> Iterator[Finding]:
    told: set[Any] = set()
    for eqn in _flops.equations(jaxpr):
        if (place := _meshes.placement(eqn)) is None:
            continue
        name, size, padded = found = place.axis.name, place.size, place.num_padded
        if padded <= _PADDED * size or found in told:
            continue
        told.add(found)
        part = 1 - size / padded
        text = (
            f"the {units.of(size, 'element')} of {name!r} on {units.of(place.num_devices, 'device')} are padded to "
            f"{padded:,}: {part:.0%} of the places are empty"
        )
        line, _ = _lines.behind(jax_api.frames_of(eqn))
        write = f"take a multiple of {place.num_devices}, such as {padded:,}, which takes as long"
        yield Finding("padding", text, line, write, part)


# --- held ------------------------------------------------------------------------------------------------------------


def _of_memory(report: Report, size: float) -> float:
    """Return which part of a device's memory some bytes are."""
    return min(1.0, size / max(report.memory.peak, 1))


def _too_large(report: Report) -> Iterator[Finding]:
    memory = report.memory
    if report.fits is not False:
        return
    parts = {"arguments": memory.arguments, "results": memory.results, "temporaries": memory.temporaries}
    most = max(parts, key=lambda part: parts[part])
    ways = {
        "arguments": "split the arguments over more devices by their shardings",
        "results": "split the results over more devices by out_shardings, or donate the arguments that they replace",
        "temporaries": "compute fewer rows at a time, as by px.Axis(…, at_once=…), or use jax.checkpoint",
    }
    text = (
        f"it does not fit: {units.size(memory.peak)} are needed on each device, and a device has "
        f"{units.size(memory.limit or 0)}; {units.size(parts[most])} are {most}"
    )
    yield Finding("too_large", text, None, ways[most], 1.0)


def _replicated(report: Report) -> Iterator[Finding]:
    devices = report.num_devices
    if devices == 1:
        return
    given, made = _whole(report.arguments, devices), _whole(report.results, devices)
    kinds = collections.Counter(_kind(x) for group in given.values() for x in group)
    made = {name: group for name, group in made.items() if collections.Counter(map(_kind, group)) - kinds}
    for groups, which in ((given, "in_shardings"), (made, "out_shardings")):
        for name, group in groups.items():
            held = sum(array.bytes for array in group)
            if held >= _HELD:
                what, verb = (f"{len(group):,} arrays of {name}", "are") if len(group) > 1 else (group[0].name, "is")
                text = f"{what} ({units.size(held)}) {verb} whole on each of {devices} devices"
                write = f"split it: give it, or jit's {which}, a NamedSharding over a mesh axis"
                yield Finding("replicated", text, None, write, _of_memory(report, held * (1 - 1 / devices)))


def _whole(arrays: Sequence[Layout], devices: int) -> dict[str, list[Layout]]:
    """Return the arrays of each group that are whole on all devices."""
    return {name: [x for x in group if x.copies == devices] for name, group in _groups(arrays).items()}


def _constants(report: Report, jaxpr: jax_api.Jaxpr, consts: Sequence[Any]) -> Iterator[Finding]:
    inside = [v.val for eqn in _flops.equations(jaxpr) for v in eqn.invars if isinstance(v, jax_api.Literal)]
    params = itertools.chain.from_iterable(eqn.params.values() for eqn in _flops.equations(jaxpr))
    items = (item for value in params for item in (value if isinstance(value, (tuple, list)) else (value,)))
    inside += itertools.chain.from_iterable(item.consts for item in items if isinstance(item, jax_api.ClosedJaxpr))
    arrays = {id(x): x for x in (*consts, *inside) if isinstance(x, (np.ndarray, jax.Array))}
    for array in arrays.values():
        held = getattr(array, "nbytes", 0)
        if held >= _STATE:
            text = f"an array {array.dtype}{list(array.shape)} ({units.size(held)}) is closed over, and so a constant"
            yield Finding("constant", text, None, "make it an argument of the function", _of_memory(report, held))


def _undonated(report: Report) -> Iterator[Finding]:
    """Yield arguments that are trees, and that come back with the same paths, shapes, dtypes and layouts."""
    made: dict[str, set[Any]] = {}
    for array in report.results:
        for end in (match.start() for match in re.finditer(r"[.\[]|$", array.name)):
            made.setdefault(array.name[:end], set()).add((array.name[end:], *_kind(array), array.blocks))
    alike: dict[Any, dict[str, list[Layout]]] = {}
    for name, group in _groups(report.arguments).items():
        tree = frozenset((array.name.removeprefix(name), *_kind(array), array.blocks) for array in group)
        if all(path for path, *_ in tree):
            alike.setdefault(tree, {})[name] = group
    for tree, groups in alike.items():
        kept = {name: group for name, group in groups.items() if not any(array.is_donated for array in group)}
        held = sum(array.bytes_per_device for array in next(iter(groups.values())))
        returned = sum(found == tree for found in made.values())
        if held >= _STATE and kept and returned > len(groups) - len(kept):
            which = " or ".join(kept)
            text = f"{which} ({units.size(held)} on each device) is returned changed, and the old one kept beside it"
            write = f"if nobody needs the old one, donate it: jax.jit(…, donate_argnames={next(iter(kept))!r})"
            yield Finding("undonated", text, None, write, _of_memory(report, held))


def _groups(arrays: Sequence[Layout]) -> dict[str, list[Layout]]:
    """Return the arrays of each argument, or of each part of the result."""
    found: dict[str, list[Layout]] = {}
    for array in arrays:
        owner = re.match(r"(?:args|result)\[[^\]]*\]|[^\[.]*", array.name)
        found.setdefault(owner[0] if owner else array.name, []).append(array)
    return found


def _kind(array: Layout) -> tuple[Any, ...]:
    return array.shape, array.dtype
