"""What is wrong with the built site, read from its HTML: ``python -m tests.docs.site site``, which ``make docs`` runs.

Nothing here knows how the pages were made.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOMS = ("ensembles", "errors", "launch", "solve", "solve.objective", "solve.prox", "testing", "train", "transforms")

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_NARROW = 40  # characters of code that a window of 390 pixels shows
_SCROLLS = re.compile(r"\.md-typeset pre ?> ?code ?\{[^}]*overflow-x: ?auto")
_KINDS_WITHOUT = re.compile(r"Error|Exception|Exit|Enum")  # bases of classes that nobody calls


@dataclass
class Element:
    """An element of a page, with what it holds in order."""

    tag: str
    attributes: dict[str, str]
    children: "list[Element | str]" = field(default_factory=list)

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def elements(self) -> "list[Element]":
        return [child for child in self.children if isinstance(child, Element)]

    def within(self, *but: str) -> "Iterator[Element]":
        """This element and all below it, those below the tags ``but`` left out."""
        yield self
        for child in self.elements():
            if child.tag not in but:
                yield from child.within(*but)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag in [element.tag for element in self.open[1:]]:
            while self.open.pop().tag != tag:
                pass

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(html: str) -> Element:
    """Read one page."""
    reader = _Reader()
    reader.feed(html)
    return reader.open[0]


def garbled_examples(page: Element) -> list[str]:
    """Return prompts that stand outside of code."""
    texts = (child for element in page.within("pre", "code", "script") for child in element.children)
    return [
        f"an example that is no code: {text.strip()[:60]}" for text in texts if isinstance(text, str) and ">>>" in text
    ]


def entries_that_lack_something(page: Element) -> list[str]:
    """Return classes and functions without a signature, or without their source."""
    found: list[str] = []
    for entry in page.within():
        if not entry.classes & {"doc-class", "doc-function"} or "doc-object" not in entry.classes:
            continue
        name = next((element.attributes["id"] for element in entry.elements() if "id" in element.attributes), "?")
        contents = [element for element in entry.elements() if "doc-contents" in element.classes]
        bases = "".join(part.text for content in contents for part in content.elements() if _is_bases(part))
        if not any("doc-signature" in element.classes for element in entry.elements()) and not _KINDS_WITHOUT.search(
            bases
        ):
            found.append(f"without signature: {name}")
        details = (part for content in contents for part in content.elements() if part.tag == "details")
        if not any("mkdocstrings-source" in part.classes for part in details):
            found.append(f"without source: {name}")
    return found


def _is_bases(element: Element) -> bool:
    return "doc-class-bases" in element.classes


def code_that_is_cut_off(page: Element, styles: str) -> list[str]:
    """Return lines wider than a small window in blocks that the style sheets do not let scroll."""
    found: list[str] = []
    for element in page.within():
        if element.tag == "pre":
            code = next((child for child in element.elements() if child.tag == "code"), None)
            long = [line for line in element.text.splitlines() if len(line) > _NARROW]
            if long and (code is None or "style" in code.attributes or not _SCROLLS.search(styles)):
                found.append(f"code that is cut off: {long[0][:60]}")
    return found


def ids(page: Element) -> set[str]:
    """Return the anchors of a page."""
    return {element.attributes["id"] for element in page.within() if "id" in element.attributes}


def links(page: Element) -> Iterator[tuple[str, bool]]:
    """Yield what a page points to, and whether it is fetched with the page."""
    for element in page.within():
        if element.tag in {"img", "script", "iframe", "source"} and "src" in element.attributes:
            yield element.attributes["src"], True
        elif element.tag == "link" and "canonical" not in element.attributes.get("rel", ""):
            yield element.attributes["href"], True
        elif element.tag == "a" and "href" in element.attributes:
            yield element.attributes["href"], False


def dead_links(folder: Path, pages: dict[Path, Element]) -> list[str]:
    """Return links within the site that lead nowhere, and what is fetched from another host."""
    anchors = {path: ids(page) for path, page in pages.items()}
    found: list[str] = []
    for path, page in pages.items():
        for link, fetched in links(page):
            parts = urlsplit(link)
            if parts.scheme == "data" or (parts.scheme and not fetched):
                continue
            where = f"{path.relative_to(folder)}: {link}"
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.netloc or parts.scheme:
                found.append(f"fetched from another host: {where}")
            elif not target.exists():
                found.append(f"no such file: {where}")
            elif parts.fragment and target in anchors and unquote(parts.fragment) not in anchors[target] | {"__toc"}:
                found.append(f"no such anchor: {where}")
    return found


def flaws(folder: Path, names: set[str]) -> list[str]:
    """Return all that is wrong with the site in a folder, whose reference has to hold these public names."""
    folder = folder.resolve()
    pages = {path: parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html")) if path.name != "404.html"}
    found = dead_links(folder, pages)
    styles = "".join(path.read_text("utf-8") for path in folder.glob("*.css"))
    for path, page in pages.items():
        wrong = garbled_examples(page) + entries_that_lack_something(page) + code_that_is_cut_off(page, styles)
        found += [f"{path.relative_to(folder)}: {what}" for what in wrong]
    documented = {name for path, page in pages.items() if path.parent.name == "api" for name in ids(page)}
    return found + [f"not documented: {name}" for name in sorted(names - documented)]


def public_names() -> set[str]:
    """Return every public name, by the path under which the reference has it: the root's, if the root has it too."""
    root = importlib.import_module("paraxis")
    found = {f"paraxis.{name}" for name in root.__all__ if name not in ROOMS}
    for room in ROOMS:
        module = importlib.import_module(f"paraxis.{room}")
        names = [name for name in module.__all__ if name not in root.__all__]
        found |= {f"paraxis.{room}.{name}" for name in names if not inspect.ismodule(getattr(module, name))}
    return found


if __name__ == "__main__":
    wrong = flaws(Path(sys.argv[1]), public_names())
    sys.stdout.write("".join(f"{flaw}\n" for flaw in wrong))
    sys.exit(1 if wrong else 0)
