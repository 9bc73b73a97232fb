"""The exported names, the documentation and the docstrings agree."""

import inspect
import re
from pathlib import Path

import pytest

import paraxis
import paraxis.ensembles
import paraxis.explain
import paraxis.launch
import paraxis.solve
import paraxis.testing
import paraxis.train

API_PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
MODULES = [
    paraxis,
    paraxis.ensembles,
    paraxis.launch,
    paraxis.solve,
    paraxis.solve.objective,
    paraxis.solve.prox,
    paraxis.testing,
    paraxis.train,
]
PUBLIC = {  # a name that the root has too is documented as the root's
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if (module is paraxis or name not in paraxis.__all__) and not inspect.ismodule(getattr(module, name))
}
SHOWN_BY_MESSAGE = "Error"  # an error is documented by what it says, and by the tree it stands in
# Results, by the function that gives them.
SHOWN_BY_FUNCTION = {"Communication", "CrossValidated", "Epoch", "OptStep", "Path", "Reliability", "Rows", "Scores"}
SHOWN_BY_FUNCTION |= {"LBFGSState", "NewtonCGState", "ProximalGradientState"}
SHOWN_BY_FUNCTION |= {"Fitted", "Loader", "Record", "Restored"}
SHOWN_BY_OTHERS = {"none"}  # the operator that leaves all as it is
NOT_DESCRIBED = {"Prox"}  # a type that Python gives no docstring


def documented() -> set[str]:
    return set(re.findall(r"^::: (\S+)$", API_PAGE.read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("module", [*MODULES, paraxis.explain], ids=lambda module: module.__name__)
def test_exported_names_are_sorted_and_there(module):
    assert module.__all__ == sorted(set(module.__all__), key=lambda name: (not name.isupper(), name))  # as ruff sorts
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_every_public_name_is_on_the_api_page_and_nothing_else_is():
    assert documented() == set(PUBLIC)


@pytest.mark.parametrize("path", [path for path in PUBLIC if path.rpartition(".")[2] not in NOT_DESCRIBED])
def test_every_public_name_has_a_docstring_with_an_example(path):
    name = path.rpartition(".")[2]
    doc = inspect.getdoc(PUBLIC[path])
    assert doc
    assert doc.splitlines()[0].endswith(".")
    if not (name.endswith(SHOWN_BY_MESSAGE) or name in SHOWN_BY_FUNCTION | SHOWN_BY_OTHERS):
        assert ">>> " in doc.partition("Example:")[2]


def test_the_package_exports_all_it_shows():
    shown = {name for name, value in vars(paraxis).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert shown | {"solve"} == set(paraxis.__all__)
