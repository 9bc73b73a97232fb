"""Members in files: what is read is what was written, or an error that names the file."""

import ctypes
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close, values


def on(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("members",))


def bits(tree: Any) -> list[tuple[Any, ...]]:
    """Everything that two trees must have in common, keys and bfloat16 included."""
    return [
        (str(x.dtype), x.shape, np.asarray(jax.random.key_data(x) if "key<" in str(x.dtype) else x).tobytes())
        for x in jax.tree.leaves(tree)
    ]


# --- members of all forms: (make, step, what a member holds) ----------------------------------------------------------


def make_dict(key: jax.Array) -> Any:
    return {"w": jax.random.normal(key, (3,)), "inner": {"b": jnp.zeros(()), "count": jnp.array(0)}}


def step_dict(params: Any, x: jax.Array, y: jax.Array) -> Any:
    error = x @ params["w"] - y
    return {"w": params["w"] - 0.1 * error @ x, "inner": jax.tree.map(lambda v: v + 1, params["inner"])}, error[0]


def make_half(key: jax.Array) -> Any:
    return jax.random.normal(key, (3,), "bfloat16"), jax.random.key(7, impl="rbg")


def step_half(w: jax.Array, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    return w + jax.random.normal(key, (3,), "bfloat16") * y[0].astype("bfloat16"), jax.random.split(key)[0]


DENSE = nn.Dense(1)
ADAM = optax.adam(0.01)


def make_linen(key: jax.Array) -> TrainState:
    return TrainState.create(apply_fn=DENSE.apply, params=DENSE.init(key, jnp.ones((1, 3)))["params"], tx=ADAM)


def step_linen(state: TrainState, x: jax.Array, y: jax.Array) -> Any:
    loss = lambda params: jnp.mean((state.apply_fn({"params": params}, x)[:, 0] - y) ** 2)  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), value


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer: Any = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.layer(x)).sum(-1)


def make_nnx(key: jax.Array) -> Any:
    net = Noisy(nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1)))
    return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)


def step_nnx(net: Noisy, opt: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
    opt.update(net, gradient)
    return loss


def of_modules(member: Any) -> Any:
    return nnx.state(member)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], Any]]] = {
    "dicts": (make_dict, step_dict, lambda member: member),
    "bfloat16 and a key": (make_half, step_half, lambda member: member),
    "Linen": (make_linen, step_linen, lambda member: member),
    "NNX": (make_nnx, step_nnx, of_modules),
}
X, Y = values(5, 3), values(5, seed=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written_and_training_goes_on(kind: str, tmp_path: Path) -> None:
    make, step, content = KINDS[kind]
    ens = px.ensemble(make, 3, 0, mesh=on(2))
    ens.train(step, X, Y)
    ens.save(tmp_path / "new" / "ensemble")
    ens.save_member(1, tmp_path / "one.npz")
    assert sorted(file.name for file in (tmp_path / "new").rglob("*")) == [
        "ensemble",
        *(f"member-00{i}.npz" for i in range(3)),
        "paraxis.json",
    ]
    again = px.load_ensemble(make, tmp_path / "new" / "ensemble", mesh=on(2))
    one = px.ensembles.load_member(make, tmp_path / "one.npz")
    assert type(one) is type(ens[1])
    assert bits(content(one)) == bits(content(ens[1]))
    for _ in range(2):
        for member, expected in zip(again, ens, strict=True):
            assert bits(content(member)) == bits(content(expected))
            assert jax.tree.structure(content(member)) == jax.tree.structure(content(expected))
        assert_close(again.train(step, X, Y), ens.train(step, X, Y), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [8, 3, 1])
def test_members_are_read_onto_the_devices_there_are(devices: int, tmp_path: Path) -> None:
    ens = px.ensemble(make_linen, 5, 0, mesh=on(2))
    ens.train(step_linen, X, Y)
    ens.save(str(tmp_path / "ensemble"))
    again = px.load_ensemble(make_linen, str(tmp_path / "ensemble"), mesh=on(devices), name="models", over="members")
    assert again.axis.name == "models"
    assert bits(list(again)) == bits(list(ens))
    assert_close(np.asarray(again.members(X)), np.asarray(ens.members(X)))


SHAPES = {"bfloat16": (2, 3), "float8_e4m3fn": (), "float16": (0, 2), "int8": (), "bool": (2,), "complex64": (2,)}


@pytest.mark.parametrize("shapes", [SHAPES, {"float8_e5m2": (2,)}])
def test_all_dtypes_and_empty_arrays(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    make = lambda key: {  # noqa: E731
        dtype: jax.random.bernoulli(key, 0.5, shape).astype(dtype) for dtype, shape in shapes.items()
    }
    ens = px.ensemble(make, 2, 0, mesh=on(2))
    ens.save(tmp_path / "ensemble")
    assert bits(list(px.load_ensemble(make, tmp_path / "ensemble"))) == bits(list(ens))


def test_names_that_read_alike_are_kept_apart(tmp_path: Path) -> None:
    make = lambda key: {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}  # noqa: E731
    ens = px.ensemble(make, 2, 0, mesh=on(2))
    ens.save_member(0, tmp_path / "one.npz")
    assert bits(px.ensembles.load_member(make, tmp_path / "one.npz")) == bits(ens[0])


def test_files_can_be_read_with_numpy_alone(tmp_path: Path) -> None:
    ens = px.ensemble(make_dict, 2, 0, mesh=on(2))
    ens.save_member(1, tmp_path / "one.npz")
    with np.load(tmp_path / "one.npz", allow_pickle=False) as file:
        arrays = [file[name] for name in file.files]
    assert any(x.shape == (3,) and (x == np.asarray(ens[1]["w"])).all() for x in arrays)


# --- damage -----------------------------------------------------------------------------------------------------------


def error_or_bits(make: Callable[..., Any], path: Path) -> Any:
    try:
        return bits(px.ensembles.load_member(make, path))
    except px.DataError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flip", [1, pytest.param(64, marks=pytest.mark.slow), pytest.param(255, marks=pytest.mark.slow)]
)
def test_a_flipped_byte_is_found_wherever_it_counts(flip: int, tmp_path: Path) -> None:
    """What a flip leaves as it was, such as the date of an entry of the archive, may pass."""
    ens, path = px.ensemble(make_half, 1, 0), tmp_path / "one.npz"
    ens.save_member(0, path)
    whole, expected, num_found = path.read_bytes(), bits(ens[0]), 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
        try:
            outcome = error_or_bits(make_half, path)
        except Exception as error:
            raise AssertionError(f"byte {position} ^ {flip}: {type(error).__name__}: {error}") from error
        if outcome != expected:
            assert "one.npz is damaged" in outcome, f"byte {position} ^ {flip} was not found"
            num_found += 1
    assert num_found > len(whole) / 2


def test_a_flipped_byte_of_the_numbers_names_the_file(tmp_path: Path) -> None:
    ens = px.ensemble(make_dict, 3, 0, mesh=on(2))
    ens.save(tmp_path / "ensemble")
    path = tmp_path / "ensemble" / "member-002.npz"
    content, numbers = bytearray(path.read_bytes()), np.asarray(ens[2]["w"]).tobytes()
    content[content.index(numbers)] ^= 1
    path.write_bytes(content)
    with pytest.raises(px.DataError, match=r"member-002\.npz is damaged.*load another one"):
        px.load_ensemble(make_dict, tmp_path / "ensemble")
    assert bits(px.ensembles.load_member(make_dict, tmp_path / "ensemble" / "member-001.npz")) == bits(ens[1])


def test_a_file_cut_short_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    px.ensemble(make_dict, 1, 0).save_member(0, path)
    whole = path.read_bytes()
    for length in (0, 1, 3, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(px.DataError, match=r"one\.npz is damaged, or no file of a member .*load another one"):
            px.ensembles.load_member(make_dict, path)


def test_other_files_are_no_members(tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    np.savez(path, w=np.ones(3))
    with pytest.raises(px.DataError, match=r"one\.npz is damaged, or no file of a member"):
        px.ensembles.load_member(make_dict, path)
    for content in (np.ones(3), np.array([{}], dtype=object)):
        with path.open("wb") as file:
            np.save(file, content)
        with pytest.raises(px.DataError, match=r"one\.npz is damaged, or no file of a member"):
            px.ensembles.load_member(make_dict, path)
    path.write_text("a picture of a cat")
    with pytest.raises(px.DataError, match=r"one\.npz is damaged, or no file of a member"):
        px.ensembles.load_member(make_dict, path)
    with pytest.raises(FileNotFoundError, match=r"two\.npz"):
        px.ensembles.load_member(make_dict, tmp_path / "two.npz")


# --- members of another kind ------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[..., Any], str]] = {
    "shape": (
        lambda key: make_dict(key) | {"w": jnp.ones(4)},
        r"w in .*member-000\.npz is float32\[3\], but make gives float32\[4\]",
    ),
    "dtype": (
        lambda key: make_dict(key) | {"w": jnp.ones(3, "bfloat16")},
        r"w in .*member-000\.npz is float32\[3\], but make gives bfloat16\[3\]",
    ),
    "more": (lambda key: make_dict(key) | {"new": jnp.ones(3)}, r"member-000\.npz is not like.*they differ in new"),
    "fewer": (lambda key: {"w": jnp.ones(3)}, r"member-000\.npz is not like.*they differ in inner\.b"),
    "modules": (make_nnx, r"member-000\.npz is not like one that make gives; they differ in"),
    "more arguments": (lambda key, rate: make_dict(key), r"make must be a function of a key alone.*make\(key, 0\.1\)"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_members_of_another_kind_are_told(case: str, tmp_path: Path) -> None:
    make, message = OTHERS[case]
    px.ensemble(make_dict, 2, 0, mesh=on(2)).save(tmp_path / "ensemble")
    with pytest.raises(px.StateError, match=message):
        px.load_ensemble(make, tmp_path / "ensemble")
    with pytest.raises(px.StateError, match=message):
        px.ensembles.load_member(make, tmp_path / "ensemble" / "member-000.npz")


@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_a_member_that_is_missing_is_told(gone: tuple[int, ...], tmp_path: Path) -> None:
    px.ensemble(make_dict, 3, 0, mesh=on(2)).save(tmp_path / "ensemble")
    for index in gone:
        (tmp_path / "ensemble" / f"member-00{index}.npz").unlink()
    message = rf"written with 3 members, but of its files {len(gone)} are missing, such as member-00{gone[0]}\.npz; put"
    with pytest.raises(px.StateError, match=message):
        px.load_ensemble(make_dict, tmp_path / "ensemble")


@pytest.mark.parametrize("extra", ["member-003.npz", "member-1000.npz", "member-0002.npz", "member-best.npz"])
def test_a_member_that_is_too_many_is_told(extra: str, tmp_path: Path) -> None:
    ens = px.ensemble(make_dict, 3, 0, mesh=on(2))
    ens.save(tmp_path / "ensemble")
    ens.save_member(0, tmp_path / "ensemble" / extra)
    with pytest.raises(px.StateError, match=rf"3 members, but of its files 1 are too many, such as {extra}; put"):
        px.load_ensemble(make_dict, tmp_path / "ensemble")


def test_a_directory_that_does_not_say_how_many_it_has_is_told(tmp_path: Path) -> None:
    px.ensemble(make_dict, 3, 0, mesh=on(2)).save(tmp_path / "ensemble")
    (tmp_path / "ensemble" / "paraxis.json").unlink()
    for place, number in ((tmp_path / "ensemble", 3), (tmp_path, 0), (tmp_path / "nowhere", 0)):
        message = rf"holds {number} files member-\*\.npz, and no paraxis.json.*give the directory that ens\.save"
        with pytest.raises(px.StateError, match=message):
            px.load_ensemble(make_dict, place)


# --- what is there already --------------------------------------------------------------------------------------------


def everything(place: Path) -> dict[str, bytes]:
    return {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_an_old_ensemble_is_replaced_as_a_whole(tmp_path: Path) -> None:
    px.ensemble(make_dict, 5, 0, mesh=on(2)).save(tmp_path / "ensemble")
    ens = px.ensemble(make_dict, 2, 1, mesh=on(2))
    ens.save(tmp_path / "ensemble")
    assert sorted(everything(tmp_path)) == [
        *(f"ensemble/member-00{i}.npz" for i in range(2)),
        "ensemble/paraxis.json",
    ]
    assert bits(list(px.load_ensemble(make_dict, tmp_path / "ensemble"))) == bits(list(ens))
    ens.save_member(1, tmp_path / "ensemble" / "member-000.npz")
    assert bits(px.ensembles.load_member(make_dict, tmp_path / "ensemble" / "member-000.npz")) == bits(ens[1])


@pytest.mark.parametrize(
    "foreign",
    [
        "notes.txt",
        "member-000.txt",
        "weights.npz",
        "more/member-000.npz",
        "member-foo.npz",
        "member-002.npz",
        "member-001.npz",
        "paraxis.txt",
    ],
)
def test_what_is_not_ours_is_not_touched(foreign: str, tmp_path: Path) -> None:
    ens, place = px.ensemble(make_dict, 2, 0, mesh=on(2)), tmp_path / "mine"
    ens.save(place)
    (place / foreign).parent.mkdir(exist_ok=True)
    (place / foreign).write_text("years of work")
    before = everything(tmp_path)
    with pytest.raises(px.StateError, match=r"mine is there and is not a directory of members only.*mine-ensemble'\)"):
        ens.save(place)
    assert everything(tmp_path) == before


def test_a_file_in_place_of_the_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("years of work")
    with pytest.raises(px.StateError, match=r"notes is there and is not a directory.*ens\.save\('.*notes-ensemble'\)"):
        px.ensemble(make_dict, 2, 0, mesh=on(2)).save(tmp_path / "notes")
    assert everything(tmp_path) == {"notes": b"years of work"}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt("stop")])
def test_a_failure_while_writing_leaves_the_old_one_whole(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ens, calls, savez = px.ensemble(make_dict, 3, 0, mesh=on(2)), [], np.savez
    ens.save(tmp_path / "ensemble")
    ens.save_member(0, tmp_path / "one.npz")
    before = everything(tmp_path)
    ens.train(step_dict, X, Y)

    def failing(file: Any, **arrays: Any) -> None:
        calls.append(file)
        savez(file, **arrays)
        if len(calls) == 2:
            raise error

    monkeypatch.setattr(np, "savez", failing)
    with pytest.raises(type(error), match=str(error)):
        ens.save(tmp_path / "ensemble")
    calls[:] = [None]
    with pytest.raises(type(error), match=str(error)):
        ens.save_member(1, tmp_path / "one.npz")
    assert everything(tmp_path) == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ensemble", "one.npz"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_while_putting_in_place_loses_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ens, calls, rename = px.ensemble(make_dict, 2, 0, mesh=on(2)), [], pathlib.Path.rename
    ens.save(tmp_path / "ensemble")
    before = everything(tmp_path)
    ens.train(step_dict, X, Y)

    def failing(self: Path, target: Any) -> Path:
        calls.append(target)
        if len(calls) == number:
            raise KeyboardInterrupt("stop")
        return rename(self, target)

    def none(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", none)  # as on a system that cannot have two names change places at once
    monkeypatch.setattr(pathlib.Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt, match="stop"):
        ens.save(tmp_path / "ensemble")
    assert everything(tmp_path) == before
    assert [file.name for file in tmp_path.iterdir()] == ["ensemble"]
