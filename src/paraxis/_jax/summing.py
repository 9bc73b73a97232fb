"""The sum over elements of what a function gives, without first having it for each element.

The gradient of one element's loss with respect to shared weights ends in a product, ``inputs.T @ errors``. Where only
the sum over elements is wanted, the elements' dimension can be contracted in that same product:

    sum over i of (A_i @ B_i)  =  [A_1 A_2 …] @ [B_1; B_2; …]

which costs the same arithmetic, never holds a gradient per element, and is one large product instead of many small
ones. So the sum is pushed from the results back through the linear operations at the end of the function, until it
meets a product of two values that depend on the element, or an operation that is not linear. A mask or a weight per
element, through which it passes, goes with it as a factor: ``sum w_i (A_i @ B_i)`` has ``w_i A_i`` for ``A_i``.

The function is looked at before it is vectorised, where the elements' dimension is in nobody's way. What is not known
here is left as it is, and then summed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, JaxprEqn, Literal

_LINEAR = frozenset(
    ("neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy")
)
_COPYING = frozenset(("broadcast_in_dim", "reshard"))  # inside of shard_map, JAX reshards constants
_ADDING = frozenset(("add", "add_any", "sub"))
_PRODUCT = frozenset(("dot_general",))
_LOOPS = frozenset(("while", "scan"))
_ENTERED = _LOOPS | {"cond", "checkpoint", "remat2"}


class Factor(NamedTuple):
    """A number per element: a weight, or a mask, where ``False`` means zero whatever else there is."""

    is_mask: bool
    variable: Any


Factors = tuple[Factor, ...]
"""The outermost first."""


def masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Return rows with zeros where the mask is ``False``; no mask: as they are."""
    return rows if mask is None else jnp.where(per_row(mask, rows), rows, jnp.zeros((), rows.dtype))


def per_row(values: jax.Array, rows: jax.Array) -> jax.Array:
    return values.reshape(values.shape + (1,) * (rows.ndim - 1))


def total(rows: jax.Array, real: jax.Array | None) -> jax.Array:
    """Return the sum over real rows."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.extended):  # PRNG keys have no sum
        return jnp.zeros(())
    return jnp.sum(masked(real, rows), axis=0, dtype=rows.dtype)


@dataclasses.dataclass(frozen=True)
class Split:
    """A function cut in two: ``head`` gives what the sums are made of, the ``tail`` steps act on sums.

    ``frontier`` are the head's results: variables and whether they depend on the element.
    """

    head: ClosedJaxpr
    frontier: tuple[tuple[Any, bool], ...]
    tail: tuple["_Step", ...]
    outputs: tuple[Any, ...]
    summed: tuple[bool, ...]

    def sums(self, values: Sequence[jax.Array], count: int, real: jax.Array | None, *, merge: bool) -> list[jax.Array]:
        """Return the results, those to be summed over all real rows, from the head's results for ``count`` rows.

        ``merge``: as :func:`in_merged_products` does.
        """
        rows = {var: x for (var, _), x in zip(self.frontier, values, strict=True)}
        depends = dict(self.frontier)
        summed: dict[tuple[Any, Factors], jax.Array] = {}

        def every(var: Any) -> jax.Array:
            return rows[var] if depends[var] else jnp.broadcast_to(rows[var], (count, *rows[var].shape))

        def scaled(x: jax.Array, factors: Factors) -> jax.Array:
            for is_mask, variable in reversed(factors):
                by = rows[variable]
                x = masked(by, x) if is_mask else x * per_row(by, x)
            return x

        def sum_of(var: Any, factors: Factors) -> jax.Array:
            if (var, factors) not in summed:
                summed[var, factors] = total(scaled(every(var), factors), real)
            return summed[var, factors]

        def operand(atom: Any, factors: Factors) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            return rows[atom] if depends.get(atom) is False else sum_of(atom, factors)

        for step in self.tail:
            eqn, factors, rule = step
            if rule.folds:
                masks = tuple(factor for factor in factors if factor.is_mask)
                left = masked(real, scaled(rows[eqn.invars[0]], factors))
                right = masked(real, scaled(rows[eqn.invars[1]], masks))
                result = _contract(eqn, left, right, merge=merge)
            elif rule.factor is not None:
                result = sum_of(rule.summed[0], (*factors, rule.factor))
            else:
                result = jax_api.bind(eqn, eqn.params, [operand(v, factors) for v in eqn.invars])[0]
            summed[eqn.outvars[0], factors] = result
        return [
            sum_of(var, ()) if is_summed else every(var)
            for var, is_summed in zip(self.outputs, self.summed, strict=True)
        ]


class _Rule(NamedTuple):
    """An equation's way to act on sums: operands as sums, times a factor of its own, and operands as they are."""

    summed: Sequence[Any] = ()
    whole: Sequence[Any] = ()
    factor: Factor | None = None
    folds: bool = False


class _Step(NamedTuple):
    eqn: JaxprEqn
    factors: Factors
    rule: _Rule


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
    rules = _Rules(jaxpr, depends)
    outputs = tuple(jaxpr.outvars)
    if any(isinstance(v, Literal) for v in outputs):
        return None

    wanted_sums = tuple(summed) if summed is not None else (True,) * len(outputs)
    whole: set[Any] = {
        v for v, s in zip(outputs, wanted_sums, strict=True) if not s or v not in rules.varying or not _summable(v)
    }
    as_sum: dict[Any, list[Factors]] = {v: [()] for v in outputs if v not in whole}
    sources: dict[Any, bool] = dict.fromkeys(whole, True)
    head: list[JaxprEqn] = []
    tail: list[_Step] = []
    for eqn in reversed(jaxpr.eqns):
        wanted = [v for v in eqn.outvars if v in as_sum]
        rule = rules.of(eqn) if wanted and not any(v in whole for v in eqn.outvars) else None
        if rule is not None:
            for factors in as_sum[wanted[0]]:
                tail.append(_Step(eqn, factors, rule))
                inner = factors if rule.factor is None else (*factors, rule.factor)
                for v in rule.summed:
                    if inner not in as_sum.setdefault(v, []):
                        as_sum[v].append(inner)
            for v in rule.whole:
                sources[v] = v in rules.varying
                whole.add(v)
        elif wanted or any(v in whole for v in eqn.outvars):  # else nobody needs what it gives
            sources.update((v, True) for v in wanted)
            whole.update(v for v in eqn.invars if not isinstance(v, Literal))
            head.append(eqn)
    if not any(step.rule.folds for step in tail):
        return None
    sources.update((v, True) for v in jaxpr.invars if v in as_sum)
    rebuilt = jax_api.rebuilt(closed, list(reversed(head)), list(sources))
    return Split(rebuilt, tuple(sources.items()), tuple(reversed(tail)), outputs, wanted_sums)


class _Rules:
    """The equations of a body that can act on sums."""

    def __init__(self, jaxpr: jax_api.Jaxpr, depends: Sequence[bool]) -> None:
        self.varying = {v for v, differs in zip(jaxpr.invars, depends, strict=True) if differs}
        self._zeros: set[Any] = set()
        for eqn in jaxpr.eqns:
            if any(v in self.varying for v in _variables(eqn)):
                self.varying.update(eqn.outvars)
            elif eqn.primitive.name in _COPYING and self._is_zero(eqn.invars[0]):
                self._zeros.update(eqn.outvars)

    def of(self, eqn: JaxprEqn) -> _Rule | None:
        """Return what an equation needs to act on sums. ``None``: it cannot."""
        name, operands = eqn.primitive.name, _variables(eqn)
        differing = [v for v in operands if v in self.varying]
        equal = [v for v in operands if v not in self.varying]
        if name == "select_n":
            return self._of_choice(eqn)
        if not all(map(_summable, (*operands, *eqn.outvars))):
            return None
        if name in _LINEAR and len(operands) == 1 and _dtype(operands[0]) == _dtype(eqn.outvars[0]):
            return _Rule(operands)
        if name in _ADDING and len(differing) == len(eqn.invars):
            return _Rule(differing)
        if (name == "mul" and len(differing) == 1) or (name == "div" and differing == [eqn.invars[0]]):
            return _Rule(differing, equal)
        if name == "mul" and len(differing) == 2:
            return self._of_weights(*sorted(differing, key=_rank))
        if name == "dot_general" and len(set(operands)) == 2:
            if equal:
                return _Rule(differing, equal)
            alike = all(_dtype(v) == _dtype(eqn.outvars[0]) for v in differing)
            return _Rule(whole=differing, folds=True) if alike else None
        return None

    def _of_weights(self, number: Any, value: Any) -> _Rule | None:
        if _rank(number) or not _rank(value) or _dtype(number) != _dtype(value):
            return None
        return _Rule([value], [number], Factor(is_mask=False, variable=number))

    def _of_choice(self, eqn: JaxprEqn) -> _Rule | None:
        """Return a choice between zero and a value, for the element as a whole."""
        mask, *cases = eqn.invars
        if len(cases) != 2 or isinstance(mask, Literal) or mask not in self.varying or _rank(mask):
            return None
        nothing, value = cases
        if not self._is_zero(nothing) or isinstance(value, Literal) or value not in self.varying:
            return None
        if not _summable(value) or not _rank(value):
            return None
        return _Rule([value], [mask], Factor(is_mask=True, variable=mask))

    def _is_zero(self, atom: Any) -> bool:
        return bool(np.all(atom.val == 0)) if isinstance(atom, Literal) else atom in self._zeros


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _rank(var: Any) -> int:
    return len(var.aval.shape)


def _summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    dtype = _dtype(var)
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32


def _dtype(var: Any) -> Any:
    return var.aval.dtype


def _contract(eqn: JaxprEqn, left: jax.Array, right: jax.Array, *, merge: bool) -> jax.Array:
    """Return the product of two elements' values, summed over the elements."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    contracted = tuple((0, *(d + 1 for d in dims)) for dims in (lc, rc))
    batched = tuple(tuple(d + 1 for d in dims) for dims in (lb, rb))
    params = {**eqn.params, "dimension_numbers": (contracted, batched)}
    found = _merged(params, left, right) if merge else None
    return jax_api.bind(eqn, *(found or (params, [left, right])))[0]


def in_merged_products(fn: Callable[..., list[Any]], *args: Any) -> list[Any]:
    """``fn(*args)``, where products that are summed over two leading dimensions or more are summed over one.

    XLA's CPU products, of which only one dimension is contracted, else bring the second operand's to the end: a copy.
    """
    closed, _ = jax_api.trace(fn, [jax_api.typed_struct(x) for x in args], {})
    return _evaluated(closed, args)


def _evaluated(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    def special(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        if eqn.primitive.name == "dot_general":
            found = _merged(eqn.params, *operands)
            return None if found is None else jax_api.bind(eqn, *found)
        if eqn.primitive.name not in _ENTERED or not any(_has(sub, _PRODUCT) for sub in jax_api.subjaxprs(eqn)):
            return None
        return jax_api.bind(eqn, jax_api.map_jaxprs(eqn.params, changed), operands)

    def changed(body: ClosedJaxpr) -> ClosedJaxpr:
        return jax_api.trace(lambda *args: _evaluated(body, args), body.in_avals, {})[0]

    return jax_api.evaluate(closed, args, _is_call, special)


def _merged(params: dict[str, Any], left: jax.Array, right: jax.Array) -> tuple[dict[str, Any], list[jax.Array]] | None:
    """Parameters and operands of the same product, contracted along one dimension; ``None``: as it is."""
    (lc, rc), (batched, _) = params["dimension_numbers"]
    many = len(lc)
    if many < 2 or batched or tuple(lc) != tuple(range(many)) or tuple(rc) != tuple(lc):
        return None
    flat = [x.reshape(-1, *x.shape[many:]) for x in (left, right)]
    return {**params, "dimension_numbers": (((0,), (0,)), ((), ()))}, flat


def _is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and any(_has(sub, _PRODUCT) for sub in jax_api.subjaxprs(eqn))


def _has(jaxpr: jax_api.Jaxpr, names: frozenset[str]) -> bool:
    return any(
        eqn.primitive.name in names or any(_has(sub, names) for sub in jax_api.subjaxprs(eqn)) for eqn in jaxpr.eqns
    )


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function without the boundaries of inner ``jit`` calls that hold a product."""
    if not any(map(_is_call, closed.jaxpr.eqns)):
        return closed
    return jax_api.trace(lambda *args: jax_api.evaluate(closed, args, _is_call), closed.in_avals, {})[0]
