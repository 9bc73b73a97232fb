"""Findings: what could be better in a compiled program, each with the line to change. None is guessed at.

Each function looks for one thing, and yields nothing if it is not there, or too small to matter.
"""

import collections
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._core import jax_api, lanes
from paraxis._core.record import Map
from paraxis.errors import AxisError
from paraxis.reports import _flops, _hlo, _lines, _meshes, units
from paraxis.reports._layout import Layout
from paraxis.reports._report import Report
from paraxis.reports._values import Collective, Finding, LineWork

# The least that is worth a word: bytes of a collective, of an array on each device, and of a state or a constant; work
# of a line over its share; places over elements.
_SENT, _HELD, _STATE = 64 * 1024, 16 * 1024**2, 1024**2
_TWICE, _PADDED = 1.25, 1.1


def findings(fn: Any, report: Report, jaxpr: jax_api.Jaxpr, consts: Sequence[Any]) -> tuple[Finding, ...]:
    """Return all findings, worst first; of a program without dead code."""
    unsorted = [*_too_large(report), *_conditions(report), *_replicated(fn, report), *_undonated(report)]
    unsorted += [*_gathers(fn, report, jaxpr), *_redundant(report, jaxpr), *_padding(jaxpr), *_waiting(jaxpr)]
    unsorted += _constants(report, jaxpr, consts)
    return tuple(sorted(unsorted, key=lambda finding: -finding.weight))


def unchecked(report: Report) -> Iterator[str]:
    work = report.work
    if report.num_devices > 1 and work.flops and work.share is None:
        yield "work done twice: a loop has no known end"
    if report.num_devices > 1 and work.uncounted:
        yield f"work done twice by {', '.join(work.uncounted)}: nobody says how much it is"


# --- sent ------------------------------------------------------------------------------------------------------------


def _gathers(fn: Any, report: Report, jaxpr: jax_api.Jaxpr) -> Iterator[Finding]:
    # The axes along which maps gather their elements; and the rows of each argument, padding left out.
    map_axes = {x for e, *_ in _flops.walk(jaxpr) if e.primitive.name == "all_gather" for x in jax_api.named_axes(e)}
    sliced: list[Any] = [e for e in jaxpr.eqns if e.primitive.name == "slice"]
    cuts = {e.invars[0].aval.shape: e.outvars[0].aval.shape for e in sliced}
    rows = [(x.name, cuts.get(x.shape, x.shape)[0], x.split[0]) for x in report.arguments if x.cut]
    uneven = [f"take a multiple of {k} rows, as {n:,} of {x} do not divide; else " for x, n, k in rows if n % k]
    # What a training step was told to split; of 32,000 rows, a TPU's compiler may gather bf16[256,125,2048], by blocks.
    sharded = [x for x in report.arguments if getattr(fn, "shard", None) and x.name.startswith("state.") and x.cut]
    blocks = lambda x: [n for dim, k in zip(x.shape, x.split, strict=True) for n in (k, dim // k) if n > 1]  # noqa: E731
    split = [sorted(dims) for x in sharded for dims in (x.shape, blocks(x))]
    by_line: dict[Any, list[Collective]] = collections.defaultdict(list)
    for c in report.collectives:
        is_wanted = c.is_written or not map_axes.isdisjoint(c.axes) or sorted(_hlo.dims(c.shape)) in split
        if c.kind == "all_gather" and not is_wanted:
            by_line[c.line, c.axes].append(c)
    for (line, axes), group in by_line.items():
        first, sent = group[0], sum(c.total_bytes for c in group)
        along = f" along {', '.join(map(repr, axes))}" if axes else ""
        what = f"{first.operand}, which lies in blocks, is" if first.operand else "an array that lies in blocks is"
        if sent >= _SENT:
            yield Finding(
                kind="gather",
                text=f"{what} gathered on each device{along}: {first.shape}, {units.size(sent)} in all",
                line=line,
                write="".join(uneven[:1])
                + "compute on each device's own rows, by px.map_fn over them or jax.shard_map; or, if the array is "
                "small, keep it whole on each device",
                weight=sent / report.total_bytes,
            )


def _conditions(report: Report) -> Iterator[Finding]:
    for c in report.collectives:
        if c.is_condition:
            yield Finding(
                kind="condition",
                text="the devices exchange a loop's condition in each iteration, and all wait for the last one",
                line=c.line,
                write="if the rows are independent, let each device loop over its own: px.map_fn over the rows",
                weight=0.5,
            )


# --- computed --------------------------------------------------------------------------------------------------------


def _redundant(report: Report, jaxpr: jax_api.Jaxpr) -> Iterator[Finding]:
    work, devices = report.work, report.num_devices
    fair = {line: flops / devices for line, flops in _flops.of_jaxpr(jaxpr, padded=True)[0].items()}
    whole = sum(fair.values())
    if devices == 1 or not work.share or work.flops < _TWICE * whole:
        return
    excess = {one: one.flops - fair[one.line] for one in work.lines if one.line and one.line in fair}
    lines = [one for one, more in excess.items() if more >= max((_TWICE - 1) * fair[one.line], 0.05 * work.flops)]
    for one in lines or [LineWork(None, work.flops, work.share)]:
        share = one.share or math.inf
        yield Finding(
            kind="redundant",
            text=f"the same work is done {one.flops / share:.1f} times: each device computes "
            f"{units.amount(one.flops)}, an equal share is {units.amount(share)}",
            line=one.line,
            write=f"let each of the {devices} devices compute its own rows: px.map_fn over them, or jax.shard_map; "
            "under jax.vmap, convolutions with a kernel per row are gathered",
            weight=excess.get(one, work.flops - whole) / work.flops,
        )


def _padding(jaxpr: jax_api.Jaxpr) -> Iterator[Finding]:
    places = {
        (place.axis.name, place.size, place.num_padded): (place.num_devices, eqn)
        for eqn, *_ in _flops.walk(jaxpr)
        if (place := _meshes.placement(eqn)) is not None
    }
    for (name, size, padded), (devices, eqn) in places.items():
        if padded > _PADDED * size:
            part = 1 - size / padded
            yield Finding(
                kind="padding",
                text=f"the {units.of(size, 'element')} of {name!r} on {units.of(devices, 'device')} are padded to "
                f"{padded:,}: {part:.0%} of the places are empty",
                line=_lines.behind(jax_api.frames_of(eqn))[0],
                write=f"take a multiple of {devices}, such as {padded:,}, which takes as long",
                weight=part,
            )


def _waiting(jaxpr: jax_api.Jaxpr) -> Iterator[Finding]:
    for eqn, *_ in _flops.walk(jaxpr):
        m = Map.of(eqn.params) if _meshes.placement(eqn) is not None else None
        if m is None or m.uses_axis or m.lowering == "lanes" or not jax_api.holds(m.body.jaxpr, "while"):
            continue
        axis, number = m.placement.axis, m.placement.num_local
        with contextlib.suppress(AxisError, NotImplementedError):  # elements that exchange values have to be in step
            if min(axis.at_once or 2, number) > 1 and lanes.prepare(m, dict(m.axis_env))[1] is not None:
                yield Finding(
                    kind="waiting",
                    text=f"a loop ends at different times for the {number} elements of {axis.name!r} that a device "
                    "has, and each turns as often as the last",
                    line=_lines.behind(jax_api.frames_of(eqn))[0],
                    write="px.balance(fn, args, axis) tells how much they wait; px.map_fn(…, lowering='lanes'), or "
                    "at_once=1, lets each go on by itself",
                    weight=0.25,
                )


# --- held ------------------------------------------------------------------------------------------------------------


def _of_memory(report: Report, size: float) -> float:
    """Return which part of a device's memory some bytes are."""
    return min(1.0, size / max(report.memory.peak, 1))


def _too_large(report: Report) -> Iterator[Finding]:
    memory = report.memory
    ways = {
        "arguments": "split the arguments over more devices by their shardings",
        "results": "split the results over more devices by out_shardings, or donate the arguments that they replace",
        "temporaries": "compute fewer rows at a time, as by px.Axis(…, at_once=…), or use jax.checkpoint",
    }
    most = max(ways, key=lambda part: getattr(memory, part))
    if report.fits is False:
        yield Finding(
            kind="too_large",
            text=f"it does not fit: {units.size(memory.peak)} are needed on each device, and a device has "
            f"{units.size(memory.limit or 0)}; {units.size(getattr(memory, most))} are {most}",
            write=ways[most],
            weight=1.0,
        )


def _replicated(fn: Any, report: Report) -> Iterator[Finding]:
    devices = report.num_devices
    kinds = collections.Counter((x.shape, x.dtype) for x in report.arguments if x.copies == devices)
    for arrays, which in ((report.arguments, "in_shardings"), (report.results, "out_shardings")):
        for name, group in _groups([x for x in arrays if x.copies == devices > 1]).items():
            size = sum(array.bytes for array in group)
            is_input = which == "out_shardings" and not collections.Counter((x.shape, x.dtype) for x in group) - kinds
            if size >= _HELD and not is_input:
                what, verb = (f"{len(group):,} arrays of {name}", "are") if len(group) > 1 else (group[0].name, "is")
                yield Finding(
                    kind="replicated",
                    text=f"{what} ({units.size(size)}) {verb} whole on each of {devices} devices",
                    write='split it: px.train_step(…, shard="params")'
                    if hasattr(fn, "shard") and name == "state"
                    else f"split it: give it, or jit's {which}, a NamedSharding over a mesh axis",
                    weight=_of_memory(report, size * (1 - 1 / devices)),
                )


def _constants(report: Report, jaxpr: jax_api.Jaxpr, consts: Sequence[Any]) -> Iterator[Finding]:
    inside = [*consts]
    for eqn, *_ in _flops.walk(jaxpr):
        inside += [v.val for v in eqn.invars if isinstance(v, jax_api.Literal)]
        for value in jax.tree.leaves([*eqn.params.values()]):
            inside += value.consts if isinstance(value, jax_api.ClosedJaxpr) else []
    for array in {id(x): x for x in inside if isinstance(x, (np.ndarray, jax.Array))}.values():
        if array.nbytes >= _STATE:
            yield Finding(
                kind="constant",
                text=f"an array {array.dtype}{list(array.shape)} ({units.size(array.nbytes)}) is closed over, and so a "
                "constant",
                write="make it an argument of the function",
                weight=_of_memory(report, array.nbytes),
            )


def _undonated(report: Report) -> Iterator[Finding]:
    """Yield arguments that are trees, and that come back with the same paths, shapes, dtypes and layouts."""
    subtrees: dict[str, set[Any]] = collections.defaultdict(set)
    for array in report.results:
        for end in (match.start() for match in re.finditer(r"[.\[]|$", array.name)):
            subtrees[array.name[:end]].add((array.name[end:], array.shape, array.dtype, array.blocks))
    arguments: dict[Any, dict[str, list[Layout]]] = collections.defaultdict(dict)
    for name, group in _groups(report.arguments).items():
        tree = frozenset((x.name.removeprefix(name), x.shape, x.dtype, x.blocks) for x in group)
        if all(path for path, *_ in tree):
            arguments[tree][name] = group
    for tree, groups in arguments.items():
        undonated = {name: group for name, group in groups.items() if not any(array.is_donated for array in group)}
        size = sum(array.bytes_per_device for array in next(iter(groups.values())))
        returned = sum(subtree == tree for subtree in subtrees.values())
        if size >= _STATE and undonated and returned > len(groups) - len(undonated):
            yield Finding(
                kind="undonated",
                text=f"{' or '.join(undonated)} ({units.size(size)} on each device) is returned changed, and the "
                "old one kept beside it",
                write=f"if nobody needs the old one, donate it: jax.jit(…, donate_argnames={next(iter(undonated))!r})",
                weight=_of_memory(report, size),
            )


def _groups(arrays: Sequence[Layout]) -> dict[str, list[Layout]]:
    """Return the arrays of each argument, or of each part of the result."""
    groups: dict[str, list[Layout]] = collections.defaultdict(list)
    for array in arrays:
        owner = re.match(r"(?:args|result)\[[^\]]*\]|[^\[.]*", array.name)
        groups[owner[0] if owner else array.name].append(array)
    return groups
