"""One checkpoint on its way back: what it holds is compared with what is asked for, loaded, and checked."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np

from paraxis._axes import arrays
from paraxis._host import processes
from paraxis._jax import dtypes
from paraxis.errors import CheckpointError, StateError
from paraxis.train.checkpoints import _leaves, _orbax, _packs, _records
from paraxis.train.checkpoints._checksums import checksum
from paraxis.train.checkpoints._differences import Difference, Kind, compare, described, listed
from paraxis.train.checkpoints._folders import Folder
from paraxis.train.checkpoints._records import Damaged, Removed

_T = TypeVar("_T")
_DAMAGED, _REMOVED = "damaged: ", "removed"


@dataclasses.dataclass(frozen=True)
class Found:
    """The part of a target that a checkpoint holds."""

    leaves: list[Any]
    record: dict[str, Any]
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The arrays to read, by their paths."""

    record: dict[str, Any]
    differences: tuple[Difference, ...]
    wishes: dict[str, _orbax.Wish]


NotesCheck = Callable[[Mapping[str, Any]], None]
"""Raises a ``ValueError`` if notes are not what was written."""


def found(folder: Folder, step: int, target: Any, partial: bool, check: NotesCheck | None) -> Found:
    """Return the target's leaves from the checkpoint of a step.

    Raises:
        StateError: if they do not agree, or cannot lie as they should.
        Damaged: if the files are not what was written; in all processes, whichever found that out.
        Removed: if that is because they were removed or replaced meanwhile; likewise.
        CheckpointError: if another process could not read them for another reason.
    """
    wanted = _leaves.named(target, "restore")
    before = folder.identity(step)

    def is_there() -> bool:
        return before is not None and folder.identity(step) == before

    plan = _together(lambda: _planned(folder, step, wanted, partial, check), is_there)
    # All load or none does: Orbax counts what each process asks of it, and names its barriers by that number.
    data = _together(lambda: _loaded(folder.place(step), plan), is_there)
    _together(lambda: _verify(plan, data), is_there)
    own, entries = {difference.path for difference in plan.differences}, plan.record["leaves"]
    # What was read is let go leaf by leaf: there are not two copies of all.
    leaves = [
        leaf if path in own else _leaves.restored(entries[path], data.pop(path, None), leaf)
        for path, leaf in wanted.items()
    ]
    return Found(leaves, plan.record, plan.differences)


def _together(work: Callable[[], _T], is_there: Callable[[], bool]) -> _T:
    """Return what each process does, if none failed: what comes next communicates, so all go on or none does.

    Raises:
        Exception: its own, in a process that failed.
        Removed: if that one, or another, found the files damaged, and they are not there any more as they were.
        Damaged: in the others, if that one found the files damaged.
        CheckpointError: in the others, if it was something else.
    """
    result, failure = None, None
    try:
        result = work()
    except Damaged as error:
        failure = error if is_there() else Removed("it was removed or replaced while it was read")
    except Exception as error:
        failure = error
    reports = processes.reports(_said(failure))
    if failure is not None and not isinstance(failure, Damaged):
        raise failure
    # What the most serious report says, whatever this process found: all must do the same now.
    for number, report in reports.items():
        if report != _REMOVED and not report.startswith(_DAMAGED):
            raise CheckpointError(f"restore: process {number} could not read its part of the checkpoint: {report}")
    if _REMOVED in reports.values():
        raise Removed("it was removed or replaced while it was read")
    if failure is not None:
        raise failure
    for number, report in reports.items():
        raise Damaged(f"process {number} found: {report.removeprefix(_DAMAGED)}")
    return cast("_T", result)


def _said(failure: Exception | None) -> str:
    if failure is None:
        return ""
    if isinstance(failure, Removed):
        return _REMOVED
    return f"{_DAMAGED}{failure}" if isinstance(failure, Damaged) else repr(failure)


def _planned(folder: Folder, step: int, wanted: Mapping[str, Any], partial: bool, check: NotesCheck | None) -> _Plan:
    kinds = {path: _leaves.kind(path, leaf, "restore") for path, leaf in wanted.items()}
    record = folder.record(step)
    try:
        if check is not None:
            check(record["notes"])
    except ValueError as error:
        raise Damaged(f"its notes are not what was written: {error}") from error
    entries = record["leaves"]
    for path in wanted:
        _check_keys(path, entries.get(path, {}))
    saved = {path: Kind(entry["dtype"], _shape(entry["shape"])) for path, entry in entries.items()}
    differences = compare(saved, kinds)
    own = {path: wanted[path] for path in (difference.path for difference in differences) if path in wanted}
    if partial and wanted and len(own) == len(wanted):
        raise _nothing_agrees(folder, step, saved, kinds)
    _check(folder, step, differences, own if partial else None)
    wishes = {path: _leaves.wish(path, entries[path], leaf) for path, leaf in wanted.items() if path not in own}
    return _Plan(record, differences, {path: wish for path, wish in wishes.items() if wish is not None})


def _check_keys(path: str, entry: Mapping[str, Any]) -> None:
    """Check that random keys are of a kind that there is, with data of its shape.

    Raises:
        Damaged: if not.
    """
    if "key" not in entry:
        return
    try:
        dtype, row, of_data = dtypes.of_keys(entry["key"])
    except ValueError as error:
        raise Damaged(f"its record of {_where(path)} is impossible: {error}") from None
    expected = str(dtype), (*entry["shape"], *row), of_data
    if (entry["dtype"], *_records.written(entry)) != expected:
        raise Damaged(f"its record of {_where(path)} is impossible: {entry}")


def _loaded(place: Path, plan: _Plan) -> dict[str, Any]:
    """Arrays by their paths, of the shapes and dtypes that were written."""
    try:
        data = _read(place, plan)
    except Exception as error:
        if not _orbax.tells_of_damage(error):
            raise
        raise Damaged(f"its files cannot be read: {_root(error)}") from error
    for path, wish in plan.wishes.items():
        x = data.get(path)
        if x is None or x.shape != wish.shape or np.dtype(x.dtype) != wish.dtype:
            what = "nothing" if x is None else f"{x.dtype} {x.shape}"
            raise Damaged(f"{_where(path)} reads as {what}, where {wish.dtype} {wish.shape} was written")
    return data


def _read(place: Path, plan: _Plan) -> dict[str, Any]:
    """Arrays by their paths, whether they were written each for itself or packed."""
    begins = {path: plan.record["leaves"][path].get("begin") for path in plan.wishes}
    asked = {path: wish for path, wish in plan.wishes.items() if begins[path] is None}
    packed = {path: (begin, plan.wishes[path]) for path, begin in begins.items() if begin is not None}
    if not packed:
        return _orbax.load(place, asked)
    name, size = plan.record["packed"]
    data = _orbax.load(place, asked | {name: _orbax.Wish((size,), np.dtype(np.uint8))})
    whole = data.pop(name)
    small = {path: _packs.unpack(whole, begin, wish.shape, wish.dtype) for path, (begin, wish) in packed.items()}
    return data | arrays.send(small, {path: wish.sharding for path, (_, wish) in packed.items()})


def _verify(plan: _Plan, data: Mapping[str, Any]) -> None:
    """Compare all checksums, before anything is said of one: they communicate."""
    entries = plan.record["leaves"]
    wrong = [path for path in plan.wishes if checksum(data[path]) != entries[path]["checksum"]]
    if wrong:
        raise Damaged(f"{_where(wrong[0])} does not have the checksum that it was written with")


def _where(path: str) -> str:
    return f"the leaf {path}" if path else "the only leaf"


def _check(folder: Folder, step: int, differences: tuple[Difference, ...], own: Mapping[str, Any] | None) -> None:
    """``own``: the target's leaves that would be kept; ``None``: all must be taken."""
    if own is None and differences:
        raise StateError(
            f"restore: the checkpoint of step {step} in {folder.path} and the target differ:\n{listed(differences)}\n"
            f"give a target of the state that was saved; to take the leaves that agree and keep the target's own for "
            f"the rest, write restore(target, partial=True)"
        )
    empty = [path for path, leaf in (own or {}).items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if empty:
        raise StateError(
            f"restore: the checkpoint of step {step} in {folder.path} lacks {', '.join(empty)}, and the target has no "
            f"value to keep there, only a jax.ShapeDtypeStruct; give an array: restore(state, partial=True)"
        )


def _nothing_agrees(folder: Folder, step: int, saved: Mapping[str, Kind], wanted: Mapping[str, Kind]) -> StateError:
    return StateError(
        f"restore: nothing in the checkpoint of step {step} in {folder.path} agrees with the target in path, shape and "
        f"dtype; the checkpoint has\n{described(saved)}\nand the target has\n{described(wanted)}\n"
        f"in a path, .params is an attribute, ['w'] a key of a dict, [0] a place in a list or tuple; give a target "
        f"that is nested like what was saved, such as the whole state: restore(state, partial=True)"
    )


def _root(error: BaseException) -> str:
    """Return the first thing that went wrong, in a line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _shape(shape: list[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)
