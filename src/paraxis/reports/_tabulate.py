"""The modules of a model in a table: what each is given and returns, its parameters, and what it computes."""

import collections
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import check, jax_api
from paraxis.reports import _flops, units
from paraxis.reports._layout import layout_of
from paraxis.reports._page import Page, Section

_HEAD = ("module", "class", "inputs", "outputs", "parameters", "bytes", "other", "forward", "backward")
_MOST_SHAPES = 3


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """A module of a model, with all modules in it.

    Attributes:
        path: the names of the attributes that lead to it; empty: the model itself.
        kind: its class.
        inputs: the shapes and other arguments that it is given, at its first call.
        outputs: what it returns.
        parameters: how many numbers are trained.
        bytes: of these.
        other_bytes: of its other variables, such as statistics and random keys.
        flops: floating-point operations of a call of the model in matrix products and convolutions, two for each
            multiplication; of a module that is called several times, those of all calls.
        backward_flops: the same of the derivative by the parameters, without the forward pass.
    """

    path: tuple[str, ...]
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: int
    bytes: int
    other_bytes: int
    flops: int
    backward_flops: int


@dataclasses.dataclass(frozen=True, repr=False)
class ModuleTable(Page):
    """The modules of a model; made by :func:`paraxis.tabulate`.

    It prints as text, a notebook shows it as a table, and :meth:`save` writes that to a file.

    Attributes:
        rows: a row for each module that is called; the first is the model itself, with the totals.
    """

    rows: tuple[ModuleRow, ...]

    @property
    def total(self) -> ModuleRow:
        """The row of the model itself."""
        return self.rows[0]

    @property
    def _title(self) -> str:
        total = self.total
        return f"{total.kind}: {units.of(total.parameters, 'parameter')}, {units.size(total.bytes)}"

    def _sections(self) -> Iterator[Section]:
        *rows, total = [*map(_cells, self.rows[1:]), _cells(self.rows[0])]
        total[0] = "total"
        kept = [column for column in range(len(_HEAD)) if any(row[column] for row in (*rows, total))]
        head, *cells = ([row[column] for column in kept] for row in (_HEAD, *rows, total))
        yield Section("", cells, head, has_head=True, most=len(cells))


@dataclasses.dataclass
class _Call:
    """The calls of one module: its class, what the first one is given and returns, and whether one goes on."""

    kind: str
    given: tuple[Any, ...]
    result: Any = None
    is_open: bool = False


_Calls = dict[tuple[str, ...], _Call]


@dataclasses.dataclass(frozen=True)
class _Variable:
    """A variable of a model: its path, its shape and dtype, and whether it is a parameter, which is trained."""

    path: tuple[str, ...]
    value: Any
    is_parameter: bool


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model split into variables and a function of them.

    Attributes:
        variables: all of them.
        params: a tree of the parameters.
        rest: a tree of the other variables.
        call: the model as a function ``(calls, params, rest, args, kwargs)``, which notes its calls of modules.
    """

    variables: tuple[_Variable, ...]
    params: Any
    rest: Any
    call: Callable[[_Calls, Any, Any, Any, Any], Any]


def tabulate(model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModuleTable:
    """Return the modules of a model in a table, with the shapes of what goes in and out, parameters and FLOPs.

    The model is traced with shapes, forward and backward; nothing is computed, and the model stays as it is. Products
    and convolutions are counted, in loops as often as they run, and nothing else, as by :func:`paraxis.explain`.

    Args:
        model: a module of Flax NNX or Linen, an Equinox module, or any other callable pytree or function, which has one
            row. Linen's is given as it is, without variables; NNX's may be a method of it, as ``net.encode``.
        *args: what the model is called with: arrays, or ``jax.ShapeDtypeStruct`` in their place. All others, such as
            ``True`` and numbers of Python's, are as they are.
        **kwargs: likewise.

    Returns:
        A :class:`paraxis.reports.ModuleTable`, which prints as text, is shown by a notebook, and has
        ``save("x.html")``.

    Raises:
        TypeError: if ``model`` cannot be called.
        Exception: what the model raises for these arguments.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
        >>> px.tabulate(net, jax.ShapeDtypeStruct((16, 4), jnp.float32))
        Sequential: 58 parameters, 232 bytes
        <BLANKLINE>
          module    class       inputs         outputs        parameters  bytes      forward    backward
          layers.0  Linear      float32[16,4]  float32[16,8]  40          160 bytes  1.02 kFLOP  1.02 kFLOP
          layers.2  Linear      float32[16,8]  float32[16,2]  18          72 bytes   512 FLOP    1.02 kFLOP
          total     Sequential  float32[16,4]  float32[16,2]  58          232 bytes  1.54 kFLOP  2.05 kFLOP
    """
    check.function("tabulate", "model", model, "px.tabulate(net, jax.ShapeDtypeStruct((8, 28, 28, 1), jnp.float32))")
    taken = _taken(model, args, kwargs)
    given, opened = _split((args, kwargs))

    def forward(params: Any, rest: Any, given: Any, calls: _Calls) -> Any:
        args, kwargs = opened(given)
        return [x for x in jax.tree.leaves(taken.call(calls, params, rest, args, kwargs)) if _is_array(x)]

    def differentiated(params: Any, rest: Any, given: Any) -> Any:
        def floating(params: Any) -> Any:
            return [x for x in forward(params, rest, given, {}) if jnp.issubdtype(x.dtype, jnp.inexact)]

        results, pull = jax.vjp(floating, params)
        return results, pull([jnp.ones_like(x) for x in results])

    params, rest = _structs(taken.params), _structs(taken.rest)
    calls: _Calls = {}
    noting = functools.partial(forward, calls=calls)
    program = jax.make_jaxpr(noting)(params, rest, given)
    both = jax.make_jaxpr(differentiated)(params, rest, given) if jax.tree.leaves(params) else program
    if () not in calls:  # what no library has made
        result = jax.eval_shape(noting, params, rest, given)
        kind = getattr(getattr(model, "func", model), "__name__", type(model).__name__)
        calls = {(): _Call(kind, (*args, *kwargs.values()), result), **calls}
    counts = [_by_module(jax_api.without_dead(closed), calls) for closed in (program, both)]
    paths = sorted(calls, key=lambda path: bool(path))  # the model itself is first
    return ModuleTable(tuple(_row(path, calls[path], taken.variables, counts) for path in paths))


def _by_module(jaxpr: jax_api.Jaxpr, paths: Iterable[tuple[str, ...]]) -> collections.Counter[tuple[str, ...]]:
    """Return what is computed in the calls of each module; for the model itself, all."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    for scope, flops in _flops.by_scope(jaxpr):
        for path in paths:
            if not path or _scope(path) in scope:
                found[path] += flops
    return found


def _row(
    path: tuple[str, ...],
    call: _Call,
    variables: Sequence[_Variable],
    counts: Sequence[collections.Counter[tuple[str, ...]]],
) -> ModuleRow:
    inside = [variable for variable in variables if variable.path[: len(path)] == path]
    trained = [layout_of("", x.value.shape, x.value.dtype, None) for x in inside if x.is_parameter]
    others = [layout_of("", x.value.shape, x.value.dtype, None) for x in inside if not x.is_parameter]
    return ModuleRow(
        path=path,
        kind=call.kind,
        inputs=_shown(call.given),
        outputs=_shown(call.result),
        parameters=sum(math.prod(layout.shape) for layout in trained),
        bytes=sum(layout.bytes for layout in trained),
        other_bytes=sum(layout.bytes for layout in others),
        flops=counts[0][path],
        backward_flops=counts[1][path] - counts[0][path],
    )


def _shown(tree: Any) -> tuple[str, ...]:
    return tuple(
        f"{x.dtype}[{','.join(map(str, x.shape))}]" if _is_array(x) else check.described(x)
        for x in jax.tree.leaves(tree)
    )


def _cells(row: ModuleRow) -> list[str]:
    return [
        ".".join(row.path),
        row.kind,
        _first(row.inputs),
        _first(row.outputs),
        f"{row.parameters:,}" if row.parameters else "",
        units.size(row.bytes) if row.bytes else "",
        units.size(row.other_bytes) if row.other_bytes else "",
        units.amount(row.flops) if row.flops else "",
        units.amount(row.backward_flops) if row.backward_flops else "",
    ]


def _first(shapes: Sequence[str]) -> str:
    return ", ".join(shapes[:_MOST_SHAPES]) + (" …" if len(shapes) > _MOST_SHAPES else "")


# --- models of each library ------------------------------------------------------------------------------------------

# Modules of NNX and Equinox are copied, and each module of the copy gets a class of its own, whose `__call__` notes its
# arguments and its result. So nobody else's class is touched. Linen has interceptors for this.


def _taken(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Model:
    """Split a model into its variables and a function of them; of Linen's, those that it makes for these arguments."""
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    owner, method = (model.__self__, model.__name__) if inspect.ismethod(model) else (model, "__call__")
    if nnx is not None and isinstance(owner, nnx.Module):
        return _of_nnx(owner, method)
    if linen is not None and isinstance(model, linen.Module):
        return _of_linen(model, args, kwargs)
    return _of_tree(model)


def _scope(path: tuple[str, ...]) -> str:
    """Return the name of the scope around the calls of a module."""
    return f"<{'.'.join(path)}>"


def _note(calls: _Calls, path: tuple[str, ...], kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module, and note it by its path, in the order in which calls begin."""
    if path in calls and calls[path].is_open:  # a method of its own
        return call(*args, **kwargs)
    noted = calls.setdefault(path, _Call(kind, _structs((*args, *kwargs.values()))))
    noted.is_open = True
    try:
        with jax.named_scope(_scope(path)):
            result = call(*args, **kwargs)
    finally:
        noted.is_open = False
    if noted.result is None:
        noted.result = _structs(result)
    return result


def _noted(calls: _Calls, path: tuple[str, ...], module: Any) -> None:
    """Give a module, which is a copy, a class of its own, whose calls are noted."""
    cls: type = type(module)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _note(calls, path, cls.__name__, functools.partial(cls.__call__, self), *args, **kwargs)

    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(cls, name) for name in names} | {"__call__": __call__}
    if callable(module):
        object.__setattr__(module, "__class__", type(cls)(cls.__name__, (cls,), body))


def _structs(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x

    return jax.tree.map(one, tree)


def _of_nnx(model: Any, method: str) -> _Model:
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)
    variables = [
        _Variable(tuple(map(str, path)), value, isinstance(variable, nnx.Param))
        for path, variable in nnx.to_flat_state(nnx.state(model))
        for value in jax.tree.leaves(variable)
    ]

    def call(calls: _Calls, params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        # Variables can be written in the trace that they are made in: so they are made here.
        copy = nnx.merge(graph, *jax.tree.map(lambda x: x, (params, rest)))
        for path, module in nnx.iter_modules(copy):
            _noted(calls, tuple(map(str, path)), module)
        return getattr(copy, method)(*args, **kwargs)

    return _Model(tuple(variables), params, rest, call)


def _of_linen(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Model:
    from flax import linen

    key = jax.random.key(0)
    given, opened = _split((args, kwargs))

    def init(given: Any) -> Any:
        args, kwargs = opened(given)
        return model.init(key, *args, **kwargs)

    made = linen.unbox(jax.eval_shape(init, given))
    params, rest = {"params": made.get("params", {})}, {name: x for name, x in made.items() if name != "params"}
    variables = [
        _Variable(tuple(str(part.key) for part in path[1:]), value, collection == "params")
        for collection, tree in made.items()
        for path, value in jax.tree_util.tree_flatten_with_path({collection: tree})[0]
    ]

    def call(calls: _Calls, params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        def interceptor(following: Any, args: Any, kwargs: Any, context: Any) -> Any:
            is_method = hasattr(type(context.module), context.method_name)  # and not what a lifted transform calls
            if not is_method or context.method_name in ("setup", "__post_init__"):
                return following(*args, **kwargs)
            kind = type(context.module).__name__
            return _note(calls, context.module.path, kind, following, *args, **kwargs)

        with linen.intercept_methods(interceptor):
            return model.apply({**params, **rest}, *args, **kwargs, rngs={"params": key}, mutable=True)[0]

    return _Model(tuple(variables), params, rest, call)


def _of_tree(model: Any) -> _Model:
    arrays, opened = _split(model)
    is_parameter = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    named = [(path, x) for path, x in jax.tree_util.tree_flatten_with_path(model)[0] if _is_array(x)]
    variables = [_Variable(_keys(path), x, ours) for (path, x), ours in zip(named, is_parameter, strict=True)]
    params = [x if ours else None for x, ours in zip(arrays, is_parameter, strict=True)]
    rest = [None if ours else x for x, ours in zip(arrays, is_parameter, strict=True)]

    def call(calls: _Calls, params: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        copy = opened([y if x is None else x for x, y in zip(params, rest, strict=True)])
        for path, module in _equinox_modules(copy, ()):
            _noted(calls, path, module)
        return copy(*args, **kwargs)

    return _Model(tuple(variables), params, rest, call)


def _equinox_modules(module: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
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


def _keys(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _split(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the arrays of a tree as shapes, and what puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = _structs([x for x in leaves if _is_array(x)])

    def opened(values: Any) -> Any:
        left = iter(values)
        return jax.tree.unflatten(structure, [next(left) if _is_array(x) else x for x in leaves])

    return arrays, opened


def _is_array(x: Any) -> bool:
    """Return whether a leaf is an array, or stands for one; numbers of Python's are none here."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
