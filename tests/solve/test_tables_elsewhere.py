"""No public face: how often CSV files are opened. Rows on disk that other processes read are fitted as in memory."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sklearn.linear_model
from jax.sharding import Mesh

import paraxis as px
from paraxis._tables import _csv
from paraxis.solve import Status, objective
from tests.solve._sources import Counting, Deadly

AT_ONCE = 20  # of the fixtures `pool` and `ray`
N, D = 203, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(N, D)) * [1, 3, 0.2, 1] + [0, 1, 5, 0]
Z = (X - X.mean(0)) / X.std(0) @ [1.0, -2.0, 0.5, 0.0] + rng.normal(size=N)
COUNTS = rng.poisson(np.exp(Z / 3))
WEIGHT = rng.integers(0, 3, N).astype(float)


def npy(folder: Path, y: np.ndarray) -> px.Table:
    for part, rows in enumerate((slice(0, 71), slice(71, N))):
        np.save(folder / f"X-{part}.npy", X[rows])
        np.save(folder / f"y-{part}.npy", y[rows])
    return px.Table.npy(folder, dtype="float64")


def parquet(folder: Path, y: np.ndarray) -> px.Table:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part, rows in enumerate((slice(0, 71), slice(71, N))):
        columns = {f"x{at}": X[rows, at] for at in range(D)} | {"y": y[rows]}
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=33)
    return px.Table.parquet(folder, target="y")


def csv(folder: Path, y: np.ndarray) -> px.Table:
    pytest.importorskip("pyarrow.csv")
    lines = [",".join(map(repr, [*row.tolist(), target])) for row, target in zip(X, y.tolist(), strict=True)]
    (folder / "rows.csv").write_text("\n".join(["a,b,c,d,y", *lines]) + "\n")
    return px.Table.csv(folder, target="y")


TABLES = {
    "npy": npy,
    "parquet": parquet,
    "csv": csv,
    "arrays": lambda folder, y: px.Table.of_arrays(X, y),
    "own, from its beginning": lambda folder, y: px.Table(Counting(X, y)),
    "own": lambda folder, y: px.Table(Deadly(X, y, folder)),
}

RIDGE = px.solve.Ridge(2.0), sklearn.linear_model.Ridge(2.0), Z
CLASSES = (
    px.solve.LogisticRegression(0.5),
    sklearn.linear_model.LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-12, max_iter=1000),
    np.where(Z > 0, "yes", "no"),
)
COUNTED = (
    px.solve.PoissonRegressor(0.1, solver="newton-cg"),
    sklearn.linear_model.PoissonRegressor(alpha=0.1, solver="newton-cholesky", tol=1e-12, max_iter=1000),
    COUNTS,
)
LASSO = px.solve.Lasso(0.2), sklearn.linear_model.Lasso(0.2, tol=1e-12), Z

CASES = [
    ("npy", RIDGE),
    ("parquet", CLASSES),
    ("csv", RIDGE),
    ("arrays", COUNTED),
    ("own, from its beginning", LASSO),
    ("own", LASSO),
]
DAILY = ("parquet", "own, from its beginning")


def finds_the_same(engine: Any, table: px.Table, case: Any) -> Any:
    ours, theirs, y = (sklearn.base.clone(x) if hasattr(x, "fit") else x for x in case)
    ours.fit(table, sample_weight=WEIGHT, engine=engine)
    theirs.fit(X, y, WEIGHT)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-5)
    assert ours.status_ == Status.CONVERGED.words
    return ours


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "case"), [pytest.param(*c, marks=() if c[0] in DAILY else pytest.mark.slow) for c in CASES]
)
def test_processes_find_what_scikit_learn_finds_in_memory(pool, tmp_path, kind, case):
    finds_the_same(pool, TABLES[kind](tmp_path, case[2]), case)


@pytest.mark.parametrize(
    ("kind", "case"), [pytest.param(*c, marks=() if c[0] == "npy" else pytest.mark.slow) for c in CASES]
)
def test_a_cluster_finds_what_scikit_learn_finds_in_memory(ray, tmp_path, kind, case):
    finds_the_same(ray, TABLES[kind](tmp_path, case[2]), case)


def test_the_rows_are_read_by_the_processes_and_passes_are_as_many_as_on_this_machine(pool, tmp_path):
    found = finds_the_same(pool, px.Table(Deadly(X, Z, tmp_path)), RIDGE)
    here = sklearn.base.clone(RIDGE[0]).fit(
        px.Table.of_arrays(X, Z), sample_weight=WEIGHT, engine=px.Stream(at_once=20)
    )
    assert found.data_passes_ == here.data_passes_
    assert len(list(tmp_path.glob("*.read"))) == 2
    starts = [int(line) for log in tmp_path.glob("*.read") for line in log.read_text().split()]
    length = min(start for start in starts if start)
    passes = found.data_passes_ - 1  # the one for the targets is this process's
    assert sorted(starts) == sorted([*range(0, N, length)] * passes)


def test_of_csv_files_this_process_reads_the_first_pass_alone(pool, tmp_path, monkeypatch):
    reads, pieces = [], _csv.pieces
    monkeypatch.setattr(_csv, "pieces", lambda path, mark, start: (reads.append(start), pieces(path, mark, start))[1])
    found = finds_the_same(pool, csv(tmp_path, Z), RIDGE)
    assert reads == [0, 0, 0]  # to count the rows; for targets and means; and the first block, for its shape
    assert found.data_passes_ > 2


@pytest.mark.parametrize(("devices", "at_once"), [(1, 29), (3, 10)])
def test_value_and_gradient_do_not_depend_on_blocks_and_devices(devices, at_once):
    rng = np.random.default_rng(2)
    axis = px.Axis("rows", N, mesh=Mesh(np.array(jax.devices()[:devices]), ("rows",)))
    y = np.digitize(Z, [-1, 1])
    fun = objective.glm("softmax", intercept=True, l2=True)
    params = rng.normal(size=(D, 3)).astype("float32"), np.zeros(3, "float32")
    x = X.astype("float32")
    with px.Pool(at_once=at_once, workers=1) as pool:
        data = px.solve.rows(px.Table.of_arrays(x, y), sample_weight=WEIGHT, engine=pool, axis=axis)
        here, gradient = fun(params, 0.1, data), px.solve.LBFGS(fun).optimality_fun(params, 0.1, data)
    there = x, y, WEIGHT.astype("float32")
    np.testing.assert_allclose(here, fun(params, 0.1, there), rtol=1e-6)
    for ours, theirs in zip(gradient, jax.grad(fun)(params, 0.1, there), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def fitted(table: px.Table, workers: int, **options: Any) -> list[bytes]:
    with px.Pool(at_once=13, workers=workers) as pool:
        model = px.solve.LogisticRegression(devices=1, **options).fit(table, engine=pool)
    return [model.coef_.tobytes(), model.intercept_.tobytes()]


def test_bits_depend_neither_on_the_number_of_processes_nor_on_one_that_is_lost(tmp_path):
    alone = fitted(px.Table.of_arrays(X, Z > 0), 1)
    assert fitted(px.Table(Deadly(X, Z > 0, tmp_path, 100)), 3) == alone
    assert (tmp_path / "mark").exists()


def test_rows_that_end_every_process_are_named(pool, tmp_path):
    table = px.Table(Deadly(X, Z, tmp_path, 100, once=False))
    told = r"Pool: rows \d+ to 1\d\d of the table ended each process that ran it, 3 of them: it was killed by SIGKILL"
    with pytest.raises(px.DataError, match=told):
        px.solve.Ridge(devices=1).fit(table, engine=pool)


def test_a_file_that_changes_between_two_passes_is_named(pool, tmp_path):
    def change(one: Any) -> None:
        np.save(tmp_path / "X-1.npy", X[71:190])

    with pytest.raises(
        px.DataError, match=r"^Table\.npy: '.*X-1\.npy' has changed since it was looked at first.*complete$"
    ):
        px.solve.LogisticRegression(devices=1, verbose=change).fit(npy(tmp_path, Z > 0), engine=pool)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_source_that_gives_other_rows_than_it_had_is_told(pool, change):
    class Other(Counting):
        def blocks(self, size):
            self._X, self._y = (np.resize(a, (N + change * bool(self.passes), *a.shape[1:])) for a in (X, Z))
            found = list(super().blocks(size))
            self._X = X
            return iter(found)

    with pytest.raises(px.DataError, match=rf"gave {'more than 203' if change > 0 else 202} rows, and had 203 when it"):
        px.solve.Ridge(devices=1).fit(px.Table(Other(X, Z)), engine=pool)


class Stopped(Exception):  # noqa: N818  it is no error
    pass


def test_a_fit_goes_on_from_where_it_was_stopped(tmp_path):
    def fit(folder: Path | None, seen: list[int], stop: int | None = None) -> list[bytes]:
        def watch(one: px.solve.Iteration) -> None:
            seen.append(one.iter_num)
            if len(seen) == stop:
                raise Stopped

        saving = {} if folder is None else {"folder": folder, "save_every": 0}
        with px.Pool(at_once=50, workers=1, **saving) as pool:
            model = px.solve.LogisticRegression(devices=1, verbose=watch)
            return [model.fit(px.Table.of_arrays(X, Z > 0), engine=pool).coef_.tobytes()]

    whole: list[int] = []
    expected = fit(None, whole)
    seen: list[int] = []
    with pytest.raises(Stopped):
        fit(tmp_path / "run", seen, 2)
    assert (tmp_path / "run").exists()
    assert fit(tmp_path / "run", seen) == expected
    assert seen == whole
    assert not (tmp_path / "run").exists()


def test_progress_is_told_in_rows_and_options_that_tables_do_not_have_are_refused():
    told: list[px.engines.Progress] = []
    with px.Pool(at_once=13, workers=1, verbose=told.append) as pool:
        model = px.solve.Ridge(devices=1).fit(px.Table.of_arrays(X, Z), engine=pool)
        predicted = model.predict(px.Table.of_arrays(X, Z), engine=pool)
    np.testing.assert_allclose(predicted, model.predict(X), rtol=1e-12)
    assert {(one.axis, one.elements) for one in told} == {("rows", N)}
    assert {one.pass_number for one in told} == {*range(1, model.data_passes_ + 1)}
    assert [one.done for one in told if one.pass_number == 2][-1] == N
    with pytest.raises(ValueError, match=r"Pool: keep is not for a px\.Table, got keep='disk'.* write px\.Pool\(at_on"):
        px.solve.Ridge().fit(px.Table.of_arrays(X, Z), engine=px.Pool(at_once=20, keep="disk"))
