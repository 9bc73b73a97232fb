"""The pass over the elements in which each value of a program is computed, and what is kept between passes.

Elements meet at reductions only. A value's *level* is the number of reductions, one after another, that it depends on:
pass ``k`` computes, chunk by chunk, the values of level ``k`` and from them the parts of reductions; what these give,
put together from all chunks, has level ``k + 1``. Shared values are computed between passes. A placed value of an
earlier level that a later pass needs is computed again from the data, or kept.

What must be kept: a value that meets what comes from a maximum or minimum in an operation to which the last bits matter
(:mod:`_steep`). It was in another executable that the maximum was taken, whose last bits may differ; computed again, no
element would be found to attain it, and the derivative would be zero. So must the factors of a product that is
differentiated, whose zeros are counted, and the results of what has effects, which happen once per element.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal as OneOf

from paraxis._axes.placing import Placement
from paraxis._core import maps, primitives
from paraxis._jax import jax_api, rowwise
from paraxis._jax.jax_api import ClosedJaxpr
from paraxis.engines._flat import LOOPS, Flat, Scan, Step, Value, flat, shape, uses
from paraxis.engines._steep import Of, is_steep, of_results
from paraxis.errors import LoweringError

Keep = OneOf["recompute", "memory", "disk"]
Kind = OneOf["shared", "rows", "loop"]

_KINDS = {primitive.name: kind for kind, primitive in primitives.REDUCTIONS.items()}
_FOLDS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod"} | {
    "reduce_or": "any",
    "reduce_and": "all",
}
_EXTREMES = frozenset(("max", "min"))
_PAIRED: dict[str, Callable[[Step], Sequence[Sequence[int]]]] = {
    "dot_general": lambda step: step.params["dimension_numbers"][1],
    "gather": lambda step: (
        step.params["dimension_numbers"].operand_batching_dims,
        step.params["dimension_numbers"].start_indices_batching_dims,
    ),
    "conv_general_dilated": lambda step: ((), ()),
    **dict.fromkeys(rowwise.SCATTERS, lambda step: tuple(zip(*rowwise.scattered(step.eqn), strict=True))),
}
"""Operations whose operands go together in these dimensions only (-1: not this one), whatever their shapes."""


@dataclasses.dataclass(eq=False)
class Plan:
    """A flat program with its passes decided.

    Attributes:
        placement: of the axis whose elements are run in turns; chunks lie there as well.
        dims: for each value the dimension of its rows; ``None`` if it is shared.
        level: the reductions, one after another, that a value depends on.
        kinds: for each step whether it is computed once, on rows, or is a loop around passes.
        folds: the values that are put together from parts, and how.
        sources: placed values that are read: arguments, constants, what loops give.
        kept: placed values that a later pass is given.
        cut: values that are shared, of which a step takes the rows of a chunk: ``(step, operand) → dimension``.
        made: the step that each value comes from.
        live: the values that the results, or something with effects, depend on.
        loops: for each loop over rows, the plans of its bodies.
        stages, between: what was made of it: its passes, and programs of what is computed between them.
        differing: the shared values that are computed otherwise than in a plan for elements of another length.
    """

    flat: Flat
    placement: Placement
    dims: dict[Value, int | None]
    level: dict[Value, int]
    kinds: dict[Step, Kind]
    folds: dict[Value, str]
    sources: set[Value]
    kept: set[Value]
    cut: dict[tuple[Step, int], int]
    made: dict[Value, Step]
    live: set[Value]
    loops: "dict[Step, Loop]"
    stages: dict[int, Any] = dataclasses.field(default_factory=dict)
    between: dict[Any, Any] = dataclasses.field(default_factory=dict)
    differing: "dict[Plan, set[Value]]" = dataclasses.field(default_factory=dict)

    @property
    def axis(self) -> str:
        return self.placement.axis.name

    @property
    def size(self) -> int:
        return self.placement.size

    @property
    def num_levels(self) -> int:
        return 1 + max(self.level.values(), default=0)

    def of_pass(self, level: int) -> list[Value]:
        """Return what a pass computes: parts of reductions, rows that are kept, rows that are returned."""
        steps = (step for step in self.flat.steps if self.kinds[step] == "rows" and self.level_of(step) == level)
        found = dict.fromkeys(
            v for step in steps for v in step.outvars if v in self.live and (v in self.folds or v in self.kept)
        )
        found.update(dict.fromkeys(v for v in self._returned if self.level[v] == level))
        return list(found)

    @functools.cached_property
    def places(self) -> dict[Value, int]:
        """The number of each value, the same in a trace for elements of another length."""
        return {v: number for number, v in enumerate(self.flat.values)}

    def acting(self, level: int, kind: Kind = "rows") -> list[Step]:
        """Return what has effects in a pass, or between passes."""
        return [s for s in self.flat.steps if s.effects and self.kinds[s] == kind and self.level_of(s) == level]

    def loops_at(self, level: int) -> list[Step]:
        """Return the loops that run after a pass."""
        steps = (step for step in self.loops if self.kinds[step] == "loop" and self.level_of(step) == level)
        return [step for step in steps if step.effects or any(v in self.live for v in step.outvars)]

    def level_of(self, step: Step) -> int:
        return max((self.level[v] for v in step.operands), default=0)

    @property
    def _returned(self) -> list[Value]:
        results = (v for v in self.flat.results if isinstance(v, Value))
        return [v for v in results if self.dims[v] is not None]

    def needs(self, targets: Iterable[Value], acting: Iterable[Step], level: int) -> list[Step]:
        """Return the steps on rows that a pass runs for these values, in order."""
        wanted, steps = list(targets), set(acting)
        wanted += [v for step in steps for v in step.operands]
        seen: set[Value] = set()
        while wanted:
            value = wanted.pop()
            if value in seen or self.is_given(value, level):
                continue
            seen.add(value)
            steps.add(self.made[value])
            wanted += self.made[value].operands
        return [step for step in self.flat.steps if step in steps]

    def is_given(self, v: Value, level: int) -> bool:
        """Return whether a pass is given a value: an earlier one has put it together or kept it, or it is read."""
        if v in self.folds:
            return self.level_of(self.made[v]) < level
        return self.dims[v] is None or v in self.sources or (v in self.kept and self.level[v] < level)


def plan(
    program: Flat,
    placement: Placement,
    placed: Iterable[Value],
    keep: Keep,
    dims: dict[Value, int | None] | None = None,
) -> Plan:
    """Decide the passes of a program.

    Args:
        program: a flat program.
        placement: of the axis whose elements are run in turns.
        placed: the arguments that are read from a source.
        keep: what becomes of placed values that a later pass needs.
        dims: where the rows of arguments lie, if not in the first dimension.

    Raises:
        LoweringError: if elements meet elsewhere than in a reduction; the message has the line.
    """
    if placement.is_explicit:
        raise LoweringError(
            f"axis {placement.axis.name!r} lies on a mesh with Explicit axes, where sizes are part of types; leave out "
            f"its mesh, or make it with axis_types=(jax.sharding.AxisType.Auto, …)"
        )
    sources = set(placed)
    if program.index is not None:
        sources.add(program.index)
    given = {*program.arguments, *program.constants}
    read, found = set(sources), None
    while found is None or not found.more <= sources:
        sources |= set() if found is None else found.more
        try:
            found = _Analysis(program, placement, keep, sources, given, dims or {})
        except LoweringError:
            if sources == read:
                raise
            # What is used as rows in one place is shared in another: it stays whole, and is cut where rows are needed.
            found = _Analysis(program, placement, keep, read, given, dims or {})
            break
    made = {v: step for step in program.steps for v in step.outvars}
    result = Plan(
        program,
        placement,
        found.dims,
        found.level,
        found.kinds,
        found.folds,
        found.sources,
        set(),
        found.cut,
        made,
        _live(program, made),
        found.loops,
    )
    result.kept = _kept(result, keep)
    return result


def _live(flat: Flat, made: dict[Value, Step]) -> set[Value]:
    wanted = [v for v in flat.results if isinstance(v, Value)]
    wanted += [v for step in flat.steps if step.effects for v in step.operands]
    found: set[Value] = set()
    while wanted:
        v = wanted.pop()
        if v not in found:
            found.add(v)
            wanted += made[v].operands if v in made else []
    return found


class _Analysis:
    """One walk through a program: where rows lie, at which level, and which whole values turn out to be sources."""

    def __init__(
        self,
        flat: Flat,
        placement: Placement,
        keep: Keep,
        sources: set[Value],
        given: set[Value],
        known: dict[Value, int | None],
    ) -> None:
        self.placement, self.given = placement, given
        self.keep: Keep = keep
        self.axis, self.size = placement.axis.name, placement.size
        self.dims: dict[Value, int | None] = {
            v: 0 if v in sources else None for v in (*flat.arguments, *flat.constants)
        }
        self.dims.update((v, dim) for v, dim in known.items() if dim is not None)
        if flat.index is not None:
            self.dims[flat.index] = 0
        self.level = dict.fromkeys(self.dims, 0)
        self.kinds: dict[Step, Kind] = {}
        self.folds: dict[Value, str] = {}
        self.sources = set(sources)
        self.loops: dict[Step, Loop] = {}
        self.more: set[Value] = set()
        self.cut: dict[tuple[Step, int], int] = {}
        self.used = {v for step in flat.steps for v in step.operands} | {
            v for v in flat.results if isinstance(v, Value)
        }
        for step in flat.steps:
            self._step(step)

    def _step(self, step: Step) -> None:
        dims = [self.dims[v] if isinstance(v, Value) else None for v in step.invars]
        level = max((self.level[v] for v in step.operands), default=0)
        kind, places = self._kind(step, dims)
        self.kinds[step] = kind
        after = level + 1 if kind == "loop" else level
        for v, place in zip(step.outvars, places, strict=True):
            self.dims[v] = place
            self.level[v] = after + (v in self.folds)
            if kind == "loop" and place is not None:
                self.sources.add(v)

    def _kind(self, step: Step, dims: list[int | None]) -> tuple[Kind, Sequence[int | None]]:
        ours = step.params.get("axis") == self.axis and step.name.startswith("px_")
        if ours and step.primitive is maps.map_p:
            return "rows", self._map(step, dims)
        if ours and step.primitive is primitives.broadcast_p:
            self._refuse_if(step, dims[0] is not None, "copies what differs between elements")
            return "rows", [0]
        if all(dim is None for dim in dims) and not (step.name in LOOPS and _uses(step, self.axis)):
            return "shared", [None] * len(step.outvars)
        fold = self._fold(step, dims)
        if fold is not None:
            self.folds[step.outvars[0]] = fold
            return "rows", [None]
        if step.name in LOOPS:
            return self._loop(step, dims)
        self._refuse_if(step, step.primitive is maps.map_p, "maps another axis outside of it")
        moved = rowwise.moved(step.eqn, dims)
        for place in moved:
            self._refuse_if(step, isinstance(place, rowwise.Mixed), f"meet in {getattr(place, 'reason', '')}")
        self._cut_beside(step, dims)
        return "rows", list(moved)  # pyright: ignore[reportReturnType]

    def _map(self, step: Step, dims: list[int | None]) -> list[int | None]:
        shared, summed = step.params["shared"], step.params["summed"]
        for number, (dim, is_shared) in enumerate(zip(dims, shared, strict=True)):
            if is_shared:
                self._refuse_if(step, dim is not None, "see all elements' values: a mapped function closes over them")
            elif dim is None:
                self._take(step, number, 0)
            else:
                self._refuse_if(step, dim != 0, "lie in another dimension than the first")
        self.folds.update((v, "sum") for v, is_summed in zip(step.outvars, summed, strict=True) if is_summed)
        return [None if is_summed else 0 for is_summed in summed]

    def _fold(self, step: Step, dims: list[int | None]) -> str | None:
        """Return how an operation that reduces the rows puts its parts together."""
        if step.name in _KINDS:
            self._refuse_if(step, step.params["axis"] != self.axis, "lie along another axis that is reduced")
            return _KINDS[step.name] if dims[0] == 0 else None
        if step.name in _FOLDS and dims[0] in step.params["axes"]:
            return _FOLDS[step.name]
        if step.name == "dot_general":
            contracted = step.params["dimension_numbers"][0]
            pairs = list(zip(*contracted, strict=True))
            for left, right in pairs:
                if left == dims[0] or right == dims[1]:
                    if dims[0] is None:
                        self._take(step, 0, left)
                    if dims[1] is None:
                        self._take(step, 1, right)
                    met = dims[0] in (None, left) and dims[1] in (None, right)
                    return "sum" if met else None
        return None

    def _loop(self, step: Step, dims: list[int | None]) -> tuple[Kind, Sequence[int | None]]:
        """Follow rows through a loop: of each element alone, or around reductions, and then the host runs it."""
        moved = [rowwise.Mixed("")] if _uses(step, self.axis) else rowwise.moved(step.eqn, dims)
        alone = not any(isinstance(place, rowwise.Mixed) for place in moved)
        # what all elements share, such as a counter, is not for a pass to give: it would not know all elements
        alone = alone and not any(
            place is None and v in self.used for v, place in zip(step.outvars, moved, strict=True)
        )
        decides = dims[0] if step.name == "cond" else None
        self._refuse_if(step, decides is not None, "decide which branch all of them take")
        self.loops[step] = inner = loop(step, dims, self.placement, self.keep)
        if alone:
            for number, (dim, inside) in enumerate(zip(dims, operand_dims(step, inner), strict=True)):
                if dim is None and inside is not None:
                    self._take(step, number, inside)
        return "rows" if alone else "loop", inner.out_dims

    def _cut_beside(self, step: Step, dims: list[int | None]) -> None:
        """Note which operands without rows are to be cut like those that have some: they are as long."""
        if step.name in _PAIRED:
            for numbers in zip(*_PAIRED[step.name](step), strict=True):
                if any(dim == number for dim, number in zip(dims, numbers, strict=True)):
                    for other, number in enumerate(numbers):
                        if dims[other] is None and number >= 0:
                            self._take(step, other, number)
            return
        rank, dim = next((len(shape(v)), dim) for v, dim in zip(step.invars, dims, strict=True) if dim is not None)
        for number, v in enumerate(step.invars):
            long = shape(v)
            if dims[number] is None and len(long) == rank and rank > dim and long[dim] == self.size > 1:
                self._take(step, number, dim)

    def _take(self, step: Step, number: int, dim: int) -> None:
        """Have an operand that was taken to be shared cut into chunks; what was given is read like a source."""
        v = step.invars[number]
        if v in self.given and dim == 0:
            self.more.add(v)  # pyright: ignore[reportArgumentType]
        self.cut[step, number] = dim

    def _refuse_if(self, step: Step, wrong: bool, what: str) -> None:
        if wrong:
            raise LoweringError(
                f"elements of axis {self.axis!r} {what}, at {step.line}. An engine runs the elements in turns, and "
                f"they may meet only in a reduction: px.reduce_sum, px.reduce_mean, px.reduce_max and so on"
            )


# --- loops around passes -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Loop:
    """A loop or branch around passes: the plans of its bodies, and where rows lie in what it carries and gives.

    ``bodies``: of ``scan`` its body, of ``while`` its condition and body, of ``cond`` its branches.
    """

    bodies: list[Plan]
    in_dims: list[list[int | None]]
    out_dims: list[int | None]


def loop(step: Step, dims: Sequence[int | None], placement: Placement, keep: Keep) -> Loop:
    """Plan the bodies of a loop or branch. What a loop carries has rows if it has some after any number of steps."""
    axis = placement.axis.name

    def planned(body: ClosedJaxpr, dims: Sequence[int | None]) -> tuple[Plan, list[int | None], list[int | None]]:
        """Return a body's plan, and where rows lie in its arguments, of which it may take some, and in its results."""
        program = flat(body, axis)
        placed = [v for v, dim in zip(program.arguments, dims, strict=True) if dim is not None]
        found = plan(program, placement, placed, keep, dict(zip(program.arguments, dims, strict=True)))
        outs = [found.dims[v] if isinstance(v, Value) else None for v in program.results]
        return found, [found.dims[v] for v in program.arguments], outs

    def settled(
        body: ClosedJaxpr, ahead: Sequence[int | None], carry: Sequence[int | None], after: Sequence[int | None]
    ) -> tuple[Plan, list[int | None], list[int | None]]:
        carried, count = list(carry), len(ahead)
        while True:
            found, ins, outs = planned(body, [*ahead, *carried, *after])
            again = zip(carried, ins[count : count + len(carried)], outs[: len(carried)], strict=True)
            joined = [_joined(step, places, axis) for places in again]
            if joined == carried:
                return found, ins, outs
            carried = joined

    if step.name == "cond":
        bodies = [planned(body, dims[1:]) for body in step.params["branches"]]
        outs = [_joined(step, places, axis) for places in zip(*(outs for _, _, outs in bodies), strict=True)]
        return Loop([body for body, _, _ in bodies], [ins for _, ins, _ in bodies], outs)
    if step.name == "while":
        num_cond, num_body = step.params["cond_nconsts"], step.params["body_nconsts"]
        fixed, carry = dims[num_cond : num_cond + num_body], list(dims[num_cond + num_body :])
        while True:
            body, ins, outs = settled(step.params["body_jaxpr"], fixed, carry, ())
            condition, asked, (goes,) = planned(step.params["cond_jaxpr"], [*dims[:num_cond], *ins[num_body:]])
            outs = [_joined(step, [goes, *places], axis) for places in zip(ins[num_body:], outs, strict=True)]
            if outs == ins[num_body:]:
                return Loop([condition, body], [asked, ins], outs)
            carry = outs  # where each element stops by itself, it keeps what it carries
    scan = Scan.of(step, dims)
    if 0 in scan.scanned:
        raise LoweringError(
            f"elements of axis {axis!r} are gone through one by one in a scan, at {step.line}; use px.map_fn"
        )
    slices = [None if dim is None else dim - 1 for dim in scan.scanned]
    body, ins, outs = settled(scan.body, scan.fixed, scan.carry, slices)
    count = len(scan.carry)
    return Loop([body], [ins], [*outs[:count], *(None if dim is None else dim + 1 for dim in outs[count:])])


def operand_dims(step: Step, of: Loop) -> list[int | None]:
    """Return where a loop's bodies have rows in each of its operands."""
    if step.name == "cond":
        return [None, *(_joined(step, places, "") for places in zip(*of.in_dims, strict=True))]
    if step.name == "while":
        return [*of.in_dims[0][: step.params["cond_nconsts"]], *of.in_dims[1]]
    (ins,) = of.in_dims
    ahead = len(ins) - len(Scan.of(step, step.invars).scanned)
    return [*ins[:ahead], *(None if dim is None else dim + 1 for dim in ins[ahead:])]


def _joined(step: Step, places: Sequence[int | None], axis: str) -> int | None:
    found = {place for place in places if place is not None}
    if len(found) > 1:
        raise LoweringError(
            f"elements of axis {axis!r} lie in two dimensions of one value of a {step.name}, at {step.line}"
        )
    return found.pop() if found else None


def _uses(step: Any, axis: str) -> bool:
    return any(uses(sub, axis) for sub in jax_api.subjaxprs(step))


# --- what is kept ------------------------------------------------------------------------------------------------


def _kept(of: Plan, keep: Keep) -> set[Value]:
    """Return the placed values that a later pass is to be given."""
    frontier: set[Value] = set()
    must = {v for v in of.flat.same if v in of.live and of.dims[v] is not None and v not in of.sources}
    extreme = _extreme(of)
    for level in range(of.num_levels):
        for step in of.needs(of.of_pass(level), of.acting(level), level):
            if of.level_of(step) < level:  # it is computed again
                must.update(v for v in step.outvars if step.effects and of.dims[v] is not None)
                continue
            own = [v for v in step.operands if of.dims[v] is not None and v not in of.sources]
            earlier = [v for v in own if of.level[v] < level]
            frontier.update(earlier)
            if is_steep(step, _told(step, extreme)):
                must.update(_origins(of, own, level))
    for step in (step for step in of.loops if of.kinds[step] == "loop"):
        must.update(v for v in step.operands if of.dims[v] is not None and v not in of.sources)
    return must if keep == "recompute" else must | frontier


def _origins(of: Plan, values: Sequence[Value], level: int) -> set[Value]:
    """Return the values of earlier levels from which a pass computes these."""
    found: set[Value] = set()
    wanted = list(values)
    while wanted:
        v = wanted.pop()
        if of.dims[v] is None or v in of.sources:
            continue
        if of.level[v] < level:
            found.add(v)
        else:
            wanted += of.made[v].operands
    return found


def _extreme(of: Plan) -> dict[Any, Of]:
    """Return how values depend on maxima and minima over elements. What loops are given is kept anyway."""
    found: dict[Any, Of] = {v: Of.ALONE for v, kind in of.folds.items() if kind in _EXTREMES}
    for step in of.flat.steps:
        told = of_results(step.invars, _told(step, found))
        if told:  # what is put together from all elements is computed once, and is no element's
            found.update({v: Of.ALONE if v in of.folds else told for v in step.outvars})
    return found


def _told(step: Step, extreme: Mapping[Any, Of]) -> list[Of]:
    return [extreme.get(v, Of.NONE) if isinstance(v, Value) else Of.NONE for v in step.invars]
