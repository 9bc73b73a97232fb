"""The notes that are saved beside a run's state, and the resume from them."""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paraxis.errors import DataError, StateError
from paraxis.train.runs import _description, _noted
from paraxis.train.runs._events import Event
from paraxis.train.runs._feed import Feed, Place
from paraxis.train.runs._history import Recorder
from paraxis.train.runs._stopping import StopEarly, Watch
from paraxis.train.steps._state import TrainState

if TYPE_CHECKING:  # it loads Orbax
    from paraxis.train.checkpoints._checkpoints import Checkpoints, Restored


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The beginning of a run: its state and its first batch.

    Attributes:
        state: there.
        next: the place of its first batch.
        recorder: what was shown before.
        watch: what was seen of the metric that stops it early.
        said: lines about it.
        changed: lines about what the run depends on, and is not as it was.
        description: of that, as it is now.
        is_restored: whether it goes on from a checkpoint.
        due: evaluations after the last step that a signal left.
    """

    state: Any
    next: Place
    recorder: Recorder
    watch: Watch
    said: tuple[str, ...]
    is_restored: bool
    due: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    description: Mapping[str, str] = dataclasses.field(default_factory=dict)


def begin(
    state: Any,
    feed: Feed,
    checkpoints: "Checkpoints | None",
    stop_early: StopEarly | None,
    evaluations: Sequence[str],
    step: Any,
) -> Beginning:
    """From the last checkpoint, if there is one; else from the state.

    Raises:
        DataError: if the data are not those of the checkpoint.
        StateError, CheckpointError: if nothing can be restored.
    """
    watch = Watch(stop_early, evaluations)  # refused before anything is read
    now = {} if checkpoints is None else _description.describe(state, step, feed)
    if checkpoints is None or checkpoints.latest is None:
        return Beginning(state, feed.start(steps_of(state) or 0), Recorder(), watch, (), False, description=now)
    restored = _restored(state, checkpoints)
    said = (f"resumes from {checkpoints.path / str(restored.step)}", *restored.changed)
    note = restored.notes.get(_noted.NAME)
    if note is None:  # saved by hand
        steps = steps_of(restored.tree)
        start = feed.start(restored.step if steps is None else steps)
        return Beginning(restored.tree, start, Recorder(), watch, said, True, description=now)
    _check_data(note["data"], feed, restored, checkpoints)
    watch = Watch(stop_early, evaluations, note["stop early"])
    if note.get("groups") != (groups := groups_of(step)):
        said = (*said, f"groups: {note.get('groups')} when it was saved, {groups} now")
    changed = _description.changes(note["run"], now) if "run" in note else ()  # older checkpoints say nothing
    due = tuple(name for name in note.get("due", ()) if name in evaluations)
    recorder = Recorder(note["shown"])
    return Beginning(restored.tree, Place(*note["next"]), recorder, watch, said, True, due, changed, now)


def _restored(state: Any, checkpoints: "Checkpoints") -> "Restored[Any]":
    try:
        return checkpoints.restore(state, check=_noted.check)
    except StateError as error:
        elsewhere = f"{checkpoints.path}-2"
        error.add_note(
            f"px.fit: a run resumes with the state that it saved. If you have changed the model or the optimiser, "
            f"start elsewhere: px.fit(…, checkpoint={elsewhere!r}). To start there with the leaves that agree, "
            f"{_advice(state, checkpoints)}"
        )
        raise


def _advice(state: Any, checkpoints: "Checkpoints") -> str:
    """Return how to begin anew with what agrees: at the steps of this state, or there would be none left to do."""
    line = f"first write: state = px.Checkpoints({str(checkpoints.path)!r}).restore(state, partial=True).tree"
    if isinstance(state, TrainState):
        line = f"and with a new optimiser, {line}.replace(step=state.step, opt_state=state.opt_state)"
        if state.ema is None:
            return line
        return (
            f"{line}; and if the checkpoint has no average, start it from the restored parameters: "
            f"state = state.replace(ema=jax.tree.map(jnp.copy, state.params))"
        )
    steps = steps_of(state)
    return line if steps is None else f"{line}; and set its step back to {steps}"


def steps_of(state: Any) -> int | None:
    """Return the steps that a state says it has done; ``None`` if it does not say."""
    step = getattr(state, "step", None)
    return None if step is None or callable(step) else int(step)


def notes(
    following: Place,
    due: Sequence[str],
    feed: Feed,
    recorder: Recorder,
    watch: Watch,
    best_by: str | None,
    groups: int | None,
    description: Mapping[str, str],
) -> dict[str, Any]:
    """Return what is saved: JSON values, the metrics after this step by their names among them."""
    note = {"next": following, "data": feed.describe(), "shown": recorder.saved(), "stop early": watch.saved()}
    note |= {"groups": groups, "due": list(due), "run": dict(description)}
    unknown = {} if best_by is None else {best_by: math.nan}  # unless it was evaluated after this step
    return unknown | recorder.latest(following.number) | {_noted.NAME: note}


def groups_of(step: Any) -> int | None:
    """Return the number of groups of rows of a step whose bits do not depend on the devices; ``None`` for others."""
    return getattr(step, "groups", None)


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


def _check_data(saved: Mapping[str, Any], feed: Feed, restored: "Restored[Any]", checkpoints: "Checkpoints") -> None:
    now = json.loads(json.dumps(feed.describe()))
    if saved == now:
        return
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    differences = "; ".join(f"{name} was {saved.get(name)!r} and is {now.get(name)!r}" for name in names)
    raise DataError(
        f"px.fit: data is not what the checkpoint of step {restored.step} in {os.fspath(checkpoints.path)} was trained "
        f"on: {differences}. Give the same data to resume the run, or start a new run elsewhere: "
        f"checkpoint='{checkpoints.path}-2'"
    )
