"""How the site differs from plain Markdown and plain docstrings: one file for MkDocs' hooks and Griffe's extension."""

import re
from pathlib import Path
from typing import Any

import griffe

_DOCS = Path(__file__).parent
_ENTRY = re.compile(r"^::: (?P<path>\S+)(?:\n +options:\n +members: \[(?P<members>.*)\])?", re.MULTILINE)
_REFERENCE = re.compile(r":(?:func|class|data|meth|mod):`(?:paraxis\.|px\.)?([\w.]+)`")
_SESSION = re.compile(r"^```python(?=\n>>> )", re.MULTILINE)
_SHOWN = re.compile(r"^```(pycon|console)\n(?=(?:(?!```).*\n)*?.{120,}\n)", re.MULTILINE)
_NAMES = re.compile(r"<!-- names: (\S+) -->")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


def entries() -> dict[Path, dict[str, list[str]]]:
    """Return what each page of the reference documents: a public path, with the members shown below it."""
    return {
        page: {entry["path"]: re.findall(r"\w+", entry["members"] or "") for entry in _ENTRY.finditer(page.read_text())}
        for page in sorted((_DOCS / "api").glob("*.md"))
    }


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mark sessions as such, so that what they print is not read as Python, and list the names of the reference.

    A session that shows a long message is marked too, for its lines to be wrapped.
    """
    sessions = _SHOWN.sub(r"``` { .\1 .px-wrap }\n", _SESSION.sub("```pycon", markdown))
    return _NAMES.sub(lambda match: _names(match[1]), sessions)


def _names(page: str) -> str:
    documented = entries()[_DOCS / page]
    return ", ".join(f"[`{path.removeprefix('paraxis.')}`][{path}]" for path in documented)


class Docstrings(griffe.Extension):
    """Turns examples into code, references into links, and the fields of a named tuple into its signature."""

    def __init__(self) -> None:
        """Collect what can be linked to."""
        self._linked = [
            (path, f"{path}.{member}" if member else path)
            for documented in entries().values()
            for path, members in documented.items()
            for member in ("", *members)
        ]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub("Examples:", obj.docstring.value)
            obj.docstring.value = _REFERENCE.sub(lambda match: self._link(match[1], obj), text)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a named tuple the signature that Python makes for it."""
        if any(str(base).partition("[")[0] == "NamedTuple" for base in cls.bases):
            fields = [attribute for attribute in cls.attributes.values() if attribute.annotation is not None]
            kind = griffe.ParameterKind.positional_or_keyword
            parameters = [
                griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
                for field in fields
            ]
            itself = griffe.Parameter("self", kind=kind)
            cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(itself, *parameters)))

    def _link(self, name: str, obj: griffe.Object) -> str:
        """Return a link to what is meant: a method of the same class, else the nearest name; plain code if private."""
        owner, parts = obj if obj.is_class or obj.parent is None else obj.parent, set(obj.path.split("."))
        found: list[tuple[bool, int, str]] = []
        for entry, target in self._linked:
            ours = entry.endswith(f".{owner.name}")
            if target.endswith(f".{name}") and (ours or entry == target or "." in name):
                found.append((ours, len(parts & set(target.split("."))), target))
        return f"[`{name}`][{max(found)[2]}]" if found else f"`{name}`"
