"""Logistic regression on all devices and on one, against scikit-learn."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from threadpoolctl import threadpool_limits

Example = Callable[[str], ModuleType]

pytestmark = pytest.mark.slow


def clouds(module: ModuleType, num_rows: int = 1_003, num_features: int = 12) -> Any:
    """Ten classes that overlap, so that there is a solution without a penalty; rows that do not divide by 8."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, num_rows)
    x = rng.normal(size=(10, num_features))[y] / 2 + rng.normal(size=(num_rows, num_features))
    return module.Labelled(x.astype(np.float32), y.astype(np.int32))


def by_sklearn(x: np.ndarray, y: np.ndarray, C: float, **options: Any) -> np.ndarray:
    with threadpool_limits(1):
        model = LogisticRegression(C=C, fit_intercept=False, max_iter=5_000, **options).fit(x.astype(np.float64), y)
    return model.coef_.T


def mean_loss(coef: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    scores = np.exp(x.astype(np.float64) @ coef)
    return float(log_loss(y, scores / scores.sum(1, keepdims=True)))


def test_the_data_are_those_of_the_notebook(example: Example) -> None:
    x, y = example("sharded_logreg").classification(500)
    assert (x.shape, x.dtype, y.dtype) == ((500, 784), np.float32, np.int32)
    assert np.bincount(y).min() > 30
    assert len(np.bincount(y)) == 10
    # Of the columns beside the 50 that tell classes apart, some are made of these, and the others are noise.
    assert np.linalg.matrix_rank(x - x.mean(0)) < 500


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_loop_ends_at_scikit_learns_solution(example: Example, devices: int) -> None:
    module = example("sharded_logreg")
    data = clouds(module)
    run = module.minimise(module.on_devices(data, devices), 30)
    expected = by_sklearn(*data, C=np.inf, tol=1e-10)
    assert run.values[-1] == pytest.approx(mean_loss(expected, *data), rel=1e-6)
    # Without a penalty, the same may be added to the coefficients of every class.
    centred = [coef - coef.mean(1, keepdims=True) for coef in (np.asarray(run.params), expected)]
    np.testing.assert_allclose(*centred, atol=1e-3)


def test_a_step_is_compiled_once_and_communicates_one_gradient(example: Example) -> None:
    module = example("sharded_logreg")
    many, one = (module.minimise(module.on_devices(clouds(module), n), 5) for n in (8, 1))
    for run in (many, one):
        assert run.num_compiled == 1
        assert int(run.state.data_passes) <= 2 * 5 + 2
        assert (run.seconds > 0).all()
    assert many.communicated.count["all_reduce"] == many.communicated.total_count == 2
    assert many.communicated.total_bytes == 4 * (12 * 10 + 3)  # a gradient, and three numbers of a trial
    assert one.communicated.total_count == 0


def test_steps_down_end_where_the_error_is_small(example: Example) -> None:
    module = example("sharded_logreg")
    run = module.Run(np.ones(4), np.ones(4), np.array([1, 1e-3, 1e-6, 1e-4]), *[None] * 3, 1)
    assert run.num_down == 3
    assert run._replace(errors=np.ones(4)).num_down is None


def test_digits_are_fitted_as_well_as_by_scikit_learn(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("sharded_logreg")
    fits = module.compare_on_digits()
    printed = capsys.readouterr().out
    (x, y), (test_x, test_y) = module.digits()
    assert (x.shape, test_x.shape, x.dtype) == ((1437, 64), (360, 64), np.float64)
    assert not {row.tobytes() for row in x} & {row.tobytes() for row in test_x}

    expected = by_sklearn(x, y, C=1.0, solver="newton-cholesky", tol=1e-12)
    for name, atol in {
        "Paraxis on 8 devices": 1e-9,
        "Paraxis on 1 device": 1e-9,
        "Paraxis on 8 devices, float32": 1e-4,
    }.items():
        np.testing.assert_allclose(fits[name].coef, expected, rtol=0, atol=atol)
        assert int(fits[name].passes) <= 2 * fits[name].num_iterations + 10  # some at the start, and to confirm
        assert name in printed
    accuracy = np.mean((test_x @ expected).argmax(1) == test_y)
    assert printed.count(f"{accuracy:.4g}") >= 5

    least = mean_loss(expected, x, y) + np.sum(expected**2) / (2 * len(y))
    assert module.objective(expected, module.Labelled(x, y)) == pytest.approx(least, rel=1e-12)


def test_both_are_run_compared_and_drawn(example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    module, picture = example("sharded_logreg"), tmp_path / "plot.png"
    found = module.main(["--rows", "4000", "--iterations", "4", "--plot", str(picture)])
    printed = capsys.readouterr().out
    runs = found["runs"]
    assert sorted(runs) == [1, jax.device_count()]
    for run in runs.values():
        assert np.log(10) > run.values[0] > run.values[-1]  # guessing has log 10
    ratio = np.mean(runs[1].seconds[1:] / runs[8].seconds[1:])
    assert f"average step-time ratio, 1 device to 8: {ratio:.2f}" in printed
    assert "share one CPU" in printed
    assert "2 all_reduce (31,372 bytes)" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_plots_show_error_and_time_of_each_step(example: Example) -> None:
    module = example("sharded_logreg")
    errors, seconds = np.geomspace(1, 1e-4, 5), np.array([9, 1, 2, 3, 4])
    run = module.Run(seconds, errors, errors, *[None] * 3, 1)
    left, right = module.draw({8: run, 1: run}, "title").axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["8 devices", "1 device"]
    for axes, shown in ((left, errors), (right, 1000 * seconds[1:])):  # the first step compiles
        assert len(axes.lines) == 2
        for line in axes.lines:
            np.testing.assert_allclose(line.get_ydata(), shown)
            assert line.get_xdata()[-1] == 5
    assert left.get_yscale() == "log"


def test_one_step_has_no_average(example: Example) -> None:
    with pytest.raises(SystemExit, match=r"--iterations must be at least 2"):
        example("sharded_logreg").main(["--iterations", "1"])
