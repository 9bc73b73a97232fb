"""The results of a run so far: averages that stay exact, bounded in memory, and the same after a resume."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paraxis import _html as html
from paraxis._core import arrays, check
from paraxis._host import files
from paraxis.errors import DataError
from paraxis.train._loss import Mean, Metrics
from paraxis.train._sources import noted

MOST_POINTS = 512
AHEAD = 4  # batches that the host may be ahead of the devices: a batch's metrics are fetched then


@dataclasses.dataclass(frozen=True)
class Record:
    """Averages over some steps, or over the data of an evaluation.

    Attributes:
        step: number of steps taken by then.
        epoch: number of the epoch, from 0.
        metrics: averages by name, floats, or of an ensemble's members ``(size,)``; in names of an evaluation's metrics,
            its own comes first, as in ``"test/loss"``.
        evaluation: the name of the evaluation; empty for averages over steps.
    """

    step: Any
    epoch: Any
    metrics: dict[str, Any]
    evaluation: str = ""

    def title(self, name: str) -> str:
        """Return a metric's name without that of the evaluation."""
        return name.removeprefix(f"{self.evaluation}/") if self.evaluation else name


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
        """Return the steps at which a metric is known, ``(num_points,)``, and its values, of members ``(…, size)``.

        For ``"loss"``, the points are those of ``steps``; for ``"test/loss"``, the evaluations.

        Raises:
            DataError: if no step and no evaluation has this metric.
        """
        records = (*self.steps, *self.evaluations)
        points = [(r.step, r.metrics[metric]) for r in records if metric in r.metrics]
        if not points:
            known = ", ".join({repr(name): 0 for r in records for name in r.metrics}) or "none, as nothing was recorded"
            raise DataError(f"History.curve: metric must be one of {known}, got {metric!r}")
        return np.array([step for step, _ in points], np.int64), np.array([value for _, value in points], np.float64)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curves to an image, ``"curves.png"``, which is there whole or not at all; by matplotlib.

        There is a panel for each metric, of training and all evaluations together.
        """
        with check.needed("History.plot", "train"):
            from matplotlib.figure import Figure
        panels: dict[str, dict[str, str]] = {}
        for record in (*self.steps[-1:], *self.evaluations):
            for name in record.metrics:
                panels.setdefault(record.title(name), {})[name] = "." if record.evaluation else ""
        figure = Figure(figsize=(4.5 * max(1, len(panels)), 3.2), layout="constrained")
        for number, (title, names) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(1, len(panels), number, title=title, xlabel="step")
            of_name = [axes.plot(*self.curve(n), color=f"C{k}", marker=names[n]) for k, n in enumerate(names)]
            axes.legend([lines[0] for lines in of_name], names)  # each member has a line
        with files.replaced(Path(path).expanduser()) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)

    def __repr__(self) -> str:
        num_steps = max((r.step for r in (*self.steps, *self.epochs, *self.evaluations)), default=0)
        return f"History({num_steps} steps, {len(self.epochs)} epochs, {len(self.evaluations)} evaluations)"

    def __str__(self) -> str:
        """Return a table of epochs, from 1, and evaluations; or else of the last step."""
        return "\n".join(html.columns(self._cells(), str.rjust))

    def _repr_html_(self) -> str:
        header, *rows = self._cells()
        return html.titled(repr(self), html.table(header, rows))

    def _cells(self) -> list[list[str]]:
        records = sorted((*self.epochs, *self.evaluations), key=lambda r: r.step) or self.steps[-1:]
        lines: dict[int, dict[str, Any]] = {}
        for record in records:
            lines.setdefault(record.step, {"step": record.step, "epoch": record.epoch + 1}).update(record.metrics)
        in_order = (name for r in records for _, name in sorted((r.title(name) != "loss", name) for name in r.metrics))
        names = list(dict.fromkeys(["step", "epoch", *in_order]))
        return [names, *([cell(line.get(name, "")) for name in names] for line in lines.values())]


def cell(value: Any) -> str:
    """Return a number as text; of an ensemble, the mean over the members and their range."""
    if isinstance(value, np.ndarray):
        return f"{value.mean():.4g} ({value.min():.4g} to {value.max():.4g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def send(metrics: Any) -> Any:
    """Start the transfer of one batch's metrics to the host, as :func:`fetch` takes it; nothing waits for it.

    Each transfer from a GPU takes a tenth of a millisecond, so that numbers of one kind are sent as one array.
    """
    if jax.default_backend() == "cpu":
        return metrics
    leaves, structure = jax.tree.flatten(metrics)
    kinds = {(x.dtype, x.shape, x.sharding) if isinstance(x, jax.Array) else None for x in leaves}
    if len(kinds) != 1 or None in kinds:
        return metrics
    packed = _stacked(leaves)
    packed.copy_to_host_async()
    return structure, packed


_stacked = jax.jit(jnp.stack)


def fetch(metrics: Any, rows: int, shape: tuple[int, ...] = ()) -> Metrics:
    """Return metrics of a batch of so many rows as sums in float64, floats or arrays of the shape.

    One that is no ``Mean`` is the mean over the rows.
    """
    if isinstance(metrics, tuple) and isinstance(metrics[0], jax.tree_util.PyTreeDef):
        metrics = jax.tree.unflatten(metrics[0], np.asarray(metrics[1]).tolist())
    sums = {}
    for name, x in (metrics if isinstance(metrics, Mapping) else {"loss": metrics}).items():
        mean = x if isinstance(x, Mean) else Mean(None, rows or 1, x)
        with noted(f"px.fit: metric {name!r} must be a scalar, or px.Mean(total, weight)"):
            weight = _number(mean.weight, shape)
            # The mean itself has the rounding of one division; its product with the weight has nearly none.
            total = _number(mean.total, shape) if mean.value is None else _number(mean.value, shape) * weight
            sums[name] = Mean(total, weight)
    return sums


def _number(value: Any, shape: tuple[int, ...]) -> Any:
    if shape:
        array = arrays.on_host(value) if isinstance(value, jax.Array) else np.asarray(value)
        array = array if array.ndim == 0 else array[: shape[0]]  # of padding
        return np.broadcast_to(np.asarray(array, float), shape if array.ndim in (0, len(shape)) else ())
    # A third of what value.item() takes.
    return np.asarray(value).item() if isinstance(value, jax.Array) else float(value)


def means_of(sums: Metrics) -> dict[str, Any]:
    return {name: mean.compute() for name, mean in sums.items()}


def late(items: Iterable[Any]) -> Iterator[Any]:
    """Return the items, each when so many later ones are there."""
    ahead, behind = itertools.tee(items)
    next(itertools.islice(ahead, AHEAD, AHEAD), None)
    return (item for _, item in itertools.zip_longest(ahead, behind))


def add(before: Metrics, more: Metrics) -> Metrics:
    return before | more | {name: before[name] + mean for name, mean in more.items() if name in before}


@dataclasses.dataclass
class Recorder:
    """The averages of a run under way.

    Attributes:
        sums: of the epoch under way.
        points: step, epoch and sums of ``stride`` steps each; of fewer, for the last one.
        count: number of steps that were added.
    """

    sums: Metrics = dataclasses.field(default_factory=dict)
    points: list[tuple[int, int, Metrics]] = dataclasses.field(default_factory=list)
    count: int = 0
    stride: int = 1
    epochs: list[Record] = dataclasses.field(default_factory=list)
    evaluations: list[Record] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Return the one whose attributes were saved as JSON, bit for bit; a list is an array of members' values."""
        values = lambda tree: {k: np.array(x) if isinstance(x, list) else x for k, x in tree.items()}  # noqa: E731
        sums = lambda tree: {name: Mean(**values(mean)) for name, mean in tree.items()}  # noqa: E731
        record = lambda tree: Record(**tree | {"metrics": values(tree["metrics"])})  # noqa: E731
        points = [(step, epoch, sums(tree)) for step, epoch, tree in saved["points"]]
        records = {name: [*map(record, saved[name])] for name in ("epochs", "evaluations")}
        return cls(**{**saved, **records, "sums": sums(saved["sums"]), "points": points})

    def history(self) -> History:
        whole = self.points[: self.count // self.stride]
        points = tuple(Record(step, epoch, means_of(sums)) for step, epoch, sums in whole)
        return History(points, self.stride, tuple(self.epochs), tuple(self.evaluations))

    def add_step(self, step: int, epoch: int, sums: Metrics) -> None:
        self.sums = add(self.sums, sums)
        before = self.points.pop()[2] if self.count % self.stride else {}
        self.points.append((step, epoch, add(before, sums)))
        self.count += 1
        if self.count == MOST_POINTS * self.stride:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(step, epoch, add(first, second)) for (_, _, first), (step, epoch, second) in pairs]
            self.stride *= 2

    def end_epoch(self, step: int, epoch: int) -> Record:
        self.epochs.append(Record(step, epoch, means_of(self.sums)))
        self.sums = {}
        return self.epochs[-1]

    def latest(self, step: int) -> dict[str, float]:
        """Return metrics after a step, means over members: of the epoch under way, or the last, and evaluations."""
        records = [*self.epochs[-1:], Record(step, 0, means_of(self.sums))]
        records += [record for record in self.evaluations if record.step == step]
        return {name: float(np.mean(x)) for record in records for name, x in record.metrics.items()}
