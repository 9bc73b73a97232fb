"""Leaves by their paths: what they are, and how those of a checkpoint differ from those that are asked for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

_MOST = 20  # lines of a message


@dataclasses.dataclass(frozen=True)
class Kind:
    """The type of a leaf, without its value.

    Attributes:
        dtype: ``"float32"``, ``"key<fry>"``, or a Python type, ``"Python int"``.
        shape: of the array; ``None`` for a Python value.
    """

    dtype: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype} {self.shape}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf that is not the same in a checkpoint and in the target.

    Attributes:
        path: of the leaf, as in ``"['params']['w']"``.
        what: ``"missing"`` in the checkpoint, ``"extra"`` in it, or another ``"shape"`` or ``"dtype"``.
        saved: the leaf in the checkpoint, as in ``"float32 (3, 4)"``.
        wanted: the leaf in the target.
    """

    path: str
    what: Literal["missing", "extra", "shape", "dtype"]
    saved: str | None
    wanted: str | None

    def __str__(self) -> str:
        path = self.path or "the whole tree"
        if self.what == "missing":
            return f"{path}: {self.wanted} in the target, missing in the checkpoint"
        if self.what == "extra":
            return f"{path}: {self.saved} in the checkpoint, missing in the target"
        return f"{path}: {self.saved} in the checkpoint, {self.wanted} in the target"


def compare(saved: Mapping[str, Kind], wanted: Mapping[str, Kind]) -> tuple[Difference, ...]:
    """Return all differences: first the target's leaves in their order, then the checkpoint's others in theirs."""
    found = [_difference(path, saved.get(path), kind) for path, kind in wanted.items()]
    found += [Difference(path, "extra", str(kind), None) for path, kind in saved.items() if path not in wanted]
    return tuple(difference for difference in found if difference is not None)


def listed(found: Sequence[Difference | str]) -> str:
    """Describe them on a line each, as many as can be read."""
    lines = [f"  {one}" for one in found[:_MOST]]
    if len(found) > _MOST:
        lines.append(f"  and {len(found) - _MOST} more")
    return "\n".join(lines)


def described(kinds: Mapping[str, Kind]) -> str:
    """Return all leaves, one line each, as far as they can be read."""
    return listed([f"{path or 'the whole tree'}: {kind}" for path, kind in kinds.items()] or ["no leaves"])


def _difference(path: str, saved: Kind | None, wanted: Kind) -> Difference | None:
    if saved is None:
        return Difference(path, "missing", None, str(wanted))
    if saved == wanted:
        return None
    what = "shape" if saved.dtype == wanted.dtype else "dtype"
    return Difference(path, what, str(saved), str(wanted))
