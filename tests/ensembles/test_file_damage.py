"""Files of members that are not what was written: one error that names the file, before memory is taken for them."""

import io
import json
import math
import os
import shutil
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._damage import KINDS, damaged, hostile, photograph, wrapped

NUM_MEMBERS = 3


def make(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (2, 3)), "half": jnp.ones(3, "bfloat16"), "key": key}


@pytest.fixture(scope="module")
def ens() -> px.Ensemble:
    return px.ensemble(make, NUM_MEMBERS, 0)


@pytest.fixture
def place(ens: px.Ensemble, tmp_path: Path) -> Path:
    ens.save(tmp_path / "ensemble")
    return tmp_path / "ensemble"


def bits(members: Any) -> list[bytes]:
    leaves = jax.tree.leaves([{**member, "key": jax.random.key_data(member["key"])} for member in members])
    return [np.asarray(x).tobytes() for x in leaves]


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


# --- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_with_any_field_damaged_is_an_error_that_names_it(ens: px.Ensemble, place: Path) -> None:
    path = place / "paraxis.json"
    whole = json.loads(path.read_text())
    cases = [
        (f"record: {what}", wrapped(text, format=whole["format"]))
        for what, text in damaged(json.loads(whole["record"]))
    ]
    cases += [(f"around it: {what}", text.decode(errors="replace")) for what, text in damaged(whole)]
    assert len(cases) > 80
    for what, text in cases:
        path.write_text(text)
        with pytest.raises((px.DataError, px.StateError), match=r"load_ensemble: .*ensemble") as caught:
            px.load_ensemble(make, place)
        assert "paraxis.json is damaged" in str(caught.value) or "written with" in str(caught.value), what
        with pytest.raises(px.StateError, match="ensemble is there and is not a directory of members only"):
            ens.drop(0).save(place.with_name("ensemble"))
    path.write_text(json.dumps(whole))
    assert bits(px.load_ensemble(make, place)) == bits(ens)


def test_a_member_with_any_field_of_its_header_damaged_is_an_error_that_names_it(ens: px.Ensemble, place: Path) -> None:
    path, expected = place / "member-001.npz", bits([ens[1]])
    arrays = arrays_of(path)
    cases = list(damaged(json.loads(arrays["paraxis"].tobytes())))
    assert len(cases) > 100
    for what, text in cases:
        arrays["paraxis"] = np.frombuffer(text, np.uint8)
        np.savez(path, **arrays)
        with pytest.raises((px.DataError, px.StateError), match=r"member-001\.npz") as caught:
            assert bits([px.ensembles.load_member(make, path)]) != expected, what
        assert "allow_pickle" not in str(caught.value)


# --- arrays -----------------------------------------------------------------------------------------------------------


def npy(descr: str, shape: str, data: bytes = b"", order: str = "False") -> bytes:
    """A file of NumPy's with a header of one's own."""
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    header += " " * (63 - (10 + len(header)) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


OTHERS = {
    "10^14 numbers": npy("'<f4'", "(100000000000000,)"),
    "10^14 numbers, then some": npy("'<f4'", "(100000000000000, 3)", bytes(24)),
    "more numbers than can be counted": npy("'<f4'", f"({10**18}, {10**18}, {10**18})"),
    "no numbers in a large shape": npy("'<f4'", f"({10**18}, 0)"),
    "a negative size": npy("'<f4'", "(-2, 3)", bytes(24)),
    "too few": npy("'<f4'", "(2, 3)", bytes(20)),
    "too many": npy("'<f4'", "(2, 3)", bytes(28)),
    "objects": npy("'|O'", "(2, 3)", bytes(24)),
    "structured": npy("[('a', '<f4')]", "(2, 3)", bytes(24)),
    "another type": npy("'<i4'", "(2, 3)", bytes(24)),
    "another order of bytes": npy("'>f4'", "(2, 3)", bytes(24)),
    "another shape": npy("'<f4'", "(3, 2)", bytes(24)),
    "wide elements": npy("'<U1000000000'", "()"),
    "an unknown type": npy("'<q9'", "(2, 3)", bytes(24)),
    "nested": npy("'<f4'", "(" * 20_000),
    "a program": npy("__import__('os')", "(2, 3)", bytes(24)),
    "no header": b"\x93NUMPY\x01\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("name", ["0", "1", "2", "paraxis"])
def test_an_array_that_is_something_else_is_not_read(name: str, what: str, place: Path) -> None:
    path = place / "member-001.npz"
    with zipfile.ZipFile(path) as old:
        contents = {entry: old.read(entry) for entry in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for entry, data in contents.items():
            new.writestr(entry, OTHERS[what] if entry == f"{name}.npy" else data)
    with pytest.raises((px.DataError, px.StateError), match=r"member-001\.npz") as caught:
        px.ensembles.load_member(make, path)
    assert "allow_pickle" not in str(caught.value)


def peak_of_refusing(path: Path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises((px.DataError, px.StateError), match=path.name):
            px.ensembles.load_member(make, path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["0", "1", "2", "paraxis"])
def test_a_small_file_that_unpacks_to_a_large_one_takes_no_memory(name: str, place: Path) -> None:
    path = place / "member-001.npz"
    with zipfile.ZipFile(path) as old:
        contents = {entry: old.read(entry) for entry in old.namelist()}
    contents[f"{name}.npy"] = npy("'|u1'", "(100000000,)", bytes(10**8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry, data in contents.items():
            new.writestr(entry, data)
    assert path.stat().st_size < 10**6
    assert peak_of_refusing(path) < 10**7


def test_a_large_file_of_another_member_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    large = lambda key: make(key) | {"w": jnp.zeros((2500, 2000))}  # noqa: E731
    px.ensemble(large, 1, 0).save_member(0, path)
    assert path.stat().st_size > 2 * 10**7
    assert peak_of_refusing(path) < 10**7


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_in_the_place_of_a_member_is_not_waited_for(place: Path) -> None:
    file = place / "member-001.npz"
    file.unlink()
    os.mkfifo(file)
    for read in (lambda: px.load_ensemble(make, place), lambda: px.ensembles.load_member(make, file)):
        with pytest.raises(px.DataError, match=r"member-001\.npz is damaged.*it is not an ordinary file"):
            read()


def test_a_link_to_a_member_is_read(ens: px.Ensemble, place: Path) -> None:
    (place / "member-001.npz").rename(place.parent / "elsewhere.npz")
    (place / "member-001.npz").symlink_to(place.parent / "elsewhere.npz")
    assert bits(px.load_ensemble(make, place)) == bits(ens)


def test_an_entry_that_is_longer_than_the_file_takes_no_memory(place: Path) -> None:
    """Its length, in the archive's list of contents, is made 4 GB."""
    path = place / "member-001.npz"
    content = bytearray(path.read_bytes())
    position = content.index(b"PK\x01\x02")
    while position >= 0:
        content[position + 20 : position + 28] = b"\xf0\xff\xff\xff" * 2
        position = content.find(b"PK\x01\x02", position + 4)
    path.write_bytes(content)
    assert peak_of_refusing(path) < 10**7


@pytest.mark.parametrize("order", "CF")
def test_either_order_of_an_array_is_read(order: str, ens: px.Ensemble, place: Path) -> None:
    path = place / "member-001.npz"
    arrays = arrays_of(path)
    at = next(name for name, x in arrays.items() if x.shape == (2, 3))
    arrays[at] = np.asarray(arrays[at], order=order)  # pyright: ignore[reportCallIssue, reportArgumentType]
    np.savez(path, **arrays)
    assert bits([px.ensembles.load_member(make, path)]) == bits([ens[1]])


# --- a user's own -----------------------------------------------------------------------------------------------------

NAMES = (
    *("member-003.npz", "member-foo.npz", "member-0000.npz", "member-.npz", "notes.txt", ".member-000.npz"),
    *("paraxis", "paraxis.txt", ".paraxis", "member-000", "Member-000.npz"),
)


@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_beside_a_users_own_things_nothing_is_replaced(turn: int, ens: px.Ensemble, place: Path) -> None:
    elsewhere = hostile(place, NAMES, turn)
    before = photograph(place, elsewhere)
    with pytest.raises(px.StateError, match="is there and is not a directory of members only: "):
        ens.drop(0).save(place)
    assert photograph(place, elsewhere) == before


@pytest.mark.parametrize("name", ["member-000.npz", "member-002.npz", "paraxis.json"])
@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_a_users_own_in_the_place_of_ours_stays(turn: int, name: str, ens: px.Ensemble, place: Path) -> None:
    (place / name).unlink()
    elsewhere = hostile(place, (name,), turn)
    before = photograph(place, elsewhere)
    with pytest.raises(px.StateError, match="is there and is not a directory of members only: "):
        ens.drop(0).save(place)
    assert photograph(place, elsewhere) == before


def test_a_file_with_an_array_called_as_our_header_is_not_ours(ens: px.Ensemble, place: Path) -> None:
    np.savez(place / "member-001.npz", w=np.ones(3), paraxis=np.ones(3))
    before = photograph(place)
    with pytest.raises(px.StateError, match=r"only: member-001\.npz is something else; give a new place"):
        ens.save(place)
    assert photograph(place) == before


@pytest.mark.parametrize("what", ["another", "both", "later", "one by one"])
def test_a_file_of_another_member_or_save_is_an_error_that_names_it(what: str, ens: px.Ensemble, place: Path) -> None:
    first, second = place / "member-000.npz", place / "member-001.npz"
    if what == "another":
        shutil.copy(first, second)
    elif what == "both":
        first.rename(place / "aside")
        second.rename(first)
        (place / "aside").rename(second)
    elif what == "later":
        px.ensemble(make, NUM_MEMBERS, 1).save(place.with_name("later"))
        shutil.copy(place.with_name("later") / second.name, second)
    else:
        ens.save_member(2, second)
    named = "member-000" if what == "both" else "member-001"
    with pytest.raises(px.DataError, match=rf"{named}\.npz is not the member that was saved there, .*put that back"):
        px.load_ensemble(make, place)
    other = {"another": bits([ens[0]]), "both": bits([ens[0]]), "one by one": bits([ens[2]])}
    if what in other:
        assert bits([px.ensembles.load_member(make, second)]) == other[what]
    ens.save(place)
    assert bits(px.load_ensemble(make, place)) == bits(ens)


def test_the_same_member_again_is_no_other_one(ens: px.Ensemble, place: Path) -> None:
    (place / "member-001.npz").unlink()
    ens.save_member(1, place / "member-001.npz")
    assert bits(px.load_ensemble(make, place)) == bits(ens)


def test_a_directory_of_an_earlier_version_loads_and_is_replaced(ens: px.Ensemble, place: Path) -> None:
    record = {"holds": "ensemble", "members": NUM_MEMBERS}
    (place / "paraxis.json").write_text(wrapped(json.dumps(record).encode(), format=1))
    assert bits(px.load_ensemble(make, place)) == bits(ens)
    ens.save(place)
    assert json.loads(json.loads((place / "paraxis.json").read_text())["record"]) != record


@pytest.mark.parametrize("length", [0.9, 0.5, 100])
def test_an_ensemble_with_a_file_cut_short_may_be_replaced(length: float, ens: px.Ensemble, place: Path) -> None:
    path = place / "member-001.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: math.floor(length * len(whole)) if length < 1 else int(length)])
    ens.save(place)
    assert bits(px.load_ensemble(make, place)) == bits(ens)


def test_numpy_reads_what_is_written_whole(place: Path) -> None:
    with np.load(io.BytesIO((place / "member-000.npz").read_bytes()), allow_pickle=False) as file:
        assert all(file[name].size for name in file.files)


# --- mistakes that are not in the file --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TypeError, KeyError, ValueError, AttributeError])
@pytest.mark.parametrize("where", [(json, "loads"), (np, "frombuffer"), (math, "prod")], ids=lambda at: at[1])
def test_a_mistake_of_the_reader_is_not_told_as_damage(
    where: tuple[Any, str], kind: type[Exception], ens: px.Ensemble, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any, **__: Any) -> Any:
        raise kind("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(*where, mistaken)
        if where == (json, "loads") and kind is ValueError:  # what it says of bytes that are not JSON
            with pytest.raises(px.DataError, match="is damaged"):
                px.ensembles.load_member(make, place / "member-000.npz")
        else:
            with pytest.raises(kind, match="a mistake"):
                px.ensembles.load_member(make, place / "member-000.npz")
    assert bits([px.ensembles.load_member(make, place / "member-000.npz")]) == bits([ens[0]])
