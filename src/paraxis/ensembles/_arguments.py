"""The arguments of a function of one member besides it: values for all members, and each member's own."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from paraxis._axes import tree
from paraxis._axes.placing import Placement
from paraxis._calls import arguments
from paraxis.ensembles import _resident as resident
from paraxis.ensembles._programs import Everywhere
from paraxis.ensembles._resident import Resident, Stacked
from paraxis.errors import ShapeError


@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of a function's arguments that are each member's own. Holds no arrays."""

    structure: Any
    is_own: tuple[bool, ...]

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return one member's arguments, from its rows of what is its own (if there are such) and what is shared."""
        *own, shared = leaves
        mine, theirs = iter(own[0] if own else ()), iter(shared)
        return jax.tree.unflatten(self.structure, [next(mine) if own else next(theirs) for own in self.is_own])


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments on the devices. ``key`` says all that a compiled function depends on."""

    layout: Layout
    own: Stacked | None
    shared: Everywhere
    key: Hashable

    @property
    def rows(self) -> list[Resident]:
        return [] if self.own is None else [self.own]


def place(verb: str, args: tuple[Any, ...], in_axes: Any, placement: Placement, *, shapes: bool = False) -> Arguments:
    """Bring arguments onto the devices.

    Args:
        verb: who asks.
        args: pytrees of arrays.
        in_axes: ``None`` (the same for all members) or 0 (``(size, ...)``, each member's own), for all arguments or a
            tuple of these, one for each, or of trees of these.
        placement: where the members lie.
        shapes: whether ``jax.ShapeDtypeStruct`` may stand for arrays, where nothing is run.

    Raises:
        ShapeError: if ``in_axes`` does not fit, or a leaf does not carry the axis that it says.
    """
    given = tree.arrays(verb, "args", args, shapes=shapes)
    leaves, structure = jax.tree.flatten(given)
    is_own = (False,) * len(leaves) if in_axes is None else tuple(_flags(verb, given, in_axes))
    size, name = placement.size, placement.axis.name
    with_paths = jax.tree_util.tree_leaves_with_path(given) if any(is_own) else ()
    for (path, leaf), own in zip(with_paths, is_own, strict=False):
        if own and (leaf.ndim == 0 or leaf.shape[0] != size):
            raise ShapeError(
                f"{verb}: {tree.name('args', path)} has shape {leaf.shape}, but in_axes=0 says that each of the {size} "
                f"{name} has its own, ({size}, ...); for one value for all, write in_axes=None"
            )
    mine = [leaf for leaf, own in zip(leaves, is_own, strict=True) if own]
    theirs = [leaf for leaf, own in zip(leaves, is_own, strict=True) if not own]
    key = (structure, is_own, tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves))
    return Arguments(
        Layout(structure, is_own),
        resident.on_devices(mine, placement) if mine else None,
        Everywhere(theirs, placement),
        key,
    )


def _flags(verb: str, args: tuple[Any, ...], in_axes: Any) -> list[bool]:
    axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
    if len(axes) != len(args):
        raise ShapeError(
            f"{verb}: in_axes has {len(axes)} entries for {len(args)} arguments; write one for each, "
            f"in_axes=({', '.join(['None'] * len(args))})"
        )
    flags = jax.tree.map(lambda entry: _flag(verb, entry), axes, is_leaf=tree.is_none)
    try:
        return jax.tree.leaves(tree.spread(flags, args))
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"{verb}: in_axes={in_axes!r} does not fit the arguments, write one entry for each: {error}"
        ) from None


def _flag(verb: str, entry: Any) -> bool:
    arguments.one_of(verb, "in_axes", entry, (0, None), ShapeError)
    return entry is not None
