"""Sums over elements, taken in the products that end a function instead of after them: an optional pass.

Gradients of shared weights end in a product, ``inputs.T @ errors``, in which the elements' dimension is contracted.
JAX does it when it transposes: if ``L_i`` is linear, ``sum_i L_i(v_i)`` is the transpose of ``u -> (L_i^T u)_i``, which
``vmap`` runs with one ``u`` for all elements. What is linear as a whole, as transposes are, is transposed twice so. Of
another function it is done with products of two of the element's values, from which only linear steps lead to a result:
these steps are taken once, of the sums. A number or mask of the element's own that scales a result goes with the
product's argument: ``w_i L_i(v_i) = L_i(w_i v_i)``. What is not known here is computed, and then summed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from paraxis._core.pytrees import merged, taken

_LINEAR = {"neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy"}
_ADDING = {"add", "add_any", "sub"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}


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
    """Run a function of one element for ``count`` rows: where ``summed``, return the sum over ``real`` rows, else rows.

    Collectives call the rows ``axis_name``. Without ``contract``, sums are taken of results. To ``merge`` is to take
    elements and rows as one dimension of a product, which may not lie over devices.
    """
    body, shared, summed, linear = element
    if contract and any(linear) and any(summed):
        return _contracted(element, operands, real, count, merge, axis_name)
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
        body = jax_api.trace(functools.partial(_inlined, body), body.in_avals, {})[0]
    found = _End(body, shared, summed)
    return found if found.products else None


def _is_call(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and jax_api.holds(eqn.params["jaxpr"].jaxpr, *_PRODUCTS)


def _inlined(closed: ClosedJaxpr, *args: Any, bind: Callable[..., Sequence[Any]] = jax_api.bind) -> list[Any]:
    """Run a jaxpr equation by equation, and of a call that has products, the body."""
    values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, args, strict=True))
    values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        first, run = (eqn.params["jaxpr"], functools.partial(_inlined, bind=bind)) if _is_call(eqn) else (eqn, bind)
        values.update(zip(eqn.outvars, run(first, *_read(values, eqn.invars)), strict=True))
    return _read(values, closed.jaxpr.outvars)


def _read(values: Mapping[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else values[v] for v in atoms]


def _over_one(eqn: JaxprEqn, *operands: Any) -> Sequence[Any]:
    """Bind a product over several dimensions as one over one: XLA's CPU backend would copy an operand."""
    sides, batched = eqn.params["dimension_numbers"] if eqn.primitive.name == "dot_general" else ([()], [()])
    if len(sides[0]) > 1 and not batched[0]:
        ahead = [jnp.moveaxis(x, dims, range(len(dims))) for x, dims in zip(operands, sides, strict=True)]
        operands = tuple(x.reshape(-1, *x.shape[len(sides[0]) :]) for x in ahead)
        eqn = eqn.replace(params={**eqn.params, "dimension_numbers": (((0,), (0,)), ((), ()))})
    return jax_api.bind(eqn, *operands)


def _contracted(
    element: Element, operands: Sequence[Any], real: Any, count: int, merge: bool, axis_name: str | None = None
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
    closed = jax_api.trace(lambda *xs: back(list(xs)), moving, {})[0] if merge else None
    return list(back(moving)) if closed is None else _inlined(closed, *moving, bind=_over_one)


class _End:
    """The linear end of a function of one element: ``products`` and other ``leaves``, and ``steps`` from these to ends.

    ``ends`` are results, each with the value of which it is a multiple: numbers and masks of the element's own may
    ``scale`` it. The ``head``, the rest of the function, gives all that is ``read``.
    """

    def __init__(self, closed: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> None:
        jaxpr, self.outs = closed.jaxpr, [*zip(closed.jaxpr.outvars, summed, strict=True)]
        self.varying, self._made = differing(jaxpr, shared), {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        scaled = {v: self._unscaled(v) for v, s in self.outs if s and v in self.varying and _is_summable(v)}
        self.scale = max((scale for _, scale in scaled.values()), key=len, default=())  # a number has none
        self.ends = {v: value for v, (value, scale) in scaled.items() if scale == self.scale}
        self.products, self.steps, self.leaves = list[JaxprEqn](), list[JaxprEqn](), list[Any]()
        read = [*(number for number, _ in self.scale), *(v for v, s in self.outs if not s or v not in self.ends)]
        wanted, whole = set(self.ends.values()), set(read)
        for eqn in reversed(jaxpr.eqns):  # from the results back
            sought, variables = [v for v in eqn.outvars if v in wanted], _variables(eqn)
            is_whole = not whole.isdisjoint(eqn.outvars)  # computed for each element, whatever is summed
            kind = self._kind(eqn) if sought and not is_whole else None
            if kind == "step":
                self.steps.append(eqn)
                wanted.update(v for v in variables if v in self.varying)
                read += [v for v in variables if v not in self.varying]
                continue
            if kind == "product":
                self.products.append(eqn)
                read += variables
            else:
                self.leaves += sought
            if sought or is_whole:
                whole.update(variables)
        self.leaves += [v for v in jaxpr.invars if v in wanted]
        self.read = list(dict.fromkeys([*read, *self.leaves]))
        self.head = jax_api.dce(closed, self.read)[0]

    def sums(self, operands: Any, shared: Sequence[bool], real: Any, count: int, merge: bool) -> list[jax.Array]:
        own = [v not in self.varying for v in self.read]
        head = jax.vmap(jax_api.jaxpr_as_fun(self.head), _axes(shared), _axes(own), axis_size=count)
        rows = dict(zip(self.read, head(*operands), strict=True))

        def scaled(v: Any, scale: Sequence[Any]) -> jax.Array:
            x = rows[v]
            for number, is_mask in scale:
                x = _masked(rows[number], x) if is_mask else jax.vmap(jnp.multiply)(rows[number].astype(x.dtype), x)
            return _masked(real, x)

        totals = {v: rows[v] for v in self.read if v not in self.varying}
        totals |= {v: total(scaled(v, self.scale), None) for v in self.leaves}
        for eqn in self.products:
            known, moving = eqn.invars
            product, _ = jax_api.trace(functools.partial(jax_api.bind, eqn), [known.aval, moving.aval], {})
            args = scaled(known, [scale for scale in self.scale if scale[1]]), scaled(moving, self.scale)
            one = Element(product, [False, False], [True], [False, True])
            [totals[eqn.outvars[0]]] = _contracted(one, args, None, count, merge)
        for eqn in reversed(self.steps):
            [totals[eqn.outvars[0]]] = jax_api.bind(eqn, *_read(totals, eqn.invars))

        def result(v: Any, is_summed: bool) -> jax.Array:
            if is_summed and v in self.ends:
                return totals[self.ends[v]]
            x = rows[v] if v in self.varying else jnp.broadcast_to(rows[v], (count, *rows[v].shape))
            return total(x, real) if is_summed else x

        return [result(v, s) for v, s in self.outs]

    def _kind(self, eqn: JaxprEqn) -> str | None:
        """Return whether an equation is a product of two of the element's values, or a step, linear in all of them."""
        name, operands, variables = eqn.primitive.name, eqn.invars, _variables(eqn)
        differ = [v for v in variables if v in self.varying]
        dtypes: set[Any] = {getattr(v.aval, "dtype", None) for v in (*variables, *eqn.outvars)}
        if len(dtypes) > 1 or not all(map(_is_summable, eqn.outvars)):
            return None
        if name in _PRODUCTS:
            return "product" if len(differ) == 2 else "step"
        is_step = len(differ) == len(operands) if name in _ADDING else name in _LINEAR and len(variables) == 1
        is_multiple = len(differ) == 1 and (name == "mul" or (name == "div" and differ[0] is operands[0]))
        return "step" if is_step or is_multiple else None

    def _unscaled(self, value: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the value of which a result is a multiple, and what scales it, each with whether it is a mask."""
        eqn = self._made.get(value)
        if eqn is None or len(variables := [v for v in _variables(eqn) if v in self.varying]) != 2:
            return value, ()
        number, scaled = sorted(variables, key=lambda v: v.aval.ndim)
        other = getattr(self._before(eqn.invars[1], "broadcast_in_dim"), "val", 1)
        is_mask = eqn.primitive.name == "select_n" and eqn.invars[2:] == [scaled] and not np.any(other)
        is_weight = eqn.primitive.name == "mul" and number.aval.dtype == scaled.aval.dtype
        if number.aval.shape or not scaled.aval.shape or not _is_summable(scaled) or not (is_mask or is_weight):
            return value, ()
        value, scale = self._unscaled(scaled)
        return value, (*scale, (self._before(number, "convert_element_type"), is_mask))  # converted for each result

    def _before(self, atom: Any, name: str) -> Any:
        """Return what was given to the operation of this name that has made a value; if it was none, the value."""
        made = None if isinstance(atom, Literal) else self._made.get(atom)
        return made.invars[0] if made is not None and made.primitive.name == name else atom


def _axes(shared: Sequence[bool]) -> list[int | None]:
    return [None if is_shared else 0 for is_shared in shared]


def _masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Return rows with zeros where the mask is ``False``; no mask: as they are."""
    return rows if mask is None else jax.vmap(lambda real, y: jnp.where(real, y, 0))(mask, rows)


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _is_summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact) and jnp.finfo(var.aval.dtype).bits >= 32
