"""The only door to what NNX keeps to itself: modules taken apart into structure and values, and put together again.

Other files know NNX's public types. Of its functions this one takes ``split``, ``merge`` and ``iter_graph``, always in
graph mode, in which a variable that is used twice is one variable; the mode that is set outside does not matter. A
variable's value is read and written where NNX keeps it, since the checks on the way cost more than a small step takes;
they are made here once per call.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import Variable, tracers

from paraxis._modules import hooks, reads

Path = tuple[Any, ...]
"""Attribute names and positions that lead to a variable, as NNX gives them."""

Bookkeeping: tuple[Any, ...] = (
    nnx.graphlib.HashableMapping,  # pyright: ignore[reportPrivateImportUsage]
    nnx.pytreelib.PytreeState,
)
"""Attributes in which NNX keeps notes of its own: compared by their content, or not at all."""

TRACE_STATE = "_pytree__state"
"""The attribute in which NNX notes the trace that a module was made in."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """Modules taken apart: what is fixed, and their variables (each once), in one order.

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
    with reads.unnoticed():
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


_APART = hooks.Attribute(nnx.Pytree, "__deepcopy__", None)
_AS_VALUE = hooks.Attribute(  # it would ask its value for this method, and become an array
    Variable, "__deepcopy__", lambda variable, memo: variable.copy(copy.deepcopy(value(variable), memo))
)


def deep_copy(x: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of modules and what holds them, in which what is shared stays shared.

    NNX would copy each module by itself: an optimiser's copy would train another copy than the network's.
    """
    with _APART.entered(), _AS_VALUE.entered():
        return copy.deepcopy(x, memo)


def emptied(graph: Graph) -> Graph:
    """Return the structure alone: what the variables hold is let go."""
    return dataclasses.replace(graph, variables=tuple(v.copy(None) for v in graph.variables), arrays=())


def value(variable: Variable[Any]) -> Any:
    """Return what a variable holds, without its hooks."""
    return variable._raw_value


def metadata(variables: Sequence[Variable[Any]]) -> list[dict[str, Any]]:
    """Return what is noted with variables, such as their own rules: NNX's own dicts."""
    return [v._var_metadata for v in variables]


def state(variables: Sequence[Variable[Any]], graph: Graph) -> tuple[list[Any], tuple[Any, ...]]:
    """Return what variables hold, and the arrays beside them."""
    return [v._raw_value for v in variables], graph.arrays


def write(variables: Sequence[Variable[Any]], new: Mapping[int, Any]) -> None:
    """Let variables hold something else, by their number. Whether they may be is asked with :func:`is_writable`."""
    put = object.__setattr__
    for index, value in new.items():
        put(variables[index], "_raw_value", value)


def is_writable(variable: Variable[Any]) -> bool:
    """Return whether the trace at hand is the one that the variable was made in."""
    with reads.unnoticed():
        return variable._can_update


def trace_state() -> Any:
    """Return the trace at hand, as NNX notes it in what is made now."""
    return tracers.TraceState()


def made_in(variable: Variable[Any]) -> Any:
    """Return the trace that a variable was made in."""
    return variable._trace_state


def is_reference(variable: Variable[Any]) -> bool:
    """Return whether it holds a mutable array, or is of the kind that is one; neither passes through all transforms."""
    return variable.hijax or variable.ref


def nodes(modules: Any) -> Iterator[tuple[Any, Any]]:
    """Return each node of the graph with its first path: modules, containers, variables."""
    return ((path, node) for path, node in nnx.iter_graph(modules, graph=True) if _is_node(node))


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, Variable, list, tuple, dict))


def containers(modules: Any) -> list[Any]:
    """Return the nodes that are other pytrees, such as registered dataclasses: known by their children only."""
    found = (node for _, node in nnx.iter_graph(modules, graph=True) if not isinstance(node, Bookkeeping))
    return [node for node in found if not _is_node(node) and not jax.tree_util.all_leaves([node])]


def parts(container: Any) -> tuple[Any, ...]:
    """Return what one of the :func:`containers` holds now, and what is fixed in it last."""
    children, fixed = jax.tree_util.default_registry.flatten_one_level(container)
    return *children, fixed


def settings(module: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Return the numbers, words and functions among a module's attributes, its submodules' too, but no initialisers."""
    for path, node in nodes(module):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in sorted(vars(node).items()):
            plain = isinstance(value, (bool, int, float, str)) or (callable(value) and not _is_node(value))
            if plain and not name.startswith("_") and not name.endswith("_init"):
                yield (*path, name), value


def random_streams(modules: Any) -> Iterator[tuple[Any, Any]]:
    return ((path, node) for path, node in nodes(modules) if isinstance(node, nnx.RngStream))


def is_key(variable: Variable[Any]) -> bool:
    """Return whether a variable holds random keys."""
    x = value(variable)
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
    """An object that holds modules without being one, such as a function that was wrapped with them."""

    @property
    @abc.abstractmethod
    def modules(self) -> tuple[Any, ...]:
        """The modules that it holds."""


def is_state(x: Any) -> bool:
    """Return whether an object is a module's values, taken out of it."""
    return isinstance(x, nnx.State)


def holds_modules(x: Any) -> bool:
    """Return whether a tree has a module among its leaves."""
    return any(map(is_module, jax.tree.leaves(x, is_leaf=is_module)))
