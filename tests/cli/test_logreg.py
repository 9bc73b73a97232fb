"""No public face: the demo prints a summary of its logistic regression, not the solution that is compared here.

On any number of devices, it is held against scikit-learn's own.
"""

import functools
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from threadpoolctl import threadpool_limits

from paraxis.cli.demo.logreg import _digits, _display, _fitting
from tests.cli.test_command_line import run

pytestmark = pytest.mark.slow


@functools.cache
def some_digits() -> _digits.Digits:
    return _digits.load(3)


@functools.cache
def expected() -> np.ndarray:
    train = some_digits().train
    with threadpool_limits(1):
        model = LogisticRegression(fit_intercept=False, solver="newton-cholesky", tol=1e-12).fit(*train)
    return model.coef_.T


@functools.cache
def fitted(devices: int) -> _fitting.Run:
    return _fitting.fit(some_digits().train, jax.devices()[:devices], lambda *now: None)


def mean_loss(coef: np.ndarray, digits: _digits.Labelled) -> float:
    scores = np.exp(digits.pixels @ coef)
    return float(log_loss(digits.labels, scores / scores.sum(1, keepdims=True)))


def test_held_out_digits_are_not_fitted_and_the_seed_chooses_them() -> None:
    train, held_out = some_digits()
    assert (train.pixels.shape, held_out.pixels.shape) == ((1437, 64), (360, 64))
    assert (train.pixels.min(), train.pixels.max()) == (0, 1)
    assert set(train.labels) == set(held_out.labels) == set(range(10))
    assert not {row.tobytes() for row in train.pixels} & {row.tobytes() for row in held_out.pixels}
    assert not np.array_equal(held_out.labels, _digits.load(4).held_out.labels)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_solution_is_scikit_learns_on_any_devices(devices: int) -> None:
    found = fitted(devices)
    np.testing.assert_allclose(found.coef, expected(), rtol=0, atol=2e-4)
    assert "as small as tol asks" in found.reason
    difference = _fitting.largest_difference(found, fitted(1))
    assert difference == pytest.approx(np.abs(found.coef - fitted(1).coef).max())
    assert difference < 2e-4


def test_every_step_is_shown_timed_and_kept() -> None:
    seen: list[tuple[int, float, float]] = []
    found = _fitting.fit(some_digits().train, jax.devices()[:2], lambda *now: seen.append(now))
    assert [number for number, *_ in seen] == list(range(1, found.num_steps + 1))
    assert len(found.seconds) == len(found.path) == len(found.passes_so_far) == found.num_steps
    assert found.seconds_per_step == np.median(found.seconds[1:])
    # Two passes a step; the start, and a trial that had to be repeated.
    assert found.passes_so_far[-1] <= 2 * found.num_steps + 5
    for (_, shown, _), coef in zip(seen, found.path, strict=True):
        assert shown == pytest.approx(_fitting.value(coef, some_digits().train), rel=1e-5)


def test_a_step_communicates_one_gradient_and_three_numbers() -> None:
    many, one = fitted(8).communicated, fitted(1).communicated
    assert many is not None
    assert one is not None
    assert many.count["all_reduce"] == many.total_count == 2
    assert many.total_bytes == 4 * (64 * 10 + 3)
    assert one.total_count == 0


def test_objective_and_accuracy_are_scikit_learns() -> None:
    train, held_out = some_digits()
    least = mean_loss(expected(), train) + np.sum(expected() ** 2) / (2 * len(train.labels))
    assert _fitting.value(expected(), train) == pytest.approx(least, rel=1e-12)
    right = accuracy_score(held_out.labels, (held_out.pixels @ expected()).argmax(1))
    assert _fitting.accuracy(expected(), held_out) == pytest.approx(right)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    usual, exact = _fitting.Fit(expected() + 1e-3, 1, "2"), _fitting.Fit(expected(), 1, "2")
    _display.draw_plot(fitted(1), usual, exact, some_digits().train, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_on_one_device_nothing_is_compared_with_itself() -> None:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(_display.summary_table(fitted(1), fitted(1), jax.devices()[:1], 1437))
    printed = captured.get()
    assert "none: this was one device" in printed
    assert "no communication" in printed
    assert "on one device" not in printed


def test_the_demo_fits_compares_plots_and_reports(tmp_path: Path) -> None:
    before = "import sys\nfor name in ('flax', 'optax', 'mlxtend'): sys.modules[name] = None\n"
    done = run("demo", "logreg", "--quick", "--devices", "3", "--out", str(tmp_path), before=before)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["logreg.png"]
    assert (tmp_path / "logreg.png").read_bytes().startswith(b"\x89PNG")

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    table = dict(row for row in rows if len(row) == 2)
    assert table["devices"] == "3 × cpu (simulated)"
    assert table["communicated per step"] == "2 all_reduce (2,572 bytes)"
    assert float(table["largest difference"].split()[0]) < 2e-4
    by = {row[0]: row[1:] for row in rows if len(row) == 6}
    assert sorted(by) == ["Paraxis, 1 device", "Paraxis, 3 devices", "scikit-learn, default", "scikit-learn, exact"]
    for name in ("Paraxis, 1 device", "Paraxis, 3 devices"):
        assert abs(float(by[name][2])) < 1e-8
        assert float(by[name][3]) < 2e-4
        assert float(by[name][4].rstrip("%")) > 95
    assert "step  10  objective" in done.stdout
