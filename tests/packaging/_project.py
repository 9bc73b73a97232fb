"""What ``pyproject.toml`` promises: its extras, and the packages each of them brings."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_USERS = ("nnx", "solve", "tables", "train", "demo", "pool", "ray", "tpu")

_IMPORTED_AS = {"jax[tpu]": "libtpu", "orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}


def imports(extra: str) -> set[str]:
    """Return the names under which the packages of an extra are imported."""
    found = set[str]()
    for requirement in EXTRAS[extra]:
        match = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?.*", requirement)
        assert match, requirement
        package, of_it = match.groups()
        if package == PROJECT["name"]:
            found |= set[str]().union(*map(imports, of_it.split(",")))
        else:
            found.add(_IMPORTED_AS.get(requirement, _IMPORTED_AS.get(package, package)))
    return found


OPTIONAL = set[str]().union(*map(imports, FOR_USERS))
