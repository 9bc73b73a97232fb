"""A run on the devices that are given: a whole one, one that is told to stop, or the rest of that one."""

import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paraxis._axes.axis import Axis
from paraxis.cli.demo._digits import Digits
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.train import _model
from paraxis.reports import Communication, communication
from paraxis.train import Evaluate, Event, History, TrainingStopped, TrainState, eval_step, fit, loader, train_step

BATCH = 100


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of a run.

    Attributes:
        state: after its last step.
        history: up to that.
        num_steps: how many there were.
        is_stopped: whether it was told to stop before its last step.
    """

    state: TrainState
    history: History
    num_steps: int
    is_stopped: bool


class Trainer:
    """The training set-up: model, devices and data. All randomness comes from the seed.

    Args:
        digits: to train on, and held out.
        options: number of epochs, and the seed.
        devices: where to run.
    """

    def __init__(self, digits: Digits, options: Options, devices: Sequence[Any]) -> None:
        axis = Axis("batch", 1, mesh=Mesh(np.array(devices), ("batch",)))
        made, drawn = jax.random.split(jax.random.key(options.seed))
        self._epochs = options.epochs
        self._data = loader(digits.train._asdict(), BATCH, axis=axis, seed=options.seed)
        self._state = TrainState.create(_model.make(made), _model.optimizer(self.num_steps), key=drawn)
        self._step = train_step(_model.loss, axis=axis)
        held_out = loader(digits.held_out._asdict(), 500, axis=axis, shuffle=False)
        self._evaluate = Evaluate(eval_step(_model.metrics, axis=axis), held_out, name="held-out")

    @property
    def num_steps(self) -> int:
        """Return the number of steps of a whole run."""
        return self._epochs * len(self._data)

    def run(
        self,
        on_event: Callable[[Event], None],
        *,
        checkpoint: Path | None = None,
        stop_after: int | None = None,
    ) -> Run:
        """Train, from the checkpoint if there is one.

        Args:
            on_event: called with each event of the run.
            checkpoint: where to save the run when it ends or is told to stop.
            stop_after: when so many steps have been seen, this process is sent a SIGTERM, as by a scheduler that
                wants its machine back.
        """

        def stop(event: Event) -> None:
            if event.kind == "step" and event.step == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            fitted = fit(
                self._state,
                self._step,
                self._data,
                epochs=self._epochs,
                evaluate=self._evaluate,
                checkpoint=checkpoint,
                callbacks=[on_event, stop],
                progress=False,
            )
        except TrainingStopped as stopped:
            return Run(stopped.state, stopped.history, int(stopped.state.step), True)
        return Run(fitted.state, fitted.history, int(fitted.state.step), False)

    def communicated(self, state: TrainState) -> Communication:
        """By one step: read out of the compiled program."""
        batch = next(self._data.batches())
        return communication(self._step, state, batch)


def num_differing(one: TrainState, other: TrainState) -> tuple[int, int]:
    """Return how many arrays of two states are not the same bit by bit, and how many there are."""
    same = [a.tobytes() == b.tobytes() for a, b in zip(_arrays(one), _arrays(other), strict=True)]
    return same.count(False), len(same)


def largest_difference(one: TrainState, other: TrainState) -> tuple[float, float]:
    """Return the largest difference of any parameter, and the largest parameter."""
    pairs = list(zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True))
    largest = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    return largest, max(float(np.abs(np.asarray(a)).max()) for a, _ in pairs)


def _arrays(state: TrainState) -> list[np.ndarray]:
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)]
    leaves = zip(jax.tree.leaves(state), is_key, strict=True)
    return [np.asarray(jax.random.key_data(x) if key else x) for x, key in leaves]
