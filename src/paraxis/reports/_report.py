"""A report: what a compiled function sends, computes and holds, as values, as text and as a page."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import get_args

from paraxis._core import check
from paraxis.reports import _layout, units
from paraxis.reports._layout import Layout
from paraxis.reports._lines import Line
from paraxis.reports._page import MOST_ROWS, Page, Section
from paraxis.reports._values import Collective, Communication, Finding, FindingKind, LineWork, Memory, Work, counted

_CODE = 60
"""The most letters of a line's code."""
_SENT = ("bytes", "what", "along", "whose", "line", "code")
_WORK = ("work", "of its share", "line", "code")
_ARRAYS = ("array", "dtype", "shape", "bytes", "")
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

    @property
    def _title(self) -> str:
        lowered, compiled = self.seconds
        devices = units.of(self.num_devices, "device")
        return f"{self.name} on {devices}; traced in {lowered:.2f} s, compiled in {compiled:.2f} s"

    def _sections(self) -> Iterator[Section]:
        lines = ", ".join(str(line or "an unknown line") for line in self.callbacks)
        calls = [f"Calls Python from {lines}"] if lines else []
        yield Section(_sent(self), [_collective(c) for c in self.collectives], _SENT, notes=calls)
        work = [_line_work(line) for line in self.work.lines] if self.work.flops else []
        opaque = [f"not counted: {', '.join(self.work.uncounted)}"] if self.work.uncounted else []
        yield Section(_computed(self), work, _WORK, notes=opaque)
        yield Section(_held(self))
        for title, arrays in (("Arguments", self.arguments), ("Results", self.results)):
            if arrays:
                drawn = [_layout.picture(x.name, x) for x in arrays[:MOST_ROWS] if len(x.blocks) > 1]
                yield Section(title, [_array(x) for x in arrays], _ARRAYS, pictures=drawn, are_printed=False)
        among = " among what can be looked for" if self.unchecked else ""
        found = [_finding(number, finding) for number, finding in enumerate(self.findings, 1)]
        told = [*found, *(f"not looked for: {what}" for what in self.unchecked)]
        yield Section("Findings" if found else f"No findings{among}", notes=told)


def _finding(number: int, finding: Finding) -> str:
    where = f"\n   {finding.line}   {_code(finding.line)}" if finding.line else ""
    return f"{number}. {finding.text}{where}\n   → {finding.write}"


def _sent(report: Report) -> str:
    if not report.collectives:
        return "Sends nothing"
    count, size = units.of(len(report.collectives), "collective"), units.size(report.total_bytes)
    branches = "all branches" if any(c.is_branch for c in report.collectives) else ""
    counting = " and ".join(filter(None, (branches, "" if report.is_certain else _ONE_TURN)))
    return f"Sends {size} per device in {count}{counting and f', counting {counting}'}"


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
