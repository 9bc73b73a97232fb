"""The look of values in a notebook: small tables, and drawings of curves, as HTML.

Everything that is given is escaped. There are no scripts, no style sheets and nothing to fetch; text and lines take the
colour of what is around them, and fills are in tones that are read on dark and on light.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_TONES = ("#5b7cfa", "#d9772b", "#2f9e6e", "#b75fc4")
# What is not said here a page says, and many have colours for tables.
_TABLE = "border-collapse: collapse; border: none; width: auto; color: inherit"
_CELL = "padding: 0.1em 0.7em 0.1em 0; text-align: left; vertical-align: top; border: none; background: none"
_FAINT = 'style="opacity: 0.7"'
_SHORT = 20  # letters of a cell that is not broken into lines: a number stays with its unit
_MOST_ROWS = 40
_MOST_POINTS = 360
_CURVE = (360, 110)


def escaped(value: Any) -> str:
    """Return the text of a value, to stand in HTML."""
    return html.escape(str(value))


def card(value: Any, *parts: str) -> str:
    """Return the repr of a value as a heading, with parts below it that are HTML already."""
    return titled(repr(value), *parts)


def titled(title: str, *parts: str) -> str:
    """Return a heading, with parts below it that are HTML already."""
    return f"<div><div><code>{escaped(title)}</code></div>{''.join(parts)}</div>"


def note(text: str) -> str:
    """Return a remark, as HTML."""
    return f"<div {_FAINT}>{escaped(text)}</div>"


def facts(pairs: Mapping[str, Any]) -> str:
    """Return a table of names and values; what is ``None`` is left out."""
    return _table("", [f"<th>{escaped(k)}</th>{_cell(str(v))}" for k, v in pairs.items() if v is not None])


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; of many rows the first and the last ones, and how many are left out."""
    half, left_out = _MOST_ROWS // 2, len(rows) - _MOST_ROWS
    lines = [_row(row) for row in (rows if left_out <= 0 else rows[:half])]
    if left_out > 0:
        lines += [_cell(f"… {left_out:,} more …", f' colspan="{len(header)}"'), *(_row(row) for row in rows[-half:])]
    return _table("".join(f"<th>{escaped(name)}</th>" for name in header), lines)


def _row(cells: Iterable[Any]) -> str:
    return "".join(map(_cell, map(str, cells)))


def _cell(text: str, rest: str = "") -> str:
    whole = "; white-space: nowrap" if len(text) <= _SHORT else ""
    return f'<td style="{_CELL}{whole}"{rest}>{escaped(text)}</td>'


def _table(head: str, rows: Sequence[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in (head, *rows) if row)
    styled = body.replace("<th>", f'<th style="{_CELL}; opacity: 0.7">')
    return f'<table style="{_TABLE}"><tbody>{styled}</tbody></table>'


def progress(done: int, total: int | None) -> str:
    """Return a bar; one without an end, where that is not known."""
    return f'<progress value="{done}" max="{total}"></progress>' if total else "<progress></progress>"


def curves(
    named: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    told: tuple[Callable[[float], str], Callable[[float], str]] = ("{:g}".format, "{:.3g}".format),
) -> str:
    """Return a drawing of the first few curves, name → ``(x, y)``, of long ones some of the points.

    Points that are not finite are left out, and so is a curve with fewer than two others. Empty if there is none.

    Args:
        named: the curves.
        told: how an x and a y are written at the ends of their scales.
    """
    finite = {name: [(x, y) for x, y in zip(*xy, strict=True) if math.isfinite(y)] for name, xy in named.items()}
    enough = [(name, _thinned(points)) for name, points in finite.items() if len(points) > 1]
    kept = dict(enough[: len(_TONES)])
    if not kept:
        return ""
    xs, ys = ([point[i] for points in kept.values() for point in points] for i in (0, 1))
    (left, right), (low, high) = _range(xs), _range(ys)
    width, height = _CURVE
    drawn = [f'<path d="M4 4V{height}H{width}" fill="none" stroke="currentColor" opacity="0.4"/>']
    for tone, points in zip(_TONES, kept.values(), strict=False):
        at = " ".join(
            f"{4 + (x - left) / (right - left) * (width - 8):.1f},"
            f"{height - 4 - (y - low) / (high - low) * (height - 12):.1f}"
            for x, y in points
        )
        drawn.append(f'<polyline points="{at}" fill="none" stroke="{tone}" stroke-width="1.5"/>')
    of_x, of_y = told
    if min(ys) == max(ys):
        drawn.append(_text(width + 4, height / 2 + 3, of_y(min(ys))))
    else:
        drawn += [_text(width + 4, 12, of_y(high)), _text(width + 4, height, of_y(low))]
    drawn += [_text(4, height + 12, of_x(left)), _text(width, height + 12, of_x(right), anchor="end")]
    names = " ".join(
        f'<span style="color: {tone}">●</span> {escaped(name)}' for tone, name in zip(_TONES, kept, strict=False)
    )
    return f"<div>{names}</div>" + _svg(width + 70, height + 16, ", ".join(kept), "".join(drawn))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // _MOST_POINTS)
    return points if every == 1 else [*points[:-1:every], points[-1]]


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    low, high = float(min(found)), float(max(found))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 10) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="currentColor">'
        f"{escaped(text)}</text>"
    )


def _svg(width: int, height: int, label: str, inside: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(label)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" style="max-width: 100%; height: auto; margin: 0.3em 0">'
        f"{inside}</svg>"
    )
