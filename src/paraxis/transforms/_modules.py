"""NNX modules split into structure and values, named, and merged again, always in graph mode; their random streams."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._core import jax_api, pytrees
from paraxis.errors import StateError

Path = tuple[Any, ...]  # attribute names and positions that lead to a variable, as NNX gives them


@dataclasses.dataclass(frozen=True)
class Graph:
    """Modules split: their definition, and their variables (each once) with their names, in one order."""

    definition: Any
    paths: tuple[Path, ...]
    variables: tuple[nnx.Variable[Any], ...]
    array_paths: tuple[Path, ...]
    arrays: tuple[Any, ...]  # that hang in a module without a variable around them; they can be read only
    names: tuple[str, ...]

    def merged(self, values: Sequence[Any], arrays: Sequence[Any]) -> Any:
        variables = [v.copy(value) for v, value in zip(self.variables, values, strict=True)]
        leaves = [*zip(self.paths, variables, strict=True), *zip(self.array_paths, arrays, strict=True)]
        return nnx.merge(self.definition, nnx.from_flat_state(leaves))

    def values(self) -> list[Any]:
        return [*map(_raw_value, self.variables)]

    def write(self, new: Mapping[int, Any]) -> None:
        """Let variables hold other values, by their number.

        NNX's own check, that the trace at hand is the variable's, costs more per variable than a small step; only a
        value of a trace needs it.
        """
        kinds = set(map(type, jax.tree.leaves(list(new.values()))))
        traced = any([issubclass(kind, jax_api.Tracer) for kind in kinds])  # noqa: C419  # fewer calls
        for index, x in new.items():
            if traced:
                self.variables[index].set_raw_value(x)
            else:
                object.__setattr__(self.variables[index], "_raw_value", x)


_raw_value = operator.attrgetter("_raw_value")  # in C: hundreds of variables are read at each call


def split(modules: tuple[Any, ...]) -> Graph:
    definition, *states = nnx.split(modules, nnx.Variable, ..., graph=True)
    variables, others = map(nnx.to_flat_state, states)
    names = _names(modules, variables.paths)
    return Graph(definition, variables.paths, tuple(variables.leaves), others.paths, tuple(others.leaves), names)


def nodes(modules: Any) -> Iterator[Any]:
    """Yield each node of the graph: modules, containers, variables, other pytrees; not NNX's notes."""
    for path, x in nnx.iter_graph(modules, graph=True):
        is_node = pytrees.is_nnx(x) or not (x is None or jax.tree_util.all_leaves([x]))
        if is_node and not str(path[-1:]).startswith("('_pytree__"):
            yield x


def _names(modules: tuple[Any, ...], paths: Sequence[Path]) -> tuple[str, ...]:
    """Return the names of variables: ``(Sequential).layers[0](Linear).kernel``.

    Where two would have the same name, their module's number is part of it: ``[1](Linear).kernel``.
    """
    nodes = dict(nnx.iter_graph(modules, graph=True))
    places_and_names = [_place_and_name([nodes[path[:n]] for n in range(len(path) + 1)], path) for path in paths]
    names = tuple(name for _, name in places_and_names)
    return names if len(set(names)) == len(names) else tuple(place + name for place, name in places_and_names)


def _place_and_name(nodes: Sequence[Any], path: Path) -> tuple[str, str]:
    """Return where a module is, and its variable's name, from the nodes that lead there."""
    place = name = ""
    for parent, key, node in zip(nodes, path, nodes[1:], strict=False):
        if not name and isinstance(key, int) and not pytrees.is_nnx(parent):
            place += f"[{key}]"
            name = f"({type(node).__name__})" if pytrees.is_nnx(node) else ""
        else:
            name += f"[{key}]" if isinstance(key, int) else f".{key}"
            if isinstance(node, nnx.Pytree) and not isinstance(node, (nnx.List, nnx.Dict)):
                name += f"({type(node).__name__})"
    return place, name


# The numbers of the variables with a stream's key and with its count of draws; a key alone is split by who draws.
Stream = tuple[int, int | None]


def streams(graph: Graph, values: Sequence[Any]) -> list[Stream]:
    counts = {p[:-1]: i for i, p in enumerate(graph.paths) if isinstance(graph.variables[i], nnx.RngCount)}
    keys = [i for i, x in enumerate(values) if jnp.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)]
    return [(i, counts.get(graph.paths[i][:-1])) for i in keys]


def fold_streams(values: Sequence[Any], of: Sequence[Stream], index: Any) -> list[Any]:
    """Return an element's values: its streams are new ones, from its number."""
    new = list(values)
    for key, steps in of:
        now = values[key] if steps is None else _fold(values[key], values[steps])
        new[key] = _fold(now, index)
        if steps is not None:
            new[steps] = jnp.zeros(now.shape, jnp.uint32)
    return new


_fold: Any = jnp.vectorize(jax.random.fold_in)  # NNX's split streams hold several keys


def used_streams(of: Sequence[Stream], new: dict[int, Any]) -> list[Stream]:
    """Take what an element did to its streams out of what it wrote; return those that it drew from."""
    if any(count is not None and key in new for key, count in of):
        raise StateError("the function set the key of a random stream; reseed outside")
    return [s for s in of if [new.pop(number) for number in s if number in new]]


def next_streams(values: Sequence[Any], of: Sequence[Stream]) -> dict[int, Any]:
    """Return the streams one step on, as the variables' new values."""
    alone = {key: jax.random.split(values[key])[0] for key, count in of if count is None}
    return alone | {count: values[count] + 1 for _, count in of if count is not None}
