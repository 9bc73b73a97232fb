"""Damage for tests: every field of a record made something else, and a user's own things with hostile names."""

import copy
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DEEP = "\0deep"
_OTHERS = (None, True, -1, 2**70, 0.5, math.nan, "", "odd", _DEEP, [], [[[1]]], {}, {"odd": 1})


def damaged(record: Any, *, but: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """A JSON value with each field, in turn, gone, doubled, of another type, out of range, or joined by another.

    Args:
        record: to be damaged; it is left alone.
        but: names of fields that may hold anything, and are left out.

    Yields:
        What was done, and the JSON.
    """
    yield "no JSON", b"{"
    yield "no text", b"\xff\xfe"
    yield "nested", b"[" * 200_000
    for other in (*_OTHERS, ["odd"]):
        yield f"all = {other!r}", _text(other)
    yield from _inside(record, record, (), but)


def _inside(root: Any, value: Any, path: tuple[Any, ...], but: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    where = "".join(f"[{key!r}]" for key in path)
    if isinstance(value, dict):
        for key, item in value.items():
            if key in but:
                continue
            yield f"without {where}[{key!r}]", _text(_with(root, path, {k: v for k, v in value.items() if k != key}))
            twice = _text(_with(root, path, {**value, "\0twice": item})).replace(rb'"\u0000twice"', _text(key))
            yield f"twice {where}[{key!r}]", twice
            yield from _others(root, item, (*path, key))
            yield from _inside(root, item, (*path, key), but)
        yield f"more in {where}", _text(_with(root, path, {**value, "odd": 1}))
    elif isinstance(value, list):
        yield f"more in {where}", _text(_with(root, path, [*value, "odd"]))
        for index, item in enumerate(value):
            yield f"without {where}[{index}]", _text(_with(root, path, value[:index] + value[index + 1 :]))
            yield from _others(root, item, (*path, index))
            yield from _inside(root, item, (*path, index), but)


def _others(root: Any, value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, bytes]]:
    where = "".join(f"[{key!r}]" for key in path)
    for other in _OTHERS:
        if type(other) is not type(value) or other != value:
            yield f"{where} = {other!r}", _text(_with(root, path, other))


def _with(root: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(root)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def _text(value: Any) -> bytes:
    return json.dumps(value).encode().replace(json.dumps(_DEEP).encode(), b"[" * 200_000)


def wrapped(record: bytes, **others: Any) -> str:
    """The text of a file ``paraxis.json`` with a record and its right checksum."""
    text = record.decode(errors="surrogateescape")
    crc = zlib.crc32(text.encode(errors="surrogateescape"))
    return json.dumps({"format": 1, "crc32": crc, "record": text} | others)


KINDS = "file", "empty", "folder", "empty folder", "link", "link to a folder", "loose link", "private", "pipe"


def hostile(place: Path, names: tuple[str, ...], turn: int) -> Path:
    """Put a user's own things into a directory, under such names: of one kind of ``KINDS`` after the other.

    Args:
        place: the directory.
        names: of what is put there.
        turn: the number of the kind of the first.

    Returns:
        Where the links lead to.
    """
    place.mkdir(parents=True, exist_ok=True)
    elsewhere = place.parent / f"{place.name} elsewhere"
    elsewhere.mkdir()
    (elsewhere / "work").write_text("years of work")
    for number, name in enumerate(names):
        target, kind = place / name, KINDS[(number + turn) % len(KINDS)]
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind in ("file", "empty", "private"):
            target.write_text("" if kind == "empty" else f"work of {name}")
            target.chmod(0o600 if kind == "private" else 0o644)
        elif kind in ("folder", "empty folder"):
            target.mkdir(mode=0o751)
            if kind == "folder":
                (target / "work").write_text("mine")
        elif kind == "pipe":
            os.mkfifo(target)
        else:
            to = {"link": elsewhere / "work", "link to a folder": elsewhere, "loose link": elsewhere / "new"}[kind]
            target.symlink_to(to)
    return elsewhere


def photograph(*places: Path) -> dict[str, tuple[int, Any]]:
    """Kind, mode and content of everything that there is, links not followed."""
    found = {}
    for place in places:
        for parent, folders, names in os.walk(place):
            for name in (*folders, *names):
                path = Path(parent, name)
                mode = path.lstat().st_mode
                content = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
                found[str(path)] = mode, content
    return found
