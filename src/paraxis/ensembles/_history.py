"""What happened while an ensemble was trained, and how it is shown."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of all members: what a function that is given as ``progress`` is called with.

    ``number`` counts from 0, or where ``first_epoch`` says, and ``num_epochs`` is how many there will have been in all.
    ``outputs`` are the step's results, averaged over the epoch's steps, leaves ``(size, ...)``; ``validation`` is
    ``(size,)`` or ``None``; ``active`` says who still trains, ``(size,)``. Printed, it is one line.
    """

    number: int
    num_epochs: int
    outputs: Any
    validation: np.ndarray | None
    active: np.ndarray

    def __str__(self) -> str:
        """The first result's mean and range over the members, the validation's, and who still trains."""
        return f"epoch {self.number + 1} of {self.num_epochs}: {_described(self)}"


@dataclasses.dataclass(frozen=True)
class History:
    """What ``fit`` returns. Epochs are numbered from ``first_epoch``; rows are those of this call.

    Attributes:
        outputs: the step's results, averaged over each epoch's steps: leaves ``(num_epochs, size, ...)``.
        validation: ``(num_epochs, size)``, or ``None`` if nothing was validated.
        best_epoch: for each member the epoch with its least validation loss, ``(size,)``; ``None`` likewise.
        stopped: for each member the epoch after which it was stopped, -1 if it was not, ``(size,)``.
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


Show = Callable[[Epoch], None]


@contextlib.contextmanager
def shown(progress: bool | Show, num_epochs: int) -> Iterator[Show]:
    """What to call after each epoch: nothing, the user's own function, or a bar on the terminal."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda epoch: None
    else:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ensemble.fit: progress=True needs rich; write pip install 'paraxis[cli]', or give a function: "
                "progress=print",
                name=error.name,
            ) from error
        text = TextColumn("{task.description}")
        with Progress(TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), text) as bar:
            task = bar.add_task("", total=num_epochs)
            yield lambda epoch: bar.update(task, completed=epoch.number + 1, description=_described(epoch))


def _described(epoch: Epoch) -> str:
    texts = []
    first = next(iter(leaf for leaf in jax.tree.leaves(epoch.outputs) if np.ndim(leaf) == 1), None)
    for name, values in (("step", first), ("validation", epoch.validation)):
        if values is not None:
            x = np.asarray(values, float)
            texts.append(f"{name} {x.mean():.4g} ({x.min():.4g} to {x.max():.4g})")
    texts.append(f"{int(epoch.active.sum())} of {len(epoch.active)} active")
    return ", ".join(texts)
