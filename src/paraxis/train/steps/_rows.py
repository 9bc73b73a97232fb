"""The place of a step's rows: found when it is first called, and again when the mesh in force is another."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from paraxis._axes import arrays, placing
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import arguments, integers
from paraxis._jax import jax_api, supposed
from paraxis.errors import ShapeError, StateError
from paraxis.train import _batches
from paraxis.train._batches import Batch


class Rows:
    """The places asked for rows of batches. Several threads may call one step: each asks :meth:`here`.

    Args:
        what: the function of ours, for errors.
        axis: a name, or an axis for its ``mesh`` and ``over``; its size does not matter.
        microbatches: in how many turns the rows of a batch are taken; ``None``: all together.

    Raises:
        AxisError, StateError: if an argument is something else.
    """

    def __init__(self, what: str, axis: str | Axis, microbatches: int | None) -> None:
        self._what = what
        self._axis = _batches.axis_of(what, axis)
        number = 1 if microbatches is None else integers.at_least(1, microbatches)
        if number is None or number > arguments.LARGEST:
            raise StateError(
                f"{what}: microbatches must be an integer of at least 1, the number of parts that each batch is cut "
                f"into, got {arguments.described(microbatches)}; write {what}(fn, microbatches=4)"
            )
        self.microbatches = number
        self._last: Devices | None = None  # of the last call, whoever made it; a value, replaced as a whole

    def turns(self, num_rows: int) -> int:
        """Return the number of turns for so many rows. It decides what a BatchNorm sees, so not by the devices."""
        return min(self.microbatches, num_rows)

    def here(self) -> "Devices":
        """Return the devices that the rows go to now, by the mesh in force."""
        context, last = jax.sharding.get_abstract_mesh(), self._last
        if last is None or context != last.context or supposed.current() != last.supposed:
            placement = placing.on_auto(placing.place(self._axis))
            last = self._last = Devices(self._what, placement, context, self.turns, supposed.current())
        return last


@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """The devices that the rows of batches go to.

    Attributes:
        what: the function of ours, for errors.
        placement: where rows go; the size of the axis is not theirs.
        context: the mesh in force, for which this holds.
        turns: in how many turns so many rows are taken.
        supposed: the devices that are supposed to be there, if others are not.
    """

    what: str
    placement: Placement
    context: Any
    turns: Callable[[int], int]
    supposed: Any = None

    @functools.cached_property
    def whole(self) -> Any:
        """Return the sharding of a value that is whole on each device; ``None``: on the only device."""
        return arrays.whole_sharding(self.placement)

    @functools.cached_property
    def _target(self) -> Any:
        return arrays.block_sharding(self.placement)

    @functools.cached_property
    def _placements(self) -> dict[int, Placement]:
        """By the number of rows."""
        return {}

    def laid_out(self, batch: Any) -> Batch:
        """Return a batch on the devices."""
        if isinstance(batch, Batch):
            first = next((x for x in jax.tree.leaves(batch.tree) if x.ndim), None)
            is_there = isinstance(first, jax.Array) and first.sharding == self._target
            if self._target is None or first is None or is_there:
                return batch
            return self._laid_out(jax.tree.map(lambda x: _cut(x, batch.num_rows), batch.tree))
        return self._laid_out(batch)

    def _laid_out(self, batch: Any) -> Batch:
        number = _batches.num_rows(self.what, batch)
        if self._target is None:  # the compiled function takes them as they are
            return Batch(batch, number)
        if number not in self._placements:
            self._placements[number] = self.placement.holding(number, turns=self.turns(number))
        return _batches.lay_out(batch, self._placements[number])

    def beside(self, values: Any) -> Any:
        """Values brought to the devices, if they lie elsewhere; what is split over these stays so."""
        whole = self.whole
        if whole is None:
            return values
        mesh = whole.mesh

        def target(x: Any) -> Any:
            own = getattr(x, "sharding", None)  # what is on the host has none
            return own if getattr(own, "mesh", None) == mesh else whole

        return arrays.send(values, jax.tree.map(target, values))

    def settle(self, *values: Any) -> None:
        """Wait for what a program is given, where it must be there before the program starts."""
        if self._target is not None and self._target.mesh.size > 1:
            arrays.ready(values)

    def run(self, compiled: Any, *args: Any) -> Any:
        """Call a compiled function on these devices, whatever mesh is in force."""
        if self.context.empty:
            return compiled(*args)
        with placing.without_context():
            return compiled(*args)


def _cut(x: Any, number: int) -> Any:
    """Return the first rows."""
    if not x.ndim:
        return x
    return jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[:number]


def require_state(what: str, state: Any, kind: type) -> None:
    """Refuse a state that is none.

    Raises:
        StateError: saying what to write.
    """
    if not isinstance(state, kind):
        raise StateError(
            f"{what}: the first argument must be a px.TrainState, got {type(state).__name__}; write "
            f"state = px.TrainState.create(model, optimizer), then step(state, batch)"
        )


def no_key(what: str, name: str) -> StateError:
    """Return the error for a state without a key."""
    return StateError(
        f"{what}: {name!r} takes random keys, but the state has none; write px.TrainState.create(…, "
        f"key=jax.random.key(0))"
    )


def refuse_tracing(what: str, name: str) -> None:
    """Refuse to be called while JAX traces.

    Raises:
        StateError: saying what to write.
    """
    if jax_api.is_tracing():
        raise StateError(
            f"{what}: {name}(state, batch) was called inside jax.jit, jax.grad, jax.vmap or a loop of JAX's; it lays "
            f"arrays over the devices before it runs, and is compiled by itself. Call it as it is: "
            f"for batch in batches: {'state, ' if name == 'step' else ''}metrics = {name}(state, batch)"
        )


def without_values(what: str, state: Any, batch: Any) -> ShapeError | None:
    """Return the error for shapes in place of arrays, if that is why a function cannot be run."""
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((state, batch))):
        return None
    return ShapeError(
        f"{what}: the state or the batch holds a jax.ShapeDtypeStruct, which has a shape and no values; to see what a "
        f"step of such shapes would cost, write px.explain({'step' if what == 'train_step' else 'evaluate'})(state, "
        f"batch)"
    )


def given_away(what: str, state: Any) -> StateError | None:
    """Return the error for a state whose arrays an earlier step was given, if that is what is wrong with it."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer)]
    if not any(x.is_deleted() for x in arrays):
        return None
    return StateError(
        f"{what}: the arrays of this state were donated to an earlier step; continue with the state that it returned, "
        f"state, metrics = step(state, batch), or keep all of them: px.train_step(loss, donate=False)"
    )
