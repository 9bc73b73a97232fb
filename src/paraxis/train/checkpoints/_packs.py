"""Small arrays are written as one: Orbax takes some milliseconds of a core for each array, whatever its size."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paraxis.train.checkpoints._checksums import is_small

NAME = "small"  # the paths of leaves begin otherwise


def pack(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """What is to be written of arrays by their paths, and at which byte of the pack those begin that are in it."""
    large, begin, parts, size = {}, {}, [], 0
    for path, x in arrays.items():
        if is_small(x):
            begin[path] = size
            parts.append(np.asarray(x).tobytes())
            size += len(parts[-1])
        else:
            large[path] = x
    return large | ({NAME: np.frombuffer(b"".join(parts), np.uint8)} if parts else {}), begin


def unpack(packed: np.ndarray, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of its own, which begins at a byte of the pack.

    Raises:
        ValueError: if the pack is too short for it.
    """
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer(packed[begin : begin + size].tobytes(), dtype).reshape(shape).copy()
