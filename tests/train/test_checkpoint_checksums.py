"""No public face: the checksum of a leaf is never shown; it must be the same anywhere, and change with every bit.

It is compared with its definition in Python integers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from paraxis.train.checkpoints._checksums import SMALL, checksum

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int2", "float4_e2m1fn"),
]
BITS = {"int4": 4, "uint4": 4, "int2": 2, "float4_e2m1fn": 4}


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng, dtype = np.random.default_rng(seed), dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    real = rng.normal(size=shape) * 3
    if dtype.kind == "c":
        return (real + 1j * rng.normal(size=shape)).astype(dtype)
    return np.abs(real).astype(dtype) if name.startswith("uint") else np.trunc(real).astype("int8").astype(dtype)


def words(x: np.ndarray) -> list[int]:
    """By struct and shifts: the bytes of an element, lowest first, four at a time."""
    found = []
    for element in np.ascontiguousarray(x).reshape(-1):
        raw = element.tobytes()
        if x.dtype.name in BITS:
            raw = bytes([raw[0] & (2 ** BITS[x.dtype.name] - 1)])
        found += [int.from_bytes(raw[start : start + 4], "little") for start in range(0, len(raw), 4)]
    return found


def mixed(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def reference(x: np.ndarray) -> str:
    found = words(x)
    sums = [sum(mixed(word ^ mixed(i ^ seed)) for i, word in enumerate(found)) % 2**32 for seed in (0, 0x9E3779B9)]
    return f"{sums[0]:08x}{sums[1]:08x}"


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays too are summed on the devices."""
    monkeypatch.setattr("paraxis.train.checkpoints._checksums.SMALL", -1)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_on_the_host(name: str) -> None:
    x = numbers(name, (3, 5))
    assert checksum(x) == reference(x)
    assert checksum(x[:, ::2]) == reference(x[:, ::2])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.usefixtures("on_devices")
def test_every_dtype_on_a_device(name: str) -> None:
    x = numbers(name, (3, 5))
    with jax.enable_x64(True):
        assert checksum(jnp.asarray(x)) == reference(x)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
@pytest.mark.usefixtures("on_devices")
def test_every_shape(shape: tuple[int, ...]) -> None:
    x = numbers("float32", shape)
    assert checksum(x) == checksum(jnp.asarray(x)) == reference(x)


@pytest.mark.parametrize("spec", [P("a", "b"), P(("b", "a")), P(None, "b"), P()])
@pytest.mark.usefixtures("on_devices")
def test_the_layout_does_not_matter(spec: P) -> None:
    x = numbers("bfloat16", (8, 6))
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("a", "b"))
    assert checksum(jax.device_put(x, NamedSharding(mesh, spec))) == reference(x)


def test_what_is_large_is_the_same_on_host_and_device() -> None:
    x = np.random.default_rng(0).normal(size=(5, SMALL)).astype("float32")
    assert checksum(x) == checksum(jnp.asarray(x)) == reference(x)


def test_what_is_longer_than_a_block_is_the_same_on_host_and_device() -> None:
    x = np.random.default_rng(0).integers(0, 256, 2**20 + SMALL + 3).astype(np.uint8)
    assert checksum(x) == checksum(jnp.asarray(x))
    before, x[-1] = checksum(x), x[-1] ^ 1
    assert checksum(x) != before


def flipped(x: np.ndarray, bit: int) -> np.ndarray:
    raw = bytearray(x.tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
def test_every_flipped_bit_is_seen(dtype: str) -> None:
    x = np.arange(8).astype(dtype)
    found = {checksum(flipped(x, bit)) for bit in range(8 * x.nbytes)} | {checksum(x)}
    assert len(found) == 8 * x.nbytes + 1


def test_words_that_changed_places_or_signs_are_seen() -> None:
    x = np.arange(1.0, 33.0, dtype="float32")
    changed: list[Any] = [np.roll(x, 1), x[::-1], np.concatenate([x[16:], x[:16]]), -x, np.zeros_like(x)]
    assert len({checksum(x), *map(checksum, changed)}) == 6
