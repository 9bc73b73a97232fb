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
    checkpoints = px.Checkpoints(directory / "checkpoints", every=every)
    rule, test = px.train.StopEarly("test/loss", patience=50), px.Evaluate(evaluate_step, [arrays()], every=5)
    options = {"steps": 12, "progress": False, "log": directory / "log.jsonl", "evaluate": test} | options
    source = data() if source is None else source
    return px.fit(start(), step, source, **({"checkpoint": checkpoints, "stop_early": rule} | options))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fitted, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("unbroken")
    return run(directory), lines(directory / "log.jsonl")


def assert_same(found: Fitted, directory: Path, unbroken: tuple[Fitted, list[dict[str, Any]]]) -> None:
    expected, log = unbroken
    assert bits(found.state) == bits(expected.state)
    assert (found.history, found.best) == (expected.history, expected.best)
    assert lines(directory / "log.jsonl") == log


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(1, 13))
def test_broken_off_at_any_step_it_comes_to_the_same_bits(number: int, tmp_path: Path, unbroken: Any) -> None:
    with pytest.raises(BrokenOffError):
        run(tmp_path, callbacks=break_at(number))
    assert_same(run(tmp_path), tmp_path, unbroken)


class Shuffling:
    """Batches in an order that goes on from pass to pass, as that of a DataLoader with a generator."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(5)

    def __iter__(self) -> Any:
        found = batches(data(), range(4))
        return iter([found[k] for k in self._draw.permutation(4)])


class SizedShuffling(Shuffling):
    def __len__(self) -> int:
        return 4


EPOCHS = [batches(data(), range(4)), batches(data(), range(4, 7)), batches(data(), range(7, 12))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EPOCHS[0] + EPOCHS[1],
        lambda: lambda epoch: iter(EPOCHS[epoch % 3]),
        Shuffling,
        SizedShuffling,
        lambda: px.loader(Shuffling(), axis=ONE),
    ],
)
def test_batches_that_are_no_loader_s_go_on_where_they_were(make: Any, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", make())
    with pytest.raises(BrokenOffError):
        run(tmp_path / "broken", make(), callbacks=break_at(8))
    assert_same(run(tmp_path / "broken", make()), tmp_path / "broken", (expected, lines(tmp_path / "whole/log.jsonl")))


def test_more_epochs_go_on_where_fewer_ended(tmp_path: Path) -> None:
    def of(name: str, epochs: int) -> Fitted:
        return run(tmp_path / name, every=None, epochs=epochs, steps=None)

    of("parts", 1)
    assert px.Checkpoints(tmp_path / "parts/checkpoints").steps == (4,)
    found, expected = of("parts", 3), of("whole", 3)
    assert bits(found.state) == bits(expected.state)
    assert found.history.epochs == expected.history.epochs


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: data(seed=2), "seed was 1 and is 2. Give the same data"),
        (lambda: data(batch_size=8), "batch_size was 16 and is 8"),
        (lambda: data(num_rows=57), "num_rows was 56 and is 57"),
        (lambda: EPOCHS[0], "order was 'philox-argsort' and is None"),
    ],
)
def test_other_data_are_refused_and_nothing_is_touched(other: Any, words: str, tmp_path: Path) -> None:
    run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = f"(?s)data is not what the checkpoint of step 12 in .* was trained on.*{words}"
    with pytest.raises(px.DataError, match=words):
        run(tmp_path, other())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_model_is_refused_with_what_differs_and_nothing_is_touched(tmp_path: Path) -> None:
    run(tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    other = start().replace(params={"w": jnp.zeros(4), "b": jnp.zeros(())})
    words = rf"(?s)params\['w'\]: float32 \(3,\) in the checkpoint.*checkpoint='{tmp_path}/checkpoints-2'"
    with pytest.raises(px.StateError, match=words):
        px.fit(other, step, data(), steps=12, checkpoint=tmp_path / "checkpoints", log=tmp_path / "log.jsonl")
    assert (tmp_path / "log.jsonl").read_bytes() == log


def test_a_checkpoint_that_was_saved_by_hand_is_gone_on_from(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, px.fit(start(), step, data(), steps=5, progress=False).state)
    found = px.fit(start(), step, data(), steps=9, checkpoint=tmp_path, progress=False)
    assert bits(found.state) == bits(px.fit(start(), step, data(), steps=9, progress=False).state)


def test_what_was_evaluated_best_is_saved_though_no_checkpoint_is_due(tmp_path: Path) -> None:
    values = iter([5.0, 1.0, 3.0])
    checkpoints = px.Checkpoints(tmp_path, every=5, keep=1, best=("dev/loss", "min"))
    dev = px.Evaluate(lambda state, batch: {"loss": next(values)}, [0], every=3, name="dev")
    px.fit(start(), step, data(), steps=9, evaluate=dev, checkpoint=checkpoints, progress=False)
    assert (checkpoints.steps, checkpoints.best) == ((6, 9), 6)


@pytest.mark.parametrize(
    ("name", "last", "words"),
    [
        ("tset/loss", 0, "'tset/loss' of an evaluation 'tset', but there is 'test'; write evaluate="),
        ("test/los", 4, "names the metric 'test/los', but there is 'test/loss'"),
        ("los", 0, "names the metric 'los', but there is 'grad_norm', 'loss'"),
    ],
)
def test_the_best_by_a_metric_that_is_not_given_is_an_error_and_what_was_saved_stays(
    name: str, last: int, words: str, tmp_path: Path
) -> None:
    checkpoints = px.Checkpoints(tmp_path / "runs", every=2, best=(name, "min"))
    with pytest.raises(px.DataError, match=words):
        run(tmp_path, checkpoint=checkpoints)
    assert (px.Checkpoints(tmp_path / "runs").latest or 0) == last


def interrupt_at(number: int, which: signal.Signals) -> Any:
    def at(event: px.train.Event) -> None:
        if event.kind == "step" and event.step == number:
            signal.raise_signal(which)

    return at


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_a_step_saved(
    which: signal.Signals, tmp_path: Path, unbroken: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(px.TrainingStopped) as stopped:
        run(tmp_path, every=100, callbacks=interrupt_at(2, which))
    done = int(stopped.value.state.step)
    assert (stopped.value.code, stopped.value.history.steps[-1].step) == (0, done)
    assert 2 <= done < 12
    place, name = tmp_path / "checkpoints" / str(done), "Ctrl-C" if which is signal.SIGINT else "SIGTERM"
    line = f"px.fit: {name}: stopped after step {done}, saved in {place}; the same command resumes from there"
    assert line in capfd.readouterr().err
    assert_same(run(tmp_path, every=100), tmp_path, unbroken)


def test_a_signal_without_a_checkpoint_leaves_the_state_in_the_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(px.TrainingStopped) as stopped:
        px.fit(start(), step, data(), steps=12, callbacks=interrupt_at(3, signal.SIGINT), progress=False)
    assert "which is not saved: there is no checkpoint=. The state is in the exception" in capfd.readouterr().err
    done = int(stopped.value.state.step)
    assert bits(stopped.value.state) == bits(px.fit(start(), step, data(), steps=done, progress=False).state)


class Evaluations:
    """Two evaluations of three batches after 5, 10 and 12 steps, during one of which a signal comes."""

    def __init__(self, signal_at: int | None = None) -> None:
        self.num_batches, self._signal_at = 0, signal_at

    def __call__(self, state: px.TrainState, batch: Any) -> Any:
        self.num_batches += 1
        if self.num_batches == self._signal_at:
            signal.raise_signal(signal.SIGTERM)
        return evaluate_step(state, batch)

    def run(self, directory: Path) -> Fitted:
        parts = [arrays(number) for number in (20, 30, 10)]
        evaluations = [px.Evaluate(self, parts, every=5, name=name) for name in ("dev", "test")]
        checkpoints = px.Checkpoints(directory / "checkpoints", every=4, keep=None, best=("test/loss", "min"))
        return run(directory, evaluate=evaluations, checkpoint=checkpoints, stop_early=None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("signal_at", "done"), [(1, 5), (2, 5), (3, 5), (5, 5), (8, 10), (13, 12), (15, 12), (17, 12), (18, 12)]
)
def test_an_evaluation_that_a_signal_came_in_is_given_up_and_done_when_the_run_goes_on(
    signal_at: int, done: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = Evaluations().run(tmp_path / "whole")
    stopped, resumed = Evaluations(signal_at), Evaluations()
    with pytest.raises(px.TrainingStopped):
        stopped.run(tmp_path / "stopped")
    assert (stopped.num_batches, px.Checkpoints(tmp_path / "stopped/checkpoints").latest) == (signal_at, done)
    assert_same(resumed.run(tmp_path / "stopped"), tmp_path / "stopped", (whole, lines(tmp_path / "whole/log.jsonl")))
    assert resumed.num_batches == 18 - signal_at // 3 * 3
    assert ("nothing left to do" in capfd.readouterr().err) == (signal_at == 18)
    by = [px.Checkpoints(tmp_path / name / "checkpoints", best=("test/loss", "min")) for name in ("stopped", "whole")]
    assert by[0].best == by[1].best
    assert by[0].restore(start()).notes["test/loss"] == whole.history.evaluations[-1].metrics["test/loss"]


@pytest.mark.parametrize("progress", [True, False])
def test_a_run_that_was_over_is_over(
    progress: bool, tmp_path: Path, unbroken: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    assert_same(run(tmp_path, progress=progress), tmp_path, unbroken)
    assert "nothing left to do: step 12 of 12 was reached before" in capfd.readouterr().err


TOKEN = "hf_SECRET_that_is_in_no_checkpoint"


def test_no_text_of_a_global_is_in_a_checkpoint(tmp_path: Path) -> None:
    def guarded(params: Any, batch: Any) -> Any:
        assert TOKEN
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    source = px.loader(arrays(), 16, transform=lambda batch: batch if TOKEN else {})
    px.fit(start(), px.train_step(guarded), source, steps=3, checkpoint=tmp_path, progress=False)
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(contents) > 3
    assert not any(TOKEN.encode() in content for content in contents)


def scaled(factor: float) -> Any:
    constant = jnp.full(3, factor)
    return lambda params, batch: (batch["x"] @ (constant * params["w"]) + params["b"] - batch["y"]) ** 2


def adam(rate: float) -> px.TrainState:
    return px.TrainState.create(start().params, optax.adam(rate), key=jax.random.key(7))


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        ((scaled(1.0), {}, adam(0.1)), (scaled(1.0), {}, adam(0.1)), False),
        ((scaled(1.0), {}, adam(0.1)), (lambda p, b: scaled(1.0)(p, b) / 2, {}, adam(0.1)), True),
        ((scaled(1.0), {}, adam(0.1)), (scaled(1.0), {"clip": 1.0}, adam(0.1)), True),
        ((scaled(1.0), {}, adam(0.1)), (scaled(2.0), {}, adam(0.1)), True),
        ((scaled(1.0), {}, adam(0.1)), (scaled(1.0), {"axis": px.Axis("rows", 1)}, adam(0.1)), False),
        ((scaled(1.0), {}, adam(0.1)), (scaled(1.0), {}, adam(0.2)), True),
    ],
)
def test_a_step_that_is_another_program_is_told(
    before: Any, after: Any, is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for (loss, options, state), steps in ((before, 5), (after, 9)):
        px.fit(state, px.train_step(loss, **{"axis": ONE, **options}), data(), steps=steps, checkpoint=tmp_path)
    assert capfd.readouterr().err.count("the training step is another program") == is_told
