"""Lanes: the elements of one device, which do not wait for each other in loops.

A lane has a place in the program, the number of the element that it works on, and the values that are live between
blocks. The body of an innermost loop is repeated until lanes have left it; then each other block in which a lane is
runs once, in the order of the program, so that a lane which leaves a loop may be in it again at the next turn. A lane
whose element is done takes the next one. Lanes that are elsewhere compute on, as by ``vmap``, and nothing of it is
kept. With as many lanes as elements, an innermost body turns as often as the element that needs it most. With fewer,
an eighth of them may wait for the others, since to take an element costs as much as several turns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, blocks, jax_api, sums
from paraxis._core.blocks import INDEX, Block, Program
from paraxis._core.jax_api import ClosedJaxpr, ShapedArray, Var
from paraxis._core.pytrees import select
from paraxis._core.record import Map
from paraxis.errors import AxisError

_Values = dict[Any, jax.Array]
"""Values of variables; those of the program are ``(num_lanes, ...)``."""


def prepare(m: Map, env: Mapping[str, int]) -> tuple[Map, Program | None]:
    """Return a map and its program; if no loop is to be cut, the same map to run by ``vmap``, and ``None``.

    So it is for elements that lie over several devices, which have to be in step there.
    """
    m = m._replace(body=blocks.alone(m.body, env))
    if jax_api.has_effects(m.body.jaxpr):
        raise AxisError(
            f"axis {m.placement.axis.name!r} has lowering='lanes', so an element's effects would come in an order that "
            f"nobody knows: {', '.join(type(effect).__name__ for effect in m.body.effects)}; leave the lowering out"
        )
    is_divided = any(jax_api.struct(a).sharding for a in m.body.in_avals)
    program = None if is_divided else blocks.cut(m.body, m.shared)
    return m if program else m._replace(lowering="vmap"), program


def run(m: Map, program: Program, *operands: jax.Array) -> list[jax.Array]:
    """Run a device's elements; a last operand says which are real, if not all are: no others are run.

    Operands ``(num_local, ...)``, or ``(...)`` if shared. Results likewise, or sums ``(...)`` of a wide dtype.
    """
    num_local, real = m.placement.num_local, next(iter(operands[len(m.shared) :]), None)
    num_lanes = min(m.placement.axis.at_once or num_local, num_local)
    return Machine(m, program, operands[: len(m.shared)], num_lanes, real).run()[0]


class Machine:
    """A program, what it is given, and the variables that are not the program's.

    Attributes:
        place: the number of the block in which each lane is; after the last: there is no element left.
        element: the number of the element that each lane works on; ``following``: of the one to be taken next.
        turns: those of the innermost bodies together.
        results: rows ``(num_local, ...)``, or sums.
        live: variables of the program that one block assigns and another reads.
    """

    def __init__(
        self, m: Map, program: Program, operands: Sequence[Any], num_lanes: int, real: jax.Array | None
    ) -> None:
        self.blocks, self.done, self.jaxpr = program.blocks, len(program.blocks), m.body.jaxpr
        self.num_lanes, self.size, self.summed = num_lanes, m.placement.num_local, m.summed
        self.order = None if real is None else jnp.argsort(~real, stable=True)  # real ones first
        self.count = self.size if real is None else jnp.sum(real, dtype=np.int32)
        self.has_fixed_lanes = num_lanes == self.size and real is None  # each has one element
        common = jax_api.jaxpr_as_fun(program.common)(*select(operands, m.shared))
        self.common = dict[Any, Any](zip(program.known, common, strict=True))
        self.rows = dict[Any, Any](zip(self.blocks[0].arguments, select(operands, m.shared, False), strict=True))
        self.place, self.element = (_variable(INDEX, num_lanes) for _ in range(2))
        self.following, self.turns = _variable(INDEX), _variable(INDEX)
        sides = zip(m.body.out_avals, m.summed, strict=True)
        self.results = [
            _variable(a.update(dtype=sums.wide(a.dtype))) if s else _variable(a, self.size) for a, s in sides
        ]
        read = {v for block in self.blocks[1:] for v in block.reads()}
        self.live = [v for v in dict.fromkeys(v for block in self.blocks for v in block.assigned()) if v in read]

    def run(self) -> tuple[list[jax.Array], jax.Array]:
        """Return the results, and the turns of the innermost bodies together."""
        own = [self.place, self.element, self.following, self.turns, *self.results]
        shapes = {v: v.aval.shape for v in own} | {v: (self.num_lanes, *v.aval.shape) for v in self.live}
        start = [arrays.zeros(jax.ShapeDtypeStruct(shape, v.aval.dtype)) for v, shape in shapes.items()]

        def step(found: list[jax.Array]) -> list[jax.Array]:
            return [*self.turn(dict(zip(shapes, found, strict=True))).values()]

        found = jax.lax.while_loop(lambda found: jnp.any(found[0] < self.done), step, start)
        values = dict(zip(shapes, found, strict=True))
        return [values[v] for v in self.results], values[self.turns]

    def turn(self, values: _Values) -> _Values:
        """Visit all blocks, from the first innermost body on: who leaves it may be back before the next turn."""
        first = next((block.number for block in self.blocks if block.is_innermost), 0)
        for block in [*self.blocks[first:], *self.blocks[:first]]:
            changed = self.changed(block)
            found = (self.repeat if block.is_innermost else self.visit)(block, changed, values)
            values = {**values, **dict(zip(changed, found, strict=True))}
        return values

    def visit(self, block: Block, changed: Sequence[Any], values: _Values) -> list[jax.Array]:
        """Run a block, if a lane is in it."""
        is_there, after = jnp.any(values[self.place] == block.number), lambda: self.step(block, values)
        return jax.lax.cond(is_there, lambda: _of(changed, after()), lambda: _of(changed, values))

    def repeat(self, block: Block, changed: Sequence[Any], values: _Values) -> list[jax.Array]:
        """Run an innermost body until lanes have left it, at least once, if a lane is in it.

        While there are elements to take, an eighth of the lanes may wait.
        """
        alive = jnp.sum(values[self.place] < self.done)
        leaving = jnp.where(values[self.following] < self.count, max(1, self.num_lanes // 8), 1)

        def goes(carry: tuple[jax.Array, list[jax.Array]]) -> jax.Array:
            number = jnp.sum(carry[1][0] == block.number)
            return (number > 0) & (carry[0] | (alive - number < leaving))

        def step(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            after = self.step(block, {**values, **dict(zip(changed, carry[1], strict=True))})
            return jnp.array(False), _of(changed, after)

        return jax.lax.while_loop(goes, step, (jnp.array(True), _of(changed, values)))[1]

    def changed(self, block: Block) -> list[Any]:
        """Return the variables that a block changes, first of all the lanes' places."""
        own = [self.turns] * block.is_innermost + [self.element, self.following] * block.is_entry
        assigned = [v for v in dict.fromkeys(block.assigned()) if v in self.live]
        return [self.place, *own, *assigned, *(() if block.targets else self.results)]

    def step(self, block: Block, values: _Values) -> _Values:
        """Run a block for the lanes that are in it."""
        asked, values = values[self.place] == block.number, dict(values)
        here = self.take(asked, values) if block.is_entry else asked
        given = {**values, **self.common}
        if block.is_entry:
            at = slice(None) if self.has_fixed_lanes else values[self.element]
            given |= {v: x[at] for v, x in self.rows.items()}
        for row, array, index in block.loads:
            pick = jax.vmap(lambda x, i: x[i], (None if array in self.common else 0, 0))
            given[row] = pick(given[array], given[index])
        pairs = [(v, atom) for v, atom in block.assigns() if v in self.live]
        stores = [each for each in block.stores if each[0] in self.live]
        atoms = [*(atom for _, atom in pairs), *(atom for *_, atom in stores), *block.results]
        *found, choice = self.compute(block, here, given, [*atoms, block.choice])
        values |= {v: _where(here, y, values[v]) for (v, _), y in zip(pairs, found, strict=False)}
        for (array, index, _), y in zip(stores, found[len(pairs) :], strict=False):
            at = jnp.where(here, given[index], values[array].shape[1])
            values[array] = values[array].at[np.arange(self.num_lanes), at].set(y, mode="drop")
        if block.targets:
            target = jnp.asarray([target.number for target in block.targets], np.int32)[choice.astype(np.int32)]
        else:
            self.finish(here, found[len(found) - len(self.results) :], values)
            target = jnp.where(values[self.following] < self.count, self.blocks[0].number, self.done)
        place = jnp.where(here, target, values[self.place])
        values[self.place] = jnp.where(asked & ~here, self.done, place)
        values[self.turns] += np.int32(block.is_innermost)
        return values

    def take(self, asked: jax.Array, values: _Values) -> jax.Array:
        """Give lanes the next elements, and return which have got one."""
        number = values[self.following] + jnp.cumsum(asked, dtype=np.int32) - 1
        values[self.following] += jnp.sum(asked, dtype=np.int32)
        here = asked & (number < self.count)
        element = number if self.order is None else self.order[number].astype(np.int32)
        values[self.element] = jnp.where(here, element, values[self.element])
        return here

    def finish(self, here: jax.Array, found: Sequence[jax.Array], values: _Values) -> None:
        """Keep the results of the lanes' elements."""
        for v, y, is_summed in zip(self.results, found, self.summed, strict=True):
            if is_summed:
                values[v] += sums.of_rows(y, here)
            elif self.has_fixed_lanes:
                values[v] = _where(here, y, values[v])
            else:
                values[v] = values[v].at[jnp.where(here, values[self.element], self.size)].set(y, mode="drop")

    def compute(self, block: Block, here: jax.Array, given: _Values, atoms: Sequence[Any]) -> list[jax.Array]:
        """Return some of a block's values, ``(num_lanes, ...)``.

        A loop that is kept whole, and a call to the host, sees one of those here in the place of those elsewhere.
        """
        read = [*block.arguments, *(row for row, *_ in block.loads), *block.reads()]
        jaxpr = self.jaxpr.replace(
            constvars=[],
            invars=read,
            outvars=list(atoms),
            eqns=block.eqns,
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        if block.is_crowded:
            one = jnp.argmax(here)
            given |= {v: _where(here, given[v], given[v][one]) for v in read if v not in self.common}
        axes = [None if v in self.common else 0 for v in read]
        fn = jax.vmap(jax_api.jaxpr_as_fun(ClosedJaxpr(jaxpr, ())), axes, axis_size=self.num_lanes)
        return fn(*_of(read, given))


def _of(variables: Sequence[Any], values: _Values) -> list[jax.Array]:
    return [values[v] for v in variables]


def _where(here: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return rows of ``new`` for lanes that are here, else of ``old``, which may be one row for all."""
    with jax.enable_x64(True):
        return jax.vmap(jnp.where, (0, 0, 0 if old.ndim == new.ndim else None))(here, new, old)


def _variable(aval: Any, *lead: int) -> Any:
    return Var(ShapedArray((*lead, *aval.shape), aval.dtype))
