"""The verbs that place, map and fetch values. Reductions are in ``reductions.py``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from paraxis._core import arrays, check, deferred, interpreters, jax_api, lowerings, maps, placing, pytrees, reductions
from paraxis._core.deferred import DeferredSums, Shared
from paraxis._core.placing import Axis, Number, Placement, current, entered, resolve
from paraxis._core.record import Lowering, Map
from paraxis.errors import AxisError, axis_advice

_Tree = TypeVar("_Tree")
_R = TypeVar("_R")
Host = np.ndarray | np.generic | bool | int | float | complex
"""Values that become arrays of JAX's."""


@overload
def broadcast(x: Host, axis: Axis | str | None = None) -> jax.Array: ...
@overload
def broadcast(x: _Tree, axis: Axis | str | None = None) -> _Tree: ...
def broadcast(x: Any, axis: Axis | str | None = None) -> Any:
    """Give every element of an axis the same value: shared → placed.

    Inside ``jit`` or a program, only an operation that reads the copies makes them: a map passes the one value to all
    elements of a device, and sums its derivative there before anything is sent. Elsewhere the copies are made at once.

    Args:
        x: pytree of arrays ``(...)``, which become ``(size, ...)``; or a model, such as an Equinox module, whose other
            leaves are left unchanged.
        axis: the axis; inside a program also its name, or ``None`` if there is only one.

    Raises:
        AxisError: if it is not clear which axis is meant, or the axis cannot be placed.

    Communicates: nothing if ``x`` lies on all devices already. The derivative: one all-reduce the size of ``x``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.broadcast(jnp.array([1.0, 2.0]), px.Axis("clients", 2))
        Array([[1., 2.],
               [1., 2.]], dtype=float32)
    """
    placement = placing.place(resolve("broadcast", axis))

    def one(leaf: jax.Array) -> jax.Array:
        leaf = arrays.to_mesh(leaf, placement, rows=False) if placement.is_chosen else leaf
        return deferred.remember(reductions.copies(leaf, placement), Shared(leaf))

    return pytrees.combine(jax.tree.map(one, pytrees.arrays("broadcast", "x", pytrees.partition(x))))


def map_fn(
    fn: Callable[..., _R],
    args: Any,
    axis: Axis | str | None = None,
    *,
    at_once: int | None = None,
    lowering: Lowering = "auto",
) -> _R:
    """Apply a function to every element of an axis: placed → placed.

    The function sees one element, without the axis, and may use the collectives (``px.psum`` and so on); all elements
    share what it closes over. Elements lie in blocks of equal size, one per device. If they do not divide, the last
    blocks are padded with copies of a real element, whose results are never used.

    Args:
        fn: the function of one element. It is traced at each call, and what was compiled for a trace of the same
            structure is reused; put ``jax.jit`` around the call to trace once.
        args: arguments of ``fn``: pytrees of arrays ``(size, ...)`` or models that hold such. A plain tuple is several
            arguments; anything else, a named tuple too, is one.
        axis: as in :func:`broadcast`.
        at_once: the largest number of elements per device in flight, in place of the axis's own.
        lowering: how a device runs its elements: ``"vmap"`` (vectorised); ``"unroll"`` (one after the other; it takes
            longer to compile); ``"lanes"`` (vectorised, but no element waits for another in a loop: each leaves when it
            is done, and one that waits takes its lane, of which there are ``at_once``); or ``"auto"``: unrolled for up
            to 16 elements with convolutions on CPU, else vectorised.

    Returns:
        The function's result with every leaf ``(size, ...)``, in blocks over the devices.

    Raises:
        DataError: if a leaf does not start with the size of the axis; the message names the leaf.
        AxisError: as in :func:`broadcast`; or if the elements cannot run, or exchange values, in the way asked for.

    Communicates: nothing, unless the function does; then a device that has no element is sent one as padding.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> clients = px.Axis("clients", 3)
        >>> px.map_fn(lambda w, x: w * x, (px.broadcast(2.0, clients), jnp.arange(3.0)), clients)
        Array([0., 2., 4.], dtype=float32)
    """
    resolved = resolve("map_fn", axis)
    if at_once is not None:
        resolved = dataclasses.replace(resolved, at_once=at_once)
    return pytrees.combine(map_static(pytrees.of_combined(fn), pytrees.partition(args), resolved, lowering=lowering))


def map_static(
    fn: Callable[..., Any], args: Any, axis: Axis, lowering: Lowering = "auto", in_blocks: bool = False
) -> Any:
    """Do as :func:`map_fn`, with what is static in the structure; ``in_blocks``: results stay ``(num_padded, ...)``."""
    check.one_of(f"axis {axis.name!r}", "lowering", lowering, get_args(Lowering), AxisError)
    placement = placing.place(axis)
    check.no_sparse("args", args)
    args = pytrees.placed("map_fn", "args", args, axis)
    leaves, structure = jax.tree.flatten(args if type(args) is tuple else (args,))
    forms = [deferred.recall(leaf) for leaf in leaves]
    shared = [isinstance(form, Shared) for form in forms]
    values = [form.value if isinstance(form, Shared) else leaf for leaf, form in zip(leaves, forms, strict=True)]
    operands = [arrays.to_mesh(x, placement, rows=not s) for x, s in zip(values, shared, strict=True)]
    if jax.sharding.get_abstract_mesh().manual_axes and any(map(jax_api.is_device_varying, operands)):
        raise AxisError(
            f"axis {axis.name!r} is mapped inside a jax.shard_map that checks what varies over its devices, which a "
            f"map does not tell; write jax.shard_map(…, check_vma=False)"
        )

    @functools.wraps(fn, updated=())  # JAX's errors then name the user's function, and not this one
    def element(*xs: Any) -> Any:
        result = fn(*jax.tree.unflatten(structure, xs))
        check.no_sparse("the function's result", result)
        return result

    m, operands, out_tree = _traced(element, operands, shared, placement, lowering)
    results, sums = maps.bind(m._replace(in_blocks=in_blocks), operands), DeferredSums(m, operands)
    if not in_blocks:
        results = [deferred.remember(y, functools.partial(sums.take, at)) for at, y in enumerate(results)]
    return jax.tree.unflatten(out_tree, results)


def _traced(
    element: Callable[..., Any], operands: list[Any], shared: list[bool], placement: Placement, lowering: Lowering
) -> tuple[Map, list[Any], Any]:
    """Trace a function of one element in the scope of its axis, outside of the mesh that the axis takes."""
    axis, outer = placement.axis, current()
    mesh = placement.mesh.abstract_mesh if placement.is_chosen and placement.mesh else None
    around = jax.sharding.get_abstract_mesh()
    mapped, covered = (*outer.mapped, axis), (*outer.covered, *placement.mesh_axes, *around.manual_axes)
    has_free = any(size > 1 and name not in covered for name, size in around.shape.items())  # the compiler's
    hidden = jax.sharding.use_abstract_mesh(around if has_free else AbstractMesh((), ()))
    # Of mesh axes the body gets an error that says why it may not name them, and not that there are none.
    env = {name: placement.mesh.shape[name] for name in placement.mesh_axes} if placement.mesh else {}
    env |= {axis.name: axis.size for axis in mapped}

    def trace(fn: Callable[..., Any], operands: list[Any], shared: list[bool]) -> tuple[Map, list[Any], Any]:
        return maps.trace(fn, operands, shared, [False] * len(shared), placement, lowering, tuple(env.items()))

    @functools.wraps(element, updated=())
    def numbered(index: Any, *xs: Any) -> Any:
        number.value = index
        return element(*xs)

    scope = entered(mapped=mapped, mesh=outer.mesh or mesh, covered=covered)
    with scope, hidden, axis_advice(f"map_fn: the axis that is mapped is {axis.name!r}"):
        m, inputs, out_tree = trace(element, operands, shared)
        is_apart = placement.num_chunks > 1 or placement.is_dealt or lowering in ("unroll", "lanes")
        if is_apart and m.uses_axis and outer.chunk is None and not lowerings.exchanges(m):
            number = Number(len(outer.mapped))  # elements that only ask for their number are given it
            with entered(numbers=(*outer.numbers, number)):
                m, inputs, out_tree = trace(numbered, [jnp.arange(axis.size), *operands], [False, *shared])
    check.leaves("map_fn", "what the function closes over: ", [x for x in inputs if isinstance(x, jax.Ref)])
    for named in jax_api.free_axes(m.body.jaxpr):  # names of mapped axes hide those of mesh axes
        if named in placement.mesh_axes and all(axis.name != named for axis in mapped):
            raise AxisError(
                f"a collective inside the body names the mesh axis {named!r}, which carries the elements of axis "
                f"{axis.name!r}: it would miss those that share a device. Write px.psum(x, {axis.name!r}), or the like"
            )
    if m.uses_axis:  # elements are in step: nothing is gained by dealing them
        m = m._replace(placement=dataclasses.replace(placement, axis=dataclasses.replace(axis, layout="blocks")))
    return m._replace(body=interpreters.without_references(m.body, env)), inputs, out_tree


@overload
def scatter(x: Host, axis: Axis | str | None = None) -> jax.Array: ...
@overload
def scatter(x: _Tree, axis: Axis | str | None = None) -> _Tree: ...
def scatter(x: Any, axis: Axis | str | None = None) -> Any:
    """Distribute a host value over the devices of an axis: host → placed. :func:`map_fn` would send it at each call.

    ``x`` is a pytree of arrays ``(size, ...)``, NumPy or JAX, any dtype, and stays so; errors are those of
    :func:`map_fn`. Each device holds its rows if their number divides; otherwise a whole copy, as JAX has no arrays
    with uneven blocks, of which a map uses the device's part.

    Communicates: sends each device its rows.

    Example:
        >>> import numpy as np, paraxis as px
        >>> px.scatter({"x": np.arange(3)}, px.Axis("clients", 3))["x"].shape
        (3,)
    """
    placement, x = reductions.placed("scatter", x, axis)
    target = arrays.sharding(placement, None if placement.divides else ())

    def one(leaf: jax.Array) -> jax.Array:
        if isinstance(leaf, jax_api.Tracer):
            return arrays.constrain(leaf, placement, rows=placement.divides)
        return arrays.device_put(leaf, target)

    return pytrees.combine(jax.tree.map(one, x))


def gather(x: Any, axis: Axis | str | None = None) -> Any:
    """Fetch a placed value as NumPy arrays ``(size, ...)``, in the order of the elements: placed → host.

    Under ``jit``, which cannot return values to the host, it is the value itself, a JAX array, whole on every device:
    so types do not say which of the two it is. Errors are those of :func:`map_fn`.

    Communicates: sends every row to the host. With several processes, all must call it, and each gets all rows.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.gather(jnp.arange(3), px.Axis("clients", 3))
        array([0, 1, 2], dtype=int32)
    """
    placement, x = reductions.placed("gather", x, axis)

    def one(leaf: jax.Array) -> Any:
        return arrays.constrain(leaf, placement, rows=False) if arrays.is_traced(leaf) else arrays.on_host(leaf)

    return pytrees.combine(jax.tree.map(one, x))


def keys(key: jax.Array, axis: Axis | str | None = None) -> jax.Array:
    """Return one random key per element, which depends on its index alone: not on the devices, nor the axis's size.

    ``key`` is new-style (``jax.random.key``), for keys ``(size,)``, or old-style, for ``(size, 2)``. Nothing is sent.

    Example:
        >>> import jax, paraxis as px
        >>> px.keys(jax.random.key(0), px.Axis("members", 5)).shape
        (5,)
    """
    return _keys(key, resolve("keys", axis).size)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _keys(key: jax.Array, size: int) -> jax.Array:
    """Key ``()`` → ``(size,)``."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(size))
