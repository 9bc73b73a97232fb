"""Members in files: one NumPy ``.npz`` each, with a name and a checksum for every array, put in place when whole.

A directory of them has a record, ``paraxis.json``, which says what each is, and is how it is known to be ours.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._host import archives, files, records
from paraxis._jax import dtypes
from paraxis.errors import DataError, StateError

_RECORD = "paraxis.json"
_FORMAT = 2
_MOST = 10**6  # members of an ensemble

_HEADER = "paraxis"  # what NumPy cannot tell: names in order, dtypes that are not its own, kinds of random keys
_BEGINS = b"PK\x03\x04", b"paraxis.npy"  # how a file of a member begins: an archive, the header its first part
_LARGEST_HEADER = 1 << 26  # bytes

_DIGESTS = records.list_of(records.text("[0-9a-f]{12}"))
_ENSEMBLE = records.fields({"holds": records.one_of("ensemble"), "members": _DIGESTS})
_FORMER = {1: records.fields({"holds": records.one_of("ensemble"), "members": records.integer(1, _MOST)})}


def _known(find: Callable[[str], object]) -> records.Check:
    """Accept names that a function, which raises a ``ValueError`` otherwise, finds something for."""

    def check(value: Any, where: str) -> None:
        records.text()(value, where)
        try:
            find(value)
        except ValueError as error:
            raise records.Wrong(f"{where}: {error}") from None

    return check


_MEMBER = records.list_of(
    records.either(
        records.fields({"name": records.text(), "dtype": _known(dtypes.named)}),
        records.fields({"name": records.text(), "key": _known(dtypes.of_keys)}),
    )
)


def write(path: Any, arrays: Mapping[str, jax.Array]) -> None:
    """Write arrays by their names. An old file stays until the new one is whole."""
    with files.replaced(Path(path)) as file:
        _write(file, arrays)


def write_directory(path: Any, members: Iterable[Mapping[str, jax.Array]]) -> None:
    """Write a directory of files, ``member-000.npz`` and so on. An old one stays until the new one is whole.

    Raises:
        StateError: if there is something else at that place, or anything else in the old directory.
    """
    target = Path(path)

    def require_ours(place: Path) -> None:
        reason = _strange(place)
        if reason:
            raise StateError(
                f"ensemble.save: {target} is there and is not a directory of members only: {reason}; give a new "
                f"place: ens.save('{target}-ensemble')"
            )

    files.put_back(target, lambda left: not _strange(left))
    if target.exists():
        require_ours(target.resolve())
    with files.replaced_directory(target, require_ours) as directory:
        digests = []
        for index, arrays in enumerate(members):
            file = directory / _file_name(index)
            write(file, arrays)
            with archives.Archive(file) as archive:
                digests.append(archive.digest)
        records.write_file(directory / _RECORD, _FORMAT, {"holds": "ensemble", "members": digests})


def member_files(path: Any) -> list[tuple[Path, str | None]]:
    """Return the files of a directory that was written, in order, and their digests, which earlier versions left out.

    Raises:
        StateError: if it is none, or has other members than were written.
        DataError: if its record is damaged.
    """
    directory = Path(path)
    files.put_back(directory, lambda left: not _strange(left))
    found = {file.name for file in directory.glob("member-*.npz")}
    try:
        digests = _digests(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise StateError(
            f"load_ensemble: {path} holds {len(found)} files member-*.npz, and no {_RECORD} that says how many there "
            "should be; give the directory that ens.save wrote, or read files one by one: "
            "px.ensembles.load_member(make, file)"
        ) from None
    except PermissionError:
        raise
    except (records.Wrong, OSError) as error:
        raise DataError(
            f"load_ensemble: {directory / _RECORD} is damaged, or no record of an ensemble ({error}); the files of "
            f"members are not affected: px.ensembles.load_member(make, file)"
        ) from error
    expected = [_file_name(index) for index in range(len(digests))]
    missing, extra = sorted({*expected} - found), sorted(found - {*expected})
    differences = {"missing": missing, "too many": extra}
    odd = [f"{len(names)} are {what}, such as {names[0]}" for what, names in differences.items() if names]
    if odd:
        raise StateError(
            f"load_ensemble: {path} was written with {len(digests)} members, but of its files {' and '.join(odd)}; "
            "put them back, or move away what is not of this ensemble; px.ensembles.load_member(make, file) reads one "
            "file"
        )
    return [(directory / name, digest) for name, digest in zip(expected, digests, strict=True)]


def _digests(directory: Path) -> list[str | None]:
    """Return the digests of a directory's members, as its record has them; ``None`` for each if it has none."""
    members = records.read_file(directory / _RECORD, _FORMAT, _ENSEMBLE, former=_FORMER)["members"]
    return [None] * members if isinstance(members, int) else members


def read(path: Any, expected: Mapping[str, jax.ShapeDtypeStruct], digest: str | None = None) -> list[jax.Array]:
    """Return the arrays of a file, of the names, shapes and dtypes that are expected, in order.

    All that is checked before the first array is read; then that it is the file of this digest.

    Raises:
        DataError: if it is not whole, or not one of ours.
        StateError: if it holds other arrays.
    """
    try:
        with archives.Archive(Path(path)) as archive:
            entries = _entries(archive)
            _check_names(path, [entry["name"] for entry in entries], list(expected))
            for index, (entry, struct) in enumerate(zip(entries, expected.values(), strict=True)):
                _check_kind(path, entry, archive.kind(str(index)), struct)
            if digest not in (None, archive.digest):
                raise DataError(
                    f"load_ensemble: {path} is not the member that was saved there, by its digest in {_RECORD}; put "
                    f"that back, the other files are not affected; px.ensembles.load_member(make, file) reads any one"
                )
            return [_decoded(archive.read(str(index)), entry) for index, entry in enumerate(entries)]
    except (DataError, StateError, *files.ABSENT):
        raise
    except (archives.Damaged, records.Wrong, OSError) as error:
        raise DataError(
            f"load_member: {path} is damaged, or no file of a member ({error}); load another one, the other files are "
            f"not affected"
        ) from error


def _write(file: Any, arrays: Mapping[str, jax.Array]) -> None:
    encoded = [_encoded(x) for x in arrays.values()]
    header = [{"name": name, **entry} for name, (_, entry) in zip(arrays, encoded, strict=True)]
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    contents: dict[str, Any] = {_HEADER: text} | {str(i): x for i, (x, _) in enumerate(encoded)}
    np.savez(file, **contents)


def _encoded(x: jax.Array) -> tuple[np.ndarray, dict[str, str]]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x)), {"key": str(jax.random.key_impl(x))}
    plain = np.asarray(x)
    return plain.view(_stored(plain.dtype)), {"dtype": plain.dtype.name}


def _stored(dtype: Any) -> np.dtype:
    """Return the dtype in the file: of one that is not NumPy's own, such as bfloat16, the bits."""
    dtype = np.dtype(dtype)
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def _entries(archive: archives.Archive) -> list[dict[str, str]]:
    header = archive.kind(_HEADER)
    if header.dtype != np.uint8 or header.shape[1:] or header.shape[0] > _LARGEST_HEADER:
        raise records.Wrong(f"its header is {header.dtype} {header.shape}")
    entries = records.read(archive.read(_HEADER).tobytes(), _MEMBER)
    if archive.names != [_HEADER, *(str(index) for index in range(len(entries)))]:
        raise records.Wrong("it has other arrays than its header says")
    return entries


def _check_names(path: Any, found: list[str], expected: list[str]) -> None:
    if found != expected:
        odd = next(iter(sorted({*expected} ^ {*found})), "their order")
        raise StateError(f"load_member: the member in {path} is not like one that make gives; they differ in {odd}")


def _check_kind(path: Any, entry: Mapping[str, str], stored: archives.Kind, expected: jax.ShapeDtypeStruct) -> None:
    """Check that an array is what the header says, and that this is what is expected.

    Raises:
        ValueError, StateError: if not.
    """
    name = entry["name"]
    if "key" in entry:
        dtype, row, of_data = dtypes.of_keys(entry["key"])
        if stored.dtype != of_data or stored.shape[len(stored.shape) - len(row) :] != row:
            raise records.Wrong(f"its random keys {name} are {stored.dtype} {stored.shape}")
        shape = stored.shape[: len(stored.shape) - len(row)]
    else:
        dtype, shape = dtypes.named(entry["dtype"]), stored.shape
        if stored.dtype != _stored(dtype):
            raise records.Wrong(f"its array {name} is {stored.dtype}, not {dtype}")
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        if narrow != dtype:
            raise StateError(
                f"load_member: {name} in {path} is {dtype}, which JAX would round to {narrow}; write "
                f'jax.config.update("jax_enable_x64", True) first'
            )
    if (shape, dtype) != (expected.shape, expected.dtype):
        raise StateError(
            f"load_member: {name} in {path} is {dtype}{list(shape)}, but make gives "
            f"{expected.dtype}{list(expected.shape)}"
        )


def _decoded(x: np.ndarray, entry: Mapping[str, str]) -> jax.Array:
    if "key" in entry:
        return jax.random.wrap_key_data(jnp.asarray(x), impl=entry["key"])
    return jnp.asarray(x.view(dtypes.named(entry["dtype"])))


def _file_name(index: int) -> str:
    return f"member-{index:03d}.npz"


def _strange(place: Path) -> str:
    """Tell why a place is not one where members were written, and nothing else; empty if it is, or holds nothing."""
    if not place.is_dir():
        return "it is a file"
    found = {file.name: file for file in place.iterdir()}
    if not found:
        return ""
    try:
        count = len(_digests(place))
    except (OSError, records.Wrong):
        return f"it has no {_RECORD} of an ensemble"
    names = {_RECORD, *(_file_name(index) for index in range(count))}
    strange = sorted(name for name, file in found.items() if name not in names or not _is_ours(file))
    return f"{strange[0]} is something else" if strange else ""


def _is_ours(file: Path) -> bool:
    """Return whether a file begins as a member's does, be it damaged further on; the record is known already."""
    if file.name == _RECORD:
        return True
    try:
        start = files.beginning(file, 64)
    except OSError:
        return False
    return start.startswith(_BEGINS[0]) and start[30:].startswith(_BEGINS[1])
