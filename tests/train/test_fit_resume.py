"""A run that was broken off anywhere, and started again, is the run that was not."""

import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from paraxis.train import Fitted
from tests.train._fits import ONE, arrays, batches, bits, data, evaluate_step, lines, start, step


class BrokenOffError(Exception):
    pass


def break_at(number: int) -> Any:
    def at(event: px.train.Event) -> None:
        if event.kind == "step" and event.step == number:
            raise BrokenOffError

    return at


def run(directory: Path, source: Any = None, every: int | None = 2, **options: Any) -> Fitted:
    """Twelve steps, three epochs, with everything that has a state of its own."""
    options = {"steps": 12, "progress": False, "log": directory / "log.jsonl"} | options
    return px.fit(
        start(),
        step,
        data() if source is None else source,
        evaluate=px.Evaluate(evaluate_step, [arrays()], every=5),
        checkpoint=px.Checkpoints(directory / "checkpoints", every=every),
        stop_early=px.train.StopEarly("test/loss", patience=50),
        **options,
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fitted, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("unbroken")
    return run(directory), lines(directory / "log.jsonl")


def assert_same(found: Fitted, directory: Path, unbroken: tuple[Fitted, list[dict[str, Any]]]) -> None:
    expected, log = unbroken
    assert bits(found.state) == bits(expected.state)
    assert found.history == expected.history
    assert found.best == expected.best
    assert lines(directory / "log.jsonl") == log


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(1, 13))
def test_broken_off_at_any_step_it_comes_to_the_same_bits(number: int, tmp_path: Path, unbroken: Any) -> None:
    with pytest.raises(BrokenOffError):
        run(tmp_path, callbacks=break_at(number))
    assert_same(run(tmp_path), tmp_path, unbroken)


@pytest.mark.parametrize("kind", ["list", "function"])
def test_batches_that_are_no_loader_s_go_on_where_they_were(kind: str, tmp_path: Path) -> None:
    epochs = [batches(data(), range(4)), batches(data(), range(4, 7)), batches(data(), range(7, 12))]
    source = [*epochs[0], *epochs[1]] if kind == "list" else lambda epoch: iter(epochs[epoch % 3])
    expected = run(tmp_path / "whole", source)
    with pytest.raises(BrokenOffError):
        run(tmp_path / "broken", source, callbacks=break_at(8))
    found = run(tmp_path / "broken", source)
    assert bits(found.state) == bits(expected.state)
    assert found.history == expected.history


def test_more_epochs_go_on_where_fewer_ended(tmp_path: Path) -> None:
    def of(name: str, epochs: int) -> Fitted:
        log = tmp_path / name / "log.jsonl"
        return px.fit(start(), step, data(), epochs=epochs, checkpoint=tmp_path / name, log=log, progress=False)

    of("parts", 1)
    assert px.Checkpoints(tmp_path / "parts").steps == (4,)
    found, expected = of("parts", 3), of("whole", 3)
    assert bits(found.state) == bits(expected.state)
    assert found.history == expected.history
    assert lines(tmp_path / "parts" / "log.jsonl")[1:] == lines(tmp_path / "whole" / "log.jsonl")[1:]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: data(seed=2), "seed was 1 and is 2. Give the same data"),
        (lambda: data(batch_size=8), "batch_size was 16 and is 8"),
        (lambda: data(num_rows=57), "num_rows was 56 and is 57"),
        (lambda: batches(data(), range(4)), "order was 'philox-argsort' and is None"),
    ],
)
def test_other_data_are_refused_and_nothing_is_touched(other: Any, words: str, tmp_path: Path) -> None:
    run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        px.DataError, match=f"(?s)data is not what the checkpoint of step 12 in .* was trained on.*{words}"
    ):
        run(tmp_path, other())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_was_saved_by_hand_is_gone_on_from(tmp_path: Path) -> None:
    part = px.fit(start(), step, data(), steps=5, progress=False)
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, part.state)
    found = px.fit(start(), step, data(), steps=9, checkpoint=tmp_path, progress=False)
    assert bits(found.state) == bits(px.fit(start(), step, data(), steps=9, progress=False).state)


def test_what_was_evaluated_best_is_saved_though_no_checkpoint_is_due(tmp_path: Path) -> None:
    values = iter([5.0, 1.0, 3.0])
    checkpoints = px.Checkpoints(tmp_path, every=5, keep=1, best=("dev/loss", "min"))
    dev = px.Evaluate(lambda state, batch: {"loss": next(values)}, [0], every=3, name="dev")
    px.fit(start(), step, data(), steps=9, evaluate=dev, checkpoint=checkpoints, progress=False)
    assert px.Checkpoints(tmp_path).steps == (6, 9)
    assert px.Checkpoints(tmp_path, best=("dev/loss", "min")).best == 6


class Shuffling:
    """Batches in an order that goes on from pass to pass, as that of a DataLoader with a generator."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(5)
        self._batches = [arrays_of(number) for number in range(4)]

    def __iter__(self) -> Any:
        return iter([self._batches[k] for k in self._draw.permutation(4)])


class SizedShuffling(Shuffling):
    def __len__(self) -> int:
        return len(self._batches)


def arrays_of(number: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(number)
    return {"x": draw.standard_normal((8, 3)).astype("float32"), "y": draw.standard_normal(8).astype("float32")}


@pytest.mark.parametrize("kind", [Shuffling, SizedShuffling])
@pytest.mark.parametrize("through_a_loader", [True, False])
def test_an_order_that_goes_on_from_pass_to_pass_is_gone_on_with(
    kind: type[Shuffling], through_a_loader: bool, tmp_path: Path
) -> None:
    def source() -> Any:
        return px.loader(kind(), axis=ONE) if through_a_loader else kind()

    expected = px.fit(start(), step, source(), epochs=4, progress=False)
    px.fit(start(), step, source(), epochs=2, checkpoint=tmp_path, progress=False)
    found = px.fit(start(), step, source(), epochs=4, checkpoint=tmp_path, progress=False)
    assert bits(found.state) == bits(expected.state)


def test_the_best_of_no_evaluation_is_refused(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path, best=("tset/loss", "min"))
    with pytest.raises(px.DataError, match="'tset/loss' of an evaluation 'tset', but there is 'test'; write evaluate="):
        px.fit(start(), step, data(), steps=1, checkpoint=checkpoints, evaluate=px.Evaluate(evaluate_step, [arrays()]))


@pytest.mark.parametrize(
    ("name", "last", "words"),
    [
        ("test/los", 4, "names the metric 'test/los', but there is 'test/loss'"),
        ("los", 0, "names the metric 'los', but there is 'grad_norm', 'loss'"),
    ],
)
def test_the_best_by_a_metric_that_is_not_given_is_an_error_and_what_was_saved_stays(
    name: str, last: int, words: str, tmp_path: Path
) -> None:
    checkpoints = px.Checkpoints(tmp_path, every=2, keep=2, best=(name, "min"))
    test = px.Evaluate(evaluate_step, [arrays()], every=5)
    with pytest.raises(px.DataError, match=words):
        px.fit(start(), step, data(), steps=20, evaluate=test, checkpoint=checkpoints, progress=False)
    assert (px.Checkpoints(tmp_path).latest or 0) == last
    if last:
        np.testing.assert_array_equal(
            px.Checkpoints(tmp_path).restore(start()).tree.params["w"],
            px.fit(start(), step, data(), steps=last, progress=False).state.params["w"],
        )


def interrupt_at(number: int, *signals: signal.Signals) -> Any:
    def at(event: px.train.Event) -> None:
        if event.kind == "step" and event.step == number:
            for one in signals:
                signal.raise_signal(one)

    return at


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_a_step_saved(
    which: signal.Signals, tmp_path: Path, unbroken: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(px.TrainingStopped) as stopped:
        run(tmp_path, every=100, callbacks=interrupt_at(2, which))
    done = int(stopped.value.state.step)
    assert stopped.value.code == 0
    assert 2 <= done < 12
    assert stopped.value.history.steps[-1].step == done
    assert px.Checkpoints(tmp_path / "checkpoints").steps == (done,)
    name = "Ctrl-C" if which is signal.SIGINT else "SIGTERM"
    place = tmp_path / "checkpoints" / str(done)
    line = f"px.fit: {name}: stopped after step {done}, saved in {place}; the same command resumes from there"
    assert line in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert_same(run(tmp_path, every=100), tmp_path, unbroken)


def test_a_signal_without_a_checkpoint_leaves_the_state_in_the_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(px.TrainingStopped) as stopped:
        px.fit(start(), step, data(), steps=12, callbacks=interrupt_at(3, signal.SIGINT), progress=False)
    assert "which is not saved: there is no checkpoint=. The state is in the exception" in capfd.readouterr().err
    done = int(stopped.value.state.step)
    assert bits(stopped.value.state) == bits(px.fit(start(), step, data(), steps=done, progress=False).state)


class Evaluations:
    """Two evaluations of three batches, during one of which a signal comes."""

    def __init__(self, signal_at: int | None = None) -> None:
        self.num_batches = 0
        self._signal_at = signal_at

    def __call__(self, every: int = 5) -> list[px.Evaluate]:
        parts = [arrays(number) for number in (20, 30, 10)]
        return [px.Evaluate(self._step, parts, every=every, name=name) for name in ("dev", "test")]

    def _step(self, state: px.TrainState, batch: Any) -> Any:
        self.num_batches += 1
        if self.num_batches == self._signal_at:
            signal.raise_signal(signal.SIGTERM)
        return evaluate_step(state, batch)


def evaluated(directory: Path, evaluations: Evaluations, **options: Any) -> Fitted:
    """Evaluations after 5, 10 and 12 steps."""
    checkpoints = px.Checkpoints(directory / "checkpoints", every=4, keep=None, best=("test/loss", "min"))
    options = {"steps": 12, "log": directory / "log.jsonl", "progress": False} | options
    return px.fit(start(), step, data(), evaluate=evaluations(), checkpoint=checkpoints, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("signal_at", "done"), [(1, 5), (2, 5), (3, 5), (5, 5), (8, 10), (13, 12), (15, 12), (17, 12), (18, 12)]
)
def test_an_evaluation_that_a_signal_came_in_is_given_up_and_done_when_the_run_goes_on(
    signal_at: int, done: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = evaluated(tmp_path / "unbroken", Evaluations())
    stopped, resumed = Evaluations(signal_at), Evaluations()
    with pytest.raises(px.TrainingStopped):
        evaluated(tmp_path / "stopped", stopped)
    assert stopped.num_batches == signal_at
    assert px.Checkpoints(tmp_path / "stopped/checkpoints").latest == done
    again = evaluated(tmp_path / "stopped", resumed)
    assert_same(again, tmp_path / "stopped", (first, lines(tmp_path / "unbroken/log.jsonl")))
    assert resumed.num_batches == 18 - signal_at // 3 * 3
    assert ("nothing left to do" in capfd.readouterr().err) == (signal_at == 18)
    by = px.Checkpoints(tmp_path / "stopped/checkpoints", best=("test/loss", "min"))
    assert by.best == px.Checkpoints(tmp_path / "unbroken/checkpoints", best=("test/loss", "min")).best
    assert by.restore(start()).notes["test/loss"] == first.history.evaluations[-1].metrics["test/loss"]


def test_another_model_is_refused_with_what_differs_and_nothing_is_touched(tmp_path: Path) -> None:
    run(tmp_path)
    other = start().replace(params={"w": jnp.zeros(4), "b": jnp.zeros(())})
    log = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(px.StateError, match=r"params\['w'\]: float32 \(3,\) in the checkpoint") as caught:
        px.fit(other, step, data(), steps=12, checkpoint=tmp_path / "checkpoints", log=tmp_path / "log.jsonl")
    assert (tmp_path / "log.jsonl").read_bytes() == log
    assert f"checkpoint='{tmp_path}/checkpoints-2'" in caught.value.__notes__[0]


@pytest.mark.parametrize("progress", [True, False])
def test_a_run_that_was_over_is_over(
    progress: bool, tmp_path: Path, unbroken: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    assert_same(run(tmp_path, progress=progress), tmp_path, unbroken)
    assert "nothing left to do: step 12 of 12 was reached before" in capfd.readouterr().err


TOKEN = "hf_SECRET_that_is_in_no_checkpoint"
"""Read by a transform, as the tokens of downloads are."""


def with_a_token(batch: Any) -> Any:
    return batch if TOKEN else {}


def test_no_text_of_a_global_is_in_a_checkpoint(tmp_path: Path) -> None:
    password = "in a closure"

    def guarded(params: Any, batch: Any) -> Any:
        assert password
        assert TOKEN
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    source = px.loader(arrays(), 16, transform=with_a_token)
    px.fit(start(), px.train_step(guarded), source, steps=3, checkpoint=tmp_path, progress=False)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path
        assert password.encode() not in path.read_bytes(), path


def squared(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def halved(params: Any, batch: Any) -> Any:
    return squared(params, batch) / 2


def scaled(factor: float) -> Any:
    constant = jnp.full(3, factor)
    return lambda params, batch: (batch["x"] @ (constant * params["w"]) + params["b"] - batch["y"]) ** 2


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        (lambda: (squared, {}, start()), lambda: (squared, {}, start()), False),
        (lambda: (squared, {}, start()), lambda: (halved, {}, start()), True),
        (lambda: (squared, {}, start()), lambda: (squared, {"clip": 1.0}, start()), True),
        (lambda: (scaled(1.0), {}, start()), lambda: (scaled(2.0), {}, start()), True),
        (lambda: (squared, {}, start()), lambda: (squared, {"axis": px.Axis("rows", 1)}, start()), False),
        (
            lambda: (squared, {}, px.TrainState.create(start().params, optax.adam(0.1), key=jax.random.key(7))),
            lambda: (squared, {}, px.TrainState.create(start().params, optax.adam(0.2), key=jax.random.key(7))),
            True,
        ),
    ],
)
def test_a_step_that_is_another_program_is_told(
    before: Any, after: Any, is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for make, steps in ((before, 5), (after, 9)):
        loss, options, state = make()
        px.fit(state, px.train_step(loss, **{"axis": ONE, **options}), data(), steps=steps, checkpoint=tmp_path)
    assert capfd.readouterr().err.count("the training step is another program") == is_told
