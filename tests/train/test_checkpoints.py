"""Checkpoints give back what was saved: bit for bit, on any number of devices, under any path."""

import os
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px

WIDE = ["int64", "uint64", "float64", "complex128"]
NARROW = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "int4"),
]


def raw(x: Any) -> bytes:
    """The bits of a leaf."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert type(a) is type(e), where
        assert getattr(a, "dtype", None) == getattr(e, "dtype", None), where
        assert np.shape(a) == np.shape(e), where
        assert raw(a) == raw(e) if hasattr(e, "dtype") else a == e, where


def over(devices: int, spec: P | None = None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("rows",)), P("rows") if spec is None else spec)


def of_dtype(name: str) -> np.ndarray:
    x = np.random.default_rng(3).integers(0, 2, (3, 4))
    return x.astype(np.dtype(getattr(ml_dtypes, name, name)))


def state(scale: float = 1.0) -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3) * scale, "step": jnp.int32(scale), "key": jax.random.key(int(scale))}


def test_leaves_of_every_kind_come_back(tmp_path: Path) -> None:
    tree = {
        **{name: jnp.asarray(of_dtype(name)) for name in NARROW},
        "numpy": {name: of_dtype(name) for name in NARROW + WIDE},
        "python": (True, 3, -(2**80), 0.1, float("inf"), 1 - 2j, "words"),
        "scalars": [jnp.float32(0.5), np.float64(0.1), np.array(7), np.bool_(True)],
        "keys": [jax.random.key(1), jax.random.split(jax.random.key(2), (2, 3)), jax.random.key(3, impl="rbg")],
        "empty": [jnp.zeros((0, 3)), np.zeros((2, 0), "int8"), jax.random.split(jax.random.key(0), 0)],
        "strange/na.me é": [{"": jnp.ones(2), "3": jnp.ones(1)}, {3: jnp.ones(3)}],
        "reversed": np.arange(10)[::-2],
    }
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, tree, {"position": [1, None, {"a": 0.1}]})
    restored = checkpoints.restore(tree)
    assert_same(restored.tree, tree)
    assert restored.notes == {"position": [1, None, {"a": 0.1}]}
    assert (restored.step, restored.differences) == (7, ())


def test_wide_types_come_back_where_jax_has_them(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(of_dtype(name)) for name in WIDE}
        with px.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, tree)
        assert_same(checkpoints.restore(tree).tree, tree)


def test_a_module_and_its_optimiser_come_back(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)))
        return params, optax.adam(optax.linear_schedule(0.1, 0.0, 9)).init(params)

    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make(0))
    restored = checkpoints.restore(make(1)).tree
    assert_same(restored, make(0))
    abstract = jax.eval_shape(lambda: make(1))
    assert_same(checkpoints.restore(abstract).tree, make(0))


@pytest.mark.parametrize("keys", [False, True])
def test_arrays_over_other_devices_come_back(tmp_path: Path, keys: bool) -> None:
    expected = jax.random.split(jax.random.key(4), 24) if keys else jnp.arange(48.0).reshape(24, 2)
    before: Any = expected
    checkpoints = px.Checkpoints(tmp_path)
    for step, devices in enumerate([8, 1, 3, 8]):
        sharding = over(devices)
        tree = {"x": jax.device_put(before, sharding), "shared": jax.device_put(before, over(devices, P()))}
        checkpoints.save(step, tree)
        target: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in tree.items()
        }
        restored = checkpoints.restore(target, step).tree
        assert restored["x"].sharding.is_equivalent_to(sharding, expected.ndim)
        assert restored["shared"].is_fully_replicated
        assert raw(restored["x"]) == raw(restored["shared"]) == raw(expected)
        before = restored["x"]


def test_arrays_may_be_donated_or_changed_once_save_returns(tmp_path: Path) -> None:
    make = jax.jit(lambda: jnp.arange(1 << 20), out_shardings=over(8))
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    on_device, on_host = make(), np.arange(1 << 20)
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"jax": on_device, "numpy": on_host})
        jax.block_until_ready(step(on_device))
        on_host[:] = -1
    restored = checkpoints.restore({"jax": on_device, "numpy": on_host}).tree
    assert raw(restored["jax"]) == raw(np.arange(1 << 20, dtype="int32"))
    assert raw(restored["numpy"]) == raw(np.arange(1 << 20))


def test_a_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    checkpoints.save(1, state(1), {"which": "old"})
    checkpoints.save(1, {"other": jnp.ones(3)}, {"which": "new"})
    restored = checkpoints.restore({"other": jnp.zeros(3)})
    assert restored.notes == {"which": "new"}
    assert_same(restored.tree, {"other": jnp.ones(3)})
    assert checkpoints.steps == (1,)


def steps_after(tmp_path: Path, saved: list[int], losses: list[float] | None = None, **options: Any) -> tuple[int, ...]:
    checkpoints = px.Checkpoints(tmp_path, **options)
    for index, step in enumerate(saved):
        checkpoints.save(step, {"x": 1}, {"loss": losses[index]} if losses else None)
    checkpoints.wait()
    return checkpoints.steps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (4, 5, 6)),
        ({"keep": 1}, (6,)),
        ({"keep": None}, (1, 2, 3, 4, 5, 6)),
        ({"keep": 1, "keep_every": 2}, (2, 4, 6)),
        ({"keep": 1, "best": ("loss", "min")}, (3, 6)),
        ({"keep": 2, "best": ("loss", "max")}, (2, 5, 6)),
    ],
)
def test_what_is_kept(tmp_path: Path, options: dict[str, Any], expected: tuple[int, ...]) -> None:
    losses = [5.0, 7.0, 1.0, float("nan"), 1.5, 2.0]
    assert steps_after(tmp_path, [1, 2, 3, 4, 5, 6], losses, **options) == expected


def test_the_best_one_is_named(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, best=("accuracy", "max"))
    assert (checkpoints.best, checkpoints.latest) == (None, None)
    for step, accuracy in enumerate([0.5, 0.9, 0.9, 0.2]):
        checkpoints.save(step, {}, {"accuracy": accuracy})
    checkpoints.wait()
    assert (checkpoints.best, checkpoints.latest) == (2, 3)


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda path: px.Checkpoints(path, keep=0), px.DataError, "keep must be an integer of at least 1"),
        (lambda path: px.Checkpoints(path, best=cast("Any", ("loss", "least"))), px.DataError, "best must be like"),
        (lambda path: px.Checkpoints(path).save(1, {}, {"loss": np.float32(1)}), TypeError, "not JSON serializable"),
        (lambda path: px.Checkpoints(path, best=("loss", "min")).save(1, {}), px.DataError, "needs a number"),
        (
            lambda path: px.Checkpoints(path).save(1, {"a": np.array(["x"])}),
            px.StateError,
            r"\['a'\] is an array of <U1",
        ),
        (lambda path: px.Checkpoints(path).save(1, {"a": object()}), px.StateError, r"\['a'\] is object, which cannot"),
        (lambda path: px.Checkpoints(path / "new").restore({}), px.CheckpointError, "there is no checkpoint in"),
    ],
)
def test_what_cannot_be_done_is_refused(use: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        use(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": 1})
    with pytest.raises(px.CheckpointError, match=r"no checkpoint of step 4 in .*, but \(3,\)"):
        checkpoints.restore({"x": 0}, 4)


def test_checkpoints_of_an_older_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".paraxis").mkdir()
    with pytest.raises(px.CheckpointError, match=r"checkpoints of Paraxis 0\.2"):
        px.Checkpoints(tmp_path)


def test_a_directory_of_somebody_s_own_is_no_checkpoint(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": 1})
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "mine").write_text("mine")
    assert checkpoints.steps == (3,)
    assert px.Checkpoints(tmp_path).restore({"x": 0}).tree == {"x": 1}
    with pytest.raises(px.CheckpointError, match="2024 is no checkpoint"):
        checkpoints.save(4, {"x": 1})
