"""A report as text, for a terminal."""

from collections.abc import Iterator, Sequence

from paraxis.reports import _grids, _lines, units
from paraxis.reports._lines import Line
from paraxis.reports._values import Collective, Contents, Estimate, Layout, LineWork

_MOST = 12
"""The most lines of a list; of longer ones, how many are left out."""
_CODE = 60
"""The most letters of a line's code."""
ONE_TURN = "one turn of a loop without a known end"


def of(report: Contents) -> str:
    """Return the whole report."""
    parts = (_head, _sent, _computed, _held, _taken, _lies, _found)
    return "\n".join(line.rstrip() for part in parts for line in part(report))


def _head(report: Contents) -> Iterator[str]:
    lowered, compiled = report.seconds
    devices = units.of(report.num_devices, "device")
    yield f"{report.name} on {devices}; traced in {lowered:.2f} s, compiled in {compiled:.2f} s"


def _sent(report: Contents) -> Iterator[str]:
    yield ""
    if not report.collectives:
        yield "Sends nothing"
    else:
        yield total(report)
        yield from table([sent(collective) for collective in report.collectives])
    if report.callbacks:
        yield calls(report)


def total(report: Contents) -> str:
    """Return the sentence about all collectives together."""
    count, size = units.of(len(report.collectives), "collective"), units.size(report.total_bytes)
    branches = "all branches" if any(c.is_branch for c in report.collectives) else ""
    open_ = "" if report.is_certain else ONE_TURN
    counting = " and ".join(filter(None, (branches, open_)))
    return f"Sends {size} per device in {count}{counting and f', counting {counting}'}"


def calls(report: Contents) -> str:
    """Return the sentence about calls of Python."""
    return f"Calls Python from {', '.join(str(line or 'an unknown line') for line in report.callbacks)}"


def sent(c: Collective) -> list[str]:
    """Return a collective's cells: total, each, kind and shape, along, whose, where, code."""
    often = f"{c.times:,} × " if c.times > 1 else ""
    each = f"{often}{units.size(c.bytes)}" + ("" if c.is_certain else " per turn")
    along = f"along {', '.join(c.axes)}" if c.axes else f"of {c.group_size} devices"
    by = "written" if c.is_written else "compiler"
    verbs = ", ".join(dict.fromkeys(verb or by for verb in (c.verb, *dict(c.others).values())))
    others = f"  and {_lines.some([*dict(c.others)])}" if c.others else ""
    side = (", backward" if c.is_backward else "") + (", in a branch" if c.is_branch else "")
    what = f"{c.kind} {c.shape}" + (f" for {c.widened}" if c.widened else "")
    return [each, what, along, verbs + side, str(c.line or ""), code(c.line) + others]


def code(line: Line | None) -> str:
    """Return the text of a line, cut if it is long."""
    text = line.code if line else ""
    return text if len(text) <= _CODE else f"{text[: _CODE - 2]} …"


def _computed(report: Contents) -> Iterator[str]:
    yield ""
    yield computed(report)
    if len(report.work.lines) > 1 or report.work.flops:
        yield from table([line_work(line) for line in report.work.lines])
    if report.work.uncounted:
        yield f"  not counted: {', '.join(report.work.uncounted)}"


def computed(report: Contents) -> str:
    """Return the sentence about the work of one device."""
    work = report.work
    if not work.flops:
        return "Computes no matrix products or convolutions"
    share = f", {work.factor:.2f} × an equal share" if work.factor else ""
    open_ = "" if work.is_certain else f", counting {ONE_TURN}"
    backward = f", {units.amount(work.backward)} of it backward" if work.backward else ""
    return f"Computes {units.amount(work.flops)} per device in products and convolutions{backward}{share}{open_}"


def line_work(line: LineWork) -> list[str]:
    """Return a line's cells: work, of its share, where, code."""
    share = f"{line.flops / line.share:.2f} × its share" if line.share else ""
    return [units.amount(line.flops), share, str(line.line or "elsewhere"), code(line.line)]


def _held(report: Contents) -> Iterator[str]:
    yield ""
    yield held(report)


def held(report: Contents) -> str:
    """Return the sentence about the memory of one device."""
    memory = report.memory
    limit = f" of {units.size(memory.limit)}" if memory.limit else ""
    parts = {"arguments": memory.arguments, "results": memory.results, "temporaries": memory.temporaries}
    text = ", ".join(f"{name} {units.size(size)}" for name, size in parts.items())
    donated = f"; {units.size(memory.donated)} of the results lie where arguments were" if memory.donated else ""
    return f"Holds {units.size(memory.peak)}{limit} per device: {text}{donated}"


def _taken(report: Contents) -> Iterator[str]:
    if report.estimate is not None:
        yield ""
        yield taken(report.estimate)


def taken(estimate: Estimate) -> str:
    """Return the sentences about a machine that need not be here."""
    parts = {"products": estimate.products, "memory": estimate.memory, "sending": estimate.sending}
    text = ", ".join(f"{name} {units.time(time)}" for name, time in parts.items())
    fits = "fits" if estimate.fits else f"does NOT fit: {units.size(estimate.peak)} are needed"
    limit = f"; {fits} in {units.size(estimate.limit)}" if estimate.limit < float("inf") else ""
    return (
        f"Takes about {units.time(estimate.seconds)} on {estimate.machine} at its peaks: {text}{limit}. Without "
        f"overlap, latencies and slower kernels ({estimate.source or 'as given'})"
    )


def _lies(report: Contents) -> Iterator[str]:
    for title, arrays in (("Arguments", report.arguments), ("Results", report.results)):
        if arrays:
            yield ""
            yield title
            yield from table([layout(array) for array in arrays])


def layout(array: Layout) -> list[str]:
    """Return an array's cells: name, dtype, how it is cut, bytes on one device."""
    donated = "donated" if array.is_donated else ""
    return [array.name, array.dtype, str(array), f"{units.size(array.bytes_per_device)} per device", donated]


def picture(array: Layout, *, sized: bool = True) -> Iterator[str]:
    """Yield the lines of a table of an array's blocks, which are several, each with the devices that hold it."""
    panels, left_out = _grids.panels(array, sized=sized)
    for panel in panels:
        if panel.title:
            yield f"  {panel.title}"
        rows = [[part, *map(units.runs, devices)] for part, devices in panel.rows]
        yield from table([["", *panel.columns], *rows], len(rows) + 1)
    if left_out:
        yield f"  and {left_out:,} more blocks"


def _found(report: Contents) -> Iterator[str]:
    yield ""
    yield found(report)
    for number, finding in enumerate(report.findings, 1):
        yield f"  {number}. {finding.text}"
        if finding.line:
            yield f"     {finding.line}   {code(finding.line)}"
        yield f"     → {finding.write}"
    yield from (f"  not looked for: {what}" for what in report.unchecked)


def found(report: Contents) -> str:
    """Return the heading of the findings."""
    among = " among what can be looked for" if report.unchecked else ""
    return "Findings" if report.findings else f"No findings{among}"


def table(rows: Sequence[Sequence[str]], most: int = _MOST) -> Iterator[str]:
    """Yield the lines of a table without its empty columns; of many rows, the first ones."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows[:most]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield "  " + "  ".join(cells)
    if len(rows) > most:
        yield f"  … {len(rows) - most:,} more"
