"""The notes that are saved beside a run's state, and the resume from them."""

import dataclasses
import difflib
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from paraxis._host import digests
from paraxis.errors import DataError, StateError
from paraxis.train._callbacks import Event
from paraxis.train._data import Data, Position
from paraxis.train._early_stopping import StopEarly, Watch
from paraxis.train._history import Recorder
from paraxis.train._state import TrainState

if TYPE_CHECKING:  # it loads Orbax
    from paraxis.train._checkpoints import Checkpoints, Restored

_NAME = "fit"


@dataclasses.dataclass(frozen=True)
class Start:
    """The state and the position that a run begins with.

    Attributes:
        state: there.
        next: the position of its first batch.
        recorder: the metrics so far.
        watch: what was seen of the metric that stops it early.
        said: lines about it.
        is_restored: whether it goes on from a checkpoint.
        due: evaluations after the last step that a signal left.
        programs: digests of the step's programs when it was saved, by size.
    """

    state: Any
    next: Position
    recorder: Recorder
    watch: Watch
    said: tuple[str, ...] = ()
    is_restored: bool = False
    due: tuple[str, ...] = ()
    programs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def begin(
    state: Any, data: Data, checkpoints: "Checkpoints | None", stop_early: StopEarly | None, evaluations: Sequence[str]
) -> Start:
    """From the last checkpoint, if there is one; else from the state.

    Raises:
        DataError: if the data are not those of the checkpoint.
        StateError, CheckpointError: if nothing can be restored.
    """
    watch = Watch(stop_early, evaluations)  # refused before anything is read
    if checkpoints is None or checkpoints.latest is None:
        return Start(state, data.start(steps_of(state) or 0), Recorder(), watch)
    restored = _restored(state, checkpoints)
    said = f"resumes from {checkpoints.path / str(restored.step)}"
    note = restored.notes.get(_NAME)
    if note is None:  # saved by hand
        steps = steps_of(restored.tree)
        start = data.start(restored.step if steps is None else steps)
        return Start(restored.tree, start, Recorder(), watch, (said,), True)
    _check_data(note["data"], data, restored, checkpoints)
    now = environment()
    changed = [
        f"{name}: {was} when it was saved, {now[name]} now" for name, was in note["on"].items() if was != now[name]
    ]
    return Start(
        restored.tree,
        Position(*note["next"]),
        Recorder(note["metrics"]),
        Watch(stop_early, evaluations, note["stop early"]),
        (said, *changed),
        True,
        tuple(name for name in note["due"] if name in evaluations),
        note["programs"],
    )


def environment() -> dict[str, Any]:
    """Return what the bits of a run depend on, apart from the program."""
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device kind": jax.devices()[0].device_kind,
        "number of devices": jax.device_count(),
        "number of processes": jax.process_count(),
    }


def size_of(step: Any, num_rows: int) -> str:
    """Return what a step's program depends on besides the step: only programs of one size are compared."""
    num_devices = getattr(step, "num_devices", jax.device_count())
    return f"{num_rows} rows, {num_devices} devices, jax {jax.__version__}"


def program_of(step: Any, state: Any, batch: Any) -> str | None:
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


def steps_of(state: Any) -> int | None:
    """Return the steps that a state says it has done; ``None`` if it does not say."""
    step = getattr(state, "step", None)
    return None if step is None or callable(step) else int(step)


def notes(
    following: Position,
    due: Sequence[str],
    data: Data,
    recorder: Recorder,
    watch: Watch,
    best_by: str | None,
    programs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what is saved: JSON values, the metrics after this step by their names among them."""
    note = {
        "next": following,
        "due": list(due),
        "data": data.describe(),
        "metrics": recorder.saved(),
        "stop early": watch.saved(),
        "on": environment(),
        "programs": dict(programs),
    }
    unknown = {} if best_by is None else {best_by: math.nan}  # unless it was evaluated after this step
    return unknown | recorder.latest(following.number) | {_NAME: note}


def check_best(checkpoints: "Checkpoints", evaluations: Sequence[str]) -> None:
    """Refuse to look for the best by what is of no evaluation.

    Raises:
        DataError: saying so.
    """
    name = checkpoints.best_by or ""
    source = name.rpartition("/")[0]
    if source and source not in evaluations:
        raise DataError(
            f"px.fit: checkpoint has best=({name!r}, …), but there is no evaluation {source!r}; write "
            f"evaluate=px.Evaluate(px.eval_step(loss), data, name={source!r})"
        )


class BestBy:
    """A reporter that looks once whether what ``best=`` names is given: if it never is, the best cannot be kept.

    Args:
        name: of the metric: of an evaluation, or of steps.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._source = name.rpartition("/")[0]
        self._is_given = False

    def __call__(self, event: Event) -> None:
        """Look at the first metrics that should have it.

        Raises:
            DataError: if they have not.
        """
        if self._is_given or event.kind != ("evaluate" if self._source else "step"):
            return
        if self._source and not any(name.startswith(f"{self._source}/") for name in event.metrics):
            return
        self._is_given = self._name in event.metrics
        if not self._is_given:
            there = list(event.metrics)
            near = (difflib.get_close_matches(self._name, there, n=1) or there or ["loss"])[0]
            raise DataError(
                f"px.fit: checkpoint has best=({self._name!r}, …), but there are {', '.join(there) or 'no metrics'}; "
                f"write px.Checkpoints(…, best=({near!r}, …))"
            )

    def flush(self) -> None:
        """Do nothing: nothing waits."""


def _check_data(saved: Mapping[str, Any], data: Data, restored: "Restored[Any]", checkpoints: "Checkpoints") -> None:
    now = json.loads(json.dumps(data.describe()))
    if saved == now:
        return
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    differences = "; ".join(f"{name} was {saved.get(name)!r} and is {now.get(name)!r}" for name in names)
    raise DataError(
        f"px.fit: data is not what the checkpoint of step {restored.step} in {checkpoints.path} was trained on: "
        f"{differences}. Give the same data to resume the run, or start a new run elsewhere: "
        f"checkpoint='{checkpoints.path}-2'"
    )
