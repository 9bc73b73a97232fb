"""Lanes: the elements of one device, which do not wait for each other in loops.

A lane has a place in the program, the number of the element that it works on, and the values that are live between
blocks. The body of an innermost loop is repeated until lanes have left it; then each other block in which a lane is
runs once, in the order of the program, so that a lane which leaves a loop may be in it again at the next turn. A lane
whose element is done takes the next one. Lanes that are elsewhere compute on, as by ``vmap``, and nothing of it is
kept. With as many lanes as elements, an innermost body turns as often as the element that needs it most. With fewer,
an eighth of them may wait for the others, since to take an element costs as much as several turns.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, blocks, jax_api, sums
from paraxis._core.blocks import Block, Program
from paraxis._core.jax_api import ClosedJaxpr, Literal
from paraxis._core.pytrees import select
from paraxis._core.record import Map
from paraxis.errors import AxisError


def prepare(m: Map, env: Mapping[str, int]) -> tuple[Map, Program | None]:
    """Return a map and its program; one for ``vmap`` and ``None`` if no loop is cut, or elements lie over devices."""
    m = m._replace(body=blocks.alone(m.body, env))
    if jax_api.has_effects(m.body.jaxpr):
        raise AxisError(
            f"axis {m.placement.axis.name!r} has lowering='lanes', so an element's effects would come in an order that "
            f"nobody knows: {', '.join(type(effect).__name__ for effect in m.body.effects)}; leave the lowering out"
        )
    program, is_divided = Program(m.body, m.shared), any(jax_api.struct(a).sharding for a in m.body.in_avals)
    return (m, program) if len(program.blocks) > 1 and not is_divided else (m._replace(lowering="vmap"), None)


def run(m: Map, program: Program, *operands: jax.Array) -> list[jax.Array]:
    """Run a device's elements; a last operand says which are real, if not all are: no others are run.

    Operands ``(num_local, ...)``, or ``(...)`` if shared. Results likewise, or sums ``(...)`` of a wide dtype.
    """
    num_local, real = m.placement.num_local, next(iter(operands[len(m.shared) :]), None)
    num_lanes = min(m.placement.axis.at_once or num_local, num_local)
    return Machine(m, program, operands[: len(m.shared)], num_lanes, real).run().results


class State(NamedTuple):
    """What changes.

    Attributes:
        place: the number of the block in which each lane is; after the last: there is no element left.
        element: the number of the element that each lane works on.
        following: the number of the element to be taken next.
        live: values of variables that one block assigns and another reads, ``(num_lanes, ...)``.
        results: rows ``(num_local, ...)``, or sums.
        turns: of innermost bodies, ``(num_lanes,)``: those that each lane needed; ``all_turns``: that there were.
    """

    place: jax.Array
    element: jax.Array
    following: jax.Array
    live: list[jax.Array]
    results: list[jax.Array]
    turns: jax.Array
    all_turns: jax.Array


class Machine:
    """A program, and what it is given. Lanes that are ``in_step`` wait for each other as by ``vmap``: it is counted."""

    def __init__(
        self, m: Map, program: Program, operands: Sequence[Any], num_lanes: int, real: Any, *, in_step: bool = False
    ) -> None:
        self.blocks, self.done, self.num_lanes, self.m = program.blocks, len(program.blocks), num_lanes, m
        self.turn = self.turn_of_vmap if in_step else self.turn_of_lanes
        real = jnp.ones(m.placement.num_local, bool) if real is None else real
        self.order, self.count = jnp.argsort(~real, stable=True), jnp.sum(real, dtype=np.int32)  # real ones first
        self.common = {**program.constants, **dict(zip(program.shared, select(operands, m.shared), strict=True))}
        for eqn in program.common:
            inputs = [v.val if isinstance(v, Literal) else self.common[v] for v in eqn.invars]
            self.common.update(zip(eqn.outvars, jax_api.bind(eqn, *inputs), strict=True))
        self.rows = dict[Any, Any](zip(program.arguments, select(operands, m.shared, False), strict=True))
        read = {v for block in self.blocks[1:] for v in block.reads()}
        stored = [array for block in self.blocks for array, *_ in block.stores]
        assigned = [*(v for block in self.blocks for v, _ in block.assigns()), *stored]
        self.live = [v for v in dict.fromkeys(assigned) if v in read]

    def run(self) -> State:
        """Return the last state."""
        lanes, size, avals = self.num_lanes, self.m.placement.num_local, self.m.body.out_avals
        outs = zip(avals, self.m.summed, strict=True)
        live = [_zeros(v.aval, lanes) for v in self.live]
        results = [_zeros(a.update(dtype=sums.wide(a.dtype))) if s else _zeros(a, size) for a, s in outs]
        of_lanes, one = jnp.zeros(lanes, np.int32), jnp.zeros((), np.int32)
        start = State(of_lanes, of_lanes, one, live, results, of_lanes, one)
        return jax.lax.while_loop(lambda state: jnp.any(state.place < self.done), self.turn, start)

    def turn_of_vmap(self, state: State) -> State:
        """Run the first block in which a lane is: whoever has left a loop, or taken another branch, waits after it."""
        return jax.lax.switch(jnp.min(state.place), [functools.partial(self.step, b) for b in self.blocks], state)

    def turn_of_lanes(self, state: State) -> State:
        """Visit all blocks, from the first innermost body on: who leaves it may be back before the next turn."""
        first = next((block.number for block in self.blocks if block.is_innermost), 0)
        for block in [*self.blocks[first:], *self.blocks[:first]]:
            if block.is_innermost:
                state = self.repeat(block, state)
            else:
                step, is_there = functools.partial(self.step, block), jnp.any(state.place == block.number)
                state = jax.lax.cond(is_there, step, lambda state: state, state)
        return state

    def repeat(self, block: Block, state: State) -> State:
        """Run an innermost body until lanes have left it; while there are elements to take, an eighth may wait."""
        alive = jnp.sum(state.place < self.done, dtype=np.int32)
        most = jnp.where(state.following < self.count, max(1, self.num_lanes // 8), 1).astype(np.int32)
        goes = lambda carry: alive - jnp.sum(carry[1].place == block.number, dtype=np.int32) < carry[0]  # noqa: E731
        step = lambda carry: (jnp.minimum(alive, most), self.step(block, carry[1]))  # noqa: E731
        return jax.lax.while_loop(goes, step, (alive, state))[1]  # at least once, if a lane is in it

    def step(self, block: Block, state: State) -> State:
        """Run a block for the lanes that are in it."""
        asked, is_entry = state.place == block.number, block.number == 0
        here, state = self.take(asked, state) if is_entry else (asked, state)
        live = dict(zip(self.live, state.live, strict=True))
        env = {**live, **self.common, **{v: x[state.element] for v, x in self.rows.items() if is_entry}}
        pairs = [(v, atom) for v, atom in block.assigns() if v in live]
        stores = [each for each in block.stores if each[0] in live]
        atoms = [*(atom for _, atom in pairs), *(atom for *_, atom in stores), *block.results, block.choice]
        *results, choice = self.compute(block, here, env, atoms)
        live |= {v: _where(here, y, live[v]) for (v, _), y in zip(pairs, results, strict=False)}
        for (array, index, _), y in zip(stores, results[len(pairs) :], strict=False):
            at = jnp.where(here, env[index], live[array].shape[1])
            live[array] = live[array].at[np.arange(self.num_lanes), at].set(y, mode="drop")
        if block.is_innermost:
            state = state._replace(turns=state.turns + here.astype(np.int32), all_turns=state.all_turns + np.int32(1))
        state = state._replace(live=[*live.values()])
        if block.targets:
            target = jnp.asarray([target.number for target in block.targets], np.int32)[choice.astype(np.int32)]
        else:
            target = jnp.where(state.following < self.count, 0, self.done)
            state = state._replace(results=self.finished(here, results[len(results) - len(state.results) :], state))
        place = jnp.where(here, target, jnp.where(asked, self.done, state.place))
        return state._replace(place=place.astype(np.int32))

    def take(self, asked: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Give lanes the next elements, and return which have got one."""
        number = state.following + jnp.cumsum(asked, dtype=np.int32) - 1
        here = asked & (number < self.count)
        element = jnp.where(here, self.order[number].astype(np.int32), state.element)
        return here, state._replace(element=element, following=state.following + jnp.sum(asked, dtype=np.int32))

    def finished(self, here: jax.Array, rows: Sequence[jax.Array], state: State) -> list[jax.Array]:
        """Return the results with those of the lanes' elements."""
        at = jnp.where(here, state.element, self.m.placement.num_local)
        triples = zip(state.results, rows, self.m.summed, strict=True)
        return [x + sums.of_rows(y, here) if s else x.at[at].set(y, mode="drop") for x, y, s in triples]

    def compute(self, block: Block, here: jax.Array, env: Mapping[Any, Any], atoms: Sequence[Any]) -> list[jax.Array]:
        """Return some of a block's values, ``(num_lanes, ...)``."""
        read, jaxpr = block.reads(), self.m.body.jaxpr
        info = jaxpr.debug_info.with_unknown_names()
        jaxpr = jaxpr.replace(constvars=[], invars=read, outvars=[*atoms], eqns=block.eqns, debug_info=info)
        inputs, axes = [env[v] for v in read], [None if v in self.common else 0 for v in read]
        if block.is_crowded:  # its loop or its call sees one of the lanes here in the place of those elsewhere
            one = jnp.argmax(here)
            inputs = [x if at is None else _where(here, x, x[one]) for x, at in zip(inputs, axes, strict=True)]
        return jax.vmap(jax_api.jaxpr_as_fun(ClosedJaxpr(jaxpr, ())), axes, axis_size=self.num_lanes)(*inputs)


def _where(here: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return rows of ``new`` for lanes that are here, else of ``old``, which may be one row for all."""
    with jax.enable_x64(True):
        return jax.vmap(jnp.where, (0, 0, 0 if old.ndim == new.ndim else None))(here, new, old)


def _zeros(aval: Any, *lead: int) -> jax.Array:
    return arrays.zeros(jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype))
