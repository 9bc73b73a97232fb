"""What the examples of the demo compute that no other example does, against plain JAX, NumPy and scikit-learn."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from sklearn.linear_model import LogisticRegression

import paraxis as px

pytestmark = pytest.mark.slow

Example = Callable[[str], ModuleType]


@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_that_was_stopped_resumes_to_the_bits_of_descent_with_momentum(
    example: Example, devices: int, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    module = example("stop_and_resume")
    train, test = (x.first(n) for x, n in zip(module.load_mnist(), (450, 120), strict=True))
    axis = px.Axis("batch", 1, mesh=Mesh(np.array(jax.devices()[:devices]), ("batch",)))
    trainer = module.Trainer((train, test), 2, axis)
    whole, stopped, resumed = trainer.run(), trainer.run(tmp_path / "run", 3), trainer.run(tmp_path / "run")
    assert 3 <= int(stopped.state.step) < 10 == int(resumed.state.step)
    assert "SIGTERM: stopped after step" in capfd.readouterr().err
    number = len(jax.tree.leaves(whole.state))
    assert module.differing(resumed, whole) == f"0 of {number} arrays, 0 of 10 losses"
    params = whole.state.params | {"dense_bias": whole.state.params["dense_bias"].at[3].add(0.5)}
    other = whole._replace(state=whole.state.replace(params=params))
    assert module.differing(other, whole) == f"1 of {number} arrays, 0 of 10 losses"


def test_a_streamed_fit_that_was_stopped_is_scikit_learns(example: Example) -> None:
    module = example("streamed_logreg")
    found = module.main(["--quick"])
    X, y = module.even_or_odd(module.load_mnist()[0].first(2000))
    assert X[0].reshape(14, 14)[4, 5] == pytest.approx(module.load_mnist()[0].images[0, 8:10, 10:12].mean())
    theirs = LogisticRegression(C=0.1, tol=1e-8, max_iter=1000).fit(X, y)
    for model in found["fits"].values():
        np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-3)
    assert found["fits"]["resumed"].coef_.tobytes() == found["fits"]["not stopped"].coef_.tobytes()
    new, labels = found["held_out"]
    assert np.mean(found["predicted"] == theirs.predict(new)) > 0.995
    assert np.mean(found["predicted"] == labels) > 0.8
