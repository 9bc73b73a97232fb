"""``pmap``, for any axis size."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees, scope, tree, verbs
from paraxis._core.axis import Axis
from paraxis.errors import AxisError, ShapeError

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
        ShapeError: when called, if the sizes of the mapped axes disagree, or there are none.
        AxisError: when called under a mesh that lacks the axis.

    Communicates: nothing, unless ``fn`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.pmap(lambda x: x / px.psum(x, "i"), axis_name="i")(jnp.array([1.0, 1.0, 2.0]))
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    check.function("pmap", "fn", fn, "px.pmap(lambda x: …)")
    if axis_size is not None:
        axis_size = check.count("pmap", "axis_size", axis_size, write="axis_size=8", error=AxisError)
    static, donated = _positions(static_broadcasted_argnums), _positions(donate_argnums)
    name = axis_name if axis_name is not None else f"pmap({getattr(fn, '__name__', 'fn')})"

    def laid_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[int, Any], list[int | None], Axis]:
        """Return the arguments that are not static, by position, the mapped axis of each leaf, and the px.Axis."""
        dynamic = {position: arg for position, arg in enumerate(args) if position not in static}
        axes = _axes_of(in_axes, dynamic, len(args))
        return dynamic, axes, _placed(Axis(name, _size(axes, dynamic, kwargs, axis_size)))

    def mapped(*args: Any, **kwargs: Any) -> Any:
        dynamic, axes, axis = laid_out(args, kwargs)
        leaves, structure = jax.tree.flatten(dynamic)
        leading = structure.unflatten([_lead(at, x, axis) for at, x in zip(axes, leaves, strict=True)])

        def element(own: dict[int, Any], named: dict[str, Any]) -> Any:
            return fn(*(own.get(i, arg) for i, arg in enumerate(args)), **named)

        result = verbs.map_sealed(pytrees.of_opened(element), (leading, kwargs), axis)
        return _with_out_axes(out_axes, result)

    compiled = jax.jit(mapped, static_argnums=static, donate_argnums=donated)

    def prepared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = jax.tree.leaves((args, kwargs))
        if not all([isinstance(x, jax.Array) for x in leaves]):  # noqa: C419  # faster at each call
            args = tuple(x if i in static else pytrees.sealed(x) for i, x in enumerate(args))
            kwargs = pytrees.sealed(kwargs)
            check.no_cut("pmap", "args", args)
            check.no_cut("pmap", "kwargs", kwargs)
        return _moved(args, kwargs, *laid_out(args, kwargs)) if any(map(_is_bound, leaves)) else (args, kwargs)

    known: set[Any] = set()

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
        if (structure := jax.tree.structure(result)) in known:
            return result
        found = pytrees.opened(result)
        if found is result:
            known.add(structure)
        return found

    def trace(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepared(args, kwargs)
        return compiled.trace(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return trace(*args, **kwargs).lower()

    vars(call).update(lower=lower, trace=trace)
    return call


def _positions(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _axes_of(in_axes: Any, dynamic: Mapping[int, Any], num_args: int) -> list[int | None]:
    """Return one axis (or ``None``) per leaf, from a prefix tree over all or over the non-static arguments."""
    if in_axes is None or isinstance(in_axes, int):
        return [in_axes] * len(jax.tree.leaves(dynamic))
    entries = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    try:
        if len(entries) == num_args:
            entries = tuple(entries[position] for position in dynamic)
        return tree.entries(entries, tuple(dynamic.values()))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"pmap: in_axes={in_axes!r} does not fit the {len(dynamic)} non-static arguments it was given; write one "
            f"entry per positional argument, each an integer, None, or a tree that is a prefix of the argument"
        ) from error


def _size(axes: Sequence[int | None], dynamic: Mapping[int, Any], kwargs: dict[str, Any], given: int | None) -> int:
    leaves = jax.tree.leaves((dynamic, kwargs))
    mapped = [(np.shape(x), at) for x, at in zip(leaves, _with_keywords(axes, leaves), strict=True) if at is not None]
    sizes = {shape[at] if -len(shape) <= at < len(shape) else None for shape, at in mapped} | ({given} - {None})
    first = next(iter(sizes), None)
    if first is not None and len(sizes) == 1:
        return first
    if not sizes:
        raise ShapeError("pmap: no argument is mapped, so the number of elements is unknown; write axis_size=8")
    labels = [tree.name("args", path) for path, _ in jax.tree_util.tree_leaves_with_path(dynamic)]
    labels += [tree.name("kwargs", path) for path, _ in jax.tree_util.tree_leaves_with_path(kwargs)]
    found = [] if given is None else [f"axis_size: {given}"]
    for label, x, at in zip(labels, leaves, _with_keywords(axes, leaves), strict=True):
        shape = np.shape(x)
        if at is not None and not -len(shape) <= at < len(shape):
            raise ShapeError(
                f"pmap: {label} has shape {shape} and no axis {at} to map over; write None for it in in_axes to give "
                f"every element the whole of it"
            )
        found += [] if at is None else [f"{label}: {shape[at]}"]
    raise ShapeError(f"pmap: the sizes of the mapped axes disagree ({', '.join(found)}); they must be one and the same")


def _with_keywords(axes: Sequence[int | None], leaves: Sequence[Any]) -> list[int | None]:
    """Return the mapped axis of each leaf, those of keyword arguments, at the end, included."""
    return [*axes, *[0] * (len(leaves) - len(axes))]


def _placed(axis: Axis) -> Axis:
    """Choose as many devices as elements, if there are so many and no mesh is set: then none is padded."""
    context = jax.sharding.get_abstract_mesh()
    if scope.current().mapped or axis.name in context.axis_names:
        return axis
    if not context.empty:
        return Axis(axis.name, axis.size, over=context.axis_names)
    devices = jax.devices()
    if axis.size >= len(devices):
        return axis
    return Axis(axis.name, axis.size, mesh=placing.mesh_of(axis.name, tuple(devices[: axis.size])))


def _is_bound(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) and x.committed


def _moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: dict[int, Any], axes: list[int | None], axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move arrays that are bound to other devices than those of the axis, which ``jax.jit`` would refuse."""
    placement = placing.place(axis)
    leaves, structure = jax.tree.flatten((dynamic, kwargs))
    whole, rows = (arrays.sharding(placement, rows=rows) for rows in (False, True))
    if whole is None or rows is None:
        return args, kwargs
    for i, (x, at) in enumerate(zip(leaves, _with_keywords(axes, leaves), strict=True)):
        if _is_bound(x) and getattr(x.sharding, "mesh", None) != whole.mesh:
            leaves[i] = arrays.put(x, rows if at == 0 else whole)
    dynamic, kwargs = structure.unflatten(leaves)
    return tuple([dynamic.get(i, arg) for i, arg in enumerate(args)]), kwargs


def _lead(at: int | None, x: Any, axis: Axis) -> Any:
    return verbs.broadcast(x, axis) if at is None else jnp.moveaxis(x, at, 0)


def _with_out_axes(out_axes: Any, result: Any) -> Any:
    leaves, structure = jax.tree.flatten(result)
    try:
        axes = tree.entries(out_axes, result)
    except ValueError as error:
        raise ShapeError(
            f"pmap: out_axes={out_axes!r} does not fit the result, {structure}; write one entry per output, each an "
            f"integer, None, or a tree that is a prefix of the output"
        ) from error
    moved = [y[0] if at is None else jnp.moveaxis(y, 0, at) for at, y in zip(axes, leaves, strict=True)]
    return structure.unflatten(moved)
