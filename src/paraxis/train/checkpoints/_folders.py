"""The directory of a run's checkpoints: what lies there under which name, and how a name changes hands.

    100/                            the checkpoint of step 100; whole, as it has its name only since it was
    damaged-100/                    one that was set aside
    .paraxis/                       ours alone
        paraxis.txt                 says so
        run.lock                    locked by the process that saves, from its first save until it is done
        writer.lock                 locked by what writes or tidies; both locks end with the process
        saving-200…/                a checkpoint that is being written
        replaced-100/, removing-100/  ones that go

A checkpoint is known by the mark that it holds, and ``.paraxis`` by its own; neither by its name. Whatever else lies
there is somebody's own, also what was put into a checkpoint: it is neither read, renamed, removed nor written to.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paraxis._host import files
from paraxis.train.checkpoints import _locks, _records
from paraxis.train.checkpoints._locks import Lock

_OURS, _RUN, _LOCK = ".paraxis", "run.lock", "writer.lock"
_MARK, _SAYS = (
    "paraxis.txt",
    b"Here Paraxis writes the checkpoints that lie beside. All that is in here is its own.\n",
)
_PASSING = re.compile(r"(saving|replaced|removing)-(\d+)|(saving)-(\d+)\..*orbax-checkpoint-tmp.*")
_LARGE = 1 << 16


class Folder:
    """A directory of checkpoints. Its methods that write are for the first process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ours = path / _OURS
        self._claim: Lock | None = None

    def steps(self) -> tuple[int, ...]:
        """Return the steps of which there are checkpoints, in order."""
        entries = _entries(self.path)
        ours = (entry.name for entry in entries if _is_number(entry.name) and _records.is_checkpoint(entry))
        return tuple(sorted(int(name) for name in ours))

    def place(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.path / str(step)

    def identity(self, step: int) -> tuple[int, int] | None:
        """Return which directory it is that has the name of a step now; another one when it was replaced."""
        try:
            found = self.place(step).stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def staging(self, step: int) -> Path:
        """Return where it is written."""
        return self._ours / f"saving-{step}"

    def try_staging(self, step: int) -> None:
        """Make a directory there, and remove it again.

        Orbax makes it in the background; what waits there for it gives up after five minutes only, and so would the
        end of the process.

        Raises:
            OSError: if it cannot be made.
        """
        staging = self.staging(step)
        trial = staging.with_name(f"{staging.name}.trial.orbax-checkpoint-tmp-0123456789")  # as long as Orbax's
        trial.mkdir(parents=True, exist_ok=True)
        trial.rmdir()

    def record(self, step: int) -> dict[str, Any]:
        """Return what was recorded beside a step's arrays.

        Raises:
            Damaged: if it is not there or not what was written.
        """
        _records.require_files(self.place(step))
        return _records.read(self.place(step), step)

    def make(self) -> None:
        """Make the directory, and ours in it.

        Raises:
            FileExistsError: if there is something that is not ours in its place.
            OSError: if it cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        not_ours = FileExistsError(f"{self._ours} is there and is not of Paraxis, so it stays as it is")
        if self._ours.is_symlink():
            raise not_ours
        self._ours.mkdir(exist_ok=True)
        names = {entry.name for entry in _entries(self._ours)}  # before the mark, which others make before the rest
        says = self._said()
        if says != _SAYS:
            # A process that was killed may have left it empty, or the mark unfinished.
            if says is None or not _SAYS.startswith(says) or names - {_MARK}:
                raise not_ours
            (self._ours / _MARK).write_bytes(_SAYS)

    def check_free(self, step: int) -> None:
        """Check that nobody's own files lie where the checkpoint of a step is to lie.

        Raises:
            FileExistsError: if there are.
        """
        place = self.place(step)
        if not os.path.lexists(place):
            return
        if not _records.is_checkpoint(place):
            raise FileExistsError(f"{place} is there and is not a checkpoint, so it stays as it is")
        other = _records.strange(place)
        if other is not None:
            raise FileExistsError(f"{place / other} is not of the checkpoint that it is in, so both stay as they are")

    def commit(self, step: int, record: Mapping[str, Any]) -> None:
        """Give a written checkpoint its name; an older one of that step goes."""
        _records.mark(self.staging(step))
        _records.write(self.staging(step), record)
        _sync_all(self.staging(step))
        self._exchange(step)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        for entry, kind, number in self._passing():
            if (kind, number) == ("saving", step):
                shutil.rmtree(entry, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, unless there is something of somebody's own in it.

        It has lost its name before its files go.
        """
        if _records.strange(self.place(step)) is not None:
            return
        going = self._ours / f"removing-{step}"
        shutil.rmtree(going, ignore_errors=True)
        self.place(step).rename(going)
        shutil.rmtree(going)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, and give its new place."""
        aside, number = self.path / f"damaged-{step}", 2
        while os.path.lexists(aside):
            aside, number = self.path / f"damaged-{step}-{number}", number + 1
        self.place(step).rename(aside)
        return aside

    def is_tidy(self) -> bool:
        """Return whether there is nothing that is being written, or that a killed process left."""
        return not self._passing()

    def tidy(self) -> None:
        """Finish, or remove, what a killed process left. Only under the lock, which is given for ours alone."""
        for entry, kind, step in self._passing():
            if kind == "saving":
                if entry == self.staging(step) and self._is_free(step) and _records.is_whole(entry, step):
                    self._exchange(step)
                else:
                    shutil.rmtree(entry, ignore_errors=True)
        for entry, kind, step in self._passing():
            if kind == "replaced" and not os.path.lexists(self.place(step)):
                entry.rename(self.place(step))
            else:
                shutil.rmtree(entry, ignore_errors=True)

    def claim(self) -> None:
        """Have this process be the one that saves here, until it is released.

        Raises:
            OSError: if it cannot be; ``BlockingIOError``: if another one is.
        """
        if self._claim is None:
            self.make()
            self._claim = _locks.claim(self._ours / _RUN)

    def unclaim(self) -> None:
        """Let other processes save here, once no other object of this one does."""
        self._claim = None

    def lock(self, *, wait: bool) -> Lock | None:
        """Return the right to write now, once no other process and no other object of this one has it.

        Raises:
            OSError: if there is no such file, and none can be made.
        """
        self.make()
        return Lock.take(self._ours / _LOCK, wait)

    def _said(self) -> bytes | None:
        """Return what our directory's mark says: nothing, if there is none yet; ``None`` if it is something else."""
        try:
            return files.contents(self._ours / _MARK, len(_SAYS))
        except FileNotFoundError:
            return b""
        except OSError:
            return None

    def _is_free(self, step: int) -> bool:
        try:
            self.check_free(step)
        except FileExistsError:
            return False
        return True

    def _passing(self) -> list[tuple[Path, str, int]]:
        """Return what is being written, or goes: the directory, what happens to it, and of which step it is."""
        found = ((entry, _PASSING.fullmatch(entry.name)) for entry in _entries(self._ours))
        ours = [(entry, match) for entry, match in found if match and entry.is_dir() and not entry.is_symlink()]
        return [(entry, match[1] or match[3], int(match[2] or match[4])) for entry, match in ours]

    def _exchange(self, step: int) -> None:
        self.check_free(step)
        place, old = self.place(step), self._ours / f"replaced-{step}"
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        self.staging(step).rename(place)
        _sync(self.path)
        shutil.rmtree(old, ignore_errors=True)


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _is_number(name: str) -> bool:
    return name.isdecimal() and str(int(name)) == name


def _sync_all(directory: Path) -> None:
    """Have the disk write the small files and the names; Orbax has seen to the large ones."""
    for parent, _, names in os.walk(directory):
        for name in names:
            file = Path(parent) / name
            if file.stat().st_size <= _LARGE:
                _sync(file)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
