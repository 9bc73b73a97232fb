"""A package that is missing: what is asked for works without it, or names the extra that brings it."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.packaging._programs import OPTIONAL, ROOT, imports

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
use("paraxis.Checkpoints", lambda: sys.modules["paraxis"].Checkpoints("runs"))

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
        extra = re.match(r"'paraxis\[(\w+)\]'", said[2])
        assert extra, (what, message)
        assert said[1] in imports(extra[1]), (what, message)
        missing.add(said[1])
    assert {"flax", "orbax", "sklearn"} <= missing  # of what is used everywhere else, nothing is missing
    assert {"paraxis.Jit", "paraxis.Checkpoints", "paraxis.solve.Ridge", "paraxis.transforms"} <= {*told}
    assert not {"paraxis.fit", "paraxis.ensemble", "paraxis.train", "paraxis.solve.LBFGS", "paraxis.testing"} & {*told}
