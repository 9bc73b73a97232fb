"""Findings: what could be better in a compiled program, each with the line to change. None is guessed at.

Each function looks for one thing, and yields nothing if it is not there, or too small to matter.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from paraxis._axes import placing
from paraxis._axes.axis import Axis
from paraxis._jax import jax_api
from paraxis.reports import _lines, _states, _text, _work, units
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
_Report = TypeVar("_Report", bound=Contents)


@dataclasses.dataclass(frozen=True)
class Seen:
    """The material to look at. ``jaxpr`` has no dead code; it and ``closed`` are ``None`` for what JAX cannot trace.

    ``jitted_by`` is the library that jits the function, which adds arguments and results of its own; empty: JAX.
    ``axis`` is that of the members, if the function is an ensemble's; ``called`` has the parameters by which arguments
    are named, if these are a user's.
    """

    report: Contents
    program: _text.Program
    jaxpr: jax_api.Jaxpr | None
    closed: jax_api.ClosedJaxpr | None
    args_info: Any
    jitted_by: str = ""
    axis: Axis | None = None
    called: Any = None

    @property
    def devices(self) -> int:
        return self.report.num_devices

    def equations(self) -> Iterator[Any]:
        return (eqn for eqn, _, _ in _work.equations(self.jaxpr)) if self.jaxpr is not None else iter(())

    def of_memory(self, size: float) -> float:
        """Return which part of a device's memory some bytes are."""
        return min(1.0, size / max(self.report.memory.peak, 1))

    @functools.cached_property
    def parameters(self) -> Sequence[inspect.Parameter]:
        try:
            return [] if self.called is None else [*inspect.signature(self.called).parameters.values()]
        except (TypeError, ValueError):
            return []

    @functools.cached_property
    def given(self) -> dict[str, list[Layout]]:
        """The arrays of each argument."""
        found: dict[str, list[Layout]] = {}
        rest = [p.name for p in self.parameters if p.kind == p.VAR_POSITIONAL] if self.parameters else ["args"]
        for array in self.report.arguments:
            match = re.match(r"([^\[.]*)(\[\d+\])?", array.name)
            owner = array.name if match is None else match[0] if match[1] in rest else match[1]
            found.setdefault(owner, []).append(array)
        return found

    @functools.cached_property
    def states(self) -> Sequence[_states.State]:
        return tuple(_states.of(self.given, self.report.results))


def of(seen: Seen) -> tuple[Finding, ...]:
    """Return all findings, worst first."""
    looked_for = (
        _too_large,
        _gathers,
        _redundant,
        _padding,
        lambda seen: _idle(seen.devices, seen.report.asked),
        _replicated,
        _constants,
        _undonated,
        _relaid,
        _donated,
        _apart,
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
        is_whole = c.kind == "all_gather" or (c.picks and c.group_size == seen.devices)
        if not is_whole or c.is_written or c.total_bytes < _SENT:
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
        size = f"{c.shape}, {units.size(c.bytes)}{often}"
        text = f"{what} gathered on each device{along}: {size}"
        if c.picks:
            whose = f"{c.operand}, which lies in blocks," if c.operand else "an array that lies in blocks"
            text = f"what an index picks from {whose} is brought to each device by a sum{along}: {size}"
            write = (
                "let each device pick from its own block, by jax.shard_map or px.map_fn over blocks, with indices "
                "within them; or, if the array is small, keep it whole on each device"
            )
        yield Finding("gather", text, c.line, write, c.total_bytes / total)


def _apart(seen: Seen) -> Iterator[Finding]:
    """Yield sums over devices that are two where one would do."""
    program = seen.program
    total = max(seen.report.total_bytes, 1)
    for operation in program.collectives:
        if operation.kind != "all_reduce" or not operation.times or program.reduces_by(operation) != "add":
            continue
        line, verb = _lines.nearest(program.frames_near(operation))
        if (parts := program.sum_alone(operation)) and _text.num_bytes(parts[0].shape) * operation.times >= _SENT:
            size = _text.num_bytes(parts[0].shape)
            text = f"two arrays {_text.plain(parts[0].shape)} are summed over the devices each, and then added up"
            write = (
                "add them before they are sent, which sends one: where they are parts of a gradient, take that of the "
                "loss of each device's rows in jax.shard_map, and jax.lax.psum it; or use px.map_fn and px.reduce_mean"
            )
            yield Finding("unjoined", text, line, write, size * operation.times / total)
        before = None if verb else program.summed_before(operation)
        if before is not None:
            sizes = " and then over ".join(f"{program.group_size(x)}" for x in (before, operation))
            text = f"{_text.plain(operation.shape)} is summed over {sizes} devices, with nothing between"
            write = "sum over all of them at once: jax.lax.psum(x, (axis, other))"
            yield Finding("unjoined", text, line, write, _text.num_bytes(operation.shape) * operation.times / total)


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
    work = seen.report.work
    if seen.devices == 1 or not work.share:
        return
    padded = {} if seen.jaxpr is None else _work.padded_lines(seen.jaxpr, of_maps=True)
    everywhere = _padding_of_batch(seen)
    fair = [(line.share or 0.0) * everywhere * padded.get(line.line, 1.0) for line in work.lines]
    if work.flops < _TWICE * sum(fair):
        return
    found = False
    for line, share in zip(work.lines, fair, strict=True):
        excess = line.flops - share
        if line.line is None or line.flops < _TWICE * share or excess < 0.05 * work.flops:
            continue
        found = True
        yield _repeated(seen, line.line, line.flops, line.share or 0.0, excess / work.flops)
    if not found:
        yield _repeated(seen, None, work.flops, work.share, 1 - sum(fair) / work.flops)


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
        elif rows := _work.padding(eqn):
            yield "batch", *rows, seen.devices, _lines.behind(jax_api.frames_of(eqn))[0]
    for size, padded in _batches(seen):
        yield "batch", size, padded, seen.devices, None
    if seen.axis is not None and seen.devices > 1:  # on one, it may be the program of one
        padded = -(-seen.axis.size // seen.devices) * seen.devices  # of a prediction, members are no argument
        for argument in seen.report.arguments:
            padded = argument.shape[0] if argument.name.startswith("members") else padded
        yield seen.axis.name, seen.axis.size, padded, seen.devices, None


def _batches(seen: Seen) -> Iterator[tuple[int, int]]:
    """Yield the number of rows of each batch of a step, and to how many they are padded."""
    for batch in jax.tree.leaves(seen.args_info, is_leaf=_is_batch):
        if _is_batch(batch):
            padded = max((leaf.shape[0] for leaf in jax.tree.leaves(batch.tree) if leaf.shape), default=batch.num_rows)
            yield batch.num_rows, padded


def _is_batch(x: Any) -> bool:
    return hasattr(x, "num_rows") and hasattr(x, "tree")


def _padding_of_batch(seen: Seen) -> float:
    """Return how many times as long a batch is with its padding, of which all of a step's work is."""
    return max((padded / size for size, padded in _batches(seen)), default=1.0)


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


def for_devices(report: _Report, asked: int) -> _Report:
    """Return a report with the number of devices that were asked for, where JAX has started with so many."""
    more = _idle(report.num_devices, asked)
    findings = sorted([*report.findings, *more], key=lambda finding: -finding.weight)
    return dataclasses.replace(report, asked=asked, findings=tuple(findings))


def _idle(devices: int, asked: int) -> Iterator[Finding]:
    if devices < asked:
        text = f"{devices:,} of the {asked:,} devices that were asked for run it: nothing lies on the others"
        write = (
            "let rows lie over them: by px.Axis, by a mesh in force, or by an argument's sharding, "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P('rows')))"
        )
        yield Finding("idle", text, None, write, 1 - devices / asked)


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


def _too_large(seen: Seen) -> Iterator[Finding]:
    report = seen.report
    if report.fits is not False:
        return
    there, memory = report.estimate, report.memory
    limit = there.limit if there is not None else memory.limit or 0
    which = f"a {there.machine}" if there is not None else "a device"
    parts = {"arguments": memory.arguments, "results": memory.results, "temporaries": memory.temporaries}
    most = max(parts, key=lambda part: parts[part])
    ways = {
        "arguments": "split the arguments over more devices by their shardings",
        "results": "split the results over more devices by out_shardings, or donate the arguments that they replace",
        "temporaries": "compute fewer rows at a time, as by px.Axis(…, at_once=…), or use jax.checkpoint",
    }
    text = (
        f"it does not fit: {units.size(memory.peak)} are needed on each device, and {which} has {units.size(limit)}; "
        f"{units.size(parts[most])} are {most}"
    )
    yield Finding("too_large", text, None, ways[most], 1.0)


def _replicated(seen: Seen) -> Iterator[Finding]:
    if seen.devices == 1:
        return
    results = _parts_of(seen.report.results)
    whole = {True: _whole(seen, seen.given), False: _whole(seen, results)}
    given = collections.Counter(map(_states.kind, itertools.chain.from_iterable(whole[True].values())))
    made = {name: [array for array in arrays if not _taken(given, array)] for name, arrays in whole[False].items()}
    returned = collections.Counter(map(_states.kind, itertools.chain.from_iterable(whole[False].values())))
    for is_given, groups in ((True, whole[True]), (False, made)):
        large = {name: arrays for name, arrays in groups.items() if _bytes(arrays) >= _HELD}
        small = [array for name, arrays in groups.items() if name not in large for array in arrays]
        for name, arrays in [*large.items(), *([("", small)] if _bytes(small) >= _HELD else [])]:
            held = _bytes(arrays)
            many = f"{len(arrays):,} arrays" if len(arrays) > 1 else ""
            what = f"{many}{name and f' of {name}'}" if many else arrays[0].name
            both = is_given and all(_taken(returned, array) for array in arrays)
            write = "split it: give it, or jit's " + ("in_shardings" if is_given else "out_shardings")
            write += ", a NamedSharding over a mesh axis; parameters by px.train_step(…, shard=…)"
            text = f"{what} ({units.size(held)}) {'are' if many else 'is'} whole on each of {seen.devices} devices"
            text += ", and so is what is returned for it" if both else ""
            yield Finding("replicated", text, None, write, seen.of_memory(held * (1 - 1 / seen.devices)))


def _whole(seen: Seen, groups: dict[str, list[Layout]]) -> dict[str, list[Layout]]:
    """Return the arrays of each group that are whole on all devices."""
    return {name: [array for array in group if array.copies == seen.devices] for name, group in groups.items()}


def _taken(counter: collections.Counter[Any], array: Layout) -> bool:
    """Return whether there is an array of its kind left, and take that."""
    counter[_states.kind(array)] -= 1
    return counter[_states.kind(array)] >= 0


def _bytes(arrays: Iterable[Layout]) -> int:
    return sum(array.bytes for array in arrays)


def _constants(seen: Seen) -> Iterator[Finding]:
    if seen.closed is None:
        return
    inside = [v.val for eqn in seen.equations() for v in eqn.invars if isinstance(v, jax_api.Literal)]
    params = itertools.chain.from_iterable(eqn.params.values() for eqn in seen.equations())
    items = (item for value in params for item in (value if isinstance(value, (tuple, list)) else (value,)))
    inside += itertools.chain.from_iterable(item.consts for item in items if isinstance(item, jax_api.ClosedJaxpr))
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
    for state in seen.states:
        pairs = zip(state.given, state.made, strict=True)
        held = sum(old.bytes_per_device for old, new in pairs if _place(old) == _place(new))
        if held >= (_STATE if state.is_tree else _HELD) and not any(array.is_donated for array in state.given):
            text = f"{state.name} ({units.size(held)} on each device) is "
            if state.is_sure and state.is_tree:
                text += "returned changed, and the old one kept beside it"
            else:
                text += "kept beside a result of its shape and dtype"
            write = f"if nobody needs the old one, {_donating(seen, state.name)}"
            yield Finding("undonated", text, None, write, seen.of_memory(held))


def _donating(seen: Seen, argument: str) -> str:
    """Return what to write to donate an argument: JAX counts the positional ones, static ones included."""
    for number, parameter in enumerate(seen.parameters):
        if parameter.kind == parameter.VAR_POSITIONAL and argument.startswith(f"{parameter.name}["):
            number += int(argument[len(parameter.name) + 1 : -1])
        elif parameter.name != argument and not (parameter.kind == parameter.VAR_KEYWORD and argument.isidentifier()):
            continue
        is_named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
        how = f"donate_argnames={argument!r}" if is_named else f"donate_argnums={number}"
        return f"write jax.jit(…, {how})"
    return "donate it, as by jax.jit(…, donate_argnums=…) or px.Jit(…, donate=True)"


def _relaid(seen: Seen) -> Iterator[Finding]:
    for state in seen.states:
        if not (state.is_sure and (state.is_tree or state.given[0].is_donated)):
            continue  # a bare array need not be what a result of its shape is made of
        pairs = [(old, new) for old, new in zip(state.given, state.made, strict=True) if _place(old) != _place(new)]
        if sum(old.bytes for old, _ in pairs) < _STATE:
            continue
        old, new = max(pairs, key=lambda pair: pair[0].bytes)
        more = f", and so are {len(pairs) - 1:,} others of {state.name}" if len(pairs) > 1 else ""
        text = (
            f"{old.name} ({units.size(old.bytes)}) is given as {old.spec or old} and comes back as {new.spec or new}"
            f"{more}: the next call, which is given it, is compiled again"
        )
        spec = old.spec or "…"
        write = (
            f"return it as it came: jax.lax.with_sharding_constraint(…, NamedSharding(mesh, {spec})), or jax.jit(…, "
            f"out_shardings=…)"
        )
        size = sum(max(old.bytes_per_device, new.bytes_per_device) for old, new in pairs)
        yield Finding("relaid", text, None, write, seen.of_memory(size))


def _place(array: Layout) -> tuple[Any, ...]:
    return array.split, array.blocks


def _parts_of(results: Sequence[Layout]) -> dict[str, list[Layout]]:
    """Return arrays by the part of the result that they are of."""
    found: dict[str, list[Layout]] = {}
    for array in results:
        part = re.match(r"result(?:\[[^\]]*\])?", array.name)
        found.setdefault(part[0] if part else array.name, []).append(array)
    return found


def _donated(seen: Seen) -> Iterator[Finding]:
    given = [array for array in seen.report.arguments if array.is_donated]
    unused = sum(array.bytes_per_device for array in given) - seen.report.memory.donated
    if unused >= _STATE:
        text = f"{units.size(unused)} are donated, but no result has the shape, dtype and layout to lie there"
        yield Finding("unused_donation", text, None, "donate only what is returned changed", seen.of_memory(unused))
