"""The base of what can be printed, shown by a notebook, and saved as a page that needs nothing else."""

import abc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paraxis import _html as html
from paraxis._host import files

MOST_ROWS = 12
"""The most lines of a list; of longer ones, how many are left out."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --paper: #ffffff; --faint: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #16181c; } }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: var(--ink); background: var(--paper);
       font: 15px/1.5 system-ui, sans-serif; }
section { overflow-x: auto; margin: 1.2rem 0; padding-top: .4rem; border-top: 1px solid var(--faint); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: .4rem 0; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
td { overflow-wrap: break-word; } section > table { margin-top: .3rem; }
@media (max-width: 40rem) { td, th { white-space: nowrap; } }
"""


class Page(abc.ABC):
    """A value that is read as text or as HTML."""

    @property
    @abc.abstractmethod
    def _title(self) -> str:
        """Return the page's title."""

    @abc.abstractmethod
    def _parts(self) -> Iterable[str]:
        """Return its sections, which are HTML already."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the text for a terminal."""

    def _repr_html_(self) -> str:
        return html.titled(self._title, *self._parts())

    def save(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing else.

        Args:
            path: of the file, such as ``"report.html"``. One that is there is replaced, whole.

        Raises:
            ValueError: if the path does not end in ``.html``.
            OSError: if the file cannot be written.

        Example:
            >>> import jax.numpy as jnp, os, paraxis as px, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "report.html")
            ...     px.explain(jnp.sin)(jnp.ones(3)).save(path)
            ...     os.path.exists(path)
            True
        """
        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"save: path must end in .html, got {str(path)!r}; write '{path.stem or 'report'}.html'")
        title = html.escaped(self._title)
        page = (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
            f"<body><h1>{title}</h1>{''.join(f'<section>{part}</section>' for part in self._parts())}</body></html>\n"
        )
        with files.replaced(path) as file:
            file.write(page.encode())


def table(rows: Sequence[Sequence[str]], most: int = MOST_ROWS) -> Iterator[str]:
    """Yield the lines of a table without its empty columns; of many rows, the first ones."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows[:most]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield "  " + "  ".join(cells)
    if len(rows) > most:
        yield f"  … {len(rows) - most:,} more"
