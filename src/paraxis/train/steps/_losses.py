"""Calling a loss function: what it is given by name, and what its results mean."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._calls import arguments
from paraxis.errors import ShapeError, StateError
from paraxis.train.steps import _precision
from paraxis.train.steps._linen import Bound
from paraxis.train.steps._mean import Mean

OFFERED = ("key", "row_keys", "mutable")


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows that a loss function is called with.

    Attributes:
        rows: their arrays.
        size: how many there are.
        key: the random key of this call, or ``None``.
        row_key: what the keys of rows are made from, or ``None``.
        numbers: ``(size,)``, the rows' numbers in the batch.
    """

    rows: Any
    size: int
    key: Any
    row_key: Any
    numbers: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a loss function."""

    loss: Mean
    metrics: dict[str, Mean]
    mutable: Any


class LossFunction:
    """A function of a model and a batch, and of what else it asks for by name.

    Args:
        what: the function of ours that was called, for errors.
        fn: ``fn(model, batch, …)``.
        example: what to write instead, for errors.
        argument: how ``what`` calls ``fn``, likewise.
    """

    def __init__(self, what: str, fn: Callable[..., Any], example: str, argument: str) -> None:
        self.what = what
        if not callable(fn):
            got = arguments.described(fn)
            raise StateError(f"{what}: {argument}, the first argument, must be a function, got {got}; write {example}")
        self._fn = fn
        self._example = example
        self.wants = self._asked()

    @property
    def function(self) -> Callable[..., Any]:
        """The user's."""
        return self._fn

    @property
    def name(self) -> str:
        """Return the user's name for it."""
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    @property
    def wants_key(self) -> bool:
        return bool({"key", "row_keys"} & self.wants)

    def _asked(self) -> frozenset[str]:
        try:
            parameters = list(inspect.signature(self._fn).parameters.values())
        except (TypeError, ValueError):  # written in C: it takes what it takes
            return frozenset()
        free = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        catches = any(p.kind == p.VAR_POSITIONAL for p in parameters)
        if len(free) < 2 and not catches:
            raise StateError(
                f"{self.what}: {self.name!r} must take a model and a batch, but takes "
                f"({', '.join(p.name for p in parameters)}); write {self._example}"
            )
        rest = [p for p in parameters if p not in free[:2] and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        unknown = [p.name for p in rest if p.name not in OFFERED and p.default is p.empty]
        if unknown:
            raise StateError(
                f"{self.what}: {self.name!r} has an unknown parameter {unknown[0]!r}; besides the "
                f"model and the batch it may take {', '.join(OFFERED)}, by these names. Give options a default, or fix "
                f"them: functools.partial({self.name}, {unknown[0]}=…)"
            )
        return frozenset(p.name for p in rest if p.name in OFFERED)

    def __call__(self, model: Any, part: Part, mutable: Any) -> Any:
        """Call the function."""
        given = {}
        if "key" in self.wants:
            given["key"] = part.key
        if "row_keys" in self.wants:
            given["row_keys"] = jax.vmap(jax.random.fold_in, (None, 0))(part.row_key, part.numbers)
        if "mutable" in self.wants:
            given["mutable"] = mutable
        try:
            return _guarded(self.what, self._fn)(model, part.rows, **given)
        except Exception as error:
            with contextlib.suppress(Exception):  # the error is the user's, whatever it is like
                for note in _notes(error, model, part.rows):
                    error.add_note(f"{self.what}: {self.name!r} {note}")
            raise

    def outcome(self, model: Any, part: Part, mutable: Any) -> Outcome:
        """Return what it says of these rows, as a loss."""
        loss, metrics, mutable = self._split(self(model, part, mutable), mutable)
        return Outcome(self._loss(loss, part.size), self._metrics(metrics, part.size), mutable)

    def metrics(self, model: Any, part: Part, mutable: Any) -> dict[str, Mean]:
        """Return what it says of these rows, as metrics; a loss is one of them."""
        returned = self(model, part, mutable)
        if isinstance(returned, Mapping):
            return self._metrics(returned, part.size)
        loss, metrics, _ = self._split(returned, mutable)
        return {"loss": self._loss(loss, part.size), **self._metrics(metrics, part.size)}

    def _split(self, returned: Any, mutable: Any) -> tuple[Any, Mapping[str, Any], Any]:
        """(loss, metrics, mutable) of what may be fewer."""
        parts = list(returned) if type(returned) is tuple else [returned]
        if "mutable" in self.wants:
            mutable = parts.pop() if len(parts) > 1 else self._fail(returned)
        loss, metrics = parts if len(parts) == 2 else (parts[0], {})
        if len(parts) > 2 or not isinstance(metrics, Mapping):
            self._fail(returned)
        return loss, metrics, mutable

    def _fail(self, returned: Any) -> Any:
        right = "loss, or loss, {'accuracy': correct}"
        if "mutable" in self.wants:
            right = "loss, mutable, or loss, {'accuracy': correct}, mutable, since it takes mutable"
        kinds = [type(x).__name__ for x in returned] if type(returned) is tuple else [type(returned).__name__]
        raise ShapeError(f"{self.what}: {self.name!r} returned {', '.join(kinds)}; write return {right}")

    def _loss(self, value: Any, size: int) -> Mean:
        found = self._mean("loss", value, size)
        if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(value)[:1]):
            raise ShapeError(
                f"{self.what}: {self.name!r} returned a loss of dtype {jnp.result_type(value)}, which has no "
                f"derivative; return floating-point numbers"
            )
        return found

    def _metrics(self, metrics: Mapping[str, Any], size: int) -> dict[str, Mean]:
        return {str(name): self._mean(f"metric {name!r}", value, size) for name, value in metrics.items()}

    def _mean(self, which: str, value: Any, size: int) -> Mean:
        """Return the mean: a scalar is that of the rows at hand; rows are averaged; a Mean says what it is of."""
        if isinstance(value, Mean):
            total, weight = _summed(value.total), jax.lax.stop_gradient(_summed(value.weight))
            if total.shape or weight.shape:
                raise ShapeError(
                    f"{self.what}: {which} is a Mean of shapes {total.shape} and {weight.shape}; both are sums, ( ): "
                    f"write px.Mean(jnp.sum(losses * weights), jnp.sum(weights))"
                )
            return Mean(total, weight)
        try:
            x = _summed(value)
        except (TypeError, ValueError):
            return self._fail(value)
        if x.shape and x.shape[0] != size:
            raise ShapeError(
                f"{self.what}: {which} has shape {x.shape}, but there are {size} rows; return a scalar, the mean over "
                f"the rows given, or one value per row, ({size}, ...), or px.Mean(total, weight)"
            )
        mean = jnp.mean(x) if x.shape else x
        return Mean(mean * size, jnp.asarray(size, mean.dtype), mean)


def _notes(error: Exception, model: Any, rows: Any) -> Iterator[str]:
    """Yield what a function was given, where its error is about that."""
    module = model.module if isinstance(model, Bound) else model
    call = f"{type(module).__qualname__}.__call__"
    text = str(error)
    if isinstance(error, TypeError) and text.startswith(f"{call}()"):
        is_mode = "'train'" in text and not isinstance(model, Bound)
        mode = "; it is in train() or eval() mode already: write model(x)" if is_mode else ""
        names = ", ".join(inspect.signature(type(module).__call__).parameters)
        yield f"calls its model with other arguments than it takes: __call__({names}){mode}"
    if isinstance(error, TypeError) and text.startswith(f"{type(model).__name__!r} object is not"):
        what = f"parameters, {_contents(model)}" if isinstance(model, Mapping) else type(model).__name__
        yield f"was given as its model what the state was made from: the {what}"
    kind = type(rows).__name__
    if isinstance(error, KeyError) or text.startswith((f"{kind} indices must be", f"{kind!r} object has no attribute")):
        params = f", and the parameters, {_contents(model)}" if isinstance(model, Mapping) else ""
        yield f"was given the batch, {_contents(rows)}{params}"


def _contents(x: Any) -> str:
    """Return what can be taken out of a batch, or of parameters."""
    if isinstance(x, Mapping):
        return f"a {type(x).__name__} with {', '.join(map(repr, x))}"
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return f"an array {jnp.shape(x)}" if hasattr(x, "dtype") else f"of type {type(x).__name__}"


def _summed(x: Any) -> jax.Array:
    return _precision.summed(jnp.asarray(x))


def _guarded(what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which raises if it uses an NNX module from outside: it would not be trained."""
    if "flax.nnx" not in sys.modules:
        return fn
    from paraxis._modules import captured

    cure = "Take it as the first argument, which is the model of the state; or say that {} is constant: px.freeze({})"
    called = getattr(fn, "__name__", type(fn).__name__)
    return captured.guarded(captured.Guard(what, called, lambda name: cure.format(name, name)), fn)
