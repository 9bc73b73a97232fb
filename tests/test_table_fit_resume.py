"""A run over rows on disk that is saved goes on after it was stopped, to the same bits; options of its stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paraxis as px
from tests._support import bits

rng = np.random.default_rng(0)
X = rng.normal(size=(203, 4)) * [1, 3, 0.2, 1]
Z = X @ [1.0, -0.7, 2.0, 0.0] + rng.normal(size=203)
CLASSES = np.digitize(Z, [-1, 1])


class Stopped(Exception):  # noqa: N818  it is no error
    pass


def table(y: np.ndarray = CLASSES, x: np.ndarray = X) -> px.Table:
    return px.Table.of_arrays(x, y)


def engine(folder: Path | None, at_once: int = 5, **options: Any) -> px.Stream:
    return px.Stream(at_once=at_once, checkpoint=folder, **options)


def stopped_after(
    count: int, seen: list[int], error: type[BaseException] = Stopped
) -> Callable[[px.solve.Iteration], None]:
    last = len(seen) + count

    def watch(one: px.solve.Iteration) -> None:
        seen.append(one.iter_num)
        if len(seen) == last:
            raise error

    return watch


def lasso(watch: Any, where: px.Stream) -> px.solve.Lasso:
    x = np.random.default_rng(1).normal(size=(40, 160))
    y = x[:, :20] @ np.linspace(-2, 2, 20) + np.random.default_rng(2).normal(size=40)
    return px.solve.Lasso(0.005, devices=1, verbose=watch).fit(table(y, x), engine=where)


def sparse_logistic(watch: Any, where: px.Stream) -> px.solve.LogisticRegression:
    model = px.solve.LogisticRegression(0.5, l1_ratio=1.0, tol=1e-8, devices=1, verbose=watch)
    return model.fit(table(CLASSES > 0), engine=where)


def logistic(watch: Any, where: px.Stream) -> px.solve.LogisticRegression:
    return px.solve.LogisticRegression(devices=1, verbose=watch).fit(table(CLASSES > 0), engine=where)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt], ids=["an exception", "Ctrl-C"])
@pytest.mark.parametrize("fit", [logistic, lasso, sparse_logistic], ids=["logistic", "lasso", "L1"])
def test_table_fit_goes_on_from_where_it_was_stopped(tmp_path, fit, error):
    whole: list[int] = []
    expected = fit(lambda one: whole.append(one.iter_num), engine(None))
    seen: list[int] = []
    with pytest.raises(error):
        fit(stopped_after(1, seen, error), engine(tmp_path / "run"))
    assert (tmp_path / "run").exists()
    found = fit(lambda one: seen.append(one.iter_num), engine(tmp_path / "run"))
    assert seen == whole != []
    assert bits((found.coef_, found.intercept_)) == bits((expected.coef_, expected.intercept_))
    assert found.data_passes_ < expected.data_passes_
    assert not (tmp_path / "run").exists()


def test_table_fit_refuses_a_folder_with_another_run_and_leaves_it(tmp_path):
    folder = tmp_path / "run"

    def fit(alpha: float = 1.0, y: np.ndarray = Z, at_once: int = 5, watch: Any = 0) -> None:
        px.solve.Ridge(alpha, verbose=watch, tol=1e-9).fit(table(y), engine=engine(folder, at_once))

    with pytest.raises(Stopped):
        fit(watch=stopped_after(1, []))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    seen = stopped_after(100, [])
    others: tuple[dict[str, Any], ...] = ({"alpha": 2.0}, {"y": Z + X[:, 0]}, {"at_once": 7})
    for other in others:
        with pytest.raises(px.CheckpointError, match=r"another run, .*; give this one another folder, or"):
            fit(**other, watch=seen)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    fit(watch=seen)
    assert not folder.exists()


def test_table_fit_takes_each_option_of_an_engine_or_refuses_it_by_name():
    seen: list[px.streaming.Progress] = []
    rows = table(Z)
    model = px.solve.Ridge(tol=1e-9).fit(rows, engine=engine(None, progress=seen.append))
    told = [(one.axis, one.pass_number, one.done, one.elements, one.passes) for one in seen]
    assert told[:6] == [("rows", 1, done, 203, None) for done in (40, 80, 120, 160, 200, 203)]
    assert len(told) == 6 * model.data_passes_
    seen.clear()
    fun = px.solve.objective.glm("logistic", l2=True)
    data = px.solve.rows(table(Z > 0), engine=engine(None, progress=seen.append))
    px.solve.LBFGS(fun, precondition=None, tol=1e-6).run(fun.init(X.shape[1]), 1e-3, data)
    assert seen[0].passes is None  # no error is known yet
    assert abs((seen[-1].passes or 0) - seen[-1].pass_number) <= 2  # how many it expects is near the truth in the end
    assert all(one.passes is None or one.passes >= one.pass_number for one in seen)
    with pytest.raises(ValueError, match=r"map is not for a px\.Table"):
        px.solve.Ridge().fit(rows, engine=px.Stream(at_once=5, map=map))
