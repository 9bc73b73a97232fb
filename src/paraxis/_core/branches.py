"""The branches that elements take apart although they exchange values in them: these have no derivative.

All elements take part in an exchange, and each keeps what its own branch gives, as under ``jax.vmap``. The transpose
of a branch is a branch: an element that does not take it sends nothing back to the others. So JAX's derivative is not
the function's, while values, forward derivatives, loops, and branches that all take alike are right.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paraxis._core import jax_api, varying
from paraxis._core.axis import Axis
from paraxis.errors import AxisError


def refuse_uneven(body: jax_api.ClosedJaxpr, differ: Sequence[bool], axis: Axis, names: Mapping[str, int]) -> None:
    """Refuse the derivative of a body whose elements exchange values in a branch that they may take apart.

    ``differ`` says which arguments elements do not share, ``names`` the sizes of all axes that the body may name. A
    ``vmap`` of a map asks as well: JAX makes a select of its branches, in which nobody finds them again.

    Raises:
        AxisError: with the line of the branch.
    """
    for eqn in _uneven(body.jaxpr, list(differ), axis, dict(names)):
        at = f", at {line}" if (line := jax_api.line_of(eqn)) else ""
        raise AxisError(
            f"elements of axis {axis.name!r} exchange values in a branch that each takes by itself{at}: its derivative "
            f"in JAX is not the function's. Exchange before the branch, or choose a result: jnp.where(taken, a, b)"
        )


def _uneven(jaxpr: Any, differ: list[bool], axis: Axis, names: dict[str, int]) -> Iterator[jax_api.JaxprEqn]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    eqns = [eqn for eqn in jaxpr.eqns if any(_exchanges(inner, axis.name) for inner in jax_api.subjaxprs(eqn))]
    if not eqns:
        return
    values = [v for eqn in eqns for v in (*eqn.invars, *eqn.outvars)]
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], outvars=values, debug_info=info)
    in_axes = [None] * len(jaxpr.constvars) + [0 if differs else None for differs in differ]
    found = iter(varying.batched(jax_api.ClosedJaxpr(whole, ()), in_axes, axis.size, axis.name, names))
    for eqn in eqns:
        given, after = [next(found) for _ in eqn.invars], [next(found) for _ in eqn.outvars]
        if eqn.primitive.name == "cond" and given.pop(0):
            yield eqn
        for inner, args in _bodies(eqn, given, after):
            yield from _uneven(inner, args, axis, names)


def _bodies(eqn: jax_api.JaxprEqn, given: list[bool], after: list[bool]) -> Iterator[tuple[Any, list[bool]]]:
    """Yield the bodies of an equation, and which of their arguments differ: of what a loop carries, in the end."""
    if eqn.primitive.name == "while":
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        yield eqn.params["body_jaxpr"], [*given[of_test : of_test + of_body], *after]
    elif eqn.primitive.name == "scan":
        start, num_carry = jax_api.scan_parts(eqn)
        yield eqn.params["jaxpr"], [*given[:start], *after[:num_carry], *given[start + num_carry :]]
    else:
        for inner in jax_api.subjaxprs(eqn):
            yield inner, given if len(given) == len(inner.invars) else [True] * len(inner.invars)


def _exchanges(jaxpr: jax_api.Jaxpr, axis: str) -> bool:
    for eqn in jaxpr.eqns:
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        is_named = axis in named if isinstance(named, (tuple, list)) else axis == named
        if is_named and eqn.primitive.name != "axis_index":
            return True
        if any(_exchanges(inner, axis) for inner in jax_api.subjaxprs(eqn)):
            return True
    return False
