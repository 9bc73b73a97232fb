"""Checkpoints give back what was saved: bit for bit, on any number of devices, under any path."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

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
        assert getattr(a, "weak_type", None) == getattr(e, "weak_type", None), where
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
        "weak": [jnp.asarray(2.0), jnp.full((2,), 3), jnp.asarray(1j)],
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
    assert (restored.step, restored.differences, restored.changed) == (7, (), ())


def test_wide_types_come_back_where_jax_has_them(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        tree = {name: jnp.asarray(of_dtype(name)) for name in WIDE}
        with px.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, tree)
        assert_same(checkpoints.restore(tree).tree, tree)
    with pytest.raises(px.StateError, match=r"\['complex128'\] has dtype complex128, .*jax_enable_x64"):
        checkpoints.restore(tree)


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


def test_a_lone_leaf_and_no_leaf_come_back(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    for step, tree in enumerate([jnp.arange(3), {}, 5]):
        checkpoints.save(step, tree)
        assert_same(checkpoints.restore(tree).tree, tree)


@pytest.mark.parametrize("keys", [False, True])
def test_arrays_over_other_devices_come_back(tmp_path: Path, keys: bool) -> None:
    expected = jax.random.split(jax.random.key(4), 24) if keys else jnp.arange(48.0).reshape(24, 2)
    before: Any = expected
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
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


def test_arrays_bound_to_no_device_stay_so(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, {"step": jax.device_put(jnp.int32(3), over(8, P()))})
    step = checkpoints.restore({"step": jnp.int32(0)}).tree["step"]
    assert not step.committed
    assert raw(step + jax.device_put(jnp.arange(8), over(8))) == raw(np.arange(3, 11, dtype="int32"))


def test_a_sharding_that_does_not_divide_is_named(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, {"w": jnp.arange(10.0)})
    with pytest.raises(px.StateError, match=r"\['w'\] has shape \(10,\), which cannot be laid out"):
        checkpoints.restore({"w": jax.ShapeDtypeStruct((10,), jnp.float32, sharding=over(8))})


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
    on_device.delete()
    with pytest.raises(px.StateError, match=r"\['x'\] is an array that was donated.*; save the state that the step"):
        checkpoints.save(2, {"x": on_device})


def test_a_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, state(1), {"which": "old"})
    checkpoints.save(1, {"other": jnp.ones(3)}, {"which": "new"})
    restored = checkpoints.restore({"other": jnp.zeros(3)})
    assert restored.notes == {"which": "new"}
    assert_same(restored.tree, {"other": jnp.ones(3)})
    assert sorted(os.listdir(tmp_path)) == [".paraxis", "1"]


@pytest.mark.parametrize("name", ["with space", "a/b/../c", "ünï'code", "."])
def test_unusual_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with px.Checkpoints(name) as checkpoints:
        checkpoints.save(1, state())
    monkeypatch.chdir("/")
    assert checkpoints.latest == 1
    assert_same(px.Checkpoints(tmp_path / name).restore(state(2)).tree, state())


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with px.Checkpoints("~/runs") as checkpoints:
        checkpoints.save(1, state())
    assert (tmp_path / "runs" / "1").is_dir()


def test_what_is_noted_of_the_surroundings_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_NPROC", "7")
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, state())
    monkeypatch.setenv("PJRT_NPROC", "5")
    assert checkpoints.restore(state()).changed == ("number of XLA's CPU threads: 7 when it was saved, 5 now",)


SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]


def special(dtype: str) -> np.ndarray:
    """Among them, NaN with other bits than the usual ones, and numbers so small that some arithmetic makes them 0."""
    x = np.array(SPECIAL).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return np.concatenate([bits, bits + 1, bits | 1]).astype(bits.dtype).view(x.dtype)


def test_numbers_that_are_not_finite_or_hardly_anything_come_back(tmp_path: Path) -> None:
    types = ["bfloat16", "float16", "float32", "float64"]
    with jax.enable_x64(True), px.Checkpoints(tmp_path) as checkpoints:
        on_host = {name: special(name) for name in types} | {"large": np.tile(special("float32"), 2000)}
        on_host["complex64"] = special("float32")[:20].view("complex64")
        tree = {"host": on_host, "device": {name: jax.device_put(x) for name, x in on_host.items()}}
        for name, x in on_host.items():
            assert raw(tree["device"][name]) == x.tobytes(), name
        checkpoints.save(1, tree)
        assert_same(checkpoints.restore(tree).tree, tree)


def steps_after(tmp_path: Path, saved: list[int], losses: list[float] | None = None, **options: Any) -> tuple[int, ...]:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False, **options)
    for index, step in enumerate(saved):
        checkpoints.save(step, {"x": 1}, {"loss": losses[index]} if losses else None)
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


@pytest.mark.slow
def test_small_arrays_are_written_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, int] = {}
    save = ocp.save_checkpointables_async

    def counted(directory: str, given: dict[str, Any]) -> Any:
        written.update({name: x.nbytes for arrays in given.values() for name, x in arrays.items()})
        return save(directory, given)

    monkeypatch.setattr(ocp, "save_checkpointables_async", counted)
    tree = {f"layer {k}": {"w": jnp.asarray(np.full(k, k, "int32")), "b": np.float64(k)} for k in range(1, 100)}
    tree["large"] = {"w": jax.random.normal(jax.random.key(0), (200, 200))}
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
    assert sorted(written.values()) == [99 * 8 + 4950 * 4, 160_000]
    restored = checkpoints.restore(jax.tree.map(np.zeros_like, tree))
    assert_same(jax.tree.map(np.asarray, restored.tree), jax.tree.map(np.asarray, tree))
    part = checkpoints.restore({"layer 7": {"w": np.zeros(7, "int32")}}, partial=True)
    np.testing.assert_array_equal(part.tree["layer 7"]["w"], np.full(7, 7))


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A container whose keys are plain words."""

    def __init__(self, small: Any, other: Any) -> None:
        self.values = small, other

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return tuple(zip(("small", "other"), self.values, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, values: Any) -> "Named":
        return cls(*values)


def test_a_leaf_may_be_called_as_the_small_ones_are(tmp_path: Path) -> None:
    tree = Named(jax.random.normal(jax.random.key(0), (200, 200)), jnp.arange(3))
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree)
    assert_same(checkpoints.restore(tree).tree, tree)


def test_small_arrays_go_to_the_devices_of_the_target(tmp_path: Path) -> None:
    key = jax.random.split(jax.random.key(1), 8)
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(np.arange(8.0), over(2)), "key": key})
    target = {"x": jax.ShapeDtypeStruct((8,), "float32", sharding=over(4)), "key": jax.device_put(key, over(8))}
    restored = checkpoints.restore(target).tree
    assert {name: x.sharding for name, x in restored.items()} == {name: x.sharding for name, x in target.items()}
    np.testing.assert_array_equal(restored["x"], np.arange(8.0))
    assert raw(restored["key"]) == raw(key)


def test_what_was_just_saved_stays_though_others_have_higher_numbers(tmp_path: Path) -> None:
    assert steps_after(tmp_path, [100, 200, 10], keep=1) == (10, 200)


def test_the_best_one_is_named(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False, best=("accuracy", "max"))
    assert (checkpoints.best, checkpoints.latest) == (None, None)
    for step, accuracy in enumerate([0.5, 0.9, 0.9, 0.2]):
        checkpoints.save(step, {}, {"accuracy": accuracy})
    assert (checkpoints.best, checkpoints.latest) == (2, 3)


def test_when_one_is_due(tmp_path: Path) -> None:
    assert [step for step in range(10) if px.Checkpoints(tmp_path, every=3).is_due(step)] == [3, 6, 9]
    assert not px.Checkpoints(tmp_path).is_due(3)


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 2.5}, {"keep_every": -1}, {"keep": True}])
def test_options_that_are_no_counts(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(px.DataError, match=f"{name} must be an integer of at least 1, .* write {name}=3"):
        px.Checkpoints(tmp_path, **options)


@pytest.mark.parametrize("best", ["loss", ("loss", "least"), ("loss",)])
def test_best_of_what(tmp_path: Path, best: Any) -> None:
    with pytest.raises(px.DataError, match=r"best must be .* write best=\('loss', 'min'\)"):
        px.Checkpoints(tmp_path, best=best)


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"loss": np.float32(1)}, r"notes must be JSON values: .*float32.* write numbers as float\(loss\)"),
        ([1], r"notes must be a dict"),
        ({}, r"needs a number in notes\['loss'\]"),
    ],
)
def test_notes_that_cannot_be_kept(tmp_path: Path, notes: Any, message: str) -> None:
    with pytest.raises(px.DataError, match=message):
        px.Checkpoints(tmp_path, best=("loss", "min")).save(1, state(), notes)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.array(["x"]), r"\['a'\]\[1\] has dtype <U1, which cannot be saved"),
        (np.array([None]), r"has dtype object, which cannot be saved"),
        (np.zeros(1, [("x", "f4")]), "which cannot be saved"),
        (np.array(1, "datetime64[s]"), "which cannot be saved"),
        (object(), r"\['a'\]\[1\] is a object, which cannot be saved; write arrays"),
        (jax.ShapeDtypeStruct((2,), "float32"), "has no value; save the state that"),
    ],
)
def test_leaves_that_cannot_be_saved(tmp_path: Path, leaf: Any, message: str) -> None:
    with pytest.raises(px.StateError, match=message):
        px.Checkpoints(tmp_path).save(1, {"a": [1, leaf]})


def test_save_and_restore_are_not_for_the_inside_of_jit(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path)
    with pytest.raises(px.StateError, match=r"\['x'\] is traced by JAX; call save outside jit"):
        jax.jit(lambda x: checkpoints.save(1, {"x": x}))(1.0)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True])
def test_steps_that_are_no_numbers(tmp_path: Path, step: Any) -> None:
    with pytest.raises(px.DataError, match=r"step must be an integer of at least 0.*write save\(int\(state.step\)"):
        px.Checkpoints(tmp_path).save(step, {})


def test_steps_as_arrays(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(jnp.int32(3), {})  # pyright: ignore[reportArgumentType]
    assert checkpoints.steps == (3,)


def test_nothing_to_restore(tmp_path: Path) -> None:
    with pytest.raises(
        px.CheckpointError, match=r"there is no checkpoint in .*look before whether checkpoints.latest is None"
    ):
        px.Checkpoints(tmp_path / "new").restore({})
    assert os.listdir(tmp_path) == []
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(3, {})
    with pytest.raises(px.CheckpointError, match=r"no checkpoint of step 4 in .*; there are \(3,\); write restore"):
        checkpoints.restore({}, 4)


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(px.CheckpointError, match=r"runs is there and is not a directory; give another place"):
        px.Checkpoints(tmp_path / "runs")
