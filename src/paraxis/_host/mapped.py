"""Memory-mapped arrays, sent to other processes as the files that they are."""

import mmap
from typing import Any

import numpy as np

from paraxis.errors import DataError

_LOOKS = 64  # both ends are not enough: a quarter of all labels begin and end alike


class Mapped:
    """A memory-mapped array, by its file."""

    def __init__(self, array: np.memmap) -> None:
        self._told: Any = (array.filename, array.dtype, array.shape, array.offset)

    def open(self) -> np.ndarray:
        name, dtype, shape, offset = self._told
        return np.memmap(name, dtype, "r", offset, shape)

    def is_still(self, array: np.ndarray) -> bool:
        """Return whether the file, looked at anew, has the array's rows, here and there: it may have been replaced."""
        try:
            now = self.open()
        except (OSError, ValueError):
            return False
        at = np.linspace(0, len(array) - 1, min(len(array), _LOOKS)).astype(int)
        return now[at].tobytes() == array[at].tobytes()


def by_file(array: np.ndarray) -> Any:
    """Return the file in which an array is, if it is the whole of a memory-mapped one, else the array.

    Raises:
        DataError: if the file was cut off since, so that to read the array would end this process.
    """
    base = array
    while isinstance(base.base, np.ndarray):  # a slice of a mapped array calls itself one, with the offset of the whole
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or base.mode == "c" or not array.flags.c_contiguous:
        return array  # what was written to a copy-on-write map is in no file
    if isinstance(base.base, mmap.mmap) and base.base.size() < len(base.base):
        raise DataError(f"{str(base.filename)!r} has become shorter than when it was mapped; map it anew")
    looks = [(x.ctypes.data, x.shape, x.strides, x.dtype) for x in (base, array)]
    mapped = Mapped(base)
    return mapped if looks[0] == looks[1] and mapped.is_still(array) else array


def opened(x: Any) -> Any:
    """Return what was given by its file as an array, and all else as it is."""
    return x.open() if isinstance(x, Mapped) else x
