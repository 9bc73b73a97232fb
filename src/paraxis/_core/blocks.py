"""The jaxpr of one element, cut into blocks of straight code where elements may part: at the ends of their loops.

Radul et al., *Automatically Batching Control-Intensive Programs for Modern Accelerators* (MLSys 2020, arXiv
1910.11141), give each element a program counter, from Python source; Dance et al., *Efficiently Vectorized MCMC on
Modern Accelerators* (ICML 2025, arXiv 2503.17405), write samplers as such state machines by hand. Here the jaxpr is
cut. A loop is, if its condition differs between elements, or if it holds a loop that is. Three kinds stay whole: loops
that count to a bound that all share; loops that are cheap beside the code around them, which cost more to part at than
to wait for; and those of which ``vmap`` has made one, within an element or around the map.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from paraxis._core.pytrees import select
from paraxis._core.record import OperandMask

_SHARE = 0.5
"""A loop stays whole if a turn of it costs less than this part of the code around it."""
_TURNS = 4
"""A loop whose number of turns is not known is priced as so many."""


_OF_A_BATCH = ("unvmap_any", "unvmap_all", "unvmap_max", "nonbatchable", "select_if_vmap")
"""Equinox's operations that ask about a batch. They have an ``impl`` of one element."""


class _Asked(NamedTuple):
    """What an element has been told of its batch: what it is of this element alone, and of all."""

    alone: Any
    of_all: Any


def alone(closed: ClosedJaxpr, env: Mapping[str, int]) -> ClosedJaxpr:
    """Return what one element computes without a batch, calls opened that hold loops.

    Elements that are out of step have no batch to ask about. But whether to call the host, as for an error, is asked of
    all that are in one block: a call that differs between them would be made for each.
    """

    def run(*args: Any) -> list[Any]:
        return [_alone(y) for y in jax_api.evaluate(closed, *args, opens=_opens, apply=_bind_alone)]

    return jax_api.dce(jax_api.trace(run, [jax_api.struct(a) for a in closed.in_avals], env)[0])[0]


def _bind_alone(eqn: JaxprEqn, *operands: Any) -> Sequence[Any]:
    name, values = eqn.primitive.name, [_alone(x) for x in operands]
    if name == "dce_sink":  # of checkify, in loops: keeps a value, and has done so
        return []
    if name in _OF_A_BATCH:
        is_itself = name != "select_if_vmap" and not np.shape(values[0])
        y = values[0] if is_itself else eqn.primitive.impl(*values, **eqn.params)
        return [_Asked(y, jax_api.bind(eqn, *values)[0]) if name.startswith("unvmap") else y]
    if name == "convert_element_type" and isinstance(operands[0], _Asked):
        return [_Asked(*(jax_api.bind(eqn, x)[0] for x in operands[0]))]
    if name == "cond" and any(map(jax_api.calls_back, jax_api.jaxprs_in_params(eqn.params))):
        values = [x.of_all if isinstance(x, _Asked) else x for x in operands]
    if name in ("while", "scan", "cond"):
        params = jax.tree.map(lambda value: alone(value, {}) if isinstance(value, ClosedJaxpr) else value, eqn.params)
        eqn = eqn.replace(params=params)
    return jax_api.bind(eqn, *values)


def _alone(x: Any) -> Any:
    return x.alone if isinstance(x, _Asked) else x


def _opens(eqn: JaxprEqn) -> bool:
    bodies = jax_api.jaxprs_in_params(eqn.params) if eqn.primitive.name in jax_api.CALLS else ()
    return any(jax_api.holds(body, "while", "pure_callback", *_OF_A_BATCH) for body in bodies)


# --- which loops to cut --------------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """A ``while`` or ``scan``: its bodies, and its operands by kind. A ``scan`` has no condition, and rows."""

    condition: ClosedJaxpr | None
    body: ClosedJaxpr
    of_condition: list[Any]
    of_body: list[Any]
    carry: list[Any]
    rows: list[Any]

    @classmethod
    def of(cls, eqn: JaxprEqn, operands: Sequence[Any]) -> "_Loop":
        """Split anything that is given for each operand: atoms, or whether they differ."""
        params, operands = eqn.params, list(operands)
        if eqn.primitive.name == "while":
            first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            bodies = params["cond_jaxpr"], params["body_jaxpr"]
            return cls(*bodies, operands[:first], operands[first:second], operands[second:], [])
        if "ft_in" in params:  # jax 0.12
            groups = [list(group) for group in params["ft_in"].update(operands).unpack()]
        else:
            first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
            groups = [operands[:first], operands[first:second], operands[second:]]
        return cls(None, params["jaxpr"], [], *groups)


_kept = functools.lru_cache(maxsize=1024)  # a body is asked about again and again


def _cuts(eqn: JaxprEqn, differ: Sequence[bool], around: float) -> bool:
    """Return whether an operation is a loop to cut, or holds one; ``around`` is the price of the code around it."""
    if eqn.primitive.name == "cond":
        return any(_cuts_in(branch.jaxpr, tuple(differ[1:]), around) for branch in eqn.params["branches"])
    if eqn.primitive.name not in ("while", "scan") or eqn.params.get("length") == 0:
        return False
    loop, (parts, of_body) = _Loop.of(eqn, differ), _in_loop(eqn, differ)
    if loop.condition is not None and loop.condition.out_avals[0].shape:  # of several, for which vmap made one
        return False
    body = loop.body.jaxpr
    is_worth_it = parts and _price(body) >= _SHARE * around and not _counts(eqn, differ)
    return is_worth_it or _cuts_in(body, of_body, _price(body, turns=0))


@_kept
def _cuts_in(jaxpr: Jaxpr, differ: OperandMask, around: float) -> bool:
    variables = _differing(jaxpr, differ)
    return any(_cuts(eqn, _marks(eqn.invars, variables), around) for eqn in jaxpr.eqns)


@_kept
def _differing(jaxpr: Jaxpr, differ: OperandMask) -> set[Any]:
    """Return the variables that differ between elements, if these arguments do."""
    variables = set(select(jaxpr.invars, differ))
    for eqn in jaxpr.eqns:
        of_operands = _marks(eqn.invars, variables)
        if eqn.primitive.name not in ("while", "scan"):
            of_results = [any(of_operands)] * len(eqn.outvars)
        else:
            loop, (_, of_body) = _Loop.of(eqn, of_operands), _in_loop(eqn, of_operands)
            of_results = of_body[len(loop.of_body) :] if loop.condition else _results(loop.body.jaxpr, of_body)
        variables.update(select(eqn.outvars, of_results))
    return variables


def _in_loop(eqn: JaxprEqn, differ: Sequence[bool]) -> tuple[bool, OperandMask]:
    """Return whether elements turn a loop differently often, and which arguments of its body differ."""
    loop, parts, before = _Loop.of(eqn, differ), False, None
    carry = loop.carry
    while carry != before:
        before = carry
        if loop.condition is not None:
            [parts] = _results(loop.condition.jaxpr, (*loop.of_condition, *carry))
        after = _results(loop.body.jaxpr, (*loop.of_body, *carry, *loop.rows))
        carry = [parts or a or b for a, b in zip(carry, after, strict=False)]
    return parts, (*loop.of_body, *carry, *loop.rows)


def _results(jaxpr: Jaxpr, differ: OperandMask) -> list[bool]:
    return _marks(jaxpr.outvars, _differing(jaxpr, differ))


@_kept
def _price(jaxpr: Jaxpr, turns: int = _TURNS) -> float:
    """Return roughly how many small operations a jaxpr is; a ``while`` turns so often."""
    total = 0.0
    for eqn in jaxpr.eqns:
        ins, outs = ([math.prod(v.aval.shape) for v in list[Any](atoms)] for atoms in (eqn.invars, eqn.outvars))
        size, bodies = sum(outs), list(jax_api.jaxprs_in_params(eqn.params))
        if eqn.primitive.name == "dot_general":
            size *= math.isqrt(math.prod(ins) // max(size, 1))  # what is contracted
        times = {"while": turns, "scan": eqn.params.get("length")}.get(eqn.primitive.name, 1)
        total += times * sum(_price(body, turns=turns) for body in bodies) if bodies else 1 + size / 64
    return total


def _marks(atoms: Sequence[Any], variables: Collection[Any]) -> list[bool]:
    """Return which atoms are variables of these."""
    return [not isinstance(v, Literal) and v in variables for v in atoms]


_COUNTING = ({"lt", "and", "convert_element_type"}, {"add", "convert_element_type"})
"""What the condition of a loop that counts is made of, and its next numbers are."""


def _counts(eqn: JaxprEqn, differ: Sequence[bool]) -> bool:
    """Return whether a ``while`` counts, by numbers that are known, up to bounds that all elements share."""
    loop, number = _Loop.of(eqn, differ), eqn.params["cond_nconsts"]
    test, read = jax_api.dce(eqn.params["cond_jaxpr"], unread=False)
    counters = read[number:]
    step, needed = jax_api.dce(loop.body, select(loop.body.jaxpr.outvars, counters), unread=False)
    is_apart = needed == [*[False] * len(loop.of_body), *counters] and not any(select(loop.of_condition, read[:number]))
    names = [{e.primitive.name for e in closed.eqns} for closed in (test, step)]
    is_known = all(primitives <= kinds for primitives, kinds in zip(names, _COUNTING, strict=True))
    return is_apart and is_known and set(step.jaxpr.outvars).isdisjoint(step.jaxpr.invars)


INDEX = ShapedArray((), np.dtype(np.int32))


@dataclasses.dataclass(eq=False)
class Block:
    """Straight code. It ends with assignments and a choice of where to go on.

    Attributes:
        number: its place in the program.
        eqns: the operations.
        moves: register and value: carries of loops and results of branches, assigned together.
        stores: array, index and value: ``array[index] = value``.
        choice: the number of the target, a boolean or an integer.
        targets: where a lane goes on; none: its element is done.
        results: of the element, if it is done.
        is_crowded: whether all lanes have a say in it: it holds a loop that the last one ends, or calls the host.
    """

    number: int
    eqns: list[JaxprEqn] = dataclasses.field(default_factory=list)
    moves: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    stores: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)
    choice: Any = dataclasses.field(default_factory=lambda: Literal(0, INDEX))
    targets: list["Block"] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)
    is_crowded: bool = False

    @property
    def is_innermost(self) -> bool:
        """Whether it is the body of a loop that holds no other."""
        return self in self.targets

    def reads(self) -> list[Any]:
        """Return the variables that it reads and others assign."""
        atoms = [*itertools.chain(*(eqn.invars for eqn in self.eqns), *(each[1:] for each in self.stores))]
        atoms += [*(atom for _, atom in self.moves), self.choice, *self.results]
        assigned = set(itertools.chain(*(eqn.outvars for eqn in self.eqns)))
        return [v for v in dict.fromkeys(atom for atom in atoms if isinstance(atom, Var)) if v not in assigned]

    def assigns(self) -> list[tuple[Any, Any]]:
        """Return the variables that it assigns, but for arrays of which it stores rows, each with its value."""
        return [*((v, v) for v in itertools.chain(*(eqn.outvars for eqn in self.eqns))), *self.moves]


class Program:
    """A function of one element, as :func:`alone` returns it, cut into blocks. There is one if no loop is to be cut.

    Attributes:
        blocks: in the order of the code; the first is the entry.
        arguments, shared: variables of the element's own operands, which are given to the entry, and of the others.
        constants: values of more variables.
        common: operations on what all elements share, carried out once.
    """

    def __init__(self, closed: ClosedJaxpr, shared: OperandMask) -> None:
        self.blocks, self.common, self.constants = list[Block](), list[JaxprEqn](), dict[Any, Any]()
        operands = [Var(v.aval) for v in closed.jaxpr.invars]
        self.arguments, self.shared = select(operands, shared, False), select(operands, shared)
        self._per_element, entry = set[Any](self.arguments), self.block()
        entry.moves += zip(self.arguments, self.arguments, strict=True)
        results, last = self.inline(closed, operands, entry, 0.0)
        last.results = results

    def block(self) -> Block:
        self.blocks.append(Block(len(self.blocks)))
        return self.blocks[-1]

    def variables(self, avals: Sequence[Any]) -> list[Any]:
        """Return new variables that each element has of its own."""
        self._per_element.update(variables := [Var(aval) for aval in avals])
        return variables

    def inline(self, closed: ClosedJaxpr, atoms: Sequence[Any], block: Block, around: float) -> tuple[list[Any], Block]:
        """Append a jaxpr to a block; return its results, and the block in which they are known."""
        jaxpr, consts = closed.jaxpr, [Var(v.aval) for v in closed.jaxpr.constvars]
        self.constants.update(zip(consts, closed.consts, strict=True))
        values = dict[Any, Any](zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *atoms], strict=True))
        for eqn in jaxpr.eqns:
            inputs = [v if isinstance(v, Literal) else values[v] for v in eqn.invars]
            if _cuts(eqn, _marks(inputs, self._per_element), around):
                cut = {"while": self.cut_while, "scan": self.cut_scan, "cond": self.cut_cond}[eqn.primitive.name]
                results, block = cut(eqn, inputs, block, around)
            else:
                results = self.append(block, eqn, inputs)
            values.update(zip(eqn.outvars, results, strict=True))
        return [v if isinstance(v, Literal) else values[v] for v in jaxpr.outvars], block

    def append(self, block: Block, eqn: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
        outvars: list[Any] = [Var(v.aval) for v in eqn.outvars]
        bodies, names = jax_api.jaxprs_in_params(eqn.params), ("while", "pure_callback")
        is_crowded = eqn.primitive.name in names or any(jax_api.holds(body, *names) for body in bodies)
        eqn = eqn.replace(invars=[*inputs], outvars=outvars)
        if is_crowded or any(_marks(inputs, self._per_element)):  # a shared loop that no element gets to need not end
            self._per_element.update(outvars)
            block.eqns.append(eqn)
            block.is_crowded |= is_crowded
        else:
            self.common.append(eqn)
        return outvars

    def cut_while(self, eqn: JaxprEqn, inputs: Sequence[Any], block: Block, _: float) -> tuple[list[Any], Block]:
        """Cut at the end of a turn. The condition is there and before the loop, so that a turn can be one block."""
        loop, carry = _Loop.of(eqn, inputs), self.variables([v.aval for v in eqn.outvars])
        [goes], block = self.inline(eqn.params["cond_jaxpr"], [*loop.of_condition, *loop.carry], block, math.inf)
        start = self.block()
        results, end = self.inline(loop.body, [*loop.of_body, *carry], start, _price(loop.body.jaxpr, turns=0))
        [again], end = self.inline(eqn.params["cond_jaxpr"], [*loop.of_condition, *results], end, math.inf)
        after = self.block()
        for last, values, choice in ((block, loop.carry, goes), (end, results, again)):
            last.moves += zip(carry, values, strict=True)
            last.choice, last.targets = choice, [after, start]
        return carry, after

    def cut_scan(self, eqn: JaxprEqn, inputs: Sequence[Any], block: Block, _: float) -> tuple[list[Any], Block]:
        """Cut likewise. The index of a row is a register, and rows of results are stored as they come."""
        loop, length, number = _Loop.of(eqn, inputs), eqn.params["length"], len(_Loop.of(eqn, inputs).carry)
        first, step, stop = (length - 1, -1, -1) if eqn.params["reverse"] else (0, 1, length)
        outputs, [index] = self.variables([v.aval for v in eqn.outvars]), self.variables([INDEX])
        start = self.block()
        row_of = [jax_api.call(jax.jit(lambda x, i: x[i]), x, index) for x in loop.rows]
        inner = [*loop.of_body, *outputs[:number], *(self.append(start, at, at.invars)[0] for at in row_of)]
        results, end = self.inline(loop.body, inner, start, _price(loop.body.jaxpr, turns=0))
        end.stores += zip(outputs[number:], [index] * len(outputs[number:]), results[number:], strict=True)
        to_next = jax_api.call(jax.jit(lambda index: (index + step, index + step != stop)), index)
        after, [following, again] = self.block(), self.append(end, to_next, [index])
        block.moves += zip([*outputs[:number], index], [*loop.carry, Literal(np.int32(first), INDEX)], strict=True)
        end.moves += zip([*outputs[:number], index], [*results[:number], following], strict=True)
        block.targets, end.choice, end.targets = [start], again, [after, start]
        return outputs, after

    def cut_cond(self, eqn: JaxprEqn, inputs: Sequence[Any], block: Block, around: float) -> tuple[list[Any], Block]:
        results, (block.choice, *operands) = self.variables([v.aval for v in eqn.outvars]), inputs
        ends = list[Block]()
        for branch in eqn.params["branches"]:
            block.targets.append(self.block())
            values, end = self.inline(branch, operands, block.targets[-1], around)
            end.moves += zip(results, values, strict=True)
            ends.append(end)
        after = self.block()
        for end in ends:
            end.targets.append(after)
        return results, after
