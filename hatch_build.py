"""The README as a package index shows it, where a link to a file of the repository would lead nowhere; the examples.

``paraxis demo`` runs the examples: a wheel has them inside the package, an editable installation uses the clone's.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_CODE = r"```.*?```|`[^`\n]*`"
_LINK = re.compile(_CODE + r"|\[(?P<text>[^][]*)\]\((?P<file>[\w./-]+)(?P<part>#[\w-]*)?\)", re.DOTALL)  # no scheme
_NOTE = "\nFiles such as `docs/install.md` are in the source distribution; `make docs` makes a site of them.\n"


def readme(text: str, files: str) -> str:
    """Return the README with its links to files led to an address, or, without one, named.

    Args:
        text: the README.
        files: the address to which a file's path is appended; empty if they are nowhere to be read.
    """

    def shown(link: re.Match[str]) -> str:
        if link["file"] is None:
            return link[0]
        if files:
            return f"[{link['text']}]({files}{link['file']}{link['part'] or ''})"
        named = f"`{link['file']}`"
        return named if link["text"] == link["file"] else f"{link['text']} ({named})"

    found = _LINK.sub(shown, text)
    return found if files or found == text else found + _NOTE


class Readme(MetadataHookInterface):
    """Gives hatchling the README of a release."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set what the index shows."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, self.config.get("files", ""))}


class Examples(BuildHookInterface):
    """Puts the examples into a wheel, unless it is that of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder."""
        if version != "editable":
            build_data["force_include"]["examples"] = "paraxis/examples"
