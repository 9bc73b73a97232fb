"""The notebooks: stored without output, and shown on the site with what came out.

`make docs` executes each in a kernel of its own, and fails with a cell that does; so nothing here does that again.
"""

import base64
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests._support import module_at

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
pages = module_at(ROOT / "docs" / "notebook_pages.py")


def stored_results(text: str) -> list[str]:
    """Return what a stored notebook has that only running it gives: outputs, counts, and notes of programs."""
    notebook = json.loads(text)
    found = [f"metadata: {name}" for name in notebook["metadata"] if name not in {"kernelspec", "language_info"}]
    for number, cell in enumerate(notebook["cells"], 1):
        found += [f"cell {number}: {name}" for name in ("outputs", "execution_count", "metadata") if cell.get(name)]
    return found


def notebook_of(*sources: str) -> Any:
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title\n\nText.", id="title"), *cells])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    assert stored_results(path.read_text("utf-8")) == [], "in Jupyter: Edit, Clear Outputs of All Cells; then save"
    assert path.stat().st_size < 12_000
    nbformat.validate(nbformat.read(path, as_version=4))


def test_a_stored_result_is_found() -> None:
    notebook = notebook_of("1 + 1", "2 + 2")
    assert stored_results(nbformat.writes(notebook)) == []
    notebook.cells[1].execution_count = 7
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="4")]
    notebook.metadata["widgets"] = {"state": 1}
    found = ["metadata: widgets", "cell 2: execution_count", "cell 3: outputs"]
    assert stored_results(nbformat.writes(notebook)) == found


def test_a_cell_that_fails_fails_the_build(tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    nbformat.write(notebook_of("print('before')", "1 / 0"), path)
    with pytest.raises(CellExecutionError, match=r"1 / 0[^$]*ZeroDivisionError"):
        pages.execute(path)


def test_outputs_become_markdown() -> None:
    notebook = notebook_of("print(1)", "form", "figure", "s = '```'")
    form = {"text/html": "<p>form</p>", "text/plain": "Form"}
    figure = {"image/png": base64.b64encode(b"a picture").decode(), "text/plain": "<Figure>"}
    shown = [nbformat.v4.new_output("display_data", data=data) for data in (form, figure)]
    outputs = [nbformat.v4.new_output("stream", text="\x1b[31m1\x1b[0m\n"), *shown]
    for cell, output in zip(notebook.cells[1:4], outputs, strict=True):
        cell.outputs = [output]
    pictures: dict[str, bytes] = {}
    page = pages.page(notebook, "some", pictures.__setitem__)
    ((name, content),) = pictures.items()
    assert content == b"a picture"
    for text in ("(some.ipynb)", "```text\n1\n```", "<p>form</p>", f"]({name})", "````python\ns = '```'\n````"):
        assert text in page
