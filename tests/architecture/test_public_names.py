"""The exported names, the documentation and the docstrings agree."""

import importlib
import inspect
import pickle
import re
import traceback
from pathlib import Path

import paraxis

API_PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md"))
_ROOMS = ["ensembles", "errors", "launch", "reports", "solve", "streaming", "testing", "train", "transforms"]
_MODULES = [*_ROOMS, "solve.objective", "solve.prox"]
MODULES = [paraxis, *(importlib.import_module(f"paraxis.{name}") for name in _MODULES)]
PUBLIC = {  # a name that the root has too is documented as the root's
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if (module is paraxis or name not in paraxis.__all__) and not inspect.ismodule(getattr(module, name))
}
SHOWN_BY_MESSAGE = "Error"  # an error is documented by what it says, and by the tree it stands in
# Results, by the function that gives them.
SHOWN_BY_FUNCTION = {"Communication", "CrossValidated", "OptStep", "Rows"}
SHOWN_BY_FUNCTION |= {"LBFGSState", "ProximalGradientState"}
SHOWN_BY_FUNCTION |= {"Padded", "Progress", "Schedule"}
SHOWN_BY_FUNCTION |= {"Batches", "Callback", "Fitted", "Loader", "Record", "Restored", "SaveDecision", "Step"}
SHOWN_BY_FUNCTION |= {"Collective", "Finding", "Layout", "LineWork", "Memory", "Report", "Traffic", "Work"}
SHOWN_BY_FUNCTION |= {"Arrays", "Balance", "Comparison", "Leaf", "ModuleRow", "ModuleTable", "Timing"}
SHOWN_BY_OTHERS = {"none", "SearchResult", "Trial"}  # the operator that leaves all as it is; by LineSearch


def documented() -> list[str]:
    return [name for page in API_PAGES for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)]


def test_exported_names_are_sorted_and_there():
    for module in MODULES:
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
    described = {path: path.rpartition(".")[2] for path in PUBLIC}
    found = {path: flaws(name, inspect.getdoc(PUBLIC[path])) for path, name in described.items()}
    assert {path: what for path, what in found.items() if what} == {}


def test_a_docstring_that_lacks_something_is_found():
    assert flaws("f", None) == ["has no docstring"]
    assert flaws("f", "Return f\n") == ["its first line is no sentence", "has no example"]
    assert flaws("OneError", "Something is wrong.") == []


def test_the_package_exports_all_it_shows():
    shown = {name for name, value in vars(paraxis).items() if not (name.startswith("_") or inspect.ismodule(value))}
    by_traceback = set(paraxis.errors.__all__)  # each is there by the name that a traceback shows
    assert shown == {*paraxis.__all__, *by_traceback}
    assert len(paraxis.__all__) <= 55


def test_each_room_is_an_attribute_of_the_root_and_dir_shows_it():
    rooms = [module for module in MODULES if module.__name__.count(".") == 1]
    assert [getattr(paraxis, room.__name__.partition(".")[2]) for room in rooms] == rooms
    assert set(dir(paraxis)) == {*paraxis.__all__, *(room.__name__.partition(".")[2] for room in rooms), "__version__"}


def test_a_traceback_shows_errors_by_a_name_under_which_they_can_be_caught():
    for error in (x for x in PUBLIC.values() if isinstance(x, type) and issubclass(x, BaseException)):
        assert getattr(importlib.import_module(error.__module__), error.__name__) is error
        assert not re.search(r"(^|\.)_", error.__module__), error


def test_errors_can_be_pickled():
    for name in paraxis.errors.__all__:
        error = getattr(paraxis.errors, name)
        assert traceback.format_exception_only(error("x")) == [f"paraxis.{name}: x\n"]
        assert type(pickle.loads(pickle.dumps(error("x")))) is error
