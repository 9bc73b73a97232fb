"""The same bits on any number of devices; and they are those of the ordinary step, to rounding."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import paraxis as px
from tests.train import _layouts
from tests.train._layouts import ANY, CASES, batches, digest, start
from tests.train._models import (
    Net,
    assert_near,
    assert_same_bits,
    axis,
    data,
    loss,
    plain,
    plain_by_hand,
    plain_loss,
    plain_params,
    rows,
    trained,
)

ADAM = optax.adam(1e-2)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that XLA takes for eight devices."""
    monkeypatch.setenv("PJRT_NPROC", "8")


def grid() -> px.Axis:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    return px.Axis("batch", 1, mesh=mesh, over=("a", "b"))


def digests(name: str, places: list[px.Axis], last: int = _layouts.NUM_STEPS, **options: Any) -> set[str]:
    """Of the states that the same steps end with, ten unless told."""
    found = set()
    for place in places:
        step = px.train_step(CASES[name][1], axis=place, **options)
        state, losses = _layouts.trained(start(name), step, batches(name, last=last))
        assert int(state.step) == last
        assert losses[-1] != losses[0]
        found.add(digest(state))
    return found


def test_bits_do_not_depend_on_the_number_of_devices() -> None:
    places = [axis(1), grid()]
    assert len(digests("mlp", places, reproducible=ANY)) == 1
    assert len(digests("mlp", places, last=4)) == 2, (
        "else this shows nothing: the ordinary step has the same bits on both"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "conv", "transformer"])
def test_bits_do_not_depend_on_the_number_of_devices_whatever_the_model(name: str) -> None:
    places = [axis(1), axis(2), axis(4), axis(8)]
    assert len(digests(name, places, reproducible=ANY)) == 1


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_step_is_that_of_a_loop_written_by_hand_to_rounding(devices: int) -> None:
    given = [rows(size, size) for size in (16, 13, 3)]
    clipped = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
    params, losses = plain_by_hand(plain_params(), clipped, given)
    step = px.train_step(plain_loss, axis=axis(devices), clip=0.1, reproducible=ANY)
    state, found = trained(px.TrainState.create(plain_params(), ADAM), step, given)
    assert_near(found, losses)
    assert_near(state.params, params)


def weighted(params: Any, batch: Any) -> Any:
    """Rows count by their weight, which is zero for all of some groups."""
    losses = plain_loss(params, batch)
    return px.Mean(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])), {"plain": losses}


def test_a_mean_is_that_of_all_rows_not_of_the_groups() -> None:
    batch = rows(13) | {"weight": (np.arange(13) >= 5) * np.arange(13, dtype="float32"), "scale": np.float32(1)}
    losses = np.asarray(plain_loss(plain_params(), batch))
    step = px.train_step(weighted, axis=axis(2), reproducible=ANY)
    state, metrics = step(px.TrainState.create(plain_params(), ADAM), batch)
    assert_near(float(metrics["loss"]), np.sum(losses * batch["weight"]) / np.sum(batch["weight"]))
    assert_near(float(metrics["plain"]), np.mean(losses))
    assert float(metrics["plain"].weight) == 13

    def mean(params: Any, batch: Any) -> jax.Array:
        return jnp.sum(plain_loss(params, batch) * batch["weight"]) / np.sum(batch["weight"])

    assert_near(state.params, plain_by_hand(plain_params(), ADAM, [batch], mean)[0])


def noisy(params: Any, batch: Any, *, row_keys: jax.Array, key: jax.Array) -> Any:
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (4,)))(row_keys)
    drawn = jnp.full(len(row_keys), jax.random.uniform(key))
    return plain_loss(params, batch | {"x": jnp.where(kept, batch["x"], 0)}), {"drawn": drawn, "square": drawn**2}


def test_noise_of_a_row_depends_on_its_number_and_that_of_a_group_is_its_own() -> None:
    batch, key = rows(16), jax.random.key(7)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 0), row) for row in range(16)]
    kept = np.stack([jax.random.bernoulli(k, 0.5, (4,)) for k in keys])
    expected = plain_loss(plain_params(), batch | {"x": np.where(kept, batch["x"], 0)})
    step = px.train_step(noisy, axis=axis(2), reproducible=ANY)
    _, metrics = step(px.TrainState.create(plain_params(), ADAM, key=key), batch)
    assert_near(float(metrics["loss"]), np.mean(expected))
    assert float(metrics["square"]) > float(metrics["drawn"]) ** 2 + 1e-3


def test_running_statistics_are_the_mean_of_those_that_the_groups_leave() -> None:
    batch, net = rows(13), Net(dropout=0)
    state = px.TrainState.create(net, ADAM)
    before = batch["x"] @ data(state.params["first"]["kernel"])
    sizes = [2, 2, 2, 2, 2, 1, 1, 1]
    groups = np.split(before, np.cumsum(sizes)[:-1])
    mean, var = (sum(n * f(g, 0) for n, g in zip(sizes, groups, strict=True)) / 13 for f in (np.mean, np.var))
    state, _ = px.train_step(loss, axis=axis(2), reproducible=ANY)(state, batch)
    assert_near(state.mutable["norm"]["mean"], 0.1 * mean)
    assert_near(state.mutable["norm"]["var"], 0.9 + 0.1 * var)


@pytest.mark.slow
def test_random_streams_go_on_once_a_step_and_keep_their_keys() -> None:
    state = px.TrainState.create(Net(norm=False), ADAM)
    streams = jax.tree.map(data, state.mutable["dropout"]["rngs"])
    step = px.train_step(loss, axis=axis(2), reproducible=ANY)
    for _ in range(2):
        state, _ = step(state, rows(16))
    after = state.mutable["dropout"]["rngs"]
    assert_same_bits(after["key"], streams["key"])
    assert int(after["count"]) == int(streams["count"]) + 2


def counted(params: Any, batch: Any, mutable: Any) -> Any:
    new = {"rows": mutable["rows"] + len(batch["x"]), "same": mutable["same"], "seen": jnp.ones((), bool)}
    return plain_loss(params, batch), new


@pytest.mark.slow
def test_of_mutable_state_that_is_not_floating_the_first_group_is_kept() -> None:
    mutable = {"rows": np.zeros((), "int32"), "same": np.float32(0.1), "seen": np.zeros((), bool)}
    state = px.TrainState.create(plain_params(), ADAM, mutable=mutable)
    state, _ = px.train_step(counted, axis=axis(2), reproducible=ANY)(state, rows(13))
    assert_same_bits(state.mutable, {"rows": np.int32(2), "same": np.float32(0.1), "seen": np.array(True)})


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [16, 13])
def test_rows_from_the_host_from_devices_and_from_a_loader_give_the_same_bits(number: int) -> None:
    source, place = rows(number), axis(2)
    (batch,) = px.loader(source, number, axis=place, shuffle=False, drop_last=False).epoch(0)
    step = px.train_step(plain_loss, axis=place, reproducible=ANY)
    found = {
        digest(step(px.TrainState.create(plain_params(), ADAM), given)[0])
        for given in (source, jax.tree.map(jnp.asarray, source), batch)
    }
    assert len(found) == 1


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices_with_the_same_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(steps: int, devices: int, checkpoint: Path | None, groups: int = 8) -> str:
        place = axis(devices)
        data = px.loader(rows(40), 16, axis=place, seed=1)
        step = px.train_step(plain_loss, axis=place, reproducible=ANY, groups=groups)
        state = px.TrainState.create(plain_params(), ADAM)
        fitted = px.fit(state, step, data, steps=steps, checkpoint=checkpoint)
        return digest(fitted.state)

    whole = run(6, 2, None)
    run(3, 2, tmp_path)
    assert run(6, 1, tmp_path) == whole
    assert "groups:" not in "".join(capfd.readouterr())
    run(7, 1, tmp_path, groups=4)
    assert "groups: 8 when it was saved, 4 now" in "".join(capfd.readouterr())


def judged(params: Any, batch: Any) -> Any:
    return {"right": plain(params, batch["x"]) > batch["y"], "loss": plain_loss(params, batch)}


@pytest.mark.slow
def test_metrics_of_a_batch_have_the_same_bits_too() -> None:
    state, batch = px.TrainState.create(plain_params(), ADAM), rows(13)
    found = [px.eval_step(judged, axis=axis(n), reproducible=ANY)(state, batch) for n in (1, 8)]
    assert_same_bits(*found)
    assert_near(float(found[0]["right"]), np.mean(np.asarray(plain(plain_params(), batch["x"])) > batch["y"]))
    assert_near(float(found[0]["loss"]), np.mean(plain_loss(plain_params(), batch)))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    state = px.TrainState.create(plain_params(), ADAM)
    batch = rows(16)
    batch["x"][11] = np.nan
    step = px.train_step(plain_loss, axis=axis(2), donate=False, reproducible=ANY)
    after, metrics = step(state, batch)
    assert np.isnan(float(metrics["loss"]))
    assert (bool(after.ok), bool(state.ok)) == (False, True)
    assert_same_bits(after.params, state.params)
    after, metrics = step(after, rows(16))
    assert np.isnan(float(metrics["loss"]))
    assert int(after.step) == 0


def test_a_state_that_was_given_away_is_said_to_be() -> None:
    state = px.TrainState.create(plain_params(), ADAM, key=jax.random.key(0))
    step = px.train_step(plain_loss, axis=axis(2), reproducible=ANY)
    state, _ = step(state, rows(16))
    new, _ = step(state, rows(16))
    with pytest.raises(px.ParaxisError, match="donated to an earlier step"):
        step(state, rows(16))
    assert int(step(new, rows(16))[0].step) == 3


def test_devices_must_divide_the_groups() -> None:
    state = px.TrainState.create(plain_params(), ADAM)
    with pytest.raises(px.ParaxisError, match="8 groups cannot be shared evenly by 3 devices; use 2 of them"):
        px.train_step(plain_loss, axis=axis(3), reproducible=ANY)(state, rows(16))
    with pytest.raises(px.ParaxisError, match="2 groups cannot be shared evenly by 4 devices; write groups=4"):
        px.train_step(plain_loss, axis=axis(4), reproducible=ANY, groups=2)(state, rows(16))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    place = px.Axis("batch", 1, mesh=mesh, over="a")
    with pytest.raises(px.ParaxisError, match=r"over=\('a', 'b'\)"):
        px.train_step(plain_loss, axis=place, reproducible=ANY)(state, rows(16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reproducible": True}, "got True; write reproducible='any device count'"),
        ({"reproducible": ANY, "groups": 6}, "a power of two, got 6; write groups=8"),
        ({"groups": 16}, r"of no use without reproducible; write train_step\(fn, reproducible="),
        ({"reproducible": ANY, "microbatches": 8}, "bound memory by groups=16"),
        ({"reproducible": ANY, "shard": "params"}, "each device has all parameters"),
    ],
)
def test_options_that_cannot_be_had_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(px.ParaxisError, match=message):
        px.train_step(plain_loss, **options)


def test_threads_must_be_settled_before_devices_start(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setenv("PJRT_NPROC", "7")
    with pytest.raises(px.ParaxisError, match=r"7 threads, but takes one for each of 8 devices; .* export PJRT_NPROC="):
        px.eval_step(judged, reproducible=ANY)
    for name in ("PJRT_NPROC", "PARAXIS_NPROC"):  # as Paraxis has chosen it for 100 devices
        monkeypatch.setenv(name, "200")
    with pytest.raises(
        px.ParaxisError, match=r"XLA was to take 200, 2 for each simulated device; .* export PJRT_NPROC="
    ):
        px.train_step(plain_loss, reproducible=ANY)
    monkeypatch.setenv("PARAXIS_NPROC", "16")  # it was a parent's; 200 is the user's
    px.train_step(plain_loss, reproducible=ANY)
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.delenv("NPROC", raising=False)
    with pytest.raises(px.ParaxisError, match=r"before Python starts, write export PJRT_NPROC=\d+"):
        px.train_step(plain_loss, reproducible=ANY)
    assert "PJRT_NPROC" not in os.environ


PROGRAM = """
import os
import paraxis as px
px.train_step(lambda params, batch: batch, reproducible="any device count")
print(os.environ["PJRT_NPROC"])
"""


def test_threads_are_settled_if_devices_have_not_started() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC")}
    env["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 8


@pytest.mark.parametrize("make", [px.train_step, px.eval_step])
def test_groups_are_not_part_of_a_traced_function(make: Any) -> None:
    state = px.TrainState.create(plain_params(), optax.sgd(0.1))
    with pytest.raises(px.StateError, match=r"was called inside jax\.jit, .* Call it as it is"):
        jax.jit(make(plain_loss, axis=axis(2), reproducible=ANY))(state, rows(16))
    with pytest.raises(
        px.StateError, match=rf"is not one program.*write px\.explain\(px\.{make.__name__}\(loss_fn\)\)"
    ):
        px.explain(make(plain_loss, axis=axis(2), reproducible=ANY))(state, rows(16))
