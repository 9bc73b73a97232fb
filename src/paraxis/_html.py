"""The look of values: small tables, in a notebook as HTML, elsewhere as text.

Everything that is given is escaped. There are no scripts, no style sheets and nothing to fetch; text takes the colour
of what is around it.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# What is not said here a page says, and many have colours for tables.
_TABLE = "border-collapse: collapse; border: none; width: auto; color: inherit"
_CELL = "padding: 0.1em 0.7em 0.1em 0; text-align: left; vertical-align: top; border: none; background: none"
_SHORT = 20  # letters of a cell that is not broken into lines: a number stays with its unit
_MOST_ROWS = 40


def escaped(value: Any) -> str:
    return html.escape(str(value))


def titled(title: str, *parts: str) -> str:
    """Return a heading, with parts below it that are HTML already."""
    return f"<div><div><code>{escaped(title)}</code></div>{''.join(parts)}</div>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; of many rows the first and the last ones, and how many are left out."""
    half, left_out = _MOST_ROWS // 2, len(rows) - _MOST_ROWS
    lines = [_row(row) for row in (rows if left_out <= 0 else rows[:half])]
    if left_out > 0:
        lines += [_cell(f"… {left_out:,} more …", f' colspan="{len(header)}"'), *(_row(row) for row in rows[-half:])]
    head = "".join(f'<th style="{_CELL}; opacity: 0.7">{escaped(name)}</th>' for name in header)
    body = "".join(f"<tr>{row}</tr>" for row in (head, *lines) if row)
    return f'<table style="{_TABLE}"><tbody>{body}</tbody></table>'


def _row(cells: Iterable[Any]) -> str:
    return "".join(map(_cell, map(str, cells)))


def _cell(text: str, rest: str = "") -> str:
    whole = "; white-space: nowrap" if len(text) <= _SHORT else ""
    return f'<td style="{_CELL}{whole}"{rest}>{escaped(text)}</td>'


def columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return the lines of a table in text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(justify, row, widths)) for row in rows]


def progress(done: int, total: int | None) -> str:
    """Return a bar; one without an end, where that is not known."""
    return f'<progress value="{done}" max="{total}"></progress>' if total else "<progress></progress>"
