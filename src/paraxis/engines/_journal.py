"""The record on disk of what a run has done, so that one that was killed goes on, to the same bits.

    FOLDER/paraxis-run.json          what the run depends on: its program, its arguments, its chunks
    FOLDER/paraxis-pass-0003.npz     what a pass gave, when it is done
    FOLDER/paraxis-part-0003.npz     parts of the pass under way, and how many chunks they are of
    FOLDER/paraxis-rows-0003-0.npz   rows that are kept, of chunks from number 0 on
    FOLDER/paraxis-state.npz         of a solver whose rows are on disk: where it was after an iteration

Each file takes its place when it is whole. The host's part of a run, loops included, is run again from the start; what
passes gave is taken from here, so that it takes the same way. When the run is done, its files go, and the record last:
files without one are nobody's. The folder itself is locked while a run has it.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._host import archives, files, records
from paraxis._jax import dtypes, jax_api
from paraxis.engines._job import Part, Pieces, loaded
from paraxis.engines._sums import Totals
from paraxis.errors import CheckpointError, LoweringError

_FORMAT = 2
_RECORD = "paraxis-run.json"
_STATE = "paraxis-state.npz"
_OURS = re.compile(r"\.?paraxis-(run\.json|state\.npz|(pass|part|rows)-\d{4,}(-\d+)?\.npz)(-[0-9a-f]+)?$")
"""Names of files in such a folder, those included that a kill has left half written."""
_TOLD = records.table_of(records.row(records.text(), records.text()))
_DESCRIPTION = records.table_of(records.fields({"digest": records.text(), "told": _TOLD}))
_HEAD = records.table_of(records.list_of(records.anything))


class Journal:
    """A folder with what a run has done.

    Args:
        engine: the engine's name, for errors.
        folder: is made if it is not there.
        description: what the run depends on, by its names. What comes first may be why a part that follows differs.
        every: seconds between two savings.

    Raises:
        CheckpointError: if the folder holds another run, something else, or what cannot be read or written; or if
            another run has it.
    """

    def __init__(self, engine: str, folder: Path, description: Mapping[str, Part], every: float) -> None:
        self._engine, self._folder, self._every = engine, folder, every
        self._saved_at = time.monotonic()
        self._rows_saved = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._engine}: folder {str(folder)!r} is in use by another run; wait until it is done, or give "
                f"this one a folder of its own: px.{self._engine}(…, folder={str(folder) + '-2'!r})"
            ) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._begin(description)
        except BaseException:
            self.close()
            raise

    def _begin(self, description: Mapping[str, Part]) -> None:
        folder = self._folder
        try:
            others = sorted(path.name for path in folder.iterdir() if not _OURS.match(path.name))
            if others:
                raise CheckpointError(
                    f"{self._engine}: folder must be one of its own, but {str(folder)!r} holds {others[0]!r}; write "
                    f"px.{self._engine}(…, folder={str(folder / 'run')!r})"
                )
            if (folder / _RECORD).exists():
                self._require_same(records.read_file(folder / _RECORD, _FORMAT, _DESCRIPTION), description)
            else:
                for path in self._ours():
                    path.unlink()
                record = records.wrapped(_FORMAT, {name: vars(part) for name, part in description.items()})
                self._write(_RECORD, lambda file: file.write(record))
        except (OSError, records.Wrong) as error:
            raise self._unusable(error) from error

    def finished(self, number: int) -> tuple[list[Any], list[Pieces]] | None:
        """Return what a pass gave: totals, and rows; ``None`` if it is not done."""
        found = self._read(f"paraxis-pass-{number:04}.npz")
        if found is None:
            return None
        head, arrays = found
        return arrays, self._rows(number, int(head["rows"][0]), int(head["rows"][1]))

    def begun(self, number: int, totals: Totals, pieces: Sequence[Pieces]) -> int:
        """Fill in the parts of a pass under way; return how many chunks they are of."""
        found = self._read(f"paraxis-part-{number:04}.npz")
        self._rows_saved = 0
        if found is None:
            return 0
        head, arrays = found
        done, taken = int(head["done"][0]), iter(arrays)
        totals.held = [[next(taken) for _ in totals.kinds] if there else None for there in head["held"]]
        for mine, saved in zip(pieces, self._rows(number, len(pieces), done), strict=True):
            mine.parts[:] = saved.parts
        self._rows_saved = done
        return done

    def part(self, number: int, done: int, totals: Totals, pieces: Sequence[Pieces], *, now: bool = False) -> None:
        """Save the parts of a pass under way, if it is time."""
        if not now and time.monotonic() - self._saved_at < self._every:
            return
        self._save_rows(number, done, pieces)
        there = [part is not None for part in totals.held]
        arrays = [x for part in totals.held if part is not None for x in part]
        self._save(f"paraxis-part-{number:04}.npz", {"done": [done], "held": there}, arrays)
        self._saved_at = time.monotonic()

    def finish(self, number: int, done: int, totals: Sequence[Any], pieces: Sequence[Pieces]) -> None:
        """Save what a pass gave."""
        self._save_rows(number, done, pieces)
        self._save(f"paraxis-pass-{number:04}.npz", {"rows": [len(pieces), done]}, totals)
        (self._folder / f"paraxis-part-{number:04}.npz").unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def state(self) -> tuple[list[int], list[Any]] | None:
        """Return the numbers and arrays that were saved last as the whole state of a run; ``None`` if none were."""
        found = self._read(_STATE)
        return None if found is None else (found[0]["numbers"], found[1])

    def save_state(self, numbers: Sequence[int], arrays: Sequence[Any], *, now: bool = False) -> None:
        """Save numbers and arrays as the whole state of a run, if it is time."""
        if now or time.monotonic() - self._saved_at >= self._every:
            self._save(_STATE, {"numbers": [*numbers]}, arrays)
            self._saved_at = time.monotonic()

    def clear(self) -> None:
        """Remove the files of a run that is done, and the folder if nothing else is in it."""
        for path in self._ours():
            path.unlink(missing_ok=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()

    def close(self) -> None:
        """Leave the folder to others."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _ours(self) -> list[Path]:
        """By name: what a pass gave comes before the rows that belong to it, and the record last."""
        return sorted(path for path in self._folder.iterdir() if _OURS.match(path.name))

    # --- rows --------------------------------------------------------------------------------------------------

    def _save_rows(self, number: int, done: int, pieces: Sequence[Pieces]) -> None:
        if not pieces or done == self._rows_saved:
            return
        new = [loaded(x) for one in pieces for x in one.parts[self._rows_saved : done]]
        if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in new):
            raise LoweringError(
                f"{self._engine}: random keys are kept between passes, which cannot be saved in folder; leave folder "
                "out, or make the keys where they are used: px.keys(key)"
            )
        self._save(f"paraxis-rows-{number:04}-{self._rows_saved}.npz", {"to": [done]}, new)
        self._rows_saved = done

    def _rows(self, number: int, count: int, done: int) -> list[Pieces]:
        found = [Pieces() for _ in range(count)]
        at = 0
        while count and at < done:
            saved = self._read(f"paraxis-rows-{number:04}-{at}.npz")
            if saved is None:
                raise self._unusable(FileNotFoundError(f"rows from chunk {at} on of pass {number} are not there"))
            head, arrays = saved
            each = len(arrays) // count
            for place, one in enumerate(found):
                one.parts += [np.asarray(x) for x in arrays[place * each : (place + 1) * each]]
            at = int(head["to"][0])
        for one in found:
            del one.parts[done:]
        return found

    # --- files -------------------------------------------------------------------------------------------------

    def _save(self, name: str, head: Mapping[str, list[Any]], arrays: Sequence[Any]) -> None:
        hosts = [np.asarray(x) for x in arrays]
        weak = [bool(getattr(x, "weak_type", False)) for x in arrays]
        kinds = [[x.dtype.name, list(x.shape), is_weak] for x, is_weak in zip(hosts, weak, strict=True)]
        text = json.dumps({**head, "kinds": kinds}).encode()
        raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in hosts]
        self._write(name, lambda file: np.savez(file, np.frombuffer(text, np.uint8), *raw))

    def _write(self, name: str, fill: Callable[[Any], Any]) -> None:
        try:
            with files.replaced(self._folder / name) as file:
                fill(file)
        except OSError as error:
            raise CheckpointError(
                f"{self._engine}: {str(self._folder / name)!r} cannot be written: {error}; what was saved before is "
                f"there: make room, and run it again to go on"
            ) from error

    def _read(self, name: str) -> tuple[dict[str, Any], list[Any]] | None:
        path = self._folder / name
        if not path.exists():
            return None
        try:
            with archives.Archive(path) as archive:
                head = records.read(archive.read("arr_0").tobytes(), _HEAD)
                raw = [archive.read(f"arr_{at + 1}") for at in range(len(head["kinds"]))]
            arrays = [_array(data, *kind) for data, kind in zip(raw, head["kinds"], strict=True)]
        except (OSError, archives.Damaged, records.Wrong, KeyError, TypeError, ValueError) as error:
            raise self._unusable(error, name) from error
        return head, arrays

    def _require_same(self, saved: Mapping[str, Any], own: Mapping[str, Part]) -> None:
        for name, part in own.items():
            was = saved.get(name, {"digest": "", "told": {}})
            if was["digest"] != part.digest:
                raise CheckpointError(
                    f"{self._engine}: folder {str(self._folder)!r} holds another run: {_differing(name, was, part)}; "
                    f"write what it was to go on with it, give another folder, or remove this one to begin anew"
                )

    def _unusable(self, error: BaseException, name: str = "") -> CheckpointError:
        no_folder = isinstance(error, (FileExistsError, NotADirectoryError))  # a file of somebody's
        write = "write folder='runs/one', or another that is not there" if no_folder else "remove it to begin anew"
        return CheckpointError(f"{self._engine}: folder {str(self._folder / name)!r} cannot be used: {error}; {write}")


_MOST_SAID = 3
"""The most differences that an error tells: one number may be in a program many times."""


def _differing(name: str, was: Mapping[str, Any], part: Part) -> str:
    """Tell what differs in a part: what was and is, or else what has other values."""
    both = {one: (was["told"].get(one), told) for one, told in part.told.items()}
    said = [
        f"{one} was {'not there' if old is None else old[0]}, and is {text} here"
        for one, (old, (text, _)) in both.items()
        if old is None or old[0] != text
    ]
    gone = [f"{one} was {text}, and is not there now" for one, (text, _) in was["told"].items() if one not in part.told]
    unsaid = [f"{one} had other values" for one, (old, told) in both.items() if old is not None and old[1] != told[1]]
    found = said + gone or unsaid
    return ", ".join([*found[:_MOST_SAID], *["…"] * (len(found) > _MOST_SAID)]) or f"its {name} was another"


_PATIENCE = 3.0
"""Seconds: a process that was killed gives up its files some time after it has vanished from sight."""


def _locked(folder: Path) -> int | None:
    """Return the handle of a folder that is locked until it is closed; ``None`` where the system has no such locks.

    Raises:
        BlockingIOError: if it is another's.
        OSError: if it cannot be opened.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
        except (ImportError, PermissionError):
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                raise
            time.sleep(0.1)
        except FileNotFoundError:  # another run was done with it just now
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # not on this kind of disk
            os.close(handle)
            return None
        os.close(handle)


def _array(data: np.ndarray, dtype: str, shape: Sequence[int], weak: bool) -> Any:
    made = jnp.asarray(np.frombuffer(data.tobytes(), dtypes.named(dtype)).reshape(shape))
    return jax_api.weak(made) if weak else made
