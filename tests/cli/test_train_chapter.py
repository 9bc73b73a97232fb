"""No public face: the demo prints a summary of its training run, not the state that is compared here.

It is stopped and gone on with, on any number of devices, against a plain loop.
"""

import functools
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

from paraxis.cli.demo._digits import Digits, Labelled, load_digits
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.train import _display, _model, _running
from paraxis.train import Event
from tests.cli.test_command_line import run

pytestmark = pytest.mark.slow


@functools.cache
def some_digits() -> Digits:
    train, held_out = load_digits(3)
    return Digits(Labelled(*(x[:450] for x in train)), Labelled(*(x[:120] for x in held_out)))


@functools.cache
def trainer(devices: int) -> _running.Trainer:
    options = Options(1, 2, 1, 2, 2, devices, 3, Path())
    return _running.Trainer(some_digits(), options, jax.devices()[:devices])


@functools.cache
def whole(devices: int) -> _running.Run:
    return trainer(devices).run(lambda event: None)


def stopped(devices: int, saved: Path) -> _running.Run:
    return trainer(devices).run(lambda event: None, checkpoint=saved, stop_after=3)


@functools.cache
def by_hand() -> _model.Params:
    """Two epochs of five batches, the last one of 50 rows, by JAX alone."""
    made, drawn = jax.random.split(jax.random.key(3))
    params = _model.make(made)
    velocity = jax.tree.map(jnp.zeros_like, params)
    data = _running.loader(some_digits().train._asdict(), _running.BATCH, seed=3)

    @jax.jit
    def gradient(params: _model.Params, images: jax.Array, labels: jax.Array, key: jax.Array) -> _model.Params:
        def mean_loss(params: _model.Params) -> jax.Array:
            x = jax.nn.gelu(images.reshape(len(images), 784) @ params["hidden"] + params["hidden_bias"])
            x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
            scores = jax.nn.log_softmax(x @ params["dense"] + params["dense_bias"])
            return -jnp.mean(scores[jnp.arange(len(labels)), labels])

        return jax.grad(mean_loss)(params)

    for number in range(10):
        images, labels = (jnp.asarray(x[data.rows(number)]) for x in some_digits().train)
        found = gradient(params, images, labels, jax.random.fold_in(drawn, number))
        rate = 0.1 * 0.5 * (1 + np.cos(np.pi * number / 10))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, found)
        params = jax.tree.map(lambda p, v, rate=rate: p - rate * v, params, velocity)
    return params


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_a_run_is_descent_with_momentum_on_any_devices(devices: int) -> None:
    found = whole(devices)
    assert (found.num_steps, found.is_stopped) == (10, False)
    for name, expected in by_hand().items():
        np.testing.assert_allclose(found.state.params[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    devices: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cut = stopped(devices, tmp_path / "run")
    assert cut.is_stopped
    assert 3 <= cut.num_steps < 10
    assert f"SIGTERM: stopped after step {cut.num_steps}" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before

    events: list[Event] = []
    rest = trainer(devices).run(events.append, checkpoint=tmp_path / "run")
    assert [event.step for event in events if event.kind == "step"] == list(range(cut.num_steps + 1, 11))
    expected = whole(devices)
    for got, wanted in zip(jax.tree.leaves(rest.state.params), jax.tree.leaves(expected.state.params), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()
    assert rest.history == expected.history


def test_differences_are_counted() -> None:
    one = whole(8).state
    assert _running.num_differing(one, one) == (0, len(jax.tree.leaves(one)))
    params = one.params | {"dense_bias": one.params["dense_bias"].at[3].add(0.5)}
    assert _running.num_differing(one, one.replace(params=params))[0] == 1
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(one.params))
    assert _running.largest_difference(one, one.replace(params=params)) == (pytest.approx(0.5), pytest.approx(largest))


def test_scores_are_scikit_learns() -> None:
    found, (_, held_out) = whole(8), some_digits()
    params = jax.tree.map(np.asarray, found.state.params)
    hidden = np.asarray(jax.nn.gelu(held_out.images.reshape(-1, 784) @ params["hidden"] + params["hidden_bias"]))
    scores = np.exp(hidden @ params["dense"] + params["dense_bias"])
    last = found.history.evaluations[-1].metrics
    assert last["held-out/accuracy"] == pytest.approx(accuracy_score(held_out.labels, scores.argmax(1)))
    expected = log_loss(held_out.labels, scores / scores.sum(1, keepdims=True), labels=range(10))
    assert last["held-out/loss"] == pytest.approx(expected, rel=1e-4)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    _display.draw_plot(whole(8), stopped(8, tmp_path / "run"), whole(8), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_is_stopped_goes_on_compares_and_reports(tmp_path: Path) -> None:
    before = "import sys\nsys.modules['flax'] = None\n"
    arguments = ("--quick", "--devices", "3", "--out", str(tmp_path))
    done = run("demo", "train", *arguments, before=before, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    (said,) = done.stderr.splitlines()
    assert "SIGTERM: stopped after step" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.png"]
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")

    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in done.stdout.splitlines() if "│" in line]
    table = dict(rows)
    assert table["devices"] == "3 × cpu (simulated)"
    assert table["steps"] == "80 of 100 digits"
    assert table["arrays that differ"].startswith("none of ")
    assert table["losses that differ"] == "none of 80"
    # 784·128 + 128 + 128·10 + 10 parameters, and a few numbers, of four bytes each.
    assert 407_080 <= int(table["communicated per step"].split("(")[1].split()[0].replace(",", "")) < 407_200
    assert float(table["resumed on 1 device"].split()[2]) < 1e-4
    assert float(table["held-out accuracy"].rstrip("%")) > 85
