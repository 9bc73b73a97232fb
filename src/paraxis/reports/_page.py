"""Values that are printed, shown by a notebook and saved as a page: one list of sections for all three."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paraxis import _html as html
from paraxis._host import files

MOST_ROWS = 12  # of a list; of a longer one, how many are left out

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
section { overflow-x: auto; margin: 1.2rem 0; padding-top: .4rem; border-top: 1px solid #8884; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: .4rem 0; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of what is printed or shown: a title, a table, and notes below."""

    title: str
    rows: Sequence[Sequence[str]] = ()
    head: Sequence[str] = ()
    has_head: bool = False  # whether it is printed, too
    notes: Sequence[str] = ()
    in_text: bool = True  # whether it is printed, and not only shown
    most: int = MOST_ROWS  # that are printed

    def _table(self) -> list[list[str]]:
        """Return the head and the rows without columns that are empty."""
        filled = [number for number, column in enumerate(zip(*self.rows, strict=True)) if any(column)]
        return [[row[number] for number in filled] for row in (self.head, *self.rows)]

    def lines(self) -> Iterator[str]:
        """Yield the lines of its text: of a table, the first rows."""
        if self.title:
            yield self.title
        rows = self._table()[not self.has_head :] if self.rows else []
        most = self.most + self.has_head
        yield from (f"  {line}" for line in html.columns(rows)[:most])
        if len(rows) > most:
            yield f"  … {len(rows) - most:,} more"
        yield from (f"  {line}" for note in self.notes for line in note.splitlines())

    def html(self) -> str:
        parts = [f"<h2>{html.escaped(self.title)}</h2>"] if self.title else []
        parts += [html.table((table := self._table())[0], table[1:])] if self.rows else []
        parts += [f'<div style="white-space: pre-wrap">{html.escaped(note)}</div>' for note in self.notes]
        return "".join(parts)


class Page(abc.ABC):
    """A value that prints as text, and that a notebook shows with tables and drawings; :meth:`save` writes these."""

    @property
    @abc.abstractmethod
    def _title(self) -> str:
        """Return the page's title."""

    @abc.abstractmethod
    def _sections(self) -> Iterable[Section]:
        """Yield its sections."""

    def __repr__(self) -> str:
        printed = (section for section in self._sections() if section.in_text)
        return "\n\n".join([self._title, *("\n".join(map(str.rstrip, section.lines())) for section in printed)])

    def _repr_html_(self) -> str:
        return html.titled(self._title, *(section.html() for section in self._sections()))

    def save(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing else.

        Args:
            path: of the file, such as ``"report.html"``. One that is there is replaced, whole.

        Raises:
            ValueError: if the path does not end in ``.html``.

        Example:
            >>> import jax.numpy as jnp, paraxis as px, tempfile
            >>> with tempfile.NamedTemporaryFile(suffix=".html") as file:
            ...     px.explain(jnp.sin)(jnp.ones(3)).save(file.name)
        """
        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"save: path must end in .html, got {str(path)!r}; write '{path.stem or 'report'}.html'")
        title = html.escaped(self._title)
        parts = "".join(f"<section>{section.html()}</section>" for section in self._sections())
        page = (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
            f"<body><h1>{title}</h1>{parts}</body></html>\n"
        )
        with files.replaced(path) as file:
            file.write(page.encode())
