"""Loss functions: what they are given by name, and their results as means that stay exact when parts are added."""

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.errors import DataError, axis_advice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean as two sums: of values times weights, and of weights.

    The sum of the means of several batches, or of parts of one, is the mean of all rows, whatever the batches' sizes.

    Args:
        total: ``()``, sum of values times weights; of an ensemble's members, ``(size,)``.
        weight: likewise, sum of the weights: for example the number of rows, or tokens. That of a loss may not depend
            on the parameters.
        value: likewise, the mean itself, if it is known without the rounding of a product and a quotient.

    Communicates: nothing; ``float(mean)`` waits for the devices.

    Example:
        >>> import paraxis as px
        >>> float(px.Mean(6.0, 3.0) + px.Mean(2.0, 1.0))
        2.0
    """

    total: Any
    weight: Any
    value: Any = None

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def compute(self) -> Any:
        """Return the mean of sums on the host, in float64: NaN where nothing counts."""
        if isinstance(self.total, float):
            return self.total / self.weight if self.weight else math.nan
        return np.divide(self.total, self.weight, out=np.full(self.total.shape, math.nan), where=self.weight != 0)

    def __float__(self) -> float:
        return Mean(float(self.total), float(self.weight)).compute() if self.value is None else float(self.value)

    def __repr__(self) -> str:
        try:
            return f"Mean({float(self):.6g}, of {float(self.weight):.6g})"
        except (TypeError, ValueError):  # traced, or shapes, or no mean
            return f"Mean(total={self.total!r}, weight={self.weight!r}, value={self.value!r})"

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


Metrics = dict[str, Mean]


class Outcome(NamedTuple):
    """The results of a loss function; no loss, of a function that returns metrics alone."""

    loss: Any  # a Mean, or None
    metrics: Metrics
    mutable: Any


class LossFunction:
    """A function of a model and a batch, and of ``key`` and ``mutable`` if it has parameters of these names."""

    def __init__(self, what: str, fn: Callable[..., Any]) -> None:
        self._what, self._fn, self._name = what, fn, getattr(fn, "__name__", type(fn).__name__)
        parameters = dict(list(inspect.signature(fn).parameters.items())[2:])
        self.wants = frozenset({"key", "mutable"} & parameters.keys())
        self.needs_key = "key" in parameters and parameters["key"].default is not None

    def __call__(self, model: Any, rows: Any, size: int, key: Any, mutable: Any, *, trains: bool) -> Outcome:
        """Call it with some rows of a batch, so many of them. If it ``trains``, it must give a loss."""
        key = key if trains or self.needs_key else None
        optional = {name: x for name, x in {"key": key, "mutable": mutable}.items() if name in self.wants}
        # What is left of jax.pmap.
        advice = "is a function of the whole batch, which the compiler divides; leave lax.pmean out, and axis_name= too"
        with axis_advice(f"{self._what}: {self._name!r} {advice}"):
            returned = self._fn(model, rows, **optional)
        loss, metrics = None, returned
        if trains or not isinstance(returned, Mapping):
            parts = list(returned) if type(returned) is tuple else [returned]
            if "mutable" in self.wants:
                mutable = parts.pop() if len(parts) > 1 else self._refuse(returned)
            loss, metrics = parts if len(parts) == 2 else (parts[0], {})
            if loss is None or isinstance(loss, Mapping) or len(parts) > 2 or not isinstance(metrics, Mapping):
                self._refuse(returned)
        if trains and not jnp.issubdtype(jnp.result_type(*jax.tree.leaves(loss)[:1]), jnp.floating):
            raise DataError(f"{self._what}: {self._name!r} returned a loss of {jnp.result_type(loss)}; return floats")
        means = {str(name): self._mean(f"metric {name!r}", x, size) for name, x in metrics.items()}
        if loss is None:
            return Outcome(None, means, mutable)
        loss = self._mean("the loss", loss, size)
        return Outcome(dataclasses.replace(loss, weight=_constant(loss.weight)), means, mutable)

    def _refuse(self, returned: Any) -> NoReturn:
        more = ", mutable" if "mutable" in self.wants else ""
        kinds = ", ".join(type(x).__name__ for x in (returned if type(returned) is tuple else (returned,)))
        raise DataError(
            f"{self._what}: {self._name!r} returned {kinds}; write return loss{more}, or loss, {{'a': metric}}{more}"
        )

    def _mean(self, which: str, value: Any, size: int) -> Mean:
        """Return the mean: a scalar is that of the rows at hand; rows are averaged; a Mean says what it is of."""
        if isinstance(value, Mean):
            return Mean(wide(value.total), wide(value.weight))
        x = wide(value)
        if x.shape == (size, size) and size > 1:
            warnings.warn(
                f"{self._what}: {which} has shape {x.shape}, as predictions (rows, 1) less labels (rows,) have; write "
                f"model(x)[:, 0]; or, if each row has {size} values, return their means: jnp.mean(losses, 1)",
                stacklevel=2,
            )
        if x.shape and x.shape[0] != size:
            raise DataError(
                f"{self._what}: {which} has shape {x.shape}, but there are {size} rows; return a mean, or {size} values"
            )
        mean = jnp.mean(x) if x.shape else x
        return Mean(mean * size, jnp.asarray(size, mean.dtype), mean)


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    return weight


def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        raise DataError(
            "px.train_step: the weight of the loss, px.Mean(total, weight), depends on the parameters; return total / "
            "weight, the mean of the rows at hand, or write px.Mean(total, jax.lax.stop_gradient(weight))"
        )
    return primals[0], tangents[0]


_constant.defjvp(_refuse_derivative, symbolic_zeros=True)


def value_of(loss: Mean) -> jax.Array:
    """Return the mean inside a program; zero if nothing counts, so that its gradient is zero too."""
    return loss.total / jnp.where(loss.weight == 0, 1, loss.weight) if loss.value is None else loss.value


def wide(x: Any) -> jax.Array:
    """Return an array in a dtype that sums are taken in: float32, or what is wider."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4 else x.astype(jnp.float32)
