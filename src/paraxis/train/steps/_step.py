"""``train_step``: a loss function for one device in, a step on all devices out."""

import weakref
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp

from paraxis._axes import arrays
from paraxis._axes.axis import Axis
from paraxis._calls import arguments
from paraxis._jax.latest import Jitted
from paraxis._jax.structure import Recent
from paraxis.errors import StateError
from paraxis.train._batches import Batch
from paraxis.train.steps import _precision, _reproducible, _rows, _sharding
from paraxis.train.steps._gradients import gradients
from paraxis.train.steps._grouped import GroupedStep
from paraxis.train.steps._kinds import AT_MOST, read_by
from paraxis.train.steps._losses import LossFunction
from paraxis.train.steps._state import TrainState
from paraxis.train.steps._update import Metrics, Options, finished

_EXAMPLE = "px.train_step(lambda model, batch: jnp.mean((model(batch['x']) - batch['y']) ** 2))"


class TrainStep:
    """A training step, made and described by :func:`train_step`."""

    def __init__(
        self,
        loss: LossFunction,
        rows: _rows.Rows,
        *,
        precision: str | None,
        update: Options,
        shard: Any,
        donate: bool,
    ) -> None:
        self._loss = loss
        self._rows = rows
        self._precision = precision
        self._update = update
        self._shard = shard
        self._donate = donate
        self._compiled: Recent[Any] = Recent(AT_MOST)
        # The state that was returned last lies where it should, and need not be looked at. It is not kept alive. With
        # its devices and its program it is one value: another thread may replace it at any time.
        self._last: tuple[Callable[[], TrainState | None], _rows.Devices | None, Any] = (lambda: None), None, None

    @arguments.named()
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step.

        Args:
            state: the state; the step consumes it unless ``donate=False``.
            batch: a tree of arrays ``(rows, ...)`` on the host or on devices, any number of rows; a 0-d
                array applies to all rows. With several processes, each passes the whole batch. Or a ``Batch`` of a
                loader.

        Raises:
            ShapeError: if the arrays of the batch differ in their rows, or the loss is not a mean over them.
            DataError: if the batch has no rows.
            StateError: if the state does not fit the loss function, or an earlier step has consumed it; or inside
                ``jit``, ``grad`` or ``vmap``.
        """
        devices, run, state, batch = self._placed(state, batch)
        devices.settle(state.step, batch.tree)
        try:
            new, metrics = devices.run(run, state, batch)
        except TypeError as error:
            raise _rows.without_values("train_step", state, batch) or error from error.__cause__
        except (RuntimeError, ValueError) as error:
            if "deleted" not in str(error):  # the arrays are gone after any failure; only JAX says whether before it
                raise
            raise _rows.given_away("train_step", state) or error from error
        self._last = weakref.ref(new), devices, run
        return new, metrics

    def lower(self, state: TrainState, batch: Any) -> Any:
        """Lower the step, like ``jax.jit(f).lower``, to see its cost and communication, without running it."""
        devices, run, state, batch = self._placed(state, batch)
        return devices.run(run.lower, state, batch)

    def _trace(self, state: TrainState, batch: Any) -> Any:
        devices, run, state, batch = self._placed(state, batch)
        return devices.run(run.trace, state, batch)

    @property
    def depends_on(self) -> dict[str, Any]:
        """Return what its results depend on, by the names of :func:`train_step`'s arguments."""
        options = {"microbatches": self._rows.microbatches, "shard": self._shard, "reproducible": None}
        return {"loss": self._loss.function, "precision": self._precision, **vars(self._update), **options}

    def _placed(self, state: TrainState, batch: Any) -> tuple[_rows.Devices, Any, TrainState, Batch]:
        """Return the devices, the compiled function for them, and both on them."""
        _rows.refuse_tracing("train_step", "step")
        _rows.require_state("train_step", state, TrainState)
        devices = self._rows.here()
        laid_out = devices.laid_out(batch)
        last, theirs, run = self._last
        if state is None or last() is not state or theirs is not devices:  # what is gone is None, too
            run, state = self._settled(devices, state)
        return devices, run, state, laid_out

    def _settled(self, devices: _rows.Devices, state: TrainState) -> tuple[Any, TrainState]:
        if self._loss.wants_key and state.key is None:
            raise _rows.no_key("train_step", self._loss.name)
        if gone := _rows.given_away("train_step", state):
            raise gone
        kind = devices.placement, jax.tree.structure(state), *map(jnp.shape, jax.tree.leaves(state))
        shardings, run = self._compiled.get(kind, lambda: self._made(devices, state))
        if devices.whole is None:
            return run, state
        state = arrays.send(state, shardings)
        devices.settle(state)
        return run, state

    def _made(self, devices: _rows.Devices, state: TrainState) -> Any:
        """Return how states of this kind lie on the devices, and a compiled function of them."""
        shardings = _sharding.state_shardings(state, devices.placement, self._shard)
        options: dict[str, Any] = {"donate_argnums": (0,) if self._donate else ()}
        if devices.whole is not None:
            # Else the compiler may choose another place for what it returns; the next step would be compiled for that.
            options["out_shardings"] = (shardings, devices.whole)
        return shardings, Jitted(self._body, [self._loss.function, *read_by(state)], **options)

    def _body(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = None if state.key is None else jax.random.fold_in(state.key, state.step)
        turns = self._rows.turns(batch.num_rows)
        gradient, found = gradients(self._loss, state, batch, key, turns, self._precision)
        return finished(state, gradient, found, self._update)


@overload
def train_step(
    loss_fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int | None = None,
    precision: str | None = None,
    clip: float | None = None,
    guard: bool = True,
    shard: Any = None,
    donate: bool = True,
    reproducible: None = None,
    groups: int = _reproducible.GROUPS,
) -> TrainStep: ...
@overload
def train_step(
    loss_fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int | None = None,
    precision: str | None = None,
    clip: float | None = None,
    guard: bool = True,
    shard: Any = None,
    donate: bool = True,
    reproducible: str,
    groups: int = _reproducible.GROUPS,
) -> GroupedStep: ...
@arguments.named(
    at_once="microbatches", accumulate="microbatches", grad_clip="clip", max_norm="clip", dtype="precision"
)
def train_step(
    loss_fn: Callable[..., Any],
    *,
    axis: str | Axis = "batch",
    microbatches: int | None = None,
    precision: str | None = None,
    clip: float | None = None,
    guard: bool = True,
    shard: Any = None,
    donate: bool = True,
    reproducible: str | None = None,
    groups: int = _reproducible.GROUPS,
) -> TrainStep | GroupedStep:
    """Make a training step from a loss function written for one device: ``state, metrics = step(state, batch)``.

    The rows of each batch, any number of them, are split over the devices; the result is what one device would
    compute. The axis is used *whole*: the loss is a function of all rows, which the compiler divides, so a BatchNorm
    or a loss over pairs of rows sees the whole batch. With ``reproducible``, the axis is *mapped*, over groups of rows.
    The step is compiled once per number of rows.

    Args:
        loss_fn: ``loss_fn(model, batch)``, with the model that the state was made from (an NNX module in ``train()``
            mode; a Linen module, called as ``model(x, train=True)``; or the parameters) and the real rows of the
            batch. It may also have parameters of these names: ``key``, the step's random key; ``row_keys``,
            ``(rows,)``, one key for each row, by its number in the batch; ``mutable``, for plain functions, which then
            return its new value last. It returns a loss, or a loss and a dict of metrics. Each is a scalar, the mean
            over the batch's rows; or one value per row, which are averaged; or a ``px.Mean``, if rows have different
            weights.
        axis: a name, or a ``px.Axis`` for its ``mesh`` and ``over``; its size does not matter.
        microbatches: number of parts into which each batch is cut; they run one after another, which bounds memory.
            Of C micro-batches, number c has rows c, c + C, …; their gradients are added. A batch with fewer rows is cut
            into as many parts as it has rows. A BatchNorm then sees a micro-batch.
        precision: ``"bfloat16"`` computes with the model and the batch in bfloat16; parameters, updates and the mean
            of the loss keep their dtype. Where precision matters in the loss, write ``logits.astype("float32")``. All
            of the batch's floating arrays are rounded, to three digits: give labels, masks and counts as integers or
            booleans, and scale large targets.
        clip: gradients with a larger global norm are scaled to this norm.
        guard: whether a step whose loss or gradient is not finite must change nothing. ``False`` saves a pass over the
            gradient, and on one device gives the bits of a step written by hand; a state may then be full of NaN.
        shard: with ``"params"``, each device stores a part of the parameters, their average and the optimiser's state,
            along the largest dimension that the number of devices divides. Or a function ``shard(name, array)`` that
            returns ``None`` (whole), a dimension, or a PartitionSpec.
        donate: whether the new state reuses the old one's memory.
        reproducible: with ``"any device count"``, the bits are the same on any number of devices and processes that
            divides the groups, for the same jaxlib on the same kind of device, and on CPU for the same number of XLA's
            threads, ``PJRT_NPROC``. If that is not set before the devices start, it is set to the number of cores, at
            least 16; of more than eight simulated devices, an error asks for it. It is slower, see below.
        groups: a power of two; with ``reproducible``, the rows of each batch are divided into this many groups, which
            are consecutive blocks, and each group is computed as a batch of its own. Another number gives other bits.

    Returns:
        ``step(state, batch)`` → the new state and a dict of :class:`Mean`: ``"loss"``, the metrics, and
        ``"grad_norm"``, before clipping (not with ``guard=False``, unless ``clip`` is given).
        ``step.lower(state, batch)`` shows the program.

        With its guard, a step whose loss or gradient is not finite changes nothing but ``state.ok``, which becomes
        False; every later step changes nothing and returns NaN. So you may read losses late and still have the state
        of the last good step.

    Raises:
        StateError: if the loss function has an unknown parameter, or options cannot be combined; when called, if it
            uses an NNX module from outside.

    The step's random key is ``fold_in(state.key, state.step)``, and that of row i is ``fold_in(key, i)``; an NNX
    module's own streams continue from step to step. None of these depends on the devices.

    Communicates: one all-reduce the size of the parameters, for each micro-batch if there are several, and whatever
    the model computes over the batch. Sharded parameters are gathered when they are used. If a loss picks a value of
    each row by an integer label, and the rows do not divide by the devices, one all-gather of the labels.

    With ``reproducible``, a program for one device is called for each group, on the device that has the group, and is
    compiled for each device. The sums of the groups are added in a fixed tree, neighbours first; between devices, each
    level of the tree is one collective permute the size of the parameters. Each device then does the update, with both
    the old and the new state in memory. A model sees a group as its batch: running statistics are the mean over the
    groups, and of mutable state that is not floating, the first group's is kept. Each group folds its number into the
    random keys. The arrays of a loader stay where they are if the number of groups divides the number of rows;
    otherwise each device is sent the batch. ``lower`` is not available.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
        >>> step = px.train_step(lambda params, batch: (batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> state, metrics = step(state, {"x": jnp.ones((10, 3)), "y": jnp.ones(10)})
        >>> float(metrics["loss"])
        1.0
    """
    loss = LossFunction("train_step", loss_fn, _EXAMPLE, "loss_fn")
    _precision.check("train_step", precision)
    _sharding.check(shard)
    if clip is not None:
        arguments.number("train_step", "clip", clip, above=0, write="clip=1.0", error=StateError)
    arguments.flag("train_step", "guard", guard)
    arguments.flag("train_step", "donate", donate)
    update = Options(clip=clip, guard=guard)
    rows = _rows.Rows("train_step", axis, microbatches)
    if _reproducible.is_asked_for("train_step", reproducible, groups, microbatches=microbatches, shard=shard):
        return GroupedStep(loss, rows, number=groups, precision=precision, update=update, donate=donate)
    return TrainStep(loss, rows, precision=precision, update=update, shard=shard, donate=donate)
