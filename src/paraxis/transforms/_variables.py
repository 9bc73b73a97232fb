"""Ordered collections of what a module learns: its variables, and gradients of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from paraxis.errors import StateError
from paraxis.transforms import _modules
from paraxis.transforms._wrapped import Wrapped


class _Collection:
    """Named things in a fixed order. Iterates over the things; prints names, sizes, shapes and a total."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: str | int) -> Any:
        return self._items[key] if isinstance(key, str) else list(self._items.values())[key]

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def names(self) -> list[str]:
        """Return the names, in order."""
        return list(self._items)

    def items(self) -> list[tuple[str, Any]]:
        """Pairs of name and thing, in order."""
        return list(self._items.items())

    def __repr__(self) -> str:
        shapes_of = [(name, [*map(np.shape, jax.tree.leaves(x))]) for name, x in self._items.items()]
        sizes = [sum(map(math.prod, shapes)) for _, shapes in shapes_of]
        rows = [(n, str(size), str(s[0] if len(s) == 1 else s)) for (n, s), size in zip(shapes_of, sizes, strict=True)]
        rows.append((f"+Total({len(rows)})", str(sum(sizes)), ""))
        width, digits, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{name:{width}} {size:>{digits}} {shape}".rstrip() for name, size, shape in rows)


class Variables(_Collection):
    """A module's variables, by name, each once. Made by :func:`variables`.

    Example:
        >>> import paraxis as px
        >>> from flax import nnx
        >>> found = px.variables(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
        >>> found.subset(nnx.BatchStat).names()
        ['(BatchNorm).mean', '(BatchNorm).var']
        >>> found["(BatchNorm).scale"] is found[2]
        True
    """

    def subset(self, wrt: "Choice") -> "Variables":
        """Select the variables of a type (``nnx.Param``), of several, or for which ``wrt(name, variable)`` is true."""
        return Variables({name: v for name, v in self._items.items() if is_chosen(wrt, name, v)})

    def __add__(self, other: "Variables") -> "Variables":
        """Both, each variable once, under its first name.

        Raises:
            StateError: if two different variables have the same name.
        """
        seen = {id(v) for v in self}
        new = {name: v for name, v in other._items.items() if id(v) not in seen}
        if clash := new.keys() & self._items:
            raise StateError(f"variables: two are called {min(clash)}; write px.variables((one_net, other_net))")
        return Variables(self._items | new)


# A choice of variables: those of a type or types, those for which a test holds, or those of a collection.
Choice = type | tuple[type, ...] | Callable[[str, nnx.Variable[Any]], bool] | Variables


@jax.tree_util.register_pytree_with_keys_class
class Gradients(_Collection):
    """Gradients by the names of their variables, in the order of ``px.variables``; a pytree of arrays.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> gradients, _ = px.GradValues(lambda net, x: net(x).sum(), net)(jnp.ones((2, 3)))
        >>> print(jax.tree.map(lambda g: g / 2, gradients)["(Linear).bias"])
        [1. 1. 1. 1.]
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(name), g) for name, g in self._items.items()], tuple(self._items)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Sequence[Any]) -> "Gradients":
        return cls(dict(zip(names, children, strict=True)))


def variables(module: Any) -> Variables:
    """Return the variables of a module or wrapped function, in a fixed order, with names that follow its attributes.

    Args:
        module: an NNX module, an optimiser, ``nnx.Rngs``, a tuple, list or dict of these, or a function wrapped by
            ``px.Jit`` or another transform (the names then begin with that of the transform).

    Returns:
        A collection that prints names, sizes, shapes and a total. It iterates over the variables, each once, can be
        indexed by name or position, merges with ``+`` and has ``subset(nnx.Param)``.

    Example:
        >>> import jax, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Sequential(jax.nn.relu, nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        >>> print(px.variables(net))
        (Sequential).layers[1](Linear).bias    4 (4,)
        (Sequential).layers[1](Linear).kernel 12 (3, 4)
        +Total(2)                             16
    """
    if not isinstance(module, Wrapped):
        graph = _modules.split(module if type(module) is tuple else (module,))
        return Variables(dict(zip(graph.names, graph.variables, strict=True)))
    return Variables({f"({type(module).__name__}){name}": v for name, v in variables(module.modules).items()})


def is_chosen(wrt: Any, name: str, variable: nnx.Variable[Any]) -> bool:
    """Return whether a choice has a variable; ``None`` has none, and a set those of these names."""
    if isinstance(wrt, Variables):
        return any(variable is v for v in wrt)
    if isinstance(wrt, frozenset):
        return name in wrt
    return nnx.filterlib.to_predicate(wrt)(name, variable)  # pyright: ignore[reportArgumentType]
