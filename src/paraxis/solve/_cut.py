"""Programs that read rows on disk: cut at what reads them, which Python does; what is between is compiled.

A solver's iteration is written once, as a function that JAX traces. Where its rows are on disk, each pass over them is
one operation in the trace, ``px_pass``, which no device can carry out. So the trace becomes a list of steps: compiled
pieces, passes, and loops and branches around passes, which Python runs.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from paraxis._axes import arrays
from paraxis._core.programs import by_structure
from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, JaxprEqn, Literal
from paraxis.errors import LoweringError

PASS = "px_pass"

_Run = Callable[..., Sequence[Any]]


def compiled(closed: ClosedJaxpr) -> _Run:
    """Return a trace as a function of flat arguments: one program, or, if it reads rows on disk, several."""
    if not jax_api.holds(closed.jaxpr, PASS):
        return by_structure(closed)
    closed, consts = jax_api.without_constants(closed)
    return functools.partial(_run, closed.jaxpr.invars, _steps(closed), closed.jaxpr.outvars, consts)


class _Step(NamedTuple):
    """A part of a trace.

    Args:
        run: what computes it.
        operands, results: variables that it reads, or literals, and those that it makes.
        done: the variables that no later step reads, whose values may go.
    """

    run: _Run
    operands: list[Any]
    results: list[Any]
    done: set[Any]


def _steps(closed: ClosedJaxpr) -> list[_Step]:
    later = _variables(closed.jaxpr.outvars)
    steps = []
    for group in reversed([*_groups(closed.jaxpr.eqns)]):
        made = {v for eqn in group for v in eqn.outvars}
        read = _variables([v for eqn in group for v in eqn.invars]) - made
        if _reads(group[0]):
            run, operands, results = _by_python(group[0]), [*group[0].invars], [*group[0].outvars]
        else:
            operands, results = [*read], [v for eqn in group for v in eqn.outvars if v in later]
            run = by_structure(jax_api.part(closed, group, operands, results))
        steps.append(_Step(run, operands, results, (read | made) - later))
        later = (later - made) | read
    return steps[::-1]


def _groups(eqns: Sequence[JaxprEqn]) -> Iterator[list[JaxprEqn]]:
    for reads, group in itertools.groupby(eqns, _reads):
        together = [*group]
        yield from ([eqn] for eqn in together) if reads else [together]


def _reads(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == PASS or any(jax_api.holds(sub, PASS) for sub in jax_api.subjaxprs(eqn))


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {v for v in atoms if not isinstance(v, Literal)}


def _run(invars: Sequence[Any], steps: Sequence[_Step], outvars: Sequence[Any], consts: Any, *args: Any) -> list[Any]:
    values = dict(zip(invars, [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for step in steps:
        found = step.run(*arrays.ready([read(v) for v in step.operands]))
        values.update(zip(step.results, found, strict=True))
        for v in step.done:
            values.pop(v, None)
    return [read(v) for v in outvars]


def _by_python(eqn: JaxprEqn) -> _Run:
    params = eqn.params
    if eqn.primitive.name == PASS:
        return functools.partial(eqn.primitive.bind, **params)
    if eqn.primitive.name == "while":
        go_on, body = compiled(params["cond_jaxpr"]), compiled(params["body_jaxpr"])
        return functools.partial(_while, go_on, params["cond_nconsts"], body, params["body_nconsts"])
    if eqn.primitive.name == "cond":
        return functools.partial(_cond, [compiled(branch) for branch in params["branches"]])
    if eqn.primitive.name in ("jit", "pjit"):
        return compiled(params["jaxpr"])
    raise LoweringError(f"rows on disk are read within {eqn.primitive.name}; write it as a loop around px.solve's run")


def _while(go_on: _Run, num_cond: int, body: _Run, num_body: int, *operands: Any) -> Sequence[Any]:
    of_cond, rest = operands[:num_cond], operands[num_cond:]
    of_body, carry = rest[:num_body], rest[num_body:]
    while bool(go_on(*of_cond, *carry)[0]):
        carry = body(*of_body, *carry)
    return carry


def _cond(branches: Sequence[_Run], index: Any, *operands: Any) -> Sequence[Any]:
    return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
