"""A run that was broken off anywhere, or killed, and started again by the same command, is the run that was not."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from paraxis.train import Fitted
from tests._fits import ONE, arrays, batches, data, evaluate_step, lines, start, step
from tests._support import bits, table
from tests.processes._support import started


class BrokenOffError(Exception):
    pass


def break_off() -> None:
    raise BrokenOffError


def at_step(number: int, act: Callable[[], None]) -> Any:
    def at(event: px.train.Event) -> None:
        if event.kind == "step" and event.step == number:
            act()

    return at


def run(directory: Path, source: Any = None, every: int | None = 2, **options: Any) -> Fitted:
    """Twelve steps, three epochs, with everything that has a state of its own."""
    checkpoints = px.Checkpoints(directory / "checkpoints", every=every)
    rule, test = px.StopEarly("test/loss", patience=50), px.Evaluate(evaluate_step, [arrays()], every=5)
    options = {"steps": 12, "progress": False, "log": directory / "log.jsonl", "evaluate": test} | options
    source = data() if source is None else source
    return px.fit(start(), step, source, **({"checkpoint": checkpoints, "stop_early": rule} | options))


Unbroken = tuple[Fitted, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    directory = tmp_path_factory.mktemp("unbroken")
    return run(directory), lines(directory / "log.jsonl")


def assert_same(found: Fitted, directory: Path, unbroken: Unbroken) -> None:
    expected, log = unbroken
    assert bits(found.state) == bits(expected.state)
    assert bits(found.last) == bits(expected.last)
    assert (found.history, found.best) == (expected.history, expected.best)
    assert lines(directory / "log.jsonl") == log


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(1, 13))
def test_fit_comes_to_the_same_bits_when_it_was_broken_off(
    number: int, tmp_path: Path, unbroken: Unbroken, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BrokenOffError):
        run(tmp_path, callbacks=at_step(number, break_off))
    assert_same(run(tmp_path), tmp_path, unbroken)
    capfd.readouterr()
    assert_same(run(tmp_path), tmp_path, unbroken)  # it was over
    assert "nothing left to do: step 12 was reached before" in capfd.readouterr().err


class Shuffling:
    """Batches in an order that goes on from pass to pass, as that of a DataLoader with a generator."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        found = batches(data(), range(4))
        return iter([found[k] for k in self._draw.permutation(4)])


EPOCHS = [batches(data(), range(4)), batches(data(), range(4, 7)), batches(data(), range(7, 12))]


@pytest.mark.parametrize("make", [lambda: lambda epoch: iter(EPOCHS[epoch % 3]), Shuffling])
def test_fit_goes_on_in_batches_that_are_no_loader_s(make: Any, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", make())
    with pytest.raises(BrokenOffError):
        run(tmp_path / "broken", make(), callbacks=at_step(8, break_off))
    assert_same(run(tmp_path / "broken", make()), tmp_path / "broken", (expected, lines(tmp_path / "whole/log.jsonl")))


OTHER = start().replace(params={"w": jnp.zeros(4), "b": jnp.zeros(())})


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ended")
    run(directory)
    return directory


@pytest.mark.parametrize(
    ("state", "source", "words"),
    [
        (start(), data(seed=2), "data is not what the checkpoint of step 12 .*seed was 1 and is 2"),
        (start(), data(batch_size=8), "batch_size was 16 and is 8"),
        (start(), data(num_rows=57), "num_rows was 56 and is 57"),
        (start(), data(shuffle=False), "order was 'philox-argsort'"),
        (start(), EPOCHS[0], "order was 'philox-argsort' and is None"),
        (OTHER, data(), r"params\['w'\]: float32 \(3,\) in the checkpoint.*checkpoint='.*checkpoints-2'"),
    ],
)
def test_fit_refuses_a_checkpoint_of_other_data_or_model(state: Any, source: Any, words: str, ended: Path) -> None:
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    with pytest.raises((px.DataError, px.StateError), match=f"(?s){words}"):
        px.fit(state, step, source, steps=12, checkpoint=ended / "checkpoints", log=ended / "log.jsonl")
    assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before


def test_fit_tells_when_the_rows_are_other_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They may have been mended, as an error of values that are not finite asks for."""
    mended = px.loader(arrays() | {"y": -arrays()["y"]}, 16, axis=ONE, seed=1)
    for number, source in enumerate((data(), data(), mended), 1):
        px.fit(start(), step, source, steps=number, checkpoint=tmp_path)
        assert ("other rows than when it was saved" in capfd.readouterr().err) == (source is mended)


def test_fit_goes_on_from_a_checkpoint_that_was_saved_by_hand(tmp_path: Path) -> None:
    with px.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, px.fit(start(), step, data(), steps=5, progress=False).state)
    found = px.fit(start(), step, data(), steps=9, checkpoint=tmp_path, progress=False)
    assert bits(found.state) == bits(px.fit(start(), step, data(), steps=9, progress=False).state)


def test_fit_saves_what_was_evaluated_best_though_no_checkpoint_is_due(tmp_path: Path) -> None:
    values = iter([5.0, 1.0, 3.0])
    checkpoints = px.Checkpoints(tmp_path, every=5, keep=1, best=("dev/loss", "min"))
    dev = px.Evaluate(lambda state, batch: {"loss": next(values)}, [0], every=3, name="dev")
    px.fit(start(), step, data(), steps=9, evaluate=dev, checkpoint=checkpoints, progress=False)
    assert (checkpoints.steps, checkpoints.best) == ((6, 9), 6)


def test_fit_refuses_a_best_of_a_metric_that_is_not_given_and_keeps_what_was_saved(tmp_path: Path) -> None:
    checkpoints = px.Checkpoints(tmp_path / "runs", every=2, best=("test/los", "min"))
    with pytest.raises(px.DataError, match=r"names 'test/los', but there is .*'test/loss'"):
        run(tmp_path, checkpoint=checkpoints)
    assert px.Checkpoints(tmp_path / "runs").latest == 4


@pytest.mark.parametrize(("which", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_fit_saves_and_stops_after_a_step_at_a_signal(
    which: signal.Signals, name: str, tmp_path: Path, unbroken: Unbroken, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(which)
    with pytest.raises(px.TrainingStopped) as stopped:
        run(tmp_path, every=100, callbacks=at_step(2, lambda: signal.raise_signal(which)))
    done = int(stopped.value.state.step)
    assert (stopped.value.code, stopped.value.history.steps[-1].step, signal.getsignal(which)) == (0, done, before)
    assert 2 <= done < 12
    place = tmp_path / "checkpoints" / str(done)
    assert f"px.fit: {name}: stopped after step {done}, saved in {place}; the same" in capfd.readouterr().err
    assert_same(run(tmp_path, every=100), tmp_path, unbroken)


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
@pytest.mark.parametrize(("signal_at", "done"), [(2, 5), (5, 5), (8, 10), (15, 12), (18, 12)])
def test_fit_gives_up_an_evaluation_at_a_signal_and_repeats_it(signal_at: int, done: int, tmp_path: Path) -> None:
    whole = Evaluations().run(tmp_path / "whole")
    stopped, resumed = Evaluations(signal_at), Evaluations()
    with pytest.raises(px.TrainingStopped):
        stopped.run(tmp_path / "stopped")
    assert (stopped.num_batches, px.Checkpoints(tmp_path / "stopped/checkpoints").latest) == (signal_at, done)
    assert_same(resumed.run(tmp_path / "stopped"), tmp_path / "stopped", (whole, lines(tmp_path / "whole/log.jsonl")))
    assert resumed.num_batches == 18 - signal_at // 3 * 3
    by = [px.Checkpoints(tmp_path / name / "checkpoints", best=("test/loss", "min")) for name in ("stopped", "whole")]
    assert by[0].best == by[1].best


@pytest.mark.parametrize(
    ("kills", "seed", "processes", "devices"), table([(4, 0, 1, 2)], [(10, 1, 1, 2), (2, 0, 2, 1), (2, 0, 2, 2)])
)
def test_fit_that_was_killed_ends_the_same(kills: int, seed: int, processes: int, devices: int, tmp_path: Path) -> None:
    """``python -m tests.faults`` kills more."""
    with started("-m", "tests.processes._fit_killer", tmp_path, kills, seed, processes, devices) as process:
        out, error = process.communicate(timeout=300 * (kills + 2))
    assert process.returncode == 0, error
    report = json.loads(out.splitlines()[-1])
    assert (report["kills"], report["wrong"]) == (kills, [])
    assert report["resumed"] >= kills // 3, report
