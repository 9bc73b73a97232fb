"""What a run depends on is described in its checkpoints, and what is another when it goes on is said, line by line."""

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis as px

ROOT = Path(__file__).parents[2]
SCALE = 1.0


def loss(params: Any, batch: Any, power: int = 2) -> Any:
    return SCALE * jnp.abs(batch["x"] @ params["w"] - batch["y"]) ** power


def other_loss(params: Any, batch: Any) -> Any:
    return jnp.abs(batch["x"] @ params["w"] - batch["y"])


def moved(batch: Any) -> Any:
    return batch | {"x": batch["x"] + np.float32(1)}


def made(
    *,
    optimizer: Any = None,
    loss: Any = loss,
    rows: int = 64,
    value: float = 1.0,
    transform: Callable[..., Any] | None = None,
    data: Callable[[Any], Any] | None = None,
    ema: float | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """State, step and data of a run, each made anew as in another process."""
    x = np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3) / (3 * rows)
    x[rows // 2] = value
    arrays = {"x": x, "y": np.ones(rows, np.float32)}
    state = px.TrainState.create({"w": jnp.zeros(3)}, optimizer or adam(), ema=ema)
    found = px.loader(arrays, 16, transform=transform) if data is None else data(arrays)
    return state, px.train_step(loss, **options), found


def adam(rate: Any = 1e-3, **options: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, **options))


def schedule(rate: float) -> Any:
    return adam(optax.cosine_decay_schedule(rate, 100))


def closing_over(weight: float) -> Any:
    return lambda params, batch: weight * (batch["x"] @ params["w"] - batch["y"]) ** 2


def batches(arrays: Any) -> list[Any]:
    return [{name: x[:16] for name, x in arrays.items()}] * 4


DIGEST = "[0-9a-f]{12}"
CHANGES = [
    ({"optimizer": adam(0.01)}, {}, ["learning_rate: was 0.001, is 0.01"]),
    ({"optimizer": adam(b1=0.8)}, {}, ["b1: was 0.9, is 0.8"]),
    ({"optimizer": schedule(0.2)}, {"optimizer": schedule(0.1)}, ["init_value: was 0.1, is 0.2"]),
    ({"loss": other_loss}, {}, [f"loss: was .*: loss, code {DIGEST}, is .*: other_loss, code {DIGEST}"]),
    ({"loss": functools.partial(loss, power=1)}, {}, ["power: was 2, is 1"]),
    ({"loss": closing_over(2.0)}, {"loss": closing_over(1.0)}, ["weight: was 1.0, is 2.0"]),
    ({"clip": 1.0}, {}, ["clip: was None, is 1.0"]),
    ({"guard": False}, {}, ["guard: was True, is False"]),
    ({"precision": "bfloat16"}, {}, ["precision: was None, is 'bfloat16'"]),
    ({"microbatches": 2}, {}, ["microbatches: was 1, is 2"]),
    ({"transform": moved}, {}, [f"transform: was None, is .*: moved, code {DIGEST}"]),
    ({"value": 2.0}, {}, [rf"data\['x'\]: was float32 \(64, 3\), digest {DIGEST}, is .* digest {DIGEST}"]),
    ({"value": 2.0, "data": batches}, {"data": batches}, []),  # that row is in none of these batches
    ({"ema": 0.9}, {"ema": 0.8}, ["ema: was 0.8, is 0.9"]),
    ({}, {}, []),
    (
        {"optimizer": optax.inject_hyperparams(optax.sgd)(learning_rate=0.2)},
        {"optimizer": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)},
        [r"numeric_hps\['learning_rate'\]: was 0\.1, is 0\.2, for a new state: this one stays as it was saved"],
    ),
    (
        {"optimizer": optax.MultiSteps(optax.sgd(0.2), 2)},
        {"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)},
        [r"learning_rate: was 0\.1, is 0\.2"],
    ),
    (
        {"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)},
        {"optimizer": optax.MultiSteps(optax.sgd(0.1), 4)},
        [r"every_k_schedule: was 4, is 2"],
    ),
]


def test_steps_of_a_schedule_that_optax_turns_into_a_float_have_not_changed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    used = schedule(0.1)
    px.fit(*made(optimizer=used), steps=1, progress=False)
    for steps, optimizer in enumerate((used, schedule(0.1)), 1):
        px.fit(*made(optimizer=optimizer), steps=steps, checkpoint=tmp_path / "run", progress=False)
    assert "decay_steps" not in capfd.readouterr().err


def test_large_integers_that_are_one_float_are_two_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def holding(seed: int) -> Any:
        return lambda params, batch: (seed, loss(params, batch))[1]

    for steps, seed in enumerate((2**53, 2**53 + 1), 1):
        px.fit(*made(loss=holding(seed)), steps=steps, checkpoint=tmp_path / "run", progress=False)
    assert f"px.fit: seed: was {2**53}, is {2**53 + 1}\n" in capfd.readouterr().err


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("now", "before", "lines"),
    [pytest.param(*case, marks=[] if n % 3 == 0 or n > 12 else pytest.mark.slow) for n, case in enumerate(CHANGES)],
)
def test_a_change_is_said_in_one_line(
    now: Any, before: Any, lines: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for progress in (False, None):
        directory = tmp_path / str(progress)
        px.fit(*made(**before), steps=1, checkpoint=directory, progress=False)
        capfd.readouterr()
        px.fit(*made(**now), steps=2, checkpoint=directory, progress=progress)
        said = [line for line in capfd.readouterr().err.splitlines() if re.match(r"px.fit: \S+: was ", line)]
        assert len(said) == len(lines), said
        for line, expected in zip(said, lines, strict=True):
            assert re.fullmatch(f"px.fit: {expected}", line), line


class Weighted:
    """A loss with what it multiplies by in a list and an array."""

    def __init__(self, value: float) -> None:
        self.rates, self.weights = [value], np.full(3, value)

    def __call__(self, params: Any, batch: Any) -> Any:
        return self.rates[0] * (batch["x"] @ (params["w"] * self.weights) - batch["y"]) ** 2

    def method(self, params: Any, batch: Any) -> Any:
        return self(params, batch)


class Constants:
    RATE = 1.0


@dataclasses.dataclass
class Rates:
    RATE: float


class Held:
    def __init__(self, rate: float) -> None:
        self.RATE = rate


GLOBAL: Any = None


def _array(params: Any, batch: Any) -> Any:
    return loss(params, batch) * GLOBAL[0]


def _attribute(params: Any, batch: Any) -> Any:
    return loss(params, batch) * GLOBAL.RATE


def _called(params: Any, batch: Any) -> Any:
    return loss(params, batch) * GLOBAL()


def _module(rate: float) -> types.ModuleType:
    made = types.ModuleType("a_module_of_a_user")
    vars(made).update(__file__="/home/user/a_module_of_a_user.py", RATE=rate)
    return made


def _function_of_a_module(rate: float) -> Any:
    values = {"RATE": rate, "__name__": "another_module_of_a_user"}
    exec("def rate():\n    return RATE", values)
    return values["rate"]


DIGESTS = rf"float\d\d \(3,\), digest {DIGEST}"
GLOBALS: dict[str, tuple[Any, Callable[[float], Any], str]] = {
    "an array": (_array, lambda x: np.full(3, x), rf"GLOBAL: was {DIGESTS}, is {DIGESTS}"),
    "an array of JAX": (_array, lambda x: jnp.full(3, x), rf"GLOBAL: was {DIGESTS}, is {DIGESTS}"),
    "a list": (_array, lambda x: [x], r"GLOBAL\[0\]: was 1\.0, is 2\.0"),
    "a tuple": (_array, lambda x: (x,), r"GLOBAL\[0\]: was 1\.0, is 2\.0"),
    "a dict": (_array, lambda x: {0: x}, r"GLOBAL\[0\]: was 1\.0, is 2\.0"),
    "a namespace": (_attribute, lambda x: types.SimpleNamespace(RATE=x), r"RATE: was 1\.0, is 2\.0"),
    "options of a command": (_attribute, lambda x: argparse.Namespace(RATE=x), r"RATE: was 1\.0, is 2\.0"),
    "a class": (_attribute, lambda x: type("Constants", (Constants,), {"RATE": x}), r"RATE: was 1\.0, is 2\.0"),
    "a module": (_attribute, _module, r"RATE: was 1\.0, is 2\.0"),
    "a dataclass": (_attribute, lambda x: Rates(x), r"RATE: was 1\.0, is 2\.0"),
    "an object": (_attribute, lambda x: Held(x), r"RATE: was 1\.0, is 2\.0"),
    "a function of another module": (_called, _function_of_a_module, r"RATE: was 1\.0, is 2\.0"),
    "a partial function": (_called, lambda x: functools.partial(float, x), r"GLOBAL\[0\]: was 1\.0, is 2\.0"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", GLOBALS)
def test_what_a_loss_reads_of_globals_is_described(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    function, make, expected = GLOBALS[what]
    for steps, value in enumerate((1.0, 1.0, 2.0), 1):
        monkeypatch.setitem(globals(), "GLOBAL", make(value))
        assert " was " not in capfd.readouterr().err
        px.fit(*made(loss=function), steps=steps, checkpoint=tmp_path, progress=False)
    assert re.search(rf"^px\.fit: {expected}$", capfd.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x.method], ids=["called", "a method"])
def test_lists_and_arrays_of_an_object_are_described(
    of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps, value in enumerate((1.0, 2.0), 1):
        px.fit(*made(loss=of(Weighted(value))), steps=steps, checkpoint=tmp_path, progress=False)
    said = capfd.readouterr().err
    assert "px.fit: rates[0]: was 1.0, is 2.0\n" in said
    assert re.search(rf"px\.fit: weights: was {DIGESTS}, is {DIGESTS}\n", said)


def test_a_checkpoint_of_before_globals_were_described_says_only_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", [1.0])
    px.fit(*made(loss=_array), steps=1, checkpoint=tmp_path, progress=False)
    checkpoints = px.Checkpoints(tmp_path, asynchronous=False)
    restored = checkpoints.restore(made(loss=_array)[0])
    fit = restored.notes["fit"]
    run = {path: text for path, text in fit["run"].items() if not re.search("GLOBAL|version", path)}
    assert len(run) < len(fit["run"])
    checkpoints.save(1, restored.tree, {"fit": {**fit, "run": run}})
    px.fit(*made(loss=_array, clip=1.0), steps=2, checkpoint=tmp_path, progress=False)
    assert re.findall(r"px\.fit: (\S+): was", capfd.readouterr().err) == ["clip"]


def test_a_number_that_a_loss_reads_of_its_module_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    px.fit(*made(), steps=1, checkpoint=tmp_path, progress=False)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    px.fit(*made(), steps=2, checkpoint=tmp_path, progress=False)
    assert "px.fit: SCALE: was 1.0, is 3.0\n" in capfd.readouterr().err


class _Net(nnx.Module):
    def __init__(self, rate: float, power: int, activation: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 1, rngs=rngs, kernel_init=nnx.initializers.normal(rate))
        self.drop = nnx.List([nnx.Dropout(rate, rngs=rngs)])
        self.power = power
        self.activation = activation

    def __call__(self, x: Any) -> Any:
        return self.activation(self.drop[0](self.linear(x)))[:, 0] ** self.power


def _loss_of_net(model: _Net, batch: Any) -> Any:
    return (model(batch["x"]) - batch["y"]) ** 2


def test_attributes_of_a_module_and_of_those_in_it_are_described(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step, (_, _, data) = px.train_step(_loss_of_net), made()

    def run(steps: int, *attributes: Any, evaluated: bool = False) -> list[str]:
        net = _Net(*attributes, rngs=nnx.Rngs(0))
        if evaluated:
            net.eval()
        px.fit(px.TrainState.create(net, adam()), step, data, steps=steps, checkpoint=tmp_path, progress=False)
        return [line for line in capfd.readouterr().err.splitlines() if re.match(r"px.fit: \S+: was ", line)]

    run(1, 0.1, 1, jnp.tanh)
    assert run(2, 0.1, 1, jnp.tanh, evaluated=True) == []
    assert run(3, 0.4, 2, jnp.sin) == [
        "px.fit: rate: was 0.1, is 0.4",
        "px.fit: activation: was jax: tanh, is jax: sin",
        "px.fit: power: was 1, is 2",
    ]


def described(directory: Path, **options: Any) -> dict[str, str]:
    state, step, data = made(**options)
    px.fit(state, step, data, steps=1, checkpoint=directory, progress=False)
    return px.Checkpoints(directory).restore(state).notes["fit"]["run"]


def test_of_large_data_some_rows_are_read_and_that_is_said(tmp_path: Path) -> None:
    found = described(tmp_path, rows=200_000)["data['x']"]
    assert re.fullmatch(rf"float32 \(200000, 3\), digest {DIGEST} of 64 of its 200,000 rows", found)


class Odd:
    """Says nothing of itself, and fails when it is looked at."""

    def __len__(self) -> int:
        raise RuntimeError("not this one")

    def __iter__(self) -> Any:
        return iter([{"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}] * 3)


def test_what_cannot_be_described_is_described_by_its_name(tmp_path: Path) -> None:
    found = described(tmp_path, data=lambda arrays: _Sized())
    assert found["data"].endswith("_Sized")
    assert all(len(text) < 300 for text in found.values())


class _Sized(Odd):
    def __len__(self) -> int:
        return 3


def main(directory: str) -> None:
    options = {"clip": 1.0, "transform": moved, "optimizer": schedule(0.1), "loss": closing_over(0.5)}
    print(json.dumps(described(Path(directory), **options)))  # noqa: T201


@pytest.mark.slow
def test_it_is_the_same_in_every_process_and_has_no_addresses(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate(("0", "12345")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        command = [sys.executable, "-c", f"from {__name__} import main; main({str(tmp_path / str(number))!r})"]
        done = subprocess.run(
            command, env={**environment, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    assert "0x" not in texts[0]
    assert json.loads(texts[0])["clip"] == "1.0"


def _of_environment(params: Any, batch: Any) -> Any:
    return float(environ["LOSS_POWER"]) * jnp.abs(batch["x"] @ params["w"] - batch["y"])


class _Odd:
    @property
    def dtype(self) -> Any:
        raise RuntimeError


environ, config, odd, rate = os.environ, {str(number): number for number in range(400)}, _Odd(), 0.25


def _of_much(params: Any, batch: Any) -> Any:
    return _of_environment(params, batch) * config["3"] + rate * (odd is None)


def test_what_is_secret_is_not_described_and_what_is_large_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOSS_POWER", "2")
    monkeypatch.setenv("A_SECRET", "hunter2")
    state, step, data = made(loss=_of_much)
    px.fit(state, step, data, epochs=1, checkpoint=tmp_path / "run")
    files = [file.read_bytes() for file in (tmp_path / "run").rglob("*.json")]
    assert not [text for text in files if b"hunter2" in text or b"A_SECRET" in text]
    (text,) = {text for text in files if b"_of_much, code" in text}
    assert re.search(rb"loss\.rate\W+0\.25\W", text)
