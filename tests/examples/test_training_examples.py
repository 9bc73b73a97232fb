"""The examples of training, against plain loops of Flax and optax, NumPy and scikit-learn."""

import os
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


# --- text ------------------------------------------------------------------------------------------------------------


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


# --- as commands -----------------------------------------------------------------------------------------------------


def test_two_processes_print_the_table_once() -> None:
    command = [*PARAXIS, "launch", "-n", "2", "--devices", "1", str(EXAMPLES / "mnist_cnn.py"), "--quick"]
    # Entries of JAX's cache are not written atomically.
    ours = {name: x for name, x in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    done = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a step communicates") == 1
    assert "2 devices of 2 processes" in done.stdout
