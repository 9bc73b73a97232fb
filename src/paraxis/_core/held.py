"""Rows that stay on the devices between calls, and functions that are called on them again and again.

A program's values come and go; a state is kept. Rows are kept in one of two forms, whichever the function at hand
runs best on: *together*, leaves ``(num_padded, ...)`` in blocks over the devices, with the padding rows kept as well,
so that nothing is ever moved to cut them off; or *apart*, a tree per row on its device. Blocks are the same in both,
so that to change the form moves nothing between devices.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from paraxis._core import apart, arrays, cost, jax_api, layout, local, placing, scope
from paraxis._core.arrays import ready
from paraxis._core.local import Lowering
from paraxis._core.placing import Placement

SMALL = 50_000_000
"""Floating-point operations. What does no more is small: on CPU several run best together, vectorised, and in a loop
on the devices; what does more, one by one. Measured with two-layer networks from 8 × 16 to 784 × 2,048."""

_T = TypeVar("_T")


class Held(abc.ABC):
    """Rows of one axis."""

    placement: Placement

    @abc.abstractmethod
    def part(self, take: Callable[[Any], Any]) -> "Held":
        """A part of each row's tree; ``take`` only picks."""

    @abc.abstractmethod
    def together(self) -> "Together":
        """The same rows in one array per leaf."""

    @abc.abstractmethod
    def apart(self) -> "Apart":
        """The same rows each for itself."""

    @abc.abstractmethod
    def per_device(self, summary: Callable[[Any, jax.Array], _T], weights: np.ndarray) -> _T:
        """``summary(rows, weights)`` of each device's rows ``(n, ...)``, as leaves ``(num_devices, ...)`` over them.

        Rows that are no elements have the weight zero.
        """

    @abc.abstractmethod
    def row(self, index: int) -> Any:
        """One row's tree, free of the mesh."""

    @abc.abstractmethod
    def struct(self) -> Any:
        """What one row's tree looks like."""

    def stacked(self) -> Any:
        """Leaves ``(size, ...)``."""
        rows = self.together()
        return jax.tree.map(lambda leaf: _unpadded(leaf, rows.placement), rows.tree)

    def readable(self) -> Any:
        """The same; of several processes, each can read all of it."""
        return arrays.whole(self.stacked())

    def gathered(self) -> Any:
        """Leaves ``(size, ...)`` that any operation takes."""
        return ready(jax.tree.map(lambda leaf: plain(leaf, self.placement), ready(self.stacked())))


@dataclasses.dataclass(frozen=True)
class Together(Held):
    """Leaves ``(num_padded, ...)``."""

    placement: Placement
    tree: Any

    def part(self, take: Callable[[Any], Any]) -> "Together":
        return Together(self.placement, take(self.tree))

    def together(self) -> "Together":
        return self

    def apart(self) -> "Apart":
        return Apart(self.placement, apart.split_blocks(self.tree, self.placement))

    def per_device(self, summary: Callable[[Any, jax.Array], _T], weights: np.ndarray) -> _T:
        padded = layout.padded_weights(np.asarray(weights, np.float32), self.placement.num_padded)
        return _summaries(summary, self.placement, self.tree, padded)

    def row(self, index: int) -> Any:
        return arrays.free(jax.tree.map(lambda leaf: plain(leaf, self.placement)[index], ready(self.tree)))

    def struct(self) -> Any:
        return jax.tree.map(jax_api.element_struct, self.tree)


@dataclasses.dataclass(frozen=True)
class Apart(Held):
    """A tree for each row, on its device."""

    placement: Placement
    rows: apart.Rows

    def part(self, take: Callable[[Any], Any]) -> "Apart":
        return Apart(self.placement, [take(row) for row in self.rows])

    def together(self) -> Together:
        with jax.ensure_compile_time_eval():  # also where a function that uses them is being traced
            return Together(self.placement, apart.stacked_blocks(self.rows, self.placement))

    def apart(self) -> "Apart":
        return self

    def stacked(self) -> Any:
        if not self.placement.is_padded or jax.default_backend() != "cpu" or is_traced(self.rows):
            return super().stacked()
        # By copies of the rows alone; see _unpadded.
        first = placing.devices(self.placement)[0]
        whole = apart.stack(jax.device_put(self.rows, first), len(self.rows))
        target = arrays.sharding(self.placement, rows=True)
        return whole if target is None else jax.device_put(whole, target)

    def per_device(self, summary: Callable[[Any, jax.Array], _T], weights: np.ndarray) -> _T:
        padded = layout.padded_weights(np.asarray(weights, np.float32), self.placement.num_padded)
        blocks = apart.blocks(self.rows, self.placement)
        each = zip(blocks, padded.reshape(len(blocks), -1), strict=True)
        return apart.joined([_summary(summary, rows, own) for rows, own in each], self.placement)

    def row(self, index: int) -> Any:
        return arrays.free(self.rows[index])

    def struct(self) -> Any:
        return jax.tree.map(jax_api.struct, self.rows[0])


def _unpadded(leaf: jax.Array, placement: Placement) -> jax.Array:
    """Padded rows → ``(size, ...)``, on CPU by copies, which need not be waited for; see :func:`ready`."""
    if not placement.is_padded or jax.default_backend() != "cpu" or is_traced(leaf):
        return layout.unpad(leaf, placement)
    if not placing.can_be_dispatched(placement):
        return layout.unpad(ready(leaf), placement)
    first = placing.devices(placement)[0]
    blocks = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    whole = _joined([jax.device_put(shard.data, first) for shard in blocks], placement.size)
    target = arrays.sharding(placement, rows=True)
    return whole if target is None else jax.device_put(whole, target)


@functools.partial(jax.jit, static_argnums=1)
def _joined(blocks: Sequence[jax.Array], size: int) -> jax.Array:
    return jnp.concatenate(blocks)[:size]


def plain(leaf: jax.Array, placement: Placement) -> jax.Array:
    """On an Explicit mesh, rows brought together: cut and joined there, they would have no type."""
    return layout.constrain(leaf, placement, rows=False) if placement.is_explicit else leaf


def hold(tree: Any, placement: Placement) -> Together:
    """Leaves ``(size, ...)`` → rows; padding rows repeat a real one."""
    sharding = arrays.block_sharding(placement)
    if sharding is None:
        return Together(placement, arrays.padded(jax.tree.map(jnp.asarray, tree), placement))
    settled = jax.tree.map(lambda leaf: arrays.settle(jnp.asarray(leaf), placement, rows=True), tree)
    return Together(placement, _laid(arrays.padded(settled, placement), sharding))


def is_traced(tree: Any) -> bool:
    """Whether there is a value in it that JAX is tracing."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Held))
    leaves = (jax.tree.leaves(x.tree) if isinstance(x, Together) else [] if isinstance(x, Held) else [x] for x in found)
    return any(isinstance(leaf, jax_api.Tracer) for some in leaves for leaf in some)


class Everywhere:
    """One tree for all rows, on every device."""

    def __init__(self, tree: Any, placement: Placement) -> None:
        self.given = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), tree)
        self._placement = placement

    @functools.cached_property
    def tree(self) -> Any:
        """The values, laid on all devices."""
        target = self._target
        if target is None or all(_lies(x, target) for x in jax.tree.leaves(self.given)):
            return self.given
        return _laid(self.given, target)

    @property
    def operands(self) -> Any:
        """The values for a program over all devices: if they are bound to none, it brings them there faster."""
        leaves = jax.tree.leaves(self.given)
        if self._target is None or not self._target.is_fully_addressable or is_traced(leaves):
            return self.tree
        return self.tree if any(x.committed for x in leaves) else self.given

    @property
    def _target(self) -> NamedSharding | None:
        return arrays.whole_sharding(self._placement)

    @functools.cached_property
    def copies(self) -> Sequence[Any]:
        """Each device's copy."""
        if len(placing.devices(self._placement)) == 1:
            return [self.tree]
        return apart.on_devices(self.tree, self._placement)


def _laid(tree: Any, target: NamedSharding) -> Any:
    """Put on devices together, or, where these are also other processes', leaf by leaf."""
    if target.is_fully_addressable:
        return jax.device_put(tree, target)
    return jax.tree.map(lambda x: arrays.put(x, target), tree)


def _lies(x: Any, target: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) and x.sharding == target


class Program:
    """A function of one row's trees and of values for all rows, compiled for rows that are held.

    Args:
        fn: ``fn(*own, *shared)``, with one row of each of ``own``. Its first argument is given away if ``donate``.
        placement: where the rows lie.
        lowering: how a device runs its several rows. ``"auto"``: on CPU apart (``"dispatch"``) if there is a
            convolution in it or more work than ``SMALL``, and nothing is exchanged; else together.
        donate: whether the memory of the first argument may be used for the result.
    """

    def __init__(
        self, fn: Callable[..., Any], placement: Placement, lowering: Lowering = "auto", *, donate: bool = False
    ) -> None:
        self._fn = fn
        self._placement = placement
        self._lowering: Lowering = lowering
        self._donate = donate
        self._chosen: Lowering | None = None
        self._compiled = False
        self._found: tuple[bool, bool] | None = None

    def __call__(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> Held:
        """The results, one per row. Shapes and dtypes must be those of the first call."""
        if self._lower(own, shared) == "dispatch":
            rows = [held.apart().rows for held in own]
            copies = [x.copies for x in shared]
            if not self._compiled:  # on all devices, before anything is given away
                apart.compile_all(self._apart, rows, copies, self._placement)
                self._compiled = True
            return Apart(self._placement, apart.call(self._apart, rows, copies, self._placement))
        operands = self._operands(own, shared)
        if self._look(own, shared)[0]:  # it communicates
            operands = ready(operands)
        return Together(self._placement, self._together(*operands))

    def lower(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> Any:
        """What is run, as ``jax.jit(f).lower`` gives it: for all rows if they are together, else for the first."""
        if self._lower(own, shared) == "dispatch":
            return self._apart.lower(*(held.apart().rows[0] for held in own), *(x.copies[0] for x in shared))
        return self._together.lower(*self._operands(own, shared))

    def small(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> bool:
        """Whether one row's work is small, and best done in loops and vectorised."""
        return self._look(own, shared)[1]

    def _look(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> tuple[bool, bool]:
        """Whether rows exchange values, and whether one row's work is small; traced once."""
        if self._found is None:
            one = self._element(own, shared)
            jaxpr = one.jaxpr.jaxpr
            self._found = (one.communicates, not cost.convolves(jaxpr) and cost.flops(jaxpr) <= SMALL)
        return self._found

    def _lower(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> Lowering:
        if is_traced((*own, *(x.given for x in shared))):  # in one program, through which a derivative can be taken
            return "auto" if self._lowering == "dispatch" else self._lowering
        if self._chosen is None:
            if self._lowering == "dispatch":
                apart.require_alone("ensemble", self._placement)
            self._chosen = self._lowering if self._lowering != "auto" else self._choose(own, shared)
        return self._chosen

    def _choose(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> Lowering:
        if jax.default_backend() != "cpu" or not placing.can_be_dispatched(self._placement):
            return "auto"
        return "auto" if any(self._look(own, shared)) else "dispatch"

    def _element(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> local.Element:
        rows = [held.struct() for held in own]
        leaves, structure = jax.tree.flatten((*rows, *(jax.tree.map(jax_api.struct, x.given) for x in shared)))
        fn = lambda *xs: self._fn(*jax.tree.unflatten(structure, xs))  # noqa: E731
        return local.element(fn, self._placement, self._scope, leaves)

    @functools.cached_property
    def _scope(self) -> scope.Scope:
        return scope.within(self._placement.axis)

    @functools.cached_property
    def _apart(self) -> Any:
        return apart.executable(self._fn, self._placement, donate=self._donate)

    def _operands(self, own: Sequence[Held], shared: Sequence[Everywhere]) -> tuple[Any, list[Any], list[Any]]:
        first, *rest = (held.together().tree for held in own)
        return first, rest, [x.operands for x in shared]

    @functools.cached_property
    def _together(self) -> Any:
        def run(first: Any, rest: Sequence[Any], shared: Sequence[Any]) -> Any:
            structure = jax.tree.structure((first, *rest, *shared))
            mine, theirs = jax.tree.leaves((first, rest)), jax.tree.leaves(shared)
            is_shared = (False,) * len(mine) + (True,) * len(theirs)
            how: Lowering = "auto" if self._lowering == "dispatch" else self._lowering
            fn = lambda *xs: self._fn(*jax.tree.unflatten(structure, xs))  # noqa: E731
            return _mapped(fn, self._placement, self._scope, how, is_shared, [*mine, *theirs])

        return jax.jit(run, donate_argnums=0 if self._donate else ())


def _mapped(
    fn: Callable[..., Any],
    placement: Placement,
    inner: scope.Scope,
    lowering: Lowering,
    shared: Sequence[bool],
    operands: Sequence[jax.Array],
) -> Any:
    """The result of a function of flat arguments for each row, with leaves ``(num_padded, ...)``.

    Operands are ``(...)`` where ``shared`` (one value for all rows), else ``(num_padded, ...)``. The padding rows have
    been safe to compute on before and are still; so they are left as they are, which saves a pass over them.
    """
    structures: list[Any] = []

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        one = local.element(fn, placement, inner, [jax_api.element_struct(block) for block in blocks])
        structures.append(one.out_tree)
        leaves = [block[0] if is_shared else block for block, is_shared in zip(blocks, shared, strict=True)]
        return local.run(one, placement, lowering, leaves, shared)

    laid_out = [layout.per_device(x, placement) if s else x for x, s in zip(operands, shared, strict=True)]
    results = layout.run_per_device(on_device, placement, laid_out)
    return jax.tree.unflatten(structures[-1], results)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _summaries(summary: Callable[..., Any], placement: Placement, tree: Any, weights: jax.Array) -> Any:
    def on_device(tree: Any, weights: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], summary(tree, weights))

    return layout.run_per_device(on_device, placement, (tree, weights))


@functools.partial(jax.jit, static_argnums=0)
def _summary(summary: Callable[..., Any], rows: Sequence[Any], weights: jax.Array) -> Any:
    tree = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    return jax.tree.map(lambda leaf: leaf[None], summary(tree, weights[: len(rows)]))
