"""Apply each defect to a copy of the project, run the tests that have to notice, and report: python -m tests.defects.

The tests are those of ``make test``: without the mark ``slow``. The exit status is 0 if every defect was caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CAUGHT = "caught"
TIMEOUT = 600.0  # seconds that the tests of one defect may take
_BY_STATUS_OF_PYTEST = {
    0: "NOT CAUGHT: its tests pass",
    1: CAUGHT,
    2: "NOT CAUGHT: the package cannot even be imported, which is no small defect",
    5: "NOT CAUGHT: no test was run",
}


class Defect(NamedTuple):
    """A piece of the package's text, in which it stands once, what becomes of it, and the tests that have to notice.

    ``file`` says where to look first, below ``src/paraxis``: code that was moved is looked for in all others.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: list[str]

    def apply(self, root: Path) -> Path:
        """Replace the text in the package below ``root``, and return the file.

        Raises:
            ValueError: if the text is not there exactly once.
        """
        package = root / "src" / "paraxis"
        first = package / self.file
        files = [first] if first.is_file() and self.text in first.read_text("utf-8") else package.rglob("*.py")
        found = [path for path in files for _ in range(path.read_text("utf-8").count(self.text))]
        if len(found) != 1:
            raise ValueError(f"its text is found {len(found)} times; write what the defect would be today")
        found[0].write_text(found[0].read_text("utf-8").replace(self.text, self.becomes), "utf-8")
        return found[0]


def read_lists() -> list[Defect]:
    """Every defect of the lists in this folder, which are tables by the file."""
    texts = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.toml"))]
    tables = [table for text in texts for table in tomllib.loads(text).items()]
    return [Defect(file=file, **entry) for file, entries in tables for entry in entries]


def copy_tree(target: Path) -> None:
    """Copy what git would commit: tracked files as they are now, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not one that was deleted and not yet committed so
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def outcome(defect: Defect, copy: Path) -> tuple[str, str]:
    """Say what became of a defect, ``CAUGHT`` or why not, and what pytest printed. The copy is mended afterwards."""
    shutil.copytree(copy / "src", healthy := copy / ".healthy")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}  # files change within a second
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-m", "not slow", *defect.tests]
    try:
        defect.apply(copy)
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except ValueError as error:
        return "STALE", str(error)
    except subprocess.TimeoutExpired as error:
        return f"NOT CAUGHT: its tests hang for {TIMEOUT:.0f} s", str(error.stdout)
    finally:
        shutil.rmtree(copy / "src")
        healthy.rename(copy / "src")
    told = _BY_STATUS_OF_PYTEST.get(done.returncode, f"NOT CAUGHT: pytest ended with {done.returncode}")
    if " KeyboardInterrupt " in done.stdout:  # which a test sends to itself, and the healthy package takes
        told = CAUGHT
    return told, done.stdout + done.stderr


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 if every chosen defect was caught, 1 if not, 2 if there is none."""
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only defects whose name, or file, has one of these words in it")
    parser.add_argument("--verbose", action="store_true", help="print what pytest said of each that was not caught")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [defect for defect in read_lists() if any(word in f"{defect.name} {defect.file}" for word in words)]
    if not chosen:
        print(f"no defect has any of {', '.join(words)} in its name or file", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="paraxis-defects-") as folder:
        copy_tree(Path(folder))
        left = 0
        for defect in chosen:
            what, printed = outcome(defect, Path(folder))
            left += what != CAUGHT
            print(f"{what:8}  {defect.file}: {defect.name}", flush=True)
            if options.verbose and what != CAUGHT:
                print(printed)
    print(f"{len(chosen) - left} of {len(chosen)} defects caught")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
