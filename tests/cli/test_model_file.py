"""No public face: no command writes a model that it has read."""

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis.cli._errors import CommandError
from paraxis.cli.fit._model import load, save
from tests._damage import damaged
from tests.cli._models import saved


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
def test_what_is_loaded_is_what_was_saved(objective: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.npz", objective)
    model = load(path)
    save(model, tmp_path / "again.npz")
    with np.load(path) as one, np.load(tmp_path / "again.npz") as two:
        assert {name: one[name].tobytes() for name in one} == {name: two[name].tobytes() for name in two}
    assert model.target.objective == objective


def checksum(array: Any) -> str:
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()


def rewritten(path: Path, text: bytes | None = None, **others: Any) -> None:
    """Another header or other arrays in a model's file, with the checksums that they need."""
    with np.load(path) as file:
        arrays: dict[str, Any] = {**file, **others}
    if others:
        header = json.loads(arrays["header"].tobytes())
        header["checksums"] |= {name: checksum(array) for name, array in others.items()}
        text = json.dumps(header).encode()
    arrays["header"] = np.frombuffer(text or b"", np.uint8)
    arrays["checksum"] = np.array(checksum(arrays["header"]))
    np.savez(path, **arrays)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["logistic", "squared", "integer"])
def test_any_field_damaged_gets_one_line(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.npz", kind)
    with np.load(path) as file:
        header = json.loads(file["header"].tobytes())
    header["form"] = {"delimiter": ";", "decimal": ",", "na_values": ["?"], "strip": ["%"]}
    # Another name of an id column is as good as one that was written, and a form may be the usual one.
    good = {"more in ['id']", "without ['form']"}
    for name in ("['form']['na_values']", "['form']['strip']"):
        good |= {f"more in {name}", f"without {name}[0]", f"{name} = []"}
    cases = [case for case in damaged(header, but=("about",)) if case[0] not in good]
    assert len(cases) > 200
    taken = [what for what, text in cases if is_taken(path, text)]
    # Other columns and classes, of the right type, are as good as those that were written.
    assert {what.split("]")[0] for what in taken} <= {"['fills'", "['form'", "['sources'", "['target'"}, taken
    assert all(what.endswith(("''", "'odd'", "None", "-1", "0.5", "True", str(2**70))) for what in taken), taken
    assert len(taken) < 40


def is_taken(path: Path, text: bytes) -> bool:
    """Whether a model with such a header is taken, or refused in one line."""
    rewritten(path, text)
    try:
        model = load(path)
    except CommandError as error:
        said = str(error)
    else:
        if model.target.objective == "logistic":
            model.target.labels(np.array([0, 1]))
        return True
    assert "\n" not in said
    assert said.startswith(f"{path} is damaged, or no model") or said.endswith("pip install --upgrade paraxis")
    return False


SHAPES = [np.zeros((3, 400)), np.zeros(()), np.zeros((0, 4)), np.zeros((3, 4), int), np.zeros((3, 4), complex)]


@pytest.mark.parametrize("name", ["coef", "intercept", "means", "scales"])
@pytest.mark.parametrize("array", SHAPES, ids=lambda x: f"{x.dtype} {x.shape}")
def test_arrays_that_do_not_fit_the_header_get_one_line(name: str, array: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.npz")
    rewritten(path, **{name: array})
    with pytest.raises(
        CommandError, match=rf"is damaged, or no model of paraxis fit \(its {name} are .*; fit it again"
    ):
        load(path)


@pytest.mark.parametrize("name", ["coef", "header", "checksum"])
def test_a_small_file_that_unpacks_to_a_large_one_takes_no_memory(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.npz")
    with np.load(path) as file:
        arrays: dict[str, Any] = {**file, name: np.zeros(10**7)}
    np.savez_compressed(path, **arrays)
    tracemalloc.start()
    with pytest.raises(CommandError, match="is damaged, or no model of paraxis fit"):
        load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_its_mode_is_what_the_umask_allows(umask: int, tmp_path: Path) -> None:
    model = load(saved(tmp_path / "model.npz"))
    before = os.umask(umask)
    try:
        save(model, tmp_path / "again.npz")
    finally:
        os.umask(before)
    assert (tmp_path / "again.npz").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("kind", [TypeError, KeyError, AttributeError])
@pytest.mark.parametrize("where", [(json, "loads"), (hashlib, "sha256"), (np, "frombuffer")], ids=lambda at: at[1])
def test_a_mistake_of_the_reader_is_not_told_as_damage(
    where: tuple[Any, str], kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any, **__: Any) -> Any:
        raise kind("a mistake")

    path = saved(tmp_path / "model.npz")
    monkeypatch.setattr(*where, mistaken)
    with pytest.raises(kind, match="a mistake"):
        load(path)
