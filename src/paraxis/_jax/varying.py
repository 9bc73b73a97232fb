"""The values that vary along a batch, before anything runs: a function's results, and the ways that elements take."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from paraxis._jax import jax_api


def watched(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """Return ``x`` as it is, in a function under ``vmap``; ``note`` is told which leaves differ between elements.

    ``index`` is the element's number, or anything else that does differ: this vmap, and not one around it, then
    answers. It errs on one side only: leaves that differ are always found; some that would turn out equal, such as a
    sum passed round a ring by hand, are taken to differ.
    """

    @custom_vmap
    def watch(index: jax.Array, leaves: list[Any]) -> list[Any]:
        return leaves

    @watch.def_vmap
    def _(size: int, batched: Sequence[Any], index: jax.Array, leaves: list[Any]) -> Any:
        note(list(batched[1]))
        return leaves, batched[1]

    leaves, structure = jax.tree.flatten(x)
    return jax.tree.unflatten(structure, watch(index, leaves))


def batched(
    body: jax_api.ClosedJaxpr, in_axes: Sequence[int | None], size: int, name: str | None, names: dict[str, int]
) -> list[bool]:
    """Return, for each result of a body: whether it may differ along the batch in which these arguments do."""
    found: list[bool] = []

    def one(index: jax.Array, *args: Any) -> list[Any]:
        return watched(list(jax_api.jaxpr_as_fun(body)(*args)), index, found.extend)

    avals = [
        jax.ShapeDtypeStruct(a.shape if at is None else (size, *a.shape), a.dtype, weak_type=a.weak_type)
        for a, at in zip(body.in_avals, in_axes, strict=True)
    ]
    over = jax.vmap(one, in_axes=(0, *in_axes), axis_size=size, axis_name=name)
    jax_api.trace(over, [jax.ShapeDtypeStruct((size,), jnp.int32), *avals], names)
    return found


def uneven(
    jaxpr: jax_api.Jaxpr, varies: Sequence[bool], exchanged: Callable[[jax_api.JaxprEqn], bool | None]
) -> frozenset[int]:
    """Return the loops and branches, by ``id``, in which elements of a batch exchange and may go different ways.

    ``varies`` says which arguments differ between elements; ``exchanged(eqn)`` whether what an equation lets them
    exchange does, ``None`` if they exchange nothing. It errs on one side only: ways that differ are always found.
    """
    found: set[int] = set()

    def note(eqn: jax_api.JaxprEqn) -> None:
        if any(exchanges(body) for body in jax_api.subjaxprs(eqn)):
            found.add(id(eqn))

    def exchanges(body: jax_api.Jaxpr) -> bool:
        return any(exchanged(eqn) is not None or any(map(exchanges, jax_api.subjaxprs(eqn))) for eqn in body.eqns)

    def settled(run: Callable[[list[bool]], list[bool]], carry: list[bool]) -> list[bool]:
        while (after := [a or b for a, b in zip(carry, run(carry), strict=True)]) != carry:
            carry = after
        return carry

    def loop(eqn: jax_api.JaxprEqn, given: list[bool]) -> list[bool]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]

        def turn(carry: list[bool]) -> list[bool]:
            if parted := any(results(test, [*given[:of_test], *carry])):
                note(eqn)
                carry = [True] * len(carry)
            after = results(body, [*given[of_test : of_test + of_body], *carry])
            return [parted or differs for differs in after]

        return settled(turn, given[of_test + of_body :])

    def scan(eqn: jax_api.JaxprEqn, given: list[bool]) -> list[bool]:
        start, num_carry = jax_api.scan_parts(eqn)
        stop = start + num_carry
        outs: list[bool] = []

        def turn(carry: list[bool]) -> list[bool]:
            outs[:] = results(eqn.params["jaxpr"], [*given[:start], *carry, *given[stop:]])
            return outs[: len(carry)]

        return [*settled(turn, given[start:stop]), *outs[stop - start :]]

    def branches(eqn: jax_api.JaxprEqn, given: list[bool]) -> list[bool]:
        each = [results(branch, given[1:]) for branch in eqn.params["branches"]]
        if given[0]:
            note(eqn)
        return [given[0] or any(outs) for outs in zip(*each, strict=True)]

    def of(eqn: jax_api.JaxprEqn, given: list[bool]) -> list[bool]:
        if (differs := exchanged(eqn)) is not None:
            return [differs] * len(eqn.outvars)
        if (kind := {"while": loop, "scan": scan, "cond": branches}.get(eqn.primitive.name)) is not None:
            return kind(eqn, given)
        bodies = list(jax_api.subjaxprs(eqn))
        if len(bodies) == 1 and (len(bodies[0].invars), len(bodies[0].outvars)) == (len(given), len(eqn.outvars)):
            return results(bodies[0], given)
        for body in bodies:  # whatever it does with them
            results(body, [True] * len(body.invars))
        return [any(given) or bool(bodies)] * len(eqn.outvars)

    def results(body: Any, given: Sequence[bool]) -> list[bool]:
        body = getattr(body, "jaxpr", body)
        differs = dict(zip(body.invars, given, strict=True))

        def read(atom: Any) -> bool:
            return not isinstance(atom, jax_api.Literal) and differs.get(atom, False)

        for eqn in body.eqns:
            differs.update(zip(eqn.outvars, of(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in body.outvars]

    results(jaxpr, varies)
    return frozenset(found)


def contains(jaxpr: jax_api.Jaxpr, which: frozenset[int]) -> bool:
    """Return whether an equation is in a body, or in one inside it that is differentiated as it stands."""
    return any(
        id(eqn) in which
        or (not eqn.primitive.name.startswith("custom_") and any(contains(s, which) for s in jax_api.subjaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def in_step(
    eqn: jax_api.JaxprEqn,
    operands: Sequence[Any],
    run: Callable[[Any, Sequence[Any]], list[Any]],
    anyone: Callable[[jax.Array], jax.Array],
) -> list[Any]:
    """Return the results of a loop or branch that is uneven, with all elements in each branch and until the last turn.

    An element keeps what its own branch gives, and what it had when it left the loop: so ``vmap`` has it. ``run`` runs
    a body; ``anyone`` tells all whether one of them goes on.
    """
    if eqn.primitive.name == "cond":
        bodies = eqn.params["branches"]
        each = [run(branch, operands[1:]) for branch in bodies]
        return [jax.lax.select_n(operands[0], *ys) for ys in zip(*each, strict=True)]
    first, start = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]

    def state(values: Sequence[Any]) -> tuple[jax.Array, jax.Array, list[Any]]:
        (goes_on,) = run(eqn.params["cond_jaxpr"], [*operands[:first], *values])
        return anyone(goes_on.any()), goes_on, list(values)  # under vmap, several conditions, each of its own values

    def turn(before: tuple[jax.Array, jax.Array, list[Any]]) -> tuple[jax.Array, jax.Array, list[Any]]:
        _, goes_on, values = before
        after = run(eqn.params["body_jaxpr"], [*operands[first:start], *values])
        chosen = [jnp.where(_beside(goes_on, new), new, old) for new, old in zip(after, values, strict=True)]
        return state(chosen)

    begin = state([jnp.asarray(x) for x in operands[start:]])
    return jax.lax.while_loop(lambda s: s[0], turn, begin)[2]


def _beside(which: jax.Array, x: jax.Array) -> jax.Array:
    """Return conditions as they are told beside values, of which they are the leading dimensions."""
    return which.reshape(which.shape + (1,) * (x.ndim - which.ndim))
