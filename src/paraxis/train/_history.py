"""The results of a run so far: averages that stay exact, bounded in memory, and the same after a resume."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paraxis import _html as html
from paraxis._core import check
from paraxis._host import files
from paraxis.errors import DataError
from paraxis.train._loss import Mean

MOST_POINTS = 512

Sums = dict[str, tuple[float, float]]  # totals and weights by name


@dataclasses.dataclass(frozen=True)
class Record:
    """Averages over some steps, or over the data of an evaluation.

    Attributes:
        step: number of steps taken by then.
        epoch: number of the epoch, from 0.
        metrics: averages by name; names of an evaluation's metrics begin with its name, as in ``"test/loss"``.
    """

    step: int
    epoch: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, repr=False)
class History:
    """The metrics of a run, in the order in which they came.

    Attributes:
        steps: at most 512 averages, each over ``stride`` steps, for a curve. Steps left over are not included.
        stride: 1 at first, doubled each time that there are too many averages.
        epochs: averages over each complete epoch.
        evaluations: averages of each evaluation.

    Example:
        >>> from paraxis.train import History, Record
        >>> steps = Record(1, 0, {"loss": 0.7}), Record(2, 0, {"loss": 0.5})
        >>> epochs, tests = (Record(2, 0, {"loss": 0.6}),), (Record(2, 0, {"test/loss": 0.875}),)
        >>> print(History(steps, stride=1, epochs=epochs, evaluations=tests))
        step  epoch  loss  test/loss
           2      1   0.6      0.875
    """

    steps: tuple[Record, ...]
    stride: int
    epochs: tuple[Record, ...]
    evaluations: tuple[Record, ...]

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps at which a metric is known, and its values, both ``(num_points,)``.

        For ``"loss"``, the points are those of ``steps``; for ``"test/loss"``, the evaluations.

        Raises:
            DataError: if no step and no evaluation has this metric.
        """
        records = (*self.steps, *self.evaluations)
        found = [(r.step, r.metrics[metric]) for r in records if metric in r.metrics]
        if not found:
            known = dict.fromkeys(name for r in records for name in r.metrics)
            raise DataError(f"History.curve: metric must be one of {', '.join(map(repr, known))}, got {metric!r}")
        return np.array([step for step, _ in found], np.int64), np.array([value for _, value in found], np.float64)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curves to a file: a panel for each metric, of training and all evaluations together.

        Args:
            path: of an image, such as ``"curves.png"``; it is there whole or not at all.

        Raises:
            ModuleNotFoundError: if matplotlib is missing.
        """
        with check.needed("History.plot", "train"):
            from matplotlib.figure import Figure
        panels: dict[str, dict[str, None]] = {}
        for record in (*self.steps[-1:], *self.evaluations):
            for name in record.metrics:
                panels.setdefault(name.rpartition("/")[2], {})[name] = None
        figure = Figure(figsize=(4.5 * max(1, len(panels)), 3.2), layout="constrained")
        for number, (title, names) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), number, title=title, xlabel="step")
            for name in names:
                axes.plot(*self.curve(name), label=name, marker="." if "/" in name else None)
            axes.legend()
        with files.replaced(Path(path).expanduser()) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)

    def __repr__(self) -> str:
        num_steps = max((r.step for r in (*self.steps, *self.epochs, *self.evaluations)), default=0)
        return f"History({num_steps} steps, {len(self.epochs)} epochs, {len(self.evaluations)} evaluations)"

    def __str__(self) -> str:
        """Return a table: a line for each epoch, and for each evaluation at another step; or else the last step.

        Epochs are counted from 1, as steps are.
        """
        return "\n".join(html.columns(self._cells(), str.rjust))

    def _repr_html_(self) -> str:
        header, *rows = self._cells()
        return html.titled(repr(self), html.table(header, rows))

    def _cells(self) -> list[list[str]]:
        records = sorted((*self.epochs, *self.evaluations), key=lambda r: r.step) or self.steps[-1:]
        lines: dict[int, dict[str, float]] = {}
        for record in records:
            lines.setdefault(record.step, {"step": record.step, "epoch": record.epoch + 1}).update(record.metrics)
        loss_first = lambda name: (name.rpartition("/")[2] != "loss", name)  # noqa: E731
        in_order = (name for r in records for name in sorted(r.metrics, key=loss_first))
        names = list(dict.fromkeys(["step", "epoch", *in_order]))
        return [names, *([_cell(line.get(name)) for name in names] for line in lines.values())]


def _cell(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def send(metrics: Any) -> Any:
    """Start the transfer of one batch's metrics to the host, as :func:`fetch` takes it; nothing waits for it.

    Each transfer from a GPU takes a tenth of a millisecond, so that numbers of one kind are sent as one array.
    """
    leaves, structure = jax.tree.flatten(metrics)
    kinds = {(x.dtype, x.shape, x.sharding) if isinstance(x, jax.Array) else None for x in leaves}
    if jax.default_backend() == "cpu" or len(kinds) != 1 or None in kinds:
        return metrics
    packed = _stacked(leaves)
    packed.copy_to_host_async()
    return structure, packed


_stacked = jax.jit(jnp.stack)


def fetch(metrics: Any, rows: int) -> Sums:
    """Return metrics of a batch of so many rows as sums in float64. One that is no ``Mean`` is the mean over them."""
    if isinstance(metrics, tuple) and isinstance(metrics[0], jax.tree_util.PyTreeDef):
        metrics = jax.tree.unflatten(metrics[0], np.asarray(metrics[1]).tolist())
    sums = {}
    for name, x in (metrics if isinstance(metrics, Mapping) else {"loss": metrics}).items():
        mean = x if isinstance(x, Mean) else Mean(None, rows or 1, x)
        try:
            weight = _number(mean.weight)
            # The mean itself has the rounding of one division; its product with the weight has nearly none.
            total = _number(mean.total) if mean.value is None else _number(mean.value) * weight
        except (TypeError, ValueError) as error:
            raise DataError(
                f"px.fit: metric {name!r} is {check.described(x)}, not a number; let the step return a scalar, or "
                "px.Mean(total, weight)"
            ) from error
        sums[name] = total, weight
    return sums


def _number(value: Any) -> float:
    # A third of what value.item() takes.
    return np.asarray(value).item() if isinstance(value, jax.Array) else float(value)


def means_of(sums: Sums) -> dict[str, float]:
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


def add(before: Sums, more: Sums) -> Sums:
    added = {name: (x + before[name][0], w + before[name][1]) for name, (x, w) in more.items() if name in before}
    return before | more | added


@dataclasses.dataclass
class Recorder:
    """The averages of a run under way; floats come back from JSON bit for bit.

    Attributes:
        sums: of the epoch under way.
        points: step, epoch and sums of ``stride`` steps each; of fewer, for the last one.
        count: number of steps that were added.
    """

    sums: Sums = dataclasses.field(default_factory=dict)
    points: list[tuple[int, int, Sums]] = dataclasses.field(default_factory=list)
    count: int = 0
    stride: int = 1
    epochs: list[Record] = dataclasses.field(default_factory=list)
    evaluations: list[Record] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return the one of which ``dataclasses.asdict`` was saved as JSON."""
        records = {name: [Record(**record) for record in saved[name]] for name in ("epochs", "evaluations")}
        return cls(**{**saved, **records})

    def history(self) -> History:
        whole = self.points[: self.count // self.stride]
        points = tuple(Record(step, epoch, means_of(sums)) for step, epoch, sums in whole)
        return History(points, self.stride, tuple(self.epochs), tuple(self.evaluations))

    def add_step(self, step: int, epoch: int, sums: Sums) -> None:
        self.sums = add(self.sums, sums)
        before = self.points.pop()[2] if self.count % self.stride else {}
        self.points.append((step, epoch, add(before, sums)))
        self.count += 1
        if self.count == MOST_POINTS * self.stride:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(step, epoch, add(first, second)) for (_, _, first), (step, epoch, second) in pairs]
            self.stride *= 2

    def end_epoch(self, step: int, epoch: int) -> None:
        self.epochs.append(Record(step, epoch, means_of(self.sums)))
        self.sums = {}

    def evaluated(self, step: int) -> dict[str, float]:
        return {k: v for record in self.evaluations if record.step == step for k, v in record.metrics.items()}

    def latest(self, step: int) -> dict[str, float]:
        """Return metrics after a step: averages over the epoch under way, or else the last one, and evaluations."""
        return (self.epochs[-1].metrics if self.epochs else {}) | means_of(self.sums) | self.evaluated(step)
