"""``train_step`` and ``eval_step``: a function for one device in, one ``jax.jit`` over all devices out."""

import abc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api
from paraxis._core.placing import Axis, without_context
from paraxis.errors import StateError
from paraxis.train import _batches, _models
from paraxis.train._loss import LossFunction, Mean, Metrics, Outcome, value_of
from paraxis.train._state import TrainState, require_arrays, shardings, updated

_State = TypeVar("_State")


class Step(Protocol[_State]):
    """A step of :func:`fit`: a state and a batch in, the new state and metrics out."""

    def __call__(self, state: _State, batch: Any, /) -> tuple[_State, Any]: ...


class _Step(abc.ABC):
    """A function of a state and a batch, compiled by one ``jax.jit``, which tells states, sizes and devices apart."""

    def __init__(
        self, what: str, fn: Any, axis: Any, microbatches: Any, precision: Any, shard: Any = None, donate: bool = False
    ) -> None:
        check.one_of(what, "precision", precision, (None, "bfloat16"), StateError)
        check.one_of(what, "shard", shard, (None, "params", *[shard] * callable(shard)), StateError)
        self._what, self._fn, self.axis = what, LossFunction(what, fn), _batches.axis_of(what, axis)
        self._microbatches = check.count(what, "microbatches", microbatches, write="microbatches=4", error=StateError)
        self._dtype, self.shard = None if precision is None else jnp.dtype(precision), shard
        self._jitted = jax.jit(self._body, static_argnums=(2, 3), donate_argnums=(0,) if donate else ())

    @property
    def num_devices(self) -> int:
        """The number of devices that a batch's rows lie on, which reports ask for."""
        return _batches.devices_of(self.axis).placement.num_devices

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Lower the step, like ``jax.jit(f).lower``, without running it; structs may stand for arrays, as in trace."""
        return self._run(self._jitted.lower, *jax.eval_shape(lambda *args: args, state, batch))

    def trace(self, state: TrainState, batch: Any) -> Any:
        """Trace the step, like ``jax.jit(f).trace``, without running it.

        ``jax.ShapeDtypeStruct`` may stand for arrays, as in ``jax.eval_shape(make_state)``: no device holds the state.
        """
        return self._run(self._jitted.trace, *jax.eval_shape(lambda *args: args, state, batch))

    def shardings(self, state: TrainState) -> TrainState:
        """Return where the step lays each array of a state, of ``jax.eval_shape``'s, too.

        A state that one device cannot hold is made there: ``jax.jit(make, out_shardings=step.shardings(abstract))()``.
        """
        return shardings(state, _batches.devices_of(self.axis).placement, self.shard)

    @abc.abstractmethod
    def _body(self, state: TrainState, batch: Any, size: int, devices: _batches.Devices) -> Any: ...

    def _run(self, function: Callable[..., Any], state: TrainState, batch: Any) -> Any:
        """Call the compiled function with arguments on the devices, by the mesh in force."""
        if not isinstance(state, TrainState) or np.ndim(state.step):
            raise StateError(f"{self._what}: a step takes a px.TrainState, and not replicated; got {type(state)}")
        if isinstance(state.step, jax_api.Tracer):  # within another program, such as a step of members, a part of it
            return self._body(state, batch, _batches.num_rows(self._what, "batch", batch), _batches.ONE_DEVICE)
        require_arrays(self._what, state)
        if isinstance(self, EvalStep):  # compiled once for all optimisers
            state = state.replace(opt_state=None, ema=None, extra=None, optimizer=None, ema_decay=None)
        devices = _batches.devices_of(self.axis)
        padded, size = devices.lay_out(self._what, batch, self._microbatches)
        if devices.whole is not None and getattr(state.step, "sharding", None) != devices.whole:  # no step returned it
            is_abstract = isinstance(state.step, jax.ShapeDtypeStruct)
            put = (lambda x, target: x.update(sharding=target)) if is_abstract else arrays.device_put
            state = jax.tree.map(put, state, shardings(state, devices.placement, self.shard))
        if devices.waits:
            jax.block_until_ready((state.step, state.ok, padded))
        with without_context():
            result = function(state, padded, size, devices)
        if devices.waits and isinstance(self, EvalStep):
            jax.block_until_ready(result)  # the next one, of the same state, would not wait for this one
        return result

    def _call(self, state: TrainState, params: Any, mutable: Any, rows: Any, size: int, key: Any) -> Outcome:
        params = _models.combine(params, state.frozen)
        if self._dtype is not None:  # the derivative is in the parameters' own
            is_wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 2  # noqa: E731
            params = jax.tree.map(lambda x: x.astype(self._dtype) if is_wide(x) else x, params)
        trains = isinstance(self, TrainStep)
        model, after = state.form.make(params, mutable, key, "train" if trains else "eval")
        outcome = self._fn(model, rows, size, key, mutable, trains=trains)
        return outcome if "mutable" in self._fn.wants else outcome._replace(mutable=after())

    def _key(self, state: TrainState) -> Any:
        if self._fn.needs_key and state.key is None:
            raise StateError(f"{self._what}: the function takes a random key, but the state has none: create(…, key=…)")
        return None if state.key is None else jax.random.fold_in(state.key, state.step)

    def _scan(
        self, part: Callable[[Any, int, Any, Any], tuple[Any, Any]], carried: Any, padded: Any, size: int, key: Any
    ) -> tuple[Any, Any]:
        """Run ``part(rows, size, key, carried)`` → carried on, found, for each micro-batch; add what is found.

        Micro-batch ``c`` of ``C`` has the rows ``c``, ``c + C``, …: each device has its part of every one.
        """
        number = min(self._microbatches, size)
        if number == 1:
            return part(_batches.rows(padded, size), size, key, carried)
        least, longer = divmod(size, number)  # the first ones have one row more

        def one(rows: int, index: Any, carried: Any) -> tuple[Any, Any]:
            key_of_one = None if key is None else jax.random.fold_in(key, index)
            carried, outcome = part(_batches.microbatch(padded, index, number, rows), rows, key_of_one, carried)
            return carried, _sums(outcome)

        def add(rows: int, both: Any, index: Any) -> tuple[Any, None]:
            carried, more = one(rows, index, both[0])
            return (carried, jax.tree.map(jnp.add, both[1], more)), None

        shapes = jax.eval_shape(lambda c: one(least, 0, c)[1], carried)
        both = carried, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        for first, last, rows in ((0, longer, least + 1), (longer, number, least)):
            if last > first:
                both, _ = jax.lax.scan(lambda b, i, rows=rows: add(rows, b, i), both, jnp.arange(first, last))
        return both


class TrainStep(_Step):
    """A training step, made and described by :func:`train_step`."""

    def __init__(self, fn: Callable[..., Any], *, clip: Any, guard: bool, **options: Any) -> None:
        super().__init__("px.train_step", fn, **options)
        if clip is not None:
            check.number("px.train_step", "clip", clip, above=0, write="clip=1.0", error=StateError)
        self._clip, self._guard = clip, guard

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step, which consumes the state unless ``donate=False``.

        The batch is a tree of arrays ``(rows, ...)`` on the host or on devices, a 0-d one for all rows; or a random
        key, without data. With several processes, each passes the whole batch, or what its loader yields.

        Raises:
            DataError: if the arrays differ in their rows, have none, or have integers that JAX would cut; or if the
                loss is not a mean over the rows.
            StateError: if the state does not fit the loss function, or an earlier step has consumed it.
        """
        return self._run(self._jitted, state, batch)

    def _body(self, state: TrainState, batch: Any, size: int, devices: _batches.Devices) -> tuple[TrainState, Metrics]:
        is_whole = min(self._microbatches, size) == 1

        def part(rows: Any, size: int, key: Any, mutable: Any) -> tuple[Any, Any]:
            def loss(params: Any) -> tuple[jax.Array, Outcome]:
                outcome = self._call(state, params, mutable, rows, size, key)
                objective = value_of(outcome.loss) if is_whole else outcome.loss.total
                kept = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), outcome.mutable, mutable)
                return objective, outcome._replace(mutable=kept)

            gradient, outcome = jax.grad(loss, has_aux=True)(state.params)
            gradient = jax.tree.map(jnp.conj, gradient)  # JAX's of a complex number is the conjugate of uphill
            return outcome.mutable, (gradient, outcome.loss, outcome.metrics)

        mutable, (gradient, loss, metrics) = self._scan(part, state.mutable, batch, size, self._key(state))
        if not is_whole:  # the sums are divided once, so that the mean is that of the whole batch
            weight = jnp.where(loss.weight == 0, 1, loss.weight)
            gradient = jax.tree.map(lambda g: g / weight.astype(g.dtype), gradient)
        new, metrics = updated(state, gradient, Outcome(loss, metrics, mutable), self._clip, guard=self._guard)
        if devices.whole is not None:
            # Else the compiler may choose another place for what it returns, and the next step is compiled for that.
            new = jax.lax.with_sharding_constraint(new, shardings(new, devices.placement, self.shard))
        return new, metrics


class EvalStep(_Step):
    """A function that computes metrics of a batch, made and described by :func:`eval_step`."""

    def __call__(self, state: TrainState, batch: Any) -> Metrics:
        """Return the metrics of a batch; raises as a training step does."""
        return self._run(self._jitted, state, batch)

    def _body(self, state: TrainState, batch: Any, size: int, devices: _batches.Devices) -> Metrics:
        def part(rows: Any, size: int, key: Any, _: Any) -> tuple[None, Any]:
            outcome = self._call(state, state.params, state.mutable, rows, size, key)
            return None, outcome.metrics if outcome.loss is None else {"loss": outcome.loss, **outcome.metrics}

        return self._scan(part, None, batch, size, self._key(state))[1]


def train_step(
    loss_fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int = 1,
    precision: str | None = None,
    clip: float | None = None,
    guard: bool = True,
    shard: Any = None,
    donate: bool = True,
) -> TrainStep:
    """Make a training step from a loss function written for one device: ``state, metrics = step(state, batch)``.

    The rows of each batch, any number of them, are split over the devices; the result is what one device would
    compute. The loss is a function of all rows, so a BatchNorm or a loss over pairs of rows sees the whole batch. The
    step is a ``jax.jit``: compiled once per number of rows and object of an optimiser (an evaluation: per number of
    rows), and what the loss reads from outside is read when traced. For many learning rates, keep one object,
    ``optax.inject_hyperparams(optax.adam)(1e-3)``, and change ``state.opt_state.hyperparams``. Within another program
    (``jit``, ``vmap``, ``map_fn``, a step of an ensemble's members), it is a part of that.

    Args:
        loss_fn: ``loss_fn(model, batch)``, with the model that the state was made from (an NNX module in ``train()``
            mode; a Linen module bound to its variables, called as ``model(x, train=True)``; or the parameters) and the
            real rows of the batch. It may also have the parameters ``key``, that is ``fold_in(state.key, state.step)``,
            and ``mutable``, of plain functions, which then return its new value last. It returns a loss, or a loss and
            a dict of metrics: the mean over the rows, one value per row, or a ``px.Mean``, if rows have weights.
        axis: a name, or a ``px.Axis`` for its ``mesh`` and ``over``; its size does not matter.
        microbatches: number of parts of each batch that run one after another, which bounds memory; their gradients are
            added. Of C micro-batches, number c has rows c, c + C, …. A BatchNorm sees one of them. A scalar loss is
            taken for the mean of their rows: a sum, which is C times smaller there, would be divided by C.
        precision: ``"bfloat16"`` casts the parameters for the loss; their updates and the mean of the loss keep their
            dtype. The batch stays as it is: cast its inputs in the loss, ``batch["x"].astype("bfloat16")``.
        clip: gradients with a larger global norm are scaled to this norm.
        guard: whether a step whose loss or gradient is not finite changes nothing but ``state.ok``, which becomes
            False; every later step then changes nothing and returns NaN, so that losses may be read late. ``False``
            saves a pass over the gradient.
        shard: with ``"params"``, each device stores a part of the parameters, their average and the optimiser's state,
            along the largest dimension that the number of devices divides. Or a function ``shard(name, array)`` that
            returns ``None`` (whole), a dimension, or a PartitionSpec.
        donate: whether the new state reuses the old one's memory.

    Returns:
        ``step(state, batch)`` → the new state and a dict of :class:`Mean`: ``"loss"``, the metrics, and
        ``"grad_norm"``, before clipping (not with ``guard=False``, unless ``clip`` is given).
        ``step.lower(state, batch)`` shows the program.

    Raises:
        StateError: if an argument is malformed.

    Communicates: one all-reduce the size of the parameters, for each micro-batch if there are several, and whatever
    the model computes over the batch. If each row's loss is its own, ``px.map_fn`` in the loss function, over
    ``px.Axis("batch", len(x), at_once=4)``, bounds memory and sends once. Sharded parameters are gathered when they are
    used. If a loss picks a value of each row by an integer label, and the rows do not divide by the devices, one
    all-gather of the labels.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> step = px.train_step(lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> state, metrics = step(state, {"x": jnp.ones((10, 3)), "y": jnp.ones(10)})
        >>> float(metrics["loss"])
        1.0
    """
    options = {"axis": axis, "microbatches": microbatches, "precision": precision, "shard": shard, "donate": donate}
    return TrainStep(loss_fn, clip=clip, guard=guard, **options)


def eval_step(
    fn: Callable[..., Any], *, axis: str | Axis = "batch", microbatches: int = 1, precision: str | None = None
) -> EvalStep:
    """Make a function that computes metrics of a batch on all devices: ``metrics = evaluate(state, batch)``.

    For averaged parameters, write ``evaluate(state.replace(params=state.ema), batch)``.

    Args:
        fn: ``fn(model, batch)``, with the model that the state was made from (an NNX module in ``eval()`` mode; a Linen
            module, called as ``model(x, train=False)``; or the parameters) and the real rows of the batch. It may take
            ``key`` and ``mutable`` as a loss function does; a ``key=None`` stays so. It returns a dict of metrics, or
            what a loss function returns. Its changes to the model are discarded.
        axis, microbatches, precision: as for :func:`train_step`.

    Returns:
        ``evaluate(state, batch)`` → a dict of :class:`Mean`. To combine several batches, add their means:
        ``a["loss"] + b["loss"]``.

    Raises:
        StateError: as :func:`train_step` does.

    Communicates: one all-reduce of the metrics, 8 bytes each, and whatever the model computes over the batch.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
        >>> evaluate = px.eval_step(lambda params, batch: {"positive": batch["x"] @ params["w"] > 0})
        >>> float(evaluate(state, {"x": jnp.ones((10, 3))})["positive"])
        1.0
    """
    return EvalStep("px.eval_step", fn, axis=axis, microbatches=microbatches, precision=precision)


def _sums(outcome: Any) -> Any:
    """Return the means in a tree as sums, which can be added."""
    is_mean = lambda x: isinstance(x, Mean)  # noqa: E731
    return jax.tree.map(lambda x: Mean(x.total, x.weight) if is_mean(x) else x, outcome, is_leaf=is_mean)
