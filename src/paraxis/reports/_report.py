"""A report: what a compiled function sends, computes and holds, as values, as text and as a page."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from paraxis._core import check
from paraxis.reports import _layout, units
from paraxis.reports._hlo import KINDS
from paraxis.reports._lines import Line
from paraxis.reports._page import MOST_ROWS, Page, Section
from paraxis.reports._values import Collective, Communication, Finding, FindingKind, LineWork, Memory, Traffic, Work

_MOST_MOVED = 5  # lines
_CODE = 60  # the most letters of a line
_SENT = ("bytes", "what", "along", "whose", "line", "code")
_ONE_ITERATION = "one iteration of a loop without a known end"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Page):
    """A report of what a compiled function sends, computes and holds; made by :func:`paraxis.explain`.

    Attributes:
        name: of the function.
        num_devices: on which it runs.
        collectives: what it sends, most bytes first, as :class:`paraxis.reports.Collective`.
        work: what it computes, as :class:`paraxis.reports.Work`.
        traffic: what memory it reads and writes, as :class:`paraxis.reports.Traffic`.
        memory: what one device holds, as :class:`paraxis.reports.Memory`.
        arguments: how each lies, as :class:`paraxis.reports.Layout`.
        results: likewise.
        callbacks: the lines that call Python while it runs.
        seconds: what tracing and lowering took, and what compiling took.
        findings: what could be better, worst first, as :class:`paraxis.reports.Finding`.
        unchecked: what nobody can look for here, each with the reason.
    """

    name: str
    num_devices: int
    collectives: tuple[Collective, ...]
    work: Work
    traffic: Traffic
    memory: Memory
    arguments: tuple[_layout.Layout, ...]
    results: tuple[_layout.Layout, ...]
    callbacks: tuple[Line | None, ...]
    seconds: tuple[float, float]
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def communication(self) -> Communication:
        """The number, turns and bytes of each kind of collective."""
        count, times, sent = (collections.Counter[str](dict.fromkeys(KINDS, 0)) for _ in range(3))
        for collective in self.collectives:
            count[collective.kind] += 1
            times[collective.kind] += collective.times
            sent[collective.kind] += collective.total_bytes
        return Communication(count, times, sent, self.is_certain)

    @property
    def total_bytes(self) -> int:
        """The bytes of all collectives, loops multiplied, in all branches; no bound unless :attr:`is_certain`."""
        return sum(collective.total_bytes for collective in self.collectives)

    @property
    def is_certain(self) -> bool:
        """Return whether it is known how often each collective runs; a loop of unknown end counts as one iteration."""
        return all(collective.is_certain for collective in self.collectives)

    @property
    def intensity(self) -> float:
        """Operations for each byte that moves; a device that could do more is bound by its memory, not by its units."""
        return (self.work.flops + self.work.elementwise) / max(self.traffic.bytes, 1)

    def bound(self, *, flops_per_second: float, bytes_per_second: float) -> Literal["products", "traffic"]:
        """Return what takes longer on a device of these two figures, and so bounds it if both go on at once.

        Args:
            flops_per_second: what its units compute in products, such as ``197e12``, of TPU v5e in bfloat16.
            bytes_per_second: what its memory reads and writes, such as ``819e9``.

        Example:
            >>> import jax, jax.numpy as jnp, paraxis as px
            >>> matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
            >>> report = px.explain(jnp.matmul)(matrix, jax.ShapeDtypeStruct((4096,), jnp.float32))
            >>> report.bound(flops_per_second=197e12, bytes_per_second=819e9)
            'traffic'
        """
        is_of_products = self.work.flops / flops_per_second >= self.traffic.bytes / bytes_per_second
        return "products" if is_of_products else "traffic"

    @property
    def fits(self) -> bool | None:
        """Return whether a device's memory suffices; ``None``: nobody knows how much it is."""
        return None if self.memory.limit is None else self.memory.peak <= self.memory.limit

    def found(self, kind: FindingKind) -> Sequence[Finding]:
        """Return the findings of one kind, worst first; a ValueError: there is no such kind."""
        check.one_of("found", "kind", kind, get_args(FindingKind))
        return [finding for finding in self.findings if finding.kind == kind]

    def summary(self) -> dict[str, int]:
        """Return the numbers of one device by name, for a snapshot in a test.

        What a loop without a known end sends or computes has a name of its own: that of one iteration.

        Example:
            >>> import jax, jax.numpy as jnp, paraxis as px
            >>> square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            >>> px.explain(jnp.matmul)(square, square).summary()["flops"]
            524288
        """
        numbers: collections.Counter[str] = collections.Counter(devices=self.num_devices)
        for c in self.collectives:
            along = f" along {', '.join(c.axes)}" if c.axes else ""
            each = "" if c.is_certain else f", {_ONE_ITERATION}"
            numbers[f"{c.kind}{along}, times{each}"] += c.times
            numbers[f"{c.kind}{along}, bytes{each}"] += c.total_bytes
        numbers["flops" if self.work.is_certain else f"flops, {_ONE_ITERATION}"] = self.work.flops
        numbers["elementwise operations"], numbers["traffic bytes"] = self.work.elementwise, self.traffic.bytes
        numbers["argument bytes"], numbers["result bytes"] = self.memory.arguments, self.memory.results
        numbers["temporary bytes"] = self.memory.temporaries
        return dict(numbers)

    @property
    def _title(self) -> str:
        lowered, compiled = self.seconds
        devices = units.of(self.num_devices, "device")
        return f"{self.name} on {devices}; traced in {lowered:.2f} s, compiled in {compiled:.2f} s"

    def _sections(self) -> Iterator[Section]:
        lines = ", ".join(str(line or "an unknown line") for line in self.callbacks)
        calls = [f"Calls Python from {lines}"] if lines else []
        yield Section(self._communication_title(), [_collective(c) for c in self.collectives], _SENT, notes=calls)
        work = [_line_work(line) for line in self.work.lines if line.flops or line.share]
        opaque = [f"not counted: {', '.join(self.work.uncounted)}"] if self.work.uncounted else []
        yield Section(self._work_title(), work, ("work", "of its share", "line", "code"), notes=opaque)
        moved = [[units.size(size), str(line or "unknown line"), _code(line)] for line, size in self.traffic.lines]
        yield Section(self._traffic_title(), moved, ("bytes", "line", "code"), most=_MOST_MOVED)
        calls = "that of the program without XLA's library calls, whose memory it does not tell; a call may hold less"
        yield Section(self._memory_title(), notes=[] if self.memory.is_of_a_call else [calls])
        for title, arrays in (("Arguments", self.arguments), ("Results", self.results)):
            rows = [
                [x.name, x.dtype, str(x), f"{units.size(x.bytes_per_device)} per device", "donated" * x.is_donated]
                for x in arrays
            ]
            if rows:
                yield Section(title, rows, ("array", "dtype", "shape", "bytes", ""))
            for array in arrays[:MOST_ROWS]:
                yield from _layout.drawing(array.name, array, in_text=False) if len(array.blocks) > 1 else ()
        notes = [f"not looked for: {what}" for what in self.unchecked]
        for number, finding in reversed([*enumerate(self.findings, 1)]):
            where = f"\n   {finding.line}   {_code(finding.line)}" if finding.line else ""
            notes.insert(0, f"{number}. {finding.text}{where}\n   → {finding.write}")
        among = " among what can be looked for" if self.unchecked else ""
        yield Section("Findings" if self.findings else f"No findings{among}", notes=notes)

    def _communication_title(self) -> str:
        if not self.collectives:
            return "Sends nothing"
        count, size = units.of(len(self.collectives), "collective"), units.size(self.total_bytes)
        branches = "all branches" if any(c.is_branch for c in self.collectives) else ""
        counting = " and ".join(filter(None, (branches, "" if self.is_certain else _ONE_ITERATION)))
        return f"Sends {size} per device in {count}{counting and f', counting {counting}'}"

    def _work_title(self) -> str:
        work = self.work
        if not work.flops:
            uncounted = f" that can be told, of {units.amount(work.share)} that it asks for" if work.share else ""
            return f"Computes no matrix products or convolutions{uncounted}"
        share = f", {work.factor:.2f} × an equal share" if work.factor else ""
        open_ = "" if work.is_certain else f", counting {_ONE_ITERATION}"
        return f"Computes {units.amount(work.flops)} per device in products and convolutions{share}{open_}"

    def _traffic_title(self) -> str:
        size, elementwise = units.size(self.traffic.bytes), units.amount(self.work.elementwise)
        return f"Moves {size} of memory per device, with {elementwise} elementwise: {self.intensity:.2g} FLOP per byte"

    def _memory_title(self) -> str:
        memory = self.memory
        limit = f" of {units.size(memory.limit)}" if memory.limit else ""
        parts = ", ".join(f"{x} {units.size(getattr(memory, x))}" for x in ("arguments", "results", "temporaries"))
        donated = f"; {units.size(memory.donated)} of the results lie where arguments were" if memory.donated else ""
        return f"Holds at most {units.size(memory.peak)}{limit} per device: {parts}{donated}"


def _collective(c: Collective) -> list[str]:
    often = f"{c.times:,} × " if c.times > 1 else ""
    each = f"{often}{units.size(c.bytes)}" + ("" if c.is_certain else " per iteration")
    along = f"along {', '.join(c.axes)}" if c.axes else f"of {c.group_size} devices"
    by = c.verb or ("written" if c.is_written else "compiler, in a ring" if c.is_ring else "compiler")
    side = (", backward" if c.is_backward else "") + (", in a branch" if c.is_branch else "")
    line = str(c.line) if c.line else f"of {c.operand}" if c.operand else "unknown line"
    return [each, f"{c.kind} {c.shape}", along, by + side, line, _code(c.line)]


def _line_work(line: LineWork) -> list[str]:
    share = f"{line.factor:.2f} × its share" if line.factor else "not counted" if not line.flops else ""
    return [units.amount(line.flops or line.share or 0), share, str(line.line or "unknown line"), _code(line.line)]


def _code(line: Line | None) -> str:
    text = line.code if line else ""
    return text if len(text) <= _CODE else f"{text[: _CODE - 2]} …"
