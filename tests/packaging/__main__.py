"""Build what is released, install it in many ways, and run a program with each: python -m tests.packaging.

Each installation is a fresh environment with what pip chooses today: bare, with each extra, and by the line that the
error of a missing package says. ``--python python3.12`` takes another interpreter, and may be repeated; ``--only nnx``
tries some. The exit status is 0 if everything works.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.packaging._programs import PROGRAMS, ROOT

_TOOLS = ("build", "cffconvert", "twine")


class PackagingError(Exception):
    """Something that is not as it must be in a release."""


def run(*command: object, folder: Path) -> str:
    """Run a command without this process's own packages, and return what it prints."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run([*map(str, command)], cwd=folder, env=ours, capture_output=True, text=True)
    if done.returncode:
        raise PackagingError(f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def environment(folder: Path, python: str, *requirements: object) -> Path:
    """Make a fresh environment, install into it, and return its Python."""
    run(python, "-m", "venv", folder, folder=folder.parent)
    here = folder / "bin" / "python"
    run(here, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements, folder=folder)
    run(here, "-m", "pip", "check", folder=folder)
    return here


def build(folder: Path) -> Path:
    """Build into ``dist``, from a copy of what is committed; return the wheel, which is made from the sdist."""
    python = environment(folder / "tools", sys.executable, *_TOOLS)
    copy, dist = folder / "copy", ROOT / "dist"
    if changed := run("git", "status", "--porcelain", folder=ROOT):
        print(f"not in what is built, as it is not committed:\n{changed}", end="", flush=True)
    run("git", "clone", "--quiet", ROOT, copy, folder=folder)
    run(python, "-m", "build", "--outdir", folder / "built", copy, folder=folder)
    wheel, sdist = (next((folder / "built").glob(name)) for name in ("*.whl", "*.tar.gz"))
    run(python, "-m", "twine", "check", "--strict", wheel, sdist, folder=folder)
    run(python.with_name("cffconvert"), "--validate", "-i", copy / "CITATION.cff", folder=folder)
    check_contents(wheel, sdist, set(run("git", "ls-files", folder=copy).split()))
    dist.mkdir(exist_ok=True)
    shutil.copy(sdist, dist)
    return Path(shutil.copy(wheel, dist))


def check_contents(wheel: Path, sdist: Path, kept: set[str]) -> None:
    """Compare the sdist with all that git keeps, and the wheel with the package and the examples.

    Raises:
        PackagingError: naming the files that are missing, or too many.
    """
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {name.removeprefix("src/") for name in kept if name.startswith("src/")}
    package |= {f"paraxis/{name}" for name in kept if name.startswith("examples/")}
    for name, found, expected in (("sdist", in_sdist, kept | {"PKG-INFO"}), ("wheel", in_wheel, package)):
        if found != expected:
            raise PackagingError(
                f"the {name} lacks {sorted(expected - found)}, and should not have {sorted(found - expected)}"
            )


def with_extra(extra: str) -> Callable[[Path, str, Path], None]:
    """Install the wheel with an extra, and run its program."""

    def check(folder: Path, python: str, wheel: Path) -> None:
        here = environment(folder / "venv", python, wheel if extra == "bare" else f"{wheel}[{extra}]")
        run(here, "-c", PROGRAMS[extra], folder=folder)

    return check


def by_the_line(folder: Path, python: str, wheel: Path) -> None:
    """Write what the error says, with the bare wheel installed."""
    here = environment(folder / "venv", python, wheel)
    try:
        run(here, "-c", "import paraxis; paraxis.Jit", folder=folder)
    except PackagingError as error:
        line = str(error).rpartition("which is not installed; write ")[2]
    else:
        raise PackagingError("nothing is said to be missing")
    run(here, "-m", *shlex.split(line), "--quiet", folder=folder)
    run(here, "-c", PROGRAMS["nnx"], folder=folder)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.packaging", description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter to install for; this one if none is given")
    parser.add_argument("--only", action="append", choices=[*PROGRAMS, "line"], help="what to try; all if not given")
    options = parser.parse_args()
    checks = {name: with_extra(name) for name in PROGRAMS} | {"line": by_the_line}
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        print(f"built and looked through: {wheel.relative_to(ROOT)}", flush=True)
        for python in options.python or [sys.executable]:
            for check in options.only or checks:
                with tempfile.TemporaryDirectory() as here:
                    start, problem = time.monotonic(), ""
                    try:
                        checks[check](Path(here), python, wheel)
                    except PackagingError as error:
                        problem, failed = str(error), failed + 1
                    took = time.monotonic() - start
                print(f"{python}  {check:9} {took:4.0f} s  {'FAILED' if problem else 'works'}", problem, flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
