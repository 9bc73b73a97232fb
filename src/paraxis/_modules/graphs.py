"""NNX modules split into structure and values, and merged again.

All use of NNX's graphs is here, always in graph mode, in which a variable that is used twice is one variable, whatever
mode is set outside. Raw values are written where NNX keeps them, as ``nnx.jit_partial`` does: its own checks cost more
per variable than a small step takes, and are made once per call here.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx import Variable

Path = tuple[Any, ...]
"""Attribute names and positions that lead to a variable, as NNX gives them."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """Modules split: their definition, and their variables (each once), in one order.

    ``arrays`` are those that hang in a module without a variable around them; they can be read only.
    """

    definition: Any
    paths: tuple[Path, ...]
    variables: tuple[Variable[Any], ...]
    array_paths: tuple[Path, ...]
    arrays: tuple[Any, ...]

    def put_together(self, values: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Make new modules of the same structure that hold these values."""
        made = [v.copy(value) for v, value in zip(self.variables, values, strict=True)]
        leaves = [*zip(self.paths, made, strict=True), *zip(self.array_paths, arrays, strict=True)]
        return nnx.merge(self.definition, nnx.from_flat_state(leaves))


def take_apart(modules: Any) -> Graph:
    """Split a tree of modules."""
    definition, state = nnx.split(modules, graph=True)
    flat = list(nnx.to_flat_state(state))
    ours = [(path, leaf) for path, leaf in flat if isinstance(leaf, Variable)]
    rest = [(path, leaf) for path, leaf in flat if not isinstance(leaf, Variable)]
    return Graph(
        definition,
        tuple(path for path, _ in ours),
        tuple(leaf for _, leaf in ours),
        tuple(path for path, _ in rest),
        tuple(leaf for _, leaf in rest),
    )


def emptied(graph: Graph) -> Graph:
    """Return the structure alone: what the variables hold is let go."""
    return dataclasses.replace(graph, variables=tuple(v.copy(None) for v in graph.variables), arrays=())


def value(variable: Variable[Any]) -> Any:
    """Return what a variable holds, without its hooks."""
    return variable.get_raw_value()


def write(variables: Sequence[Variable[Any]], new: Mapping[int, Any]) -> None:
    """Let variables hold other values, by their number, without asking :func:`is_writable`."""
    put = object.__setattr__
    for index, x in new.items():
        put(variables[index], "_raw_value", x)


def is_writable(variable: Variable[Any]) -> bool:
    """Return whether the trace at hand is the one that the variable was made in."""
    try:
        variable.set_raw_value(variable.get_raw_value())
    except TraceContextError:
        return False
    return True


def nodes(modules: Any) -> Iterator[tuple[Path, Any]]:
    """Return each node of the graph with its first path: modules, containers, variables, other pytrees."""
    return ((path, node) for path, node in nnx.iter_graph(modules, graph=True) if _is_node(node, *path[-1:]))


def _is_node(x: Any, name: Any = "") -> bool:
    if str(name).startswith("_pytree__"):  # NNX's notes
        return False
    if isinstance(x, (nnx.Pytree, Variable, list, tuple, dict)):
        return True
    return x is not None and not jax.tree_util.all_leaves([x])


def settings(module: Any) -> Iterator[tuple[Path, Any]]:
    """Return the numbers, words and functions among a module's attributes, its submodules' too, but no initialisers."""
    for path, node in nodes(module):
        if not isinstance(node, nnx.Module):
            continue
        for name, x in sorted(vars(node).items()):
            plain = isinstance(x, (bool, int, float, str)) or (callable(x) and not _is_node(x))
            if plain and not name.startswith("_") and not name.endswith("_init"):
                yield (*path, name), x


def is_key(variable: Variable[Any]) -> bool:
    """Return whether a variable holds random keys."""
    x = variable.get_raw_value()
    return isinstance(variable, nnx.RngKey) or (
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def type_name(variable: Variable[Any]) -> str:
    """Return a variable's type as one would write it."""
    kind = type(variable)
    return f"nnx.{kind.__name__}" if kind.__module__.startswith("flax.") else kind.__name__


def is_module(x: Any) -> bool:
    """Return whether an object may hold variables: a module, ``nnx.Rngs``, an optimiser, a variable."""
    return isinstance(x, (nnx.Pytree, Variable))


class Holder(abc.ABC):
    """A pytree of modules that is no container to its users, such as a function that was wrapped with them."""

    modules: tuple[Any, ...]


def holds_modules(x: Any) -> bool:
    """Return whether a tree has a module among its leaves."""
    return any(map(is_module, jax.tree.leaves(x, is_leaf=is_module)))
