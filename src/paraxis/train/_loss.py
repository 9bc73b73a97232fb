"""Calling a loss function: what it is given by name, and what its results mean."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import check
from paraxis.errors import ShapeError
from paraxis.train._mean import Mean


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a loss function."""

    loss: Mean
    metrics: dict[str, Mean]
    mutable: Any


class LossFunction:
    """A function of a model and a batch, and of what else it asks for by name."""

    def __init__(self, what: str, fn: Callable[..., Any]) -> None:
        check.function(what, "fn", fn, f"{what}(lambda model, batch: jnp.mean((model(batch['x']) - batch['y']) ** 2))")
        self.what = what
        self._fn = fn
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.wants = self._wants()

    def _wants(self) -> frozenset[str]:
        try:
            return frozenset({"key", "mutable"} & set(list(inspect.signature(self._fn).parameters)[2:]))
        except (TypeError, ValueError):  # written in C: it takes what it takes
            return frozenset()

    def outcome(self, model: Any, rows: Any, size: int, key: Any, mutable: Any) -> Outcome:
        """Return what it says of some rows, as a loss."""
        loss, metrics, mutable = self._split(self._call(model, rows, key, mutable), mutable)
        mean = self._mean("the loss", loss, size)
        if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(loss)[:1]):
            raise ShapeError(f"{self.what}: {self.name!r} returned a loss of {jnp.result_type(loss)}; return floats")
        return Outcome(mean, self._means(metrics, size), mutable)

    def metrics(self, model: Any, rows: Any, size: int, key: Any, mutable: Any) -> dict[str, Mean]:
        """Return what it says of some rows, as metrics; a loss is one of them."""
        returned = self._call(model, rows, key, mutable)
        if isinstance(returned, Mapping):
            return self._means(returned, size)
        loss, metrics, _ = self._split(returned, mutable)
        return {"loss": self._mean("the loss", loss, size), **self._means(metrics, size)}

    def _call(self, model: Any, rows: Any, key: Any, mutable: Any) -> Any:
        given = {name: x for name, x in {"key": key, "mutable": mutable}.items() if name in self.wants}
        with _explaining(self.what, self.name):
            return self._fn(model, rows, **given)

    def _split(self, returned: Any, mutable: Any) -> tuple[Any, Mapping[str, Any], Any]:
        """(loss, metrics, mutable) of what may be fewer."""
        parts = list(returned) if type(returned) is tuple else [returned]
        if "mutable" in self.wants:
            mutable = parts.pop() if len(parts) > 1 else self._refuse(returned)
        loss, metrics = parts if len(parts) == 2 else (parts[0], {})
        if len(parts) > 2 or not isinstance(metrics, Mapping):
            self._refuse(returned)
        return loss, metrics, mutable

    def _refuse(self, returned: Any) -> Any:
        right = "loss, or loss, {'accuracy': correct}"
        if "mutable" in self.wants:
            right = "loss, mutable, or loss, {'accuracy': correct}, mutable, since it takes mutable"
        kinds = [type(x).__name__ for x in returned] if type(returned) is tuple else [type(returned).__name__]
        raise ShapeError(f"{self.what}: {self.name!r} returned {', '.join(kinds)}; write return {right}")

    def _means(self, metrics: Mapping[str, Any], size: int) -> dict[str, Mean]:
        return {str(name): self._mean(f"metric {name!r}", value, size) for name, value in metrics.items()}

    def _mean(self, which: str, value: Any, size: int) -> Mean:
        """Return the mean: a scalar is that of the rows at hand; rows are averaged; a Mean says what it is of."""
        if isinstance(value, Mean):
            total, weight = _wide(value.total), jax.lax.stop_gradient(_wide(value.weight))
            if total.shape or weight.shape:
                raise ShapeError(
                    f"{self.what}: {which} is a Mean of shapes {total.shape} and {weight.shape}; both are sums: write "
                    "px.Mean(jnp.sum(losses * weights), jnp.sum(weights))"
                )
            return Mean(total, weight)
        try:
            x = _wide(value)
        except (TypeError, ValueError):
            return self._refuse(value)
        if x.shape and x.shape[0] != size:
            raise ShapeError(
                f"{self.what}: {which} has shape {x.shape}, but there are {size} rows; return a scalar, the mean over "
                f"the rows given, or one value per row, ({size}, ...), or px.Mean(total, weight)"
            )
        mean = jnp.mean(x) if x.shape else x
        return Mean(mean * size, jnp.asarray(size, mean.dtype), mean)


@contextlib.contextmanager
def _explaining(what: str, name: str) -> Iterator[None]:
    """Tell whoever comes from ``jax.pmap`` why no axis is there."""
    try:
        yield
    except NameError as error:
        if "axis name" in str(error):
            error.add_note(
                f"{what}: {name!r} is a function of the whole batch, which the compiler divides; leave lax.pmean out"
            )
        raise


def _wide(x: Any) -> jax.Array:
    """Return an array in a dtype that means are taken in: float32, or what is wider."""
    x = jnp.asarray(x)
    is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4
    return x if is_wide else x.astype(jnp.float32)
