"""Arrays in NumPy's ``.npz`` files, as ``np.savez`` writes them: what each is is known before memory is taken for it.

Not a reader of any ``.npz``: what is pickled, structured or otherwise not what ``np.savez`` makes of plain arrays is
refused; so is what is compressed, unless the caller allows it. So no file of ours makes more bytes than it has itself.
"""

import dataclasses
import math
import re
import struct
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from paraxis._host import digests, files

_BAD_BYTES = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, OSError),
    *(ValueError, EOFError, OverflowError, RuntimeError),  # of Python's reader: what is encrypted, negative, too long
)
"""Exceptions of Python's reader of archives on bytes that are not what was written; around its calls only."""

_MAGIC = b"\x93NUMPY\x01\x00"
_START = len(_MAGIC) + 2
_HEADER = re.compile(
    rb"\{'descr': '([<>|=][?a-zA-Z]\d{0,9})', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\), \} *\n"
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The dtype and shape of an array in a file, without its numbers."""

    dtype: np.dtype
    shape: tuple[int, ...]


class Archive:
    """An ``.npz`` file, open until its ``with`` ends.

    Args:
        path: of the file.
        compressed: whether it may be one of ``np.savez_compressed``, as files of a user may; ours never are.

    Raises:
        OSError: if it cannot be opened.
        Damaged: here and in the methods, if it is not what ``np.savez`` wrote.
    """

    def __init__(self, path: Path, *, compressed: bool = False) -> None:
        self._compressed = compressed
        self._file = files.opened(path)
        self._kinds: dict[str, Kind] = {}
        try:
            self._size = self._file.seek(0, 2)
            self._zip = zipfile.ZipFile(self._file)
        except _BAD_BYTES as error:
            self._file.close()
            raise Damaged(str(error)) from error
        except BaseException:
            self._file.close()
            raise
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in self._zip.infolist()}
        if len(self._entries) < len(self._zip.infolist()):
            self._file.close()
            raise Damaged("two of its arrays have the same name")

    @property
    def names(self) -> list[str]:
        """Return the names of the arrays, in the order of the file."""
        return list(self._entries)

    @property
    def digest(self) -> str:
        """Return a digest of the names, sizes and checksums of its arrays: twelve digits."""
        parts = [(name, entry.file_size, entry.CRC) for name, entry in self._entries.items()]
        return digests.of_bytes(repr(parts).encode())

    def kind(self, name: str) -> Kind:
        """Return what an array is; its numbers are not read."""
        if name not in self._kinds:
            entry = self._entry(name)
            try:
                with self._zip.open(entry) as opened:
                    start = opened.read(_START)
                    length = int.from_bytes(start[len(_MAGIC) :], "little")
                    header = opened.read(length)
            except _BAD_BYTES as error:
                raise Damaged(str(error)) from error
            self._kinds[name] = _kind(name, start, header, entry.file_size)[0]
        return self._kinds[name]

    def read(self, name: str) -> np.ndarray:
        """Return an array. Its bytes have the archive's checksum."""
        entry = self._entry(name)
        try:
            data = self._zip.read(entry)
        except _BAD_BYTES as error:
            raise Damaged(str(error)) from error
        length = int.from_bytes(data[len(_MAGIC) : _START], "little")
        kind, is_fortran = _kind(name, data[:_START], data[_START : _START + length], len(data))
        flat = np.frombuffer(data, kind.dtype, math.prod(kind.shape), _START + length)
        try:
            return flat.reshape(kind.shape, order="F" if is_fortran else "C")
        except ValueError as error:  # a side of 0 beside one that no array has
            raise Damaged(f"its array {name!r} is no array: {error}") from error

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._entries.get(name)
        if entry is None:
            raise Damaged(f"it has no array {name!r}")
        is_plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        is_known = is_plain or (self._compressed and entry.compress_type == zipfile.ZIP_DEFLATED)
        if not is_known or entry.header_offset + entry.compress_size > self._size:
            raise Damaged(f"its array {name!r} is compressed, or longer than the file")
        return entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._file.close()


class Damaged(ValueError):  # noqa: N818  it says what a file is, and never leaves the library
    """A file that is not what was written."""


def _kind(name: str, start: bytes, header: bytes, size: int) -> tuple[Kind, bool]:
    """Return what an array is by the beginning of its bytes, of which there are so many."""
    found = _HEADER.fullmatch(header)
    if start[: len(_MAGIC)] != _MAGIC or found is None:
        raise Damaged(f"its array {name!r} is none that np.savez makes of numbers")
    try:
        dtype = np.dtype(found[1].decode())
    except (TypeError, ValueError) as error:
        raise Damaged(f"its array {name!r} is of no type that is known: {error}") from None
    shape = tuple(int(one) for one in found[3].decode().replace(" ", "").split(",") if one)
    if dtype.hasobject:
        raise Damaged(f"its array {name!r} holds Python objects; save numbers, of labels their codes")
    if _START + len(header) + math.prod(shape) * dtype.itemsize != size or not dtype.itemsize:
        raise Damaged(f"its array {name!r} says that it is {dtype} {shape}, which its {size} bytes are not")
    return Kind(dtype, shape), found[2] == b"True"
