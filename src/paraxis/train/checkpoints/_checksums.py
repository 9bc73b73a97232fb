"""Checksums of arrays: 64 bits each, the same however the array is laid out over devices.

An array is read in row-major order as words of 32 bits: an element of 32 bits or fewer is one word, a wider one
several, the lowest first (complex: real part, imaginary part). The checksum is two sums over all words, modulo 2^32, of
a bijection of the word that depends on its position. One word that changed therefore always changes both sums. All its
bits are mixed, so that several that changed go unseen only by chance, 1 in 2^64. (Words times odd numbers, which is
cheaper, would not do: of an even number of changed signs they see nothing.) Sums of integers do not depend on the
order, hence not on the devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 1 << 14
"""Words. What has no more is summed on the host, to which saving copies it anyway: no program is compiled for it."""

_BLOCK = 1 << 20
_SEEDS = (0, 0x9E3779B9)


def checksum(x: Any) -> str:
    """Return the checksum of a JAX or NumPy array of numbers, as 16 hexadecimal digits.

    Small arrays and NumPy arrays are summed on the host, others on the devices where they lie.

    Communicates: one all-reduce of 8 bytes, if the array is large and lies on several devices.
    """
    if isinstance(x, jax.Array) and not is_small(x):
        # Programs with collectives that wait for their inputs can starve one another on CPU: one at a time.
        sums = jax.block_until_ready(_device_sums(jax.block_until_ready(x)))
        first, second = np.asarray(sums.addressable_data(0))
    else:
        first, second = _host_sums(np.asarray(x))
    return f"{int(first):08x}{int(second):08x}"


def is_small(x: Any) -> bool:
    """Return whether an array is so small that it is dealt with on the host, where this process has all of it."""
    there = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return there and x.size * max(1, x.dtype.itemsize // 4) <= SMALL


@jax.jit
def _device_sums(x: jax.Array) -> jax.Array:
    words = _device_words(x)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dimension in reversed(range(words.ndim)):
        position = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
        index += position * jnp.uint32(stride % 2**32)
        stride *= words.shape[dimension]
    sums = [jnp.sum(_mixed(words ^ key, jnp.uint32), dtype=jnp.uint32) for key in _keys(index, jnp.uint32)]
    return jnp.stack(sums)


def _device_words(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = _bits(x.dtype)
    unsigned = jnp.dtype(f"uint{min(bits, 32)}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _host_sums(x: np.ndarray) -> tuple[np.uint32, np.uint32]:
    words = _host_words(x)
    totals = np.zeros(2, np.uint32)
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK].astype(np.uint32, copy=False)  # no wider copy of the whole
        keys = _small_keys() if words.size <= SMALL else _block_keys(start, block.size)
        for which in range(2):
            terms = _mixed(block ^ keys[which][: block.size], np.uint32)
            totals[which] = np.sum(terms, dtype=np.uint32, initial=totals[which])
    return totals[0], totals[1]


def _host_words(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x).reshape(-1)
    if x.dtype.kind == "c":
        x = x.view(f"f{x.dtype.itemsize // 2}")
    bits = 8 if x.dtype == np.bool_ else _bits(x.dtype)
    if bits < 8:
        return x.view(np.uint8) & np.uint8(2**bits - 1)
    return x.view(f"uint{min(bits, 32)}")


def _bits(dtype: Any) -> int:
    """Return how many bits an element has; JAX's own types of fewer than 8 are not packed on the host."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return info(dtype).bits


@functools.cache
def _small_keys() -> list[np.ndarray]:
    return _keys(np.arange(SMALL, dtype=np.uint32), np.uint32)


def _block_keys(start: int, size: int) -> list[np.ndarray]:
    return _keys(np.arange(start, start + size).astype(np.uint32), np.uint32)


def _keys(index: Any, word: Any) -> list[Any]:
    """Two numbers for each position."""
    return [_mixed(index ^ word(seed), word) for seed in _SEEDS]


def _mixed(x: Any, word: Any) -> Any:
    """Spread each bit of a number over all of them, by a bijection: xor-shifts, and products with odd numbers."""
    x = (x ^ (x >> word(16))) * word(0x7FEB352D)
    x = (x ^ (x >> word(15))) * word(0x846CA68B)
    return x ^ (x >> word(16))
