"""The record of an ensemble's training, and its display."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from paraxis import _html as html
from paraxis._calls.extras import needed
from paraxis._host import notebook


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of all members, which is passed to the function given as ``progress``.

    ``number`` counts from 0, or from ``first_epoch``; ``num_epochs`` is the total when the call ends.
    ``outputs`` are the step's results, averaged over the epoch's steps, with leaves ``(size, ...)``; ``validation`` is
    ``(size,)`` or ``None``; ``active`` says which members still train, ``(size,)``. It prints as one line.
    """

    number: int
    num_epochs: int
    outputs: Any
    validation: np.ndarray | None
    active: np.ndarray

    def __str__(self) -> str:
        """Say the first result's mean and range over the members, the validation's, and who still trains."""
        return f"epoch {self.number + 1} of {self.num_epochs}: {_described(self)}"


@dataclasses.dataclass(frozen=True)
class History:
    """The result of ``fit``: one row per epoch of the call. Epochs are numbered from ``first_epoch``.

    Attributes:
        outputs: the step's results, averaged over each epoch's steps: leaves ``(num_epochs, size, ...)``.
        validation: validation losses ``(num_epochs, size)``, or ``None`` without ``validate``.
        best_epoch: for each member the epoch with its smallest validation loss, ``(size,)``, or ``None``.
        stopped: for each member the epoch after which it was stopped, or -1 if it was not, ``(size,)``.
        failed: indices of the members with a result or a loss that was not finite.
        scanned: whether whole epochs ran in one program each.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> step = lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.mean((w - x) ** 2))(w), jnp.mean((w - x) ** 2))
        >>> ens = px.ensemble(lambda key: jax.random.normal(key), 3, 0)
        >>> history = ens.fit(step, (jnp.ones(40),), batch_size=10, num_epochs=5, key=1)
        >>> history.outputs.shape, history.failed
        ((5, 3), ())
    """

    outputs: Any
    validation: np.ndarray | None
    best_epoch: np.ndarray | None
    stopped: np.ndarray
    failed: tuple[int, ...]
    scanned: bool

    def _repr_html_(self) -> str:
        """Return a line for each epoch, and the curves of the members' mean, for notebooks."""
        means = {name: _mean_of_finite(np.asarray(values, float)) for name, values in _by_epoch(self).items()}
        numbers = range(1, 1 + max(map(len, means.values()), default=0))
        rows = [(number, *(f"{x[number - 1]:.4g}" for x in means.values())) for number in numbers]
        facts = {"members": len(self.stopped), "stopped": int((self.stopped >= 0).sum()), "failed": self.failed or None}
        curves = html.curves({name: (list(numbers), x.tolist()) for name, x in means.items()})
        title = f"History({len(rows)} epochs)"
        return html.titled(title, html.facts(facts), html.table(("epoch", *means), rows), curves)


Show = Callable[[Epoch], None]


@contextlib.contextmanager
def shown(progress: bool | Show, num_epochs: int) -> Iterator[Show]:
    """Give what to call after each epoch: nothing, the user's function, or a bar in the notebook or on the terminal."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda epoch: None
    elif (area := notebook.area()) is not None:
        yield _InNotebook(area)
    else:
        with needed("ensemble.fit: progress=True", "train", "or give a function: progress=print"):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        text = TextColumn("{task.description}")
        with Progress(TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), text) as bar:
            task = bar.add_task("", total=num_epochs)
            yield lambda epoch: bar.update(task, completed=epoch.number + 1, description=_described(epoch))


class _InNotebook:
    """A bar and a line below the cell; an epoch that follows fast on another waits until the next one, or the last."""

    def __init__(self, area: notebook.Area) -> None:
        self._area = area

    def __call__(self, epoch: Epoch) -> None:
        done = epoch.number + 1
        if self._area.is_due or done == epoch.num_epochs or not epoch.active.any():
            bar = html.progress(done, epoch.num_epochs)
            self._area.show(f"<div>{bar} {html.escaped(epoch)}</div>", str(epoch))


def _by_epoch(history: History) -> dict[str, Any]:
    """Return each epoch's and member's numbers, ``(num_epochs, size)``: the step's first result, the validation."""
    return dict([*_first(history.outputs, 2), *_validation(history)])


def _mean_of_finite(x: np.ndarray) -> np.ndarray:
    """Over the members that have a finite value; NaN where none has one."""
    there = np.isfinite(x)
    return np.where(there, x, 0).sum(1) / np.where(there.any(1), there.sum(1), np.nan)


def _first(outputs: Any, ndim: int) -> list[tuple[str, Any]]:
    """Return the first result with so many dimensions, if there is one, as ``output`` or ``output['loss']``."""
    found = jax.tree_util.tree_leaves_with_path(outputs)
    return [(f"output{jax.tree_util.keystr(path)}", leaf) for path, leaf in found if np.ndim(leaf) == ndim][:1]


def _validation(of: Epoch | History) -> list[tuple[str, Any]]:
    return [] if of.validation is None else [("validation", of.validation)]


def _described(epoch: Epoch) -> str:
    texts = []
    for name, values in (*_first(epoch.outputs, 1), *_validation(epoch)):
        x = np.asarray(values, float)
        texts.append(f"{name} {x.mean():.4g} ({x.min():.4g} to {x.max():.4g})")
    texts.append(f"{int(epoch.active.sum())} of {len(epoch.active)} active")
    return ", ".join(texts)
