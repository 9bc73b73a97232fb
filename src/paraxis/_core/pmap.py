"""``pmap``, for any axis size, and the collectives by which elements exchange values inside a mapped function."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, placing, pytrees, reductions, verbs
from paraxis._core.placing import Axis, Placement, current, mapped_axis
from paraxis.errors import DataError

_R = TypeVar("_R")
_Tree = TypeVar("_Tree")

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
            all elements), or a tree of these that is a prefix of the arguments; of keyword arguments, axis 0.
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
    static, donated = (
        (given,) if isinstance(given, int) else tuple(given) for given in (static_broadcasted_argnums, donate_argnums)
    )
    name = axis_name if axis_name is not None else f"pmap({getattr(fn, '__name__', 'fn')})"
    known: dict[Any, Placement | None] = {}  # how arguments lie that need not be prepared, and what their results are
    returns_models = False

    def split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, list[int | None], Placement]:
        """Return the leaves of what is not static, their structure, the mapped axis of each, and where elements lie."""
        dynamic = {position: arg for position, arg in enumerate(args) if position not in static}
        leaves, structure = jax.tree.flatten((dynamic, kwargs))
        entries = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else in_axes
        if isinstance(entries, tuple) and len(entries) == len(args):
            entries = tuple(entries[i] for i in dynamic)
        axes = _entries("in_axes", entries, tuple(dynamic.values()))
        axes += [0] * (len(leaves) - len(axes))  # keyword arguments
        return leaves, structure, axes, placing.place(_placed(Axis(name, _size(axes, (dynamic, kwargs), axis_size))))

    def mapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal returns_models
        leaves, structure, axes, placement = split(args, kwargs)
        sides = zip(axes, leaves, strict=True)
        leading = [verbs.broadcast(x, placement.axis) if at is None else jnp.moveaxis(x, at, 0) for at, x in sides]

        def element(own: dict[int, Any], named: dict[str, Any]) -> Any:
            return fn(*(own.get(i, pytrees.opened(arg)) for i, arg in enumerate(args)), **named)

        result = verbs.map_sealed(pytrees.of_opened(element), structure.unflatten(leading), placement.axis)
        results, out_tree = jax.tree.flatten(result)
        returns_models |= len(jax.tree.leaves(pytrees.opened(result))) > len(results)
        outs = zip(_entries("out_axes", out_axes, result), results, strict=True)
        return out_tree.unflatten([y[0] if at is None else jnp.moveaxis(y, 0, at) for at, y in outs])

    def in_blocks(*args: Any, **kwargs: Any) -> Any:
        result, placement = mapped(*args, **kwargs), split(args, kwargs)[-1]
        if not has_blocks(placement):
            return result
        rows = jax.tree.map(lambda y: arrays.pad(y, placement, safe=False), result)
        return jax.lax.with_sharding_constraint(rows, arrays.sharding(placement))

    def has_blocks(placement: Placement) -> bool:
        """Return whether padded rows are brought together by a program of their own, when all devices are done.

        In one program, XLA's CPU backend ends the process where a device waits a minute for one that is still in its
        loops, or that has raised.
        """
        is_cut = placement.is_padded and not placement.is_explicit and out_axes == 0 and not donated
        return is_cut and arrays.sharding(placement) is not None and jax.default_backend() == "cpu"

    def prepared(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], Placement | None]:
        """Seal models, refuse integers that JAX would cut, and move arrays that are bound to other devices.

        Also return where padded rows come from, if there are any.
        """
        check.no_reference("pmap", args=args, kwargs=kwargs)
        args, kwargs = pytrees.given("pmap", args, kwargs)
        leaves, structure, axes, placement = split(args, kwargs)

        def moved(x: Any, at: int | None) -> Any:
            is_bound = not arrays.is_traced(x) and getattr(x, "committed", False)
            return arrays.settle(x, placement, rows=at == 0) if is_bound else x

        dynamic, kwargs = structure.unflatten(map(moved, leaves, axes))
        args = tuple(dynamic.get(i, arg) for i, arg in enumerate(args))
        return args, kwargs, placement if has_blocks(placement) else None

    compiled = jax.jit(in_blocks, static_argnums=static, donate_argnums=donated)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        try:
            key = structure, *map(_LIES, leaves), jax.sharding.get_abstract_mesh()
            is_known = key in known
        except (AttributeError, TypeError):  # of NumPy's arrays, tracers and static arguments, which have no such key
            key, is_known = None, False
        if is_known:
            placement = known[key]
        else:
            args, kwargs, placement = prepared(args, kwargs)
            if key is not None and all(map(operator.is_, leaves, jax.tree.leaves((args, kwargs)))):
                known[key] = placement
        result = compiled(*args, **kwargs)
        result = arrays.unpadded(jax.block_until_ready(result), placement) if placement is not None else result
        return pytrees.opened(result) if returns_models else result

    def trace(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, _ = prepared(args, kwargs)
        return jax.jit(mapped, static_argnums=static, donate_argnums=donated).trace(*args, **kwargs)

    vars(call).update(lower=lambda *args, **kwargs: trace(*args, **kwargs).lower(), trace=trace)
    return call


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
    firsts = {size: label for label, size in reversed(sizes.items())}  # of many leaves, one for each size
    listed = ", ".join(f"{label}: {size}" for size, label in reversed(firsts.items())) or "no argument is mapped"
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


# --- what elements exchange, inside a mapped function -------------------------------------------------------------
#
# A body is traced with the axis's name bound to the whole logical axis, however many elements share a device. So these
# collectives, and those of jax.lax by the same name, say the same thing, and none is ever partial. Derivatives are
# those of jax.vmap: the transpose of a sum over all elements is a sum over all elements.


def psum(x: _Tree, axis: Axis | str) -> _Tree:
    """Sum a pytree of arrays over all elements of an axis that is being mapped; every element gets the result.

    Shapes stay; booleans and integers are summed as in ``jax.lax.psum``.

    Raises:
        AxisError: if called outside a function that is mapped along that axis.

    Communicates: one all-reduce the size of ``x``; none if the axis lies within one device.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x / px.psum(x, "rows"), jnp.array([1.0, 1.0, 2.0]), px.Axis("rows", 3))
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    return _exchanged("psum", x, axis)


def pmean(x: _Tree, axis: Axis | str) -> _Tree:
    """Average over all elements of an axis; every element gets the result. See :func:`psum`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.pmean(x, "rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([3., 3., 3.], dtype=float32)
    """
    return _exchanged("pmean", x, axis)


def pmax(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the largest value over all elements of an axis to every element. See :func:`psum`.

    NaN wins. Like ``jax.lax.pmax``, it has no derivative; if you need one, reduce after the map: ``px.reduce_max``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.pmax(x, "rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([6., 6., 6.], dtype=float32)
    """
    return _exchanged("pmax", x, axis)


def pmin(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the smallest value over all elements of an axis to every element. See :func:`pmax`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.pmin(x, "rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([1., 1., 1.], dtype=float32)
    """
    return _exchanged("pmin", x, axis)


def all_gather(x: _Tree, axis: Axis | str) -> _Tree:
    """Return the values of all elements, in order, to every element: ``(...)`` → ``(size, ...)``. See :func:`psum`.

    Communicates: one all-gather the size of ``size`` times ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: px.all_gather(x, "rows"), jnp.array([1, 2, 3]), px.Axis("rows", 3))[0]
        Array([1, 2, 3], dtype=int32)
    """
    return _exchanged("all_gather", x, axis)


def axis_index(axis: Axis | str) -> jax.Array:
    """Return this element's index along the axis, an int32 scalar from 0 to ``size - 1``, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x + px.axis_index("rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([1., 3., 8.], dtype=float32)
    """
    return jax.lax.axis_index(mapped_axis("axis_index", axis).name)


def axis_size(axis: Axis | str) -> int:
    """Return the number of elements of the axis that is being mapped, a Python integer, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x / px.axis_size("rows"), jnp.array([3.0, 6.0, 9.0]), px.Axis("rows", 3))
        Array([1., 2., 3.], dtype=float32)
    """
    return mapped_axis("axis_size", axis).size


def _exchanged(collective: str, x: Any, axis: Axis | str) -> Any:
    """JAX's collective of that name. Python's numbers stay such: their sum is known without a program."""
    name = mapped_axis(collective, axis).name
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool) else leaf, pytrees.sealed(x))
    if collective in ("pmax", "pmin"):
        return pytrees.opened(jax.tree.map(lambda leaf: _across(jnp.asarray(leaf), collective, name), x))
    return pytrees.opened(getattr(jax.lax, collective)(x, name))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _across(x: jax.Array, collective: str, name: str) -> jax.Array:
    """Return ``jax.lax.pmax`` or ``pmin`` in which NaN wins; it has no derivative either."""
    fold: Callable[..., jax.Array] = getattr(jax.lax, collective)
    return reductions.by_integers(lambda x: fold(x, name), x, nan_is_top=collective == "pmax")


@_across.defjvp
def _(collective: str, name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(f"{collective} has no derivative; reduce after the map instead")
