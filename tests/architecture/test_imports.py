"""Which module may import what: the layering of ``docs/architecture.md``, and what an import costs."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paraxis"
MODULES = sorted(SOURCE.rglob("*.py"))

UNSTABLE = ("jax._src", "jax.experimental", "jax.extend", "jax.interpreters", "jax.core", "jaxlib")
PLACING = {"Mesh", "NamedSharding", "PartitionSpec", "shard_map"}
HEAVY = {"drjax", "flax", "grain", "matplotlib", "mlxtend", "optax", "orbax"}
HEAVY |= {"pandas", "pyarrow", "ray", "rich", "sklearn", "tensorboardX"}


@functools.cache
def mentioned(source: str) -> frozenset[str]:
    """Every module and every name that is imported, ``a.b`` for ``from a import b``, and every dotted name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    return frozenset(found)


def dotted(node: ast.expr) -> str:
    """``a.b.c``; of what is no name, such as a call, only what is taken: ``….c``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def unstable(source: str) -> list[str]:
    def is_unstable(dotted: str) -> bool:
        return any(dotted == module or dotted.startswith(f"{module}.") for module in UNSTABLE)

    return sorted(filter(is_unstable, mentioned(source)))


def placing(source: str) -> list[str]:
    return sorted({dotted.rpartition(".")[2] for dotted in mentioned(source)} & PLACING)


def test_the_rooms_are_as_they_are_drawn():
    """As ``make lint`` checks it, so that the tests alone show a broken layer."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "rooms")
    # In the page's first fenced text, what stands before two spaces in a line that begins with a name.
    block = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("```text\n", 1)[1].split("```", 1)[0]
    assert [line.split("  ")[0] for line in block.splitlines() if line and not line.startswith(" ")] == layers


def breaking(rule: Callable[[str], list[str]], *, but: tuple[str, ...]) -> dict[str, list[str]]:
    """What breaks a rule, by file; files whose names begin with one of ``but`` are excepted."""
    found = {name(path): rule(path.read_text("utf-8")) for path in MODULES}
    return {file: what for file, what in found.items() if what and not file.startswith(but)}


# All but the first import in the function that uses the name: what JAX renames breaks a feature, and not the import.
KNOW_JAX = (
    "_core/jax_api.py",
    "_core/interpreters.py",
    "_host/processes.py",
    "launch/_initialize.py",
    "reports/_topology.py",
)


def test_few_modules_know_parts_of_jax_that_may_move():
    assert breaking(unstable, but=KNOW_JAX) == {}


def at_the_top(source: str) -> list[str]:
    """The unstable modules that are imported with the module."""
    body = ast.parse(source).body
    return unstable("\n".join(ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)))


def test_importing_the_package_needs_one_private_module_of_jax():
    found = {name(path): at_the_top(path.read_text("utf-8")) for path in MODULES}
    private = {file: [x for x in what if x.startswith("jax._src")] for file, what in found.items()}
    assert {file: what for file, what in private.items() if what} == {"_core/jax_api.py": ["jax._src.core"]}


KNOW_MESHES = ("_core/", "reports/_topology.py")  # a report puts chips in the place of a program's devices


def test_only_the_core_knows_meshes():
    assert breaking(placing, but=KNOW_MESHES) == {}


def test_the_checks_see_what_they_look_for():
    source = "from jax import core\nx = jax.shard_map(jax.experimental.pallas)().jaxlib"
    assert unstable(source) == ["jax.core", "jax.experimental", "jax.experimental.pallas"]
    assert placing(source) == ["shard_map"]
    assert "_core/arrays.py" in breaking(placing, but=("cli/",))  # a rule that is broken names the files


IMPORTS = """
import os, sys, jax
before = dict(os.environ), dict(jax.config.values), jax.devices.__module__
import paraxis
assert (dict(os.environ), dict(jax.config.values), jax.devices.__module__) == before
assert not jax._src.xla_bridge.backends_are_initialized()
loaded = {*sys.modules}
hasattr(paraxis, "__wrapped__")  # as tools ask that look at modules
assert {*sys.modules} == loaded
print(*{name.partition(".")[0] for name in loaded})
"""


def test_importing_the_package_changes_nothing_and_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())
