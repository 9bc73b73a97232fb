"""The batches of a run: a loader, or whatever else gives batches epoch after epoch."""

from typing import Any

import jax

from paraxis.errors import DataError
from paraxis.train._loader import Loader
from paraxis.train._order import Position
from paraxis.train._sources import Batches

Data = Loader | Batches


def data_of(what: str, data: Any) -> Data:
    """Return a loader as it is, and batches as what gives them."""
    if isinstance(data, tuple) or hasattr(data, "dtype"):
        raise DataError(f"{what} is one {type(data).__name__}, not batches; write px.loader(data, 32), or [data]")
    return data if isinstance(data, Loader) else Batches(what, data)


def start_of(data: Data, number: int) -> Position:
    """Return the position of a batch by its number."""
    if number and data.length is None:
        raise DataError(
            f"px.fit: data does not say how many batches an epoch has, so it is not known with which one a state after "
            f"{number} steps continues; give px.loader(arrays, 32), a list, or checkpoint="
        )
    return Position(number, *divmod(number, data.length or 1))


def num_rows(batch: Any) -> int:
    """Return the rows of a batch, of which nothing is checked: the step does."""
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)), 0)
