"""One checkpoint on its way back: what it holds is compared with what is asked for, loaded, and checked."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paraxis._core import batches, processes
from paraxis._core.errors import StateError
from paraxis.train.checkpoints import _leaves, _orbax, _packs
from paraxis.train.checkpoints._checksums import checksum
from paraxis.train.checkpoints._differences import Difference, Kind, compare, listed
from paraxis.train.checkpoints._folders import Folder
from paraxis.train.checkpoints._records import Damaged


@dataclasses.dataclass(frozen=True)
class Found:
    """What a checkpoint holds of a target."""

    leaves: list[Any]
    record: dict[str, Any]
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True)
class _Read:
    """What this process has read of a checkpoint: by their paths, the arrays, and how they were wished for."""

    record: dict[str, Any]
    differences: tuple[Difference, ...]
    wishes: dict[str, _orbax.Wish]
    data: dict[str, Any]


def found(folder: Folder, step: int, target: Any, partial: bool) -> Found:
    """The target's leaves from the checkpoint of a step.

    Raises:
        StateError: if they do not agree, or cannot lie as they should.
        Damaged: if the files are not what was written; in all processes, whichever found that out.
    """
    wanted = _leaves.named(target, "restore")
    read, reason = None, ""
    try:
        read = _read(folder, step, wanted, partial)
    except Damaged as error:
        reason = str(error)
    _go_on_together(reason)
    assert read is not None
    entries, data = read.record["leaves"], read.data
    wrong = [_wrong(path, data.get(path), wish, entries[path]["checksum"]) for path, wish in read.wishes.items()]
    _go_on_together(next(filter(None, wrong), ""))
    own = {difference.path for difference in read.differences}
    # What was read is let go leaf by leaf: there are not two copies of all.
    leaves = [
        leaf if path in own else _leaves.restored(entries[path], data.pop(path, None), leaf)
        for path, leaf in wanted.items()
    ]
    return Found(leaves, read.record, read.differences)


def _read(folder: Folder, step: int, wanted: Mapping[str, Any], partial: bool) -> _Read:
    """What this process needs; it does not communicate."""
    kinds = {path: _leaves.kind(path, leaf, "restore") for path, leaf in wanted.items()}
    record = folder.record(step)
    entries = record["leaves"]
    saved = {path: Kind(entry["dtype"], _shape(entry["shape"])) for path, entry in entries.items()}
    differences = compare(saved, kinds)
    own = {path: wanted[path] for path in (difference.path for difference in differences) if path in wanted}
    _check(folder, step, differences, own if partial else None)
    wishes = {path: _leaves.wish(path, entries[path], leaf) for path, leaf in wanted.items() if path not in own}
    wishes = {path: wish for path, wish in wishes.items() if wish is not None}
    try:
        data = _loaded(folder.place(step), record, wishes)
    except Exception as error:
        if not _orbax.tells_of_damage(error):
            raise
        raise Damaged(f"its files cannot be read: {_root(error)}") from error
    return _Read(record, differences, wishes, data)


def _loaded(place: Path, record: Mapping[str, Any], wishes: Mapping[str, _orbax.Wish]) -> dict[str, Any]:
    """Arrays by their paths, whether they were written each for itself or packed."""
    begins = {path: record["leaves"][path].get("begin") for path in wishes}
    asked = {path: wish for path, wish in wishes.items() if begins[path] is None}
    packed = {path: begin for path, begin in begins.items() if begin is not None}
    if packed:
        asked[_packs.NAME] = _orbax.Wish((record["packed"],), np.dtype(np.uint8))
    data = _orbax.load(place, asked)
    if packed:
        whole = data.pop(_packs.NAME)
        small = {
            path: _packs.unpack(whole, begin, wishes[path].shape, wishes[path].dtype) for path, begin in packed.items()
        }
        data |= batches.send(small, {path: wishes[path].sharding for path in packed})
    return data


def _go_on_together(reason: str) -> None:
    """Processes do, or none of them: what comes next communicates.

    Raises:
        Damaged: if there is a reason not to, in any of them.
    """
    for number, report in processes.reports(reason).items():
        raise Damaged(reason or f"process {number} found: {report}")


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


def _wrong(path: str, data: Any, wish: _orbax.Wish, expected: str) -> str | None:
    """What is wrong with a leaf that was read."""
    where = f"the leaf {path}" if path else "the only leaf"
    if data is None or data.shape != wish.shape or np.dtype(data.dtype) != wish.dtype:
        what = "nothing" if data is None else f"{data.dtype} {data.shape}"
        return f"{where} reads as {what}, where {wish.dtype} {wish.shape} was written"
    if checksum(data) != expected:
        return f"{where} has another checksum than when it was written"
    return None


def _root(error: BaseException) -> str:
    """The first thing that went wrong, in a line."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _shape(shape: list[int] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)
