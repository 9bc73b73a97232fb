"""A report as HTML: a part for notebooks, and a page that needs nothing else."""

from collections.abc import Iterator

from paraxis import _html as html
from paraxis.reports import _as_text, units
from paraxis.reports._values import Contents, Layout

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --paper: #ffffff; --faint: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #16181c; } }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: var(--ink); background: var(--paper);
       font: 15px/1.5 system-ui, sans-serif; }
section { overflow-x: auto; margin: 1.2rem 0; padding-top: .4rem; border-top: 1px solid var(--faint); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: .4rem 0; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
td { overflow-wrap: break-word; }
"""
_MOST_BLOCKS = 64
_MOST_NAMED = 4
_PANEL = "border-collapse: collapse; display: inline-table; width: auto; margin: 0.2em 0.8em 0.2em 0; color: inherit"
_BLOCK = "border: 1px solid currentColor; padding: 0.2em 0.7em; text-align: center; background: none; font-size: 0.85em"


def page(report: Contents) -> str:
    """Return a page of its own, dark or light as the reader's system is."""
    title = f"{html.escaped(report.name)} on {html.escaped(units.of(report.num_devices, 'device'))}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{''.join(f'<section>{part}</section>' for part in _parts(report))}</body></html>\n"
    )


def part(report: Contents) -> str:
    """Return the same to stand in a notebook."""
    return html.card(report, *_parts(report))


def _parts(report: Contents) -> Iterator[str]:
    yield _heading("Findings" if report.findings else "No findings") + _findings(report)
    lowered, compiled = report.seconds
    yield _heading("Communication") + (
        html.table(["bytes", "what", "along", "whose", "line", "code"], [_as_text.sent(c) for c in report.collectives])
        if report.collectives
        else html.note("Sends nothing")
    )
    if report.callbacks:
        yield html.note(_as_text.calls(report))
    yield (
        _heading("Work")
        + html.note(_as_text.computed(report))
        + (
            html.table(["work", "of its share", "line", "code"], [_as_text.line_work(x) for x in report.work.lines])
            if report.work.flops
            else ""
        )
    )
    yield _heading("Memory") + html.note(_as_text.held(report))
    for title, arrays in (("Arguments", report.arguments), ("Results", report.results)):
        if arrays:
            yield _heading(title) + "".join(_array(array) for array in arrays)
    yield html.note(f"traced in {lowered:.2f} s, compiled in {compiled:.2f} s")


def _heading(text: str) -> str:
    return f"<h2>{html.escaped(text)}</h2>"


def _findings(report: Contents) -> str:
    items = []
    for finding in report.findings:
        where = (
            f"<br><code>{html.escaped(finding.line)} {html.escaped(finding.line.code)}</code>" if finding.line else ""
        )
        items.append(f"<li>{html.escaped(finding.text)}{where}<br>→ {html.escaped(finding.write)}</li>")
    return f"<ol>{''.join(items)}</ol>" if items else ""


def _array(array: Layout) -> str:
    name, dtype, how, size, donated = _as_text.layout(array)
    text = ", ".join(filter(None, (dtype, how, size, donated)))
    return f"<div><code>{html.escaped(name)}</code> {html.escaped(text)}</div>{picture(array)}"


def picture(array: Layout) -> str:
    """Return a drawing of an array's blocks, each with the devices that hold it: the dimensions that are cut.

    The last one that is cut goes to the right, the one before it down, and those before that are panels side by side.
    """
    if len(array.blocks) < 2:
        return ""
    cut = [axis for axis, parts in enumerate(array.split) if parts > 1]
    across = array.split[cut[-1]]
    down = array.split[cut[-2]] if len(cut) > 1 else 1
    names = [f"dimension {axis} ({array.shape[axis]:,})" for axis in reversed(cut)]
    ways = ["to the right", "down", *["in panels"] * len(cut)]
    label = ", ".join(f"{name} {way}" for name, way in zip(names, ways, strict=False))
    shown = array.blocks[:_MOST_BLOCKS]
    rows = ["".join(map(_cell, shown[start : start + across])) for start in range(0, len(shown), across)]
    panels = ["".join(f"<tr>{row}</tr>" for row in rows[start : start + down]) for start in range(0, len(rows), down)]
    drawn = "".join(f'<table style="{_PANEL}"><tbody>{panel}</tbody></table>' for panel in panels)
    more = len(array.blocks) - len(shown)
    rest = html.note(f"and {more:,} more blocks") if more else ""
    return f'<div role="img" aria-label="{html.escaped(label)}">{drawn}</div>{html.note(label)}{rest}'


def _cell(devices: tuple[int, ...]) -> str:
    text = ", ".join(map(str, devices[:_MOST_NAMED])) + (" …" if len(devices) > _MOST_NAMED else "")
    return f'<td style="{_BLOCK}">{text}</td>'
