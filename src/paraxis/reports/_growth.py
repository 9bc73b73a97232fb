"""Reports side by side: what one device computes, sends and holds as devices, or elements, become more."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis.reports import _as_text, units
from paraxis.reports._page import Page
from paraxis.reports._report import Report


@dataclasses.dataclass(frozen=True)
class Point:
    """One report's numbers, of one device.

    Attributes:
        label: what sets it apart, such as the number of devices.
        devices: their number, as it was asked for.
        flops: in products and convolutions.
        share: the same if all shared the work equally and did nothing twice; ``None``: unknown.
        sent: bytes of all collectives, loops multiplied.
        peak: the most bytes at one time.
        findings: how many there are.
        seconds: that a call takes, by estimate, on the machine that was asked for; ``None``: on none.
        fits: whether a device's memory suffices; ``None``: nobody knows how much it is.
        computes_exactly: whether all loops' ends are known; if not, such a loop counts as one turn.
        sends_exactly: likewise, of loops that send.
    """

    label: str
    devices: int
    flops: int
    share: float | None
    sent: int
    peak: int
    findings: int
    seconds: float | None = None
    fits: bool | None = None
    computes_exactly: bool = True
    sends_exactly: bool = True


class Growth(Page):
    """Reports side by side: ``px.explain(fn, devices=[1, 8, 64])(*args)`` gives one.

    ``print(growth)`` shows a line for each report, and a notebook also draws them; :meth:`save` writes that page.

    Args:
        reports: by what sets them apart: numbers of devices, or of elements, or words.

    Attributes:
        reports: the same.
        points: the numbers of each: ``label``, ``devices``, ``flops``, ``share``, ``sent``, ``peak``, ``findings`` and
            ``seconds``, ``fits``, ``computes_exactly`` and ``sends_exactly``.

    Raises:
        ValueError: if there is no report, or something else among them.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> def average(x):
        ...     clients = px.Axis("clients", len(x))
        ...     return px.reduce_mean(px.map_fn(jnp.sin, x, clients), clients)
        >>> sizes = {n: jax.ShapeDtypeStruct((n, 1000), jnp.float32) for n in (8, 80)}
        >>> growth = px.reports.Growth({f"{n} clients": px.explain(average)(x) for n, x in sizes.items()})
        >>> [(point.label, point.sent) for point in growth.points]
        [('8 clients', 4000), ('80 clients', 4000)]
    """

    @arguments.named()
    def __init__(self, reports: Mapping[int | str, Report]) -> None:
        if not isinstance(reports, Mapping) or not reports or not all(isinstance(r, Report) for r in reports.values()):
            raise ValueError(
                f"Growth: reports must be a dict of reports, got {arguments.described(reports)}; write "
                f"px.reports.Growth({{8: px.explain(fn, devices=8)(x), 64: px.explain(fn, devices=64)(x)}})"
            )
        self.reports = dict(reports)
        labels = [f"{label:,}" if isinstance(label, int) else str(label) for label in reports]
        self.points = tuple(map(point, reports.values(), labels))

    @property
    def _title(self) -> str:
        labels, devices = ", ".join(p.label for p in self.points), " devices" if _is_of_devices(self.points) else ""
        return f"{next(iter(self.reports.values())).name}: {labels}{devices}"

    def __repr__(self) -> str:
        return f"<growth of {self._title}>"

    def __str__(self) -> str:
        return text(self.points)

    def _parts(self) -> Iterator[str]:
        header, *rows = _rows(self.points)
        yield html.table(header, rows) + "".join(map(html.note, _remarks(self.points)))
        if len(self.points) > 1:
            yield "".join(_drawings(self.points))


def point(report: Report, label: str) -> Point:
    """Return a report's numbers."""
    work = report.work
    return Point(
        label=label,
        devices=report.asked or report.num_devices,
        flops=work.flops,
        share=work.share,
        sent=report.total_bytes,
        peak=report.memory.peak,
        findings=len(report.findings),
        seconds=None if report.estimate is None else report.estimate.seconds,
        fits=report.fits,
        computes_exactly=work.is_certain,
        sends_exactly=report.is_certain,
    )


def text(points: Sequence[Point]) -> str:
    """Return a line for each point; all columns but the first are of one device."""
    rows = _rows(points)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *_remarks(points)])


def _rows(points: Sequence[Point]) -> list[list[str]]:
    first = "devices" if _is_of_devices(points) else ""
    timed = any(point.seconds is not None for point in points)
    rows = [[first, "computes", "an equal share", "sends", "holds", *["takes about"] * timed, "findings"]]
    for found in points:
        share = "unknown" if found.share is None else units.amount(found.share)
        seconds = [] if not timed else ["" if found.seconds is None else units.time(found.seconds)]
        computes = units.amount(found.flops) + "*" * (not found.computes_exactly)
        sends = units.size(found.sent) + "*" * (not found.sends_exactly)
        holds = units.size(found.peak) + (", does NOT fit" if found.fits is False else "")
        rows.append([found.label, computes, share, sends, holds, *seconds, str(found.findings)])
    return rows


def _remarks(points: Sequence[Point]) -> list[str]:
    """Return what the table's marks mean."""
    is_exact = all(point.computes_exactly and point.sends_exactly for point in points)
    return [] if is_exact else [f"* counting {_as_text.ONE_TURN}"]


def _is_of_devices(points: Sequence[Point]) -> bool:
    return all(point.label == f"{point.devices:,}" for point in points)


def _drawings(points: Sequence[Point]) -> Iterator[str]:
    """Yield a curve for each number: doublings of the devices to the right, doublings of the number up."""
    ways = {"computes": ("flops", units.amount), "sends": ("sent", units.size), "holds": ("peak", units.size)}
    grows = len({point.devices for point in points}) == len(points)
    along = [math.log2(point.devices) if grows else float(n) for n, point in enumerate(points)]

    def of_x(x: float) -> str:
        return f"{round(2**x):,}" if grows else points[round(x)].label

    drawn = []
    for name, (part, told) in ways.items():
        there = [(x, getattr(point, part)) for x, point in zip(along, points, strict=True) if getattr(point, part)]
        curve = [x for x, _ in there], [math.log2(n) for _, n in there]
        drawn.append(html.curves({name: curve}, (of_x, lambda y, told=told: told(round(2**y)))))
    if any(drawn):
        yield html.note("One device, on scales of doublings" + (": devices to the right" if grows else ""))
        yield from drawn
