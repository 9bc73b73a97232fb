"""Small arrays are written as one: Orbax takes some milliseconds of a core for each array, whatever its size."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paraxis.train.checkpoints._checksums import is_small


@dataclasses.dataclass(frozen=True)
class Packed:
    """Arrays as they are written.

    Attributes:
        arrays: by their paths; and the pack, if there is one.
        begins: of each path that is in the pack, the byte at which it begins.
        pack: the name of the pack, and its size in bytes; or ``None``.
    """

    arrays: dict[str, Any]
    begins: dict[str, int]
    pack: tuple[str, int] | None


def pack(arrays: Mapping[str, Any]) -> Packed:
    """Arrays by their paths, the small ones in a pack."""
    written, begins, parts, size = {}, {}, [], 0
    for path, x in arrays.items():
        if is_small(x):
            begins[path] = size
            parts.append(np.asarray(x).tobytes())
            size += len(parts[-1])
        else:
            written[path] = x
    if not parts:
        return Packed(written, begins, None)
    name = "small"
    while name in arrays:
        name += "_"
    return Packed(written | {name: np.frombuffer(b"".join(parts), np.uint8)}, begins, (name, size))


def unpack(packed: np.ndarray, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of its own, which begins at a byte of the pack.

    Raises:
        ValueError: if the pack is too short for it.
    """
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer(packed[begin : begin + size].tobytes(), dtype).reshape(shape).copy()
