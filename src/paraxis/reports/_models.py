"""Models of each library taken apart: their modules by path, their variables, and calls that are noted.

Modules of NNX and Equinox are copied, and each module of the copy gets a class of its own, whose ``__call__`` notes
what it is given and returns. So nobody else's class is touched. Linen has interceptors for this.
"""

import contextlib
import contextvars
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import pytrees

Path = tuple[str, ...]
_SCOPE = "px_module_"


@dataclasses.dataclass
class Call:
    """The calls of one module: its class, what the first one is given and returns, and whether one goes on."""

    kind: str
    given: tuple[Any, ...]
    result: Any = None
    is_open: bool = False


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of a model: its path, its shape and dtype, and whether it is a parameter, which is trained."""

    path: Path
    value: Any
    is_parameter: bool


@dataclasses.dataclass(frozen=True)
class Model:
    """A model taken apart.

    Attributes:
        variables: all of them.
        params: a tree of the parameters.
        rest: a tree of the other variables.
        call: the model as a function ``(params, rest, args, kwargs)``.
    """

    variables: tuple[Variable, ...]
    params: Any
    rest: Any
    call: Callable[[Any, Any, Any, Any], Any]


def of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Model:
    """Take a model apart; of Linen's, the variables are those that it makes for these arguments."""
    if pytrees.is_nnx(model):
        return _of_nnx(model, "__call__")
    owner, name = _method(model)
    if pytrees.is_nnx(owner):
        return _of_nnx(owner, name)
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        return _of_linen(model, args, kwargs)
    return _of_tree(model)


def _method(model: Any) -> tuple[Any, str]:
    """Return the object that a method is bound to, by Python or by ``nnx.jit``, and its name; nothing of others."""
    if isinstance(model, functools.partial) and len(model.args) == 1 and not model.keywords:
        owner, name = model.args[0], getattr(model.func, "__name__", "")
        return owner if hasattr(type(owner), name) else None, name
    return getattr(model, "__self__", None), getattr(model, "__name__", "")


# --- calls that are noted ---------------------------------------------------------------------------------------------

_noted: contextvars.ContextVar[dict[Path, Call] | None] = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[dict[Path, Call]]:
    """Note the calls of modules in this context, by their paths, in the order in which they begin."""
    found: dict[Path, Call] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def tag(number: int) -> str:
    """Return the name of the scope around the calls of the module that is called as so manieth."""
    return f"{_SCOPE}{number}_"


def _note(path: Path, kind: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _noted.get()
    if found is None or (path in found and found[path].is_open):  # a method of its own
        return call(*args, **kwargs)
    noted = found.setdefault(path, Call(kind, _structs((*args, *kwargs.values()))))
    noted.is_open = True
    try:
        with jax.named_scope(tag(list(found).index(path))):
            result = call(*args, **kwargs)
    finally:
        noted.is_open = False
    if noted.result is None:
        noted.result = _structs(result)
    return result


def _structs(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x

    return jax.tree.map(one, tree, is_leaf=pytrees.is_nnx)


@functools.lru_cache(maxsize=4096)
def _noting_class(cls: type, path: Path) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _note(path, cls.__name__, functools.partial(cls.__call__, self), args, kwargs)

    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls,), body)


def _watch(module: Any, path: Path) -> None:
    if callable(module):
        object.__setattr__(module, "__class__", _noting_class(type(module), path))


# --- libraries --------------------------------------------------------------------------------------------------------


def _of_nnx(model: Any, method: str) -> Model:
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    variables = [
        Variable(tuple(map(str, path)), value, isinstance(variable, nnx.Param))
        for path, variable in nnx.to_flat_state(nnx.state(model))
        for value in jax.tree.leaves(variable)
    ]

    def call(params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        # Variables can be written in the trace that they are made in: so they are made here.
        copy = nnx.merge(graph, *jax.tree.map(lambda x: x, (params, rest)))
        for path, module in nnx.iter_modules(copy):
            _watch(module, tuple(map(str, path)))
        return getattr(copy, method)(*args, **kwargs)

    return Model(tuple(variables), params, rest, call)


def _of_linen(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Model:
    from flax import linen

    key = jax.random.key(0)
    given, opened = split((args, kwargs))

    def init(given: Any) -> Any:
        args, kwargs = opened(given)
        return model.init(key, *args, **kwargs)

    made = linen.unbox(jax.eval_shape(init, given))
    params, rest = {"params": made.get("params", {})}, {name: x for name, x in made.items() if name != "params"}
    variables = [
        Variable(tuple(str(part.key) for part in path[1:]), value, collection == "params")
        for collection, tree in made.items()
        for path, value in jax.tree_util.tree_flatten_with_path({collection: tree})[0]
    ]

    def interceptor(following: Any, args: Any, kwargs: Any, context: Any) -> Any:
        is_method = hasattr(type(context.module), context.method_name)  # and not what a lifted transform calls
        if not is_method or context.method_name in ("setup", "__post_init__"):
            return following(*args, **kwargs)
        return _note(context.module.path, type(context.module).__name__, following, args, kwargs)

    def call(params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        with linen.intercept_methods(interceptor):
            return model.apply({**params, **rest}, *args, **kwargs, rngs={"params": key}, mutable=True)[0]

    return Model(tuple(variables), params, rest, call)


def _of_tree(model: Any) -> Model:
    arrays, opened = split(model)
    is_parameter = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    named = [(path, x) for path, x in jax.tree_util.tree_flatten_with_path(model)[0] if is_array(x)]
    variables = [Variable(_keys(path), x, ours) for (path, x), ours in zip(named, is_parameter, strict=True)]
    params = [x if ours else None for x, ours in zip(arrays, is_parameter, strict=True)]
    rest = [None if ours else x for x, ours in zip(arrays, is_parameter, strict=True)]

    def call(params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        copy = opened([y if x is None else x for x, y in zip(params, rest, strict=True)])
        for path, module in _equinox_modules(copy, ()):
            _watch(module, path)
        return copy(*args, **kwargs)

    return Model(tuple(variables), params, rest, call)


def _equinox_modules(module: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield Equinox modules, and in them others."""
    equinox = sys.modules.get("equinox")
    if equinox is None or not isinstance(module, equinox.Module):
        return
    yield path, module
    inside = jax.tree_util.tree_flatten_with_path(
        module, is_leaf=lambda x: x is not module and isinstance(x, equinox.Module)
    )
    for at, part in inside[0]:
        if isinstance(part, equinox.Module):
            yield from _equinox_modules(part, (*path, *_keys(at)))


def _keys(path: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def split(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the arrays of a tree as shapes, and what puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [_struct(x) for x in leaves if is_array(x)]

    def opened(values: Any) -> Any:
        left = iter(values)
        return jax.tree.unflatten(structure, [next(left) if is_array(x) else x for x in leaves])

    return arrays, opened


def is_array(x: Any) -> bool:
    """Return whether a leaf is an array, or stands for one; numbers of Python's are none here."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
