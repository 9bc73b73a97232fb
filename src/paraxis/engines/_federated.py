"""Federated data of other packages as sources of elements, told by the methods that they have.

FedJAX's ``FederatedData``, TensorFlow Federated's ``ClientData``, Flower's ``FederatedDataset`` and partitioners: an
element is a client, a dict of arrays whose rows are its examples.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from paraxis.errors import DataError


def source_of(data: Any) -> Any:
    """Return what gives elements by number; of anything else than federated data, itself.

    Raises:
        DataError: if it is not clear which of several parts is meant.
    """
    if all(hasattr(data, name) for name in ("num_clients", "client_sizes", "get_clients")):
        return _FedJax(data)
    if all(hasattr(data, name) for name in ("client_ids", "create_tf_dataset_for_client")):
        return _TensorFlow(data)
    if hasattr(data, "load_partition"):
        return _Flower(_partitioner(data), data)
    return data


class _FedJax:
    def __init__(self, data: Any) -> None:
        self._data = data
        found = list(data.client_sizes())
        self.ids, self.lengths = [name for name, _ in found], [int(size) for _, size in found]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Any:
        return self._data.get_client(self.ids[number]).all_examples()

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        clients = self._data.get_clients([self.ids[number] for number in numbers])
        return [client.all_examples() for _, client in clients]


class _TensorFlow:
    """Lengths are not written anywhere: each client is gone through once."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.ids = list(data.client_ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Any:
        examples = list(self._of(number).as_numpy_iterator())
        return jax.tree.map(lambda *rows: np.stack(rows), *examples)

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [sum(1 for _ in self._of(number)) for number in range(len(self))]

    def _of(self, number: int) -> Any:
        return self._data.create_tf_dataset_for_client(self.ids[number])


class _Flower:
    def __init__(self, partitioner: Any, data: Any) -> None:
        self._data = data
        self._count = int(partitioner.num_partitions)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        return dict(self._data.load_partition(number).with_format("numpy")[:])

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [len(self._data.load_partition(number)) for number in range(len(self))]


def _partitioner(data: Any) -> Any:
    """Return what knows the number of partitions. Flower's partitioners may need the data set for it, so load one."""
    if not hasattr(data, "partitioners"):
        return data
    splits = list(data.partitioners)
    if len(splits) != 1:
        raise DataError(
            f"Groups: source has partitions of several splits, {', '.join(map(repr, splits))}; say which: "
            f"source.load_partition(0, {splits[0]!r}), and then px.Groups(source.partitioners[{splits[0]!r}])"
        )
    data.load_partition(0)
    return data.partitioners[splits[0]]
