"""A package that is missing: what is asked for works without it, or names the extra that brings it."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.packaging._project import OPTIONAL, ROOT, imports

SOURCE = ROOT / "src" / "paraxis"
SAID = re.compile(r"\S.* needs (\w+), which is not installed; write pip install (.*)")

# Every public module, name and command, where some packages are not installed. Prints what is told of those.
USES_ALL = """
import contextlib, importlib, io, json, pathlib, sys

blocked, modules = json.loads(sys.argv[1])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
told = {}

def use(what, how):
    try:
        how()
    except ModuleNotFoundError as error:
        told[what] = str(error)

for name in modules:
    use(name, lambda: importlib.import_module(name))
    for public in getattr(sys.modules.get(name), "__all__", ()):
        use(f"{name}.{public}", lambda: getattr(sys.modules[name], public))

from paraxis import cli

with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
    assert cli.main(["demo"]) == 2
told["demo"] = errors.getvalue().strip()
assert not list(pathlib.Path().iterdir()), "something was written first"
print(json.dumps(told))
"""


def public_modules() -> list[str]:
    """Every module that users may import; of the command, what runs it."""
    files = [path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py")]
    names = {".".join(file.parts).removesuffix(".__init__") for file in files}
    return sorted(name for name in names if not re.search(r"\._|\.cli\.", name))


def test_what_is_missing_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    arguments = json.dumps([sorted(OPTIONAL), public_modules()])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n{USES_ALL}", arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    missing = set()
    for what, message in told.items():
        said = SAID.fullmatch(message)
        assert said, (what, message)
        extra = re.fullmatch(rf"-e '?{re.escape(str(ROOT))}\[(\w+)\]'?", said[2])
        assert extra, (what, message)
        assert said[1] in imports(extra[1]), (what, message)
        missing.add(said[1])
    assert {"flax", "orbax", "sklearn"} <= missing  # of what is used everywhere else, nothing is missing
    assert {"paraxis.Jit", "paraxis.Checkpoints", "paraxis.solve.Ridge", "paraxis.transforms"} <= {*told}
    assert not {"paraxis.fit", "paraxis.ensemble", "paraxis.train", "paraxis.solve.LBFGS", "paraxis.testing"} & {*told}


def test_outside_of_a_clone_the_line_is_for_what_pip_installed(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    shutil.copytree(SOURCE, installed / "paraxis", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").write_text("")  # of a project that has its environment within
    code = "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['flax'] = None\nimport paraxis\nparaxis.Jit"
    done = subprocess.run([sys.executable, "-c", code, str(installed)], capture_output=True, text=True, cwd="/")
    line = "pip install 'paraxis[nnx]'"
    assert done.stderr.endswith(f"paraxis.transforms needs flax, which is not installed; write {line}\n")


# What is imported where, as the source says: (module, with which extra guarded, in a function).
Import = tuple[str, str | None, bool]


def all_imports(node: ast.AST, extra: str | None = None, in_function: bool = False) -> Iterator[Import]:
    """Every import but those for type checkers, and the extra in whose ``needed`` it stands."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, extra, in_function) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{alias.name}", extra, in_function) for alias in node.names)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not node.orelse:
        if isinstance(node.test, ast.UnaryOp):
            yield from (found for child in node.body for found in all_imports(child, extra, in_function))
    else:
        if isinstance(node, ast.With):
            call = node.items[0].context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "needed":
                extra = ast.literal_eval(call.args[1])
        in_function = in_function or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from all_imports(child, extra, in_function)


def parsed() -> dict[str, list[Import]]:
    names = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    return {
        name.removesuffix(".__init__"): list(all_imports(ast.parse(path.read_text("utf-8"))))
        for path, name in names.items()
    }


def loaded(target: str, modules: dict[str, list[Import]], seen: set[str]) -> Iterator[str]:
    """Every optional package that is loaded with a module, or with a name of one."""
    if target.partition(".")[0] in OPTIONAL:
        yield target.partition(".")[0]
    parts = target.split(".")
    for module in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
        if module in modules and module not in seen:
            seen.add(module)
            for name, _, in_function in modules[module]:
                if not in_function:
                    yield from loaded(name, modules, seen)


def test_each_import_of_an_optional_package_is_guarded_by_an_extra_that_has_it() -> None:
    modules = parsed()
    guards = [(module, name, extra) for module, found in modules.items() for name, extra, _ in found if extra]
    assert len(guards) > 15
    for module, name, extra in guards:
        beyond = set(loaded(name, modules, set())) - imports(extra)
        assert not beyond, f"{module} imports {name}, guarded by {extra}, which does not bring {beyond}"
    for module, found in modules.items():
        guarded = {name.partition(".")[0] for name, extra, _ in found if extra}
        free = {name.partition(".")[0] for name, extra, in_function in found if in_function and not extra}
        assert free & OPTIONAL - guarded <= {"flax"}, module  # a module of Flax's is there, so Flax is


def test_the_reading_of_imports_sees_them() -> None:
    source = """
import a
if typing.TYPE_CHECKING:
    import b
if not typing.TYPE_CHECKING:
    def f():
        from c import d
        with needed("f", "x"):
            import e.g
"""
    assert list(all_imports(ast.parse(source))) == [("a", None, False), ("c.d", None, True), ("e.g", "x", True)]
    modules = {"p": [], "p.q": [("p.r.s", None, False)], "p.r": [("rich.x", None, False), ("flax", None, True)]}
    assert list(loaded("p.q.f", modules, set())) == ["rich"]
