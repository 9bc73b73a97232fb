"""Checks of a loader's arguments."""

from typing import Any

from paraxis._calls import arguments
from paraxis.errors import DataError
from paraxis.train.data._order import Order
from paraxis.train.data._sources import Batches, RowSource


def order_of(
    source: RowSource | Batches, batch_size: int | None, shuffle: bool | None, drop_last: bool, seed: int
) -> Order | None:
    """Return how the rows are put in batches; ``None``: the source does that."""
    if isinstance(source, Batches):
        given = {"batch_size": batch_size, "shuffle": shuffle or None, "drop_last": drop_last or None}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise DataError(
                f"px.loader: source gives batches, of its own size and in its own order, but {wrong[0]} is "
                f"{given[wrong[0]]!r}; write px.loader(source), or pass what gives its rows by number: "
                "px.loader(data_loader.dataset, 32)"
            )
        return None
    if batch_size is None:
        raise DataError(
            f"px.loader: batch_size is missing; source gives {source.num_rows} rows by number: px.loader(source, 32)"
        )
    size = integer("batch_size", batch_size, least=1)
    if drop_last and size > source.num_rows:
        raise DataError(
            f"px.loader: with drop_last and batch_size {size} there is no batch, as source has {source.num_rows} rows; "
            f"write batch_size={source.num_rows}, or leave out drop_last"
        )
    return Order(source.num_rows, size, True if shuffle is None else bool(shuffle), bool(drop_last), seed)


def integer(name: str, value: Any, *, least: int) -> int:
    return arguments.count("px.loader", name, value, least=least, most=2**64, write=f"{name}={least}", error=DataError)


def seed_of(seed: Any) -> int:
    number = integer("seed", seed, least=0)
    if number >= 2**64:
        raise DataError(f"px.loader: seed must be below 2**64, got {seed}; write seed=0")
    return number
