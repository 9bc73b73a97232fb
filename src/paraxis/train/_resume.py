"""All that changes in a run, the notes that are saved of it beside the state, and the resume from them."""

import dataclasses
import importlib.metadata
import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from paraxis._host import digests
from paraxis.errors import DataError, StateError
from paraxis.train._data import Data, start_of
from paraxis.train._early_stopping import StopEarly, Watch
from paraxis.train._history import Recorder
from paraxis.train._order import Position
from paraxis.train._state import TrainState

if TYPE_CHECKING:  # it loads Orbax
    from paraxis.train._checkpoints import Checkpoints, Restored

_NAME = "fit"


@dataclasses.dataclass
class Run:
    """All that changes in a run.

    Attributes:
        state: after the steps that were done.
        next: the position of the next batch.
        recorder: the metrics so far.
        watch: what was seen of the metric that stops it early.
        due: evaluations after the last step that are still to be done.
        programs: digests of the step's programs, by what else they depend on.
        is_owned: whether the state's arrays are nobody else's.
    """

    state: Any
    next: Position
    recorder: Recorder
    watch: Watch
    due: list[str] = dataclasses.field(default_factory=list)
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_owned: bool = False

    def notes(self, data: Data, best_by: str | None) -> dict[str, Any]:
        """Return what is saved: JSON values, the metrics after this step by their names among them."""
        note = {
            "next": self.next,
            "due": self.due,
            "data": data.describe(),
            "metrics": self.recorder.saved(),
            "stop early": self.watch.saved(),
            "on": environment(),
            "programs": self.programs,
        }
        unknown = {} if best_by is None else {best_by: math.nan}  # unless it was evaluated after this step
        return unknown | self.recorder.latest(self.next.number) | {_NAME: note}

    def is_other_program(self, step: Any, batch: Any, num_rows: int) -> bool:
        """Return whether the step is another program than before, for batches of this size; note which it is now."""
        devices = getattr(step, "num_devices", jax.device_count())
        key = f"{num_rows} rows, {devices} devices, jax {jax.__version__}"
        before = self.programs.get(key)
        self.programs[key] = _program(step, self.state, batch)
        return before is not None and before != self.programs[key]


def begin(
    state: Any, data: Data, checkpoints: "Checkpoints | None", rule: StopEarly | None, evaluations: Sequence[str]
) -> tuple[Run, list[str]]:
    """Begin from the last checkpoint, if there is one, else from the state. Return lines about it, too."""
    if checkpoints is None or checkpoints.latest is None:
        return Run(state, start_of(data, steps_of(state) or 0), Recorder(), Watch(rule)), []
    restored = _restored(state, checkpoints)
    said = [f"resumes from {checkpoints.path / str(restored.step)}"]
    note = restored.notes.get(_NAME)
    if note is None:  # saved by hand
        steps = steps_of(restored.tree)
        start = start_of(data, restored.step if steps is None else steps)
        return Run(restored.tree, start, Recorder(), Watch(rule), is_owned=True), said
    _check_data(note["data"], data, f"the checkpoint of step {restored.step} in {checkpoints.path}")
    now = environment()
    said += [
        f"{name}: {was} when it was saved, {now[name]} now" for name, was in note["on"].items() if was != now[name]
    ]
    run = Run(
        restored.tree,
        Position(*note["next"]),
        Recorder(note["metrics"]),
        Watch(rule, note["stop early"]),
        [name for name in note["due"] if name in evaluations],
        note["programs"],
        is_owned=True,
    )
    return run, said


def environment() -> dict[str, Any]:
    """Return what the bits of a run depend on, apart from the program."""
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device kind": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "number of processes": jax.process_count(),
    }


def steps_of(state: Any) -> int | None:
    """Return the steps that a state says it has done; ``None`` if it does not say."""
    step = getattr(state, "step", None)
    return None if step is None or callable(step) else int(step)


def _program(step: Any, state: Any, batch: Any) -> str | None:
    """Return a digest of a step's jaxpr and its constants: learning rate, clip, dropout and all code that matters.

    It holds no text of the user's. ``None``: of a step that is not compiled as a whole.
    """
    trace = getattr(step, "trace", None)
    if trace is None:
        return None
    jaxpr = trace(state, batch).jaxpr
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))  # the addresses of functions
    return digests.of_bytes("\n".join([text, *map(digests.of_array, jaxpr.consts)]).encode())


def _restored(state: Any, checkpoints: "Checkpoints") -> "Restored[Any]":
    try:
        return checkpoints.restore(state)
    except StateError as error:
        advice = "restore(state, partial=True).tree"
        if isinstance(state, TrainState):
            advice += ".replace(step=state.step, opt_state=state.opt_state)"
        error.add_note(
            "px.fit: a run resumes with the state that it saved. If you have changed the model or the optimiser, start "
            f"elsewhere: checkpoint='{checkpoints.path}-2'; to start there with the leaves that agree, first write: "
            f"state = px.Checkpoints('{checkpoints.path}').{advice}"
        )
        raise


def _check_data(saved: dict[str, Any], data: Data, where: str) -> None:
    now = json.loads(json.dumps(data.describe()))
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if names:
        differences = "; ".join(f"{name} was {saved.get(name)!r} and is {now.get(name)!r}" for name in names)
        raise DataError(
            f"px.fit: data is not what {where} was trained on: {differences}. Give the same data to resume the run, or "
            "another checkpoint= to start a new one"
        )
