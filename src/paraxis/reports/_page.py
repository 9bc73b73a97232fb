"""The base of what can be printed, shown by a notebook, and saved as a page that needs nothing else."""

import abc
from collections.abc import Iterable
from pathlib import Path

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis._host import files
from paraxis.reports import _as_html


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

    @arguments.named()
    def save(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing else.

        Args:
            path: of the file, such as ``"report.html"``. One that is there is replaced, whole.

        Raises:
            OSError: if it cannot be written.

        Example:
            >>> import jax.numpy as jnp, os, paraxis as px, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "report.html")
            ...     px.explain(jnp.sin)(jnp.ones(3)).save(path)
            ...     os.path.exists(path)
            True
        """
        arguments.path("save", "path", path, write="'report.html'")
        with files.replaced(Path(path)) as file:
            file.write(_as_html.page(self._title, self._parts()).encode())
