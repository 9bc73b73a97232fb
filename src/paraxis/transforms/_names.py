"""What a variable is called: ``(Sequential).layers[0](Linear).kernel``."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from paraxis.transforms._nnx import Path


def names(module: Any, paths: Sequence[Path]) -> list[str]:
    """The names of the variables at these paths of one module."""
    return [_name(module, path) for path in paths]


def names_in(modules: Sequence[Any], paths: Sequence[Path]) -> list[str]:
    """The names of the variables of several modules; a path's first entry is the module's number."""
    return [_name(modules[int(path[0])], path[1:]) for path in paths]


def _name(node: Any, path: Path) -> str:
    text = _type(node)
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
