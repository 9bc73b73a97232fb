"""The exported names, the documentation and the docstrings agree."""

import inspect
import re
from pathlib import Path

import paraxis
import paraxis.ensembles
import paraxis.explain
import paraxis.launch
import paraxis.solve
import paraxis.testing
import paraxis.train

API_PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md"))
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


def documented() -> list[str]:
    return [name for page in API_PAGES for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)]


def test_exported_names_are_sorted_and_there():
    for module in (*MODULES, paraxis.explain):
        as_ruff_sorts = sorted(set(module.__all__), key=lambda name: (not name.isupper(), name))
        assert module.__all__ == as_ruff_sorts, module.__name__
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], module.__name__


def test_every_public_name_is_on_one_page_of_the_reference_and_nothing_else_is():
    assert sorted(documented()) == sorted(PUBLIC)


def flaws(name: str, doc: str | None) -> list[str]:
    """What a public name's docstring lacks."""
    if not doc:
        return ["has no docstring"]
    found = [] if doc.splitlines()[0].endswith(".") else ["its first line is no sentence"]
    if not (name.endswith(SHOWN_BY_MESSAGE) or name in SHOWN_BY_FUNCTION | SHOWN_BY_OTHERS):
        found += [] if ">>> " in doc.partition("Example:")[2] else ["has no example"]
    return found


def test_every_public_name_has_a_docstring_with_an_example():
    described = {path: path.rpartition(".")[2] for path in PUBLIC if path.rpartition(".")[2] not in NOT_DESCRIBED}
    found = {path: flaws(name, inspect.getdoc(PUBLIC[path])) for path, name in described.items()}
    assert {path: what for path, what in found.items() if what} == {}


def test_a_docstring_that_lacks_something_is_found():
    assert flaws("f", None) == ["has no docstring"]
    assert flaws("f", "Return f\n") == ["its first line is no sentence", "has no example"]
    assert flaws("OneError", "Something is wrong.") == []


def test_the_package_exports_all_it_shows():
    shown = {name for name, value in vars(paraxis).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert shown | {"solve"} == set(paraxis.__all__)
