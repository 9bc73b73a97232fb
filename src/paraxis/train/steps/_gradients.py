"""Loss and gradient of a batch, whole or in turns."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import tree
from paraxis.errors import ShapeError, StateError
from paraxis.train._batches import Batch
from paraxis.train.steps import _precision
from paraxis.train.steps._losses import LossFunction, Outcome, Part
from paraxis.train.steps._mean import Mean
from paraxis.train.steps._state import TrainState


def gradients(
    fn: LossFunction, state: TrainState, batch: Batch, key: Any, turns: int, precision: str | None
) -> tuple[Any, Outcome]:
    """Return the gradient of the mean loss of a batch, and what the loss function gave.

    In turns, the number of a row says which: row ``i`` is of turn ``i % turns``, on the device where it lies. Sums of
    gradients and of weights are divided once, so that the mean is that of the whole batch.
    """
    if turns == 1:
        part = Part(batch.rows(), batch.num_rows, key, key, jnp.arange(batch.num_rows))
        return _differentiated(fn, state, state.mutable, part, precision, _mean_loss)
    return _in_turns(fn, state, batch, key, turns, precision)


def _differentiated(
    fn: LossFunction,
    state: TrainState,
    mutable: Any,
    part: Part,
    precision: str | None,
    objective: Callable[[Mean], jax.Array],
) -> tuple[Any, Outcome]:
    def of(params: Any) -> tuple[jax.Array, Outcome]:
        outcome = _outcome(fn, state, params, mutable, part, precision)
        return objective(outcome.loss), outcome

    (_, outcome), gradient = jax.value_and_grad(of, has_aux=True)(state.params)
    return gradient, outcome


def _outcome(
    fn: LossFunction, state: TrainState, params: Any, mutable: Any, part: Part, precision: str | None
) -> Outcome:
    lower = _precision.lowered(params, precision)
    part = dataclasses.replace(part, rows=_precision.lowered(part.rows, precision))
    model, after = state.recipe.form.make(lower, mutable, part.key, "train")
    try:
        outcome = fn.outcome(model, part, mutable)
    except (AttributeError, TypeError) as error:
        if mutable is None and "mutable" in fn.wants:
            error.add_note(
                f"{fn.what}: the state has no mutable; write px.TrainState.create(model, optimizer, mutable=…)"
            )
        raise
    new = outcome.mutable if "mutable" in fn.wants else after()
    return Outcome(outcome.loss, outcome.metrics, _kept(fn.what, new, mutable))


def _kept(what: str, new: Any, old: Any) -> Any:
    """Return the new mutable state, in the dtypes of the old one."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise StateError(
            f"{what}: the mutable state changed its structure, from {jax.tree.structure(old)} to "
            f"{jax.tree.structure(new)}; make all of it when the state is made"
        )

    def one(path: Any, x: Any, before: jax.Array) -> jax.Array:
        if jnp.shape(x) != before.shape:
            raise ShapeError(
                f"{what}: {tree.name('mutable', path)} changed its shape from {before.shape} to {jnp.shape(x)}; it "
                f"must stay as it is from step to step"
            )
        return x if x.dtype == before.dtype else jnp.asarray(x, before.dtype)

    return jax.tree_util.tree_map_with_path(one, new, old)


def _mean_loss(loss: Mean) -> jax.Array:
    """Return the loss itself; zero if nothing counts, so that the gradient is zero too."""
    return loss.total / jnp.where(loss.weight == 0, 1, loss.weight) if loss.value is None else loss.value


def _total_loss(loss: Mean) -> jax.Array:
    return loss.total


def _in_turns(
    fn: LossFunction, state: TrainState, batch: Batch, key: Any, turns: int, precision: str | None
) -> tuple[Any, Outcome]:
    def turn(part: Part, mutable: Any) -> tuple[Any, Any, Mean, dict[str, Mean]]:
        gradient, found = totals_of_part(fn, state, mutable, part, precision)
        return found.mutable, gradient, found.loss, found.metrics

    mutable, (gradient, loss, metrics) = _threaded(turn, state.mutable, batch, key, turns)
    return divided(gradient, loss), Outcome(loss, metrics, mutable)


def totals_of_part(
    fn: LossFunction, state: TrainState, mutable: Any, part: Part, precision: str | None
) -> tuple[Any, Outcome]:
    """Return the gradient of the total loss of some rows, and the loss function's sums: they add up over parts."""
    gradient, found = _differentiated(fn, state, mutable, part, precision, _total_loss)
    metrics = {name: _sums(x) for name, x in found.metrics.items()}
    return gradient, Outcome(_sums(found.loss), metrics, found.mutable)


def divided(gradient: Any, loss: Mean) -> Any:
    """Return the gradient of the mean, of that of the total; zero if nothing counts."""
    weight = jnp.where(loss.weight == 0, 1, loss.weight)
    return jax.tree.map(lambda g: g / weight.astype(g.dtype), gradient)


def in_turns(metrics: Callable[[Part], dict[str, Mean]], batch: Batch, key: Any, turns: int) -> dict[str, Mean]:
    """Metrics of a batch whose rows are taken in turns."""

    def turn(part: Part, nothing: None) -> tuple[None, dict[str, Mean]]:
        return nothing, {name: _sums(x) for name, x in metrics(part).items()}

    return _threaded(turn, None, batch, key, turns)[1][0]


def _threaded(turn: Callable[..., Any], carried: Any, batch: Batch, key: Any, turns: int) -> tuple[Any, Any]:
    """``turn(part, carried)`` → what is carried to the next turn, and trees that are added up; for all turns."""
    size, longer = divmod(batch.num_rows, turns)  # the first turns have one row more

    def one(size: int, sums: Any, index: Any) -> tuple[Any, None]:
        carried, *added = sums
        carried, *more = turn(_part(batch, key, index, turns, size), carried)
        return (carried, *jax.tree.map(jnp.add, added, more)), None

    _, *shapes = jax.eval_shape(lambda c: turn(_part(batch, key, 0, turns, size), c), carried)
    sums = (carried, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    for first, last, length in ((0, longer, size + 1), (longer, turns, size)):
        if last > first:
            sums, _ = jax.lax.scan(functools.partial(one, length), sums, jnp.arange(first, last))
    carried, *added = sums
    return carried, added


def _part(batch: Batch, key: Any, index: Any, turns: int, size: int) -> Part:
    numbers = index + turns * jnp.arange(size)
    # Keys of turns are numbered from the top down: those of rows from zero up.
    own = None if key is None else jax.random.fold_in(key, jnp.uint32(2**32 - 1) - jnp.asarray(index, jnp.uint32))
    return Part(batch.turn(index, turns, size), size, own, key, numbers)


def _sums(mean: Mean) -> Mean:
    return Mean(mean.total, mean.weight)
