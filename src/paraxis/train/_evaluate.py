"""Evaluations of a run: a step that changes nothing, over all of some data."""

import collections
import contextlib
from collections.abc import Callable
from typing import Any, Literal

from paraxis._core import check
from paraxis._host import processes
from paraxis.errors import DataError
from paraxis.train._history import Sums, add, fetch, means_of, send
from paraxis.train._loader import data_of
from paraxis.train._step import TrainStep

AHEAD = 4
"""Batches that the host may be ahead of the devices: their metrics are fetched when so many more are under way."""


class Evaluate:
    """An evaluation of a run on a whole data set, the same each time, with exact averages for any batch size.

    Args:
        step: ``step(state, batch)`` returns a dict of metrics, as ``px.eval_step`` makes it.
        data: as for :func:`fit`; of a loader, its first epoch. For several data sets, use several evaluations.
        every: ``"epoch"``: after each epoch; or a number of steps. Each evaluation also runs at the end.
        name: prefix of the names of its metrics, as in ``"test/loss"``.

    Raises:
        DataError: if ``every`` is neither, or ``step`` is a training step.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> evaluate = px.eval_step(lambda params, batch: (batch["x"] @ params["w"]) ** 2)
        >>> px.Evaluate(evaluate, px.loader({"x": jnp.ones((10, 3))}, 4), every=100).name
        'test'
    """

    def __init__(self, step: Any, data: Any, every: int | Literal["epoch"] = "epoch", name: str = "test") -> None:
        if isinstance(step, TrainStep):
            raise DataError("px.Evaluate: step is a training step; write px.Evaluate(px.eval_step(loss), data)")
        if every != "epoch":
            check.count("px.Evaluate", "every", every, write="every=100, or every='epoch'", error=DataError)
        self.name, self._every, self._step = name, every, step
        self._data = data_of("px.Evaluate: data", data)

    def is_due(self, step: int, ends_epoch: bool) -> bool:
        """Return whether it is time, after so many steps."""
        return ends_epoch if isinstance(self._every, str) else step % self._every == 0

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the averages over all data, by names that begin with its own.

        Args:
            state: is left as it is.

        Raises:
            DataError: if there are no batches, or no metrics.

        Communicates: what the step does; waits for the devices at the end.
        """
        found = self.until(lambda: None, state)
        assert found is not None
        return found

    def until(self, asked: Callable[[], Any], state: Any) -> dict[str, float] | None:
        """Return the averages; ``None`` if it was ``asked``, before a batch, to give up."""
        sums: Sums = {}
        pending: collections.deque[Any] = collections.deque()
        with contextlib.closing(self._data.epoch(0)) as batches:
            for batch in batches:
                if asked():
                    return None
                pending.append(send(self._step(state, batch)))
                if len(pending) > AHEAD:
                    sums = add(sums, fetch(pending.popleft()))
                processes.note_progress()
        for metrics in pending:
            sums = add(sums, fetch(metrics))
        if not sums:
            raise DataError(f"px.fit: evaluation {self.name!r} has no batches, or no metrics")
        return {f"{self.name}/{name}": value for name, value in means_of(sums).items()}


def evaluations_of(evaluate: Any) -> dict[str, Evaluate]:
    """Return one evaluation, several, or none, by their names."""
    found = () if evaluate is None else tuple(evaluate) if isinstance(evaluate, (list, tuple)) else (evaluate,)
    by_name = {one.name: one for one in found}
    if len(by_name) < len(found):
        raise DataError("px.fit: two evaluations have one name; write px.Evaluate(…, name='second')")
    return by_name
