"""An array in a few words that are the same in every process: its type, its shape, and a digest of its values."""

import hashlib
from typing import Any

import jax
import numpy as np

_WHOLE = 1 << 20  # bytes of an array that are read whole
_ROWS = 64


def of_array(x: Any) -> str:
    """Return an array's dtype and shape, and a digest of its values; of a large one, of some of its rows."""
    shape = tuple(map(int, x.shape))
    kind = f"{x.dtype} {shape}"
    if is_key(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable) or getattr(x.dtype, "hasobject", False):
        return kind
    if not shape:
        return repr(np.asarray(x).item())
    is_whole = np.asarray(x[:1]).nbytes * shape[0] <= _WHOLE
    # Row by row: each kind of array, in memory, on a device or in a file, can be asked so.
    rows = np.unique(np.linspace(0, shape[0] - 1, _ROWS).round().astype(int)).tolist()
    content = np.asarray(x) if is_whole else np.stack([np.asarray(x[row]) for row in rows])
    of = "" if is_whole else f" of {len(rows)} of its {shape[0]:,} rows"
    little = content.astype(content.dtype.newbyteorder("<"), copy=False)
    return f"{kind}, digest {of_bytes(np.ascontiguousarray(little).tobytes())}{of}"


def of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain(x: Any) -> np.ndarray:
    """Return an array in the host's memory; of random keys, their data."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)
