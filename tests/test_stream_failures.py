"""No public face: the seconds between two savings, of which a test has none, and what a chunk's program sends.

An element that fails does not cost the others: it is named, or left out, to the numbers of NumPy without it.
"""

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from paraxis.streaming import _resume
from paraxis.streaming._program import Program
from tests._support import assert_close
from tests.test_stream_map import ROWS as X, Disk, executor

N = len(X)
BAD = [3, 17, 18]
IS_BAD = np.isin(np.arange(N), BAD)
W = jnp.array([0.5, -1.0, 2.0])
GOOD = X[~IS_BAD]
arrays = px.Groups.of_arrays


def distance(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(w - x) ** 2)


def checked(w: Any, x: Any, is_bad: Any) -> Any:
    return distance(w, eqx.error_if(x, is_bad, "this element is bad"))


@px.program(clients=N)
def loss(w, x):
    return px.reduce_mean(px.map_fn(distance, (px.broadcast(w), x)))


@px.program(clients=N)
def raising(w, x, is_bad):
    return px.reduce_mean(px.map_fn(checked, (px.broadcast(w), x, is_bad)))


@px.program(clients=N)
def spread(w, x, is_bad):
    """Several passes, extremes, a mean of some, rows; elements raise in the second pass only."""
    far = px.map_fn(distance, (px.broadcast(w), x))
    center = px.reduce_mean(far)
    each = px.map_fn(checked, (px.broadcast(center), x, is_bad))
    return px.reduce_max(each), px.reduce_mean(each, where=far > 1), px.reduce_sum((each - center) ** 2), each


def left_out(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, dict[int, str]]:
    """Run a stream that leaves out what fails, which a warning must tell."""
    stream = px.Stream(at_once=options.pop("at_once", 2), lost="mask", **options)
    with pytest.warns(UserWarning, match=f"of {N} .* are left out"):
        found = stream.run(fn, *args)
    return found, stream.lost


@pytest.mark.parametrize("size", [N, 32])
def test_a_chunks_program_sends_nothing(monkeypatch, size):
    texts, compiled = [], Program._compile

    def noted(self: Any, *key: Any, **options: Any) -> Any:
        run = compiled(self, *key, **options)
        return lambda *args: (texts.append(run.lower(*args).compile().as_text()), run(*args))[1]  # pyright: ignore

    monkeypatch.setattr(Program, "_compile", noted)
    x = np.ones((size, 3), np.float32)
    fn = px.program(clients=size)(
        lambda w, x: px.reduce_max(far := px.map_fn(distance, (px.broadcast(w), x))) + far.mean()
    )
    px.Stream(at_once=2).run(jax.value_and_grad(fn), W, arrays(x))
    assert len(texts) > 3
    assert not any(re.search("all-(reduce|gather)|reduce-scatter|collective|all-to-all", text) for text in texts)


def test_stream_names_the_element_that_raises_and_its_chunk():
    with pytest.raises(Exception, match="this element is bad") as raised:
        px.Stream(at_once=1).run(jax.grad(raising), W, arrays(X), arrays(IS_BAD))
    assert "raised by element 3 alone; elements 0 to 7 of clients" in raised.value.__notes__[-1]
    with pytest.raises(px.DataError, match="element 17 cannot be read: OSError: sector 17"):
        px.Stream(at_once=1).run(loss, W, px.Groups(Disk(unreadable=[17, 18])))


@pytest.mark.parametrize("at_once", [1, 3, N])
@pytest.mark.parametrize("source", ["raises", "unreadable", "map"])
def test_what_is_lost_is_left_out_of_value_and_gradient(source, at_once):
    if source == "raises":
        fn, args, options = raising, (arrays(X), arrays(IS_BAD)), {}
    else:
        fn, args, options = loss, (px.Groups(Disk(unreadable=BAD)),), {"map": map} if source == "map" else {}
    found, lost = left_out(jax.value_and_grad(fn), W, *args, at_once=at_once, **options)
    assert_close(found, jax.value_and_grad(lambda w: jnp.tanh(w - GOOD).__pow__(2).sum(1).mean())(W))
    assert sorted(lost) == BAD
    assert all(("sector" if source != "raises" else "this element is bad") in text for text in lost.values())


def test_what_is_lost_in_a_later_pass_is_left_out_of_those_before():
    (top, mean, total, each), lost = left_out(spread, W, arrays(X), arrays(IS_BAD))
    far = (np.tanh(W - GOOD) ** 2).sum(1)
    expected = (np.tanh(far.mean() - GOOD) ** 2).sum(1)
    assert_close((top, mean, total), (expected.max(), expected[far > 1].mean(), ((expected - far.mean()) ** 2).sum()))
    assert_close(each.compressed(), expected)
    assert each.mask.nonzero()[0].tolist() == sorted(lost) == BAD


def test_a_number_of_all_elements_is_refused_where_some_may_be_lost():
    for fn in (lambda x: px.reduce_sum(x) / N, lambda x: px.reduce_sum(x) / x.shape[0], jnp.mean):
        program = px.program(clients=N)(lambda x, fn=fn: fn(px.map_fn(jnp.sum, x)))
        with pytest.raises(px.AxisError, match=r"has|there is the number of all 30 elements.*px.reduce_mean"):
            px.Stream(at_once=2, lost="mask").run(program, arrays(X))
    with pytest.raises(Exception, match="this element is bad"):  # none is left
        px.Stream(at_once=2, lost="mask").run(raising, W, arrays(X), arrays(np.ones(N, bool)))


def test_a_run_that_resumes_keeps_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(_resume, "_EVERY", 0.0)
    args, seen = (spread, W, arrays(X), arrays(IS_BAD)), []
    expected, _ = left_out(*args, at_once=1)

    def stop(progress: Any) -> None:
        seen.append(progress)
        if len(seen) in (3, 6, 9):
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            px.Stream(at_once=1, lost="mask", checkpoint=tmp_path / "run", progress=stop).run(*args)
    found, lost = left_out(*args, at_once=1, checkpoint=tmp_path / "run")
    assert sorted(lost) == BAD
    assert [x.tobytes() for x in map(np.asarray, found)] == [x.tobytes() for x in map(np.asarray, expected)]


def test_an_engine_that_gives_up_loses_what_kills_its_workers_and_no_more():
    """As Dask does: an error in place of a task's result, and none of those after it."""

    def engine(fn: Callable[..., Any], tasks: Any) -> Any:
        for task in tasks:
            if 9 in task.chunk.numbers:
                raise RuntimeError("workers died")
            yield fn(task)

    found, lost = left_out(jax.grad(loss), W, arrays(X), map=engine)
    assert_close(found, jax.grad(lambda w: jnp.mean(jnp.sum(jnp.tanh(w - np.delete(X, 9, 0)) ** 2, 1)))(W))
    assert lost == {9: "RuntimeError: workers died"}


@pytest.mark.slow
def test_retrying_runs_again_what_a_worker_died_in_and_gives_up_on_what_kills_it(tmp_path):
    mapped, fn = px.retrying(executor, attempts=2), jax.grad(loss)
    expected = px.Stream(at_once=2, map=map).run(fn, W, px.Groups(Disk()))
    dies_once = px.Groups(Disk(kill=(9, 20), once=tmp_path / "mark"))
    assert (
        np.asarray(px.Stream(at_once=2, map=mapped).run(fn, W, dies_once)).tobytes() == np.asarray(expected).tobytes()
    )
    found, lost = left_out(fn, W, px.Groups(Disk(kill=(9,))), map=mapped)
    assert_close(found, jax.grad(lambda w: jnp.mean(jnp.sum(jnp.tanh(w - np.delete(X, 9, 0)) ** 2, 1)))(W))
    assert list(lost) == [9]
    assert "BrokenProcessPool" in lost[9]


def rows_of(x: Any) -> Any:
    return {"twice": 2 * x, "sum": x.sum()}


@pytest.mark.parametrize("lost", ["raise", "mask"])
def test_rows_are_handed_over_once_or_written(tmp_path, lost):
    handed: list[Any] = []
    stream = px.Stream(at_once=2, lost=lost, each=lambda numbers, rows: handed.append((numbers, rows)), out=tmp_path)
    found = stream.map(rows_of, X)
    assert np.concatenate([numbers for numbers, _ in handed]).tolist() == [*range(N)]
    for name, expected in {"twice": 2 * X, "sum": X.sum(1)}.items():
        assert_close(np.concatenate([rows[name] for _, rows in handed]), expected)
        assert isinstance(found[name], np.memmap)
        assert_close(np.load(tmp_path / f"{name}.npy"), expected)
    assert px.Stream(at_once=2, each=lambda *_: None).map(rows_of, X) == {"twice": None, "sum": None}


def test_rows_of_several_passes_and_orders_are_those_that_are_returned(tmp_path):
    lengths = np.arange(N) % 4 + 1
    ragged = px.Groups([X[:k] for k in lengths], lengths=lengths)

    @px.program(clients=N)
    def fn(d):
        sums = px.map_fn(lambda d: jnp.where(d.mask[:, None], d.data, 0).sum(), d)
        return sums, sums - px.reduce_max(sums)

    handed, expected = dict[int, Any](), px.Stream(at_once=1).run(fn, ragged)
    take = lambda numbers, rows: handed.update(zip(numbers.tolist(), zip(*rows, strict=True), strict=True))  # noqa: E731
    px.Stream(at_once=1, each=take).run(fn, ragged)
    assert_close(tuple(map(np.array, zip(*(handed[n] for n in range(N)), strict=True))), expected)
    assert_close(tuple(px.Stream(at_once=1, out=tmp_path).run(fn, ragged)), expected)


@pytest.mark.parametrize("derive", [lambda f: f, pytest.param(jax.grad, marks=pytest.mark.slow)], ids=["value", "grad"])
def test_ragged_solves_are_streamed_with_each_patients_own_times(derive):
    """Observation times are sorted, which diffrax checks by a callback; no row comes in another order."""
    rng = np.random.default_rng(0)
    times = [np.sort(rng.uniform(0.1, 2, k)).astype("float32") for k in np.arange(9) % 2 + 2]

    def solve(rate: Any, ts: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, rate: -rate * y)
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 3, 0.1, 1.0, rate, saveat=diffrax.SaveAt(ts=ts)).ys

    @px.program(patients=9)
    def total(rate, d):
        return px.reduce_sum(
            px.map_fn(lambda r, d: jnp.sum(jnp.where(d.mask, solve(r, d.data), 0)), (px.broadcast(rate), d))
        )

    ragged = px.Groups(times, lengths=[*map(len, times)])
    exact = derive(lambda rate: sum(jnp.exp(-rate * ts).sum() for ts in times))(1.0)
    assert_close(px.Stream(at_once=1).run(derive(total), 1.0, ragged), exact, rtol=1e-3)


def test_a_gradient_by_an_array_of_the_elements_says_to_give_groups():
    fn = px.program(clients=N)(lambda w, b, x: px.reduce_sum(px.map_fn(lambda b, x: (b * x).sum(), (b, x))))
    with pytest.raises(px.AxisError, match=r"px.Groups.of_arrays\(x\), and the gradient has a row for each element"):
        px.Stream(at_once=2).run(jax.grad(fn, 1), W, jnp.ones(N), arrays(X))
    assert_close(px.Stream(at_once=2).run(jax.grad(fn, 1), W, arrays(np.ones(N)), arrays(X)), X.sum(1))


def test_a_folder_is_for_one_run_and_what_killed_ones_left_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(_resume.files, "_PATIENCE", 1)
    run = lambda **options: px.Stream(at_once=1, checkpoint=tmp_path / "run", **options).run(loss, W, arrays(X))  # noqa: E731
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".paraxis-run.npz-0123").touch()
    refused = []

    def begin_another(_: Any) -> None:
        if not refused:
            with pytest.raises(BlockingIOError, match="another run saves there"):
                run()
            refused.append(True)

    found = run(progress=begin_another)
    assert refused
    assert_close(found, loss(W, X))
    assert not (tmp_path / "run").exists()


def kept_by(fn: Callable[[Any], Any]) -> Any:
    """Call what is made of a function; return a weak reference to an array that the function closes over."""
    big = np.ones(3, np.float32).view(type("Array", (np.ndarray,), {}))
    fn(lambda w, x: jnp.sum((w - x - np.asarray(big)) ** 2))
    return weakref.ref(big)


def mean_of(one: Any) -> Any:
    return px.program(clients=N)(lambda w, x: px.reduce_mean(px.map_fn(one, (px.broadcast(w), x))))


def trained(loss_of: Any) -> None:
    px.fit(px.TrainState.create(W, optax.sgd(0.1)), px.train_step(loss_of), [X[:8]], epochs=1, progress=False)


LETS_GO: dict[str, Callable[[Any], Any]] = {
    "a map": lambda one: px.map_fn(lambda x: one(W, x), X, px.Axis("clients", N)),
    "a program": lambda one: mean_of(one)(W, X),
    "a gradient under jit": lambda one: jax.jit(jax.grad(mean_of(one)))(W, X),
    "px.pmap": lambda one: px.pmap(one, in_axes=(None, 0))(W, X),
    "a stream": lambda one: px.Stream(at_once=2).run(mean_of(one), W, arrays(X)),
    "a stream elsewhere": lambda one: px.Stream(at_once=2, map=map).run(mean_of(one), W, arrays(X)),
    "px.explain": lambda one: px.explain(jax.jit(mean_of(one)))(W, X),
    "px.Jit": lambda one: px.Jit(mean_of(one))(W, X),
    "px.train_step": lambda one: trained(lambda params, batch: jnp.stack([one(params, x) for x in batch])),
    "an ensemble": lambda one: px.ensemble(lambda key, w: w, 2, 0, jnp.stack([W, W])).train(
        lambda w, x: (w, one(w, x)), X[0]
    ),
    "L-BFGS": lambda one: px.solve.LBFGS(lambda w: mean_of(one)(w, X), maxiter=3).run(W),
}


@pytest.mark.parametrize("name", LETS_GO)
def test_a_run_lets_go_of_its_function_and_what_that_closes_over(name):
    kept = kept_by(LETS_GO[name])
    if name not in ("a map", "a program"):  # of those, not even JAX keeps anything
        jax.clear_caches()
    gc.collect()
    assert kept() is None


def test_containers_whose_index_is_no_position_are_refused():
    pd, sparse = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    for odd in (pd.Series([1.0, 2.0], index=[1, 0]), pd.DataFrame({"a": [1.0]}), sparse.eye(3).tocsr(), np.ma.ones(3)):
        for take in (px.Groups, arrays, lambda x: px.loader({"x": x}, 1)):
            with pytest.raises(px.DataError, match=r"which (goes|is a sparse|leaves entries out)"):
                take(odd)
