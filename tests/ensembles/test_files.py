"""What was saved is read back with the same bits on any devices; a damaged file is noticed."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests.ensembles._kinds import KINDS, X, Y, arrays_of, mesh_of


def make_mixed(key: jax.Array) -> Any:
    return {
        "w": jax.random.normal(key, (3, 2)),
        "half": jax.random.normal(key, (2,), "bfloat16"),
        "n": jnp.int8(3),
        "flag": jnp.array(True),
        "key": key,
        "file": jnp.ones(()),
        "a/b": [jnp.zeros((0, 2))],
    }


MAKES = {name: kind.make for name, kind in KINDS.items()} | {"mixed": make_mixed}


@pytest.mark.parametrize("name", MAKES)
def test_members_come_back_with_the_same_bits_on_other_devices(name: str, tmp_path: Path) -> None:
    ens = px.ensemble(MAKES[name], 5, 0, mesh=mesh_of(2))
    if name in KINDS:
        ens.train(KINDS[name].step, X, Y)
    ens.save(tmp_path / "members.npz")
    loaded = px.load_ensemble(MAKES[name], tmp_path / "members.npz", mesh=mesh_of(3))
    assert len(loaded) == 5
    for a, b in zip(ens, loaded, strict=True):
        for x, y in zip(arrays_of(a), arrays_of(b), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_any_reader_of_numpys_files_can_read_it(tmp_path: Path) -> None:
    ens = px.ensemble(lambda key: {"w": jax.random.normal(key, (3,))}, 2, 0)
    ens.save(tmp_path / "members.npz")
    with np.load(tmp_path / "members.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["members/w"], ens.stacked()["w"])


def test_a_changed_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    make = lambda key: jax.random.normal(key, (20,))  # noqa: E731
    ens = px.ensemble(make, 3, 0)
    ens.save(tmp_path / "whole.npz")
    whole, noticed = (tmp_path / "whole.npz").read_bytes(), 0
    for position in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        for content in (bytes(changed), whole[:position]):
            (tmp_path / "damaged.npz").write_bytes(content)
            try:
                found = px.load_ensemble(make, tmp_path / "damaged.npz")
            except (px.errors.DataError, px.StateError):
                noticed += 1
            else:  # some bytes say nothing, such as the dates of an archive's parts
                np.testing.assert_array_equal(found.stacked(), ens.stacked())
    assert noticed > len(whole) / 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda key: {"w": jax.random.normal(key, (3, 2))}, r"w in .* is float32\[3\], but make gives float32\[3, 2\]"),
        (lambda key: {"w": jax.random.normal(key, (3,), "bfloat16")}, r"w in .* but make gives bfloat16\[3\]"),
        (lambda key: {"v": jax.random.normal(key, (3,))}, "they differ in v"),
    ],
)
def test_members_of_another_kind_are_refused(make: Any, message: str, tmp_path: Path) -> None:
    px.ensemble(lambda key: {"w": jax.random.normal(key, (3,))}, 2, 0).save(tmp_path / "members.npz")
    with pytest.raises(px.StateError, match=message):
        px.load_ensemble(make, tmp_path / "members.npz")


def test_an_error_in_make_comes_through(tmp_path: Path) -> None:
    px.ensemble(lambda key: jax.random.normal(key, (3,)), 2, 0).save(tmp_path / "members.npz")
    with pytest.raises(TypeError, match="dot_general"):
        px.load_ensemble(lambda key: jnp.ones((2, 3)) @ jnp.ones((2, 3)), tmp_path / "members.npz")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        px.load_ensemble(lambda key: jax.random.normal(key), tmp_path / "members.npz")
