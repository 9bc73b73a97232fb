"""A defect: a piece of the package's text, what replaces it, and the tests that have to notice."""

import dataclasses
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Defect:
    """One entry of a list in this folder.

    Attributes:
        name: What is wrong then, in a few words; no two are alike.
        file: Where, below ``src/paraxis``: where to look first.
        text: A piece of that file which is in it once.
        becomes: What replaces it.
        tests: Files, folders or tests, as pytest takes them, of which one has to fail.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    def find(self, root: Path) -> Path:
        """Return the file of the package below ``root`` that has the text.

        A piece of text that is no longer in its file, as that was moved or divided, is looked for in all others.

        Raises:
            ValueError: The text is not to be found exactly once.
        """
        package = root / "src" / "paraxis"
        first = package / self.file
        files = [first] if first.is_file() and self.text in first.read_text("utf-8") else package.rglob("*.py")
        found = [path for path in files for _ in range(path.read_text("utf-8").count(self.text))]
        if len(found) != 1:
            raise ValueError(
                f"defect {self.name!r}: its text is found {len(found)} times, in {self.file} or elsewhere; the code "
                f"has changed: write what the defect would be today"
            )
        return found[0]

    def apply(self, root: Path) -> None:
        """Replace the text in the package below ``root``. Raises ValueError as :meth:`find` does."""
        path = self.find(root)
        path.write_text(path.read_text("utf-8").replace(self.text, self.becomes), "utf-8")


def read_lists(folder: Path = LISTS) -> list[Defect]:
    """Every defect of the lists in a folder, those of one room together."""
    entries = [
        entry for path in sorted(folder.glob("*.toml")) for entry in tomllib.loads(path.read_text("utf-8"))["defect"]
    ]
    return [Defect(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Copy what git would commit: tracked files as they are now, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():  # not one that was deleted and not yet committed so
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def tests_of(defects: Iterable[Defect]) -> list[str]:
    """Every test that is named by one of them, once."""
    return sorted({test for defect in defects for test in defect.tests})
