"""The built site, of the night, as `.ci/run` runs `make docs`; every day, that each check fails where it should."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import site as checks

ROOT = Path(__file__).resolve().parents[2]
SCROLL = ".md-typeset pre > code { overflow-x: auto; }"
ENTRY = (
    '<div class="doc doc-object doc-{kind}"><h3 id="px.f">f</h3>{signature}<div class="doc-contents">{rest}</div></div>'
)
SIGNATURE = '<div class="doc-signature highlight"><pre><code>f(x)</code></pre></div>'
SOURCE = '<details class="mkdocstrings-source"><pre><code>def f(x)</code></pre></details>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it once, as ``make docs`` does, in which every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_no_flaws(site: Path) -> None:
    assert checks.flaws(site, checks.public_names()) == []


@pytest.mark.slow
@pytest.mark.parametrize("word", ["GPU", "TPU", "install", "ragged", "per-example gradients", "checkpoint"])
def test_the_search_finds(site: Path, word: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    assert [page["location"] for page in index["docs"] if word.lower() in (page["title"] + page["text"]).lower()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ensembles", "mapreduce", "solvers", "training", "transforms"])
def test_a_notebook_is_shown_with_what_came_out(site: Path, name: str) -> None:
    text = (site / "notebooks" / f"{name}.html").read_text("utf-8")
    found = [element for element in checks.parse(text).within() if "px-output" in element.classes]
    assert [element for element in found if any(child.tag == "pre" for child in element.within())]
    if name != "transforms":
        assert [element for element in found if any(child.tag in {"svg", "table"} for child in element.within())]
    if name in {"ensembles", "training"}:  # what changed while the cell ran, as it was at the end
        bars = [child.attributes for element in found for child in element.within() if child.tag == "progress"]
        assert bars
        assert all(bar["value"] == bar["max"] for bar in bars)
    assert re.search(rf'<img[^>]* src="{name}-\d+-\d+\.png"', text)
    assert (site / "notebooks" / f"{name}.ipynb").exists()


@pytest.mark.parametrize(
    ("language", "line", "shown"),
    [
        ("python", ">>> f()", "```pycon\n"),
        ("python", ">>> f()\nError: " + 120 * "x", "``` { .pycon .px-wrap }\n"),
        ("console", "$ f\n" + 120 * "x", "``` { .console .px-wrap }\n"),
        ("text", 150 * "x", "```text\n"),  # a drawing
        ("python", "x = " + 120 * "1", "```python\n"),
        ("console", f"$ f\n```\n\n{120 * 'x'}\n\n```console\n$ g", "```console\n"),  # text between two
    ],
)
def test_long_messages_of_sessions_are_wrapped(language: str, line: str, shown: str) -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert hooks.on_page_markdown(f"```{language}\n{line}\n```\n").startswith(shown)


def test_an_example_that_is_no_code_is_found() -> None:
    assert checks.garbled_examples(checks.parse("<p>Example: &gt;&gt;&gt; f(1)<br>2</p>")) == [
        "an example that is no code: Example: >>> f(1)"
    ]
    inside = (
        '<div class="highlight"><pre><span></span><code><span class="gp">&gt;&gt;&gt; </span>f(1)</code></pre></div>'
    )
    assert checks.garbled_examples(checks.parse(inside)) == []


@pytest.mark.parametrize("kind", ["class", "function"])
def test_an_entry_without_signature_or_source_is_found(kind: str) -> None:
    def lacks(signature: str, rest: str) -> list[str]:
        page = checks.parse(ENTRY.format(kind=kind, signature=signature, rest=rest))
        return checks.entries_that_lack_something(page)

    assert lacks(SIGNATURE, SOURCE) == []
    assert lacks("", SOURCE) == ["without signature: px.f"]
    assert lacks(SIGNATURE, "") == ["without source: px.f"]
    # That of a method below, in the entry of a class that has none, is not the class's.
    assert "without signature: px.f" in lacks("", SOURCE + ENTRY.format(kind=kind, signature=SIGNATURE, rest=SOURCE))
    # An error, or an enumeration, is not called.
    assert lacks("", '<p class="doc doc-class-bases">Bases: ShapeError</p>' + SOURCE) == []
    assert lacks("", '<p class="doc doc-class-bases">Bases: NamedTuple</p>' + SOURCE) == ["without signature: px.f"]


def test_code_that_is_cut_off_is_found() -> None:
    long, short = f"<pre><code>{'x' * 89}</code></pre>", "<pre><code>x</code></pre>"
    assert checks.code_that_is_cut_off(checks.parse(long), SCROLL) == []
    assert checks.code_that_is_cut_off(checks.parse(short), "") == []
    for block, styles in (
        (long, ""),
        (long, SCROLL.replace("auto", "hidden")),
        (long.replace("<code>", "<code style='overflow: hidden'>"), SCROLL),
        (f"<pre>{'x' * 89}</pre>", SCROLL),
    ):
        assert checks.code_that_is_cut_off(checks.parse(block), styles) == [f"code that is cut off: {'x' * 60}"]


@pytest.mark.parametrize(
    ("html", "flaw"),
    [
        ('<a href="b.html">b</a>', None),
        ('<a href="b.html#there">b</a>', None),
        ('<a href="#here">here</a><h2 id="here">here</h2>', None),
        ('<a href="https://somewhere.test/">else</a>', None),
        ('<a href="c.html">c</a>', "no such file: a.html: c.html"),
        ('<a href="b.html#gone">b</a>', "no such anchor: a.html: b.html#gone"),
        ('<a href="#gone">b</a>', "no such anchor: a.html: #gone"),
        ('<img src="gone.png">', "no such file: a.html: gone.png"),
        (
            '<script src="https://somewhere.test/x.js"></script>',
            "fetched from another host: a.html: https://somewhere.test/x.js",
        ),
        ('<link rel="stylesheet" href="//fonts.test/x">', "fetched from another host: a.html: //fonts.test/x"),
    ],
)
def test_a_dead_link_is_found(tmp_path: Path, html: str, flaw: str | None) -> None:
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<h2 id="there">there</h2>')
    assert checks.flaws(tmp_path, set()) == ([] if flaw is None else [flaw])


def test_a_name_that_is_not_documented_is_found(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "verbs.html").write_text('<h3 id="paraxis.broadcast">broadcast</h3>')
    names = {"paraxis.broadcast", "paraxis.map_fn"}
    assert checks.flaws(tmp_path, names) == ["not documented: paraxis.map_fn"]


def test_reports_are_shown_in_the_places_that_ask_for_them(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("report_pages", ROOT / "docs" / "report_pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    code = "import jax\n\nclass Shown:\n    def _repr_html_(self):\n        return f'<b>{jax.device_count()} {x}</b>'"
    text = f"""
```python
{code}

x = 1
```

<!-- shown: Shown() -->

```python
>>> 1 / 0
```

```python
x += 1
```

<!-- shown: Shown() -->

```python
print(1 / 0)  # after the last that is shown
```
"""
    path = tmp_path / "page.md"
    path.write_text(text)
    assert pages.shown(path) == ["<b>8 1</b>", "<b>8 2</b>"]
    path.write_text(text.replace("x += 1", "x += y"))
    with pytest.raises(subprocess.CalledProcessError):
        pages.shown(path)
