"""All that changes in a run, the notes that are saved of it beside the state, and the resume from them."""

import dataclasses
import importlib.metadata
import json
import math
from typing import Any

import jax

from paraxis.errors import DataError, StateError
from paraxis.train._checkpoints import Checkpoints
from paraxis.train._history import Recorder
from paraxis.train._loader import Loader
from paraxis.train._sources import Batches, Position, noted

_NAME = "fit"


@dataclasses.dataclass
class Run:
    """All that changes in a run.

    Attributes:
        state: after the steps that were done.
        next: the position of the next batch.
        recorder: the metrics so far.
        programs: digests of the step's programs, by what else they depend on.
        is_resumed: whether the run began from a checkpoint.
    """

    state: Any
    next: Position
    recorder: Recorder = dataclasses.field(default_factory=Recorder)
    programs: dict[str, str] = dataclasses.field(default_factory=dict)
    is_resumed: bool = False

    def notes(self, data: Loader | Batches, best_by: str | None) -> dict[str, Any]:
        """Return what is saved: JSON values, the metrics after this step by their names among them."""
        note = {
            "next": self.next,
            "data": data.describe(),
            "metrics": dataclasses.asdict(self.recorder),
            "on": environment(),
            "programs": self.programs,
        }
        unknown = {} if best_by is None else {best_by: math.nan}  # unless it was evaluated after this step
        return unknown | self.recorder.latest(self.next.number) | {_NAME: note}


def begin(state: Any, data: Loader | Batches, checkpoints: Checkpoints | None) -> tuple[Run, list[str]]:
    """Begin from the last checkpoint, if there is one, else from the state. Return lines about it, too."""
    if checkpoints is None or checkpoints.latest is None:
        return Run(state, _start_of(data, state, 0)), []
    with noted(
        "px.fit: a run resumes with the state that it saved; with another model or optimiser, start elsewhere: "
        f"checkpoint='{checkpoints.path}-2'",
        of=StateError,
    ):
        restored = checkpoints.restore(state)
    said, note = [f"resumes from {checkpoints.path / str(restored.step)}"], restored.notes.get(_NAME)
    if note is None:  # saved by hand
        return Run(restored.tree, _start_of(data, restored.tree, restored.step), is_resumed=True), said
    saved, given = note["data"], json.loads(json.dumps(data.describe()))
    if changed := [name for name in {**saved, **given} if saved.get(name) != given.get(name)]:
        differences = "; ".join(f"{name} was {saved.get(name)!r} and is {given.get(name)!r}" for name in changed)
        raise DataError(
            f"px.fit: data is not what the checkpoint of step {restored.step} in {checkpoints.path} was trained on: "
            f"{differences}. Give the same data to resume the run, or another checkpoint= to start a new one"
        )
    now = environment()
    said += [
        f"{name}: {was} when it was saved, {now[name]} now" for name, was in note["on"].items() if was != now[name]
    ]
    return Run(restored.tree, Position(*note["next"]), Recorder.of(note["metrics"]), note["programs"], True), said


def environment() -> dict[str, Any]:
    """Return what the bits of a run depend on, apart from the program."""
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device kind": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "number of processes": jax.process_count(),
    }


def _start_of(data: Loader | Batches, state: Any, otherwise: int) -> Position:
    """Return the position of the batch after the steps that a state says it has done."""
    step = getattr(state, "step", None)
    number = otherwise if step is None or callable(step) else int(step)
    if number and data.length is None:
        raise DataError(
            f"px.fit: data does not say how many batches an epoch has, so it is not known with which one a state after "
            f"{number} steps continues; give px.loader(arrays, 32), a list, or checkpoint="
        )
    return Position(number, *divmod(number, data.length or 1))
