"""Sums over elements, taken in the products that end a function instead of after them: an optional pass.

A gradient with respect to shared weights ends in a product, ``inputs.T @ errors``. Where only its sum over elements is
wanted, the elements' dimension can be contracted in that same product, which holds no gradient per element. JAX does it
by itself when it transposes: if ``L_i`` is linear, ``sum_i L_i(v_i)`` is the transpose of ``u -> (L_i^T u)_i``, which
``vmap`` runs with the one ``u`` for all elements. So a linear end of a function is transposed twice.

A map that is the transpose of another is linear as a whole. Of other functions, the end is found from the results back,
through linear operations, to products of two values of the element. A number or mask of the element's own that scales
it goes with its argument: ``w_i L_i(v_i) = L_i(w_i v_i)``. What is not known here is computed, and then summed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, JaxprEqn, Literal

_LINEAR = frozenset(
    ("neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy")
)
_ADDING = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))


def per_row(values: jax.Array, rows: jax.Array) -> jax.Array:
    return values.reshape(values.shape + (1,) * (rows.ndim - 1))


def masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Return rows with zeros where the mask is ``False``; no mask: as they are."""
    return rows if mask is None else jnp.where(per_row(mask, rows), rows, jnp.zeros((), rows.dtype))


def total(rows: jax.Array, real: jax.Array | None) -> jax.Array:
    """Return the sum over real rows."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.extended):  # PRNG keys have no sum
        return jnp.zeros(())
    return jnp.sum(masked(real, rows), axis=0, dtype=rows.dtype)


def over_elements(
    body: ClosedJaxpr,
    operands: Sequence[jax.Array],
    shared: Sequence[bool],
    summed: Sequence[bool],
    linear: Sequence[bool],
    real: jax.Array | None,
    count: int,
    axis_name: str | None = None,
    *,
    contract: bool = True,
) -> list[jax.Array]:
    """Run a function of one element for ``count`` rows: where ``summed``, return the sum over real rows, else rows.

    Operands are rows ``(count, ...)`` but for those that are ``shared``; ``linear`` are those in which the function is
    linear, if it is; ``real`` says which rows are elements, if not all; ``axis_name`` is what collectives call them.
    Without ``contract``, sums are taken of results.
    """
    fn, axes = jax_api.jaxpr_as_fun(body), _axes(shared)
    if contract and any(summed) and any(linear):
        args = [masked(real, x) if moves and not s else x for x, moves, s in zip(operands, linear, shared, strict=True)]
        return _contracted(fn, args, axes, linear, body.out_avals, summed, real, count, axis_name)
    end = _end(body, shared, summed) if contract and any(summed) and axis_name is None else None
    if end is not None:
        return end.sums(operands, axes, real, count)
    found = jax.vmap(fn, axes, axis_name=axis_name, axis_size=count)(*operands)
    return [total(y, real) if s else y for y, s in zip(found, summed, strict=True)]


def gains(body: ClosedJaxpr, shared: Sequence[bool]) -> bool:
    """Return whether sums of all results are taken in a product."""
    return _end(body, shared, [True] * len(body.out_avals)) is not None


def _end(body: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> "_End | None":
    """Return the end of a function; ``None`` if no sum meets a product, so that there is nothing to gain."""
    if not jax_api.holds(body.jaxpr, *_PRODUCTS) or jax_api.holds(body.jaxpr, "while", "scan"):
        return None
    if any(isinstance(v, Literal) for v in body.jaxpr.outvars):
        return None
    end = _End(_inlined(body), shared, summed)
    return end if end.has_product else None


def _axes(shared: Sequence[bool]) -> tuple[int | None, ...]:
    return tuple(None if is_shared else 0 for is_shared in shared)


def _contracted(
    fn: Callable[..., Sequence[Any]],
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    linear: Sequence[bool],
    results: Sequence[Any],
    summed: Sequence[bool],
    real: jax.Array | None,
    count: int,
    axis_name: str | None = None,
) -> list[jax.Array]:
    """Transpose twice a function that is linear in some arguments, over all elements together the second time."""
    sides = list(zip(args, axes, linear, strict=True))
    known, moving = [(x, at) for x, at, m in sides if not m], [(x, at) for x, at, m in sides if m]
    of_one = [_struct(x.shape if at is None else x.shape[1:], x) for x, at in moving]

    def transposed(known: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        def forward(*moving: Any) -> list[Any]:
            given, ours = iter(known), iter(moving)
            return list(fn(*(next(ours if moves else given) for moves in linear)))

        return list(jax.linear_transpose(forward, *of_one)(list(cts)))

    def together(*cts: Any) -> list[Any]:
        in_axes = [at for _, at in known], [*_axes(summed)]
        found = jax.vmap(transposed, in_axes, axis_name=axis_name, axis_size=count)([x for x, _ in known], list(cts))
        return [total(y, real) if at is None else y for y, (_, at) in zip(found, moving, strict=True)]

    like = [_struct(y.shape if s else (count, *y.shape), y) for y, s in zip(results, summed, strict=True)]
    return list(jax.linear_transpose(together, *like)([x for x, _ in moving]))


def _struct(shape: tuple[int, ...], like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, like.dtype)


class _Factor(NamedTuple):
    """A number of the element's own: a weight, or a mask, where ``False`` means zero whatever else there is."""

    is_mask: bool
    variable: Any


class _End:
    """The linear end of a function of one element; the ``head`` before it gives what the end is made of.

    Attributes:
        ends: the results that the end gives, each with the value that the ``factors`` scale to make it.
        steps: its equations, the last one first, with the positions of operands in which they are linear.
        moving, known: the values of the head in which the end is linear, and others that it reads.
    """

    def __init__(self, closed: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> None:
        jaxpr = closed.jaxpr
        self.outs, self.summed, self.has_product = jaxpr.outvars, summed, False
        self.varying = {v for v, s in zip(jaxpr.invars, shared, strict=True) if not s}
        for eqn in jaxpr.eqns:
            if any(v in self.varying for v in _variables(eqn)):
                self.varying.update(eqn.outvars)
        self._made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.factors, self.ends = self._ends()
        self.steps: list[tuple[JaxprEqn, Sequence[int]]] = []
        self.moving: dict[Any, None] = {}
        self.known: dict[Any, None] = {}
        wanted = set(self.ends.values())
        whole = {v for v in self.outs if v not in self.ends} | {factor.variable for factor in self.factors}
        given, eqns = list(whole), list[JaxprEqn]()
        for eqn in reversed(jaxpr.eqns):  # from the results back
            sought = wanted.intersection(eqn.outvars)
            linear = self._linear(eqn) if sought and whole.isdisjoint(eqn.outvars) else None
            if linear is None:
                self.moving.update(dict.fromkeys(sought))
                if sought or not whole.isdisjoint(eqn.outvars):
                    whole.update(_variables(eqn))
                    eqns.append(eqn)
                continue
            self.steps.append((eqn, linear))
            is_product = sum(v in self.varying for v in _variables(eqn)) > len(linear)
            self.has_product |= is_product
            for at, v in enumerate(eqn.invars):
                if at in linear and not is_product:
                    wanted.add(v)
                elif not isinstance(v, Literal):
                    whole.add(v)
                    (self.moving if at in linear else self.known)[v] = None
        self.moving.update((v, None) for v in jaxpr.invars if v in wanted)
        self.given = list(dict.fromkeys([*self.moving, *self.known, *given]))
        self.head = jax_api.rebuilt(closed, eqns[::-1], self.given)

    def _ends(self) -> tuple[tuple[_Factor, ...], dict[Any, Any]]:
        """Return the numbers that scale the first result that is summed, and the results that the same ones scale."""
        found: dict[Any, tuple[tuple[_Factor, ...], Any]] = {}
        for v, is_summed in zip(self.outs, self.summed, strict=True):
            if is_summed and v in self.varying and _is_summable(v):
                value, factors = v, ()
                while (eqn := self._made.get(value)) is not None and (scaled := self._scaled(eqn)) is not None:
                    value, factors = scaled[0], (*factors, scaled[1])
                found[v] = factors, value
        first = next((factors for factors, _ in found.values()), ())
        return first, {v: value for v, (factors, value) in found.items() if factors == first}

    def sums(
        self, operands: Sequence[jax.Array], axes: Sequence[int | None], real: jax.Array | None, count: int
    ) -> list[jax.Array]:
        out_axes = [0 if v in self.varying else None for v in self.given]
        head = jax.vmap(jax_api.jaxpr_as_fun(self.head), axes, out_axes, axis_size=count)
        rows = dict(zip(self.given, head(*operands), strict=True))

        def scaled(v: Any, factors: Sequence[_Factor]) -> jax.Array:
            x = rows[v]
            for is_mask, variable in reversed(factors) if v in self.varying else ():
                x = masked(rows[variable], x) if is_mask else x * per_row(rows[variable], x)
            return masked(real, x) if v in self.varying else x

        def end(*args: Any) -> list[Any]:
            known = dict(zip(self.known, args, strict=False))
            values = dict(zip(self.moving, args[len(known) :], strict=True))
            for eqn, linear in reversed(self.steps):
                read = (
                    v.val if isinstance(v, Literal) else values[v] if at in linear else known[v]
                    for at, v in enumerate(eqn.invars)
                )
                (values[eqn.outvars[0]],) = jax_api.bind(eqn, eqn.params, list(read))
            return [values[v] for v in self.ends.values()]

        masks = [factor for factor in self.factors if factor.is_mask]
        args = [*(scaled(v, masks) for v in self.known), *(scaled(v, self.factors) for v in self.moving)]
        in_axes = [*(0 if v in self.varying else None for v in self.known), *[0] * len(self.moving)]
        linear = [False] * len(self.known) + [True] * len(self.moving)
        avals, every = [v.aval for v in self.ends.values()], [True] * len(self.ends)
        found = dict(zip(self.ends, _contracted(end, args, in_axes, linear, avals, every, real, count), strict=True))

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
        if name in _LINEAR and len(differ) == len(variables) == 1:
            return differ
        if name in _ADDING and len(differ) == len(operands):
            return differ
        if (name in ("mul", *_PRODUCTS) and len(differ) == 1) or (name == "div" and differ == [0]):
            return differ
        return [1] if name in _PRODUCTS and operands[0] is not operands[1] else None

    def _scaled(self, eqn: JaxprEqn) -> tuple[Any, _Factor] | None:
        """Return the value that an equation scales, and by what; ``None`` if it does something else."""
        variables = [v for v in _variables(eqn) if v in self.varying]
        if len(variables) != 2:
            return None
        number, value = variables if eqn.primitive.name == "select_n" else sorted(variables, key=lambda v: v.aval.ndim)
        if number.aval.shape or not value.aval.shape or not _is_summable(value):
            return None
        if eqn.primitive.name == "mul" and number.aval.dtype == value.aval.dtype:
            return value, _Factor(is_mask=False, variable=number)
        is_mask = eqn.primitive.name == "select_n" and len(eqn.invars) == 3 and eqn.invars[2] is value
        return (value, _Factor(is_mask=True, variable=number)) if is_mask and self._is_zero(eqn.invars[1]) else None

    def _is_zero(self, atom: Any) -> bool:
        if isinstance(atom, Literal):
            return bool(np.all(atom.val == 0))
        eqn = self._made.get(atom)
        return (
            eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "reshard") and self._is_zero(eqn.invars[0])
        )


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _is_summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    dtype = var.aval.dtype
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function without the boundaries of inner ``jit`` calls that hold a product."""

    def is_call(eqn: JaxprEqn) -> bool:
        held = (jax_api.holds(sub, *_PRODUCTS) for sub in jax_api.subjaxprs(eqn))
        return eqn.primitive.name in ("jit", "pjit") and any(held)

    if not any(map(is_call, closed.jaxpr.eqns)):
        return closed
    return jax_api.trace(lambda *args: jax_api.evaluate(closed, args, is_call), closed.in_avals, {})[0]
