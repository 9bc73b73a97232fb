"""The modules of a model in a table: what each is given and returns, its parameters, and what it computes."""

import collections
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis._jax import jax_api
from paraxis.reports import _as_text, _layouts, _models, _work, units
from paraxis.reports._page import Page

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

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join(
            line.rstrip() for line in [self._title, "", *_as_text.table(self._cells(), len(self.rows) + 2)]
        )

    def _parts(self) -> Iterator[str]:
        head, *rows = self._cells()
        yield html.table(head, rows)

    def _cells(self) -> list[list[str]]:
        *_, last = table = [list(_HEAD), *map(_cells, self.rows[1:]), _cells(self.rows[0])]
        last[0] = "total"
        kept = [column for column in range(len(_HEAD)) if any(row[column] for row in table[1:])]
        return [[row[column] for column in kept] for row in table]


@arguments.named(jax.ShapeDtypeStruct)
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
        TypeError: if ``model`` cannot be called, or does not compute with JAX, as a module of PyTorch.
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
    arguments.function(
        "tabulate", "model", model, "px.tabulate(net, jax.ShapeDtypeStruct((8, 28, 28, 1), jnp.float32))"
    )
    if any(cls.__module__.startswith("torch.nn.") for cls in inspect.getmro(type(model))):
        _refuse(model, "is PyTorch's")
    taken = _models.of(model, args, kwargs)
    given, opened = _models.split((args, kwargs))

    def forward(params: Any, rest: Any, given: Any) -> Any:
        args, kwargs = opened(given)
        return [x for x in jax.tree.leaves(taken.call(params, rest, args, kwargs)) if _models.is_array(x)]

    def differentiated(params: Any, rest: Any, given: Any) -> Any:
        def floating(params: Any) -> Any:
            return [x for x in forward(params, rest, given) if jnp.issubdtype(x.dtype, jnp.inexact)]

        results, pull = jax.vjp(floating, params)
        return results, pull([jnp.ones_like(x) for x in results])

    params, rest = _structs(taken.params), _structs(taken.rest)
    with _models.noting() as calls:
        program = jax.make_jaxpr(forward)(params, rest, given)
    if not (program.jaxpr.outvars or calls or taken.variables):
        _refuse(model, "returns no array of JAX's")
    with _models.noting() as again:
        again.update(calls)  # they keep their numbers
        both = jax.make_jaxpr(differentiated)(params, rest, given) if jax.tree.leaves(params) else program
    if () not in calls:  # what no library has made
        result = jax.eval_shape(forward, params, rest, given)
        kind = getattr(getattr(model, "func", model), "__name__", type(model).__name__)
        calls = {(): _models.Call(kind, (*args, *kwargs.values()), result), **calls}
        numbers = {path: number - 1 for number, path in enumerate(calls)}
    else:
        numbers = {path: number for number, path in enumerate(calls)}
    counts = [_flops(jax_api.without_dead(closed), numbers) for closed in (program, both)]
    paths = sorted(calls, key=lambda path: bool(path))  # the model itself is first
    return ModuleTable(tuple(_row(path, calls[path], taken.variables, counts) for path in paths))


def _refuse(model: Any, reason: str) -> NoReturn:
    raise TypeError(
        f"tabulate: {getattr(model, '__name__', type(model).__name__)} {reason}; write px.tabulate(net, x) with a "
        f"module of Flax NNX, Linen or Equinox, or a function of JAX arrays"
    )


def _structs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _flops(jaxpr: jax_api.Jaxpr, numbers: dict[tuple[str, ...], int]) -> collections.Counter[tuple[str, ...]]:
    """Return what is computed in the calls of each module; for the model itself, all."""
    found: collections.Counter[tuple[str, ...]] = collections.Counter()
    tags = {_models.tag(number): path for path, number in numbers.items() if path}
    for scope, flops in _work.by_scope(jaxpr):
        found[()] += flops
        for name, path in tags.items():
            if re.search(rf"\b{name}\b", scope):
                found[path] += flops
    return found


def _row(
    path: tuple[str, ...],
    call: _models.Call,
    variables: Sequence[_models.Variable],
    counts: Sequence[collections.Counter[tuple[str, ...]]],
) -> ModuleRow:
    inside = [variable for variable in variables if variable.path[: len(path)] == path]
    trained = [_layouts.unplaced("", x.value.shape, x.value.dtype) for x in inside if x.is_parameter]
    others = [_layouts.unplaced("", x.value.shape, x.value.dtype) for x in inside if not x.is_parameter]
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
        f"{x.dtype}[{','.join(map(str, x.shape))}]" if _models.is_array(x) else arguments.described(x)
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
