"""Functions of one member, compiled for members that stay on the devices, and called again and again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import apart, arrays, layout, placing, scope
from paraxis._axes.arrays import ready
from paraxis._axes.placing import Placement
from paraxis._core import dispatch, lowerings, primitives, programs
from paraxis._core.lowerings import Lowering
from paraxis._jax import cost, jax_api, latest
from paraxis.ensembles._resident import Resident, Separate, Stacked

SMALL = 50_000_000
"""Floating-point operations. What does no more is small: on CPU several run best together, vectorised, and in a loop
on the devices; what does more, one by one. Measured with two-layer networks from 8 × 16 to 784 × 2,048."""


def is_traced(values: Sequence[Any]) -> bool:
    """Return whether there is a value in these that JAX is tracing, members included."""
    return jax_api.is_tracing() and arrays.is_traced(
        [x.tree if isinstance(x, Stacked) else () if isinstance(x, Separate) else x for x in values]
    )


class Everywhere:
    """One tree for all rows, on every device."""

    def __init__(self, tree: Any, placement: Placement) -> None:
        kinds = (jax.Array, jax.ShapeDtypeStruct)  # a shape is to be compiled for, not run
        self.given = jax.tree.map(lambda x: x if isinstance(x, kinds) else jnp.asarray(x), tree)
        self._placement = placement

    @functools.cached_property
    def tree(self) -> Any:
        """The values, laid on all devices."""
        return arrays.everywhere(self.given, self._placement)

    @property
    def operands(self) -> Any:
        """The values for a program over all devices: if they are bound to none, it brings them there faster."""
        leaves = jax.tree.leaves(self.given)
        if placing.spans_processes(self._placement) or is_traced(leaves):
            return self.tree
        return self.tree if any(isinstance(x, jax.Array) and x.committed for x in leaves) else self.given

    @functools.cached_property
    def copies(self) -> Sequence[Any]:
        """Each device's copy."""
        if len(placing.devices(self._placement)) == 1:
            return [self.tree]
        return apart.on_devices(self.tree, self._placement)


class Current:
    """A program of functions of users', as they are now.

    Args:
        make: returns the function of one row.
        new: returns the program of one.
        functions: those of users.
    """

    def __init__(
        self, make: Callable[[], Callable[..., Any]], new: Callable[..., "Program"], functions: Sequence[Any]
    ) -> None:
        self._latest = latest.Latest(lambda noticing: new(noticing(make())), functions)

    def __call__(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> Resident:
        """Return the results, one per row."""
        return self._call(own, shared, lambda program: program(own, shared))

    def trace(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> Any:
        """Trace what is run, like ``jax.jit(f).trace``."""
        return self._call(own, shared, lambda program: program.trace(own, shared))

    def small(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> bool:
        """Return whether one row's work is small."""
        return self._call(own, shared, lambda program: program.small(own, shared))

    def _call(self, own: Sequence[Resident], shared: Sequence[Everywhere], ask: Callable[["Program"], Any]) -> Any:
        def trace(program: "Program") -> Any:
            return program.trace(own, shared).jaxpr

        try:
            return ask(self._latest.get(trace))
        finally:
            self._latest.note(trace)


class Program:
    """A function of one row's trees and of values for all rows, compiled for members that stay on the devices.

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
        self._run: Any = None
        self._found: tuple[bool, bool] | None = None

    def __call__(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> Resident:
        """Return the results, one per row. Shapes and dtypes must be those of the first call."""
        traced = is_traced((*own, *(x.given for x in shared)))
        if self._lower(own, shared, traced=traced) == "dispatch":
            rows = [members.as_separate().rows for members in own]
            copies = [x.copies for x in shared]
            if self._run is None:  # on all devices, before anything is given away
                first = [*(x[0] for x in rows), *(x[0] for x in copies)]
                self._run = programs.shared(self._separate, *first, donate=self._donate)
                dispatch.compile_all(self._run, rows, copies, self._placement)
            return Separate(self._placement, dispatch.call(self._run, rows, copies, self._placement))
        operands = self._operands(own, shared)
        if self._look(own, shared)[0]:  # it communicates
            operands = ready(operands)
        if traced:  # it may be differentiated
            return Stacked(self._placement, self._stacked(*operands))
        if self._run is None:
            self._run = programs.shared(self._stacked, *operands, donate=self._donate)
        return Stacked(self._placement, self._run(*operands))

    def trace(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> Any:
        """Trace what is run, like ``jax.jit(f).trace``: for all rows if they are together, else for the first."""
        if self._lower(own, shared, traced=is_traced((*own, *(x.given for x in shared)))) == "dispatch":
            shared_structs = (jax.tree.map(jax_api.struct, x.given) for x in shared)
            return self._separate.trace(*(members.struct() for members in own), *shared_structs)
        return self._stacked.trace(*self._operands(own, shared))

    def small(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> bool:
        """Return whether one row's work is small, and best done in loops and vectorised."""
        return self._look(own, shared)[1]

    def _look(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> tuple[bool, bool]:
        """Return whether rows exchange values, and whether one row's work is small; traced once."""
        if self._found is None:
            one = self._element(own, shared)
            jaxpr = one.jaxpr.jaxpr
            self._found = (one.communicates, not cost.convolves(jaxpr) and cost.flops(jaxpr) <= SMALL)
        return self._found

    def _lower(self, own: Sequence[Resident], shared: Sequence[Everywhere], *, traced: bool) -> Lowering:
        if traced:  # in one program, through which a derivative can be taken
            return "auto" if self._lowering == "dispatch" else self._lowering
        if self._chosen is None:
            if self._lowering == "dispatch":
                dispatch.require_alone("ensemble", self._placement)
            self._chosen = self._lowering if self._lowering != "auto" else self._choose(own, shared)
        return self._chosen

    def _choose(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> Lowering:
        if jax.default_backend() != "cpu" or not placing.can_be_dispatched(self._placement):
            return "auto"
        return "auto" if any(self._look(own, shared)) else "dispatch"

    def _element(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> lowerings.Element:
        rows = [members.struct() for members in own]
        leaves, structure = jax.tree.flatten((*rows, *(jax.tree.map(jax_api.struct, x.given) for x in shared)))
        fn = lambda *xs: self._fn(*jax.tree.unflatten(structure, xs))  # noqa: E731
        return lowerings.element(fn, self._placement, self._scope, leaves)

    @functools.cached_property
    def _scope(self) -> scope.Scope:
        return scope.within(self._placement.axis)

    @functools.cached_property
    def _separate(self) -> Any:
        return dispatch.executable(self._fn, self._placement, donate=self._donate)

    def _operands(self, own: Sequence[Resident], shared: Sequence[Everywhere]) -> tuple[Any, list[Any], list[Any]]:
        first, *rest = (members.as_stacked().tree for members in own)
        return first, rest, [x.operands for x in shared]

    @functools.cached_property
    def _stacked(self) -> Any:
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
    """Return the result of a function of flat arguments for each row, with leaves ``(num_padded, ...)``.

    Operands are ``(...)`` where ``shared`` (one value for all rows), else ``(num_padded, ...)``. The padding rows have
    been safe to compute on before and are still; so they are left as they are, which saves a pass over them.
    """
    structures: list[Any] = []

    def on_device(*blocks: jax.Array) -> list[jax.Array]:
        one = lowerings.element(fn, placement, inner, [jax_api.element_struct(block) for block in blocks])
        structures.append(one.out_tree)
        leaves = [block[0] if is_shared else block for block, is_shared in zip(blocks, shared, strict=True)]
        return lowerings.run(one, placement, lowering, leaves, shared)

    laid_out = [primitives.per_device(x, placement) if s else x for x, s in zip(operands, shared, strict=True)]
    results = layout.run_per_device(on_device, placement, laid_out)
    return jax.tree.unflatten(structures[-1], results)
