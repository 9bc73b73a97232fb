"""Names of variables: ``(Sequential).layers[0](Linear).kernel``."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from paraxis._modules.graphs import Holder, Path


def names_in(modules: Sequence[Any], paths: Sequence[Path]) -> list[str]:
    """Return the names of the variables of several modules; a path's first entry is the module's number.

    Where two would have the same name, the numbers are part of it: ``[0](Linear).kernel``, ``[1](Linear).kernel``.
    """
    found = [_rooted(modules, path) for path in paths]
    names = [_name(root, rest) for _, root, rest in found]
    if len(set(names)) == len(names):
        return names
    return [place + name for (place, _, _), name in zip(found, names, strict=True)]


def _rooted(modules: Any, path: Path) -> tuple[str, Any, Path]:
    """Return the module that a path leads to first, through the tuples and wrapped functions around it."""
    place, node = "", modules
    while isinstance(node, (tuple, Holder)) and path:
        within = node.modules if isinstance(node, Holder) else node
        place, node, path = f"{place}[{path[0]}]", within[int(path[0])], path[1:]
    return place, node, path


def _name(node: Any, path: Path) -> str:
    text = f"({type(node).__name__})" if isinstance(node, (nnx.Pytree, nnx.Variable)) else ""
    for key in path:
        node = _child(node, key)
        text += (f"[{key}]" if isinstance(key, int) else f".{key}") + _type(node)
    return text


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, nnx.Pytree):
        return vars(node).get(str(key))
    try:
        return node[key]
    except (KeyError, IndexError, TypeError):
        return getattr(node, str(key), None)


def _type(node: Any) -> str:
    """Modules say what they are; containers and variables are told by their place."""
    named = isinstance(node, nnx.Pytree) and not isinstance(node, (nnx.List, nnx.Dict))
    return f"({type(node).__name__})" if named else ""
