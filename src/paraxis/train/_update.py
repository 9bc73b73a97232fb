"""From a gradient to the next state: clipping, the optimiser, the average, the guard."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core.check import needed
from paraxis.errors import StateError
from paraxis.train._loss import Mean, Metrics, Outcome, value_of, wide
from paraxis.train._state import TrainState


def updated(
    state: TrainState, gradient: Any, found: Outcome, clip: float | None, *, guard: bool
) -> tuple[TrainState, Metrics]:
    with needed("px.train_step", "train"):
        import optax
    if taken := sorted({"loss", "grad_norm"} & set(found.metrics)):
        raise StateError(f"px.train_step: metric {taken[0]!r} has a name that the step uses; give yours another")
    loss, norm = found.loss, optax.tree.norm(jax.tree.map(wide, gradient))
    metrics = {"loss": loss, **found.metrics}
    if clip is not None or guard:
        metrics["grad_norm"] = Mean(norm, jnp.ones_like(norm))
    if clip is not None:
        gradient = jax.tree.map(lambda g: jnp.where(norm < clip, g, wide(g) / norm * clip).astype(g.dtype), gradient)

    def optimized(state: TrainState) -> TrainState:
        optimizer, decay = state.optimizer, state.ema_decay
        try:  # with the loss, which Polyak's step and reduce_on_plateau need
            update = optax.with_extra_args_support(optimizer).update
            updates, opt_state = update(gradient, state.opt_state, state.params, value=value_of(loss))
        except TypeError:  # SAM, or a chain with it, takes none
            updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema if decay is None else optax.incremental_update(params, state.ema, 1 - decay)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, mutable=found.mutable, ema=ema)

    if not guard:
        return optimized(state), metrics
    # A total of no weight, or of less, has no mean.
    total = jnp.where((loss.weight > 0) | (loss.total == 0), loss.total, jnp.nan)
    metrics["loss"] = dataclasses.replace(loss, total=total)

    def unless_stopped(x: Any) -> Any:
        return None if x is None else jnp.where(state.ok, x, jnp.nan)

    metrics = {k: Mean(unless_stopped(m.total), m.weight, unless_stopped(m.value)) for k, m in metrics.items()}
    ok = jnp.isfinite(value_of(metrics["loss"])) & jnp.isfinite(metrics["grad_norm"].total)
    return _guarded(ok, state, optimized), metrics


def _guarded(ok: jax.Array, state: TrainState, update: Callable[[TrainState], TrainState]) -> TrainState:
    """Return the state after an update; or the one before, which is then marked.

    On CPU by a branch around the update, which then writes over the old state: chosen element by element afterwards,
    both would be there at once, and be read and written once more. Elsewhere the choice is made element by element, as
    it is fused with the update there, and a branch would make the host wait for the gradient.
    """
    changed = state.replace(key=None, extra=None, ok=None)

    def by_branch(before: TrainState) -> TrainState:
        return jax.lax.cond(ok, update, lambda same: same, before)

    def by_element(before: TrainState) -> TrainState:
        return jax.tree.map(functools.partial(jnp.where, ok), update(before), before)

    after = jax.lax.platform_dependent(changed, cpu=by_branch, default=by_element)
    return after.replace(key=state.key, extra=state.extra, ok=ok)
