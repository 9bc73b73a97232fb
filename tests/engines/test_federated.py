"""Federated data of other packages: stand-ins with the methods of FedJAX, TensorFlow Federated and Flower."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px

LENGTHS = {"anna": 4, "ben": 1, "carl": 3}
CLIENTS = {
    name: {"x": np.arange(n * 2, dtype="float32").reshape(n, 2) + len(name), "y": np.arange(n)}
    for name, n in LENGTHS.items()
}


class Examples:
    """Of FedJAX: a client's data set."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def all_examples(self) -> Any:
        return self.data


class FedJax:
    def num_clients(self) -> int:
        return len(CLIENTS)

    def client_ids(self) -> Iterator[str]:
        yield from CLIENTS

    def client_sizes(self) -> Iterator[tuple[str, int]]:
        yield from LENGTHS.items()

    def get_clients(self, ids: Any) -> Iterator[tuple[str, Examples]]:
        return ((name, Examples(CLIENTS[name])) for name in ids)

    def get_client(self, name: str) -> Examples:
        return Examples(CLIENTS[name])


class Rows:
    """Of TensorFlow: a data set of examples, one after the other."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return ({"x": x, "y": y} for x, y in zip(self.data["x"], self.data["y"], strict=True))

    as_numpy_iterator = __iter__


class TensorFlow:
    client_ids = tuple(CLIENTS)

    def create_tf_dataset_for_client(self, name: str) -> Rows:
        return Rows(CLIENTS[name])


class Table:
    """Of Hugging Face: a data set of columns."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["y"])

    def with_format(self, kind: str) -> "Table":
        assert kind == "numpy"
        return self

    def __getitem__(self, rows: Any) -> Any:
        return {name: column[rows] for name, column in self.data.items()}


class Partitioner:
    """Of Flower: it has data when the data set that it belongs to has given it some."""

    loaded = True

    @property
    def num_partitions(self) -> int:
        if not self.loaded:
            raise AttributeError("the dataset field should be set before")
        return len(CLIENTS)

    def load_partition(self, number: int) -> Table:
        return Table(list(CLIENTS.values())[number])


class Flower:
    def __init__(self, *splits: str) -> None:
        self.partitioners = {split: Partitioner() for split in splits}
        for one in self.partitioners.values():
            one.loaded = False

    def load_partition(self, number: int, split: str | None = None) -> Table:
        one = self.partitioners[split or next(iter(self.partitioners))]
        one.loaded = True
        return one.load_partition(number)


@pytest.mark.parametrize("source", [FedJax, TensorFlow, Partitioner, lambda: Flower("train")])
def test_clients_are_elements_with_their_own_numbers_of_rows(source):
    groups = px.Groups(source())
    assert groups.lengths is not None
    assert groups.lengths.tolist() == list(LENGTHS.values())
    assert groups.ids == (list(CLIENTS) if source in (FedJax, TensorFlow) else [0, 1, 2])
    np.testing.assert_array_equal(groups[1]["x"], CLIENTS["ben"]["x"])

    @px.program(clients=3)
    def total(data: Any) -> Any:
        return px.reduce_sum(px.map_fn(lambda d: jnp.sum(d.x, where=d.mask[:, None]), (data,)))

    found = px.Stream(at_once=1).run(total, groups)
    np.testing.assert_allclose(found, sum(client["x"].sum() for client in CLIENTS.values()), rtol=1e-6)


def test_of_several_splits_one_must_be_named():
    both = Flower("train", "test")
    with pytest.raises(px.DataError, match=r"several splits, 'train', 'test'; say which: source\.load_partition"):
        px.Groups(both)
    both.load_partition(0, "train")
    assert len(px.Groups(both.partitioners["train"])) == 3
