"""Where the elements of an axis lie: which devices, how many on each, which rows are padding.

Elements lie in blocks: device ``d`` holds rows ``d * num_local`` up to ``(d + 1) * num_local`` of the padded axis.
Padding rows repeat a real one, so that whatever a function does is safe on them; what they give is never used.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paraxis._core import jax_api, primitives, scope
from paraxis._core.axis import Axis
from paraxis._core.errors import AxisError, DeviceError

DEVICES = "paraxis_devices"
"""A mesh axis of this name, which only :func:`devices_mesh` makes, takes any axis that leaves its place open."""


@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """An axis with its place decided. ``mesh_axes == ()`` means: all elements within the device at hand."""

    axis: Axis
    mesh: Mesh | AbstractMesh | None
    mesh_axes: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.axis.size

    @functools.cached_property
    def num_devices(self) -> int:
        """Number of blocks; mesh axes that are not ours do not count."""
        return math.prod(self.mesh.shape[name] for name in self.mesh_axes) if self.mesh is not None else 1

    @property
    def crossed_axes(self) -> tuple[str, ...]:
        """The mesh axes with more than one device: JAX does not enter the others, so nothing can be sent along them."""
        return tuple(name for name in self.mesh_axes if self.mesh is not None and self.mesh.shape[name] > 1)

    @functools.cached_property
    def num_chunks(self) -> int:
        """Number of turns a device takes over its elements."""
        per_device = -(-self.size // self.num_devices)
        return -(-per_device // (self.axis.at_once or per_device))

    @functools.cached_property
    def chunk(self) -> int:
        """Number of elements in flight per device. Turns are made equal, which needs the least padding."""
        return -(-self.size // (self.num_devices * self.num_chunks))

    @property
    def num_local(self) -> int:
        return self.chunk * self.num_chunks

    @property
    def num_padded(self) -> int:
        return self.num_local * self.num_devices

    @property
    def is_padded(self) -> bool:
        return self.num_padded > self.size

    @property
    def has_idle_device(self) -> bool:
        """Whether some device has padding only."""
        return self.num_padded - self.size >= self.num_local

    @property
    def is_explicit(self) -> bool:
        return self.mesh is not None and jax_api.is_explicit(self.mesh, self.mesh_axes)

    @property
    def spec(self) -> P:
        return P(self.mesh_axes) if self.mesh_axes else P()

    def __repr__(self) -> str:
        return f"{self.axis.name}:{self.size}/{self.num_devices}"


def place(axis: Axis) -> Placement:
    """Decide where an axis lies, here and now.

    Raises:
        AxisError: if the mesh lacks what the axis asks for.
    """
    context = jax.sharding.get_abstract_mesh()
    if scope.current().mapped:
        return _place_inside(axis, context)
    if axis.mesh is not None:
        _require(axis, axis.mesh, "its mesh")
        return Placement(axis, axis.mesh, axis.mesh_names)
    if not context.empty:
        return Placement(axis, context, _names_on(axis, context))
    if axis.over is not None:
        raise AxisError(
            f"axis {axis.name!r} is to lie over mesh axis {axis.over!r}, but there is no mesh. Set one, "
            f"`with jax.set_mesh(mesh): …`, or pass it: "
            f"px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over={axis.over!r})"
        )
    mesh = _mesh_of(axis.name, tuple(jax.devices()))
    return Placement(axis, mesh, (axis.name,)) if mesh.size > 1 else Placement(axis, None, ())


def _place_inside(axis: Axis, context: AbstractMesh) -> Placement:
    """Inside another axis's body: the mesh axes still free, or none."""
    outer = scope.current()
    if context.empty and outer.mesh is not None:
        context = outer.mesh
    if axis.mesh is not None and not context.empty and dict(axis.mesh.shape) != dict(context.shape):
        raise AxisError(
            f"axis {axis.name!r} has a mesh of its own, {dict(axis.mesh.shape)}, but is mapped inside "
            f"{outer.mapped[-1].name!r}, which lies on {dict(context.shape)}. "
            f"Put both on one mesh: px.Axis({axis.name!r}, {axis.size}, mesh=mesh, over=…)"
        )
    if context.empty:
        return Placement(axis, None, ())
    taken = (*jax_api.manual_axes(context), *outer.taken)
    if axis.over is not None:
        _require(axis, context, "the mesh")
        clash = [name for name in axis.mesh_names if name in taken]
        if clash:
            raise AxisError(
                f"axis {axis.name!r} is to lie over mesh axis {clash[0]!r}, which already carries an axis that it is "
                f"nested in; lay it over another one, or leave `over` out to keep it within each device"
            )
    names = (DEVICES,) if axis.over is None and DEVICES in context.axis_names else axis.mesh_names
    free = tuple(n for n in names if n in context.axis_names and n not in taken)
    return Placement(axis, context, free) if free else Placement(axis, None, ())


def _names_on(axis: Axis, mesh: AbstractMesh) -> tuple[str, ...]:
    if axis.over is None and DEVICES in mesh.axis_names:
        return (DEVICES,)
    _require(axis, mesh, "the mesh set by jax.set_mesh")
    return axis.mesh_names


def _require(axis: Axis, mesh: Mesh | AbstractMesh, which: str) -> None:
    missing = [name for name in axis.mesh_names if name not in mesh.axis_names]
    if missing:
        has = ", ".join(f"{name!r} ({mesh.shape[name]})" for name in mesh.axis_names)
        own = ", mesh=mesh" if axis.mesh is not None else ""
        raise AxisError(
            f"axis {axis.name!r} cannot be placed: {which} has no axis {missing[0]!r}; it has {has}. "
            f"Write px.Axis({axis.name!r}, {axis.size}{own}, over={mesh.axis_names[0]!r})"
        )


def as_here(placement: Placement) -> Placement:
    """The same placement where the mesh that it is on has been entered: some of its axes are taken."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not isinstance(placement.mesh, AbstractMesh):
        return placement
    return dataclasses.replace(placement, mesh=context)


def names_in_force(name: str) -> tuple[str, ...] | None:
    """What an axis of this name lies over if nobody says: all axes of the mesh in force, unless it has one for it."""
    context = jax.sharding.get_abstract_mesh()
    return None if context.empty or {name, DEVICES} & set(context.axis_names) else tuple(context.axis_names)


def devices_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh to set for a while, on which every axis that leaves its place open lies over just these devices."""
    return _mesh_of(DEVICES, tuple(devices))


@functools.lru_cache(maxsize=64)
def _mesh_of(name: str, devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), (name,))


@functools.lru_cache(maxsize=64)
def shared_mesh(axes: tuple[tuple[str, int], ...], devices: tuple[Any, ...]) -> Mesh:
    """Share devices out among axes of these names and sizes.

    Of all ways to write their number as a product, one factor per axis, the one in which the busiest device runs the
    fewest elements; ties go to the outermost axis.
    """

    def busiest(split: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        elements = math.prod(-(-size // part) for (_, size), part in zip(axes, split, strict=True))
        return elements, tuple(-part for part in split)

    split = min(_splits(len(devices), len(axes)), key=busiest)
    return Mesh(np.array(devices).reshape(split), tuple(name for name, _ in axes))


def _splits(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return (split for split in itertools.product(divisors, repeat=parts) if math.prod(split) == number)


def run_per_device(body: Callable[..., Any], placement: Placement, operands: Sequence[Any]) -> Any:
    """Run ``body`` once per device on its rows of every array in the operands; results are joined along the rows.

    ``check_vma=False`` gives ``pmap``'s gradient semantics; since every input and output carries the axis, no
    collective is hidden in the derivative either.
    """
    if not placement.mesh_axes:
        return body(*operands)
    if placement.is_explicit:
        operands = jax.tree.map(lambda x: constrain(x, placement), tuple(operands))
    run = jax.shard_map(
        body,
        mesh=placement.mesh if isinstance(placement.mesh, Mesh) else None,
        in_specs=placement.spec,
        out_specs=placement.spec,
        axis_names=set(placement.mesh_axes),
        check_vma=False,
    )
    return run(*operands)


def tells_in_type(x: jax.Array) -> bool:
    """Whether the type of an array says how it lies, on an Explicit mesh."""
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and jax_api.is_explicit(mesh, mesh.axis_names)


def typed_beside(x: jax.Array, other: jax.Array) -> jax.Array:
    """If ``other`` lies on an Explicit mesh: the same value, whole on each device, with a type that says so."""
    mesh = jax.typeof(other).sharding.mesh
    if not tells_in_type(other) or jax.typeof(x).sharding.mesh == mesh:
        return x
    target = mesh if isinstance(x, jax_api.Tracer) else _named(other).mesh
    return jax.reshard(x, NamedSharding(target, P(*(None,) * x.ndim)))


def on_mesh(x: jax.Array, placement: Placement) -> jax.Array:
    """On an Explicit mesh: the same value with a type that says so (constants come without)."""
    if not placement.is_explicit or not jax.typeof(x).sharding.mesh.empty:
        return x
    assert placement.mesh is not None
    return jax.reshard(x, NamedSharding(placement.mesh, P(*(None,) * x.ndim)))


def constrain(x: jax.Array, placement: Placement, *, rows: bool = True) -> jax.Array:
    """On an Explicit mesh: the same value with its rows laid over the axis (or over nothing)."""
    rest = [
        None if _mentions(entry, placement.mesh_axes) else entry for entry in jax_api.sharding_spec(jax.typeof(x))[1:]
    ]
    spec = P(placement.mesh_axes if rows else None, *rest)
    assert placement.mesh is not None
    return jax.reshard(x, NamedSharding(placement.mesh, spec))


def _mentions(entry: Any, names: tuple[str, ...]) -> bool:
    return entry in names or (isinstance(entry, tuple) and any(e in names for e in entry))


def copies(x: jax.Array, placement: Placement) -> jax.Array:
    """``(...)`` → ``(size, ...)``, as a broadcast along the axis; each device has its rows, if their number divides."""
    spread = placement.size % placement.num_devices == 0
    mesh = placement.mesh
    names = placement.mesh_axes
    laid = None
    if spread and names and mesh is not None and not placement.is_explicit and not jax_api.manual_axes(mesh):
        laid = primitives.Laid(mesh, names)
    devices = named_devices(placement) if laid else None
    over = names if placement.is_explicit and spread else ()
    return _copies(x, placement, placement.size, over, laid, devices)


def named_devices(placement: Placement) -> Any | None:
    """A jaxpr that does nothing but name the mesh, for ``jit`` to find its devices by; ``None``: it knows them."""
    return _named_devices(placement.mesh, placement.mesh_axes) if isinstance(placement.mesh, Mesh) else None


@functools.lru_cache(maxsize=64)
def _named_devices(mesh: Mesh, names: tuple[str, ...]) -> Any:
    nothing = jax.shard_map(
        lambda: jnp.zeros(1), mesh=mesh, in_specs=(), out_specs=P(names), axis_names=set(names), check_vma=False
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(nothing)()


def per_device(x: jax.Array, placement: Placement) -> jax.Array:
    """``(...)`` → ``(num_devices, ...)``: one copy per device."""
    return _copies(x, placement, placement.num_devices, placement.mesh_axes if placement.is_explicit else ())


def _copies(
    x: jax.Array,
    placement: Placement,
    rows: int,
    over: tuple[str, ...],
    laid: primitives.Laid | None = None,
    devices: Any = None,
) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys: no derivative, and JAX's own rules
        return jnp.broadcast_to(x, (rows, *x.shape))
    x = on_mesh(x, placement)
    return primitives.broadcast(
        x, axis=placement.axis.name, rows=rows, size=rows, over=over, laid=laid, devices=devices
    )


def device_index(placement: Placement) -> jax.Array | int:
    """Inside ``run_per_device``: the number of this device's block."""
    return jax.lax.axis_index(placement.crossed_axes) if placement.crossed_axes else 0


def unless_idle(work: Callable[..., list[jax.Array]], placement: Placement, *operands: Any) -> list[jax.Array]:
    """Inside ``run_per_device``: ``work(*operands)``; zeros, without any work, on a device that has no element."""

    def rest(*operands: Any) -> list[jax.Array]:
        return [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(work, *operands)]

    has_rows = device_index(placement) * placement.num_local < placement.size
    return jax.lax.cond(has_rows, work, rest, *operands)


def pad(x: jax.Array, placement: Placement, *, safe: bool = True) -> jax.Array:
    """``(size, ...)`` → ``(num_padded, ...)``. If ``safe``, :func:`fill` makes new rows such as can be computed on.

    Written with an operation that the compiler splits over the devices without moving anything; a concatenation
    with a copy of a row is gathered. Only if a device has no row of its own is one sent.
    """
    extra = placement.num_padded - placement.size
    if not extra:
        return x
    if placement.is_explicit:
        x = constrain(x, placement, rows=False)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys have no zero
        return jnp.concatenate([x, jnp.broadcast_to(x[:1], (extra, *x.shape[1:]))])
    zero: Any = np.zeros((), x.dtype)
    if x.weak_type:  # then a Python number is as weakly typed, and has the same dtype
        zero = zero.item()
    padded = jax.lax.pad(x, zero, [(0, extra, 0)] + [(0, 0, 0)] * (x.ndim - 1))
    if not placement.has_idle_device or not safe:
        return padded
    return _fill_where_padded(jnp.arange(placement.num_padded) < placement.size, padded, x[:1])


def fill(block: jax.Array, placement: Placement, *, safe: bool = True) -> jax.Array:
    """On a device: padding rows repeat the device's first row, so that whatever is computed on them is safe.

    ``safe`` as in :func:`pad`: rows that a device without elements would compute on have been filled there.
    """
    if not placement.is_padded or (placement.has_idle_device and safe):
        return block
    return _fill_where_padded(real_rows(placement), block, block[:1])


def real_rows(placement: Placement) -> jax.Array | None:
    """On a device: which of its rows are elements, ``(num_local,)``; ``None``: all."""
    if not placement.is_padded:
        return None
    return (
        device_index(placement) * placement.num_local + jnp.arange(placement.num_local, dtype=np.int32) < placement.size
    )


def _fill_where_padded(real: jax.Array | None, rows: jax.Array, row: jax.Array) -> jax.Array:
    assert real is not None
    return jnp.where(real.reshape((-1,) + (1,) * (rows.ndim - 1)), rows, row)


def unpad(x: jax.Array, placement: Placement) -> jax.Array:
    """``(num_padded, ...)`` → ``(size, ...)``."""
    if not placement.is_padded:
        return x
    if placement.is_explicit:
        x = constrain(x, placement, rows=False)
    return jax.lax.slice_in_dim(x, 0, placement.size)


def sharding(placement: Placement, *, rows: bool) -> NamedSharding | None:
    """How a value lies on the devices: by rows if they divide, else whole on each. ``None``: nothing to say."""
    mesh = concrete_mesh(placement)
    if not placement.mesh_axes or mesh is None:
        return None
    return NamedSharding(mesh, placement.spec if rows and placement.size % placement.num_devices == 0 else P())


def block_sharding(placement: Placement) -> NamedSharding | None:
    """How padded rows ``(num_padded, ...)`` lie on the devices. ``None``: on one."""
    mesh = concrete_mesh(placement)
    return None if not placement.mesh_axes or mesh is None else NamedSharding(mesh, placement.spec)


def in_blocks(x: Any, placement: Placement) -> jax.Array:
    """Padded rows ``(num_padded, ...)`` from the host, in blocks over the devices."""
    target = block_sharding(placement)
    return jnp.asarray(x) if target is None else jax.device_put(x, target)


def abstract_mesh(placement: Placement) -> AbstractMesh | None:
    """The mesh without its devices; ``None`` if there is none."""
    return placement.mesh.abstract_mesh if isinstance(placement.mesh, Mesh) else placement.mesh


@contextlib.contextmanager
def in_force(mesh: AbstractMesh | None) -> Iterator[None]:
    """Within, a mesh is in force while functions are traced, if none is."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        yield
    else:
        with jax.sharding.use_abstract_mesh(mesh):
            yield


def concrete_mesh(placement: Placement) -> Mesh | None:
    """The mesh with its devices; ``None`` where these are not known, or there is none."""
    return placement.mesh if isinstance(placement.mesh, Mesh) else _mesh_in_force()


@contextlib.contextmanager
def without_context() -> Iterator[None]:
    """Within, no mesh is in force: for work on devices that were chosen before. Under ``jit`` it stays as it is."""
    if _mesh_in_force() is None:
        yield
    else:
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            yield


def on_auto_mesh(call: Callable[..., Any], *operands: Any) -> Any:
    """Call with concrete arrays that lie on an Explicit mesh laid on its Auto twin, and the results laid back on it.

    Nothing moves between devices. Where that cannot be, since an operand is a tracer of such a type, ``jit`` is
    tracing, or a mesh is in force that a transformation does not let go of, the operands stay as they are.
    """
    leaves = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array)]
    explicit = [x for x in leaves if tells_in_type(x)]
    concrete = [x for x in explicit if not isinstance(x, jax_api.Tracer)]
    if not concrete or len(concrete) < len(explicit) or isinstance(jnp.zeros(()), jax_api.Tracer):
        return call(*operands)
    if _mesh_in_force() is None and not jax.sharding.get_abstract_mesh().empty:
        return call(*operands)
    mesh = _named(concrete[0]).mesh
    assert isinstance(mesh, Mesh)
    twin = Mesh(mesh.devices, mesh.axis_names)

    def there(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or not tells_in_type(x):
            return x
        return jax.device_put(x, NamedSharding(twin, _named(x).spec))

    def back(x: jax.Array) -> jax.Array:
        spec = P() if isinstance(x, jax_api.Tracer) else getattr(x.sharding, "spec", P())
        return jax.device_put(x, NamedSharding(mesh, spec))

    with without_context():
        found = call(*jax.tree.map(there, operands))
    return jax.tree.map(back, found)


def _named(x: jax.Array) -> NamedSharding:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding


def settled(axis: Axis) -> Axis:
    """The same axis with the mesh that it lies on here and now, to lie there wherever it is used."""
    placement = place(axis)
    mesh = concrete_mesh(placement)
    if axis.mesh is not None or mesh is None or isinstance(placement.mesh, Mesh):
        return axis
    return dataclasses.replace(axis, mesh=mesh, over=placement.mesh_axes)


def is_spread_alone(placement: Placement) -> bool:
    """Whether the axis has all of its mesh to itself, so that one device, and no group of them, has each block."""
    return placement.mesh is None or set(placement.mesh.axis_names) == set(placement.mesh_axes)


def devices(placement: Placement) -> list[Any]:
    """The devices in the order of their blocks, for an axis that has its mesh to itself."""
    mesh = concrete_mesh(placement)
    if placement.mesh is None or mesh is None:
        return [jax.local_devices()[0]]
    order = [mesh.axis_names.index(name) for name in placement.mesh_axes]
    return list(mesh.devices.transpose(order).flat)


def _mesh_in_force() -> Mesh | None:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # under jit: devices are not known there, nor needed
        return None
    return None if mesh.empty else mesh


def put(x: Any, target: NamedSharding) -> jax.Array:
    """``jax.device_put``, also of keys onto devices of other processes, all of which have the same value."""
    if target.is_fully_addressable or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(x, target)
    data = jax.device_put(np.asarray(jax.random.key_data(x)), NamedSharding(target.mesh, target.spec))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def on_host(x: jax.Array) -> np.ndarray:
    """A concrete array, also one of which other processes hold parts: then all must ask for it.

    Raises:
        DeviceError: if no part of it is on this process's devices.
    """
    if x.is_fully_addressable:
        return np.asarray(x)
    if not x.addressable_shards:
        raise DeviceError(
            "gather: the value lies on devices of other processes only; put the axis on a mesh with devices of each: "
            "px.Axis(name, size, mesh=jax.sharding.Mesh(jax.devices(), (name,)))"
        )
    if not x.is_fully_replicated:
        x = ready(_whole(ready(x)))
    return np.asarray(x.addressable_data(0))


def _whole(x: jax.Array) -> jax.Array:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(_named(x).mesh, P()))(x)


def settle(x: Any, placement: Placement, *, rows: bool) -> Any:
    """Bring a concrete array onto the placement's mesh if it is bound to another; leave tracers alone.

    Another mesh may have the same devices, and yet its axes mean nothing here.
    """
    if isinstance(x, jax_api.Tracer) or not isinstance(x, jax.Array):
        return x
    target = sharding(placement, rows=rows)
    if target is None or (x.committed and getattr(x.sharding, "mesh", None) == target.mesh):
        return x
    return put(x, target)


def some_rows(x: jax.Array, every: int) -> tuple[jax.Array, np.ndarray]:
    """Every so many-th row of each device's block of a concrete array, on one device, and their numbers."""
    if any(shard.data.shape[1:] != x.shape[1:] for shard in x.addressable_shards):  # split by columns, too
        return on_first_device(x[::every]), np.arange(0, x.shape[0], every)
    starts = {shard.index[0].indices(x.shape[0])[0]: shard.data for shard in x.addressable_shards}
    blocks = [on_first_device(starts[start][::every]) for start in sorted(starts)]
    numbers = [np.arange(start, start + starts[start].shape[0], every) for start in sorted(starts)]
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks), np.concatenate(numbers)


def on_first_device(tree: Any) -> Any:
    """Concrete arrays, copied to one device together."""
    first = jax.local_devices()[0]
    return jax.tree.map(lambda x: jax.device_put(x, first), tree)


def whole_beside(x: jax.Array, other: jax.Array) -> jax.Array:
    """A copy of a concrete array on each device that another lies on."""
    mesh = getattr(other.sharding, "mesh", None)
    return jax.device_put(x, NamedSharding(mesh, P()) if isinstance(mesh, Mesh) else other.sharding)


def ready(tree: Any) -> Any:
    """The same values; on CPU they are waited for, also inside ``grad``. For use before a program that communicates.

    There a device that is done would hold a thread until the others come, and these may need it for what they are to
    come with: with work in flight and more devices than cores, all wait for ever.
    """
    if jax.default_backend() == "cpu":
        jax.block_until_ready([jax_api.behind(x) for x in jax.tree.leaves(tree)])
    return tree
