"""Sums over elements, taken in the products that end a function instead of after them: an optional pass.

Gradients of shared weights end in a product, ``inputs.T @ errors``, in which the elements' dimension is contracted.
JAX does it when it transposes: if ``L_i`` is linear, ``sum_i L_i(v_i)`` is the transpose of ``u -> (L_i^T u)_i``, which
``vmap`` runs with one ``u`` for all elements. What is linear as a whole, as transposes are, is transposed twice so. Of
another function it is done with products of two of the element's values, from which only linear steps lead to a result:
these steps are taken once, of the sums. A number or mask of the element's own that scales a result goes with the
product's argument: ``w_i L_i(v_i) = L_i(w_i v_i)``. What is not known here is computed, and then summed.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from paraxis._core.pytrees import interleave, select
from paraxis._core.record import Map, OperandMask, ResultMask

_LINEAR = {"neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy"}
_ADDING = {"add", "add_any", "sub"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_has_product = functools.partial(jax_api.is_jit_with, names=_PRODUCTS)


def varying(jaxpr: Jaxpr, shared: OperandMask) -> set[Any]:
    """Return the variables that may differ between elements."""
    variables = set(select(jaxpr.invars, shared, False))
    for eqn in jaxpr.eqns:
        if eqn.effects or not variables.isdisjoint(_variables(eqn)):
            variables.update(eqn.outvars)
    return variables


def wide(dtype: Any) -> Any:
    """Return the dtype in which values are added: half precision, and less, in single."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if is_narrow else dtype


def of_rows(rows: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """``(n, ...)`` → ``(...)``: the sum over rows, or over those that are real, of the dtype to add in."""
    return jnp.sum(_masked(real, rows), axis=0, dtype=wide(rows.dtype))


def over_elements(
    m: Map, operands: Sequence[Any], real: jax.Array | None, count: int, axis: str | None = None, merge: bool = False
) -> list[jax.Array]:
    """Run a function of one element for ``count`` rows: where ``summed``, return the sum over ``real`` rows, else rows.

    Collectives call the rows ``axis``. To ``merge`` is to take elements and rows as one dimension of a product,
    which may not lie over devices. Operands ``(count, ...)``, or ``(...)`` if shared; results ``(count, ...)``, or
    sums ``(...)`` of a dtype to add in.
    """
    operands = [x[0] if a else x for x, a in zip(operands, m.alike, strict=True)]
    m = m._replace(shared=[s or a for s, a in zip(m.shared, m.alike, strict=True)], alike=[False] * len(m.alike))
    if any(m.linear) and any(m.summed):
        return _contracted(m, operands, real, count, merge, axis)
    if axis is None and (ending := split(m.body, m.shared, m.summed)) is not None:
        return _run(ending, m, operands, real, count, merge)
    over = jax.vmap(jax_api.jaxpr_as_fun(m.body), _axes(m.shared), axis_name=axis, axis_size=count)
    return [of_rows(y, real) if s else y for y, s in zip(over(*operands), m.summed, strict=True)]


def _contracted(
    m: Map, operands: Sequence[Any], real: Any, count: int, merge: bool, axis_name: str | None = None
) -> list[jax.Array]:
    """Transpose a function twice, the second time over all elements; shapes are those of :func:`over_elements`."""
    fn, known, is_shared = jax_api.jaxpr_as_fun(m.body), select(operands, m.linear, False), select(m.shared, m.linear)
    moving = [x if s else _masked(real, x) for x, s in zip(select(operands, m.linear), is_shared, strict=True)]
    of_one = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in select(m.body.in_avals, m.linear)]

    def transposed(known: list[Any], cts: list[Any]) -> list[Any]:
        return list(jax.linear_transpose(lambda *xs: fn(*interleave(m.linear, xs, known)), *of_one)(cts))

    def together(*cts: Any) -> list[Any]:
        axes = _axes(select(m.shared, m.linear, False)), _axes(m.summed)
        rows = jax.vmap(transposed, axes, axis_name=axis_name, axis_size=count)(known, list(cts))
        return [jnp.sum(_masked(real, y), 0, dtype=y.dtype) if s else y for y, s in zip(rows, is_shared, strict=True)]

    results = zip(m.body.out_avals, m.summed, strict=True)
    like = [jax.ShapeDtypeStruct(y.shape if s else (count, *y.shape), y.dtype) for y, s in results]
    back = jax.linear_transpose(together, *like)
    closed = jax_api.trace(lambda *xs: back(list(xs)), moving, {})[0] if merge else None
    outs = back(moving) if closed is None else jax_api.evaluate(closed, *moving, opens=_has_product, apply=_over_one)
    return [y.astype(wide(y.dtype)) if s else y for y, s in zip(outs, m.summed, strict=True)]


def _over_one(eqn: JaxprEqn, *operands: Any) -> Sequence[Any]:
    """Bind a product over several dimensions as one over one: XLA's CPU backend, to jaxlib 0.12, copies."""
    contracted, batched = eqn.params["dimension_numbers"] if eqn.primitive.name == "dot_general" else ([()], [()])
    if (count := len(contracted[0])) > 1 and not batched[0]:
        first = [jnp.moveaxis(x, dims, range(count)) for x, dims in zip(operands, contracted, strict=True)]
        operands = tuple(x.reshape(-1, *x.shape[count:]) for x in first)
        eqn = eqn.replace(params={**eqn.params, "dimension_numbers": (((0,), (0,)), ((), ()))})
    return jax_api.bind(eqn, *operands)


# --- the linear end of a function --------------------------------------------------------------------------------

Scale = Sequence[tuple[Any, bool]]
"""Numbers of an element that scale its values: the variable of each, and whether it is a mask."""


class Ending(NamedTuple):
    """A function of one element, split into its head and its linear end, which is run once, of sums.

    Attributes:
        head: the jaxpr of one element that returns what the end, or the caller, reads.
        varying: the variables that may differ between elements.
        scale: what scales all values of the end: it is taken to the products' arguments, and to the leaves.
        leaves: variables that are summed as they are.
        products: equations of two of the element's values, of which the sum is one product.
        steps: equations that are linear in what differs, in the order in which they run on sums.
        results: the variables of the results; ``totals``: those whose totals they are; ``None``: it is computed for
            each element.
    """

    head: ClosedJaxpr
    varying: set[Any]
    scale: Scale
    leaves: Sequence[Any]
    products: Sequence[JaxprEqn]
    steps: Sequence[JaxprEqn]
    results: Sequence[Any]
    totals: Sequence[Any]


def split(body: ClosedJaxpr, shared: OperandMask, summed: ResultMask) -> Ending | None:
    """Return the end of a function; ``None`` if no sum meets a product, so that there is nothing to gain."""
    is_known = jax_api.holds(body.jaxpr, *_PRODUCTS) and not jax_api.holds(body.jaxpr, "while", "scan")
    if not is_known or not any(summed):
        return None
    if any(map(_has_product, body.jaxpr.eqns)):
        body = jax_api.trace(functools.partial(jax_api.evaluate, body, opens=_has_product), body.in_avals, {})[0]
    jaxpr = body.jaxpr
    if any(isinstance(v, Literal) for v in jaxpr.outvars):
        return None
    differ, source = varying(jaxpr, shared), {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    sums = [v for v, s in zip(jaxpr.outvars, summed, strict=True) if s and v in differ and _is_summable(v)]
    multiples = {v: _unscaled(v, differ, source) for v in sums}
    scale: Scale = max((scale for _, scale in multiples.values()), key=len, default=())  # a number has none
    ends = {v: value for v, (value, numbers) in multiples.items() if numbers == scale}
    totals = [ends.get(v) if s else None for v, s in zip(jaxpr.outvars, summed, strict=True)]
    rows = [v for v, total in zip(jaxpr.outvars, totals, strict=True) if total is None]
    return _walked_back(body, differ, scale, rows, totals)


def _walked_back(
    body: ClosedJaxpr, differ: set[Any], scale: Scale, rows: Sequence[Any], totals: Sequence[Any]
) -> Ending | None:
    """Find products, steps and leaves, from the results back; ``rows`` are computed for each element."""
    products, steps, leaves = list[JaxprEqn](), list[JaxprEqn](), list[Any]()
    read = [*(number for number, _ in scale), *rows]
    wanted, whole = {v for v in totals if v is not None}, set(read)
    for eqn in reversed(body.jaxpr.eqns):
        sought, variables = [v for v in eqn.outvars if v in wanted], _variables(eqn)
        is_whole = not whole.isdisjoint(eqn.outvars)  # computed for each element, whatever is summed
        kind = _kind(eqn, differ) if sought and not is_whole else None
        if kind == "step":
            steps.append(eqn)
            wanted.update(v for v in variables if v in differ)
            read += [v for v in variables if v not in differ]
            continue
        if kind == "product":
            products.append(eqn)
            read += variables
        else:
            leaves += sought
        if sought or is_whole:
            whole.update(variables)
    if not products:
        return None
    leaves += [v for v in body.jaxpr.invars if v in wanted]
    head = jax_api.dce(body, dict.fromkeys([*read, *leaves]))[0]
    return Ending(head, differ, scale, leaves, products, steps[::-1], body.jaxpr.outvars, totals)


def _run(ending: Ending, m: Map, operands: Any, real: Any, count: int, merge: bool) -> list[jax.Array]:
    """Run the head for ``count`` elements, and the end of their sums; shapes are those of :func:`over_elements`."""
    read = ending.head.jaxpr.outvars
    alike = [v not in ending.varying for v in read]
    head = jax.vmap(jax_api.jaxpr_as_fun(ending.head), _axes(m.shared), _axes(alike), axis_size=count)
    rows = dict[Any, jax.Array](zip(read, head(*operands), strict=True))

    def scaled(v: Any, scale: Scale) -> jax.Array:
        x = rows[v]
        for number, is_mask in scale:
            x = _masked(rows[number], x) if is_mask else jax.vmap(jnp.multiply)(rows[number].astype(x.dtype), x)
        return _masked(real, x)

    totals = {v: rows[v] for v, same in zip(read, alike, strict=True) if same}
    totals |= {v: of_rows(scaled(v, ending.scale)) for v in ending.leaves}
    for eqn in ending.products:
        known, moving = eqn.invars
        product, _ = jax_api.trace(functools.partial(jax_api.bind, eqn), [known.aval, moving.aval], {})
        args = scaled(known, [scale for scale in ending.scale if scale[1]]), scaled(moving, ending.scale)
        masks = {"shared": [False, False], "alike": [False, False], "linear": [False, True]}
        one = m._replace(body=product, summed=[True], **masks)
        [totals[eqn.outvars[0]]] = _contracted(one, args, None, count, merge)
    for eqn in ending.steps:
        operands = [v.val if isinstance(v, Literal) else totals[v] for v in eqn.invars]
        [totals[eqn.outvars[0]]] = jax_api.bind(eqn, *operands)

    def result(v: Any, is_summed: bool, total: Any) -> jax.Array:
        if total is not None:
            return totals[total]
        x = rows[v] if v in ending.varying else jnp.broadcast_to(rows[v], (count, *rows[v].shape))
        return of_rows(x, real) if is_summed else x

    return [result(*each) for each in zip(ending.results, m.summed, ending.totals, strict=True)]


def _kind(eqn: JaxprEqn, differ: set[Any]) -> str | None:
    """Return whether an equation is a product of two of the element's values, or a step, linear in all of them."""
    name, operands, variables = eqn.primitive.name, eqn.invars, _variables(eqn)
    differing = [v for v in variables if v in differ]
    dtypes: set[Any] = {getattr(v.aval, "dtype", None) for v in (*variables, *eqn.outvars)}
    if len(dtypes) > 1 or not all(map(_is_summable, eqn.outvars)):
        return None
    if name in _PRODUCTS:
        return "product" if len(differing) == 2 else "step"
    is_step = len(differing) == len(operands) if name in _ADDING else name in _LINEAR and len(variables) == 1
    is_multiple = len(differing) == 1 and (name == "mul" or (name == "div" and differing[0] is operands[0]))
    return "step" if is_step or is_multiple else None


def _unscaled(value: Any, differ: set[Any], source: Mapping[Any, JaxprEqn]) -> tuple[Any, Scale]:
    """Return the value of which a result is a multiple, and what scales it; ``source``: each variable's equation."""
    eqn = source.get(value)
    if eqn is None or len(variables := [v for v in _variables(eqn) if v in differ]) != 2:
        return value, ()
    number, scaled = sorted(variables, key=lambda v: v.aval.ndim)
    other = getattr(_before(eqn.invars[1], "broadcast_in_dim", source), "val", 1)
    is_mask = eqn.primitive.name == "select_n" and eqn.invars[2:] == [scaled] and not np.any(other)
    is_weight = eqn.primitive.name == "mul" and number.aval.dtype == scaled.aval.dtype
    if number.aval.shape or not scaled.aval.shape or not _is_summable(scaled) or not (is_mask or is_weight):
        return value, ()
    value, scale = _unscaled(scaled, differ, source)
    return value, (*scale, (_before(number, "convert_element_type", source), is_mask))  # converted for each result


def _before(atom: Any, name: str, source: Mapping[Any, JaxprEqn]) -> Any:
    """Return the operand of the operation of this name that computes a value; if another does, the value."""
    eqn = None if isinstance(atom, Literal) else source.get(atom)
    return eqn.invars[0] if eqn is not None and eqn.primitive.name == name else atom


def _axes(shared: Sequence[bool]) -> list[int | None]:
    return [None if is_shared else 0 for is_shared in shared]


def _masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Rows ``(n, ...)`` with zeros where the mask ``(n,)`` is ``False``; no mask: as they are."""
    return rows if mask is None else jax.vmap(lambda real, y: jnp.where(real, y, jnp.zeros_like(y)))(mask, rows)


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _is_summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact) and jnp.finfo(var.aval.dtype).bits >= 32
