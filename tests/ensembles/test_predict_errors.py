"""What predictions refuse, with the line to write instead."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.ensembles._kinds import mesh_of

SIZE = 7
X, W = values(6, 3), values(SIZE, 3, 4, seed=2)


def linear(**options: Any) -> px.Ensemble:
    """Members ``(3, 4)`` with weights that are given."""
    return px.ensemble(lambda key, w: w, SIZE, 0, W, mesh=mesh_of(2), **{"apply": lambda w, x: x @ w, **options})


ERRORS: dict[str, tuple[Callable[[px.Ensemble], Any], type[Exception], str]] = {
    "an unknown average": (
        lambda ens: ens.predict(X, average="median"),  # pyright: ignore[reportArgumentType]
        px.ShapeError,
        r"average must be one of 'softmax', .*got 'median'; for classifiers that give logits, leave it out",
    ),
    "one class": (
        lambda ens: ens.predict(X, apply=lambda w, x: (x @ w)[:, :1]),
        px.ShapeError,
        r"needs logits \(\.\.\., classes\), but the model gives \(6, 1\).*average='sigmoid'.*average='moments'",
    ),
    "a number": (lambda ens: ens.predict(X, apply=lambda w, x: w.sum()), px.ShapeError, r"the model gives \(\)"),
    "a number for each row": (
        lambda ens: ens.predict(X, apply=lambda w, x: x @ w[:, 0]),
        px.ShapeError,
        r"gives \(6,\), one number for each of the inputs' 6 rows\. Write average='sigmoid'.*ens\.predict\(x\[None\]\)",
    ),
    "a number for each row of a batch": (
        lambda ens: ens.predict(X, apply=lambda w, x: x @ w[:, 0], batch_size=4),
        px.ShapeError,
        r"gives \(4,\), one number for each of the inputs' 4 rows",
    ),
    "no pair": (
        lambda ens: ens.predict(X, average="mixture"),
        px.ShapeError,
        r"needs models that give \(mean, variance\), but the model gives a \w+; write apply=lambda model, x:",
    ),
    "numbers for where": (
        lambda ens: ens.predict(X, where=np.ones(SIZE)),
        px.ShapeError,
        r"where must be booleans \(7,\), one per member, got float64\[7\]; write where=ens\.finite\(\)",
    ),
    "where of others": (
        lambda ens: ens.predict(X, where=[True, False]),
        px.ShapeError,
        r"where must be booleans \(7,\).*got bool\[2\]; write where=ens\.finite\(\)",
    ),
    "nobody": (lambda ens: ens.predict(X, where=np.zeros(SIZE, bool)), px.ShapeError, "where leaves no member"),
    "own inputs in batches": (
        lambda ens: ens.predict(values(SIZE, 6, 3), in_axes=0, batch_size=2),
        px.ShapeError,
        r"batch_size cuts inputs that all members share, so in_axes must be None; leave in_axes out, or batch_size",
    ),
    "rows that differ": (
        lambda ens: ens.members(X, X[:2], batch_size=2),
        px.ShapeError,
        r"ensemble\.members: batch_size=2 needs inputs that all have the same number of leading rows",
    ),
    "a batch of none": (
        lambda ens: ens.predict(X, batch_size=0),
        px.ShapeError,
        "batch_size must be an integer of at least 1, got 0",
    ),
    "inputs that are not arrays": (lambda ens: ens.predict("x"), px.ShapeError, r"args\[0\] is a str, not an array"),
    "a module from outside": (
        lambda ens: ens.predict(X, apply=lambda w, x: OUTSIDE(x)),
        px.StateError,
        r"apply.*OUTSIDE.*px\.freeze\(OUTSIDE\)",
    ),
}
OUTSIDE = nnx.Linear(3, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ERRORS)
def test_it_is_refused(name: str) -> None:
    use, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        use(linear())


def test_a_model_that_cannot_be_applied_is_refused() -> None:
    with pytest.raises(
        px.StateError, match=r"does not say how it is applied; write px\.ensemble\(make, …, apply=lambda"
    ):
        linear(apply=None).predict(X)
    ens = px.ensemble(lambda key: nnx.Dict(w=nnx.Param(jnp.ones(2))), 2, 0, mesh=mesh_of(2))
    with pytest.raises(
        px.StateError, match=r"a Dict cannot be called; write.*apply=lambda net, x: …\), or give apply="
    ):
        ens.predict(X)


def test_what_failed_once_leaves_the_ensemble_usable() -> None:
    ens = linear()
    with pytest.raises(px.ShapeError, match="needs models that give"):
        ens.predict(X, average="mixture")
    assert ens.predict(X).shape == (6, 4)
    assert_close(ens.stacked(), W)
