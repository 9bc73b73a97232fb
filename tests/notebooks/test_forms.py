"""What values look like in a notebook: well-formed HTML that says what their repr does, whatever things are called."""

import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from paraxis.train import History, Record

pytestmark = pytest.mark.newest

HOSTILE = '<b id="x">&amp;</b>'
VOID = {"br", "hr", "img", "input", "meta", "link"}


class Checker(HTMLParser):
    """Reads HTML in which each element is closed, in order, and nothing is run, fetched or styled for the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert tag not in {"script", "style", "link", "b", "iframe"}, tag
        assert len(set(names)) == len(names), names
        assert not [name for name in names if name.startswith("on") or name in {"href", "src", "id", "class"}], names
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def read(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert not re.search(r"#[0-9a-f]{6}", "".join(str(a.get("style")) for t, a in checker.seen if t != "span"))
    return checker


def form(value: Any) -> Checker:
    return read(value._repr_html_())


def history(name: str = "loss") -> History:
    steps = tuple(Record(k, 0, {name: 1.0 / k}) for k in range(1, 9))
    evaluations = (Record(4, 0, {f"test/{name}": 0.5}), Record(8, 0, {f"test/{name}": float("nan")}))
    return History(steps, 1, (Record(8, 0, {name: 0.25}),), evaluations)


# A value, and what its form has to say besides its name.
VALUES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "History": (lambda: history(f"{HOSTILE}/loss"), ["History(8 steps, 1 epochs, 2 evaluations)", "0.25", "nan"]),
}


@pytest.fixture(autouse=True)
def without_what_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "IPython", "rich"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", VALUES)
def test_a_form_is_well_formed_and_says_what_it_is_of(name: str) -> None:
    make, said = VALUES[name]
    seen = form(make())
    # In each, something that a user named has markup for its name.
    assert HOSTILE in seen.text
    for text in said:
        assert text in seen.text, text


def test_what_is_large_is_shown_in_part() -> None:
    records = tuple(Record(k, k, {"loss": 1.0 / (k + 1)}) for k in range(20_000))
    assert len(History((), 1, records, records)._repr_html_()) < 30_000
    assert "19,960 more" in form(History((), 1, records, ())).text


def test_the_checker_finds_what_is_wrong() -> None:
    for wrong in ("<div>", "<div><p></div></p>", "<script></script>", '<p onclick="x"></p>', '<img src="x">', HOSTILE):
        with pytest.raises((AssertionError, IndexError)):
            read(wrong)
