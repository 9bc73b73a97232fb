"""Averages over members: what is taken of each, and how it is combined."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import arguments
from paraxis.ensembles import _moments
from paraxis.ensembles._resident import Resident
from paraxis.errors import ShapeError


@dataclasses.dataclass(frozen=True)
class Averaged(abc.ABC):
    """``each`` is taken of one member's prediction and inputs, on its device; ``of`` combines the members'."""

    each: Callable[[Any, tuple[Any, ...]], Any]

    @abc.abstractmethod
    def of(self, rows: Resident, weights: np.ndarray) -> Any:
        """Return the average over members with these weights, ``(size,)``."""


class _Mean(Averaged):
    def of(self, rows: Resident, weights: np.ndarray) -> Any:
        return _moments.mean(rows, weights)


class _Moments(Averaged):
    def of(self, rows: Resident, weights: np.ndarray) -> Any:
        return _moments.moments(rows, weights)


class _Mixture(Averaged):
    def of(self, rows: Resident, weights: np.ndarray) -> Any:
        (mean, within), (between, _) = _moments.moments(rows, weights)
        return mean, jax.tree.map(jnp.add, within, between)


def named(average: str, known: Sequence[str]) -> Averaged:
    """Return an average by its name.

    Raises:
        ShapeError: if it is not known.
    """
    if not isinstance(average, str) or average not in _NAMED:
        got = arguments.described(average)
        raise ShapeError(
            f"ensemble.predict: average must be one of {', '.join(map(repr, known))}, got {got}; for classifiers "
            f"that give logits, leave it out"
        )
    return _NAMED[average]


def _probabilities(logits: Any, inputs: tuple[Any, ...]) -> Any:
    first = jnp.shape(next(iter(jax.tree.leaves(inputs)), 0))

    def one(x: jax.Array) -> jax.Array:
        write = "Write average='sigmoid' for one logit of a yes or no, average='moments' for a regression"
        needs = f"ensemble.predict: average='softmax' needs logits (..., classes), but the model gives {x.shape}"
        if x.ndim == 0 or x.shape[-1] < 2:
            raise ShapeError(f"{needs}; the probability of a single class is always 1. {write}")
        if len(first) > 1 and x.shape == first[:1]:
            raise ShapeError(
                f"{needs}, one number for each of the inputs' {x.shape[0]} rows. {write}; if the inputs are one "
                "example, whose logits these are, ens.predict(x[None])"
            )
        return jax.nn.softmax(_wide(x))

    return jax.tree.map(one, logits)


def _sigmoids(logits: Any, _: Any) -> Any:
    return jax.tree.map(lambda x: jax.nn.sigmoid(_wide(x)), logits)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def same(y: Any, _: Any) -> Any:
    """Return a prediction as it is."""
    return y


def _pair(y: Any, _: Any) -> Any:
    if not isinstance(y, tuple) or len(y) != 2:
        raise ShapeError(
            f"ensemble.predict: average='mixture' needs models that give (mean, variance), but the model gives a "
            f"{type(y).__name__}; write apply=lambda model, x: (mean, variance), or average='moments'"
        )
    return y


_NAMED: dict[str, Averaged] = {
    "softmax": _Mean(_probabilities),
    "sigmoid": _Mean(_sigmoids),
    "mean": _Mean(same),
    "moments": _Moments(same),
    "mixture": _Mixture(_pair),
}
