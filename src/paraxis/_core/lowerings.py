"""A map on the devices at hand: ``shard_map`` of ``vmap`` of the jaxpr of one element.

====================  =============================================================================================
``"vmap"``            one body, vectorised over the elements. Best wherever the vectorised operation is as good
                      as the single one: matrix products, elementwise work, small bodies.
``"unroll"``          the body once per element, in one program. Best for convolutions with weights per element on
                      CPU: vectorised they become a grouped convolution, several times slower. Compile time grows
                      with the number of elements.
``"auto"``            ``"unroll"`` for up to 16 convolutional elements per device on CPU, else ``"vmap"``.
====================  =============================================================================================

``at_once=k`` runs the elements of a device in chunks of at most ``k``; nothing but a chunk's inputs is kept for its
derivative. Elements that exchange values are all under way together, in one ``vmap`` whose collectives are JAX's own:
the compiler divides it. One element on each device runs in ``shard_map`` itself, as by ``jax.pmap``.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from paraxis._core import collectives, in_mesh, jax_api, layout, placing, scope, sums
from paraxis._core.jax_api import ClosedJaxpr
from paraxis._core.placing import Placement
from paraxis.errors import AxisError

Lowering = Literal["auto", "vmap", "unroll"]

_UNROLL_AT_MOST = 16  # elements per device; beyond it compile time outgrows what unrolling saves


@dataclasses.dataclass(frozen=True)
class Elements:
    """One element's function, and what its operands and results are. See :mod:`maps`."""

    body: ClosedJaxpr
    shared: Sequence[bool]
    summed: Sequence[bool]
    linear: Sequence[bool]
    placement: Placement
    lowering: Lowering

    def run(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the results: rows ``(size, ...)``, or sums over the elements."""
        if not collectives.mentions(self.body.jaxpr, self.placement.axis):
            return self._in_blocks(operands)
        require_together(self.placement, self.lowering)
        return self._as_pmap(operands) if self._is_pmap else self._together(operands)

    # --- elements that exchange nothing ------------------------------------------------------------------------------

    def _in_blocks(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Each device runs the elements of its block; one that has none rests."""
        placement, chunk = self.placement, self._traced_chunk()
        has_keys = any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in self.body.out_avals)  # of no zeros
        rests = placement.has_idle_device and placement.has_mesh_alone and not has_keys

        def on_device(*blocks: jax.Array) -> list[jax.Array]:
            work = functools.partial(self._block, chunk, safe=not rests)
            if not rests:
                return work(*blocks)
            has_rows = layout.device_index(placement) * placement.num_local < placement.size
            if self._is_slow_in_branches:
                return [jnp.where(has_rows, y, jnp.zeros((), y.dtype)) for y in work(*blocks)]
            return jax.lax.cond(has_rows, work, self._rest, *blocks)

        rows = [
            x if s else layout.pad(x, placement, safe=not rests) for x, s in zip(operands, self.shared, strict=True)
        ]
        found = self._on_mesh(on_device, rows)
        return [
            jnp.sum(y, 0, dtype=y.dtype) if s else layout.unpad(y, placement)
            for y, s in zip(found, self.summed, strict=True)
        ]

    def _on_mesh(self, on_device: Callable[..., Any], operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        placement = self.placement
        if not placement.mesh_axes:
            return on_device(*operands)
        if placement.is_explicit:
            sides = zip(operands, self.shared, strict=True)
            operands = [layout.on_all(x, placement) if s else _laid(x, placement) for x, s in sides]
            if jax.__version_info__ < (0, 12) and any(
                any(jax_api.sharding_spec(jax.typeof(x))[1:]) for x in operands
            ):  # jax < 0.12
                warnings.warn(_GATHERED.format(placement.axis.name), stacklevel=2)
        in_specs = tuple(P() if is_shared else placement.spec for is_shared in self.shared)
        return placing.shard_map(on_device, placement.mesh, placement.mesh_axes, in_specs)(*operands)

    def _rest(self, *_: Any) -> list[jax.Array]:
        shapes = [(1,) if is_summed else (self.placement.num_local,) for is_summed in self.summed]
        return [jnp.zeros((*n, *y.shape), y.dtype) for n, y in zip(shapes, self.body.out_avals, strict=True)]

    def _block(self, chunk: ClosedJaxpr, *blocks: jax.Array, safe: bool) -> list[jax.Array]:
        """Run a device's elements: blocks ``(num_local, ...)`` → the same, or sums ``(1, ...)``."""
        placement = self.placement
        fn = jax_api.jaxpr_as_fun(in_mesh.moved(chunk, jax.sharding.get_abstract_mesh()))
        pairs = list(zip(blocks, self.shared, strict=True))
        rows = [layout.fill(x, placement, safe=safe) for x, is_shared in pairs if not is_shared]

        def run(rows: Sequence[jax.Array]) -> list[jax.Array]:
            ours = iter(rows)
            return fn(*(x if is_shared else next(ours) for x, is_shared in pairs), *ours)

        real = layout.real_rows(placement)
        found = self._in_chunks(run, rows if real is None else [*rows, real])
        return [y[None] if is_summed else y for y, is_summed in zip(found, self.summed, strict=True)]

    def _in_chunks(
        self, run: Callable[[Sequence[jax.Array]], list[jax.Array]], rows: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Run chunk after chunk; sums are carried along, and no results are kept for them."""
        count, chunk, summed = self.placement.num_chunks, self.placement.chunk, self.summed
        if count == 1:
            return run(rows)
        zeros = [jnp.zeros(a.shape, a.dtype) for a, s in zip(self.body.out_avals, summed, strict=True) if s]

        def step(totals: list[jax.Array], part: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            found = list(zip(run(part), summed, strict=True))
            added = [total + y for total, y in zip(totals, (y for y, s in found if s), strict=True)]
            return added, [y for y, s in found if not s]

        parts = [x.reshape(count, chunk, *x.shape[1:]) for x in rows]
        totals, stacks = jax.lax.scan(step, zeros, parts, length=count)
        ours, theirs = iter(totals), (y.reshape(count * chunk, *y.shape[2:]) for y in stacks)
        return [next(ours) if is_summed else next(theirs) for is_summed in summed]

    def _traced_chunk(self) -> ClosedJaxpr:
        """Trace what a device runs at once, outside of the mesh: rules of libraries see none."""
        placement, around = self.placement, jax.sharding.get_abstract_mesh()
        names = {**around.shape, **(placement.mesh.shape if placement.mesh is not None else {})}
        avals = self.body.in_avals
        structs = [
            jax_api.struct(a, lead=() if s else (placement.chunk,)) for a, s in zip(avals, self.shared, strict=True)
        ]
        masks = [jax.ShapeDtypeStruct((placement.chunk,), bool)] if placement.is_padded else []
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return jax_api.trace(self._chunk, [*structs, *masks], names)[0]

    def _chunk(self, *operands: jax.Array) -> list[jax.Array]:
        """Run as many elements as are under way at once; last of all, which of them are real."""
        count, number = self.placement.chunk, len(self.shared)
        operands, real = operands[:number], next(iter(operands[number:]), None)
        if count > 1 and not self._unrolls:
            return sums.over_elements(self.body, operands, self.shared, self.summed, self.linear, real, count)
        fn = jax_api.jaxpr_as_fun(self.body)
        fn = fn if count == 1 else jax.jit(fn)
        each = [
            fn(*(x if is_shared else x[i] for x, is_shared in zip(operands, self.shared, strict=True)))
            for i in range(count)
        ]
        rows = [_stacked(ys) for ys in zip(*each, strict=True)]
        return [sums.total(y, real) if s else y for y, s in zip(rows, self.summed, strict=True)]

    @property
    def _unrolls(self) -> bool:
        few = self.placement.num_chunks == 1 and self.placement.chunk <= _UNROLL_AT_MOST
        return self.lowering == "unroll" or (self.lowering == "auto" and few and self._convolves)

    @property
    def _convolves(self) -> bool:
        return jax.default_backend() == "cpu" and jax_api.holds(self.body.jaxpr, "conv_general_dilated")

    @property
    def _is_slow_in_branches(self) -> bool:
        """Return whether the body is better computed on zeros and dropped than left out by ``lax.cond``.

        XLA's CPU compiler rewrites only the convolutions of the main computation into a form that it runs fast: in a
        branch those of a gradient take 8 times as long. A loop may not end on zeros, and a callback sees them.
        """
        body = self.body.jaxpr
        return self._convolves and not jax_api.holds(body, "while", *jax_api.CALLBACKS, *jax_api.PRINTS)

    # --- elements that exchange values -------------------------------------------------------------------------------

    @property
    def _is_pmap(self) -> bool:
        """Return whether there is one element on each device, and none can wait for another in vain."""
        placement = self.placement
        each = placement.num_local == 1 and not placement.is_padded and bool(placement.crossed_axes)
        return each and not collectives.parts(self.body.jaxpr, placement.axis.name)

    def _as_pmap(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        jaxpr = in_mesh.renamed(self.body.jaxpr, {self.placement.axis.name: self.placement.crossed_axes})
        return dataclasses.replace(self, body=ClosedJaxpr(jaxpr, self.body.consts))._in_blocks(operands)

    def _together(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        axis, placement = self.placement.axis, self.placement
        rows = [x if s else self._laid(x) for x, s in zip(operands, self.shared, strict=True)]

        def run(*rows: jax.Array) -> list[jax.Array]:
            body = in_mesh.moved(self.body, jax.sharding.get_abstract_mesh())
            return sums.over_elements(
                body, rows, self.shared, self.summed, self.linear, None, axis.size, axis_name=axis.name
            )

        if placement.is_explicit:  # there JAX 0.12 gives a sum over a vmapped axis the sharding of what it sums
            leads = [P() if s or axis.size % placement.num_devices else placement.spec for s in self.summed]
            found: Any = jax.sharding.auto_axes(run, out_sharding=leads)(*rows)
        else:
            found = run(*rows)
        return [y if s else self._laid(y) for y, s in zip(found, self.summed, strict=True)]

    def _laid(self, x: jax.Array) -> jax.Array:
        """Rows laid over the devices; padded for it, as compilers return no blocks of uneven length."""
        placement = self.placement
        if not placement.mesh_axes or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        if placement.is_explicit:
            return _laid(x, placement)
        mesh: Any = placement.mesh
        target = NamedSharding(mesh, P(placement.mesh_axes, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
        padded = jax.lax.with_sharding_constraint(layout.pad(x, placement, safe=False), target)
        return layout.unpad(padded, placement)


def _stacked(ys: Sequence[jax.Array]) -> jax.Array:
    """``jnp.stack``, one after the other: XLA's CPU compiler computes a concatenation's operands number by number."""
    first = jnp.asarray(ys[0])  # it may be a literal
    if len(ys) == 1 or jnp.issubdtype(first.dtype, jax.dtypes.extended):
        return jnp.stack(ys)
    found = jnp.broadcast_to(first, (len(ys), *first.shape))  # split over free mesh axes as the element is
    for i, y in enumerate(ys[1:], 1):
        found = jax.lax.dynamic_update_index_in_dim(found, jnp.asarray(y), i, 0)
    return found


_GATHERED = (
    f"jax {jax.__version__} gathers what a map over {{!r}} is given over the mesh's other axes, as these are Explicit; "
    "update to jax 0.12, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, …)"
)


def _laid(x: jax.Array, placement: Placement) -> jax.Array:
    """On an Explicit mesh: rows laid over the axis if they divide."""
    return layout.constrain(layout.on_mesh(x, placement), placement, rows=x.shape[0] % placement.num_devices == 0)


def require_together(placement: Placement, lowering: Lowering) -> None:
    """Elements that exchange values must be under way together.

    Raises:
        AxisError: if they are not.
    """
    name = placement.axis.name
    if placement.num_chunks > 1:
        raise AxisError(
            f"axis {name!r} has at_once={placement.axis.at_once}, so its elements run in turns and cannot exchange "
            f"values; leave at_once out, or reduce after the map: px.reduce_sum(px.map_fn(…), {name!r})"
        )
    if lowering == "unroll":
        raise AxisError(
            f"lowering={lowering!r} runs the elements of axis {name!r} apart, so they cannot exchange values; "
            f"write lowering='vmap', or leave it out"
        )


def keeps_nothing(placement: Placement) -> bool:
    """Return whether what elements in turns compute is computed again where it is needed once more.

    Chunks of :class:`px.Stream` must do the same operations, however few elements they have: ``at_once`` decides.
    """
    return placement.num_chunks > 1 or (scope.current().chunk is not None and placement.axis.at_once is not None)


def sums_preferred(body: ClosedJaxpr, placement: Placement, lowering: Lowering, shared: Sequence[bool]) -> bool:
    """Return whether sums over elements are better taken by a map of their own, which runs the elements once more.

    It costs less than the elements' results, or keeps none of them. What has effects is not run once more.
    """
    if jax_api.has_effects(body.jaxpr):
        return False
    if keeps_nothing(placement):
        return True
    if collectives.mentions(body.jaxpr, placement.axis) or not sums.gains(body, shared):
        return False
    nothing = (False,) * len(body.out_avals)
    elements = Elements(body, shared, nothing, (False,) * len(shared), placement, lowering)
    # Chunks of a stream must do the same, however few elements they have.
    return scope.current().chunk is not None or not elements._unrolls
