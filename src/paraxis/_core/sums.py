"""Sums over elements, taken in the products that end a function instead of after them: an optional pass.

Gradients of shared weights end in a product, ``inputs.T @ errors``, in which the elements' dimension is contracted.
JAX does it when it transposes: if ``L_i`` is linear, ``sum_i L_i(v_i)`` is the transpose of ``u -> (L_i^T u)_i``, which
``vmap`` runs with one ``u`` for all elements. So the linear end of a function, found from its results back to products
of two of the element's values, is transposed twice. A number or mask of the element's own that scales the end goes with
its argument: ``w_i L_i(v_i) = L_i(w_i v_i)``. What is not known here is computed, and then summed.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from paraxis._core.pytrees import merged, taken

_LINEAR = frozenset(
    ("neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy")
)
_ADDING = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))


class Element(NamedTuple):
    """A function of one element: which operands all share, which results are summed, in what it is linear, if it is."""

    body: ClosedJaxpr
    shared: Sequence[bool]
    summed: Sequence[bool]
    linear: Sequence[bool]


def differing(jaxpr: Jaxpr, shared: Sequence[bool]) -> set[Any]:
    """Return the variables that may differ between elements."""
    found = {v for v, is_shared in zip(jaxpr.invars, shared, strict=True) if not is_shared}
    for eqn in jaxpr.eqns:
        if eqn.effects or not found.isdisjoint(_variables(eqn)):
            found.update(eqn.outvars)
    return found


def total(rows: jax.Array, real: jax.Array | None) -> jax.Array:
    """Return the sum over rows, or over those that are real."""
    return jnp.sum(_masked(real, rows), axis=0, dtype=rows.dtype)


def over_elements(
    element: Element,
    operands: Sequence[jax.Array],
    real: jax.Array | None,
    count: int,
    axis_name: str | None = None,
    *,
    contract: bool = True,
    merge: bool = False,
) -> list[jax.Array]:
    """Run a function of one element for ``count`` rows: where ``summed``, return the sum over real rows, else rows.

    Operands are rows ``(count, ...)`` but for those ``shared``; ``real`` says which rows are elements, if not all;
    ``axis_name`` is what collectives call them. Without ``contract``, sums are taken of results. To ``merge`` is to
    contract elements and rows as one dimension, which may not lie over devices.
    """
    body, shared, summed, linear = element
    if contract and any(linear) and any(summed):
        return _contracted(element, operands, real, count, axis_name, merge)
    if contract and axis_name is None and (found := end(body, shared, summed)) is not None:
        return found.sums(operands, shared, real, count, merge)
    over = jax.vmap(jax_api.jaxpr_as_fun(body), _axes(shared), axis_name=axis_name, axis_size=count)
    return [total(y, real) if s else y for y, s in zip(over(*operands), summed, strict=True)]


def end(body: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> "_End | None":
    """Return the end of a function; ``None`` if no sum meets a product, so that there is nothing to gain."""
    is_known = jax_api.holds(body.jaxpr, *_PRODUCTS) and not jax_api.holds(body.jaxpr, "while", "scan")
    if not is_known or not any(summed) or any(isinstance(v, Literal) for v in body.jaxpr.outvars):
        return None
    if any(map(_is_call, body.jaxpr.eqns)):
        body = jax_api.trace(lambda *args, body=body: jax_api.evaluate(body, args, _is_call), body.in_avals, {})[0]
    found = _End(body, shared, summed)
    return found if found.has_product else None


def _is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and any(jax_api.holds(x, *_PRODUCTS) for x in jax_api.subjaxprs(eqn))


def _contracted(
    element: Element, operands: Sequence[Any], real: jax.Array | None, count: int, axis_name: str | None, merge: bool
) -> list[jax.Array]:
    """Transpose twice a function that is linear in some arguments, over all elements together the second time."""
    body, shared, summed, linear = element
    fn, known, is_shared = jax_api.jaxpr_as_fun(body), taken(operands, linear, False), taken(shared, linear)
    moving = [x if s else _masked(real, x) for x, s in zip(taken(operands, linear), is_shared, strict=True)]
    of_one = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in taken(body.in_avals, linear)]

    def transposed(known: list[Any], cts: list[Any]) -> list[Any]:
        return list(jax.linear_transpose(lambda *xs: fn(*merged(linear, xs, known)), *of_one)(cts))

    def together(*cts: Any) -> list[Any]:
        axes = _axes(taken(shared, linear, False)), _axes(summed)
        found = jax.vmap(transposed, axes, axis_name=axis_name, axis_size=count)(known, list(cts))
        return [total(y, real) if s else y for y, s in zip(found, is_shared, strict=True)]

    results = zip(body.out_avals, summed, strict=True)
    like = [jax.ShapeDtypeStruct(y.shape if s else (count, *y.shape), y.dtype) for y, s in results]
    back = jax.linear_transpose(together, *like)
    if not merge:
        return list(back(moving))
    closed = jax_api.trace(lambda *cts: back(list(cts)), moving, {})[0]
    return jax_api.evaluate(closed, moving, _is_call, jax_api.bind_over_one)


class _End:
    """The linear end of a function of one element: the ``tail``, linear in ``moving``, of what the ``head`` gives.

    ``ends`` are results, each with what the tail gives; ``masks`` and ``weights`` of the element's own scale that to
    make it.
    """

    def __init__(self, closed: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> None:
        jaxpr, self.summed, self.has_product = closed.jaxpr, summed, False
        self.outs, self.varying = jaxpr.outvars, differing(jaxpr, shared)
        self._made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        sums = [v for v, s in zip(self.outs, summed, strict=True) if s and v in self.varying and _is_summable(v)]
        scaled = {v: self._unscaled(v) for v in sums}
        factors = next((factors for _, *factors in scaled.values()), [(), ()])
        self.masks, self.weights = factors
        self.ends = {v: value for v, (value, *scale) in scaled.items() if scale == factors}
        wanted, moving, self.known = set(self.ends.values()), dict[Any, None](), dict[Any, Var]()
        whole = {*self.masks, *self.weights, *(v for v in self.outs if v not in self.ends)}
        given, steps = list(whole), list[JaxprEqn]()
        for eqn in reversed(jaxpr.eqns):  # from the results back
            sought = wanted.intersection(eqn.outvars)
            linear = self._linear(eqn) if sought and whole.isdisjoint(eqn.outvars) else None
            if linear is None:
                moving.update(dict.fromkeys(sought))
                if sought or not whole.isdisjoint(eqn.outvars):
                    whole.update(_variables(eqn))
                continue
            is_product = sum(v in self.varying for v in _variables(eqn)) > len(linear)
            self.has_product |= is_product
            invars = list(eqn.invars)
            for at, v in enumerate(eqn.invars):
                if at in linear and not is_product:
                    wanted.add(v)
                elif at in linear:
                    whole.add(v)
                    moving[v] = None
                elif not isinstance(v, Literal):
                    whole.add(v)
                    invars[at] = self.known.setdefault(v, Var(v.aval))  # another than the same one that moves
            steps.append(eqn.replace(invars=invars))
        self.moving = [*moving, *(v for v in jaxpr.invars if v in wanted and v not in moving)]
        self.given = list(dict.fromkeys([*self.moving, *self.known, *given]))
        self.head = jax_api.dce(closed, self.given)[0]
        invars, outvars = [*self.known.values(), *self.moving], [*self.ends.values()]
        info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        tail = jaxpr.replace(constvars=[], invars=invars, outvars=outvars, eqns=steps[::-1], debug_info=info)
        self.tail = ClosedJaxpr(tail.replace(effects=set()), ())

    def sums(
        self, operands: Sequence[Any], shared: Sequence[bool], real: Any, count: int, merge: bool
    ) -> list[jax.Array]:
        own = [v not in self.varying for v in self.given]
        head = jax.vmap(jax_api.jaxpr_as_fun(self.head), _axes(shared), _axes(own), axis_size=count)
        rows = dict(zip(self.given, head(*operands), strict=True))
        counted = [*(rows[v] for v in self.masks), *([] if real is None else [real])]

        def scaled(v: Any, weights: Sequence[Any]) -> jax.Array:
            x = rows[v]
            for weight in weights:
                x = x * _per_row(rows[weight], x).astype(x.dtype)
            return functools.reduce(lambda x, mask: _masked(mask, x), counted, x)

        args = [scaled(v, ()) if v in self.varying else rows[v] for v in self.known]
        args += [scaled(v, self.weights) for v in self.moving]
        sides = [*(v not in self.varying for v in self.known), *[False] * len(self.moving)]
        linear = [False] * len(self.known) + [True] * len(self.moving)
        tail = Element(self.tail, sides, [True] * len(self.ends), linear)
        found = dict(zip(self.ends, _contracted(tail, args, None, count, None, merge), strict=True))

        def result(v: Any, is_summed: bool) -> jax.Array:
            if v in found and is_summed:
                return found[v]
            x = rows[v] if v in self.varying else jnp.broadcast_to(rows[v], (count, *rows[v].shape))
            return total(x, real) if is_summed else x

        return [result(v, s) for v, s in zip(self.outs, self.summed, strict=True)]

    def _linear(self, eqn: JaxprEqn) -> Sequence[int] | None:
        """Return the positions of operands in which an equation is linear, the others known. ``None``: in none."""
        name, operands, variables = eqn.primitive.name, eqn.invars, _variables(eqn)
        differ = [at for at, v in enumerate(operands) if not isinstance(v, Literal) and v in self.varying]
        dtypes: set[Any] = {getattr(v.aval, "dtype", None) for v in (*variables, *eqn.outvars)}
        if len(dtypes) > 1 or not all(map(_is_summable, eqn.outvars)):
            return None
        is_sum = name in _ADDING and len(differ) == len(operands)
        if is_sum or (name in _LINEAR and len(differ) == len(variables) == 1):
            return differ
        if (name in ("mul", *_PRODUCTS) and len(differ) == 1) or (name == "div" and differ == [0]):
            return differ
        return [1] if name in _PRODUCTS and operands[0] is not operands[1] else None

    def _unscaled(self, value: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """Return the value of which a result is a multiple, and the masks and weights that scale it."""
        eqn = self._made.get(value)
        variables = [v for v in _variables(eqn) if v in self.varying] if eqn is not None else []
        if eqn is None or len(variables) != 2:
            return value, (), ()
        is_choice = eqn.primitive.name == "select_n" and len(eqn.invars) == 3
        number, scaled = variables if is_choice else sorted(variables, key=lambda v: v.aval.ndim)
        is_mask = is_choice and eqn.invars[2] is scaled and self._is_zero(eqn.invars[1])
        is_weight = eqn.primitive.name == "mul" and number.aval.dtype == scaled.aval.dtype
        if number.aval.shape or not scaled.aval.shape or not _is_summable(scaled) or not (is_mask or is_weight):
            return value, (), ()
        made = self._made.get(number)  # a weight is converted for each result
        number = made.invars[0] if made is not None and made.primitive.name == "convert_element_type" else number
        value, masks, weights = self._unscaled(scaled)
        return (value, (*masks, number), weights) if is_mask else (value, masks, (*weights, number))

    def _is_zero(self, atom: Any) -> bool:
        if isinstance(atom, Literal):
            return bool(np.all(atom.val == 0))
        made = self._made.get(atom)
        return made is not None and made.primitive.name == "broadcast_in_dim" and self._is_zero(made.invars[0])


def _axes(shared: Sequence[bool]) -> list[int | None]:
    return [None if is_shared else 0 for is_shared in shared]


def _per_row(values: jax.Array, rows: jax.Array) -> jax.Array:
    return values.reshape(values.shape + (1,) * (rows.ndim - 1))


def _masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Return rows with zeros where the mask is ``False``; no mask: as they are."""
    return rows if mask is None else jnp.where(_per_row(mask, rows), rows, jnp.zeros((), rows.dtype))


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _is_summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    dtype = var.aval.dtype
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
