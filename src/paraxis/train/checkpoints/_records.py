"""The files beside a checkpoint's arrays: its mark and its record; and what the run depends on.

The mark, ``paraxis.txt``, says that a directory is a checkpoint, whatever else of it is damaged, and names all that is
in it. The record, ``paraxis.json``, written last, says what the arrays are. Each of its fields is in a table here: a
new one is added to ``_RECORD``, as optional.
"""

import errno
import functools
import importlib.metadata
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from paraxis._host import files, records
from paraxis._jax import dtypes

FILE = "paraxis.json"
_FORMAT = 1

_MARK = "paraxis.txt"
_TITLE = "A checkpoint of Paraxis. What belongs to it:"
_LARGEST_MARK = 1 << 28  # bytes

_SIZES = records.list_of(records.integer(0))
_ARRAY = {"dtype": records.text(), "shape": _SIZES}
_WRITTEN = {"checksum": records.text("[0-9a-f]{16}"), "begin": records.integer(0)}
_KEYS = {
    "dtype": records.text("key<.+>"),
    "shape": _SIZES,
    "key": records.text(),
    "data shape": _SIZES,
    "data dtype": records.text(),
}
_VALUES = {
    "Python bool": records.flag,
    "Python int": records.integer(most=None),
    "Python float": records.number(finite=False),
    "Python complex": records.list_of(records.number(finite=False), 2),
    "Python str": records.text(),
}


def _leaf(value: Any, where: str) -> None:
    """Accept what ``_leaves.stored`` notes, and where it was written."""
    kind = value.get("dtype") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _VALUES:
        check = records.fields({"dtype": records.text(), "shape": records.nothing, "value": _VALUES[kind]})
    else:
        check = records.fields(_KEYS if isinstance(value, dict) and "key" in value else _ARRAY, _WRITTEN)
    check(value, where)


_RECORD = records.fields(
    {
        "step": records.integer(0, most=None),
        "notes": records.table_of(records.anything),
        "leaves": records.table_of(_leaf),
        "surroundings": records.table_of(records.either(records.text(), records.integer())),
    },
    optional={"packed": records.row(records.text(), records.integer(0))},
)


class Damaged(Exception):  # noqa: N818  it says what the files are, and never leaves the room
    """Files that are not what was written."""


class Removed(Damaged):
    """Files that are there no more, or are others now: a run that saves here has removed or replaced them."""


def write(directory: Path, record: Mapping[str, Any]) -> None:
    """Write a record of JSON values; it is on the disk when this returns."""
    records.write_file(directory / FILE, _FORMAT, record)


def read(directory: Path, step: int) -> dict[str, Any]:
    """Return the record of a step's checkpoint, as it was written: each field is what it must be, and they agree.

    Raises:
        Damaged: if it is not there or not what was written.
        OSError: if it may not be read, or not now.
    """
    try:
        record = records.read_file(directory / FILE, _FORMAT, _RECORD)
        _check_agreement(record, step)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise Damaged(f"its record {FILE} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(f"its record {FILE} is not what was written: {error}") from error
    return record


def require_files(directory: Path) -> None:
    """Check that all that belongs to a checkpoint are files: for the bytes of a pipe, Orbax would wait for ever.

    Raises:
        Damaged: if not so.
    """
    odd = next((name for name in _known(directory) or () if _is_special(directory / name)), None)
    if odd is not None:
        raise Damaged(f"{odd} in it is not an ordinary file")


def is_whole(directory: Path, step: int) -> bool:
    """Return whether there is the record of a step, which is written last."""
    try:
        read(directory, step)
    except (Damaged, OSError):
        return False
    return True


def written(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the array that was written for a leaf, by its entry.

    Raises:
        ValueError: if there is no such dtype.
    """
    data = "data " if "key" in entry else ""
    return tuple(entry[f"{data}shape"]), dtypes.named(entry[f"{data}dtype"])


def _check_agreement(record: Mapping[str, Any], step: int) -> None:
    """Check what no field shows by itself: of which step it is, and that small leaves fill their pack.

    Raises:
        ValueError: if not so.
    """
    if record["step"] != step:
        raise records.Wrong(f"it is of step {record['step']}, not {step}")
    end, packed = 0, []
    for path, entry in record["leaves"].items():
        if "value" in entry:
            continue
        shape, dtype = written(entry)
        size = math.prod(shape) * dtype.itemsize
        if ("checksum" in entry) != (size > 0) or ("begin" in entry and "checksum" not in entry):
            raise records.Wrong(f"its leaf {path} has {'no' if size else 'a'} checksum, and {size} bytes")
        if "key" in entry and entry["data shape"][: len(entry["shape"])] != entry["shape"]:
            raise records.Wrong(f"its leaf {path} has data of another shape")
        if "begin" in entry:
            packed.append((entry["begin"], size, path))
    for begin, size, path in sorted(packed):
        if begin != end:
            raise records.Wrong(f"its leaf {path} begins at byte {begin}, not {end}")
        end += size
    if record.get("packed", [None, 0])[1] != end or ("packed" in record) != bool(packed):
        raise records.Wrong(f"its small leaves have {end} bytes, and {record.get('packed')} says otherwise")


# --- the mark ---------------------------------------------------------------------------------------------------------


def mark(directory: Path) -> None:
    """Say in a directory that it is a checkpoint, and what is in it by now; the record will be."""
    names = sorted({*_names(directory), _MARK, FILE})
    with (directory / _MARK).open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join([_TITLE, *names, ""]))


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a checkpoint, damaged or not: it has its mark, or a record that is whole.

    Raises:
        PermissionError: if it may not be read.
    """
    if directory.is_symlink():
        return False
    try:
        if files.beginning(directory / _MARK, len(_TITLE)) == _TITLE.encode():
            return True
    except PermissionError:
        raise
    except OSError:
        pass
    return is_whole(directory, int(directory.name))


def strange(directory: Path) -> str | None:
    """Something in a checkpoint's directory that does not belong to it, if there is anything."""
    known = _known(directory)
    return None if known is None else next((name for name in _names(directory) if name not in known), None)


def _known(directory: Path) -> set[str] | None:
    """Return all that belongs to a checkpoint, as its mark says; ``None`` if that cannot be read."""
    try:
        text = files.contents(directory / _MARK, _LARGEST_MARK).decode(errors="surrogateescape")
    except OSError:
        return None
    return {*text.split("\n")[1:]}


def _names(directory: Path) -> list[str]:
    """Return all that is in a directory, and in those in it."""
    found = ((parent, name) for parent, folders, names in os.walk(directory) for name in (*folders, *names))
    return [os.path.relpath(os.path.join(parent, name), directory) for parent, name in found]


def _is_special(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


# --- the surroundings -------------------------------------------------------------------------------------------------


def surroundings() -> dict[str, Any]:
    """Return what the bits of a computation depend on, apart from the program."""
    threads = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return {
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "device kind": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "number of processes": jax.process_count(),
        # What XLA takes on CPU if nothing is said.
        "number of XLA's CPU threads": int(threads or max(os.cpu_count() or 1, jax.local_device_count())),
    }


@functools.cache
def _version(package: str) -> str:
    return importlib.metadata.version(package)


def changes(before: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is different now, in words."""
    return tuple(
        f"{name}: {before[name]} when it was saved, {now} now"
        for name, now in surroundings().items()
        if name in before and before[name] != now
    )
