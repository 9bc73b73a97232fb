"""``TrainState``: all that a training step changes, as one value, its layout on the devices, and the next one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.dtypes import prng_key

from paraxis._core import arrays, check, jax_api
from paraxis._core.placing import Placement
from paraxis.errors import StateError
from paraxis.train import _models
from paraxis.train._leaves import by_path
from paraxis.train._loss import Mean, Metrics, Outcome, value_of, wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes, as an immutable pytree. Make one with :meth:`create`.

    Attributes:
        step: int32 ``()``, number of steps taken.
        params: the parameters: for an NNX or Linen module, dicts nested like the module; for a model that is a pytree,
            a pytree like it with ``None`` for all leaves but floating arrays. ``None``, too, for those that are frozen.
        frozen: the parameters that are not trained, likewise; or ``None``.
        opt_state: the optimiser's state.
        mutable: other values: an NNX module's other variables (running statistics, random streams), a Linen module's
            other collections, the value that a plain loss function returns, or a pytree's other arrays; or ``None``.
        key: the random key from which steps make theirs, ``fold_in(key, step)``; it does not change. Or ``None``.
        ema: exponential moving average of the parameters, at least float32, or ``None``.
        extra: any values of yours to be saved with the state; steps do not change them.
        ok: bool ``()``: False once a step has met a loss or a gradient that is not finite. That step and all later
            ones have changed nothing else.
        form, optimizer, ema_decay: the static part: how to make the model, the optimiser, the decay of the average.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1), extra={"epoch": jnp.array(0)})
        >>> int(state.replace(extra={"epoch": jnp.array(1)}).extra["epoch"])
        1
    """

    step: jax.Array
    params: Any
    frozen: Any
    opt_state: Any
    mutable: Any
    key: Any
    ema: Any
    extra: Any
    ok: jax.Array
    form: _models.Form = dataclasses.field(metadata={"static": True})
    optimizer: Any = dataclasses.field(metadata={"static": True})
    ema_decay: float | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        model: Any,
        optimizer: Any,
        *,
        key: Any = None,
        sample: Any = None,
        train: Any = None,
        mutable: Any = None,
        ema: float | None = None,
        extra: Any = None,
    ) -> "TrainState":
        """Return a state at step 0. It has its own arrays, and does not change the model.

        Args:
            model: an NNX module; a Linen module; a callable pytree, such as an Equinox module, whose floating arrays
                are trained, or a tree of such pytrees; or the parameters, a pytree of floating arrays.
            optimizer: an optax optimiser. If it takes extra arguments, it is given the loss as ``value=``; of one that
                takes others only, write ``optax.GradientTransformation(*sam)``.
            key: one random key: for a Linen module, and for loss functions that take ``key``. An NNX
                module has its own random streams.
            sample: the arguments with which to initialise a Linen module: an array such as ``x[:1]``, a tuple of
                arguments, or a dict of keyword arguments.
            train: which parameters are trained; the default is all. For an NNX module, a filter of NNX, such as
                ``nnx.LoRAParam``; else a function ``train(path, array)`` of a tuple of names, or booleans in a tree
                like the parameters, or a prefix of it. The others are frozen: they have no gradient, no state of the
                optimiser and no average, and do not count for ``clip``, the guard and ``grad_norm``.
            mutable: a pytree that a plain loss function takes as ``mutable`` and returns.
            ema: decay of a moving average of the parameters, such as 0.999: ``ema = decay * ema + (1 - decay) *
                params`` after each step. It starts as the parameters.
            extra: any values of yours, a pytree of arrays.

        Raises:
            StateError: if there is nothing to train, or what is no floating array, or a Linen module comes without
                ``key`` or ``sample``.

        Communicates: nothing.

        Example:
            >>> import jax.numpy as jnp, optax, paraxis as px
            >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
            >>> int(state.step), state.params["w"].shape
            (0, (3,))
        """
        if ema is not None:
            check.number("TrainState.create", "ema", ema, least=0, most=1, write="ema=0.999", error=StateError)
        if key is not None and not _models.is_a(prng_key, key):  # what jax.random.PRNGKey makes
            key = jax.random.wrap_key_data(jnp.asarray(key))
        form, params, rest = _models.split(model, key, sample)
        if mutable is not None and rest is not None:
            raise StateError(f"TrainState: a {type(model).__name__} has mutable state of its own; leave mutable= out")
        mutable, none = mutable if rest is None else rest, jnp.zeros(())
        return cls(none, params, None, None, mutable, key, None, extra, none, form, optimizer, ema).restart(train=train)

    def restart(self, optimizer: Any = None, *, train: Any = None) -> "TrainState":
        """Return a state at step 0 with the same parameters for fine-tuning; the optimiser and the average start anew.

        Args:
            optimizer: an optax optimiser; the default is the same.
            train: which parameters are trained from now on, as in :meth:`create`; the default is the same.

        Raises:
            StateError: as :meth:`create`, or if a step has consumed the arrays.

        Communicates: nothing.

        Example:
            >>> import jax.numpy as jnp, optax, paraxis as px
            >>> state = px.TrainState.create({"body": jnp.ones(9), "head": jnp.ones(3)}, optax.adam(1e-3))
            >>> state.restart(optax.sgd(1e-4), train=lambda path, array: "head" in path)
            TrainState(plain, 12 parameters, 3 of them trained)
        """
        require_arrays("TrainState.restart", self)
        params, frozen, optimizer = self.params, self.frozen, self.optimizer if optimizer is None else optimizer
        if train is not None:
            params, frozen = _models.partition(self.form, _models.combine(params, frozen), train)
        params = _models.copy(params)
        if not (trained := by_path(params, "params")):
            which = "the model has" if train is None else f"of {jax.tree.map(jnp.shape, self.params)}, train= leaves"
            raise StateError(f"TrainState.create: {which} no arrays to train")
        if others := [name for name, x in trained.items() if not _models.is_a(jnp.inexact, x)]:
            raise StateError(f"TrainState: {others[0]} is no floating array to be trained; write train= or mutable=")
        restarted = self.replace(
            step=jnp.zeros((), jnp.int32),
            params=params,
            frozen=frozen,
            opt_state=optimizer.init(params),
            # A 16-bit average would not move: a thousandth of a difference is less than its rounding.
            ema=None if self.ema_decay is None else jax.tree.map(wide, params),
            ok=jnp.ones((), bool),
            optimizer=optimizer,
        )
        return _models.copy(restarted)

    def model(self, *, ema: bool = False) -> Any:
        """Return the model that the state was made from, with copies of the arrays, averaged ones if ``ema``.

        With several processes, each gets the whole model on one of its own devices.

        Raises:
            StateError: if there is no average, or a step has consumed the arrays.

        Communicates: with several processes, gathers sharded parameters; all processes must then call it.

        Example:
            >>> import jax.numpy as jnp, optax, paraxis as px
            >>> from flax import nnx
            >>> state = px.TrainState.create(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), optax.sgd(0.1))
            >>> state.model()(jnp.ones((5, 3))).shape
            (5, 4)
        """
        if ema and self.ema is None:
            raise StateError("TrainState.model: there is no average; write px.TrainState.create(…, ema=0.999)")
        require_arrays("TrainState.model", self)
        values = self.ema if ema else self.params, self.frozen, self.mutable
        params, frozen, mutable = _models.copy(arrays.local_copy(values))
        params = jax.tree.map(lambda x, parameter: x.astype(parameter.dtype), params, self.params)  # of the average
        return self.form.make(_models.combine(params, frozen), mutable, None, "as made")[0]

    def replace(self, **changes: Any) -> "TrainState":
        """Return the same state with other values for some attributes."""
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        trained, frozen = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (self.params, self.frozen))
        of_them = f", {trained:,} of them trained" if frozen else ""
        return f"TrainState({self.form.kind}, {trained + frozen:,} parameters{of_them})"


def require_arrays(what: str, state: TrainState) -> None:
    """Refuse a state that a step has consumed."""
    if isinstance(state.step, jax.Array) and not isinstance(state.step, jax_api.Tracer) and state.step.is_deleted():
        raise StateError(f"{what}: the arrays of this state were donated to an earlier step; go on from its result")


_SMALL = 1024  # elements: what has fewer is left whole, as to bring it together costs more than it takes to keep


def shardings(state: TrainState, placement: Placement, shard: Any) -> Any:
    """Return each leaf's sharding: ``shard``, as of a step, is for parameters, averages, and what is kept of them."""
    whole = arrays.sharding(placement, ())
    if shard is None or whole is None:
        return jax.tree.map(lambda _: whole, state)

    def largest_dimension(name: str, x: Any) -> int | None:
        fitting = [d for d in range(x.ndim) if x.shape[d] % placement.num_devices == 0]
        return max(fitting, key=lambda d: x.shape[d]) if fitting and x.size >= _SMALL else None

    rule = largest_dimension if shard == "params" else shard
    split = {}
    for path, x in jax.tree_util.tree_leaves_with_path(_models.combine(state.params, state.frozen)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(entry := rule(name, x), int):
            if not -x.ndim <= entry < x.ndim:
                raise StateError(f"px.train_step: shard= says dimension {entry} of {name!r}, which has {x.ndim}")
            entry %= x.ndim
        sharding: Any = whole if entry is None else arrays.sharding(placement, entry)
        sharding.shard_shape(x.shape)  # an error of JAX's, if its parts would not be equal
        split[path] = x.shape, sharding

    def like_parameter(path: Any, x: Any) -> Any:
        """Find a parameter by its path in an optimiser's state, which keeps trees like the parameters."""
        ends = (split.get(path[start:]) for start in range(len(path) + 1))
        return next((sharding for shape, sharding in filter(None, ends) if shape == x.shape), whole)

    split_parts = {
        name: jax.tree_util.tree_map_with_path(like_parameter, getattr(state, name))
        for name in ("params", "frozen", "opt_state", "ema")
    }
    return jax.tree.map(lambda _: whole, state).replace(**split_parts)


# --- from a gradient to the next state: clipping, the optimiser, the average, the guard ------------------------------


def updated(
    state: TrainState, gradient: Any, outcome: Outcome, clip: float | None, *, guard: bool
) -> tuple[TrainState, Metrics]:
    import optax

    if clashes := sorted({"loss", "grad_norm"} & set(outcome.metrics)):
        raise StateError(f"px.train_step: metric {clashes[0]!r} has a name that the step uses; give yours another")
    loss, norm = outcome.loss, optax.tree.norm(jax.tree.map(wide, gradient))
    metrics = {"loss": loss, **outcome.metrics}
    if clip is not None or guard:
        metrics["grad_norm"] = Mean(norm, jnp.ones_like(norm))
    if clip is not None:
        gradient = jax.tree.map(lambda g: jnp.where(norm < clip, g, wide(g) / norm * clip).astype(g.dtype), gradient)

    def optimized(state: TrainState) -> TrainState:
        optimizer, decay = state.optimizer, state.ema_decay
        update = optax.with_extra_args_support(optimizer).update
        # With the loss, which Polyak's step and reduce_on_plateau need.
        updates, opt_state = update(gradient, state.opt_state, state.params, value=value_of(loss))
        params = optax.apply_updates(state.params, updates)
        ema = state.ema if decay is None else optax.incremental_update(jax.tree.map(wide, params), state.ema, 1 - decay)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, mutable=outcome.mutable, ema=ema)

    if not guard:
        return optimized(state), metrics
    # A total of no weight, or of less, has no mean.
    total = jnp.where((loss.weight > 0) | (loss.total == 0), loss.total, jnp.nan)
    metrics["loss"] = dataclasses.replace(loss, total=total)
    known = jax.tree.map(lambda x: jnp.where(state.ok, x, jnp.nan), metrics)
    metrics = {name: dataclasses.replace(known[name], weight=mean.weight) for name, mean in metrics.items()}
    ok = jnp.isfinite(value_of(metrics["loss"])) & jnp.isfinite(metrics["grad_norm"].total)
    return _guarded(ok, state, optimized), metrics


def _guarded(ok: jax.Array, state: TrainState, update: Callable[[TrainState], TrainState]) -> TrainState:
    """Return the state after an update; or the one before, which is then marked.

    On CPU by a branch around the update, which then writes over the old state: chosen element by element afterwards,
    both would be there at once, and be read and written once more. Elsewhere the choice is made element by element, as
    it is fused with the update there, and a branch would make the host wait for the gradient.
    """
    after = jax.lax.platform_dependent(
        state.replace(key=None, extra=None, ok=None),
        cpu=lambda before: jax.lax.cond(ok, update, lambda same: same, before),
        default=lambda before: jax.tree.map(functools.partial(jnp.where, ok), update(before), before),
    )
    return after.replace(key=state.key, extra=state.extra, ok=ok)
