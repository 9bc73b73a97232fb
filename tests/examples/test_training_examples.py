"""The examples of training, against plain loops of Flax and optax, and scikit-learn."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

import paraxis as px
from tests._support import bits
from tests.examples.conftest import Quick

pytestmark = pytest.mark.slow


def test_with_any_part_replaced_by_plain_flax_the_state_is_the_same_bit_by_bit() -> None:
    module = import_module("tabular_pipeline")
    table = module.load()
    found = module.replaced(table, 14)  # the 13th batch is a short one
    by_hand = found["everything"]
    for name, state in found.items():
        if "on 8 devices" in name:
            expected = module.probabilities(by_hand, table.held_out["x"])
            np.testing.assert_allclose(module.probabilities(state, table.held_out["x"]), expected, atol=1e-4)
            continue
        variables = state.mutable["batch_stats"] if isinstance(state, px.TrainState) else state.batch_stats
        assert bits((state.params, variables)) == bits((by_hand.params, by_hand.batch_stats))
    assert len(found) == 6


def test_the_pipeline_resumes_and_scores_what_scikit_learn_does(quick: Quick, tmp_path: Path) -> None:
    module, (unbroken, _, _) = import_module("tabular_pipeline"), quick("tabular_pipeline")
    for epochs in (1, 2):
        fitted = module.train(unbroken["table"], epochs, checkpoint=str(tmp_path / "run"))
    whole, held_out = unbroken["fitted"], unbroken["table"].held_out
    assert bits((fitted.state.params, fitted.state.opt_state)) == bits((whole.state.params, whole.state.opt_state))
    assert fitted.history == whole.history
    predicted = module.probabilities(fitted.state, held_out["x"])
    last = fitted.history.evaluations[-1].metrics
    assert last["held-out/accuracy"] == pytest.approx(accuracy_score(held_out["y"], predicted > 0.5))
    assert last["held-out/loss"] == pytest.approx(log_loss(held_out["y"], predicted), rel=1e-4)
    assert last["held-out/accuracy"] > 0.9
