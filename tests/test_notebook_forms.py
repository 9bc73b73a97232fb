"""What a history looks like in a notebook: well-formed HTML, whatever things are called."""

from xml.etree import ElementTree

import pytest

from paraxis.train import History, Record

pytestmark = pytest.mark.floor

HOSTILE = '<b id="x">&amp;</b>'


def text_of(history: History) -> str:
    """The text of its form, in which each element is closed, and nothing is run or fetched."""
    form = ElementTree.fromstring(f"<div>{history._repr_html_()}</div>")
    assert not {"script", "style", "link", "b", "iframe"} & {element.tag for element in form.iter()}
    assert not [name for element in form.iter() for name in element.attrib if name.startswith("on") or name == "src"]
    return " ".join(form.itertext())


def test_history_in_a_notebook_is_well_formed_and_says_what_it_is_of() -> None:
    name = f"{HOSTILE}/loss"
    steps = tuple(Record(k, 0, {name: 1.0 / k}) for k in range(1, 9))
    evaluations = Record(4, 0, {f"test/{name}": 0.5}), Record(8, 0, {f"test/{name}": float("nan")})
    text = text_of(History(steps, 1, (Record(8, 0, {name: 0.25}),), evaluations))
    for said in (HOSTILE, "History(8 steps, 1 epochs, 2 evaluations)", "0.25", "nan"):
        assert said in text


def test_history_in_a_notebook_shows_a_part_of_what_is_large() -> None:
    records = tuple(Record(k, k, {"loss": 1.0 / (k + 1)}) for k in range(20_000))
    assert len(History((), 1, records, records)._repr_html_()) < 30_000
    assert "19,960 more" in text_of(History((), 1, records, ()))
