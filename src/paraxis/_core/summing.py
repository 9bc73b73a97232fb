"""The sum over elements of what a function gives, without first having it for each element.

The gradient of one element's loss with respect to shared weights ends in a product, ``inputs.T @ errors``. Where only
the sum over elements is wanted, the elements' dimension can be contracted in that same product:

    sum over i of (A_i @ B_i)  =  [A_1 A_2 …] @ [B_1; B_2; …]

which costs the same arithmetic, never holds a gradient per element, and is one large product instead of many small
ones. So the sum is pushed from the results back through the linear operations at the end of the function, until it
meets a product of two values that depend on the element, or an operation that is not linear.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, JaxprEqn, Literal

_LINEAR = frozenset(
    ("neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy")
)
_ADDING = frozenset(("add", "add_any", "sub"))
_PRODUCT = frozenset(("dot_general",))
_LOOPS = frozenset(("while", "scan"))


@dataclasses.dataclass(frozen=True)
class Term:
    """What is summed: each element's result, made ready, times its weight, if its mask says so."""

    prepare: Callable[[jax.Array], jax.Array]
    masked: bool
    weighted: bool

    def __call__(self, rows: jax.Array, *extras: jax.Array) -> jax.Array:
        """Rows ``(count, ...)`` → rows; ``extras`` are the mask and the weights, ``(count,)``, as far as there are."""
        return self.keep(self.weigh(self.prepare(rows), extras), extras)

    @property
    def num_extras(self) -> int:
        return self.masked + self.weighted

    def element(self, y: jax.Array, *extras: jax.Array) -> jax.Array:
        """The same for one element: ``y`` of any shape, the extras scalars."""
        if jnp.issubdtype(y.dtype, jax.dtypes.extended):  # PRNG keys have no sum
            return jnp.zeros(())
        y = self.prepare(y)
        if self.weighted:
            y = y * extras[-1].astype(weighted_dtype(y, extras[-1]))
        return jnp.where(extras[0], y, jnp.zeros((), y.dtype)) if self.masked else y

    def weigh(self, rows: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
        return rows * per_row(extras[-1].astype(weighted_dtype(rows, extras[-1])), rows) if self.weighted else rows

    def keep(self, rows: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
        return masked(extras[0], rows) if self.masked else rows


def _as_is(x: jax.Array) -> jax.Array:
    return x


PLAIN = Term(_as_is, masked=False, weighted=False)


def weighted_dtype(rows: jax.Array, weights: jax.Array) -> Any:
    """The dtype of weighted rows: their own, but complex where the weights are."""
    return jnp.promote_types(rows.dtype, weights.dtype) if jnp.iscomplexobj(weights) else rows.dtype


def per_row(values: jax.Array, rows: jax.Array) -> jax.Array:
    return values.reshape(values.shape + (1,) * (rows.ndim - 1))


def masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Rows with zeros where the mask is ``False``; no mask: as they are."""
    return rows if mask is None else jnp.where(per_row(mask, rows), rows, jnp.zeros((), rows.dtype))


def total(rows: jax.Array, real: jax.Array | None, term: Term, extras: Sequence[jax.Array]) -> jax.Array:
    """The sum over real rows of a term."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.extended):  # PRNG keys have no sum
        return jnp.zeros(())
    ready = term(rows, *extras)
    return jnp.sum(masked(real, ready), axis=0, dtype=ready.dtype)


@dataclasses.dataclass(frozen=True)
class Split:
    """A function cut in two: ``head`` gives what the sums are made of, the ``tail`` equations act on sums.

    ``frontier`` are the head's results: variables and whether they depend on the element.
    """

    head: ClosedJaxpr
    frontier: tuple[tuple[Any, bool], ...]
    tail: tuple[JaxprEqn, ...]
    outputs: tuple[Any, ...]
    summed: tuple[bool, ...]

    def sums(
        self, values: Sequence[jax.Array], count: int, real: jax.Array | None, term: Term, extras: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The results, summed over all real rows where they are to be, from the head's results for ``count`` rows."""
        rows = {var: x for (var, _), x in zip(self.frontier, values, strict=True)}
        depends = dict(self.frontier)
        summed: dict[Any, jax.Array] = {}

        def every(var: Any) -> jax.Array:
            return rows[var] if depends[var] else jnp.broadcast_to(rows[var], (count, *rows[var].shape))

        def sum_of(var: Any) -> jax.Array:
            if var not in summed:
                summed[var] = total(every(var), real, term, extras)
            return summed[var]

        def clean(var: Any) -> jax.Array:
            return term.keep(masked(real, rows[var]), extras)

        def operand(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            return rows[atom] if depends.get(atom) is False else sum_of(atom)

        for eqn in self.tail:
            if eqn.primitive.name == "dot_general" and all(depends.get(v) for v in eqn.invars):
                left, right = (clean(v) for v in eqn.invars)
                result = _contract(eqn, term.weigh(left, extras), right)
            else:
                result = _bind(eqn, [operand(v) for v in eqn.invars])
            summed[eqn.outvars[0]] = result
        return [
            sum_of(var) if is_summed else every(var) for var, is_summed in zip(self.outputs, self.summed, strict=True)
        ]


def split(closed: ClosedJaxpr, depends: Sequence[bool], summed: Sequence[bool] | None = None) -> Split | None:
    """Cut a function of one element.

    ``depends`` says which arguments differ between elements, ``summed`` which results are to be sums, if not all are.

    Returns:
        ``None`` if the sum meets no product, so that there is nothing to gain, or if the function loops.
    """
    if _has(closed.jaxpr, _LOOPS) or not _has(closed.jaxpr, _PRODUCT):
        return None
    closed = _inlined(closed)
    jaxpr = closed.jaxpr
    varying = {v for v, differs in zip(jaxpr.invars, depends, strict=True) if differs}
    for eqn in jaxpr.eqns:
        if any(v in varying for v in eqn.invars if not isinstance(v, Literal)):
            varying.update(eqn.outvars)
    outputs = tuple(jaxpr.outvars)
    if any(isinstance(v, Literal) for v in outputs):
        return None

    wanted_sums = tuple(summed) if summed is not None else (True,) * len(outputs)
    whole: set[Any] = {
        v for v, s in zip(outputs, wanted_sums, strict=True) if not s or v not in varying or not _summable(v)
    }
    as_sum: set[Any] = {v for v in outputs if v not in whole}
    sources: dict[Any, bool] = dict.fromkeys(whole, True)
    head: list[JaxprEqn] = []
    tail: list[JaxprEqn] = []
    folds = 0
    for eqn in reversed(jaxpr.eqns):
        wanted = [v for v in eqn.outvars if v in as_sum]
        if wanted and not any(v in whole for v in eqn.outvars):
            demands = _demands(eqn, varying)
            if demands is not None:
                summed, needed = demands
                folds += eqn.primitive.name == "dot_general" and not summed
                as_sum.update(summed)
                for v in needed:
                    sources[v] = v in varying
                    whole.add(v)
                tail.append(eqn)
                continue
        if wanted or any(v in whole for v in eqn.outvars):  # else nobody needs what it gives
            sources.update((v, True) for v in wanted)
            whole.update(v for v in eqn.invars if not isinstance(v, Literal))
            head.append(eqn)
    if not folds:
        return None
    sources.update((v, True) for v in jaxpr.invars if v in as_sum)
    rebuilt = jax_api.rebuilt(closed, list(reversed(head)), list(sources))
    return Split(rebuilt, tuple(sources.items()), tuple(reversed(tail)), outputs, wanted_sums)


def _demands(eqn: JaxprEqn, varying: set[Any]) -> tuple[list[Any], list[Any]] | None:
    """What an equation needs to act on sums: operands as sums, and operands as they are. ``None``: it cannot."""
    name = eqn.primitive.name
    operands: list[Any] = [v for v in eqn.invars if not isinstance(v, Literal)]
    if not all(map(_summable, (*operands, *eqn.outvars))):
        return None
    differing = [v for v in operands if v in varying]
    equal = [v for v in operands if v not in varying]
    if name in _LINEAR and len(operands) == 1 and _dtype(operands[0]) == _dtype(eqn.outvars[0]):
        return operands, []
    if name in _ADDING and len(differing) == len(eqn.invars):
        return differing, []
    if (name == "mul" and len(differing) == 1) or (name == "div" and differing == [eqn.invars[0]]):
        return differing, equal
    if name == "dot_general" and len(set(operands)) == 2:
        return ([], differing) if not equal else (differing, equal)
    return None


def _summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    dtype = _dtype(var)
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _contract(eqn: JaxprEqn, left: jax.Array, right: jax.Array) -> jax.Array:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    contracted = tuple((0, *(d + 1 for d in dims)) for dims in (lc, rc))
    batched = tuple(tuple(d + 1 for d in dims) for dims in (lb, rb))
    return _bind(eqn, [left, right], dimension_numbers=(contracted, batched))


def _bind(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> jax.Array:
    return jax_api.bind(eqn, {**eqn.params, **changed}, operands)[0]


def _has(jaxpr: jax_api.Jaxpr, names: frozenset[str]) -> bool:
    return any(
        eqn.primitive.name in names or any(_has(sub, names) for sub in jax_api.subjaxprs(eqn)) for eqn in jaxpr.eqns
    )


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function without the boundaries of inner ``jit`` calls that hold a product."""

    def is_call(eqn: JaxprEqn) -> bool:
        return eqn.primitive.name in ("jit", "pjit") and any(_has(sub, _PRODUCT) for sub in jax_api.subjaxprs(eqn))

    if not any(map(is_call, closed.jaxpr.eqns)):
        return closed
    return jax_api.trace(lambda *args: jax_api.evaluate(closed, args, is_call), closed.in_avals, {})[0]
