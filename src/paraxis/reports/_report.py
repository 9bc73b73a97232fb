"""A report, as users have it: what is in it, and how it looks."""

import dataclasses
from collections.abc import Iterable

from paraxis import _html as html
from paraxis.reports import _as_html, _as_text, units
from paraxis.reports._page import Page
from paraxis.reports._values import Contents


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Contents, Page):
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
        estimate: with ``on=``, what it would take there: ``seconds``, and of these ``products``, ``memory`` and
            ``sending``; ``fits``, ``peak`` and ``limit`` of the memory; else ``None``.
        unchecked: what nobody can look for here, each with the reason.
        asked: how many devices ``devices=`` or ``on=`` ask for; 0: those that are here.
    """

    def __repr__(self) -> str:
        num = len(self.findings)
        return f"<report on {self.name}: {self.communication}; {num} finding{'' if num == 1 else 's'}>"

    def __str__(self) -> str:
        return _as_text.of(self)

    @property
    def _title(self) -> str:
        return f"{self.name} on {units.of(self.num_devices, 'device')}"

    def _parts(self) -> Iterable[str]:
        return _as_html.parts(self)

    def _repr_html_(self) -> str:
        return html.card(self, *self._parts())
