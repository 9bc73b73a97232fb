"""Checkpoints give back what was saved: bit for bit, on any number of devices, under any path."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import data

WIDE = ["int64", "uint64", "float64", "complex128"]
NARROW = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "int4"),
]


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        kinds = [(type(x), getattr(x, "dtype", None), np.shape(x)) for x in (a, e)]
        assert kinds[0] == kinds[1], where
        assert data(a).tobytes() == data(e).tobytes() if hasattr(e, "dtype") else a == e, where


def of_dtype(name: str) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2, (3, 4)).astype(np.dtype(getattr(ml_dtypes, name, name)))


def test_checkpoints_restores_leaves_of_every_kind(tmp_path: Path) -> None:
    tree = {
        **{name: jnp.asarray(of_dtype(name)) for name in NARROW},
        "numpy": {name: of_dtype(name) for name in NARROW + WIDE},
        "python": (True, 3, -(2**80), 0.1, float("inf"), "words"),
        "scalars": [jnp.float32(0.5), np.array(7)],
        "keys": [jax.random.key(1), jax.random.split(jax.random.key(2), (2, 3)), jax.random.key(3, impl="rbg")],
        "empty": [jnp.zeros((0, 3)), np.zeros((2, 0), "int8"), jax.random.split(jax.random.key(0), 0)],
        "strange/na.me é": [{"": jnp.ones(2), "3": jnp.ones(1)}, {3: jnp.ones(3)}],
        "reversed": np.arange(10)[::-2],
    }
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, tree, {"position": [1, None, {"a": 0.1}]})
    restored = checkpoints.restore(tree)
    assert_same(restored.tree, tree)
    assert (restored.notes, restored.step, restored.differences) == ({"position": [1, None, {"a": 0.1}]}, 7, ())
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(of_dtype(name)) for name in WIDE}
        checkpoints.save(8, wide)
        assert_same(checkpoints.restore(wide).tree, wide)


def over(devices: int, spec: P | None = None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("rows",)), P("rows") if spec is None else spec)


@pytest.mark.parametrize("keys", [False, True])
def test_checkpoints_restores_arrays_over_other_devices(tmp_path: Path, keys: bool) -> None:
    expected = jax.random.split(jax.random.key(4), 24) if keys else jnp.arange(48.0).reshape(24, 2)
    before, checkpoints = expected, px.Checkpoints(tmp_path)
    for step, devices in enumerate([8, 1, 3]):
        shardings = {"x": over(devices), "shared": over(devices, P())}
        target = {k: jax.ShapeDtypeStruct(expected.shape, expected.dtype, sharding=s) for k, s in shardings.items()}
        checkpoints.save(step, dict.fromkeys(shardings, before))
        restored: Any = checkpoints.restore(target, step).tree
        assert restored["x"].sharding.is_equivalent_to(over(devices), expected.ndim)
        assert restored["shared"].is_fully_replicated
        assert data(restored["x"]).tobytes() == data(restored["shared"]).tobytes() == data(expected).tobytes()
        before = restored["x"]


def test_checkpoints_lets_arrays_be_donated_or_changed_once_save_returns(tmp_path: Path) -> None:
    make = jax.jit(lambda: jnp.arange(1 << 20), out_shardings=over(8))
    on_device, on_host = make(), np.arange(1 << 20)
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"jax": on_device, "numpy": on_host})
        jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(on_device))
        on_host[:] = -1
    restored = checkpoints.restore({"jax": on_device, "numpy": on_host}).tree
    for x in restored.values():
        np.testing.assert_array_equal(x, np.arange(1 << 20))


@pytest.mark.parametrize(
    ("options", "steps", "best"),
    [
        ({"keep": None}, (1, 2, 3, 4, 5, 6), None),
        ({"keep": 1, "keep_every": 2}, (2, 4, 6), None),
        ({"keep": 1, "best": ("loss", "min")}, (3, 6), 3),
        ({"keep": 2, "best": ("loss", "max")}, (2, 5, 6), 2),
    ],
)
def test_checkpoints_keeps_the_last_the_due_and_the_best(
    tmp_path: Path, options: dict[str, Any], steps: tuple[int, ...], best: int | None
) -> None:
    checkpoints = px.Checkpoints(tmp_path, **options)
    for step, loss in enumerate([5.0, 7.0, 1.0, float("nan"), 1.5, 2.0], 1):
        checkpoints.save(step, {"x": 1}, {"loss": loss})
    checkpoints.wait()
    assert (checkpoints.steps, checkpoints.best, checkpoints.latest) == (steps, best, 6)


TEXTS = {"a": np.array(["x"])}


@pytest.mark.parametrize(
    ("use", "kind", "words"),
    [
        (lambda path: px.Checkpoints(path).save(1, TEXTS), px.StateError, r"\['a'\] is an array of <U1"),
        (lambda path: px.Checkpoints(path).save(1, {"a": object()}), px.StateError, r"\['a'\] is object, which cannot"),
        (lambda path: px.Checkpoints(path / "new").restore({}), px.CheckpointError, "there is no checkpoint in"),
    ],
)
def test_checkpoints_refuses_what_cannot_be_saved(use: Any, kind: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=words):
        use(tmp_path)
    assert os.listdir(tmp_path) == []


def test_checkpoints_leaves_a_directory_of_somebody_s_own_alone(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": 1})
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "mine").write_text("mine")
    assert px.Checkpoints(tmp_path).restore({"x": 0}).tree == {"x": 1}
    with pytest.raises(px.CheckpointError, match="2024 is no checkpoint"):
        checkpoints.save(4, {"x": 1})
    with pytest.raises(px.CheckpointError, match=r"no checkpoint of step 4 in .*, but \(3,\)"):
        checkpoints.restore({"x": 0}, 4)


SAVED: dict[str, Any] = {
    "head": {"w": np.ones((4, 3), "float32"), "b": np.ones(3, "float32")},
    "body": np.ones(5),
    "n": 3,
}
TARGET: dict[str, Any] = {
    "head": {"w": np.zeros((4, 7), "float32"), "c": np.zeros(3, "float32")},
    "body": np.zeros(5, "float32"),
    "n": 3.0,
}
LINES = [
    "['body']: float64 (5,) in the checkpoint, float32 (5,) in the target",
    "['head']['c']: missing in the checkpoint, float32 (3,) in the target",
    "['head']['w']: float32 (4, 3) in the checkpoint, float32 (4, 7) in the target",
    "['n']: Python int in the checkpoint, Python float in the target",
    "['head']['b']: float32 (3,) in the checkpoint, missing in the target",
]


def test_checkpoints_lists_all_that_differs_and_restores_what_agrees_if_asked(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, SAVED)
    with pytest.raises(px.StateError, match=rf"(?s)step 5 in {tmp_path}.*restore\(target, partial=True\)") as caught:
        checkpoints.restore(TARGET)
    assert [line.strip() for line in str(caught.value).splitlines()[1:-1]] == LINES
    with pytest.raises(px.StateError, match=r"best=True is of .*restore\(target, checkpoints\.best\)"):
        checkpoints.restore(SAVED, best=True)
    head = TARGET["head"] | {"b": np.zeros(3, "float32")}
    restored = checkpoints.restore(TARGET | {"n": 0, "head": head}, partial=True)
    assert list(restored.differences) == LINES[:3]
    assert_same(restored.tree, TARGET | {"n": 3, "head": head | {"b": np.ones(3, "float32")}})
