"""No public face: the demo prints a summary of its ensemble, not the members that are compared here.

They are held against a network written by hand, members trained one by one, and scores by NumPy.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.cli.demo._digits import Labelled
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.ensemble import _display, _model, _scoring, _training
from tests._support import assert_close
from tests.cli.test_command_line import run

pytestmark = pytest.mark.slow

OPTIONS = Options(1, 2, 1, members=5, epochs=2, devices=None, seed=3, out=Path())


def some_digits(n: int = 120) -> Labelled:
    rng = np.random.default_rng(0)
    return Labelled(rng.uniform(size=(n, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, n).astype(np.int32))


@functools.cache
def trained(devices: int, seed: int = 3) -> _training.Run:
    options = dataclasses.replace(OPTIONS, seed=seed)
    return _training.train(some_digits(), options, jax.devices()[:devices], lambda epoch: None)


def logits(params: Any, images: Any) -> jax.Array:
    hidden = jax.nn.gelu(images.reshape(len(images), 784) @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["dense"] + params["dense_bias"]


def test_a_step_is_momentum_on_the_cross_entropy() -> None:
    digits = some_digits(20)
    params, velocity = _model.make(jax.random.key(0))
    velocity = jax.tree.map(lambda p: 0.1 * jnp.ones_like(p), velocity)

    def cross_entropy(params: Any) -> jax.Array:
        scores = logits(params, digits.images)
        return jnp.mean(jax.nn.logsumexp(scores, axis=1) - jnp.sum(scores * jax.nn.one_hot(digits.labels, 10), axis=1))

    value, gradient = jax.value_and_grad(cross_entropy)(params)
    after = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
    expected = (jax.tree.map(lambda p, v: p - 0.05 * v, params, after), after), value
    assert_close(_model.step(params, velocity, jnp.asarray(digits.images), jnp.asarray(digits.labels)), expected)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_the_members_are_those_of_one_device(devices: int) -> None:
    one, many = (jax.tree.map(np.asarray, trained(n).ensemble.stacked()) for n in (1, devices))
    assert_close(many, one, rtol=1e-4, atol=1e-5)
    difference, largest = _training.largest_difference(trained(devices), trained(1))
    pairs = zip(jax.tree.leaves(many[0]), jax.tree.leaves(one[0]), strict=True)
    assert difference == pytest.approx(max(float(np.abs(a - b).max()) for a, b in pairs))
    assert largest == pytest.approx(max(float(np.abs(a).max()) for a in jax.tree.leaves(one[0])))


def test_another_seed_trains_other_members() -> None:
    assert _training.largest_difference(trained(1), trained(1, seed=4))[0] > 0.1


def test_every_epoch_is_shown_and_timed() -> None:
    seen: list[int] = []
    run = _training.train(some_digits(), OPTIONS, jax.devices()[:2], lambda epoch: seen.append(epoch.number))
    assert seen == [0, 1]
    assert len(run.seconds) == 2
    assert run.seconds_per_epoch == run.seconds[1]


def test_scores_are_the_mean_of_the_members_and_of_their_average() -> None:
    digits, ens = some_digits(100), trained(2).ensemble
    scored = _scoring.score(ens, digits)
    p = np.asarray(jax.nn.softmax(jnp.stack([logits(params, digits.images) for params, _ in ens])), np.float64)
    rows, average = np.arange(100), p.mean(0)
    assert scored.member.accuracy == pytest.approx(np.mean(p.argmax(-1) == digits.labels), abs=1e-6)
    assert scored.ensemble.accuracy == pytest.approx(np.mean(average.argmax(-1) == digits.labels), abs=1e-6)
    assert scored.member.nll == pytest.approx(-np.log(p[:, rows, digits.labels]).mean(), rel=1e-4)
    assert scored.ensemble.nll == pytest.approx(-np.log(average[rows, digits.labels]).mean(), rel=1e-4)
    votes = p.argmax(-1)
    pairs = [np.mean(votes[a] != votes[b]) for a in range(5) for b in range(a)]
    assert scored.disagreement == pytest.approx(np.mean(pairs), abs=1e-6)
    assert np.sum(scored.member_reliability.num_rows) == 500
    assert np.sum(scored.ensemble_reliability.num_rows) == 100


def test_digits_are_turned_about_the_middle() -> None:
    digits = some_digits(3)
    turned = _scoring.rotated(digits, 90)
    np.testing.assert_allclose(turned.images, np.rot90(digits.images, axes=(1, 2)), atol=1e-5)
    np.testing.assert_array_equal(turned.labels, digits.labels)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    scored = {name: _scoring.score(trained(1).ensemble, some_digits(50)) for name in ("plain", "turned")}
    _display.draw_plot(scored, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_trains_an_ensemble_plots_and_reports(tmp_path: Path) -> None:
    before = "import sys\nfor name in ('flax', 'optax'): sys.modules[name] = None\n"
    options = ("--quick", "--members", "5", "--devices", "3", "--out", str(tmp_path))
    done = run("demo", "ensemble", *options, before=before, COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["ensemble.png"]
    assert (tmp_path / "ensemble.png").read_bytes().startswith(b"\x89PNG")

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    table = dict(row for row in rows if len(row) == 2)
    assert table["devices"] == "3 × cpu (simulated)"
    assert (table["members"], table["epochs"]) == ("5", "2")
    assert float(table["largest difference"].split()[0]) < 1e-4
    scores = {(row[0], row[1]): [float(cell.rstrip("%")) for cell in row[2:6]] for row in rows if len(row) == 7}
    assert sorted(scores) == [(name, who) for name in ("plain", "rotated 30°") for who in ("all", "one")]
    for name in ("plain", "rotated 30°"):
        one, all_members = scores[name, "one"], scores[name, "all"]
        assert all_members[1] <= one[1]  # the likelihood of an average is no worse than the members' on average
    assert scores["plain", "all"][0] > 80
