"""The examples of training, against plain loops of Flax and optax, NumPy and scikit-learn."""

import collections
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.metrics import accuracy_score, log_loss

import paraxis as px
from tests._support import assert_close

pytestmark = pytest.mark.slow

Example = Callable[[str], ModuleType]
EXAMPLES = Path(__file__).parents[2] / "examples"
PARAXIS = [sys.executable, "-c", "import sys; from paraxis.cli import main; sys.exit(main())"]


def assert_same_bits(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- the table -------------------------------------------------------------------------------------------------------


def test_held_out_rows_are_not_trained_on_nor_used_to_scale(example: Example) -> None:
    train, held_out = example("tabular_pipeline").load()
    assert (train["x"].shape, held_out["x"].shape) == ((399, 30), (170, 30))
    np.testing.assert_allclose(train["x"].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(train["x"].std(0), 1, atol=1e-5)
    assert np.abs(held_out["x"].mean(0)).max() > 1e-3
    assert not {row.tobytes() for row in train["x"]} & {row.tobytes() for row in held_out["x"]}


def test_with_any_part_replaced_by_plain_flax_the_state_is_the_same_bit_by_bit(example: Example) -> None:
    module = example("tabular_pipeline")
    table = module.load()
    found = module.replaced(table, 14)  # the 13th batch is a short one
    by_hand = found["everything"]
    for name, state in found.items():
        if "on 8 devices" in name:
            expected = module.probabilities(by_hand, table.held_out["x"])
            np.testing.assert_allclose(module.probabilities(state, table.held_out["x"]), expected, atol=1e-4)
            continue
        variables = state.mutable["batch_stats"] if isinstance(state, px.TrainState) else state.batch_stats
        assert_same_bits((state.params, variables), (by_hand.params, by_hand.batch_stats))
    assert len(found) == 6


def test_the_pipeline_goes_on_from_its_checkpoint_and_scores_what_scikit_learn_does(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("tabular_pipeline")
    saved = ["--quick", "--checkpoint", str(tmp_path / "run")]
    module.main([*saved, "--epochs", "1"])
    found = module.main([*saved, "--plot", str(tmp_path / "plot.png")])
    assert "resumes from" in capsys.readouterr().err
    unbroken = module.train(module.load(), 2)
    fitted, held_out = found["fitted"], found["table"].held_out
    assert_same_bits((fitted.state.params, fitted.state.opt_state), (unbroken.state.params, unbroken.state.opt_state))
    assert fitted.history == unbroken.history

    predicted = module.probabilities(fitted.state, held_out["x"])
    last = fitted.history.evaluations[-1].metrics
    assert last["held-out/accuracy"] == pytest.approx(accuracy_score(held_out["y"], predicted > 0.5))
    assert last["held-out/loss"] == pytest.approx(log_loss(held_out["y"], predicted), rel=1e-4)
    assert last["held-out/accuracy"] > 0.9
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_model_in_nnx_learns_as_well(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("tabular_pipeline")
    module.print_model(True, 30)
    assert "90,301" in capsys.readouterr().out  # 30·300 + 300 + 2·300 + 300·200 + 200 + 200·100 + 100 + 100 + 1
    fitted = module.train(module.load(), 2, is_nnx=True)
    assert fitted.history.evaluations[-1].metrics["held-out/accuracy"] > 0.9


# --- digits ----------------------------------------------------------------------------------------------------------


def test_steps_on_all_devices_are_those_of_a_loop_of_optax(example: Example) -> None:
    module = example("mnist_cnn")
    train, _ = module.load(quick=True)
    found = module.compare(train, 3)

    model = module.CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(module.LEARNING_RATE), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        def mean_loss(model: Any) -> jax.Array:
            logits = model(batch["images"])
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], axis=1)
            return -picked.mean()

        loss, gradient = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradient)
        return loss

    model.train()
    data = px.loader(train, module.BATCH, seed=1)
    expected = []
    for number in range(3):
        rows = data.rows(number)
        expected.append(float(step(model, optimizer, {name: jnp.asarray(x[rows]) for name, x in train.items()})))
    assert sorted(found) == ["1 device", "8 devices"]
    for run in found.values():
        np.testing.assert_allclose(run.losses, expected, rtol=1e-5)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert_close(found["8 devices"].params, jax.tree.map(np.asarray, params), rtol=1e-3, atol=2e-4)

    many, one = found["8 devices"].communicated, found["1 device"].communicated
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    assert many.count["all_reduce"] == 1
    assert size <= many.bytes["all_reduce"] <= size + 100  # the gradient, and a few numbers
    assert many.total_bytes <= size + 1000
    assert one.total_count == 0


def test_the_average_of_the_parameters_is_tested_beside_them(example: Example) -> None:
    module = example("mnist_cnn")
    found = module.main(["--quick", "--epochs", "1"])
    (_, test), state = found["data"], found["fitted"].state
    metrics: dict[str, float] = {}
    for record in found["fitted"].history.evaluations:
        metrics |= record.metrics
    for name, ema in (("test", False), ("averaged", True)):
        model = state.model(ema=ema)
        model.eval()
        right = np.asarray(model(jnp.asarray(test["images"]))).argmax(1) == test["labels"]
        assert metrics[f"{name}/accuracy"] == pytest.approx(right.mean(), abs=0.006)  # one tie
    assert metrics["test/loss"] < np.log(10)


# --- text ------------------------------------------------------------------------------------------------------------


def test_bits_by_counting_are_those_of_counting(example: Example) -> None:
    module = example("transformer_fsdp")
    train, test = (np.frombuffer(text, np.uint8) for text in (b"the cat sat on the mat, the end", b"the hat"))
    assert module.bits_by_counting(train, test, 1) == pytest.approx(_bits(bytes(train), bytes(test), 1))
    assert module.bits_by_counting(train, test, 3) == pytest.approx(_bits(bytes(train), bytes(test), 3))


def _bits(train: bytes, test: bytes, order: int) -> float:
    together = collections.Counter(train[i : i + order] for i in range(len(train) - order + 1))
    bits = []
    for i in range(len(test) - order + 1):
        seen = test[i : i + order]
        before = sum(count for text, count in together.items() if text[:-1] == seen[:-1])
        bits.append(-np.log2((together[seen] + 0.1) / (before + 12.8)))
    return float(np.mean(bits))


def test_each_character_is_predicted_once_from_those_before(example: Example) -> None:
    module = example("transformer_fsdp")
    found = module.windows(np.arange(12, dtype=np.uint8), 4)
    assert found.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    train, test = module.load()
    assert max(train.max(), test.max()) < 128
    assert len(train) > 300_000

    model = module.Transformer(8, 32, 1, nnx.Rngs(0))
    model.eval()
    codes = np.arange(8)[None] + 60
    changed = codes.copy()
    changed[0, 5:] = 1
    before, after = (np.asarray(model(jnp.asarray(x)))[0] for x in (codes, changed))
    np.testing.assert_allclose(after[:5], before[:5], rtol=1e-5, atol=1e-6)
    assert np.abs(after[5:] - before[5:]).max() > 1e-3


def test_split_parameters_take_an_eighth_and_give_the_same_losses(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("transformer_fsdp")
    found = module.main(["--quick"])
    whole, split = found["steps"]["whole"], found["steps"]["split"]
    np.testing.assert_allclose(split.losses, whole.losses, rtol=1e-4)

    # Three numbers for each parameter; a step and a count, the random streams' and the flag take some bytes.
    shapes = [x.shape for x in jax.tree.leaves(found["fitted"].state.params)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = [size // 8 if size >= 1024 else size for size in sizes]
    assert 0 <= whole.state_bytes - 12 * sum(sizes) < 200
    assert 0 <= split.state_bytes - 12 * sum(parts) < 200
    assert split.communicated.count["all_gather"] > 0
    assert whole.communicated.count["all_gather"] == 0

    printed = capsys.readouterr().out
    assert "The " in printed
    bits = list(found["bits"].values())
    assert bits[0] > bits[1]  # a pair says more than a character
    assert bits[-1] < bits[3] < 7.1  # the transformer learns; all characters alike are 7 bits


def test_on_one_device_there_is_nothing_to_split(example: Example) -> None:
    module = example("transformer_fsdp")
    text, size = module.load()[0][:5_000], module.Size(8, 32, 1)
    axis = px.Axis("batch", 1, mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",)))
    split, whole = (module.some_steps(text, size, 2, axis=axis, **options) for options in ({"shard": "params"}, {}))
    assert split.losses.tolist() == whole.losses.tolist()
    assert split.communicated.total_count == 0


def test_what_is_written_begins_as_told_and_is_the_same_each_time(example: Example) -> None:
    module = example("transformer_fsdp")
    model = module.initial(module.Size(8, 32, 1)).model()
    texts = [module.write(model, "def ", 12, 8) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert len(texts[0]) == 16


# --- as commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("tabular_pipeline", "largest difference of a held-out probability"),
        ("mnist_cnn", "a step communicates"),
        ("transformer_fsdp", "bits per held-out character"),
    ],
)
def test_two_processes_print_the_tables_once(name: str, column: str) -> None:
    command = [*PARAXIS, "launch", "-n", "2", "--devices", "1", str(EXAMPLES / f"{name}.py"), "--quick"]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(column) == 1
    assert "2 devices of 2 processes" in done.stdout


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    saved = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / "tabular_pipeline.py"), "--checkpoint", str(saved)]
    long = [*command, "--epochs", "100000"]
    process = subprocess.Popen(long, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        next(line for line in process.stderr if line.startswith("step "))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert process.returncode == 0
    assert "Ctrl-C: stopped after step" in said
    again = subprocess.run(
        [*command, "--quick"], env=_environment(), capture_output=True, text=True, timeout=240, check=True
    )
    assert f"resumes from {saved}" in again.stderr


def _environment() -> dict[str, str]:
    ours = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # entries of the cache are not written atomically
    return {name: value for name, value in os.environ.items() if name not in ours}
