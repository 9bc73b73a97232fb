"""A report as HTML: a part for notebooks, and a page that needs nothing else."""

from collections.abc import Iterable, Iterator

from paraxis import _html as html
from paraxis.reports import _as_text, _grids, units
from paraxis.reports._values import Contents, Layout

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --paper: #ffffff; --faint: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #16181c; } }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: var(--ink); background: var(--paper);
       font: 15px/1.5 system-ui, sans-serif; }
section { overflow-x: auto; margin: 1.2rem 0; padding-top: .4rem; border-top: 1px solid var(--faint);
          /* a shadow where there is more to the right, under a cover that moves with what it ends */
          background: linear-gradient(to left, var(--paper) 50%, transparent) right / 3rem 100% no-repeat local,
                      linear-gradient(to left, var(--faint), transparent) right / 1rem 100% no-repeat scroll; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: .4rem 0; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
td { overflow-wrap: break-word; } section > table { margin-top: .3rem; }
@media (max-width: 40rem) { td, th { white-space: nowrap; } }
"""
_HANGING = "padding-left: 1.5em; text-indent: -1.5em"
_PANEL = "border-collapse: collapse; display: inline-table; width: auto; margin: 0.2em 0.8em 0.2em 0; color: inherit"
_BLOCK = "border: 1px solid currentColor; padding: 0.2em 0.7em; text-align: center; font-size: 0.85em"
_HEAD = "padding: 0.1em 0.5em; font-weight: normal; font-size: 0.8em; opacity: 0.7; border: none; background: none"


def page(title: str, sections: Iterable[str]) -> str:
    """Return a page of its own, dark or light as the reader's system is."""
    title = html.escaped(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{''.join(f'<section>{part}</section>' for part in sections)}</body></html>\n"
    )


def parts(report: Contents) -> Iterator[str]:
    """Return a report's sections."""
    yield heading(_as_text.found(report)) + _findings(report)
    lowered, compiled = report.seconds
    yield heading("Communication") + (
        html.note(_as_text.total(report))
        + html.table(
            ["bytes", "what", "along", "whose", "line", "code"], [_as_text.sent(c) for c in report.collectives]
        )
        if report.collectives
        else html.note("Sends nothing")
    )
    if report.callbacks:
        yield html.note(_as_text.calls(report))
    yield (
        heading("Work")
        + html.note(_as_text.computed(report))
        + (
            html.table(["work", "of its share", "line", "code"], [_as_text.line_work(x) for x in report.work.lines])
            if report.work.flops
            else ""
        )
    )
    yield heading("Memory") + html.note(_as_text.held(report))
    if report.estimate is not None:
        yield heading("Time") + html.note(_as_text.taken(report.estimate))
    for title, arrays in (("Arguments", report.arguments), ("Results", report.results)):
        if arrays:
            yield heading(title) + "".join(_array(array) for array in arrays)
    yield html.note(f"traced in {lowered:.2f} s, compiled in {compiled:.2f} s")


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{html.escaped(text)}</h2>"


def _findings(report: Contents) -> str:
    items = []
    for finding in report.findings:
        where = (
            f"<br><code>{html.escaped(finding.line)} {html.escaped(finding.line.code)}</code>" if finding.line else ""
        )
        items.append(f"<li>{html.escaped(finding.text)}{where}<br>→ {html.escaped(finding.write)}</li>")
    rest = "".join(html.note(f"not looked for: {what}") for what in report.unchecked)
    return (f"<ol>{''.join(items)}</ol>" if items else "") + rest


def _array(array: Layout) -> str:
    name, dtype, how, size, donated = _as_text.layout(array)
    text = ", ".join(filter(None, (dtype, how, size, donated)))
    line = f'<div style="{_HANGING}"><code>{html.escaped(name)}</code> {html.escaped(text)}</div>'
    drawn = picture(array)
    return line + (f'<div style="margin: 0 0 0.6em 1.5em">{drawn}</div>' if drawn else "")


def picture(array: Layout, *, sized: bool = True) -> str:
    """Return a drawing of an array's blocks, each with the devices that hold it; empty if there is only one block.

    Args:
        array: how it lies.
        sized: whether it tells the sizes of its dimensions, and of their parts.
    """
    if len(array.blocks) < 2:
        return ""
    label = _grids.label(array, sized=sized)
    panels, left_out = _grids.panels(array, sized=sized)
    drawn = "".join(map(_panel, panels))
    rest = html.note(f"and {left_out:,} more blocks") if left_out else ""
    return f'<div role="img" aria-label="{html.escaped(label)}">{drawn}</div>{html.note(label)}{rest}'


def _panel(panel: _grids.Panel) -> str:
    title = (
        f'<caption style="{_HEAD}; text-align: left; white-space: nowrap">{html.escaped(panel.title)}</caption>'
        if panel.title
        else ""
    )
    head = "".join(f'<th scope="col" style="{_HEAD}">{html.escaped(part)}</th>' for part in panel.columns)
    rows = [
        f'<tr><th scope="row" style="{_HEAD}">{html.escaped(part)}</th>{"".join(map(_cell, devices))}</tr>'
        for part, devices in panel.rows
    ]
    body = f"<tbody><tr><td></td>{head}</tr>{''.join(rows)}</tbody>"
    return f'<table style="{_PANEL}">{title if panel.title else ""}{body}</table>'


def _cell(devices: tuple[int, ...]) -> str:
    return f'<td style="{_BLOCK}; background: {tone(devices[0])}">{html.escaped(units.runs(devices))}</td>'


def tone(number: int) -> str:
    """Return a colour that text is read on, on dark and on light; those of neighbours differ."""
    return f"hsl({47 * number % 360} 70% 50% / 0.3)"
