"""Training all members at once, on the devices that are given."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from paraxis.cli.demo._digits import Labelled
from paraxis.cli.demo._options import Options
from paraxis.cli.demo.ensemble import _model
from paraxis.ensembles import Ensemble, Epoch, ensemble

_BATCH = 50


@dataclasses.dataclass(frozen=True)
class Run:
    """An ensemble that has been trained, and how long each epoch took."""

    ensemble: Ensemble
    seconds: list[float]

    @property
    def seconds_per_epoch(self) -> float:
        """The median of those after the first, which was compiled."""
        return statistics.median(self.seconds[1:] or self.seconds)


def train(digits: Labelled, options: Options, devices: Sequence[Any], on_epoch: Callable[[Epoch], None]) -> Run:
    """Train on the given devices. All randomness comes from the seed, the epoch and the member's number.

    Args:
        digits: to train on, the same for all members.
        options: number of members and of epochs, and the seed.
        devices: where to run.
        on_epoch: called after each epoch.
    """
    mesh = Mesh(np.array(devices), ("members",))
    made, trained = jax.random.split(jax.random.key(options.seed))
    ens = ensemble(_model.make, options.members, made, apply=_model.logits, mesh=mesh)
    ticks = [time.perf_counter()]

    def timed(epoch: Epoch) -> None:
        ticks.append(time.perf_counter())
        on_epoch(epoch)

    ens.fit(
        _model.step,
        tuple(digits),
        batch_size=_BATCH,
        num_epochs=options.epochs,
        key=trained,
        own_order=True,
        progress=timed,
    )
    return Run(ens, np.diff(ticks).tolist())


def largest_difference(one: Run, other: Run) -> tuple[float, float]:
    """Return the largest difference of any parameter at the end of two runs, and the largest parameter."""
    pairs = [[np.asarray(leaf) for leaf in jax.tree.leaves(run.ensemble.stacked()[0])] for run in (one, other)]
    differences = [float(np.max(np.abs(a - b))) for a, b in zip(*pairs, strict=True)]
    return max(differences), max(float(np.max(np.abs(leaf))) for leaf in pairs[1])
