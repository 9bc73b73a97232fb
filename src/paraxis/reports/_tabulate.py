"""The modules of a model in a table: what each is given and returns, its parameters, and what it computes."""

import collections
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import check, jax_api
from paraxis._core.pytrees import combine, of_combined
from paraxis.reports import _explain, _flops, units
from paraxis.reports._layout import Layout, is_array, layout_of
from paraxis.reports._page import Page, Section

_HEAD = ("module", "class", "inputs", "outputs", "parameters", "bytes", "other", "forward", "backward")


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
        flops: floating-point operations in matrix products and convolutions, two for each multiplication, of all its
            calls in a call of the model.
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
        rows = [*map(_cells, self.rows[1:]), ["total", *_cells(self.total)[1:]]]
        yield Section("", rows, _HEAD, has_head=True, most=len(rows))


_Path = tuple[str, ...]
# Path of a module → its class, and the arguments and results of its first call; in the order of calls.
_Calls = dict[_Path, tuple[str, tuple[str, ...], tuple[str, ...]]]


def tabulate(model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModuleTable:
    """Return the modules of a model in a table, with the shapes of what goes in and out, parameters and FLOPs.

    The model is traced with shapes, forward and backward; nothing is computed, and the model stays as it is. Products
    and convolutions are counted, in loops as often as they run, and nothing else, as by :func:`paraxis.explain`.

    Args:
        model: a module of Flax NNX or Linen, an Equinox module, or any other callable pytree or function, which has one
            row. Linen's is given without variables, NNX's may be a method, as ``net.encode``; Equinox's takes one row.
        *args: what the model is called with: arrays, ``jax.ShapeDtypeStruct`` in their place, ``True`` and the like.
        **kwargs: likewise.

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
    calls: _Calls = {}
    inputs = _explain.partition((args, kwargs))
    params, rest, call = _functional(model, calls, inputs)
    if not jax.tree.leaves((params, rest)):
        params, call = _closed_over(functools.partial(call, params, rest), inputs)
    kind = _explain.name_of(model)

    def both(params: Any, rest: Any, inputs: Any) -> Any:
        args, kwargs = combine(inputs)

        def forward(params: Any) -> Any:
            run = functools.partial(call, params, rest)
            results = [x for x in jax.tree.leaves(_note(calls, (), kind, run, *args, **kwargs)) if is_array(x)]
            return [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)], results

        floating, pull, results = jax.vjp(forward, params, has_aux=True)
        return results, pull([jnp.ones_like(x) for x in floating])

    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, rest, inputs))
    flops: collections.Counter[tuple[_Path, bool]] = collections.Counter()  # by module, and whether of the derivative
    for eqn, times, _, scope in _flops.walk(jax_api.dce(jax.make_jaxpr(both)(*structs))[0].jaxpr):
        amount = times * _flops.of_product(eqn)
        for path in calls if amount else ():
            if not path or _scope(path) in scope:
                flops[path, "transpose(" in scope] += amount
    rows: list[ModuleRow] = []
    for path, noted in calls.items():
        trained, others = _inside(params, path), _inside(rest, path)
        sizes = sum(math.prod(x.shape) for x in trained), sum(x.bytes for x in trained), sum(x.bytes for x in others)
        rows.append(ModuleRow(path, *noted, *sizes, flops[path, False], flops[path, True]))
    return ModuleTable(tuple(rows))


def _inside(collections: Any, path: _Path) -> list[Layout]:
    """Return the arrays of a module, in trees by the names of their collections."""
    leaves = jax.tree_util.tree_flatten_with_path(collections)[0]
    return [layout_of("", x.shape, x.dtype, None) for at, x in leaves if _keys(at[1:])[: len(path)] == path]


def _shown(tree: Any) -> tuple[str, ...]:
    return tuple(
        f"{x.dtype}[{','.join(map(str, x.shape))}]" if is_array(x) else check.described(x)
        for x in jax.tree.leaves(tree)
    )


def _cells(row: ModuleRow) -> list[str]:
    return [
        ".".join(row.path),
        row.kind,
        *map(", ".join, (row.inputs, row.outputs)),
        f"{row.parameters:,}" if row.parameters else "",
        *(units.size(n) if n else "" for n in (row.bytes, row.other_bytes)),
        *(units.amount(n) if n else "" for n in (row.flops, row.backward_flops)),
    ]


# --- models of each library ------------------------------------------------------------------------------------------

# Modules of NNX and Equinox are copied, and each module of the copy gets a class of its own, whose `__call__` notes its
# arguments and its result. So nobody else's class is touched. Linen has interceptors for this.


def _functional(model: Any, calls: _Calls, inputs: Any) -> tuple[Any, Any, Callable[..., Any]]:
    """Return a model's parameters, its other variables, and it as a function of both, which notes its calls."""
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    owner, method = (model.__self__, model.__name__) if inspect.ismethod(model) else (model, "__call__")
    if nnx is not None and isinstance(owner, nnx.Module):
        return _of_nnx(owner, method, calls)
    if linen is not None and isinstance(model, linen.Module):
        return _of_linen(model, calls, *inputs)
    return _of_tree(model, calls)


def _scope(path: _Path) -> str:
    return f"<{'.'.join(path)}>"


def _note(calls: _Calls, path: _Path, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module; note its first call, in which it may call methods of its own."""
    is_first, inputs = path not in calls, _shown((args, kwargs))
    calls.setdefault(path, (kind, inputs, ()))
    with jax.named_scope(_scope(path)):
        result = call(*args, **kwargs)
    if is_first:
        calls[path] = (kind, inputs, _shown(result))
    return result


def _notes(calls: _Calls, path: _Path, module: Any) -> None:
    """Give a module, which is a copy, a class of its own, whose calls are noted."""
    cls: type = type(module)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _note(calls, path, cls.__name__, functools.partial(cls.__call__, self), *args, **kwargs)

    if callable(module):
        body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        object.__setattr__(module, "__class__", type(cls)(cls.__name__, (cls,), body | {"__call__": __call__}))


def _of_nnx(model: Any, method: str, calls: _Calls) -> tuple[Any, Any, Callable[..., Any]]:
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def call(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        # Variables can be written in the trace that they are made in: so they are made here.
        copy = nnx.merge(graph, *jax.tree.map(lambda x: x, (params["params"], rest["rest"])))
        for path, module in nnx.iter_modules(copy):
            _notes(calls, tuple(map(str, path)), module)
        return getattr(copy, method)(*args, **kwargs)

    return {"params": params}, {"rest": rest}, call


def _of_linen(model: Any, calls: _Calls, args: Any, kwargs: Any) -> tuple[Any, Any, Callable[..., Any]]:
    from flax import linen

    key = jax.random.key(0)
    rest = linen.unbox(jax.eval_shape(of_combined(model.init), key, *args, **kwargs))
    params = {"params": rest.pop("params", {})}

    def call(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        def interceptor(following: Any, args: Any, kwargs: Any, context: Any) -> Any:
            is_method = hasattr(type(context.module), context.method_name)  # and not what a lifted transform calls
            if not is_method or context.method_name in ("setup", "__post_init__"):
                return following(*args, **kwargs)
            return _note(calls, context.module.path, type(context.module).__name__, following, *args, **kwargs)

        with linen.intercept_methods(interceptor):
            return model.apply({**params, **rest}, *args, **kwargs, rngs={"params": key}, mutable=True)[0]

    return params, rest, call


def _of_tree(model: Any, calls: _Calls) -> tuple[Any, Any, Callable[..., Any]]:
    params, rest = _divided(_explain.partition(model))

    def call(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        copy = combine(_joined(params["params"], rest["rest"]))
        for path, module in _equinox_modules(copy, ()):
            _notes(calls, path, module)
        return copy(*args, **kwargs)

    return {"params": params}, {"rest": rest}, call


def _divided(tree: Any) -> Any:
    """Return the arrays of a tree that are trained, and the others; ``None`` is in the place of the rest."""
    is_trained = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    return [jax.tree.map(lambda x: x if is_trained(x) is wanted else None, tree) for wanted in (True, False)]  # noqa: B023


def _joined(trained: Any, others: Any) -> Any:
    return jax.tree.map(lambda x, other: other if x is None else x, trained, others, is_leaf=lambda x: x is None)


def _closed_over(call: Callable[..., Any], inputs: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the parameters that a function closes over, as of a model in ``jax.vmap``, and a function of them."""
    closed, results = jax.make_jaxpr(lambda x: of_combined(call)(*x[0], **x[1]), return_shape=True)(inputs)
    trained, others = _divided(list(closed.consts))

    def of_them(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        arrays = jax.tree.leaves(_explain.partition((args, kwargs)))
        leaves = jax_api.jaxpr_as_fun(closed.replace(consts=_joined(params["params"], others)))(*arrays)
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return {"params": trained}, of_them


def _equinox_modules(module: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    equinox = sys.modules.get("equinox")
    if equinox is None or not isinstance(module, equinox.Module):
        return
    yield path, module
    is_inside = lambda x: x is not module and isinstance(x, equinox.Module)  # noqa: E731
    for at, part in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_inside)[0]:
        yield from _equinox_modules(part, (*path, *_keys(at)))


def _keys(path: Any) -> _Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
