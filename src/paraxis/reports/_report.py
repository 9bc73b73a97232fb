"""A report: what a compiled function sends, computes and holds, as values, as text and as a page."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import get_args

from paraxis import _html as html
from paraxis._calls import check
from paraxis.reports import _layout, units
from paraxis.reports._layout import Layout
from paraxis.reports._lines import Line
from paraxis.reports._page import Page, table
from paraxis.reports._values import Collective, Communication, Finding, FindingKind, LineWork, Memory, Work, counted

_CODE = 60
"""The most letters of a line's code."""
_ONE_TURN = "one turn of a loop without a known end"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Page):
    """A report of what a compiled function sends, computes and holds; made by :func:`paraxis.explain`.

    ``print(report)`` shows it, a notebook as a page, and :meth:`save` writes that page to a file.

    Attributes:
        name: of the function.
        num_devices: on which it runs.
        collectives: what it sends, most bytes first; each has ``kind``, ``shape``, ``bytes``, ``times``,
            ``total_bytes``, ``axes``, ``line``, ``verb``, ``is_backward`` and ``is_written``.
        work: what it computes: ``flops`` and ``share`` of one device, and ``lines`` with the same.
        memory: what one device holds: ``arguments``, ``results``, ``temporaries``, ``donated``, ``peak``, ``limit``.
        arguments: how each lies: ``name``, ``shape``, ``split``, ``blocks``, ``copies``, ``bytes_per_device``.
        results: likewise.
        callbacks: the lines that call Python while it runs.
        seconds: what tracing and lowering took, and what compiling took.
        findings: what could be better, worst first: ``kind``, ``text``, ``line``, ``write`` and ``weight``.
        unchecked: what nobody can look for here, each with the reason.
    """

    name: str
    num_devices: int
    collectives: tuple[Collective, ...]
    work: Work
    memory: Memory
    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    callbacks: tuple[Line | None, ...]
    seconds: tuple[float, float]
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def communication(self) -> Communication:
        """The number and bytes of each kind of collective; one in a loop counts once."""
        return counted((collective.kind, collective.bytes) for collective in self.collectives)

    @property
    def total_bytes(self) -> int:
        """The bytes of all collectives, loops multiplied, in all branches; no bound unless :attr:`is_certain`."""
        return sum(collective.total_bytes for collective in self.collectives)

    @property
    def is_certain(self) -> bool:
        """Return whether it is known how often each collective runs; an unknown end of a loop counts as one turn."""
        return all(collective.is_certain for collective in self.collectives)

    @property
    def fits(self) -> bool | None:
        """Return whether a device's memory suffices; ``None``: nobody knows how much it is."""
        return None if self.memory.limit is None else self.memory.peak <= self.memory.limit

    def found(self, kind: FindingKind) -> Sequence[Finding]:
        """Return the findings of one kind, worst first.

        Raises:
            ValueError: if there is no such kind.
        """
        check.one_of("found", "kind", kind, get_args(FindingKind))
        return [finding for finding in self.findings if finding.kind == kind]

    def summary(self) -> dict[str, int]:
        """Return the numbers of one device by name, for a snapshot in a test.

        What a loop without a known end sends or computes has a name of its own, which says that it is of one turn.

        Example:
            >>> import jax, jax.numpy as jnp, paraxis as px
            >>> square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            >>> px.explain(jnp.matmul)(square, square).summary()["flops"]
            524288
        """
        found: collections.Counter[str] = collections.Counter(devices=self.num_devices)
        for c in self.collectives:
            along = f" along {', '.join(c.axes)}" if c.axes else ""
            turn = "" if c.is_certain else f", {_ONE_TURN}"
            found[f"{c.kind}{along}, times{turn}"] += c.times
            found[f"{c.kind}{along}, bytes{turn}"] += c.total_bytes
        found["flops" if self.work.is_certain else f"flops, {_ONE_TURN}"] = self.work.flops
        memory = {"argument": "arguments", "result": "results", "temporary": "temporaries"}
        return {**found, **{f"{name} bytes": getattr(self.memory, part) for name, part in memory.items()}}

    def __repr__(self) -> str:
        num = len(self.findings)
        return f"<report on {self.name}: {self.communication}; {num} finding{'' if num == 1 else 's'}>"

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in _text(self))

    @property
    def _title(self) -> str:
        return f"{self.name} on {units.of(self.num_devices, 'device')}"

    def _parts(self) -> Iterator[str]:
        return _html(self)

    def _repr_html_(self) -> str:
        return html.card(self, *self._parts())


# --- as text ---------------------------------------------------------------------------------------------------------


def _text(report: Report) -> Iterator[str]:
    lowered, compiled = report.seconds
    yield f"{report._title}; traced in {lowered:.2f} s, compiled in {compiled:.2f} s"
    yield ""
    yield _sent(report)
    if report.collectives:
        yield from table([_collective(collective) for collective in report.collectives])
    if report.callbacks:
        yield _calls(report)
    yield ""
    yield _computed(report)
    if report.work.flops:
        yield from table([_line_work(line) for line in report.work.lines])
    if report.work.uncounted:
        yield f"  not counted: {', '.join(report.work.uncounted)}"
    yield ""
    yield _held(report)
    for title, arrays in (("Arguments", report.arguments), ("Results", report.results)):
        if arrays:
            yield ""
            yield title
            yield from table([_array(array) for array in arrays])
    yield ""
    yield _found(report)
    for number, finding in enumerate(report.findings, 1):
        yield f"  {number}. {finding.text}"
        if finding.line:
            yield f"     {finding.line}   {_code(finding.line)}"
        yield f"     → {finding.write}"
    yield from (f"  not looked for: {what}" for what in report.unchecked)


def _sent(report: Report) -> str:
    if not report.collectives:
        return "Sends nothing"
    count, size = units.of(len(report.collectives), "collective"), units.size(report.total_bytes)
    branches = "all branches" if any(c.is_branch for c in report.collectives) else ""
    counting = " and ".join(filter(None, (branches, "" if report.is_certain else _ONE_TURN)))
    return f"Sends {size} per device in {count}{counting and f', counting {counting}'}"


def _calls(report: Report) -> str:
    return f"Calls Python from {', '.join(str(line or 'an unknown line') for line in report.callbacks)}"


def _collective(c: Collective) -> list[str]:
    """Return a collective's cells: bytes, kind and shape, along, whose, where, code."""
    often = f"{c.times:,} × " if c.times > 1 else ""
    each = f"{often}{units.size(c.bytes)}" + ("" if c.is_certain else " per turn")
    along = f"along {', '.join(c.axes)}" if c.axes else f"of {c.group_size} devices"
    by = c.verb or ("written" if c.is_written else "compiler, in a ring" if c.is_ring else "compiler")
    side = (", backward" if c.is_backward else "") + (", in a branch" if c.is_branch else "")
    line = str(c.line) if c.line else f"of {c.operand}" if c.operand else "unknown line"
    return [each, f"{c.kind} {c.shape}", along, by + side, line, _code(c.line)]


def _code(line: Line | None) -> str:
    text = line.code if line else ""
    return text if len(text) <= _CODE else f"{text[: _CODE - 2]} …"


def _computed(report: Report) -> str:
    work = report.work
    if not work.flops:
        return "Computes no matrix products or convolutions"
    share = f", {work.factor:.2f} × an equal share" if work.factor else ""
    open_ = "" if work.is_certain else f", counting {_ONE_TURN}"
    return f"Computes {units.amount(work.flops)} per device in products and convolutions{share}{open_}"


def _line_work(line: LineWork) -> list[str]:
    """Return a line's cells: work, of its share, where, code."""
    share = f"{line.flops / line.share:.2f} × its share" if line.share else ""
    return [units.amount(line.flops), share, str(line.line or "unknown line"), _code(line.line)]


def _held(report: Report) -> str:
    memory = report.memory
    limit = f" of {units.size(memory.limit)}" if memory.limit else ""
    parts = {"arguments": memory.arguments, "results": memory.results, "temporaries": memory.temporaries}
    text = ", ".join(f"{name} {units.size(size)}" for name, size in parts.items())
    donated = f"; {units.size(memory.donated)} of the results lie where arguments were" if memory.donated else ""
    return f"Holds {units.size(memory.peak)}{limit} per device: {text}{donated}"


def _array(array: Layout) -> list[str]:
    """Return an array's cells: name, dtype, how it is cut, bytes on one device."""
    donated = "donated" if array.is_donated else ""
    return [array.name, array.dtype, str(array), f"{units.size(array.bytes_per_device)} per device", donated]


def _found(report: Report) -> str:
    among = " among what can be looked for" if report.unchecked else ""
    return "Findings" if report.findings else f"No findings{among}"


# --- as a page -------------------------------------------------------------------------------------------------------

_HANGING = "padding-left: 1.5em; text-indent: -1.5em"


def _html(report: Report) -> Iterator[str]:
    items = []
    for finding in report.findings:
        line = finding.line
        where = f"<br><code>{html.escaped(line)} {html.escaped(line.code)}</code>" if line else ""
        items.append(f"<li>{html.escaped(finding.text)}{where}<br>→ {html.escaped(finding.write)}</li>")
    rest = "".join(html.note(f"not looked for: {what}") for what in report.unchecked)
    yield _heading(_found(report)) + (f"<ol>{''.join(items)}</ol>" if items else "") + rest
    sent = [_collective(collective) for collective in report.collectives]
    yield (
        _heading("Communication")
        + html.note(_sent(report))
        + (html.table(["bytes", "what", "along", "whose", "line", "code"], sent) if sent else "")
        + (html.note(_calls(report)) if report.callbacks else "")
    )
    lines = [_line_work(line) for line in report.work.lines] if report.work.flops else []
    yield (
        _heading("Work")
        + html.note(_computed(report))
        + (html.table(["work", "of its share", "line", "code"], lines) if lines else "")
    )
    yield _heading("Memory") + html.note(_held(report))
    for title, arrays in (("Arguments", report.arguments), ("Results", report.results)):
        if arrays:
            yield _heading(title) + "".join(map(_html_array, arrays))
    lowered, compiled = report.seconds
    yield html.note(f"traced in {lowered:.2f} s, compiled in {compiled:.2f} s")


def _heading(text: str) -> str:
    return f"<h2>{html.escaped(text)}</h2>"


def _html_array(array: Layout) -> str:
    name, *rest = _array(array)
    line = f"<code>{html.escaped(name)}</code> {html.escaped(', '.join(filter(None, rest)))}"
    drawn = _layout.html_picture(array)
    below = f'<div style="margin: 0 0 0.6em 1.5em">{drawn}</div>' if drawn else ""
    return f'<div style="{_HANGING}">{line}</div>{below}'
