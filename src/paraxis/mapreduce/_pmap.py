"""``pmap``, for any axis size."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import placing, scope, tree
from paraxis._axes.axis import Axis
from paraxis._calls import arguments, integers, pytrees
from paraxis._core import verbs
from paraxis._jax import jax_api, supposed
from paraxis._jax.latest import Jitted
from paraxis.errors import AxisError, ParaxisError, ShapeError

_R = TypeVar("_R")


@arguments.named()
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
        The mapped function, compiled once per shape, and anew if something else that ``fn`` reads has changed. You
        can differentiate, vmap, jit and nest it.

    Raises:
        ShapeError: when called, if the sizes of the mapped axes disagree, or there are none.
        AxisError: when called under a mesh that lacks the axis.

    Communicates: nothing, unless ``fn`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.pmap(lambda x: x / px.psum(x, "i"), axis_name="i")(jnp.array([1.0, 1.0, 2.0]))
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    arguments.function("pmap", "fn", fn, "px.pmap(lambda x: …)")
    if axis_name is not None:
        arguments.text("pmap", "axis_name", axis_name, "axis_name='clients'")
    if axis_size is not None:
        axis_size = arguments.count("pmap", "axis_size", axis_size, write="axis_size=8", error=AxisError)
    _require_axes("in_axes", in_axes)
    _require_axes("out_axes", out_axes)
    static = arguments.positions("pmap", "static_broadcasted_argnums", static_broadcasted_argnums, AxisError)
    donated = arguments.positions("pmap", "donate_argnums", donate_argnums, AxisError)
    name = axis_name if axis_name is not None else f"pmap({getattr(fn, '__name__', 'fn')})"

    def mapped(*args: Any, **kwargs: Any) -> Any:
        dynamic = tuple(arg for position, arg in enumerate(args) if position not in static)
        axes = _axes_of(in_axes, dynamic, len(args), static)
        axis = Axis(name, _size(axes, dynamic, kwargs, axis_size))
        axis = _placed(axis)
        leading = jax.tree.map(lambda at, x: _lead(at, x, axis), axes, dynamic, is_leaf=tree.is_none)

        def element(positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
            rest = iter(positional)
            return fn(*(arg if i in static else next(rest) for i, arg in enumerate(args)), **named)

        result = verbs.map_sealed(pytrees.of_opened(element), (leading, kwargs), axis)
        return _with_out_axes(out_axes, result)

    def sealed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(x if i in static else pytrees.sealed(x) for i, x in enumerate(args)), pytrees.sealed(kwargs)

    compiled = Jitted(mapped, [fn], static_argnums=static, donate_argnums=donated)

    @arguments.named()
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments.no_cut("pmap", "args", {i: x for i, x in enumerate(args) if i not in static})
        arguments.no_cut("pmap", "kwargs", kwargs)
        args, kwargs = sealed(args, kwargs)
        try:
            return pytrees.opened(compiled(*args, **kwargs))
        except ParaxisError:
            raise
        except ValueError:
            moved = _released((args, kwargs))
            if moved is None:
                raise
            return pytrees.opened(compiled(*moved[0], **moved[1]))

    def trace(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = sealed(args, kwargs)
        return compiled.trace(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return trace(*args, **kwargs).lower()

    vars(call).update(lower=lower, _trace=trace)
    return call


def _require_axes(argument: str, axes: Any) -> None:
    for at in jax.tree.leaves(axes, is_leaf=tree.is_none):
        if at is not None and integers.at_least(-arguments.LARGEST, at) is None:
            raise AxisError(
                f"pmap: {argument} must be an integer, None, or a tree of these, got {arguments.described(at)}; write "
                f"{argument}=0"
            )


def _axes_of(in_axes: Any, dynamic: tuple[Any, ...], num_args: int, static: tuple[int, ...]) -> tuple[Any, ...]:
    """Return one axis (or ``None``) per leaf, from a prefix tree over all or over the non-static arguments."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple) and len(in_axes) == num_args:
        in_axes = tuple(at for position, at in enumerate(in_axes) if position not in static)
    if in_axes is None or isinstance(in_axes, int):
        in_axes = (in_axes,) * len(dynamic)
    try:
        return tuple(tree.spread(at, x) for at, x in zip(in_axes, dynamic, strict=True))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"pmap: in_axes={in_axes!r} does not fit the {len(dynamic)} non-static arguments it was given; write one "
            f"entry per positional argument, each an integer, None, or a tree that is a prefix of the argument"
        ) from error


def _size(axes: tuple[Any, ...], dynamic: tuple[Any, ...], kwargs: dict[str, Any], given: int | None) -> int:
    sizes: dict[str, int] = {} if given is None else {"axis_size": given}

    def note(path: Any, at: int | None, leaf: Any) -> None:
        if at is None:
            return
        shape = np.shape(leaf)
        label = f"args{jax.tree_util.keystr(path)}"
        if not -len(shape) <= at < len(shape):
            tree.refuse_lists("pmap", "args", dynamic)
            tree.refuse_lists("pmap", "kwargs", kwargs)
            raise ShapeError(
                f"pmap: {label} has shape {shape} and no axis {at} to map over; write None for it in in_axes to give "
                f"every element the whole of it"
            )
        sizes[label] = shape[at]

    jax.tree_util.tree_map_with_path(note, axes, dynamic, is_leaf=tree.is_none)
    jax.tree_util.tree_map_with_path(lambda path, leaf: note(path, 0, leaf), kwargs)
    if not sizes:
        raise ShapeError("pmap: no argument is mapped, so the number of elements is unknown; write axis_size=8")
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{label}: {size}" for label, size in sizes.items())
        raise ShapeError(f"pmap: the sizes of the mapped axes disagree ({found}); they must be one and the same")
    return next(iter(sizes.values()))


def _placed(axis: Axis) -> Axis:
    """With no mesh about, as many devices as elements if there are: then none is padded."""
    if scope.current().mapped or not jax.sharding.get_abstract_mesh().empty:
        return axis if _fits(axis) else Axis(axis.name, axis.size, over=jax.sharding.get_abstract_mesh().axis_names)
    devices = supposed.devices()
    if axis.size >= len(devices):
        return axis
    return Axis(axis.name, axis.size, mesh=placing.mesh_of(axis.name, tuple(devices[: axis.size])))


def _fits(axis: Axis) -> bool:
    return bool(scope.current().mapped) or axis.name in jax.sharding.get_abstract_mesh().axis_names


def _lead(at: int | None, x: Any, axis: Axis) -> Any:
    return verbs.broadcast(x, axis) if at is None else jnp.moveaxis(x, at, 0)


def _with_out_axes(out_axes: Any, result: Any) -> Any:
    def one(at: int | None, leaf: jax.Array) -> jax.Array:
        return leaf[0] if at is None else jnp.moveaxis(leaf, 0, at)

    try:
        return jax.tree.map(one, tree.spread(out_axes, result), result, is_leaf=tree.is_none)
    except ValueError as error:
        raise ShapeError(
            f"pmap: out_axes={out_axes!r} does not fit the result, {jax.tree.structure(result)}; write one entry per "
            f"output, each an integer, None, or a tree that is a prefix of the output"
        ) from error


def _released(call: Any) -> Any:
    """Return the arguments with arrays that are bound to devices brought to the host; ``None`` if there are none."""
    bound = [False]

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) and x.committed:
            bound[0] = True
            return np.asarray(x)
        return x

    moved = jax.tree.map(one, call)
    return moved if bound[0] else None
