"""The verbs that place, map and fetch values. Reductions are in ``reductions.py``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, interpreters, jax_api, maps, placing, pytrees, reductions
from paraxis._core.lowerings import Lowering
from paraxis._core.placing import Axis, current, entered, resolve
from paraxis.errors import AxisError

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
        leaf = arrays.settle(leaf, placement, rows=False) if placement.is_said else leaf
        return maps.remember(reductions.copies(leaf, placement), maps.Shared(leaf))

    return pytrees.opened(jax.tree.map(one, pytrees.arrays("broadcast", "x", pytrees.sealed(x))))


def map_fn(fn: Callable[..., _R], args: Any, axis: Axis | str | None = None, *, lowering: Lowering = "auto") -> _R:
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
        lowering: how a device runs its elements: ``"vmap"`` (vectorised), ``"unroll"`` (one after the other; it takes
            longer to compile) or ``"auto"``: unrolled for up to 16 elements with convolutions on CPU.

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
    if lowering not in get_args(Lowering):
        raise AxisError(f"map_fn: lowering must be one of {get_args(Lowering)}, got {lowering!r}")
    return pytrees.opened(map_sealed(pytrees.of_opened(fn), pytrees.sealed(args), axis, lowering=lowering))


def map_sealed(
    fn: Callable[..., Any], args: Any, axis: Axis | str | None = None, *, lowering: Lowering = "auto"
) -> Any:
    """:func:`map_fn` for trees whose models are sealed, in the function as well."""
    resolved = resolve("map_fn", axis)
    placement = placing.place(resolved)
    check.no_sparse("map_fn", "args", args)
    interpreters.know_sparsify()
    args = pytrees.placed("map_fn", "args", args, resolved)
    leaves, structure = jax.tree.flatten(args if type(args) is tuple else (args,))
    forms = [maps.recall(leaf) for leaf in leaves]
    shared = [isinstance(form, maps.Shared) for form in forms]
    operands = [
        form.value if isinstance(form, maps.Shared) else arrays.settle(leaf, placement, rows=True)
        for leaf, form in zip(leaves, forms, strict=True)
    ]

    # Wrapped, as JAX's errors then name the user's function, and not this one.
    @functools.wraps(fn, updated=())
    def element(*xs: Any) -> Any:
        result = fn(*jax.tree.unflatten(structure, xs))
        check.no_sparse("map_fn", "the function's result", result)
        return result

    outer, mesh = current(), placement.mesh.abstract_mesh if placement.is_said and placement.mesh else None
    mapped, covered = (*outer.mapped, resolved), (*outer.taken, *placement.mesh_axes)
    # Of mesh axes the body gets an error that says why it may not name them, and not that there are none.
    names = {name: placement.mesh.shape[name] for name in placement.mesh_axes} if placement.mesh else {}
    names |= {axis.name: axis.size for axis in mapped}
    with entered(mapped=mapped, mesh=outer.mesh or mesh, taken=covered), maps.unseen(covered):
        made, out_tree = maps.Map.of(element, operands, shared, maps.How(placement, lowering, tuple(names.items())))
    check.no_captured_reference("map_fn", fn, made.operands)
    made = dataclasses.replace(made, body=interpreters.without_references(made.body, names))
    for hidden in map(jax_api.axis_of, made.body.effects):  # names of mapped axes hide those of mesh axes
        if hidden in placement.mesh_axes and all(axis.name != hidden for axis in mapped):
            raise AxisError(
                f"a collective inside the body names the mesh axis {hidden!r}, which carries the elements of axis "
                f"{resolved.name!r}: it would miss those that share a device. Write px.psum(x, {resolved.name!r}), or "
                f"the like"
            )
    sums, results = maps.Sums(made), made.bind([False] * out_tree.num_leaves)
    results = [maps.remember(y, functools.partial(sums.of, at)) for at, y in enumerate(results)]
    return jax.tree.unflatten(out_tree, results)


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
    placement, x = _placed("scatter", x, axis)
    target = arrays.sharding(placement, None if placement.divides else ())

    def one(leaf: jax.Array) -> jax.Array:
        is_traced = isinstance(leaf, jax_api.Tracer)
        return arrays.constrain(leaf, placement, rows=placement.divides) if is_traced else arrays.put(leaf, target)

    return pytrees.opened(jax.tree.map(one, x))


@overload
def gather(x: jax.Array | np.ndarray, axis: Axis | str | None = None) -> np.ndarray: ...
@overload
def gather(x: Any, axis: Axis | str | None = None) -> Any: ...
def gather(x: Any, axis: Axis | str | None = None) -> Any:
    """Fetch a placed value as NumPy arrays ``(size, ...)``, in the order of the elements: placed → host.

    Under ``jit``, which cannot return values to the host, it is the value itself, whole on every device. Errors are
    those of :func:`map_fn`.

    Communicates: sends every row to the host. With several processes, all must call it, and each gets all rows.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> px.gather(jnp.arange(3), px.Axis("clients", 3))
        array([0, 1, 2], dtype=int32)
    """
    placement, x = _placed("gather", x, axis)

    def one(leaf: jax.Array) -> Any:
        return arrays.constrain(leaf, placement, rows=False) if arrays.is_traced(leaf) else arrays.on_host(leaf)

    return pytrees.opened(jax.tree.map(one, x))


def _placed(verb: str, x: Any, axis: Axis | str | None) -> tuple[placing.Placement, Any]:
    resolved = resolve(verb, axis)
    return placing.place(resolved), pytrees.placed(verb, "x", pytrees.sealed(x), resolved)


def keys(key: jax.Array, axis: Axis | str | None = None) -> jax.Array:
    """Return one random key per element, which depends on its index alone: not on the devices, nor the axis's size.

    ``key`` is new-style (``jax.random.key``), for keys ``(size,)``, or old-style, for ``(size, 2)``. Nothing is sent.

    Example:
        >>> import jax, paraxis as px
        >>> px.keys(jax.random.key(0), px.Axis("members", 5)).shape
        (5,)
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(resolve("keys", axis).size))
