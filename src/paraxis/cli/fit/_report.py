"""A fit as one page of HTML, which needs no other file and no network."""

import base64
import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from paraxis.cli._errors import printable
from paraxis.cli.fit._grids import coefficient_rows, rounded
from paraxis.cli.fit._model import Model
from paraxis.cli.fit._solving import Validated
from paraxis.cli.fit._standard_errors import StandardErrors

_MOST_ROWS = 500  # of coefficients; all are in the file
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: 0.2rem 0.8rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
thead + tbody .number { text-align: right; font-variant-numeric: tabular-nums; }
.best { font-weight: bold; }
pre { overflow-x: auto; padding: 0.6rem; background: #8882; }
img { max-width: 100%; background: white; }
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """The facts of a fit, beside the model.

    Args:
        title: in a few words.
        facts: names and values, in words.
        metrics: by what they are of, and by their names.
        measured_on: which rows.
        validated: the cross-validation, if there was one.
        score: what it goes by.
        notes: sentences.
        errors: the standard errors.
        command: that made it.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    metrics: dict[str, dict[str, float]]
    measured_on: str
    validated: Validated | None
    score: str
    notes: Sequence[str]
    errors: StandardErrors
    command: str


def page(report: Report, model: Model, plot: Path) -> str:
    """Return the page, with the plot, a PNG, inside."""
    picture = base64.b64encode(plot.read_bytes()).decode()
    parts = [
        _table([], report.facts),
        *(f"<p>Note: {_text(note)}</p>" for note in report.notes),
        f"<h2>{_text(report.measured_on)}</h2>",
        _table(["", *report.metrics], _by_metric(report.metrics)),
        *([] if report.validated is None else _validation(report.validated, report.score)),
        "<h2>Coefficients</h2>",
        _coefficients(model, report.errors),
        f"<p>{_text(report.errors.words)}</p>",
        "<h2>Iterations</h2>",
        f'<p><img alt="Objective and error of each iteration" src="data:image/png;base64,{picture}"></p>',
        f"<h2>Made by</h2><pre>{_text(report.command)}</pre>",
    ]
    title, body = _text(report.title), "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _by_metric(metrics: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    names = next(iter(metrics.values()))
    return [(name, *(rounded(found[name]) for found in metrics.values())) for name in names]


def _validation(validated: Validated, score: str) -> list[str]:
    rows = [
        (f"{strength:g}", rounded(scores.mean()), rounded(scores.std()))
        for strength, scores in zip(validated.strengths, validated.scores, strict=True)
    ]
    best = validated.strengths.index(validated.best) if validated.best in validated.strengths else None
    title = f"<h2>Cross-validation, {validated.scores.shape[1]} folds</h2>"
    return [title, _table(["strength", score, "± over folds"], rows, best=best)]


def _coefficients(model: Model, errors: StandardErrors) -> str:
    rows = coefficient_rows(model, errors.values)
    several, has_errors = len(model.coef) > 1, errors.values is not None
    headings = ["class"] * several + ["column", "coefficient"] + ["standard error"] * has_errors
    shown = [
        (*([label] * several), name, f"{own:.6g}", *([f"{error:.3g}"] * has_errors), f"{standardised:.6g}")
        for label, name, own, standardised, error in rows[:_MOST_ROWS]
    ]
    more = f"<p>{len(rows) - _MOST_ROWS:,} more are in coefficients.csv.</p>" if len(rows) > _MOST_ROWS else ""
    return _table([*headings, "per standard deviation"], shown) + more


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], best: int | None = None) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in headings)
    head = f"<thead><tr>{cells}</tr></thead>" if headings else ""
    body = "".join(
        "<tr" + ' class="best"' * (index == best) + ">" + "".join(map(_cell, row)) + "</tr>"
        for index, row in enumerate(rows)
    )
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    is_number = ' class="number"' if text.lstrip("-")[:1].isdigit() else ""
    return f"<td{is_number}>{_text(text)}</td>"
