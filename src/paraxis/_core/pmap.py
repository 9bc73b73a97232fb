"""``pmap``, for any axis size, and the collectives by which elements exchange values inside a mapped function."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from paraxis._core import arrays, jax_api, placing, pytrees, reductions, verbs
from paraxis._core.placing import Axis, Placement, current, mapped_axis
from paraxis._core.record import Lowering
from paraxis.errors import DataError

_R = TypeVar("_R")
_Tree = TypeVar("_Tree")


def pmap(
    fn: Callable[..., _R],
    axis_name: str | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    axis_size: int | None = None,
    at_once: int | None = None,
    lowering: Lowering = "auto",
) -> Callable[..., _R]:
    """Map a function over an axis of its arguments, on all devices: ``jax.pmap`` for any number of elements.

    If there are more elements than devices, devices run several; if there are fewer, some rest. Collectives in the
    function, ``px.pmean(x, axis_name)`` or ``jax.lax.pmean(x, axis_name)``, always combine all elements.

    Args:
        fn: function of one element.
        axis_name: a name for collectives to use.
        in_axes: for each positional argument, the array axis to map over: an integer, ``None`` (the same value for
            all elements), or a tree of these that is a prefix of the arguments; of keyword arguments, axis 0.
        out_axes: likewise for the result; ``None`` says that all elements return the same value, of which one is kept.
        static_broadcasted_argnums: positions of arguments that are compile-time constants (hashable).
        donate_argnums: positions of arguments whose buffers may be reused for the result.
        axis_size: number of elements; by default that of the arguments.
        at_once: the largest number of elements per device in flight; by default all.
        lowering: as in :func:`map_fn`.

    Returns:
        The mapped function, traced and compiled once per shape, as by ``jax.jit``. You can differentiate, vmap, jit
        and nest it. Arguments that lie on other devices are moved.

    Raises:
        DataError: when called, if the sizes of the mapped axes disagree, or there are none.
        AxisError: when called, as by :func:`map_fn`.

    Communicates: nothing, unless ``fn`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.pmap(lambda x: x / px.psum(x, "i"), axis_name="i")(jnp.array([1.0, 1.0, 2.0]))
        Array([0.25, 0.25, 0.5 ], dtype=float32)
    """
    name = axis_name if axis_name is not None else f"pmap({getattr(fn, '__name__', 'fn')})"
    static = static_broadcasted_argnums
    static = (static,) if isinstance(static, int) else tuple(static)
    return Pmapped(fn, name, in_axes, out_axes, static, donate_argnums, axis_size, at_once, lowering)


_LIES = operator.attrgetter("committed", "sharding", "shape")


@dataclasses.dataclass(eq=False, repr=False)
class Pmapped:
    """A mapped function, made by :func:`pmap`. It has ``lower`` and ``trace``, as what ``jax.jit`` returns."""

    _fn: Callable[..., Any]
    _name: str
    _in_axes: Any
    _out_axes: Any
    _static: tuple[int, ...]
    _donated: int | Sequence[int]
    _axis_size: int | None
    _at_once: int | None
    _lowering: Lowering

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self._fn, updated=())
        jit = functools.partial(jax.jit, static_argnums=self._static, donate_argnums=self._donated)
        self._jitted, self._jitted_in_blocks = jit(self._mapped), jit(functools.partial(self._mapped, in_blocks=True))
        self._returns_models = False
        # How arguments lie that need not be prepared, and where their results are.
        self._known: dict[Any, Placement] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        try:
            key = structure, *map(_LIES, leaves), jax.sharding.get_mesh(), current()
            placement = self._known.get(key)
        except (AttributeError, TypeError, ValueError):  # of NumPy's arrays and static arguments; while JAX traces
            key, placement = None, None
        if placement is None:
            args, kwargs, placement = self._prepared(args, kwargs)
            if arrays.is_traced(leaves) or jax_api.is_staging():
                return self._call_traced(placement, args, kwargs)
            if key is not None and all(map(operator.is_, leaves, jax.tree.leaves((args, kwargs)))):
                self._known[key] = placement
        result = self._jitted_in_blocks(*args, **kwargs)
        blocks, out_tree = jax.tree.flatten(result)
        outs: Sequence[Any] = [0] * len(blocks)
        if self._out_axes != 0:
            outs = pytrees.broadcast_prefix(self._out_axes, result, "pmap: out_axes")
        result = out_tree.unflatten(arrays.waited(blocks, placement, outs))
        return pytrees.combine(result) if self._returns_models else result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``jax.jit``."""
        args, kwargs, _ = self._prepared(args, kwargs)
        return self._jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``jax.jit``."""
        return self.trace(*args, **kwargs).lower()

    def _call_traced(self, placement: Placement, args: Any, kwargs: Any) -> Any:
        by_operation = placement.is_on_cpu_devices and not jax_api.is_staging()  # where an element may raise
        by_operation = by_operation and jax_api.calls_back(self._jitted.trace(*args, **kwargs).jaxpr.jaxpr)
        return pytrees.combine((self._mapped if by_operation else self._jitted)(*args, **kwargs))

    def _mapped(self, *args: Any, in_blocks: bool = False, **kwargs: Any) -> Any:
        """Map the function; ``in_blocks``, results have the elements first, padded, as devices have them."""
        leaves, structure, axes, axis = self._split(args, kwargs)
        pairs = zip(leaves, axes, strict=True)
        rows = [verbs.broadcast(x, axis) if at is None else jnp.moveaxis(x, at, 0) for x, at in pairs]

        def element(dynamic: dict[int, Any], named: dict[str, Any]) -> Any:
            return self._fn(*(dynamic.get(i, pytrees.combine(arg)) for i, arg in enumerate(args)), **named)

        element = functools.update_wrapper(pytrees.of_combined(element), self._fn, updated=())
        result = verbs.map_static(element, structure.unflatten(rows), axis, self._lowering, in_blocks)
        results, out_tree = jax.tree.flatten(result)
        self._returns_models |= len(jax.tree.leaves(pytrees.combine(result))) > len(results)
        outs = pytrees.broadcast_prefix(self._out_axes, result, "pmap: out_axes")
        if in_blocks:
            return result
        pairs = zip(results, outs, strict=True)
        return out_tree.unflatten([y[0] if at is None else jnp.moveaxis(y, 0, at) for y, at in pairs])

    def _split(self, args: tuple[Any, ...], kwargs: Any) -> tuple[list[Any], Any, list[int | None], Axis]:
        """Return the leaves of what is not static, their structure, the mapped axis of each, and the elements' axis."""
        static = {position % len(args) for position in self._static if args}
        dynamic = {position: arg for position, arg in enumerate(args) if position not in static}
        leaves, structure = jax.tree.flatten((dynamic, kwargs))
        entries = tuple(self._in_axes) if isinstance(self._in_axes, (tuple, list)) else self._in_axes
        if isinstance(entries, tuple) and len(entries) == len(args):
            entries = tuple(entries[i] for i in dynamic)
        axes = pytrees.broadcast_prefix(entries, tuple(dynamic.values()), "pmap: in_axes")
        axes += [0] * (len(leaves) - len(axes))  # keyword arguments
        size, mesh = _size(axes, (dynamic, kwargs), self._axis_size), jax.sharding.get_abstract_mesh()
        is_nested = current().mapped or mesh.empty or mesh.manual_axes
        over = None if is_nested or self._name in mesh.axis_names else mesh.axis_names
        return leaves, structure, axes, Axis(self._name, size, over=over, at_once=self._at_once)

    def _prepared(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], Placement]:
        """Partition models, refuse integers that JAX would cut, and move arrays that are bound to other devices."""
        args, kwargs = pytrees.arguments("pmap", args, kwargs)
        leaves, structure, axes, axis = self._split(args, kwargs)
        placement = placing.place(axis)

        def moved(x: Any, at: int | None) -> Any:
            is_bound = arrays.is_traced(x) or getattr(x, "committed", False)
            return arrays.to_mesh(x, placement, rows=at == 0) if is_bound else x

        dynamic, kwargs = structure.unflatten(map(moved, leaves, axes))
        return tuple(dynamic.get(i, arg) for i, arg in enumerate(args)), kwargs, placement


def _size(axes: Sequence[int | None], arguments: Any, axis_size: int | None) -> int:
    """Return the number of elements, on which all mapped axes agree."""
    labels: dict[Any, str] = {} if axis_size is None else {axis_size: "axis_size"}  # of sizes, the first with each
    for ((part, *path), x), at in zip(jax.tree_util.tree_leaves_with_path(arguments), axes, strict=True):
        if at is not None:
            shape = x.shape if hasattr(x, "shape") else jax.typeof(x).shape  # np.shape might read a source for ever
            size = shape[at] if -len(shape) <= at < len(shape) else f"no axis {at} in {shape}"
            labels.setdefault(size, pytrees.name(("args", "kwargs")[part.idx], path))
    if len(labels) == 1 and not isinstance(size := next(iter(labels)), str):
        return size
    listed = ", ".join(f"{label}: {size}" for size, label in labels.items()) or "no argument is mapped"
    raise DataError(
        f"pmap: the sizes of the mapped axes must be one and the same ({listed}). Write None in in_axes for what every "
        f"element gets whole, and axis_size=8 if nothing else says how many there are"
    )


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


def pick(x: _Tree, index: Any, axis: Axis | str | None = None) -> _Tree:
    """Return one element's values for all: placed → shared; inside a mapped function, that element's values to each.

    Args:
        x: pytree of arrays ``(size, ...)``; inside a function that is mapped along the axis, of the element's own
            ``(...)``. Any dtype, keys too.
        index: the element's number, an integer scalar; a negative one counts from the end. It may be traced.
        axis: as in :func:`broadcast`.

    Returns:
        Tree of arrays ``(...)``, with the dtypes of ``x``.

    Raises:
        DataError: if a leaf does not start with the size of the axis, or there is no such element; of an index that is
            traced, zeros then say so.
        AxisError: as in :func:`broadcast`.

    Communicates: one all-reduce the size of the result, where ``all_gather`` would send the values of all elements.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> loss, members = jnp.array([3.0, 1.0, 2.0]), px.Axis("members", 3)
        >>> px.pick({"rate": jnp.array([0.1, 0.2, 0.3])}, loss.argmin(), members)
        {'rate': Array(0.2, dtype=float32)}
    """
    is_mapped = any(axis in (mapped.name, mapped) for mapped in current().mapped)
    resolved = mapped_axis("pick", axis) if is_mapped and axis is not None else placing.resolve("pick", axis)
    if not arrays.is_traced(index) and not -resolved.size <= index < resolved.size:
        raise DataError(f"pick: axis {resolved.name!r} has elements 0 to {resolved.size - 1}, and none {index}")
    numbers = axis_index(resolved) if is_mapped else jnp.arange(resolved.size)
    is_one = (index == numbers) | (index == numbers - resolved.size)

    def one(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jax.random.wrap_key_data(one(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if is_mapped:
            return psum(jnp.where(is_one, leaf, jnp.zeros_like(leaf)), resolved).astype(leaf.dtype)
        fold = reductions.reduce_any if leaf.dtype == bool else reductions.reduce_sum
        return fold(leaf, resolved, where=is_one).astype(leaf.dtype)

    return pytrees.combine(jax.tree.map(one, pytrees.partition(x)))


def axis_index(axis: Axis | str) -> jax.Array:
    """Return this element's index along the axis, an int32 scalar from 0 to ``size - 1``, without communication.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.map_fn(lambda x: x + px.axis_index("rows"), jnp.array([1.0, 2.0, 6.0]), px.Axis("rows", 3))
        Array([1., 3., 8.], dtype=float32)
    """
    known, scope = mapped_axis("axis_index", axis), current()
    depth = max(at for at, mapped in enumerate(scope.mapped) if mapped.name == known.name)
    values = [number.value for number in scope.numbers if number.depth == depth]
    return values[-1] if values else jax.lax.axis_index(known.name)


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
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool) else leaf, pytrees.partition(x))
    if collective in ("pmax", "pmin"):
        return pytrees.combine(jax.tree.map(lambda leaf: _across(jnp.asarray(leaf), collective, name), x))
    return pytrees.combine(getattr(jax.lax, collective)(x, name))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _across(x: jax.Array, collective: str, name: str) -> jax.Array:
    """Return ``jax.lax.pmax`` or ``pmin`` in which NaN wins; it has no derivative either."""
    fold: Callable[..., jax.Array] = getattr(jax.lax, collective)
    return reductions.by_integers(lambda x: fold(x, name), x, nan_is_top=collective == "pmax")


@_across.defjvp
def _(collective: str, name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(f"{collective} has no derivative; reduce after the map instead")
