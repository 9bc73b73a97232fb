"""``pmap``, for any axis size."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees, verbs
from paraxis._core.placing import Axis, Placement, current
from paraxis.errors import DataError

_R = TypeVar("_R")

_LIES = operator.attrgetter("committed", "sharding", "shape")


def pmap(
    fn: Callable[..., _R],
    axis_name: str | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    axis_size: int | None = None,
) -> Callable[..., _R]:
    """Map a function over an axis of its arguments, on all devices: ``jax.pmap`` for any number of elements.

    If there are more elements than devices, devices run several. Collectives in the function,
    ``px.pmean(x, axis_name)`` or ``jax.lax.pmean(x, axis_name)``, always combine all elements.

    Args:
        fn: function of one element.
        axis_name: a name for collectives to use.
        in_axes: for each positional argument, the array axis to map over: an integer, ``None`` (the same value for
            all elements), or a tree of these that is a prefix of the arguments. Keyword arguments are mapped over
            axis 0.
        out_axes: likewise for the result; ``None`` says that all elements return the same value, of which one is kept.
        static_broadcasted_argnums: positions of arguments that are compile-time constants (hashable).
        donate_argnums: positions of arguments whose buffers may be reused for the result.
        axis_size: number of elements; by default that of the arguments.

    Returns:
        The mapped function, traced and compiled once per shape, as by ``jax.jit``. You can differentiate, vmap, jit
        and nest it. Arguments that lie on other devices are moved.

    Raises:
        DataError: when called, if the sizes of the mapped axes disagree, or there are none.
        AxisError: when called under a mesh that lacks the axis.

    Communicates: nothing, unless ``fn`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.pmap(lambda x: x / px.psum(x, "i"), axis_name="i")(jnp.array([1.0, 1.0, 2.0]))
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    static, donated = _positions(static_broadcasted_argnums), _positions(donate_argnums)
    name = axis_name if axis_name is not None else f"pmap({getattr(fn, '__name__', 'fn')})"
    known: set[Any] = set()  # how arguments lie that need not be prepared
    returns_models = False

    def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, list[int | None], Axis]:
        """Return the leaves of what is not static, their structure, the mapped axis of each, and the px.Axis."""
        dynamic = {position: arg for position, arg in enumerate(args) if position not in static}
        leaves, structure = jax.tree.flatten((dynamic, kwargs))
        axes = _axes_of(in_axes, dynamic, len(args))
        axes += [0] * (len(leaves) - len(axes))  # keyword arguments
        return leaves, structure, axes, _placed(Axis(name, _size(axes, (dynamic, kwargs), axis_size)))

    def mapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal returns_models
        leaves, structure, axes, axis = split(args, kwargs)
        leading = [
            verbs.broadcast(x, axis) if at is None else jnp.moveaxis(x, at, 0)
            for at, x in zip(axes, leaves, strict=True)
        ]

        def element(own: dict[int, Any], named: dict[str, Any]) -> Any:
            return fn(*(own.get(i, arg) for i, arg in enumerate(args)), **named)

        result = verbs.map_sealed(pytrees.of_opened(element), structure.unflatten(leading), axis)
        returns_models |= pytrees.is_sealed(result)
        results, out_tree = jax.tree.flatten(result)
        outs = zip(_entries("out_axes", out_axes, result), results, strict=True)
        return out_tree.unflatten([y[0] if at is None else jnp.moveaxis(y, 0, at) for at, y in outs])

    def in_blocks(*args: Any, **kwargs: Any) -> Any:
        result, placement = mapped(*args, **kwargs), placing.place(split(args, kwargs)[-1])
        target = arrays.sharding(placement)
        is_cut = placement.is_padded and not placement.is_explicit and out_axes == 0 and not donated
        if target is None or not is_cut or jax.default_backend() != "cpu":
            return result
        rows = jax.tree.map(lambda y: arrays.pad(y, placement, safe=False), result)
        return _Blocks(jax.lax.with_sharding_constraint(rows, target), placement)

    def prepared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Seal models, refuse integers that JAX would cut, and move arrays that are bound to other devices."""
        args = tuple(x if i in static else pytrees.sealed(x) for i, x in enumerate(args))
        kwargs = pytrees.sealed(kwargs)
        check.no_cut("pmap", "args", args)
        check.no_cut("pmap", "kwargs", kwargs)
        leaves, structure, axes, axis = split(args, kwargs)
        placement = placing.place(axis)
        leaves = [
            arrays.settle(x, placement, rows=at == 0) if _is_bound(x) else x for x, at in zip(leaves, axes, strict=True)
        ]
        dynamic, kwargs = structure.unflatten(leaves)
        return tuple(dynamic.get(i, arg) for i, arg in enumerate(args)), kwargs

    compiled = jax.jit(in_blocks, static_argnums=static, donate_argnums=donated)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        try:
            key = structure, *map(_LIES, leaves), jax.sharding.get_abstract_mesh()
            is_known = key in known
        except (AttributeError, TypeError):  # of NumPy's arrays, tracers and static arguments, which have no such key
            key, is_known = None, False
        if not is_known:
            args, kwargs = prepared(args, kwargs)
            if key is not None and all(map(operator.is_, leaves, jax.tree.leaves((args, kwargs)))):
                known.add(key)
        result = compiled(*args, **kwargs)
        if type(result) is _Blocks:
            result = _together(jax.block_until_ready(result))
        return pytrees.opened(result) if returns_models else result

    def trace(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepared(args, kwargs)
        return jax.jit(mapped, static_argnums=static, donate_argnums=donated).trace(*args, **kwargs)

    vars(call).update(lower=lambda *args, **kwargs: trace(*args, **kwargs).lower(), trace=trace)
    return call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Padded rows in blocks, to be brought together when all devices are done.

    In one program, XLA's CPU backend ends the process where a device waits a minute for one that is still in its loops,
    or that has raised.
    """

    rows: Any
    placement: Placement = dataclasses.field(metadata={"static": True})


@jax.jit
def _together(blocks: _Blocks) -> Any:
    return jax.tree.map(lambda y: arrays.unpad(y, blocks.placement), blocks.rows)


def _is_bound(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) and x.committed


def _positions(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _axes_of(in_axes: Any, dynamic: Mapping[int, Any], num_args: int) -> list[int | None]:
    """Return one axis (or ``None``) per leaf, from a prefix tree over all or over the non-static arguments."""
    if isinstance(in_axes, (tuple, list)):
        in_axes = tuple(in_axes[i] for i in dynamic) if len(in_axes) == num_args else tuple(in_axes)
    return _entries("in_axes", in_axes, tuple(dynamic.values()))


def _entries(option: str, prefix: Any, tree: Any) -> list[int | None]:
    try:
        return pytrees.entries(prefix, tree)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"pmap: {option}={prefix!r} does not fit {jax.tree.structure(tree)}; write an integer, None, or a tree of "
            f"these that is a prefix of it, with one entry for each argument that is not static, or each result"
        ) from error


def _size(axes: Sequence[int | None], arguments: Any, given: int | None) -> int:
    """Return the number of elements, on which all mapped axes agree."""
    sizes: dict[str, Any] = {} if given is None else {"axis_size": given}
    for ((part, *path), x), at in zip(jax.tree_util.tree_leaves_with_path(arguments), axes, strict=True):
        if at is not None:
            shape, label = np.shape(x), pytrees.name(("args", "kwargs")[part.idx], path)
            sizes[label] = shape[at] if -len(shape) <= at < len(shape) else f"no axis {at} in {shape}"
    found = set(sizes.values())
    if len(found) == 1 and not isinstance(size := found.pop(), str):
        return size
    listed = ", ".join(f"{label}: {size}" for label, size in sizes.items()) or "no argument is mapped"
    raise DataError(
        f"pmap: the sizes of the mapped axes must be one and the same ({listed}). Write None in in_axes for what every "
        f"element gets whole, and axis_size=8 if nothing else says how many there are"
    )


def _placed(axis: Axis) -> Axis:
    """Choose as many devices as elements, if there are so many and no mesh is set: then none is padded."""
    context, devices = jax.sharding.get_abstract_mesh(), tuple(jax.devices())
    if current().mapped or axis.name in context.axis_names:
        return axis
    if not context.empty:
        return dataclasses.replace(axis, over=context.axis_names)
    mesh = placing.mesh_of(devices[: axis.size], axis.name) if axis.size < len(devices) else None
    return dataclasses.replace(axis, mesh=mesh)
